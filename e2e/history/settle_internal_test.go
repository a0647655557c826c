package history

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

func TestSettleWaitsForAllThreeAtOnce(t *testing.T) { synctest.Test(t, settleWaitsForAllThreeAtOnce) }

func settleWaitsForAllThreeAtOnce(t *testing.T) {
	s := &server{}
	r, out := s.record(t, "")
	calls := 0
	var told [][]string
	got, err := Settle(t.Context(), SettleOptions{
		Recorder: r, Quiet: 100 * time.Millisecond, Bound: 10 * time.Second,
		Converged: func(context.Context) ([]string, error) {
			if calls++; calls < 3 {
				return []string{"HelmRelease t/r"}, nil
			}
			return nil, nil
		},
		Busy: func(context.Context) ([]string, error) {
			switch calls {
			case 3:
				return []string{"capi-manager"}, nil
			case 4:
				return nil, errors.New("metrics are down")
			case 5:
				s.change(watch.Added, "late", "late")
				eventually(t, "late write", func() bool { ref, _ := r.LastWrite(nil); return ref.Name == "late" })
			}
			return nil, nil
		},
		Progress: func(_ time.Duration, waiting []string) { told = append(told, waiting) },
	})
	if err != nil || !got.OK || len(got.Waiting) != 0 {
		t.Fatalf("settlement %+v, error %v", got, err)
	}
	for i, want := range []string{"HelmRelease t/r", "HelmRelease t/r", "capi-manager", "controllers' work cannot be told: metrics are down", "100ms without a write (last: machines.cluster.x-k8s.io t/late"} {
		if !slices.ContainsFunc(told[i], func(s string) bool { return strings.HasPrefix(s, want) }) {
			t.Errorf("pass %d waited for %q, want %q among it", i, told[i], want)
		}
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, err := Read(out)
	if err != nil || h.Settlement == nil || !h.Settlement.OK {
		t.Errorf("recorded settlement %+v, error %v", h.Settlement, err)
	}
}

func TestSettleSaysWhatWasStillMovingAtTheBound(t *testing.T) {
	synctest.Test(t, settleSaysWhatWasStillMovingAtTheBound)
}

func settleSaysWhatWasStillMovingAtTheBound(t *testing.T) {
	s := &server{}
	r, _ := s.record(t, "")
	s.change(watch.Added, "a", "a")
	o := SettleOptions{Recorder: r, Quiet: time.Minute, Bound: 120 * time.Millisecond}
	got, err := Settle(t.Context(), o)
	if err != nil || got.OK || len(got.Waiting) != 1 || !strings.Contains(got.Waiting[0], "1m0s without a write") {
		t.Errorf("settlement %+v, error %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := Settle(ctx, o); err == nil || got.OK {
		t.Errorf("under an ended context: settlement %+v, error %v", got, err)
	}
}

func TestSettleDoesNotCountWritesThatMayGoOn(t *testing.T) {
	synctest.Test(t, settleDoesNotCountWritesThatMayGoOn)
}

func settleDoesNotCountWritesThatMayGoOn(t *testing.T) {
	s := &server{}
	r, _ := s.record(t, "")
	eventually(t, "watch", func() bool { return len(s.began()) > 0 })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			s.change(watch.Modified, "retried", "retried")
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	o := SettleOptions{Recorder: r, Quiet: 100 * time.Millisecond, Bound: 5 * time.Second, Ignore: func(r Ref) bool { return r.Name == "retried" }}
	if got, err := Settle(ctx, o); err != nil || !got.OK {
		t.Errorf("settlement %+v, error %v", got, err)
	}
	o.Ignore, o.Bound = nil, 400*time.Millisecond
	if got, err := Settle(ctx, o); err != nil || got.OK {
		t.Errorf("without Ignore: settlement %+v, error %v", got, err)
	}
}

func TestIgnoreReleases(t *testing.T) {
	ignore := IgnoreReleases(func(ns, name string) bool { return ns == "t" && name == "r.v1" })
	for ref, want := range map[Ref]bool{
		{"helmreleases.helm.toolkit.fluxcd.io", "t", "r.v1"}:  true,
		{"helmreleases.helm.toolkit.fluxcd.io", "t2", "r.v1"}: false,
		{"secrets", "t", "sh.helm.release.v1.r.v1.v12"}:       true,
		{"secrets", "t", "sh.helm.release.v1.r.v1"}:           false, // revision 1 of release r
		{"machines.cluster.x-k8s.io", "t", "r.v1"}:            false,
	} {
		if got := ignore(ref); got != want {
			t.Errorf("%v: %v, want %v", ref, got, want)
		}
	}
	if IgnoreReleases(nil)(Ref{"helmreleases.helm.toolkit.fluxcd.io", "t", "r"}) {
		t.Error("without a list something is ignored")
	}
}
