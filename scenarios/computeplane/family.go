// Package computeplane is the upgrade of clusters that the platform runs a tenant's workloads in: the tenant chooses their
// pools and nothing else, and a module of the platform, not an application, renders them.
package computeplane

import "cozystack.io/upgrade-e2e/e2e/harness"

// Family lists the scenarios; they share one cluster, one fleet and one upgrade.
func Family() harness.Family {
	return harness.Family{
		Name: "computeplane",
		Line: "a module renders the pools: they are adopted, made, refused, and never more than their shape",
		Scenarios: []harness.Scenario{
			Existing(),
			Fresh(),
			PoolKey(),
			ValueSplicing(),
			IngressRole(),
		},
	}
}
