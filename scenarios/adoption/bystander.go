package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Bystander is a tenant without clusters: its namespace, with the platform's values in it.
func Bystander() harness.Scenario {
	t := tenant.New("bystander")
	return harness.Scenario{
		Tag:    "bystander",
		Line:   "a tenant without clusters: not one write in its namespace, by the audit log",
		Given:  []*tenant.Tenant{t},
		Checks: []verify.Check{verify.Untouched(t.Namespace())},
	}
}
