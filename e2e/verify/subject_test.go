package verify_test

import (
	"reflect"
	"sort"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func TestSubjectSelectsExactly(t *testing.T) {
	prod, eu := ht.Object("Cluster", "t/kubernetes-prod"), ht.Object("Cluster", "t/kubernetes-prod-eu")
	plane := ht.Object("Cluster", "t/computeplane-cluster")
	pools := map[string]*ht.Pool{
		"prod/md0": ht.NewPool(prod, "md0", "abc123", 1), "prod/md0-large": ht.NewPool(prod, "md0-large", "abc123", 1),
		"prod/md0-0a1b2c": ht.NewPool(prod, "md0-0a1b2c", "abc123", 1), // its objects look like md0's templates
		"prod-eu/md0":     ht.NewPool(eu, "md0", "abc123", 1),
		"plane/md0":       ht.NewPool(plane, "md0", "abc123", 1),
	}
	b := ht.New().Baseline(ht.Object("Namespace", "t"), prod, eu, plane)
	for _, p := range pools {
		b.Baseline(p.Objects()...)
	}
	talos := ht.Object("TalosConfigTemplate", "t/kubernetes-prod-md0", func(o *unstructured.Unstructured) {
		control := &unstructured.Unstructured{Object: map[string]any{"kind": "KamajiControlPlane"}}
		control.SetName("kubernetes-prod")
		ht.Owner(control)(o)
	})
	bare := ht.Object("WorkloadMonitor", "t/kubernetes-prod-bare") // stripped of every annotation
	bareMD := ht.Object("MachineDeployment", "t/kubernetes-prod-bare", ht.Set("spec.clusterName", "kubernetes-prod"))
	bareTemplate := ht.Object("KubevirtMachineTemplate", "t/kubernetes-prod-bare-00ff00")
	child := func(name, cluster, release string) *unstructured.Unstructured {
		return ht.Object("HelmRelease", "t/"+name, ht.Set("spec.values.cluster", cluster), ht.Set("spec.values.clusterReleaseName", release))
	}
	releases := []*unstructured.Unstructured{ht.Object("HelmRelease", "t/kubernetes-prod"), ht.Object("HelmRelease", "t/kubernetes-prod-eu"),
		child("kubernetes-nodes-prod-md0", "prod", ""), child("kubernetes-nodes-prod-eu-md0", "prod-eu", ""),
		child("kubernetes-nodes-computeplane-cluster-md0", "computeplane-cluster", "computeplane-cluster"), ht.Object("HelmRelease", "t/unrelated")}
	b.Baseline(talos, bare, bareMD, bareTemplate).Baseline(releases...)
	b.Baseline(ht.Object("Namespace", "t2"), ht.Object("MachineDeployment", "t2/kubernetes-prod-md0", ht.Set("spec.clusterName", "kubernetes-prod")))
	lone := ht.Object("WorkloadMonitor", "t/kubernetes-prod-lone", ht.OwnedBy("kubernetes-prod"))
	b.Baseline(lone).Update(ht.Migration, lone, ht.OwnedBy("kubernetes-prod-eu")) // it stays prod's, whoever takes it over
	h := b.Read(t)

	selected := func(s verify.Subject) (out []string) {
		for _, l := range h.Lifetimes() {
			if s.Selects(h, l) {
				out = append(out, l.UID)
			}
		}
		sort.Strings(out)
		return out
	}
	uids := func(lists ...[]*unstructured.Unstructured) (out []string) {
		for _, l := range lists {
			for _, o := range l {
				out = append(out, string(o.GetUID()))
			}
		}
		sort.Strings(out)
		return out
	}
	one := func(o ...*unstructured.Unstructured) []*unstructured.Unstructured { return o }
	for _, c := range []struct {
		subject verify.Subject
		want    []string
	}{
		{verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0"}, uids(pools["prod/md0"].Objects(), one(talos, releases[2]))},
		{verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0-large"}, uids(pools["prod/md0-large"].Objects())},
		{verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0-0a1b2c"}, uids(pools["prod/md0-0a1b2c"].Objects())},
		{verify.Subject{Namespace: "t", Cluster: "prod", Pool: "bare"}, uids(one(bare, bareMD, bareTemplate))},
		{verify.Subject{Namespace: "t", Cluster: "prod-eu", Pool: "md0"}, uids(pools["prod-eu/md0"].Objects(), one(releases[3]))},
		{verify.Subject{Namespace: "t", Cluster: "prod-eu"}, uids(pools["prod-eu/md0"].Objects(), one(eu, releases[1], releases[3]))},
		{verify.Subject{Namespace: "t", Cluster: "prod"}, uids(pools["prod/md0"].Objects(), pools["prod/md0-large"].Objects(), pools["prod/md0-0a1b2c"].Objects(),
			one(prod, talos, bare, bareMD, bareTemplate, lone, releases[0], releases[2]))},
		{verify.Subject{Namespace: "t", Release: "computeplane-cluster", Pool: "md0"}, uids(pools["plane/md0"].Objects(), one(releases[4]))},
		{verify.Subject{Namespace: "t2"}, []string{"machinedeployment:t2/kubernetes-prod-md0", "namespace:t2"}},
	} {
		if got := selected(c.subject); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s selects\n%q\nwant\n%q", c.subject, got, c.want)
		}
	}
	if got := len(selected(verify.Subject{Namespace: "t"})); got != len(h.Lifetimes())-2 {
		t.Errorf("the namespace selects %d of %d objects, want all but two", got, len(h.Lifetimes()))
	}
	if got := verify.PoolObjects(md0)(h); len(got) != 4 {
		t.Errorf("the pool's objects are %v, want four", got)
	}
}

func TestReleaseNamesOfASubject(t *testing.T) {
	plane := verify.Subject{Namespace: "t", Release: "computeplane-cluster", Pool: "md0"}
	for got, want := range map[history.ReleaseKey]string{
		md0.ClusterRelease(): "kubernetes-prod", md0.PoolRelease(): "kubernetes-nodes-prod-md0",
		plane.ClusterRelease(): "computeplane-cluster", plane.PoolRelease(): "kubernetes-nodes-computeplane-cluster-md0",
	} {
		if got.Name != want || got.Namespace != "t" {
			t.Errorf("release %v, want %s in t", got, want)
		}
	}
}
