package tenant

import (
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The limits are what Helm's 53 characters leave; the prose of the pull request miscounts its own example by one.
func TestLimits(t *testing.T) {
	for _, c := range []struct {
		cluster, pool int
		fits          bool
	}{
		{32, 3, true}, {33, 3, false}, {42, 3, false}, // with md0
		{20, 15, true}, {20, 16, false}, // 36 and 37 with the dash
		{1, 34, true}, {1, 35, false},
	} {
		p := New("t").Cluster(strings.Repeat("c", c.cluster)).Pool(strings.Repeat("p", c.pool))
		if p.Fits() != c.fits {
			t.Errorf("cluster of %d, pool of %d characters: release %q of %d fits: %v, want %v",
				c.cluster, c.pool, p.Release(), len(p.Release()), p.Fits(), c.fits)
		}
	}
	if MaxClusterName != 42 || MaxPoolApp != 36 {
		t.Errorf("longest cluster %d, longest <cluster>-<pool> %d; want 42 and 36", MaxClusterName, MaxPoolApp)
	}
}

func TestObjects(t *testing.T) {
	te := New("alpha-beta")
	p := te.Cluster("prod", Set("version", "v1.33")).Pool("md0", Resources("2", "4Gi"), Machines(2))
	objects := te.Objects("cozystack-values", "_cluster: {}")
	if len(objects) != 3 || objects[0].GetName() != "tenant-alpha-beta" || objects[1].GetName() != "cozystack-values" {
		t.Fatalf("got %v", objects)
	}
	hr := objects[2]
	if hr.GetName() != "kubernetes-prod" || hr.GetNamespace() != "tenant-alpha-beta" {
		t.Errorf("got HelmRelease %s/%s", hr.GetNamespace(), hr.GetName())
	}
	cpu, _, _ := unstructured.NestedString(hr.Object, "spec", "values", "nodeGroups", "md0", "resources", "cpu")
	version, _, _ := unstructured.NestedString(hr.Object, "spec", "values", "version")
	if cpu != "2" || version != "v1.33" || p.Machines() != 2 {
		t.Errorf("values carry cpu %q and version %q, %d machines", cpu, version, p.Machines())
	}
	if p.Object() != "kubernetes-prod-md0" || p.Release() != "kubernetes-nodes-prod-md0" {
		t.Errorf("pool's objects %q, release %q", p.Object(), p.Release())
	}
}

func TestNodeGroupsGivenWholeWin(t *testing.T) {
	te := New("t")
	te.Cluster("prod", Set("nodeGroups", "a string")).Pool("md0")
	got, _, _ := unstructured.NestedString(te.Clusters[0].HelmRelease().Object, "spec", "values", "nodeGroups")
	if got != "a string" {
		t.Errorf("nodeGroups are %q", got)
	}
}

func TestAnnotate(t *testing.T) {
	te := New("t")
	te.Cluster("prod").Pool("md0").Annotate("MachineHealthCheck", "by hand", map[string]any{"a": nil})
	e := te.Edits[0]
	if e.Object() != "MachineHealthCheck tenant-t/kubernetes-prod-md0" || e.APIVersion != "cluster.x-k8s.io/v1beta1" {
		t.Errorf("edits %s of %s", e.Object(), e.APIVersion)
	}
	if _, removes := e.Patch()["metadata"].(map[string]any)["annotations"].(map[string]any)["a"]; !removes {
		t.Errorf("the patch %v does not remove the annotation", e.Patch())
	}
}

func TestComputePlane(t *testing.T) {
	te := New("t")
	p := te.ComputePlane().Pool(strings.Repeat("p", MaxPlaneKey), Roles(IngressRole))
	if MaxPlaneKey != 15 || !p.Fits() || te.ComputePlane().Pool(p.Name+"p").Fits() {
		t.Errorf("%d characters are left for a pool's name", MaxPlaneKey)
	}
	if p.Object() != "computeplane-cluster-"+p.Name || p.Release() != "kubernetes-nodes-computeplane-cluster-"+p.Name {
		t.Errorf("pool's objects %q, release %q", p.Object(), p.Release())
	}
	module := te.Clusters[0].HelmRelease()
	roles, _, _ := unstructured.NestedStringSlice(module.Object, "spec", "values", "nodeGroups", p.Name, "roles")
	if module.GetName() != "computeplane" || len(roles) != 1 || roles[0] != "ingress-nginx" {
		t.Errorf("module %s with roles %v", module.GetName(), roles)
	}
}

func TestEditsOfSpec(t *testing.T) {
	te := New("t")
	c := te.Cluster("prod")
	p := c.Pool("md0")
	p.Scale(3)
	p.Pause()
	c.Edit("larger", map[string]any{"version": "v1.34"})
	for i, want := range []struct {
		object, apiVersion string
		spec               map[string]any
	}{
		{"MachineDeployment tenant-t/kubernetes-prod-md0", "cluster.x-k8s.io/v1beta1", map[string]any{"replicas": int64(3)}},
		{"MachineDeployment tenant-t/kubernetes-prod-md0", "cluster.x-k8s.io/v1beta1", map[string]any{"paused": true}},
		{"HelmRelease tenant-t/kubernetes-prod", "helm.toolkit.fluxcd.io/v2", map[string]any{"values": map[string]any{"version": "v1.34"}}},
	} {
		e := te.Edits[i]
		if e.Object() != want.object || e.APIVersion != want.apiVersion || !reflect.DeepEqual(e.Patch()["spec"], want.spec) {
			t.Errorf("edit %d of %s (%s) is %v, want %v", i, e.Object(), e.APIVersion, e.Patch(), want)
		}
	}
	c.Pools[0].Annotate("WorkloadMonitor", "by hand", map[string]any{"a": "b"})
	if _, has := te.Edits[3].Patch()["spec"]; has {
		t.Errorf("an edit of annotations touches the spec: %v", te.Edits[3].Patch())
	}
}

func TestImplicitAndLate(t *testing.T) {
	te := New("t")
	c := te.Cluster("prod")
	late := te.Cluster("late")
	late.Late = true
	if md0 := c.Implicit(); md0.Object() != "kubernetes-prod-md0" || md0.Machines() != 0 || len(te.Pools()) != 0 {
		t.Errorf("the implicit pool %s of %d machines is declared: %v", md0.Object(), md0.Machines(), te.Pools())
	}
	if objects := te.Objects("s", ""); len(objects) != 3 || objects[2].GetName() != "kubernetes-prod" {
		t.Errorf("the late cluster is made, too: %v", objects)
	}
	c.Pool("a", Machines(2))
	c.Pool("b")
	if te.Machines() != 3 {
		t.Errorf("%d machines, want 3", te.Machines())
	}
}

func TestEdits(t *testing.T) {
	te := New("t")
	c := te.Cluster("prod")
	c.Pool("md0", Machines(2)).Strip("MachineDeployment")
	c.Break("by hand", map[string]any{"nodeGroups": []any{"md0"}})
	c.Suspend()
	c.Pool("md1")
	if te.Machines() != 3 {
		t.Errorf("%d machines, want 3", te.Machines())
	}
	strip, broken, suspend := te.Edits[0], te.Edits[1], te.Edits[2]
	meta := strip.Patch()["metadata"].(map[string]any)
	for _, key := range []string{"meta.helm.sh/release-name", "meta.helm.sh/release-namespace"} {
		if value, removes := meta["annotations"].(map[string]any)[key]; !removes || value != nil {
			t.Errorf("stripping does not remove annotation %s: %v", key, meta)
		}
	}
	if value, removes := meta["labels"].(map[string]any)["app.kubernetes.io/managed-by"]; !removes || value != nil {
		t.Errorf("stripping does not remove the label: %v", meta)
	}
	if _, touches := strip.Patch()["spec"]; touches || strip.Breaks {
		t.Errorf("stripping touches more: %+v", strip)
	}
	for _, e := range []Edit{broken, suspend} {
		if e.Object() != "HelmRelease tenant-t/kubernetes-prod" || e.APIVersion != "helm.toolkit.fluxcd.io/v2" || e.Breaks != (e.Why == "by hand") {
			t.Errorf("edits %s: %+v", e.Object(), e)
		}
	}
	values, _, _ := unstructured.NestedSlice(broken.Patch(), "spec", "values", "nodeGroups")
	if suspended, _, _ := unstructured.NestedBool(suspend.Patch(), "spec", "suspend"); !suspended || len(values) != 1 {
		t.Errorf("patches %v and %v", broken.Patch(), suspend.Patch())
	}
}

func TestUnusualReleases(t *testing.T) {
	te := New("t")
	old, none := te.Cluster("old"), te.Cluster("none")
	old.Unlabelled, none.NoCluster = true, true
	kind := func(c *Cluster) string { return c.HelmRelease().GetLabels()["apps.cozystack.io/application.kind"] }
	suspended := func(c *Cluster) bool {
		s, _, _ := unstructured.NestedBool(c.HelmRelease().Object, "spec", "suspend")
		return s
	}
	chart := func(c *Cluster) string {
		s, _, _ := unstructured.NestedString(c.HelmRelease().Object, "spec", "chartRef", "name")
		return s
	}
	if kind(old) != "" || suspended(old) || kind(none) != "Kubernetes" || !suspended(none) || chart(old) == chart(none) {
		t.Errorf("unlabelled: %v, no cluster: %v", old.HelmRelease(), none.HelmRelease())
	}
	for c, want := range map[*Cluster]bool{old: true, none: false} {
		if _, has, _ := unstructured.NestedMap(c.HelmRelease().Object, "spec", "values", "nodeGroups"); has != want {
			t.Errorf("%s has nodeGroups: %v", c.Name, has)
		}
	}
}
