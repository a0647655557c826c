package goldenimage

import (
	"context"
	"regexp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/simulate"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Images that are not there yet, or never will be.
const (
	crashing = "v1.11.1" // its import fails for ever, which CDI never calls Failed
	slow     = "v1.11.2" // its import takes until somebody has asked for it
	bumped   = "v1.11.3" // comes after it was asked for
	lost     = "v1.11.5" // its volume is lost: what CDI calls Failed
)

// GoldenFailed has a pool that asks for an image that is Failed, and one that asks for an image whose importer crashes.
func GoldenFailed() harness.Scenario {
	t := tenant.New("failed")
	// In clusters of their own: before the split a refusal holds up all pools of a cluster.
	refusedPool, waiting := t.Cluster("prod").Pool("md0"), t.Cluster("later").Pool("md0")
	because := regexp.MustCompile(golden(lost).Name + `"? .*failed`)
	checks := append(refusal(refusedPool, because), verify.BaselineWorkersLive(subject(waiting)),
		verify.CloneWaits(subject(waiting), golden(crashing), regexp.MustCompile(`source/target size info missing`)))
	return harness.Scenario{
		Tag:  "golden-failed",
		Line: "one image is Failed, another's importer crashes for ever: the first is refused, the second waited for with the reason, all machines live on",
		Images: map[string]simulate.Download{
			"/" + crashing + "/": {Fails: "unable to connect to http data source: expected status code 200, got 404", Loops: true},
		},
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(), {Name: "golden-failed", Do: inTurn(loseImage, offered(crashing, "ImportInProgress"),
			ask(refusedPool, "a failed image", lost), ask(waiting, "an image that never comes", crashing))}},
		MayFail:       mayFail(refusedPool, because),
		ActsOnWorkers: true, // of the pool that waits: a machine more than asked for, within its surge
		Checks:        checks,
	}
}

// GoldenImporting has a pool that asks for an image while it is imported.
func GoldenImporting() harness.Scenario {
	t := tenant.New("importing")
	md0 := t.Cluster("prod").Pool("md0")
	held, end := context.WithCancel(context.Background())
	asking := rolled("asked for while it is imported", md0, offered(slow, "ImportInProgress"), ask(md0, "an image that comes", slow))
	roll := asking.Until
	asking.Until = func(ctx context.Context, on harness.Upgraded) error {
		defer end()
		if err := untilAsked(md0, slow)(ctx, on); err != nil {
			return err
		}
		end()
		return roll(ctx, on)
	}
	return harness.Scenario{
		Tag:           "golden-importing",
		Line:          "a pool asks for an image that is still imported: its clone waits, then succeeds in the storage",
		Images:        map[string]simulate.Download{"/" + slow + "/": {Held: held.Done()}},
		Given:         []*tenant.Tenant{t},
		Acts:          []harness.Act{catalog(), asking},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(slow), 1), verify.AskedWhileImporting(subject(md0), golden(slow)),
			verify.WithinSurge(subject(md0)), verify.NeverRefused(subject(md0), regexp.MustCompile(golden(slow).Name))},
	}
}

// VersionBump has a pool whose image follows its Talos version, which is raised before the image is there.
func VersionBump() harness.Scenario {
	t := tenant.New("bump")
	md0 := t.Cluster("prod").Pool("md0")
	because := regexp.MustCompile(golden(bumped).Name + `"? (does not exist|not found)`)
	bump := set(md0, "a newer Talos than there is an image of", map[string]any{"talos": map[string]any{"version": bumped}})
	const newer, offer = "a newer Talos", "the newer Talos' image"
	s := subject(md0)
	return harness.Scenario{
		Tag:   "version-bump",
		Line:  "the Talos version is raised before its image is there: refused with its name, no machine touched; it recovers once the image is there",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(), rolled("opt in to the version of Talos", md0, ask(md0, "the pool's own version", "")),
			{Name: newer, Do: bump}, rolled(offer, md0, offered(bumped, "Succeeded"))},
		MayFail:       mayFail(md0, because),
		ActsOnWorkers: true,
		Checks: []verify.Check{
			verify.About("refused at first", s, verify.Before(offer, verify.PoolRefused(s, because))),
			verify.About("untouched while refused", s, verify.NoChurnBetween(s, newer, offer)),
			verify.ClonePath(s, golden(version), 0), verify.ClonePath(s, golden(bumped), 1), verify.WithinSurge(s), verify.Workers(s, 1)},
	}
}

// InvalidTalos has three pools that are given a Talos that can't be.
func InvalidTalos() harness.Scenario {
	t := tenant.New("invalid")
	prod := t.Cluster("prod")
	out := harness.Scenario{
		Tag:   "invalid-talos",
		Line:  "Talos version v1.13, schematic AbC123, no factory: each refused with its field, its machines live on",
		Given: []*tenant.Tenant{t},
	}
	var invalid []deed
	for _, bad := range []struct{ pool, field, value string }{
		{"version", "version", "v1.13"}, {"schematic", "schematicID", "AbC123"}, {"factory", "imageFactoryURL", ""},
	} {
		p := prod.Pool(bad.pool)
		invalid = append(invalid, set(p, "invalid "+bad.field, map[string]any{"talos": map[string]any{bad.field: bad.value}}))
		because := regexp.MustCompile(`talos/` + bad.field)
		out.MayFail = append(out.MayFail, mayFail(p, because)...)
		out.Checks = append(out.Checks, refusal(p, because)...)
	}
	out.Acts = []harness.Act{{Name: "invalid-talos", Do: inTurn(invalid...)}}
	return out
}

// loseImage makes an image by hand, as a clone of the catalog's, and deletes its volume under it. An import does not get
// there: CDI 1.64 calls a DataVolume Failed only when its claim is lost, and not if an importer wrote it.
func loseImage(ctx context.Context, on harness.Upgraded) error {
	image := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
		"metadata": map[string]any{"namespace": public, "name": golden(lost).Name,
			"annotations": map[string]any{"cdi.kubevirt.io/storage.bind.immediate.requested": "true"}},
		"spec": map[string]any{
			"source": map[string]any{"pvc": map[string]any{"namespace": public, "name": golden(version).Name}},
			"pvc": map[string]any{"accessModes": []any{"ReadWriteMany"}, "volumeMode": "Block", "storageClassName": "replicated",
				"resources": map[string]any{"requests": map[string]any{"storage": "6Gi"}}},
		},
	}}
	if err := harness.Make(image)(ctx, on); err != nil {
		return err
	}
	if err := untilGolden(lost, "Succeeded")(ctx, on); err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(on.Env.Config)
	if err != nil {
		return err
	}
	claim, err := client.Resource(claims).Namespace(public).Get(ctx, golden(lost).Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	name, _, _ := unstructured.NestedString(claim.Object, "spec", "volumeName")
	if err := client.Resource(volumes).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	// Its finalizers keep a volume in use.
	if _, err := client.Resource(volumes).Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		return err
	}
	return untilGolden(lost, "Failed")(ctx, on)
}

var (
	claims  = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
	volumes = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumes"}
)
