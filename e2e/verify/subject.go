package verify

import (
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Subject selects the objects of one tenant, of one of its clusters, or of one of the cluster's pools.
type Subject struct {
	Namespace string
	Cluster   string // "prod"; "": the whole namespace
	Pool      string // "md0"; "": all pools of the cluster
	Release   string // the cluster's Helm release when it is not kubernetes-<cluster>, "computeplane-cluster"
	Empty     bool   // it has no worker at the baseline, and must not get one
}

// String is "tenant-a", "tenant-a/prod" or "tenant-a/prod/md0".
func (s Subject) String() string {
	parts := []string{s.Namespace}
	for _, p := range []string{s.Cluster, s.Pool} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	return strings.Join(parts, "/")
}

// ClusterRelease is the release of the cluster, kubernetes-<cluster> unless Release says otherwise.
func (s Subject) ClusterRelease() history.ReleaseKey {
	name := s.Release
	if name == "" {
		name = "kubernetes-" + s.Cluster
	}
	return history.ReleaseKey{Namespace: s.Namespace, Name: name}
}

// PoolRelease is the release that the pool gets by the split, kubernetes-nodes-<cluster>-<pool>.
func (s Subject) PoolRelease() history.ReleaseKey {
	name := "kubernetes-nodes-" + strings.TrimPrefix(s.ClusterRelease().Name, "kubernetes-") + "-" + s.Pool
	return history.ReleaseKey{Namespace: s.Namespace, Name: name}
}

// poolName is the name of the pool's objects, kubernetes-<cluster>-<pool>.
func (s Subject) poolName() string { return s.ClusterRelease().Name + "-" + s.Pool }

// Selects says whether an object belongs to the subject: by what it says of itself, or by an object that it exists for.
// Names are compared whole, so that md0 does not select md0-large, nor cluster prod what is prod-eu's.
func (s Subject) Selects(h *history.History, l *history.Lifetime) bool {
	family := append([]*history.Lifetime{l}, h.Ancestors(l)...)
	return anyOf(family, func(l *history.Lifetime) bool { return namespaceOf(l) == s.Namespace }) &&
		(s.Cluster == "" && s.Release == "" || anyOf(family, s.inCluster) || s.besideDeployment(h, l)) &&
		(s.Pool == "" || anyOf(family, s.inPool))
}

func namespaceOf(l *history.Lifetime) string {
	switch l.Kind {
	case "Namespace":
		return l.Name
	case "PersistentVolume":
		ns, _, _ := unstructured.NestedString(l.Last().Object, "spec", "claimRef", "namespace")
		return ns
	}
	return l.Namespace
}

// inCluster reads the first state of the object: a planted mistake may rewrite annotations, but not where it came from.
func (s Subject) inCluster(l *history.Lifetime) bool {
	o, release := l.First(), s.ClusterRelease().Name
	if name, has := o.GetLabels()["cluster.x-k8s.io/cluster-name"]; has {
		return name == release
	}
	if name, has, _ := unstructured.NestedString(o.Object, "spec", "clusterName"); has {
		return name == release
	}
	switch l.Kind {
	case "Cluster", "KubevirtCluster", "KamajiControlPlane":
		return l.Name == release
	case "HelmRelease":
		return l.Name == release || s.isChild(o)
	}
	for _, owner := range o.GetOwnerReferences() {
		if owner.Name == release && (owner.Kind == "Cluster" || owner.Kind == "KubevirtCluster" || owner.Kind == "KamajiControlPlane") {
			return true
		}
	}
	by := o.GetAnnotations()["meta.helm.sh/release-name"]
	return by == release || s.Pool != "" && by == s.PoolRelease().Name
}

// besideDeployment says whether a MachineDeployment of the cluster has the object's name, or its name without the hash. It
// finds objects that say nothing of themselves, for example without any annotation.
func (s Subject) besideDeployment(h *history.History, l *history.Lifetime) bool {
	name := l.Name
	switch l.Kind {
	case "WorkloadMonitor", "TalosConfigTemplate":
	case "KubevirtMachineTemplate":
		name = strings.TrimSuffix(stem(l.Name), "-")
	default:
		return false
	}
	return anyOf(h.Named(history.Ref{Resource: machineDeployments, Namespace: l.Namespace, Name: name}), s.inCluster)
}

// isChild says whether a HelmRelease is a pool's release of this cluster, by the cluster that its values name.
func (s Subject) isChild(hr *unstructured.Unstructured) bool {
	if !strings.HasPrefix(hr.GetName(), "kubernetes-nodes-") {
		return false
	}
	release, has, _ := unstructured.NestedString(hr.Object, "spec", "values", "clusterReleaseName")
	if !has || release == "" {
		cluster, _, _ := unstructured.NestedString(hr.Object, "spec", "values", "cluster")
		release = "kubernetes-" + cluster
	}
	return release == s.ClusterRelease().Name
}

func (s Subject) inPool(l *history.Lifetime) bool {
	switch l.Kind {
	case "MachineDeployment", "MachineHealthCheck", "WorkloadMonitor", "TalosConfigTemplate":
		return l.Name == s.poolName()
	case "KubevirtMachineTemplate":
		return regexp.MustCompile("^" + regexp.QuoteMeta(s.poolName()) + "-[0-9a-f]{6}$").MatchString(l.Name)
	case "HelmRelease":
		return l.Name == s.PoolRelease().Name
	}
	return l.First().GetLabels()["cluster.x-k8s.io/deployment-name"] == s.poolName()
}

func anyOf[T any](items []T, f func(T) bool) bool {
	for _, i := range items {
		if f(i) {
			return true
		}
	}
	return false
}

// Objects select objects of a history by name; a name stays the same when an object is recreated.
type Objects func(*history.History) []history.Ref

// These are the objects with the given names.
func These(refs ...history.Ref) Objects {
	return func(*history.History) []history.Ref { return refs }
}

// PoolObjects are what the old chart rendered for the subject's pools, as of the baseline: KubevirtMachineTemplates,
// MachineDeployments, MachineHealthChecks, WorkloadMonitors.
func PoolObjects(s Subject) Objects {
	return func(h *history.History) []history.Ref {
		var out []history.Ref
		for _, l := range h.Lifetimes(machineTemplates, machineDeployments, machineHealthChecks, workloadMonitors) {
			if l.AtBaseline() && s.Selects(h, l) {
				out = append(out, l.Ref)
			}
		}
		return out
	}
}

// Launchers are the virt-launcher pods that the subject's VMs have in the end.
func Launchers(s Subject) Objects {
	return func(h *history.History) []history.Ref {
		var out []history.Ref
		for _, l := range h.Lifetimes(pods) {
			if h.Final(l.Ref) != nil && l.First().GetLabels()["kubevirt.io"] == "virt-launcher" && s.Selects(h, l) {
				out = append(out, l.Ref)
			}
		}
		return out
	}
}

// All are all recorded objects of the subject at the baseline, Events left out.
func All(s Subject) Objects {
	return func(h *history.History) []history.Ref {
		var out []history.Ref
		for _, l := range h.Lifetimes() {
			if l.AtBaseline() && l.Kind != "Event" && s.Selects(h, l) {
				out = append(out, l.Ref)
			}
		}
		return out
	}
}
