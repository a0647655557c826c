package components

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// createKubeVirt makes the object that configures KubeVirt and says of it what
// virt-operator would: without the phase virt-controller starts nothing, without
// the architecture it schedules nothing.
func (in *installer) createKubeVirt(ctx context.Context) error {
	limits := map[string]any{"restClient": map[string]any{"rateLimiter": map[string]any{
		"tokenBucketRateLimiter": map[string]any{"qps": int64(200), "burst": int64(400)},
	}}}
	kv := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
		"metadata": map[string]any{"namespace": "kubevirt", "name": "kubevirt"},
		"spec": map[string]any{"configuration": map[string]any{
			"apiConfiguration": limits, "webhookConfiguration": limits, "controllerConfiguration": limits,
		}},
	}}
	if err := in.apply(ctx, kv); err != nil {
		return err
	}
	status := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": kv.GetAPIVersion(), "kind": kv.GetKind(),
		"metadata": map[string]any{"namespace": kv.GetNamespace(), "name": kv.GetName()},
		"status":   map[string]any{"phase": "Deployed", "defaultArchitecture": "amd64"},
	}}
	err := in.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(status), client.FieldOwner(owner), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("set the status of KubeVirt kubevirt/kubevirt: %w", err)
	}
	return nil
}
