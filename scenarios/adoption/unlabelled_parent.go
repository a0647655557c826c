package adoption

import (
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// UnlabelledParent is a cluster without application labels, as older platforms made it. The add-on beside it is called
// like a cluster and has no such labels either.
func UnlabelledParent() harness.Scenario {
	t := tenant.New("unlabelled")
	prod := t.Cluster("prod", tenant.Set("addons", map[string]any{"certManager": map[string]any{"enabled": true}}))
	prod.Unlabelled = true
	md0 := prod.Pool("md0")
	addOn := verify.Subject{Namespace: t.Namespace(), Cluster: "prod-cert-manager", Pool: tenant.ImplicitPool} // if it were a cluster
	return harness.Scenario{
		Tag:   "unlabelled-parent",
		Line:  "a cluster without application labels beside an add-on called like one: relabelled and adopted, the add-on untouched",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(md0),
			verify.About("relabelled", subject(md0), verify.Labelled(verify.These(helmRelease(subject(md0).ClusterRelease())), map[string]string{
				"apps.cozystack.io/application.group": "apps.cozystack.io",
				"apps.cozystack.io/application.kind":  "Kubernetes",
				"apps.cozystack.io/application.name":  prod.Name,
			})),
			verify.About("add-ons untouched", subject(md0), verify.NoWritesBy(regexp.MustCompile(`migration-hook`), verify.These(helmRelease(addOn.ClusterRelease())))),
			verify.About("no release for an add-on", subject(md0), verify.NeverThere(helmRelease(addOn.PoolRelease())))),
	}
}
