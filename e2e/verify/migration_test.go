package verify_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// verdictOf is the verdict that evidence and doubt make.
func verdictOf(evidence []string, doubt string) verify.Verdict {
	switch {
	case len(evidence) > 0:
		return verify.Failed
	case doubt != "":
		return verify.Inconclusive
	}
	return verify.Passed
}

func TestBefore(t *testing.T) {
	key := md0.PoolRelease()
	deployment := func(w *world) verify.Check {
		return verify.Before(history.PhaseMigrated, verify.Annotated(verify.These(ht.Ref(w.md0.Deployment)), key))
	}
	for name, c := range map[string]struct {
		migration, flux func(w *world)
		want            []string
		writer          string
	}{
		"adopted in time": {func(w *world) { adopt(w, w.md0.Deployment) }, func(*world) {}, nil, ""},
		"adopted in time, and broken later": {func(w *world) { adopt(w, w.md0.Deployment) },
			func(w *world) {
				w.Update(ht.Human, w.md0.Deployment, ht.OwnedBy("x")).Delete(ht.Human, w.md0.Deployment)
			}, nil, ""},
		"healed by Flux": {func(w *world) {
			w.Update(ht.Migration, w.md0.Deployment, ht.OwnedBy(key.Name), ht.Annotate("meta.helm.sh/release-namespace", ""))
		}, func(w *world) { w.Update(ht.Helm, w.md0.Deployment, ht.OwnedBy(key.Name)) },
			[]string{`MachineDeployment t/kubernetes-prod-md0 its annotations name release "kubernetes-nodes-prod-md0" in "", not "kubernetes-nodes-prod-md0" in "t"`}, ht.Migration.User},
		"gone, and made again": {func(w *world) { w.Delete(ht.Migration, w.md0.Deployment) }, func(w *world) {
			again := w.md0.Deployment.DeepCopy()
			again.SetUID("2")
			ht.OwnedBy(key.Name)(again)
			w.Create(ht.Helm, again)
		}, []string{"MachineDeployment t/kubernetes-prod-md0 is gone"}, ht.Migration.User},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			c.migration(w)
			w.Mark(history.PhaseMigrated)
			c.flux(w)
			r := deployment(w).Judge(w.Read(t))
			wantEvidence(t, r, verdictOf(c.want, ""), c.want...)
			if c.writer != "" && (r.Evidence[0].Writer.User != c.writer || r.Evidence[0].Phase != history.PhaseUpgrade) {
				t.Errorf("evidence is %+v, want one by %s in the upgrade", r.Evidence[0], c.writer)
			}
		})
	}
	w := newWorld()
	adopt(w, w.md0.Deployment)
	if r := deployment(w).Judge(w.Read(t)); r.Verdict != verify.Inconclusive || r.Reason != `there was no phase "migrated"` {
		t.Errorf("the hook never ended: %+v", r)
	}
	// What is told of the end is told of it also to a check that looks at the time before.
	w = newWorld()
	h := w.Mark(history.PhaseMigrated).Settled("HelmRelease t/x").Read(t)
	if r := deployment(w).Judge(h); r.Verdict != verify.Inconclusive || !strings.Contains(r.Reason, "did not settle") {
		t.Errorf("not settled: %+v", r)
	}
}

func TestAdoptedFirst(t *testing.T) {
	key := md0.PoolRelease()
	child := func() *unstructured.Unstructured { return ht.Object("HelmRelease", "t/"+key.Name) }
	const early = "HelmRelease t/kubernetes-nodes-prod-md0 made too early for MachineDeployment t/kubernetes-prod-md0: "
	for name, c := range map[string]struct {
		happens func(w *world)
		want    []string
		doubt   string
	}{
		"adopted first": {func(w *world) { adopt(w, w.md0.Deployment); w.Create(ht.Migration, child()) }, nil, ""},
		"adopted after": {func(w *world) { w.Create(ht.Migration, child()); adopt(w, w.md0.Deployment) },
			[]string{early + `its annotations name release "kubernetes-prod" in "t", not "kubernetes-nodes-prod-md0" in "t"`}, ""},
		"half": {func(w *world) {
			w.Update(ht.Migration, w.md0.Deployment, ht.OwnedBy(key.Name), ht.Label("app.kubernetes.io/managed-by", ""))
			w.Create(ht.Migration, child())
			adopt(w, w.md0.Deployment)
		}, []string{early + `label app.kubernetes.io/managed-by is "", not Helm`}, ""},
		"gone by then": {func(w *world) { w.Delete(ht.Helm, w.md0.Deployment).Create(ht.Migration, child()) },
			[]string{"HelmRelease t/kubernetes-nodes-prod-md0 made while there was no machinedeployments.cluster.x-k8s.io t/kubernetes-prod-md0"}, ""},
		"the first of two counts": {func(w *world) {
			hr := child()
			w.Create(ht.Migration, hr).Delete(ht.Human, hr)
			adopt(w, w.md0.Deployment)
			again := child()
			again.SetUID("2")
			w.Create(ht.Human, again)
		}, []string{early + `its annotations name release "kubernetes-prod" in "t", not "kubernetes-nodes-prod-md0" in "t"`}, ""},
		"never made":    {func(w *world) { adopt(w, w.md0.Deployment) }, nil, "HelmRelease t/kubernetes-nodes-prod-md0 was never made"},
		"always there":  {func(w *world) { w.Baseline(child()) }, nil, "HelmRelease t/kubernetes-nodes-prod-md0 was there at the baseline"},
		"a record lost": {func(w *world) { w.Gap(history.Gap{Reason: "lost"}) }, nil, "lost"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			c.happens(w)
			r := verify.AdoptedFirst(verify.These(ht.Ref(w.md0.Deployment)), key).Judge(w.Read(t))
			wantEvidence(t, r, verdictOf(c.want, c.doubt), c.want...)
			if r.Reason != c.doubt {
				t.Errorf("reason %q, want %q", r.Reason, c.doubt)
			}
		})
	}
	w := newWorld()
	h := w.Create(ht.Migration, child()).Read(t)
	wantEvidence(t, verify.AdoptedFirst(verify.These(), key).Judge(h), verify.Inconclusive)
}

func TestChartsAfterMigration(t *testing.T) {
	check := verify.ChartsAfterMigration()
	publish := ht.Set("status.artifact.revision", "sha256:new")
	for name, c := range map[string]struct {
		before, after func(b *ht.Builder, chart *unstructured.Unstructured)
		want          []string
		doubt         string
	}{
		"after": {nil, func(b *ht.Builder, chart *unstructured.Unstructured) {
			b.Update(ht.Human, chart, publish).Create(ht.Human, ht.Object("ExternalArtifact", "cozy-system/new"))
		}, nil, ""},
		"a new one before": {func(b *ht.Builder, _ *unstructured.Unstructured) {
			b.Create(ht.Human, ht.Object("ExternalArtifact", "cozy-system/new"))
		}, func(b *ht.Builder, chart *unstructured.Unstructured) { b.Update(ht.Human, chart, publish) },
			[]string{"ExternalArtifact cozy-system/new created too early"}, ""},
		"all before": {func(b *ht.Builder, chart *unstructured.Unstructured) { b.Update(ht.Human, chart, publish) }, nil,
			[]string{"ExternalArtifact cozy-system/chart updated too early"}, ""},
		"withdrawn before": {func(b *ht.Builder, chart *unstructured.Unstructured) { b.Delete(ht.Human, chart) }, nil,
			[]string{"ExternalArtifact cozy-system/chart deleted too early"}, ""},
		"nothing": {nil, nil, nil, "no chart was published at all"},
	} {
		t.Run(name, func(t *testing.T) {
			chart := ht.Object("ExternalArtifact", "cozy-system/chart")
			b := ht.New().Baseline(chart).Mark(history.PhaseUpgrade)
			if c.before != nil {
				c.before(b, chart)
			}
			b.Mark(history.PhaseMigrated)
			if c.after != nil {
				c.after(b, chart)
			}
			r := check.Judge(b.Read(t))
			wantEvidence(t, r, verdictOf(c.want, c.doubt), c.want...)
			if r.Reason != c.doubt {
				t.Errorf("reason %q, want %q", r.Reason, c.doubt)
			}
		})
	}
	if r := check.Judge(ht.New().Mark(history.PhaseUpgrade).Read(t)); r.Verdict != verify.Inconclusive || r.Reason != `there was no phase "migrated"` {
		t.Errorf("the hook never ended: %+v", r)
	}
}

func TestInert(t *testing.T) {
	check := verify.Inert(verify.Subject{Namespace: "shop"})
	deployment := func(replicas int64) *unstructured.Unstructured {
		return ht.Object("MachineDeployment", "shop/kubernetes-shop-md0", ht.Set("spec.replicas", replicas))
	}
	for name, c := range map[string]struct {
		happens func(b *ht.Builder)
		want    []string
		doubt   string
	}{
		"asks for none": {func(b *ht.Builder) { b.Create(ht.Helm, deployment(0)) }, nil, ""},
		"asks for one": {func(b *ht.Builder) { b.Create(ht.Helm, deployment(1)) },
			[]string{"MachineDeployment shop/kubernetes-shop-md0 wants 1 as replicas, not 0"}, ""},
		"asked for one for a while": {func(b *ht.Builder) {
			md := deployment(0)
			b.Create(ht.Helm, md).Update(ht.Human, md, ht.Set("spec.replicas", int64(1))).Update(ht.Human, md, ht.Set("spec.replicas", int64(0)))
		}, []string{"MachineDeployment shop/kubernetes-shop-md0 wants 1 as replicas, not 0"}, ""},
		"says nothing": {func(b *ht.Builder) { b.Create(ht.Helm, ht.Object("MachineDeployment", "shop/kubernetes-shop-md0")) },
			[]string{"MachineDeployment shop/kubernetes-shop-md0 wants nothing as replicas, not 0"}, ""},
		"got machines": {func(b *ht.Builder) {
			b.Create(ht.Helm, deployment(0)).Create(ht.CAPI, ht.Object("Machine", "shop/m"))
			b.Create(ht.CAPK, ht.Object("KubevirtMachine", "shop/m"), ht.Object("VirtualMachine", "shop/m"), ht.Object("VirtualMachineInstance", "shop/m"))
		}, []string{"Machine shop/m is there", "KubevirtMachine shop/m is there", "VirtualMachine shop/m is there", "VirtualMachineInstance shop/m is there"}, ""},
		"another tenant's": {func(b *ht.Builder) { b.Create(ht.Helm, deployment(0)).Create(ht.CAPI, ht.Object("Machine", "t/m")) }, nil, ""},
		"nothing there":    {func(*ht.Builder) {}, nil, "shop has no MachineDeployment: there is nothing that could ask for a machine"},
	} {
		t.Run(name, func(t *testing.T) {
			b := ht.New().Mark(history.PhaseUpgrade)
			c.happens(b)
			r := check.Judge(b.Read(t))
			wantEvidence(t, r, verdictOf(c.want, c.doubt), c.want...)
			if r.Reason != c.doubt {
				t.Errorf("reason %q, want %q", r.Reason, c.doubt)
			}
		})
	}
}
