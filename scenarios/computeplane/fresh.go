package computeplane

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Fresh switches a computeplane on once the platform is upgraded. No worker at all, and everything Ready, is how the split
// fails here.
func Fresh() harness.Scenario {
	const name = "fresh"
	plane := tenant.New(name).ComputePlane() // not yet there on the old platform
	md0 := plane.Pool("md0", tenant.Roles(tenant.IngressRole), tenant.Resources("2", "4Gi"))
	asked := map[string]any{"resources": map[string]any{"cpu": "2", "memory": "4Gi"}}
	return harness.Scenario{
		Tag:           "fresh",
		Line:          "a computeplane switched on after the upgrade: its worker comes up, in the size that was asked for",
		Given:         []*tenant.Tenant{tenant.New(name)},
		Acts:          []harness.Act{{Name: "computeplane on", Do: harness.Create(plane), Brings: []*tenant.Pool{md0}}},
		ActsOnWorkers: true,
		Checks: append(managed(md0), verify.Workers(subject(md0), md0.Machines()),
			verify.About("values", subject(md0), verify.ValuesCarried(subject(md0).PoolRelease(), asked))),
	}
}
