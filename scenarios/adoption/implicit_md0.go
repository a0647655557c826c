package adoption

import (
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// ImplicitMD0 declares no pool, which means one called md0 to the old platform. Nothing of it stands in the cluster's
// values, so that the migration has to know it.
func ImplicitMD0() harness.Scenario {
	t := tenant.New("implicit")
	md0 := t.Cluster("prod").Implicit()
	s := subject(md0)
	return harness.Scenario{
		Tag:   "implicit-md0",
		Line:  "nodeGroups empty: md0, which the old chart made of it, is adopted and stays without workers",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(md0),
			verify.About("values", s, verify.ValuesCarried(s.PoolRelease(), map[string]any{
				"cluster": "prod", "minReplicas": 0, "maxReplicas": 10, "instanceType": "u1.medium", "diskSize": "20Gi",
				"roles": []string{"ingress-nginx"},
			})),
			verify.About("autoscaler's minimum kept", s, verify.FieldKept(verify.These(machineDeployment(md0)),
				"metadata", "annotations", "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"))),
	}
}

func machineDeployment(p *tenant.Pool) history.Ref {
	return history.Ref{Resource: "machinedeployments.cluster.x-k8s.io", Namespace: p.Namespace(), Name: p.Object()}
}
