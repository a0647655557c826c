package simulate

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	objectref "k8s.io/client-go/tools/reference"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// recorder writes events at once. client-go's broadcaster counts, aggregates and drops the same, but writes them later,
// one after another: on a busy machine so late that what CDI reads back of them is another event.
type recorder struct {
	client     client.Writer
	log        logr.Logger
	source     corev1.EventSource
	correlator *record.EventCorrelator
}

func newRecorder(c client.Writer, log logr.Logger, component string) record.EventRecorder {
	return &recorder{client: c, log: log, source: corev1.EventSource{Component: component}, correlator: record.NewEventCorrelator(clock.RealClock{})}
}

// Event implements record.EventRecorder.
func (r *recorder) Event(about runtime.Object, kind, reason, message string) {
	r.AnnotatedEventf(about, nil, kind, reason, "%s", message)
}

// Eventf implements record.EventRecorder.
func (r *recorder) Eventf(about runtime.Object, kind, reason, format string, args ...any) {
	r.AnnotatedEventf(about, nil, kind, reason, format, args...)
}

// AnnotatedEventf implements record.EventRecorder.
func (r *recorder) AnnotatedEventf(about runtime.Object, annotations map[string]string, kind, reason, format string, args ...any) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ref, err := objectref.GetReference(scheme, about)
	if err != nil {
		r.log.Error(err, "event about no object", "reason", reason)
		return
	}
	now := metav1.Now()
	result, err := r.correlator.EventCorrelate(&corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: orElse(ref.Namespace, metav1.NamespaceDefault), Annotations: annotations,
			Name: fmt.Sprintf("%s.%x", ref.Name, now.UnixNano())},
		InvolvedObject: *ref, Type: kind, Reason: reason, Message: fmt.Sprintf(format, args...), Source: r.source,
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	})
	if err == nil && !result.Skip {
		err = r.write(ctx, result)
	}
	if err != nil { // its namespace may be on the way out
		r.log.Info("event not written", "reason", reason, "error", err.Error())
	}
}

// write stores an event, or counts the one that is there.
func (r *recorder) write(ctx context.Context, result *record.EventCorrelateResult) error {
	event, fresh := result.Event, result.Event.Count == 1
	if !fresh {
		err := r.client.Patch(ctx, event, client.RawPatch(types.StrategicMergePatchType, result.Patch))
		if fresh = apierrors.IsNotFound(err); err != nil && !fresh {
			return err
		}
	}
	if fresh { // or expired
		event.ResourceVersion = ""
		if err := r.client.Create(ctx, event); client.IgnoreAlreadyExists(err) != nil {
			return err
		}
	}
	r.correlator.UpdateState(event)
	return nil
}
