package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// StrippedMetadata has one object without any metadata of Helm's. It belongs to nobody, so that its pool takes it; with a
// release name alone Helm would refuse to install over it.
func StrippedMetadata() harness.Scenario {
	t := tenant.New("stripped")
	md0 := t.Cluster("prod").Pool("md0")
	md0.Strip("MachineDeployment")
	return harness.Scenario{
		Tag:    "stripped-metadata",
		Line:   "a MachineDeployment without any Helm metadata: adopted, release namespace and managed-by included",
		Given:  []*tenant.Tenant{t},
		Checks: adopted(md0),
	}
}
