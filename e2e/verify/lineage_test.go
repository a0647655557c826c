package verify_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// application labels an object as belonging to one.
func application(kind, name string) func(*unstructured.Unstructured) {
	return ht.Label("apps.cozystack.io/application.kind", kind, "apps.cozystack.io/application.name", name)
}

func TestLabelledFor(t *testing.T) {
	check := verify.LabelledFor(verify.Launchers(md0), verify.Application{Kind: "Kubernetes", Name: "prod"})
	const pod = "Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 "
	for name, c := range map[string]struct {
		change []func(*unstructured.Unstructured)
		want   []string
	}{
		"the cluster's":   {[]func(*unstructured.Unstructured){application("Kubernetes", "prod")}, nil},
		"the pool's":      {[]func(*unstructured.Unstructured){application("KubernetesNodes", "prod-md0")}, []string{pod + `its labels name application "KubernetesNodes prod-md0", want "Kubernetes prod"`}},
		"another cluster": {[]func(*unstructured.Unstructured){application("Kubernetes", "prod-eu")}, []string{pod + `its labels name application "Kubernetes prod-eu", want "Kubernetes prod"`}},
		"none":            {nil, []string{pod + `its labels name application " ", want "Kubernetes prod"`}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.Update(ht.KubeVirt, w.md0.Workers[0].Pod, c.change...)
			verdict := verify.Passed
			if c.want != nil {
				verdict = verify.Failed
			}
			wantEvidence(t, check.Judge(w.Read(t)), verdict, c.want...)
		})
	}
	wantEvidence(t, verify.LabelledFor(verify.Launchers(verify.Subject{Namespace: "t", Cluster: "none"}), verify.Application{}).Judge(newWorld().Read(t)), verify.Inconclusive)
}

func TestCountedFor(t *testing.T) {
	parent, child := ht.Object("HelmRelease", "t/kubernetes-prod", application("Kubernetes", "prod")), ht.Object("HelmRelease", "t/kubernetes-nodes-prod-md0", application("KubernetesNodes", "prod-md0"))
	judge := func(objects ...*unstructured.Unstructured) verify.Result {
		w := newWorld()
		adopt(w, w.md0.Monitor)
		for _, o := range objects {
			w.Create(ht.Migration, o.DeepCopy())
		}
		return verify.CountedFor(verify.These(ht.Ref(w.md0.Monitor)), verify.Application{Kind: "KubernetesNodes", Name: "prod-md0"}).Judge(w.Read(t))
	}
	wantEvidence(t, judge(parent, child), verify.Passed)
	wantEvidence(t, judge(parent), verify.Failed, `WorkloadMonitor t/kubernetes-prod-md0 its annotations name release "kubernetes-nodes-prod-md0", and there is no HelmRelease of that name`)
	application("KubernetesNodes", "prod")(child)
	wantEvidence(t, judge(parent, child), verify.Failed, `WorkloadMonitor t/kubernetes-prod-md0 its release kubernetes-nodes-prod-md0 is application "KubernetesNodes prod", want "KubernetesNodes prod-md0"`)
}

func TestCertSANs(t *testing.T) {
	prod := verify.Subject{Namespace: "t", Cluster: "prod"}
	control := func(sans ...any) *unstructured.Unstructured {
		return ht.Object("KamajiControlPlane", "t/kubernetes-prod", ht.Set("spec.network.certSANs", sans))
	}
	service := func(address string) *unstructured.Unstructured {
		return ht.Object("Service", "t/kubernetes-prod", ht.Set("spec.clusterIP", address))
	}
	const it = "KamajiControlPlane t/kubernetes-prod "
	for name, c := range map[string]struct {
		objects []*unstructured.Unstructured
		want    string
	}{
		"complete":   {[]*unstructured.Unstructured{control("kubernetes-prod", "10.0.0.7"), service("10.0.0.7")}, ""},
		"names only": {[]*unstructured.Unstructured{control("kubernetes-prod"), service("10.0.0.7")}, it + `its certSANs [kubernetes-prod] lack the address "10.0.0.7" of Service kubernetes-prod`},
		"another":    {[]*unstructured.Unstructured{control("10.0.0.70"), service("10.0.0.7")}, it + `its certSANs [10.0.0.70] lack the address "10.0.0.7" of Service kubernetes-prod`},
		"headless":   {[]*unstructured.Unstructured{control("None"), service("None")}, it + `its certSANs [None] lack the address "None" of Service kubernetes-prod`},
		"no Service": {[]*unstructured.Unstructured{control("10.0.0.7")}, it + "there is no Service kubernetes-prod"},
		"no plane":   {nil, "kamajicontrolplanes.controlplane.cluster.x-k8s.io t/kubernetes-prod was never there"},
	} {
		t.Run(name, func(t *testing.T) {
			r := verify.CertSANs(prod).Judge(ht.New().Create(ht.Helm, c.objects...).Read(t))
			if c.want == "" {
				wantEvidence(t, r, verify.Passed)
			} else {
				wantEvidence(t, r, verify.Failed, c.want)
			}
		})
	}
}

func TestRolling(t *testing.T) {
	older := func(replicas int64, template string) func(*world) *unstructured.Unstructured {
		return func(w *world) *unstructured.Unstructured {
			return ht.Object("MachineSet", "t/kubernetes-prod-md0-older", ht.Owner(w.md0.Deployment), ht.Set("spec.replicas", replicas),
				ht.Label("cluster.x-k8s.io/cluster-name", "kubernetes-prod", "cluster.x-k8s.io/deployment-name", "kubernetes-prod-md0"),
				ht.Set("spec.template.spec.infrastructureRef.name", template))
		}
	}
	for name, c := range map[string]struct {
		set  func(*world) *unstructured.Unstructured
		want verify.Verdict
	}{
		"an older template": {older(1, "kubernetes-prod-md0-0ff0ff"), verify.Passed},
		"without machines":  {older(0, "kubernetes-prod-md0-0ff0ff"), verify.Inconclusive},
		"the same template": {older(1, "kubernetes-prod-md0-abc123"), verify.Inconclusive},
	} {
		w := newWorld()
		ht.Set("spec.template.spec.infrastructureRef.name", "kubernetes-prod-md0-abc123")(w.md0.Set)
		b := ht.New().Baseline(w.cluster, w.md0.Deployment, w.md0.Set, c.set(w))
		if r := verify.Rolling(md0).Judge(b.Read(t)); r.Verdict != c.want {
			t.Errorf("%s: %+v, want %s", name, r, c.want)
		}
	}
	late := ht.New().Baseline(ht.Object("Namespace", "t"))
	if r := verify.Rolling(md0).Judge(late.Read(t)); r.Verdict != verify.Inconclusive || r.Reason != "t/prod/md0 has no MachineDeployment at the baseline" {
		t.Errorf("nothing there: %+v", r)
	}
}

func TestSpecKeptFieldIs(t *testing.T) {
	w := newWorld()
	check := verify.SpecKept(verify.These(ht.Ref(w.md0.HealthCheck), ht.Ref(w.md0.Deployment)))
	replicas := func(want string) verify.Check {
		return verify.FieldIs(verify.These(ht.Ref(w.md0.Deployment)), want, "spec", "replicas")
	}
	adopt(w, w.md0.HealthCheck, w.md0.Deployment)
	h := w.Read(t)
	wantEvidence(t, check.Judge(h), verify.Passed)
	wantEvidence(t, replicas("1").Judge(h), verify.Passed)
	wantEvidence(t, replicas("3").Judge(h), verify.Failed, "MachineDeployment t/kubernetes-prod-md0 [spec replicas] is 1, want 3")

	w = newWorld()
	w.Update(ht.Helm, w.md0.HealthCheck, ht.Set("spec.maxUnhealthy", "40%"))
	wantEvidence(t, check.Judge(w.Read(t)), verify.Failed, "MachineHealthCheck t/kubernetes-prod-md0 has another spec:\n"+
		"--- kubernetes-prod-md0\n+++ kubernetes-prod-md0\n@@ -1,2 +1,3 @@\n clusterName: kubernetes-prod\n+maxUnhealthy: 40%\n \n")
	w.Update(ht.Helm, w.md0.HealthCheck, func(o *unstructured.Unstructured) {
		unstructured.RemoveNestedField(o.Object, "spec", "maxUnhealthy")
	})
	wantEvidence(t, check.Judge(w.Read(t)), verify.Passed)

	monitor := ht.Object("WorkloadMonitor", "t/kubernetes-prod-md0", ht.Set("spec.version", "0.1.0"), ht.Set("spec.type", "worker"))
	mw := ht.New().Baseline(monitor).Update(ht.Helm, monitor, ht.Set("spec.version", "0.2.0"))
	check = verify.SpecKept(verify.These(ht.Ref(monitor)))
	wantEvidence(t, check.Judge(mw.Read(t)), verify.Passed) // its chart's version
	mw.Update(ht.Helm, monitor, ht.Set("spec.type", "other"))
	if r := check.Judge(mw.Read(t)); r.Verdict != verify.Failed {
		t.Errorf("a monitor of another type: %+v", r)
	}

	late := ht.Object("MachineHealthCheck", "t/late")
	wantEvidence(t, verify.SpecKept(verify.These(ht.Ref(late))).Judge(ht.New().Create(ht.Helm, late).Read(t)), verify.Failed, "MachineHealthCheck t/late was not there at the baseline")
	wantEvidence(t, replicas("1").Judge(ht.New().Read(t)), verify.Failed, "machinedeployments.cluster.x-k8s.io t/kubernetes-prod-md0 was never there")
	wantEvidence(t, verify.SpecKept(func(*history.History) []history.Ref { return nil }).Judge(h), verify.Inconclusive)
}
