package goldenimage

import (
	"os"
	"strconv"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// workers is how many disks are cloned at once: UPGRADE_E2E_CLONES, or few enough for a run of the whole family.
func workers() int {
	if n, err := strconv.Atoi(os.Getenv("UPGRADE_E2E_CLONES")); err == nil && n > 0 {
		return n
	}
	return 6
}

// StorageLayer makes a pool of workers whose disks are clones of one image.
func StorageLayer() harness.Scenario {
	const name = "storage"
	workers := workers()
	t := tenant.New(name)
	t.Cluster("prod").Pool("md0")
	clones := tenant.New(name).Cluster("prod").Pool("clones", tenant.Machines(int64(workers)))
	pool := release(clones.Namespace(), clones.Release(), "cozystack-kubernetes-nodes-application-kubevirt-kubernetes-nodes", map[string]any{
		"cluster": "prod", "minReplicas": int64(workers), "maxReplicas": int64(workers), "osImage": builtin(version)})
	pool.Object["spec"].(map[string]any)["valuesFrom"] = []any{map[string]any{"kind": "Secret", "name": "cozystack-values"}}
	return harness.Scenario{
		Tag:           "storage-layer",
		Line:          "workers cloned from one image: as many clones by the storage, one import, nothing over the pod network",
		Given:         []*tenant.Tenant{t},
		Acts:          []harness.Act{catalog(), {Name: "pool of clones", Do: harness.Make(pool), Brings: []*tenant.Pool{clones}}},
		ActsOnWorkers: true,
		Checks: []verify.Check{verify.ClonePath(subject(clones), golden(version), workers), verify.Workers(subject(clones), workers),
			verify.NoChurn(subject(t.Pools()[0]))},
	}
}
