package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// AutoscaledPool has more machines than its minimum. The catalogue says 5 with a minimum of 2; 3 with 1 are drained by
// the same mistakes, and cost two machines less.
func AutoscaledPool() harness.Scenario {
	t := tenant.New("autoscaled")
	md0 := t.Cluster("prod").Pool("md0", tenant.Machines(1))
	md0.Scale(3)
	s := subject(md0)
	return harness.Scenario{
		Tag:   "autoscaled-pool",
		Line:  "three machines where the pool's minimum is one: still three",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(md0),
			verify.About("replicas kept", s, verify.FieldIs(verify.These(machineDeployment(md0)), "3", "spec", "replicas"))),
	}
}
