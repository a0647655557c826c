package goldenimage

import (
	"fmt"
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// CatalogImmutable says the catalog's size in other words, which is fine, then takes its class away, which is not; and gives
// a class to a second catalog, elsewhere, that had none.
func CatalogImmutable() harness.Scenario {
	const elsewhere, catalogRelease = "cozy-system", "golden-images" // in versions that refuse
	change := func(namespace, why string, values map[string]any) harness.Act {
		return harness.Act{Name: why, Do: offerAs(namespace, why, values)}
	}
	says := func(from, to string) *regexp.Regexp {
		return regexp.MustCompile(fmt.Sprintf("is of StorageClass %q and can't become one of %q", from, to))
	}
	taken, given := says("replicated", ""), says("", "replicated")
	unclassed := change(public, "the class taken away", map[string]any{"storageClass": ""})
	unclassed.Last = true // no image can be offered any more
	refused := func(namespace string, because *regexp.Regexp) verify.Check {
		return verify.About("refused", verify.Subject{Namespace: namespace}, verify.Refused(history.ReleaseKey{Namespace: namespace, Name: catalogRelease}, because))
	}
	return harness.Scenario{
		Tag:  "catalog-immutable",
		Line: "the catalog's 6Gi as 6144Mi: accepted; its class taken away, and one given where there was none: refused with the reason",
		Acts: []harness.Act{catalog(),
			{Name: "catalog without a class", Do: offer(elsewhere, map[string]any{"storageClass": ""})},
			change(elsewhere, "a class given", map[string]any{"storageClass": "replicated"}),
			change(public, "the size in other words", map[string]any{"size": "6144Mi"}),
			unclassed},
		MayFail: []harness.Failure{{Namespace: public, Release: catalogRelease, Because: taken}, {Namespace: elsewhere, Release: catalogRelease, Because: given}},
		// The size is compared before the class: were it refused, the reason would be another one.
		Checks: []verify.Check{refused(public, taken), refused(elsewhere, given)},
	}
}
