// Package tenant builds what a run puts on the old platform before it upgrades: tenants, their clusters and the
// clusters' worker pools, as the objects that Cozystack's API would write for them.
package tenant

import (
	"fmt"
	"maps"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Limits and names that follow from Helm and from the split of pools into releases of their own
// (Cozystack pull request 3315).
const (
	MaxReleaseName = 53 // characters; Helm refuses a longer release name
	ClusterPrefix  = "kubernetes-"
	PoolPrefix     = "kubernetes-nodes-"
	ImplicitPool   = "md0" // what an empty nodeGroups means
	// MaxClusterName is the longest cluster name that the old platform accepts.
	MaxClusterName = MaxReleaseName - len(ClusterPrefix)
	// MaxPoolApp is the longest "<cluster>-<pool>" whose pool fits into a release of its own.
	MaxPoolApp = MaxReleaseName - len(PoolPrefix)
)

// A Tenant is one namespace with clusters in it.
type Tenant struct {
	Name     string // "alpha", or "alpha-beta" for beta inside alpha
	Clusters []*Cluster
	// Edits are done once every machine of the fleet runs, before the baseline is taken.
	Edits []Edit
}

// New returns a tenant without clusters.
func New(name string) *Tenant { return &Tenant{Name: name} }

// Namespace is tenant-<name>.
func (t *Tenant) Namespace() string { return "tenant-" + t.Name }

// Cluster adds a cluster without pools.
func (t *Tenant) Cluster(name string, values ...Value) *Cluster {
	c := &Cluster{Tenant: t, Name: name, values: map[string]any{}}
	for _, v := range values {
		v(c.values)
	}
	t.Clusters = append(t.Clusters, c)
	return c
}

// Edit notes a change to one live object, to be made before the baseline.
func (t *Tenant) Edit(e Edit) { t.Edits = append(t.Edits, e) }

// Values are the pool's, as its owner wrote them: a copy.
func (p *Pool) Values() map[string]any { return maps.Clone(p.values) }

// Machines is how many machines the tenant's pools start with.
func (t *Tenant) Machines() int {
	n := 0
	for _, p := range t.Pools() {
		n += p.Machines()
	}
	return n
}

// Pools lists the declared pools of all the tenant's clusters.
func (t *Tenant) Pools() []*Pool {
	var pools []*Pool
	for _, c := range t.Clusters {
		pools = append(pools, c.Pools...)
	}
	return pools
}

// A Cluster is one managed Kubernetes cluster: HelmRelease kubernetes-<name> on the old platform.
type Cluster struct {
	Tenant *Tenant
	Name   string
	Pools  []*Pool
	// Late is a cluster that is not there on the old platform; an act makes it after the upgrade.
	Late bool
	// Unlabelled leaves the application labels out, as older platforms did.
	Unlabelled bool
	// NoCluster makes the release one that is labelled as a cluster and is none: suspended, and of a chart that nobody
	// publishes, so that nothing comes of it whatever the platform.
	NoCluster bool
	values    map[string]any
	plane     bool // it is the tenant's computeplane
}

// Release is the name of the cluster's HelmRelease, of its Helm release and of its control-plane objects.
func (c *Cluster) Release() string {
	if c.plane {
		return PlaneCluster
	}
	return ClusterPrefix + c.Name
}

// Edit notes a change to values of the cluster's release, as a JSON merge patch, made past every check of Cozystack's API.
func (c *Cluster) Edit(why string, values map[string]any) {
	c.Tenant.Edit(c.edit(why, map[string]any{"values": values}))
}

// Break notes an edit of the cluster's values, merged into those that it was made with, that the old platform's chart
// refuses: the cluster's release is left failing.
func (c *Cluster) Break(why string, values map[string]any) {
	e := c.edit(why, map[string]any{"values": values})
	e.Breaks = true
	c.Tenant.Edit(e)
}

// Suspend notes that somebody suspends the cluster's release.
func (c *Cluster) Suspend() {
	c.Tenant.Edit(c.edit("suspended by hand", map[string]any{"suspend": true}))
}

func (c *Cluster) edit(why string, spec map[string]any) Edit {
	return Edit{Why: why, APIVersion: releaseVersion, Kind: "HelmRelease", Namespace: c.Tenant.Namespace(), Name: c.Release(), Spec: spec}
}

// Pool adds a worker pool of one u1.medium with a disk of 20Gi, unless values say otherwise.
func (c *Cluster) Pool(name string, values ...Value) *Pool {
	p := &Pool{Cluster: c, Name: name, values: map[string]any{
		"minReplicas": int64(1), "maxReplicas": int64(3), "diskSize": "20Gi", "instanceType": "u1.medium"}}
	for _, v := range values {
		v(p.values)
	}
	c.Pools = append(c.Pools, p)
	return p
}

// Implicit is the pool that a cluster without declared pools has on the old platform. It is not declared.
func (c *Cluster) Implicit() *Pool {
	return &Pool{Cluster: c, Name: ImplicitPool, values: map[string]any{"minReplicas": int64(0)}}
}

// A Pool is one group of worker machines.
type Pool struct {
	Cluster *Cluster
	Name    string
	values  map[string]any
}

// Namespace is the tenant's.
func (p *Pool) Namespace() string { return p.Cluster.Tenant.Namespace() }

// Object is the name of the pool's MachineDeployment, MachineHealthCheck, WorkloadMonitor and TalosConfigTemplate,
// and the stem of its KubevirtMachineTemplates.
func (p *Pool) Object() string { return p.Cluster.Release() + "-" + p.Name }

// App is "<cluster>-<pool>", the application name of the pool after the split.
func (p *Pool) App() string { return p.Cluster.Name + "-" + p.Name }

// Release is the pool's own release after the split; see Fits.
func (p *Pool) Release() string { return PoolPrefix + p.App() }

// Fits tells whether Helm accepts the pool's own release name.
func (p *Pool) Fits() bool { return len(p.Release()) <= MaxReleaseName }

// Machines is how many machines the pool starts with.
func (p *Pool) Machines() int { n, _ := p.values["minReplicas"].(int64); return int(n) }

// A Value sets one field of a cluster's or a pool's Helm values.
type Value func(map[string]any)

// Set sets one field.
func Set(field string, value any) Value { return func(m map[string]any) { m[field] = value } }

// InstanceType sizes a pool by a VirtualMachineClusterInstancetype.
func InstanceType(name string) Value { return Set("instanceType", name) }

// Resources sizes a pool by CPU cores and memory instead of an instance type.
func Resources(cpu, memory string) Value {
	return Set("resources", map[string]any{"cpu": cpu, "memory": memory})
}

// Machines is how many machines a pool starts with, and the least that its autoscaler keeps.
func Machines(n int64) Value { return Set("minReplicas", n) }

// An Edit is one change to a live object, made by hand on the old platform.
type Edit struct {
	Why         string // "annotated to another release by hand"
	APIVersion  string
	Kind        string
	Namespace   string
	Name        string
	Annotations map[string]any // nil as a value removes the annotation
	Labels      map[string]any
	Spec        map[string]any // merged; nil as a value removes the field
	Breaks      bool           // the object is a HelmRelease, and the old platform fails on it from now on
}

// Scale notes that the autoscaler gave the pool n machines: it writes nothing but the MachineDeployment's replicas.
func (p *Pool) Scale(n int64) { p.edit("scaled by the autoscaler", map[string]any{"replicas": n}) }

// Pause notes that somebody holds the pool's rollouts: machines that run stay, whatever the pool's template becomes.
func (p *Pool) Pause() { p.edit("rollout held", map[string]any{"paused": true}) }

func (p *Pool) edit(why string, spec map[string]any) {
	p.Cluster.Tenant.Edit(Edit{Why: why, APIVersion: apiVersions["MachineDeployment"], Kind: "MachineDeployment",
		Namespace: p.Namespace(), Name: p.Object(), Spec: spec})
}

// Annotate edits annotations of one of the pool's objects that carry its name.
func (p *Pool) Annotate(kind, why string, annotations map[string]any) {
	p.Cluster.Tenant.Edit(Edit{Why: why, APIVersion: apiVersions[kind], Kind: kind, Namespace: p.Namespace(),
		Name: p.Object(), Annotations: annotations})
}

// Strip takes from one of the pool's objects that carry its name all that tells Helm whose it is.
func (p *Pool) Strip(kind string) {
	p.Cluster.Tenant.Edit(Edit{Why: "Helm's metadata removed by hand", APIVersion: apiVersions[kind], Kind: kind,
		Namespace: p.Namespace(), Name: p.Object(),
		Annotations: map[string]any{"meta.helm.sh/release-name": nil, "meta.helm.sh/release-namespace": nil},
		Labels:      map[string]any{"app.kubernetes.io/managed-by": nil}})
}

const releaseVersion = "helm.toolkit.fluxcd.io/v2"

var apiVersions = map[string]string{
	"MachineDeployment":  "cluster.x-k8s.io/v1beta1",
	"MachineHealthCheck": "cluster.x-k8s.io/v1beta1",
	"WorkloadMonitor":    "cozystack.io/v1alpha1",
}

// Patch is the edit as a JSON merge patch.
func (e Edit) Patch() map[string]any {
	meta := map[string]any{}
	if e.Annotations != nil {
		meta["annotations"] = e.Annotations
	}
	if e.Labels != nil {
		meta["labels"] = e.Labels
	}
	patch := map[string]any{"metadata": meta}
	if e.Spec != nil {
		patch["spec"] = e.Spec
	}
	return patch
}

// Object names the edited object, for messages.
func (e Edit) Object() string { return fmt.Sprintf("%s %s/%s", e.Kind, e.Namespace, e.Name) }

// Objects are the tenant's namespace, the platform's values in it (a Secret with key values.yaml), and its clusters, in
// the order of creation.
func (t *Tenant) Objects(secret, values string) []*unstructured.Unstructured {
	out := []*unstructured.Unstructured{
		{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": t.Namespace()}}},
		{Object: map[string]any{"apiVersion": "v1", "kind": "Secret",
			"metadata":   map[string]any{"name": secret, "namespace": t.Namespace()},
			"stringData": map[string]any{"values.yaml": values}}},
	}
	for _, c := range t.Clusters {
		if !c.Late {
			out = append(out, c.HelmRelease())
		}
	}
	return out
}

// HelmRelease is the cluster as Cozystack's aggregated API would store it; of a computeplane, the tenant's module.
func (c *Cluster) HelmRelease() *unstructured.Unstructured {
	values := maps.Clone(c.values)
	if _, set := values["nodeGroups"]; !set && !c.NoCluster {
		groups := map[string]any{}
		for _, p := range c.Pools {
			groups[p.Name] = p.values
		}
		values["nodeGroups"] = groups
	}
	labels := map[string]any{"sharding.fluxcd.io/key": "tenants"}
	if !c.Unlabelled {
		labels["apps.cozystack.io/application.kind"] = "Kubernetes"
		labels["apps.cozystack.io/application.group"] = "apps.cozystack.io"
		labels["apps.cozystack.io/application.name"] = c.Name
	}
	chart := "cozystack-kubernetes-application-kubevirt-kubernetes"
	if c.NoCluster {
		chart = "cozystack-no-cluster"
	}
	retry := map[string]any{
		"timeout": "15m", "disableWait": true,
		"strategy": map[string]any{"name": "RetryOnFailure", "retryInterval": "30s"},
	}
	hr := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": releaseVersion,
		"kind":       "HelmRelease",
		"metadata": map[string]any{
			"name": c.Release(), "namespace": c.Tenant.Namespace(),
			"labels": labels,
		},
		"spec": map[string]any{
			"interval": "5m", "maxHistory": int64(5),
			"chartRef": map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": chart},
			"suspend":  c.NoCluster,
			"install":  retry, "upgrade": retry,
			"valuesFrom": []any{map[string]any{"kind": "Secret", "name": "cozystack-values"}},
			"values":     values,
		},
	}}
	if c.plane {
		return module(hr)
	}
	return hr
}
