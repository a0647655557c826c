package adoption

import (
	"maps"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// TunedPools sets every knob that the migration maps to something else than its default: own has them all itself, and no
// machines, since no host has its GPU; shared gets from the cluster what a pool may leave to it.
func TunedPools() harness.Scenario {
	t := tenant.New("tuned")
	clusterWide := map[string]any{
		"version": "v1.34", "maxNodeProvisionTime": "25m",
		"talos": map[string]any{"imageFactoryURL": "https://images.example.org", "version": "v1.11.5",
			"schematicID": "376567988ad370138ad8b2698212367b8edcb69b5fd68c80be1f2ec7d603b4ba"},
	}
	ofPool := map[string]any{
		"minReplicas": int64(0), "maxReplicas": int64(7), "diskSize": "30Gi", "storageClass": "local", "roles": []any{"ingress-nginx"},
		"instanceType": "u1.large", "resources": map[string]any{"cpu": "3", "memory": "5Gi"}, "podCpuLimit": "4", "podCpuRequest": "500m",
		"gpus": []any{map[string]any{"name": "nvidia.com/GA102GL_A10"}}, "kubelet": map[string]any{"systemReservedMemory": "300Mi"},
		"logSerialConsole": true, "maxUnhealthy": "40%", "nodeStartupTimeout": "20m",
	}
	timeouts := map[string]any{"readyUnknownTimeout": "3m", "readyFalseTimeout": "2m"}
	kubectl := map[string]any{"kubectl": "registry.example.org/alpine/k8s:1.34.4"}
	cluster := t.Cluster("prod", all(clusterWide), tenant.Set("storageClass", "replicated"), tenant.Set("images", kubectl),
		tenant.Set("nodeHealthCheck", merged(timeouts, map[string]any{"maxUnhealthy": "60%", "nodeStartupTimeout": "15m"})))
	own := cluster.Pool("own", all(ofPool))
	shared := cluster.Pool("shared", tenant.InstanceType("u1.small"))
	ofCluster := merged(clusterWide, timeouts, map[string]any{"cluster": "prod", "images": kubectl})
	carried := func(p *tenant.Pool, values ...map[string]any) verify.Check {
		s := subject(p)
		return verify.About("values", s, verify.ValuesCarried(s.PoolRelease(), merged(append(values, ofCluster)...)))
	}
	return harness.Scenario{
		Tag:   "tuned-pools",
		Line:  "every knob of a pool and of the cluster turned: the pool's own release carries them, and not one byte changes",
		Given: []*tenant.Tenant{t},
		Checks: append(adopted(own, shared),
			carried(own, ofPool),
			carried(shared, map[string]any{"minReplicas": 1, "maxReplicas": 3, "instanceType": "u1.small", "diskSize": "20Gi",
				"storageClass": "replicated", "maxUnhealthy": "60%", "nodeStartupTimeout": "15m"})),
	}
}

// all sets all fields.
func all(fields map[string]any) tenant.Value {
	return func(values map[string]any) { maps.Copy(values, fields) }
}

// merged is the union of maps; the later one wins.
func merged(parts ...map[string]any) map[string]any {
	out := map[string]any{}
	for _, part := range parts {
		maps.Copy(out, part)
	}
	return out
}
