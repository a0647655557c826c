package computeplane

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// ValueSplicing has a group that says more than a pool's shape. The old platform never read it; once the pool's values are
// a release's own, it must not become one of them. A key that stands twice is seen as a module that is not Ready: Flux's
// post-renderer refuses it, whichever of the two Helm alone would take.
func ValueSplicing() harness.Scenario {
	t := tenant.New("splice")
	md0 := t.ComputePlane().Pool("md0", tenant.Roles(tenant.IngressRole),
		tenant.Set("cluster", "prod"),
		tenant.Set("clusterReleaseName", "kubernetes-prod"),
		tenant.Set("talos", map[string]any{"imageFactoryURL": "https://images.example.org", "schematicID": "other", "version": "v1.9.5"}),
		tenant.Set("version", "v1.31"),
		tenant.Set("images", map[string]any{"kubectl": "images.example.org/kubectl:other"}),
		tenant.Set("_cluster", map[string]any{"cluster-domain": "example.org"}),
		tenant.Set("nameOverride", "other"))
	s := subject(md0)
	return harness.Scenario{
		Tag:   "value-splicing",
		Line:  "a group with cluster, clusterReleaseName, talos, version, images, _cluster, nameOverride: none reaches the pool's values, which stays in its cluster with its image",
		Given: []*tenant.Tenant{t},
		Checks: append(append(adopted(md0), managed(md0)...),
			verify.About("own values", s, verify.ValuesCarried(s.PoolRelease(), map[string]any{
				"cluster": tenant.PlaneCluster, "clusterReleaseName": tenant.PlaneCluster,
				"talos": nil, "version": nil, "images": nil, "_cluster": nil, "nameOverride": nil}))),
	}
}
