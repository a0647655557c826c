package verify_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func TestRecord(t *testing.T) {
	for name, c := range map[string]struct {
		b    *ht.Builder
		want string // "": passes
	}{
		"sound":       {ht.New(), ""},
		"a gap":       {ht.New().Gap(history.Gap{Resource: "pods", Reason: "lost"}), "pods: lost"},
		"killed":      {ht.New().Killed(), "the last line (4) is torn: the run was killed while it recorded; the recording has no end"},
		"no audit":    {ht.New().WithoutAudit(), "no audit log was recorded"},
		"not waited":  {ht.New().Unsettled(), "nobody waited for the cluster to settle"},
		"not settled": {ht.New().Settled("HelmRelease t/x"), "did not settle within 60 s, still moving: HelmRelease t/x"},
	} {
		r := verify.Record().Judge(c.b.Read(t))
		if (r.Verdict == verify.Passed) != (c.want == "") || !strings.Contains(r.Reason, c.want) || r.Verdict == verify.Failed {
			t.Errorf("%s: %s, reason %q; want %q", name, r.Verdict, r.Reason, c.want)
		}
	}
	quiet := ht.New().WithoutAudit()
	h := quiet.Read(t)
	h.Header.Audit = true // an audit log, but nothing in it
	if r := verify.Record().Judge(h); r.Verdict != verify.Inconclusive || !strings.Contains(r.Reason, "no write at all") {
		t.Errorf("an empty audit log: %+v", r)
	}
}

func TestEveryCheckIsInconclusiveOverARecordWithAGap(t *testing.T) {
	w := newWorld()
	w.Gap(history.Gap{Reason: "lost"})
	h := w.Read(t)
	key := history.ReleaseKey{Namespace: "t", Name: "kubernetes-nodes-prod-md0"}
	objects := verify.PoolObjects(md0)
	for _, c := range []verify.Check{
		verify.NoChurn(md0), verify.Converged(md0, nil), verify.Isolated(md0, large), verify.Untouched("t"), verify.FleetDone(57),
		verify.Owned(objects, key, md0.ClusterRelease()), verify.Annotated(objects, key), verify.Pinned(objects), verify.Kept(objects), verify.NotAdopted(objects, key),
		verify.FieldIs(objects, "1", "spec", "replicas"), verify.SpecKept(objects), verify.LabelledFor(objects, verify.Application{}),
		verify.CountedFor(objects, verify.Application{}), verify.CertSANs(md0), verify.Rolling(md0),
		verify.FieldKept(objects, "spec"), verify.TemplateUnchanged(md0), verify.ValuesCarried(key, nil), verify.ValuesDeclared(key),
		verify.Before(history.PhaseMigrated, verify.Annotated(objects, key)), verify.AdoptedFirst(objects, key), verify.Inert(verify.Subject{Namespace: "none"}), verify.Labelled(objects, nil), verify.ChartsAfterMigration(),
		verify.LogLine("migration", anybody, 1), verify.NeverRefused(md0, anybody), verify.NoWritesBy(anybody, objects), verify.NeverThere(history.Ref{Resource: "pods", Name: "x"}),
	} {
		if r := c.Judge(h); r.Verdict != verify.Inconclusive || !strings.Contains(r.Reason, "lost") {
			t.Errorf("%s: %s, reason %q", c.Name, r.Verdict, r.Reason)
		}
	}
	if got := verify.About("untouched while refused", md0, verify.NoChurn(md0)).Name; got != "untouched while refused t/prod/md0" {
		t.Errorf("named %q", got)
	}
}

func TestWorst(t *testing.T) {
	p, f, i := verify.Passed, verify.Failed, verify.Inconclusive
	for _, c := range []struct {
		in   []verify.Verdict
		want verify.Verdict
	}{{nil, i}, {[]verify.Verdict{p, p}, p}, {[]verify.Verdict{p, i}, i}, {[]verify.Verdict{i, f, p}, f}, {[]verify.Verdict{p, ""}, i}} {
		if got := verify.Worst(c.in...); got != c.want {
			t.Errorf("worst of %q is %s, want %s", c.in, got, c.want)
		}
	}
}

// release is a HelmRelease that has converged on chart sha256:new.
func release(name string, change ...func(*unstructured.Unstructured)) *unstructured.Unstructured {
	all := append([]func(*unstructured.Unstructured){
		ht.Set("spec.chartRef", map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": "chart"}),
		ht.Set("status.observedGeneration", int64(1)), ht.Set("status.lastAttemptedRevisionDigest", "sha256:new"),
		ht.Set("status.conditions", []any{map[string]any{"type": "Ready", "status": "True", "observedGeneration": int64(1)}}),
	}, change...)
	return ht.Object("HelmRelease", name, all...)
}

func artifact() *unstructured.Unstructured {
	return ht.Object("ExternalArtifact", "cozy-system/chart", ht.Set("status.artifact.revision", "1@sha256:old"))
}

func TestConverged(t *testing.T) {
	s := verify.Subject{Namespace: "t", Cluster: "prod"}
	failed := ht.Set("status.conditions", []any{map[string]any{"type": "Ready", "status": "False", "observedGeneration": int64(1), "message": "refused"}})
	published := func(b *ht.Builder) *ht.Builder {
		a := artifact()
		return b.Baseline(a).Update(ht.Human, a, ht.Set("status.artifact.revision", "1@sha256:new"))
	}
	for name, c := range map[string]struct {
		b       *ht.Builder
		mayFail history.MayFail
		verdict verify.Verdict
		want    []string
	}{
		"converged": {published(ht.New()).Baseline(release("t/kubernetes-prod")), nil, verify.Passed, nil},
		"on an old chart": {published(ht.New()).Baseline(release("t/kubernetes-prod", ht.Set("status.lastAttemptedRevisionDigest", "sha256:old"))), nil, verify.Failed,
			[]string{`HelmRelease t/kubernetes-prod has chart "sha256:old", its source offers "1@sha256:new"`}},
		"another's failure":     {published(ht.New()).Baseline(release("t/kubernetes-prod"), release("t/kubernetes-other", failed)), nil, verify.Passed, nil},
		"failed":                {published(ht.New()).Baseline(release("t/kubernetes-prod", failed)), nil, verify.Failed, []string{"HelmRelease t/kubernetes-prod is not Ready: refused"}},
		"failed as expected":    {published(ht.New()).Baseline(release("t/kubernetes-prod", failed)), func(_, _, message string) bool { return message == "refused" }, verify.Passed, nil},
		"no source":             {ht.New().Baseline(release("t/kubernetes-prod")), nil, verify.Failed, []string{"HelmRelease t/kubernetes-prod its chart's source ExternalArtifact cozy-system/chart is not there"}},
		"no source as expected": {ht.New().Baseline(release("t/kubernetes-prod", failed)), func(_, _, message string) bool { return message == "refused" }, verify.Passed, nil},
		"no source, Ready":      {ht.New().Baseline(release("t/kubernetes-prod")), func(_, _, message string) bool { return true }, verify.Failed, []string{"HelmRelease t/kubernetes-prod its chart's source ExternalArtifact cozy-system/chart is not there"}},
		"no source, suspended":  {ht.New().Baseline(release("t/kubernetes-prod", ht.Set("spec.suspend", true))), nil, verify.Passed, nil},
		"no release":            {published(ht.New()).Baseline(release("t/kubernetes-other")), nil, verify.Inconclusive, nil},
	} {
		t.Run(name, func(t *testing.T) {
			wantEvidence(t, verify.Converged(s, c.mayFail).Judge(c.b.Read(t)), c.verdict, c.want...)
		})
	}
	hr := release("t/kubernetes-prod")
	b := published(ht.New()).Baseline(hr).Delete(ht.Human, hr)
	wantEvidence(t, verify.Converged(s, nil).Judge(b.Read(t)), verify.Failed, "HelmRelease t/kubernetes-prod is gone")
	lost := release("t/kubernetes-prod", ht.UID("third"), failed)
	wantEvidence(t, verify.Converged(s, nil).Judge(published(ht.New()).Baseline(hr).Delete(ht.Human, hr).Create(ht.Human, lost).Read(t)), verify.Failed,
		"HelmRelease t/kubernetes-prod is not Ready: refused") // once, not for its predecessor too
	again := release("t/kubernetes-prod", ht.UID("second"))
	wantEvidence(t, verify.Converged(s, nil).Judge(b.Create(ht.Human, again).Read(t)), verify.Passed)
	// Not reached yet is no failure while the cluster still moves.
	r := verify.Converged(s, nil).Judge(published(ht.New()).Baseline(release("t/kubernetes-prod", failed)).Settled("HelmRelease t/kubernetes-prod").Read(t))
	wantEvidence(t, r, verify.Inconclusive, "HelmRelease t/kubernetes-prod is not Ready: refused")
}

func TestIsolated(t *testing.T) {
	foreign := func() (*world, *ht.Pool) {
		w := newWorld()
		cluster := ht.Object("Cluster", "t2/kubernetes-prod")
		p := ht.NewPool(cluster, "md0", "abc123", 1)
		w.Baseline(cluster).Baseline(p.Objects()...).Baseline(release("t/kubernetes-prod"), release("t2/kubernetes-prod"))
		return w, p
	}
	other := verify.Subject{Namespace: "t2"}
	tenant := verify.Subject{Namespace: "t"}
	for name, c := range map[string]struct {
		happens func(w *world, p *ht.Pool)
		subject verify.Subject
		other   verify.Subject
		want    []string
	}{
		"nothing": {func(*world, *ht.Pool) {}, tenant, other, nil},
		"own affair": {func(w *world, p *ht.Pool) {
			w.AskDelete(ht.Human, p.Set).AskDelete(ht.CAPI, p.Workers[0].Machine)
			w.Update(ht.Helm, p.Deployment, ht.OwnedBy("kubernetes-nodes-prod-md0"))
		}, tenant, other, nil},
		"taken over": {func(w *world, p *ht.Pool) {
			w.Update(ht.Migration, p.Deployment, ht.Annotate("meta.helm.sh/release-name", "kubernetes-prod", "meta.helm.sh/release-namespace", "t"))
		}, tenant, other, []string{"MachineDeployment t2/kubernetes-prod-md0 taken over by release kubernetes-prod"}},
		"taken over and touched again": {func(w *world, p *ht.Pool) {
			w.Update(ht.Migration, p.Deployment, ht.Annotate("meta.helm.sh/release-name", "kubernetes-prod", "meta.helm.sh/release-namespace", "t")).Update(ht.CAPI, p.Deployment, ht.Set("status.a", "b"))
		}, tenant, other, []string{"MachineDeployment t2/kubernetes-prod-md0 taken over by release kubernetes-prod"}},
		"through an object of the subject": {func(w *world, p *ht.Pool) { // a label that leads into the wrong namespace
			w.Update(ht.Human, p.Workers[0].VM, ht.Label("capk.cluster.x-k8s.io/kubevirt-machine-namespace", "t"))
			w.AskDelete(ht.CAPI, w.md0.Workers[0].KubevirtMachine).AskDelete(ht.CAPK, p.Workers[0].VM)
		}, tenant, other, []string{"VirtualMachine t2/kubernetes-prod-md0-abcde-0 deleted because of KubevirtMachine " + worker}},
		"the subject's service account": {func(w *world, p *ht.Pool) {
			w.Update(ht.Who{User: "system:serviceaccount:t:job", Agent: "x"}, p.HealthCheck, ht.Label("a", "b"))
		}, tenant, other, []string{"MachineHealthCheck t2/kubernetes-prod-md0 patch by a service account of t"}},
		"a service account with a longer name": {func(w *world, p *ht.Pool) {
			w.Update(ht.Who{User: "system:serviceaccount:t-more:job", Agent: "x"}, p.HealthCheck, ht.Label("a", "b"))
		}, tenant, other, nil},
		"a refused write": {func(w *world, p *ht.Pool) {
			w.Request(history.Write{User: "system:serviceaccount:t:job", Verb: "delete", Resource: "pods", Namespace: "t2", Name: "x", Code: 403})
		}, tenant, other, nil},
		"its own namespace": {func(w *world, _ *ht.Pool) {
			w.Update(ht.Who{User: "system:serviceaccount:t:job", Agent: "x"}, w.md0.HealthCheck, ht.Label("a", "b"))
		}, tenant, other, nil},
		"a sibling pool, by a service account of both": {func(w *world, _ *ht.Pool) {
			w.Update(ht.Who{User: "system:serviceaccount:t:job", Agent: "x"}, w.large.HealthCheck, ht.Label("a", "b"))
		}, md0, large, nil},
		"a sibling pool": {func(w *world, _ *ht.Pool) {
			w.Baseline(ht.Object("HelmRelease", "t/kubernetes-nodes-prod-md0", ht.Set("spec.values.cluster", "prod")))
			w.Update(ht.Migration, w.large.Template, ht.OwnedBy("kubernetes-nodes-prod-md0"))
		}, md0, large, []string{"KubevirtMachineTemplate t/kubernetes-prod-md0-large-def456 taken over by release kubernetes-nodes-prod-md0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w, p := foreign()
			c.happens(w, p)
			verdict := verify.Passed
			if c.want != nil {
				verdict = verify.Failed
			}
			wantEvidence(t, verify.Isolated(c.subject, c.other).Judge(w.Read(t)), verdict, c.want...)
		})
	}
	w, _ := foreign()
	wantEvidence(t, verify.Isolated(tenant).Judge(w.Read(t)), verify.Inconclusive)
	wantEvidence(t, verify.Isolated(tenant, verify.Subject{Namespace: "nobody"}).Judge(w.Read(t)), verify.Inconclusive)
}

func TestUntouched(t *testing.T) {
	ns, pod := ht.Object("Namespace", "t"), ht.Object("Pod", "t/p")
	start := func() *ht.Builder {
		return ht.New().Baseline(ns.DeepCopy(), pod.DeepCopy(), ht.Object("Namespace", "t2"))
	}
	write := func(resource, namespace, name string, code int) history.Write {
		return history.Write{User: "u", Verb: "patch", Resource: resource, Namespace: namespace, Name: name, Code: code}
	}
	for name, c := range map[string]struct {
		b    *ht.Builder
		want []string
	}{
		"nothing":            {start(), nil},
		"elsewhere":          {start().Request(write("configmaps", "t2", "c", 200)), nil},
		"refused":            {start().Request(write("configmaps", "t", "c", 403)), nil},
		"leases":             {start().Request(write("leases.coordination.k8s.io", "t", "c", 200)).Request(write("events", "t", "e", 201)).Request(write("events.events.k8s.io", "t", "e", 201)), nil},
		"an unrecorded kind": {start().Request(write("configmaps", "t", "c", 201)), []string{"configmaps t/c written: patch"}},
		"a recorded one":     {start().Request(history.Write{User: "u", Verb: "delete", Resource: "pods", Namespace: "t", Name: "p", UID: "pod:t/p"}), []string{"Pod t/p written: delete"}},
		"known by its name":  {start().Request(write("pods", "t", "p", 200)), []string{"Pod t/p written: patch"}},
		"the namespace":      {start().Request(write("namespaces", "", "t", 200)), []string{"Namespace t written: patch"}},
	} {
		verdict := verify.Passed
		if c.want != nil {
			verdict = verify.Failed
		}
		t.Run(name, func(t *testing.T) { wantEvidence(t, verify.Untouched("t").Judge(c.b.Read(t)), verdict, c.want...) })
	}
	r := verify.Untouched("t", "typo").Judge(start().Read(t))
	if r.Verdict != verify.Inconclusive || !strings.Contains(r.Reason, "no namespace typo") {
		t.Errorf("a namespace that is not there: %+v", r)
	}
}

func TestFleetDone(t *testing.T) {
	version := ht.Object("ConfigMap", "cozy-system/cozystack-version", ht.Set("data.version", "56"))
	check := verify.FleetDone(57)
	wantEvidence(t, check.Judge(ht.New().Read(t)), verify.Failed, "ConfigMap cozy-system/cozystack-version is not there")
	b := ht.New().Baseline(version)
	wantEvidence(t, check.Judge(b.Read(t)), verify.Failed, `ConfigMap cozy-system/cozystack-version version is "56", not 57`)
	b.Update(ht.Migration, version, ht.Set("data.version", "57"))
	wantEvidence(t, check.Judge(b.Read(t)), verify.Passed)
	b.Update(ht.Migration, version, ht.Set("data.version", "58"))
	r := check.Judge(b.Read(t))
	if wantEvidence(t, r, verify.Failed, `ConfigMap cozy-system/cozystack-version version is "58", not 57`); r.Evidence[0].Writer.User != ht.Migration.User {
		t.Errorf("writer is %+v", r.Evidence[0].Writer)
	}
}
