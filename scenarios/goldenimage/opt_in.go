package goldenimage

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// OptIn switches one of two pools to the image.
func OptIn() harness.Scenario {
	t := tenant.New("opt-in")
	prod := t.Cluster("prod")
	md0 := prod.Pool("md0", tenant.Machines(2))
	other := prod.Pool("other")
	return harness.Scenario{
		Tag:           "opt-in",
		Line:          "one of two pools switches to the image: it alone rolls, within its surge and unavailability, to clones by the storage",
		Given:         []*tenant.Tenant{t},
		Acts:          []harness.Act{catalog(), switched("opt in", md0)},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(version), md0.Machines()), verify.Workers(subject(md0), md0.Machines()),
			verify.WithinSurge(subject(md0)), verify.NoChurn(subject(other)), verify.TemplateUnchanged(subject(other))},
	}
}
