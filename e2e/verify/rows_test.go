package verify_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

var anybody = regexp.MustCompile("")

// adopt is what the healthy migration and Helm do to a pool's object.
func adopt(w *world, objects ...*unstructured.Unstructured) {
	for _, o := range objects {
		w.Update(ht.Migration, o, ht.OwnedBy("kubernetes-nodes-prod-md0"), ht.Annotate("helm.sh/resource-policy", "keep"))
	}
}

func TestOwned(t *testing.T) {
	key := md0.PoolRelease()
	md := func(w *world) *unstructured.Unstructured { return w.md0.Deployment }
	for name, c := range map[string]struct {
		held, heldBefore bool
		change           func(w *world)
		want             []string
		writer           string
	}{
		"adopted": {true, false, func(*world) {}, nil, ""},
		"annotation of another": {true, false, func(w *world) {
			w.Update(ht.Human, md(w), ht.Annotate("meta.helm.sh/release-name", "x")).Update(ht.CAPI, md(w), ht.Set("status.a", "b"))
		},
			[]string{`its annotations name release "x" in "t", not "kubernetes-nodes-prod-md0" in "t"`}, ht.Human.User},
		"another namespace": {true, false, func(w *world) { w.Update(ht.Human, md(w), ht.Annotate("meta.helm.sh/release-namespace", "x")) },
			[]string{`its annotations name release "kubernetes-nodes-prod-md0" in "x", not "kubernetes-nodes-prod-md0" in "t"`}, ht.Human.User},
		"label": {true, false, func(w *world) { w.Update(ht.Human, md(w), ht.Label("app.kubernetes.io/managed-by", "me")) },
			[]string{"label app.kubernetes.io/managed-by is \"me\", not Helm"}, ht.Human.User},
		"not in the manifest":   {false, false, func(*world) {}, []string{"the stored manifest of kubernetes-nodes-prod-md0 revision 1 lacks it"}, ""},
		"still in the parent's": {true, true, func(*world) {}, []string{"the stored manifest of kubernetes-prod revision 2 still holds it"}, ""},
		"gone":                  {true, false, func(w *world) { w.Delete(ht.Helm, md(w)) }, []string{"is gone"}, ht.Helm.User},
		"recreated is still owned": {true, false, func(w *world) {
			again := md(w).DeepCopy()
			again.SetUID("2")
			w.Delete(ht.Helm, md(w)).Create(ht.Helm, again)
		}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			adopt(w, md(w))
			child, parent := ht.Stored{Release: "t/kubernetes-nodes-prod-md0", Revision: 1}, ht.Stored{Release: "t/kubernetes-prod", Revision: 2}
			if c.held {
				child.Objects = append(child.Objects, md(w))
			}
			if c.heldBefore {
				parent.Objects = append(parent.Objects, md(w))
			}
			w.Create(ht.Helm, child.Secret(), parent.Secret())
			c.change(w)
			var want []string
			verdict := verify.Passed
			for _, s := range c.want {
				want, verdict = append(want, "MachineDeployment t/kubernetes-prod-md0 "+s), verify.Failed
			}
			r := verify.Owned(verify.These(ht.Ref(md(w))), key, md0.ClusterRelease()).Judge(w.Read(t))
			wantEvidence(t, r, verdict, want...)
			if c.writer != "" && r.Evidence[0].Writer.User != c.writer {
				t.Errorf("writer is %s, want %s", r.Evidence[0].Writer.User, c.writer)
			}
		})
	}
	w := newWorld()
	adopt(w, md(w))
	h := w.Read(t)
	wantEvidence(t, verify.Owned(verify.These(ht.Ref(md(w))), key, history.ReleaseKey{}).Judge(h), verify.Failed, "MachineDeployment t/kubernetes-prod-md0 release kubernetes-nodes-prod-md0 has no deployed revision")
	wantEvidence(t, verify.Annotated(verify.These(ht.Ref(md(w))), key).Judge(h), verify.Passed)
	wantEvidence(t, verify.Annotated(verify.These(ht.Ref(w.md0.Template)), key).Judge(h), verify.Failed,
		`KubevirtMachineTemplate t/kubernetes-prod-md0-abc123 its annotations name release "kubernetes-prod" in "t", not "kubernetes-nodes-prod-md0" in "t"`)
	wantEvidence(t, verify.Owned(verify.These(), key, history.ReleaseKey{}).Judge(h), verify.Inconclusive)
	wantEvidence(t, verify.Owned(verify.These(history.Ref{Resource: "pods", Namespace: "t", Name: "x"}), key, history.ReleaseKey{}).Judge(h), verify.Failed, "pods t/x was never there")
}

func TestPinnedKeptNotAdoptedFieldKept(t *testing.T) {
	key := md0.PoolRelease()
	for name, c := range map[string]struct {
		change                     func(w *world, md *unstructured.Unstructured)
		pinned, kept, not, replica []string
	}{
		"adopted": {func(w *world, md *unstructured.Unstructured) { adopt(w, md) }, nil, nil, []string{`its annotations name release "kubernetes-nodes-prod-md0", at the baseline "kubernetes-prod"`}, nil},
		"pinned alone": {func(w *world, md *unstructured.Unstructured) {
			w.Update(ht.Migration, md, ht.Annotate("helm.sh/resource-policy", "keep"))
		}, nil, nil, nil, nil},
		"untouched": {func(*world, *unstructured.Unstructured) {}, []string{`annotation helm.sh/resource-policy is "", not keep`}, nil, nil, nil},
		"unpinned": {func(w *world, md *unstructured.Unstructured) {
			adopt(w, md)
			w.Update(ht.Helm, md, ht.OwnedBy("kubernetes-prod"), ht.Annotate("helm.sh/resource-policy", "delete"))
		}, []string{`annotation helm.sh/resource-policy is "delete", not keep`}, nil, nil, nil},
		"recreated": {func(w *world, md *unstructured.Unstructured) {
			again := md.DeepCopy()
			again.SetUID("2")
			ht.Annotate("helm.sh/resource-policy", "keep")(again)
			w.Delete(ht.Helm, md).Create(ht.Helm, again)
		}, nil, []string{"was recreated, at the baseline it had uid machinedeployment:t/kubernetes-prod-md0"}, nil, nil},
		"deletion asked for": {func(w *world, md *unstructured.Unstructured) { w.AskDelete(ht.Human, md) }, []string{`annotation helm.sh/resource-policy is "", not keep`}, []string{"is being deleted"}, nil, nil},
		"in the release's manifest": {func(w *world, md *unstructured.Unstructured) {
			w.Update(ht.Migration, md, ht.Annotate("helm.sh/resource-policy", "keep"))
			w.Create(ht.Helm, ht.Stored{Release: "t/kubernetes-nodes-prod-md0", Revision: 3, Objects: []*unstructured.Unstructured{md}}.Secret())
		}, nil, nil, []string{"the stored manifest of kubernetes-nodes-prod-md0 revision 3 holds it"}, nil},
		"scaled": {func(w *world, md *unstructured.Unstructured) {
			w.Update(ht.Helm, md, ht.Set("spec.replicas", int64(0)), ht.Annotate("helm.sh/resource-policy", "keep"))
		}, nil, nil, nil, []string{"[spec replicas]: 1 → 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			c.change(w, w.md0.Deployment)
			h, objects := w.Read(t), verify.These(ht.Ref(w.md0.Deployment))
			for _, part := range []struct {
				check verify.Check
				want  []string
			}{{verify.Pinned(objects), c.pinned}, {verify.Kept(objects), c.kept}, {verify.NotAdopted(objects, key), c.not}, {verify.FieldKept(objects, "spec", "replicas"), c.replica}} {
				var want []string
				verdict := verify.Passed
				for _, s := range part.want {
					want, verdict = append(want, "MachineDeployment t/kubernetes-prod-md0 "+s), verify.Failed
				}
				wantEvidence(t, part.check.Judge(h), verdict, want...)
			}
		})
	}
	w := newWorld()
	late := ht.Object("MachineDeployment", "t/late", ht.Annotate("helm.sh/resource-policy", "keep"))
	h := w.Create(ht.Helm, late).Read(t)
	for _, c := range []verify.Check{verify.Kept(verify.These(ht.Ref(late))), verify.NotAdopted(verify.These(ht.Ref(late)), key), verify.FieldKept(verify.These(ht.Ref(late)), "spec")} {
		wantEvidence(t, c.Judge(h), verify.Failed, "MachineDeployment t/late was not there at the baseline")
	}
}

func TestLabelled(t *testing.T) {
	hr := ht.Object("HelmRelease", "t/r")
	b := ht.New().Baseline(hr).Update(ht.Migration, hr, ht.Label("kind", "Kubernetes", "name", "prod", "own", "x"))
	h := b.Read(t)
	judge := func(labels map[string]string) verify.Result {
		return verify.Labelled(verify.These(ht.Ref(hr)), labels).Judge(h)
	}
	wantEvidence(t, judge(map[string]string{"kind": "Kubernetes", "name": "prod"}), verify.Passed)
	wantEvidence(t, judge(map[string]string{"kind": "Kubernetes", "name": "eu", "group": "g"}), verify.Failed,
		`HelmRelease t/r label group is "", not "g"`, `HelmRelease t/r label name is "prod", not "eu"`)
	wantEvidence(t, verify.Labelled(verify.These(history.Ref{Resource: "pods", Namespace: "t", Name: "x"}), nil).Judge(h), verify.Failed, "pods t/x was never there")
	wantEvidence(t, verify.Labelled(verify.These(), nil).Judge(h), verify.Inconclusive)
}

func TestTemplateUnchanged(t *testing.T) {
	check := verify.TemplateUnchanged(md0)
	w := newWorld()
	w.Update(ht.Migration, w.md0.Template, ht.OwnedBy("kubernetes-nodes-prod-md0")).Update(ht.Human, w.large.Template, ht.Set("spec.template.spec.cores", int64(9)))
	wantEvidence(t, check.Judge(w.Read(t)), verify.Passed)

	w = newWorld()
	renamed := ht.Object("KubevirtMachineTemplate", "t/kubernetes-prod-md0-ffffff", ht.OwnedBy("kubernetes-nodes-prod-md0"), ht.Set("spec.template.spec.cores", int64(4)))
	h := w.Create(ht.Helm, renamed).Delete(ht.Helm, w.md0.Template).Read(t)
	wantEvidence(t, check.Judge(h), verify.Failed, "KubevirtMachineTemplate t/kubernetes-prod-md0-abc123 deleted",
		"KubevirtMachineTemplate t/kubernetes-prod-md0-ffffff appeared; against kubernetes-prod-md0-abc123:\n"+
			"--- kubernetes-prod-md0-abc123\n+++ kubernetes-prod-md0-ffffff\n@@ -1,4 +1,4 @@\n template:\n   spec:\n-    cores: 2\n+    cores: 4\n \n")

	w = newWorld()
	w.Update(ht.Human, w.md0.Template, ht.Set("spec.template.spec.cores", int64(3)))
	if r := check.Judge(w.Read(t)); r.Verdict != verify.Failed || !strings.Contains(r.Evidence[0].Change, "-    cores: 2\n+    cores: 3") || r.Evidence[0].Writer.User != ht.Human.User {
		t.Errorf("a changed template: %+v", r)
	}
	wantEvidence(t, verify.TemplateUnchanged(verify.Subject{Namespace: "t", Cluster: "none"}).Judge(w.Read(t)), verify.Inconclusive)
}

func TestValues(t *testing.T) {
	key := history.ReleaseKey{Namespace: "t", Name: "r"}
	hr := ht.Object("HelmRelease", "t/r", ht.Set("spec.values", map[string]any{
		"minReplicas": int64(2), "roles": []any{"ingress-nginx"}, "resources": map[string]any{"cpu": "4", "memory": "8Gi"}, "images": map[string]any{"kubectl": "x", "other": "y"}, "free": map[string]any{"any": "thing"}}))
	judge := func(want map[string]any) verify.Result {
		return verify.ValuesCarried(key, want).Judge(ht.New().Baseline(hr.DeepCopy()).Read(t))
	}
	wantEvidence(t, judge(map[string]any{"minReplicas": 2, "roles": []string{"ingress-nginx"}, "resources": map[string]any{"cpu": "4"}, "version": nil}), verify.Passed)
	wantEvidence(t, judge(map[string]any{"minReplicas": 3, "roles": []string{}, "resources": map[string]any{"cpu": 4, "gpu": "1"}, "images": nil, "talos": map[string]any{}, "free": map[string]any{}}), verify.Failed,
		`HelmRelease t/r value free is {"any":"thing"}, want {}`,
		`HelmRelease t/r value images is {"kubectl":"x","other":"y"}, and should not be there`,
		"HelmRelease t/r value minReplicas is 2, want 3",
		`HelmRelease t/r value resources.cpu is "4", want 4`,
		`HelmRelease t/r value resources.gpu is not there, want "1"`,
		`HelmRelease t/r value roles is ["ingress-nginx"], want []`,
		"HelmRelease t/r value talos is not there, want {}")

	declared := func(stored ht.Stored) verify.Result {
		stored.Release, stored.Revision = "t/r", 1
		return verify.ValuesDeclared(key).Judge(ht.New().Baseline(hr.DeepCopy(), stored.Secret()).Read(t))
	}
	full := `{"properties":{"minReplicas":{},"roles":{"type":"array"},"resources":{"properties":{"cpu":{},"memory":{}}},"images":{"properties":{"kubectl":{}}},"free":{"type":"object"}}}`
	wantEvidence(t, declared(ht.Stored{Schema: full}), verify.Failed, "HelmRelease t/r value images.other is not in the chart's schema")
	wantEvidence(t, declared(ht.Stored{Schema: strings.Replace(full, `"kubectl":{}`, `"kubectl":{},"other":{}`, 1)}), verify.Passed)
	wantEvidence(t, declared(ht.Stored{}), verify.Failed, "HelmRelease t/r its release has no deployed revision whose chart has a schema")
	wantEvidence(t, declared(ht.Stored{Schema: full, Status: "failed"}), verify.Failed, "HelmRelease t/r its release has no deployed revision whose chart has a schema")
	if r := declared(ht.Stored{Schema: "{"}); r.Verdict != verify.Failed || !strings.Contains(r.Evidence[0].Change, "cannot be read") {
		t.Errorf("a broken schema: %+v", r)
	}
}

func TestLogLine(t *testing.T) {
	h := ht.New().Log("migration", "WARNING: skip a").Log("migration", "WARNING: skip b").Log("other", "WARNING: skip c").Read(t)
	warning := regexp.MustCompile("^WARNING")
	wantEvidence(t, verify.LogLine("migration", warning, 2).Judge(h), verify.Passed)
	wantEvidence(t, verify.LogLine("migration", warning, 3).Judge(h), verify.Failed, `log migration 2 of its 2 lines match "^WARNING", want at least 3`)
}

func TestNoWritesBy(t *testing.T) {
	w := newWorld()
	objects := verify.These(ht.Ref(w.md0.Deployment))
	w.Update(ht.Migration, w.md0.Deployment, ht.Label("a", "b"))
	w.Request(history.Write{User: ht.Migration.User, Verb: "patch", Code: 409, Resource: ht.Ref(w.md0.Deployment).Resource, Namespace: "t", Name: w.md0.Deployment.GetName(), UID: string(w.md0.Deployment.GetUID())})
	w.Update(ht.CAPI, w.md0.Deployment, ht.Set("status.x", "y")).Update(ht.Migration, w.large.Deployment, ht.Label("a", "b"))
	w.Mark("re-run").Update(ht.Helm, w.md0.Deployment, ht.Label("a", "c"))
	h := w.Read(t)
	migration := regexp.MustCompile("cozystack-migration-hook$")
	wantEvidence(t, verify.NoWritesBy(migration, objects).Judge(h), verify.Failed, "MachineDeployment t/kubernetes-prod-md0 written: patch")
	wantEvidence(t, verify.NoWritesBy(migration, objects, "re-run").Judge(h), verify.Passed)
	wantEvidence(t, verify.NoWritesBy(anybody, objects, "re-run").Judge(h), verify.Failed, "MachineDeployment t/kubernetes-prod-md0 written: patch")
	wantEvidence(t, verify.NoWritesBy(migration, objects, "typo").Judge(h), verify.Inconclusive)
	wantEvidence(t, verify.NoWritesBy(regexp.MustCompile("nobody"), verify.These()).Judge(h), verify.Inconclusive)
	if got := len(verify.Writes(h, anybody, verify.All(md0), "upgrade")); got != 2 {
		t.Errorf("%d writes to the pool in the upgrade, want 2", got)
	}
}

func TestNeverThere(t *testing.T) {
	hr := ht.Object("HelmRelease", "t/x")
	check := verify.NeverThere(ht.Ref(hr))
	wantEvidence(t, check.Judge(ht.New().Read(t)), verify.Passed)
	wantEvidence(t, check.Judge(ht.New().Create(ht.Migration, hr).Delete(ht.Human, hr).Read(t)), verify.Failed, "HelmRelease t/x was there")
	wantEvidence(t, verify.NeverThere(history.Ref{Resource: "typos", Name: "x"}).Judge(ht.New().Read(t)), verify.Inconclusive)
}

func TestMatcher(t *testing.T) {
	w := newWorld()
	w.Delete(ht.CAPK, w.md0.Workers[0].VM)
	h := w.Read(t)
	var failures []string
	g := gomega.NewGomega(func(message string, _ ...int) { failures = append(failures, message) })
	g.Expect(h).To(verify.Pass(verify.NoChurn(large)))
	if len(failures) != 0 {
		t.Fatalf("failures %q", failures)
	}
	g.Expect(h).To(verify.Pass(verify.NoChurn(md0)))
	g.Expect(h).NotTo(verify.Pass(verify.NoChurn(large)))
	g.Expect("no history").To(verify.Pass(verify.NoChurn(md0)))
	for i, want := range []string{"no churn of t/prod/md0: fail\n  VirtualMachine " + worker + " deleted (phase upgrade, +1.0 s) by " + ht.CAPK.User, "no churn of t/prod/md0-large: pass, and should not", "not a string"} {
		if i >= len(failures) || !strings.Contains(failures[i], want) {
			t.Errorf("message %d of %q lacks %q", i, failures, want)
		}
	}
}
