package goldenimage

import (
	"regexp"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// PrefixCollision has two pools on different classes, the name of one beginning with the other's. Of the disks that begin
// so, the other pool's is the last by name.
func PrefixCollision() harness.Scenario {
	t := tenant.New("prefix")
	prod := t.Cluster("prod")
	md0 := prod.Pool("md0")
	longer := prod.Pool("md0-zzz", tenant.Set("storageClass", "local"))
	return harness.Scenario{
		Tag:           "prefix-collision",
		Line:          "md0 and md0-zzz on different classes: each reads the class of its own disk",
		Given:         []*tenant.Tenant{t},
		Acts:          []harness.Act{catalog(), switched("opt in, beside a longer name", md0)},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(version), 1), verify.DisksOn(subject(md0), "replicated"),
			verify.DisksOn(subject(longer), "local"), verify.NoChurn(subject(longer))},
	}
}

// FrozenClass has a cloned pool without a class of its own, and a default class that moves away from under it.
func FrozenClass() harness.Scenario {
	const name = "frozen"
	t := tenant.New(name)
	md0 := t.Cluster("prod").Pool("md0")
	two := tenant.New(name).Cluster("prod").Pool("md0", tenant.Machines(2))
	render := set(md0, "any change, so that the pool is rendered again", map[string]any{"nodeStartupTimeout": "11m"})
	scale := tenant.Edit{Why: "as the autoscaler does", APIVersion: "cluster.x-k8s.io/v1beta1", Kind: "MachineDeployment",
		Namespace: md0.Namespace(), Name: md0.Object(), Spec: map[string]any{"replicas": int64(2)}}
	return harness.Scenario{
		Tag:   "frozen-class",
		Line:  "a cloned pool without a class, the default class moved: the next worker's disk is still on the old class, and a clone by the storage",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(), switched("opt in, without a class", md0), moved(),
			{Name: "one more worker", Do: inTurn(render, edits(scale)), Brings: []*tenant.Pool{two}}, back()},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(version), 2), verify.DisksOn(subject(md0), "replicated"),
			verify.Workers(subject(md0), 2)},
	}
}

// MovedGolden has a cloned pool without a class of its own that asks for another image after the default class moved away.
func MovedGolden() harness.Scenario {
	const next = "v1.11.4"
	t := tenant.New("moved")
	md0 := t.Cluster("prod").Pool("md0")
	return harness.Scenario{
		Tag:   "moved-golden",
		Line:  "a cloned pool without a class asks for another image, the default class moved: its disks stay on the class that they have",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(), switched("opt in, before the class moves", md0), moved(),
			rolled("another image", md0, offered(next, "Succeeded"), ask(md0, "another image", next)), back()},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(next), 1), verify.DisksOn(subject(md0), "replicated"),
			verify.WithinSurge(subject(md0))},
	}
}

// TwoDefaults makes a second default class, then asks for the image in a pool that has neither a class nor a disk. The pool
// stays refused for as long as there is a newer default.
func TwoDefaults() harness.Scenario {
	const newest = "newest"
	t := tenant.New("defaults")
	md0 := t.Cluster("prod").Pool("md0", tenant.Machines(0))
	second := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
		"metadata":    map[string]any{"name": newest, "annotations": map[string]any{isDefaultClass: "true"}},
		"provisioner": "linstor.csi.linbit.com", "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate", "allowVolumeExpansion": true,
	}}
	because := regexp.MustCompile(`StorageClass "` + newest + `".*"replicated"`)
	return harness.Scenario{
		Tag:   "two-defaults",
		Line:  "two default classes, a pool without class or disk asks for the image: the newest is taken, and named in the refusal",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(),
			{Name: "two-defaults", Do: inTurn(harness.Make(second), ask(md0, "no class, no disk", version)), Last: true}},
		MayFail: mayFail(md0, because),
		Checks:  refusal(md0, because),
	}
}

// moved is the act after which another class is the default, back the one that undoes it.
func moved() harness.Act {
	return harness.Act{Name: "default class moved", Do: edits(isDefault("replicated", "false"), isDefault("local", "true"))}
}

func back() harness.Act {
	return harness.Act{Name: "default class back", Do: edits(isDefault("local", "false"), isDefault("replicated", "true"))}
}

const isDefaultClass = "storageclass.kubernetes.io/is-default-class"

// isDefault makes a StorageClass the default, or no longer.
func isDefault(class, value string) tenant.Edit {
	return tenant.Edit{Why: "the default moves", APIVersion: "storage.k8s.io/v1", Kind: "StorageClass", Name: class,
		Annotations: map[string]any{isDefaultClass: value}}
}
