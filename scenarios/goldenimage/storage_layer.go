package goldenimage

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// envClones is how many workers are cloned from one image at a time.
const envClones = "UPGRADE_E2E_CLONES"

// clones is what envClones asks for, or few enough for a run of the whole family.
func clones() (int, error) {
	const few = 6
	s := os.Getenv(envClones)
	if s == "" {
		return few, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return few, harness.UsageError{Line: fmt.Sprintf("%s=%s is not a number of workers, 1 or more", envClones, s)}
	}
	return n, nil
}

// StorageLayer makes a pool of workers whose disks are clones of one image.
func StorageLayer(workers int) harness.Scenario {
	const name = "storage"
	t := tenant.New(name)
	t.Cluster("prod").Pool("md0")
	clones := tenant.New(name).Cluster("prod").Pool("clones", tenant.Machines(int64(workers)))
	return harness.Scenario{
		Tag:           "storage-layer",
		Line:          "workers cloned from one image: as many clones by the storage, one import, nothing over the pod network",
		Given:         []*tenant.Tenant{t},
		Acts:          []harness.Act{catalog(), {Name: "pool of clones", Do: made(clones), Brings: []*tenant.Pool{clones}}},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(clones), golden(version), workers), verify.Workers(subject(clones), workers),
			verify.NoChurn(subject(t.Pools()[0]))},
	}
}

// made is a deed: a new pool asks for the image.
func made(p *tenant.Pool) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		if on.New.GoldenImages == nil {
			return nil
		}
		values := p.Values()
		values["maxReplicas"], values[on.New.GoldenImages.Value] = values["minReplicas"], builtin(version)
		if on.New.GoldenImages.InCluster {
			return set(p, "a pool of clones", values)(ctx, on)
		}
		values["cluster"] = p.Cluster.Name
		pool := release(p.Namespace(), p.Release(), "cozystack-kubernetes-nodes-application-kubevirt-kubernetes-nodes", values)
		pool.Object["spec"].(map[string]any)["valuesFrom"] = []any{map[string]any{"kind": "Secret", "name": "cozystack-values"}}
		return harness.Make(pool)(ctx, on)
	}
}
