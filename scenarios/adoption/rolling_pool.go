package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// RollingPool is caught between two revisions of its template: somebody has held the rollout, then made the machines
// larger. The machine that runs is of a MachineSet that references the older template, which no longer follows from the
// pool's values.
func RollingPool() harness.Scenario {
	t := tenant.New("rolling")
	prod := t.Cluster("prod")
	md0 := prod.Pool("md0")
	md0.Pause()
	prod.Edit("machines made larger", map[string]any{"nodeGroups": map[string]any{"md0": map[string]any{"instanceType": "u1.large"}}})
	s := subject(md0)
	return harness.Scenario{
		Tag:    "rolling-pool",
		Line:   "an older template that a MachineSet still references: both revisions adopted and kept",
		Given:  []*tenant.Tenant{t},
		Checks: append([]verify.Check{verify.Rolling(s)}, adopted(md0)...),
	}
}
