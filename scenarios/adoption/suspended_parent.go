package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

const phaseResume = "resume"

// SuspendedParent is a cluster whose release somebody suspended. It meets its new chart long after everybody else, and
// its pools must be safe by then.
func SuspendedParent() harness.Scenario {
	t := tenant.New("suspended")
	prod := t.Cluster("prod")
	md0 := prod.Pool("md0")
	prod.Suspend()
	return harness.Scenario{
		Tag:   "suspended-parent",
		Line:  "a cluster suspended before the upgrade and resumed after it: its pools are protected before it resumes",
		Given: []*tenant.Tenant{t},
		Acts:  []harness.Act{{Name: phaseResume, Do: harness.Resume(prod)}},
		Checks: append(adopted(md0),
			verify.About("pinned in time", subject(md0), verify.Before(phaseResume, verify.Pinned(verify.PoolObjects(subject(md0)))))),
	}
}
