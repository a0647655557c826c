package simulate

import (
	"fmt"
	"slices"
	"testing"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func TestRecorder(t *testing.T) {
	c := fake.NewClientBuilder().WithScheme(scheme).Build()
	r := newRecorder(c, testr.New(t), clonePopulator)
	said := func() []string {
		var events corev1.EventList
		if err := c.List(t.Context(), &events); err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, e := range events.Items {
			if e.Source.Component != clonePopulator || e.Namespace != e.InvolvedObject.Namespace {
				t.Errorf("event %+v", e)
			}
			list = append(list, fmt.Sprintf("%s/%s %s %s x%d: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Type, e.Reason, e.Count, e.Message))
		}
		slices.Sort(list)
		return list
	}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "disk", UID: "1"}}
	for range 3 {
		r.Event(claim, corev1.EventTypeWarning, "CloneSourceInUse", "100% in use")
	}
	if got := said(); !slices.Equal(got, []string{"PersistentVolumeClaim/disk Warning CloneSourceInUse x3: 100% in use"}) {
		t.Fatalf("the same event thrice: %q", got)
	}
	volume := object(dataVolumeKind)
	volume.SetNamespace("tenant")
	volume.SetName("disk")
	volume.SetUID("2")
	for i := range 40 { // of one reason the ones after the ninth are one event, and there are no more than 25
		r.Eventf(volume, corev1.EventTypeNormal, "Pending", "try %d", i)
	}
	got := said()
	if len(got) != 11 || got[0] != "DataVolume/disk Normal Pending x16: (combined from similar events): try 24" || got[1] != "DataVolume/disk Normal Pending x1: try 0" {
		t.Errorf("forty events of one reason: %q", got)
	}
}
