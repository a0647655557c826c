package verify_test

import (
	"regexp"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// ready is a HelmRelease's Ready condition of its generation.
func ready(status, message string, generation int64) func(*unstructured.Unstructured) {
	return ht.Set("status", map[string]any{"observedGeneration": generation, "conditions": []any{map[string]any{
		"type": "Ready", "status": status, "message": message, "observedGeneration": generation}}})
}

func TestRefused(t *testing.T) {
	check := verify.Refused(history.ReleaseKey{Namespace: "t", Name: "computeplane"}, regexp.MustCompile("RFC 1123"))
	for name, c := range map[string]struct {
		happens []func(*unstructured.Unstructured)
		want    string
	}{
		"refused":                  {[]func(*unstructured.Unstructured){ready("False", `pool "Md_0": its name is no RFC 1123 label`, 1)}, ""},
		"refused, and tried again": {[]func(*unstructured.Unstructured){ready("False", "RFC 1123", 1), ready("Unknown", "Running 'upgrade' action", 1)}, ""},
		"never come to an end":     {[]func(*unstructured.Unstructured){ready("Unknown", "Running 'upgrade' action", 1)}, "is being reconciled: Running 'upgrade' action"},
		"edited, and being tried": {[]func(*unstructured.Unstructured){ready("False", "RFC 1123", 1), ht.Set("spec.values", map[string]any{"a": "b"}), ready("Unknown", "Running", 2)},
			"is being reconciled: Running"},
		"for another reason":  {[]func(*unstructured.Unstructured){ready("False", "timeout", 1)}, "is not Ready: timeout"},
		"taken":               {[]func(*unstructured.Unstructured){ready("True", "upgraded", 1)}, "is Ready, and should not be"},
		"refused, then taken": {[]func(*unstructured.Unstructured){ready("False", "RFC 1123", 1), ready("True", "", 1)}, "is Ready, and should not be"},
		"an older refusal": {[]func(*unstructured.Unstructured){ready("False", "RFC 1123", 1), ht.Set("spec.values", map[string]any{"a": "b"})},
			"generation 2 is not reconciled (1 is)"},
	} {
		t.Run(name, func(t *testing.T) {
			b, hr := ht.New(), ht.Object("HelmRelease", "t/computeplane")
			b.Baseline(hr)
			for _, f := range c.happens {
				b.Update(ht.Helm, hr, f)
			}
			if c.want == "" {
				wantEvidence(t, check.Judge(b.Read(t)), verify.Passed)
			} else {
				wantEvidence(t, check.Judge(b.Read(t)), verify.Failed, "HelmRelease t/computeplane "+c.want)
			}
		})
	}
	wantEvidence(t, check.Judge(ht.New().Read(t)), verify.Failed, "helmreleases.helm.toolkit.fluxcd.io t/computeplane was never there")
}

func TestNeverRefused(t *testing.T) {
	check := verify.NeverRefused(verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0"}, regexp.MustCompile("image x has failed"))
	for name, c := range map[string]struct {
		happens []func(*unstructured.Unstructured)
		want    []string
	}{
		"never":                   {[]func(*unstructured.Unstructured){ready("True", "", 1)}, nil},
		"for another reason":      {[]func(*unstructured.Unstructured){ready("False", "timeout", 1), ready("True", "", 1)}, nil},
		"once, and then taken":    {[]func(*unstructured.Unstructured){ready("False", "image x has failed", 1), ready("True", "", 1)}, []string{"HelmRelease t/kubernetes-nodes-prod-md0 is not Ready: image x has failed"}},
		"twice is said only once": {[]func(*unstructured.Unstructured){ready("False", "image x has failed", 1), ready("False", "image x has failed again", 1)}, []string{"HelmRelease t/kubernetes-nodes-prod-md0 is not Ready: image x has failed"}},
	} {
		t.Run(name, func(t *testing.T) {
			b, hr := ht.New(), ht.Object("HelmRelease", "t/kubernetes-nodes-prod-md0")
			b.Baseline(hr)
			for _, f := range c.happens {
				b.Update(ht.Helm, hr, f)
			}
			verdict := verify.Passed
			if c.want != nil {
				verdict = verify.Failed
			}
			wantEvidence(t, check.Judge(b.Read(t)), verdict, c.want...)
		})
	}
	if r := check.Judge(ht.New().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("without the release: %s", r.Verdict)
	}
}

func TestWorkers(t *testing.T) {
	phase := func(p string) func(*unstructured.Unstructured) { return ht.Set("status.phase", p) }
	w := newWorld()
	m := w.md0.Workers[0].Machine
	w.Update(ht.CAPI, w.large.Workers[0].Machine, phase("Running")).Update(ht.CAPI, m, phase("Provisioning"))
	wantEvidence(t, verify.Workers(md0, 1).Judge(w.Read(t)), verify.Failed,
		"Machine "+worker+" is Provisioning, not Running", "workers of t/prod/md0 0 machines run, want 1")
	w.Update(ht.CAPI, m, phase("Running"))
	wantEvidence(t, verify.Workers(md0, 1).Judge(w.Read(t)), verify.Passed)
	wantEvidence(t, verify.Workers(md0, 2).Judge(w.Read(t)), verify.Failed, "workers of t/prod/md0 1 machines run, want 2")
	w.AskDelete(ht.CAPI, m)
	wantEvidence(t, verify.Workers(md0, 1).Judge(w.Read(t)), verify.Failed, "workers of t/prod/md0 0 machines run, want 1")
	none := verify.Subject{Namespace: "t", Cluster: "none"}
	wantEvidence(t, verify.Workers(none, 1).Judge(w.Read(t)), verify.Failed, "workers of t/none 0 machines run, want 1")
	if r := verify.Workers(none, 1).Judge(ht.New().Unsettled().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody waited for the cluster to settle: %+v", r)
	}
}

func TestWithinSurge(t *testing.T) {
	for _, c := range []struct {
		have, available int
		evidence        []string
	}{
		{1, 1, nil},
		{2, 1, nil},
		{3, 2, []string{"MachineDeployment t/kubernetes-prod-md0 has 3 machines, at most 2 are allowed"}},
		{2, 0, []string{"MachineDeployment t/kubernetes-prod-md0 has 0 available machines, at least 1 are wanted"}},
	} {
		w := newWorld()
		status := func(have, available int) func(*unstructured.Unstructured) {
			return ht.Set("status", map[string]any{"replicas": int64(have), "availableReplicas": int64(available)})
		}
		replicas := ht.Set("spec.replicas", int64(1))
		w.Update(ht.CAPI, w.md0.Deployment, replicas, status(1, 0)).Update(ht.CAPI, w.md0.Deployment, replicas, status(1, 1)).
			Update(ht.CAPI, w.md0.Deployment, replicas, status(c.have, c.available))
		verdict := verify.Passed
		if c.evidence != nil {
			verdict = verify.Failed
		}
		wantEvidence(t, verify.WithinSurge(md0).Judge(w.Read(t)), verdict, c.evidence...)
	}
	if r := verify.WithinSurge(verify.Subject{Namespace: "elsewhere"}).Judge(newWorld().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody is there: %+v", r)
	}
}

func TestPoolRefusedAsksTheReleaseThatRendersThePool(t *testing.T) {
	check := verify.PoolRefused(verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0"}, regexp.MustCompile("too small"))
	for name, c := range map[string]struct {
		pool, cluster string // messages; "" for Ready, "-" for no such release
		verdict       verify.Verdict
	}{
		"the pool's own": {"too small", "", verify.Passed},
		"the pool's own is taken, the cluster's not": {"", "too small", verify.Failed},
		"no release of its own":                      {"-", "too small", verify.Passed},
		"no release of its own, and taken":           {"-", "", verify.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			b := ht.New()
			for release, message := range map[string]string{"t/kubernetes-nodes-prod-md0": c.pool, "t/kubernetes-prod": c.cluster} {
				if message == "-" {
					continue
				}
				hr := ht.Object("HelmRelease", release)
				b.Baseline(hr)
				if message == "" {
					b.Update(ht.Helm, hr, ready("True", "", 1))
				} else {
					b.Update(ht.Helm, hr, ready("False", message, 1))
				}
			}
			if r := check.Judge(b.Read(t)); r.Verdict != c.verdict {
				t.Errorf("%s: %v, want %s", r.Verdict, r.Evidence, c.verdict)
			}
		})
	}
}
