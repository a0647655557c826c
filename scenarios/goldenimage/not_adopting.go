package goldenimage

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// NotAdopting has pools that don't ask for an image, while others around them do.
func NotAdopting() harness.Scenario {
	t := tenant.New("not-adopting")
	prod := t.Cluster("prod")
	md0 := prod.Pool("md0")
	local := prod.Pool("local", tenant.Set("storageClass", "local"))
	return harness.Scenario{
		Tag:    "not-adopting",
		Line:   "pools without osImage: templates unchanged to the byte, nothing imaged again",
		Given:  []*tenant.Tenant{t},
		Acts:   []harness.Act{catalog()},
		Checks: []verify.Check{verify.TemplateUnchanged(subject(md0)), verify.TemplateUnchanged(subject(local)), verify.NoChurn(subject(md0)), verify.NoChurn(subject(local))},
	}
}
