package goldenimage

import (
	"context"

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
	isDefault := func(class, value string) tenant.Edit {
		return tenant.Edit{Why: "the default moves", APIVersion: "storage.k8s.io/v1", Kind: "StorageClass", Name: class,
			Annotations: map[string]any{"storageclass.kubernetes.io/is-default-class": value}}
	}
	render := tenant.Edit{Why: "any change, so that the pool is rendered again", APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease",
		Namespace: md0.Namespace(), Name: md0.Release(), Spec: map[string]any{"values": map[string]any{"nodeStartupTimeout": "11m"}}}
	scale := tenant.Edit{Why: "as the autoscaler does", APIVersion: "cluster.x-k8s.io/v1beta1", Kind: "MachineDeployment",
		Namespace: md0.Namespace(), Name: md0.Object(), Spec: map[string]any{"replicas": int64(2)}}
	return harness.Scenario{
		Tag:   "frozen-class",
		Line:  "a cloned pool without a class, the default class moved: the next worker's disk is still on the old class, and a clone by the storage",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(), switched("opt in, without a class", md0),
			{Name: "default class moved", Do: edits(isDefault("replicated", "false"), isDefault("local", "true"), render)},
			{Name: "one more worker", Do: edits(scale), Brings: []*tenant.Pool{two}},
			{Name: "default class back", Do: edits(isDefault("local", "false"), isDefault("replicated", "true"))}},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(md0), golden(version), 2), verify.DisksOn(subject(md0), "replicated"),
			verify.Workers(subject(md0), 2)},
	}
}

// edits is an act's deed: one edit after the other.
func edits(list ...tenant.Edit) func(context.Context, harness.Upgraded) error {
	return func(ctx context.Context, on harness.Upgraded) error {
		for _, e := range list {
			if err := harness.Change(e)(ctx, on); err != nil {
				return err
			}
		}
		return nil
	}
}
