package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// ValuesHygiene overrides three images, of which a pool uses one. The pool's chart refuses what its schema does not
// declare.
func ValuesHygiene() harness.Scenario {
	t := tenant.New("hygiene")
	const kubectl = "registry.example.org/kubectl:v1.34.4"
	md0 := t.Cluster("prod", tenant.Set("images", map[string]any{
		"kubectl": kubectl, "waitForKubeconfig": "registry.example.org/busybox:1.37", "talosCsrSigner": "registry.example.org/talos-csr-signer:v0.2",
	})).Pool("md0", tenant.Machines(0))
	s := subject(md0)
	return harness.Scenario{
		Tag:   "values-hygiene",
		Line:  "three images overridden: the pool's values hold the one that its chart knows, and nothing undeclared",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(md0),
			verify.About("values declared", s, verify.ValuesDeclared(s.PoolRelease())),
			verify.About("values", s, verify.ValuesCarried(s.PoolRelease(), map[string]any{
				"images": map[string]any{"kubectl": kubectl, "waitForKubeconfig": nil, "talosCsrSigner": nil}}))),
	}
}
