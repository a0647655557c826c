package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Lineage asks whose application is whose after the split. Quota goes by the labels of the VMs' pods, which stay with the
// cluster; WorkloadsReady goes by who owns a WorkloadMonitor, so that the cluster's covers its control plane alone, and
// each pool has its own.
func Lineage() harness.Scenario {
	t := tenant.New("lineage")
	md0 := t.Cluster("prod").Pool("md0")
	s := subject(md0)
	cluster := verify.Application{Kind: "Kubernetes", Name: md0.Cluster.Name}
	pool := verify.Application{Kind: "KubernetesNodes", Name: md0.App()}
	monitor := history.Ref{Resource: "workloadmonitors.cozystack.io", Namespace: md0.Namespace(), Name: md0.Object()}
	return harness.Scenario{
		Tag:   "lineage",
		Line:  "VMs' pods are labelled as the cluster's, the pool's WorkloadMonitor counts for the pool's application",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(md0),
			verify.About("pods of the cluster", s, verify.LabelledFor(verify.Launchers(s), cluster)),
			verify.About("monitor of the pool", s, verify.CountedFor(verify.These(monitor), pool))),
	}
}
