package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// PlainPool is the common case: both ways to size a pool.
func PlainPool() harness.Scenario {
	t := tenant.New("plain")
	prod := t.Cluster("prod")
	byResources := prod.Pool("md0", tenant.Resources("2", "4Gi"))
	byType := prod.Pool("md1", tenant.InstanceType("u1.medium"))
	return harness.Scenario{
		Tag:    "plain-pool",
		Line:   "two pools, sized by resources and by instance type: owned by their own releases, templates unchanged",
		Given:  []*tenant.Tenant{t},
		Checks: append(adopted(byResources, byType), verify.ChartsAfterMigration()),
	}
}
