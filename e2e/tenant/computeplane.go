package tenant

import "k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

// A computeplane is a cluster that the platform runs a tenant's workloads in: HelmRelease computeplane, a module of the
// tenant, renders HelmRelease computeplane-cluster and, after the split, one release per pool.
const (
	PlaneModule  = "computeplane"
	PlaneCluster = "computeplane-cluster"
	IngressRole  = "ingress-nginx" // a computeplane needs one pool with this role
	// MaxPlaneKey is the longest name of a pool that fits into a release of its own.
	MaxPlaneKey = MaxPoolApp - len(PlaneCluster) - 1
)

// ComputePlane switches the tenant's computeplane on. Its name and its release's are computeplane-cluster.
func (t *Tenant) ComputePlane(values ...Value) *Cluster {
	c := t.Cluster(PlaneCluster, values...)
	c.plane = true
	return c
}

// Roles are a pool's node roles.
func Roles(names ...string) Value {
	var roles []any
	for _, name := range names {
		roles = append(roles, name)
	}
	return Set("roles", roles)
}

// Regroup is an edit of the computeplane's groups, merged into those that it was made with.
func (c *Cluster) Regroup(why string, groups map[string]any) Edit {
	return Edit{Why: why, APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease", Namespace: c.Tenant.Namespace(),
		Name: PlaneModule, Spec: map[string]any{"values": map[string]any{"nodeGroups": groups}}}
}

// module makes a cluster's HelmRelease the one of the tenant's computeplane, named and labelled as the tenant's chart does.
func module(hr *unstructured.Unstructured) *unstructured.Unstructured {
	hr.SetName(PlaneModule)
	hr.SetLabels(map[string]string{
		"apps.cozystack.io/application.kind":  "ComputePlane",
		"apps.cozystack.io/application.group": "apps.cozystack.io",
		"apps.cozystack.io/application.name":  PlaneModule,
		"internal.cozystack.io/tenantmodule":  "true",
		"sharding.fluxcd.io/key":              "tenants",
	})
	hr.Object["spec"].(map[string]any)["chartRef"].(map[string]any)["name"] = "cozystack-computeplane-application-kubevirt-computeplane"
	return hr
}
