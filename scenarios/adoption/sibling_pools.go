package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// SiblingPools has names of which one begins with the other, for pools and for clusters, and a pool whose name ends like
// a template's hash.
func SiblingPools() harness.Scenario {
	t := tenant.New("siblings")
	prod := t.Cluster("prod")
	pools := []*tenant.Pool{
		prod.Pool("md0"),
		prod.Pool("md0-large", tenant.InstanceType("u1.large")),
		prod.Pool("md0-gpu"),
		prod.Pool("md0-abc123"),
		t.Cluster("prod-eu").Pool("md0"),
	}
	return harness.Scenario{
		Tag:    "sibling-pools",
		Line:   "md0 beside md0-large, md0-gpu, md0-abc123, cluster prod beside prod-eu: each object went to its own pool's release",
		Given:  []*tenant.Tenant{t},
		Checks: adopted(pools...),
	}
}
