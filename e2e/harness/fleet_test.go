package harness

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func TestMissingKind(t *testing.T) {
	hr := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"namespace": "tenant-plain", "name": "kubernetes-prod"},
		"spec":     map[string]any{"chartRef": map[string]any{"name": "kubernetes-chart"}}}}
	// What helm-controller 1.6.0 writes into the condition.
	why := `Helm install failed for release tenant-plain/kubernetes-prod with chart kubernetes@0.1.0: unable to build kubernetes objects from release manifest: ` +
		`resource mapping not found for name: "prod-policy" namespace: "" from "": no matches for kind "CiliumNetworkPolicy" in version "cilium.io/v2"
ensure CRDs are installed first`
	got := missingKind(hr, why)
	for _, part := range []string{"chart kubernetes-chart", "HelmRelease tenant-plain/kubernetes-prod", "CiliumNetworkPolicy tenant-plain/prod-policy", "cilium.io/v2"} {
		if !strings.Contains(got, part) || strings.Contains(got, "\n") {
			t.Errorf("%q lacks %q", got, part)
		}
	}
	for _, other := range []string{"", "timed out", `configmaps "x" not found`} {
		if got := missingKind(hr, other); got != "" {
			t.Errorf("%q is taken for a missing kind: %s", other, got)
		}
	}
}

func TestUntil(t *testing.T) {
	p := newProgress(io.Discard)
	begin := time.Now()
	err := p.until(t.Context(), "a fleet", time.Minute, func(context.Context) ([]string, error) { return nil, hopeless{"no such kind"} })
	if err == nil || err.Error() != "no such kind" || time.Since(begin) > 10*time.Second {
		t.Errorf("without hope: %v after %s", err, time.Since(begin))
	}
	calls := 0
	err = p.until(t.Context(), "a fleet", time.Minute, func(context.Context) ([]string, error) {
		if calls++; calls == 1 {
			return nil, errors.New("the API server restarts")
		}
		return nil, nil
	})
	if err != nil || calls != 2 {
		t.Errorf("an error that passes: %v after %d calls", err, calls)
	}
	err = p.until(t.Context(), "a fleet", time.Millisecond, func(context.Context) ([]string, error) { return []string{"pool a"}, nil })
	if err == nil || !strings.Contains(err.Error(), "waited 0 s for a fleet: pool a") {
		t.Errorf("a wait that ends: %v", err)
	}
}
