package history

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// SettleOptions say what "settled" means.
type SettleOptions struct {
	Recorder  *Recorder
	Converged func(context.Context) (waiting []string, err error) // nil: not asked
	Busy      func(context.Context) (busy []string, err error)    // controllers with work left; nil: not asked
	Ignore    func(Ref) bool                                      // objects that may keep moving, see IgnoreReleases
	Quiet     time.Duration                                       // no write to a recorded kind for this long; longer than the shortest requeue of a controller
	Bound     time.Duration                                       // then the cluster counts as not settled
	Progress  func(waited time.Duration, waiting []string)        // told about once a second; may be nil
}

// Settle waits until the cluster has come to rest and records the result: Converged waits for nothing, no controller is
// busy and no recorded object was written for Quiet, all three at once. After Bound the settlement says what was still
// moving; that is no error. An error means that ctx ended.
func Settle(ctx context.Context, o SettleOptions) (*Settlement, error) {
	begun := time.Now()
	s := &Settlement{Quiet: o.Quiet.Seconds()}
	bounded, cancel := context.WithTimeout(ctx, o.Bound)
	defer cancel()
	err := wait.PollUntilContextCancel(bounded, max(50*time.Millisecond, min(time.Second, o.Quiet)), true, func(ctx context.Context) (bool, error) {
		waiting := o.Moving(ctx, begun)
		if ctx.Err() != nil && s.Waiting != nil {
			return false, nil // what the bound interrupted says less than what was seen before
		}
		s.Waiting = waiting
		if o.Progress != nil {
			o.Progress(time.Since(begun), waiting)
		}
		return len(waiting) == 0, nil
	})
	s.Time, s.OK = time.Now(), err == nil
	s.Seconds = s.Time.Sub(begun).Seconds()
	if ctx.Err() != nil {
		return s, fmt.Errorf("settle: %w, still waiting for %s", ctx.Err(), strings.Join(s.Waiting, "; "))
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return s, fmt.Errorf("settle: %w", err)
	}
	o.Recorder.file.add(line{Settlement: s})
	return s, o.Recorder.file.sync()
}

// Moving is what keeps the cluster from being at rest now, in words; begun is when one began to ask.
func (o SettleOptions) Moving(ctx context.Context, begun time.Time) []string {
	var out []string
	ask := func(what string, f func(context.Context) ([]string, error)) {
		if f == nil {
			return
		}
		names, err := f(ctx)
		if err != nil {
			names = append(names, fmt.Sprintf("%s cannot be told: %v", what, err))
		}
		out = append(out, names...)
	}
	ask("convergence", o.Converged)
	ask("controllers' work", o.Busy)
	// Last, so that a write during the questions counts. Quiet before begun proves nothing: nobody may have started yet.
	ref, at := o.Recorder.LastWrite(o.Ignore)
	if at.Before(begun) {
		ref, at = Ref{}, begun
	}
	if quiet := time.Since(at); quiet < o.Quiet {
		what := "nothing yet"
		if ref.Name != "" {
			what = fmt.Sprintf("%s %s/%s", ref.Resource, ref.Namespace, ref.Name)
		}
		out = append(out, fmt.Sprintf("%s without a write (last: %s, %s ago)", o.Quiet, what, quiet.Round(100*time.Millisecond)))
	}
	return out
}

// IgnoreReleases makes an Ignore for releases that may stay failed: Flux retries them for ever and writes their
// HelmRelease and their release Secrets each time.
func IgnoreReleases(allowed func(namespace, name string) bool) func(Ref) bool {
	return func(r Ref) bool {
		if allowed == nil {
			return false
		}
		switch r.Resource {
		case "helmreleases.helm.toolkit.fluxcd.io":
			return allowed(r.Namespace, r.Name)
		case "secrets":
			name := strings.TrimPrefix(r.Name, releaseSecret)
			if i := strings.LastIndex(name, ".v"); i > 0 {
				return allowed(r.Namespace, name[:i])
			}
		}
		return false
	}
}
