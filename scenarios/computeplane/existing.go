package computeplane

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// Existing is a computeplane that runs: its pools change owner as every cluster's do, and its module renders their releases.
func Existing() harness.Scenario {
	t := tenant.New("plane")
	plane := t.ComputePlane()
	md0 := plane.Pool("md0", tenant.Roles(tenant.IngressRole))
	batch := plane.Pool("batch", tenant.Resources("2", "4Gi"))
	return harness.Scenario{
		Tag:    "existing",
		Line:   "a running computeplane with two pools: owned by releases of their own, which the module renders; templates unchanged",
		Given:  []*tenant.Tenant{t},
		Checks: append(adopted(md0, batch), managed(md0, batch)...),
	}
}
