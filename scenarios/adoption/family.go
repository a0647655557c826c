// Package adoption is the calm upgrade: worker pools that the kubernetes chart rendered become releases of their own,
// and nothing that carries a tenant's workload may notice.
package adoption

import "cozystack.io/upgrade-e2e/e2e/harness"

// Family lists the scenarios; they share one cluster, one fleet and one upgrade.
func Family() harness.Family {
	return harness.Family{
		Name: "adoption",
		Line: "the calm upgrade: pools become releases of their own",
		Scenarios: []harness.Scenario{
			PlainPool(),
			LongNames(),
			SiblingPools(),
			ImplicitMD0(),
			TunedPools(),
			RollingPool(),
			AutoscaledPool(),
			ReRun(),
			ForeignOwner(),
			StrippedMetadata(),
			HostileValues(),
			UnlabelledParent(),
			Mislabelled(),
			ValuesHygiene(),
			NoPools(),
			Bystander(),
			SuspendedParent(),
			Lineage(),
		},
	}
}
