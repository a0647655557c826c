package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Mislabelled is a release that is labelled as a cluster and is none. The migration can't tell; what it makes for it must
// come to nothing.
func Mislabelled() harness.Scenario {
	t := tenant.New("mislabelled")
	t.Cluster("shop").NoCluster = true
	inert := verify.Inert(verify.Subject{Namespace: t.Namespace()})
	return harness.Scenario{
		Tag:    "mislabelled",
		Line:   "a release labelled kind Kubernetes that is no cluster: the pool made for it asks for no machine and gets none",
		Given:  []*tenant.Tenant{t},
		Checks: []verify.Check{inert},
	}
}
