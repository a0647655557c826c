// Package goldenimage is what the new platform offers beside the split: workers' disks that are cloned from one image in
// cozy-public. Pools that don't ask for it must not notice; those that do must get clones that the storage makes, or be
// refused with the reason while their machines live on.
package goldenimage

import "cozystack.io/upgrade-e2e/e2e/harness"

// Family lists the scenarios; they share one cluster, one fleet and one upgrade.
func Family() harness.Family {
	clones, err := clones()
	return harness.Family{
		Name:    "goldenimage",
		Line:    "disks cloned from one image: by the storage or not at all, and only for pools that ask for it",
		Invalid: err,

		DefaultClass: true,
		Scenarios: []harness.Scenario{
			StorageLayer(clones),
			NotAdopting(),
			OptIn(),
			ClassMismatch(),
			DiskTooSmall(),
			GoldenAbsent(),
			GoldenFailed(),
			GoldenImporting(),
			InvalidTalos(),
			Isolation(),
			PrefixCollision(),
			VersionBump(),
			FrozenClass(),
			MovedGolden(),
			CatalogImmutable(),
			TwoDefaults(),
		},
	}
}
