package adoption

import (
	"context"
	"net"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	apiwait "k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/e2e-framework/klient/k8s"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/klient/wait"
	"sigs.k8s.io/e2e-framework/klient/wait/conditions"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// NoPools is a control plane and nothing else. The old platform has no such cluster, an empty nodeGroups means md0 there;
// so it is made after the upgrade, and what the split moved out of the cluster's release must not be missing in it.
func NoPools() harness.Scenario {
	t := tenant.New("poolless")
	bare := t.Cluster("bare")
	bare.Late = true
	md0 := bare.Implicit()
	return harness.Scenario{
		Tag:   "no-pools",
		Line:  "a control plane without pools, made after the upgrade: no pool appears, certSANs are complete",
		Given: []*tenant.Tenant{t},
		Acts:  []harness.Act{{Name: "control plane without pools", Do: makeControlPlane(bare)}},
		Checks: []verify.Check{
			verify.About("no pool", subject(md0), verify.NeverThere(helmRelease(subject(md0).PoolRelease()), machineDeployment(md0))),
			verify.CertSANs(verify.Subject{Namespace: t.Namespace(), Cluster: bare.Name}),
		},
	}
}

// makeControlPlane waits for the Job that adds the Service's address to certSANs, which is of no recorded kind. When it does
// not come, the check says so.
func makeControlPlane(c *tenant.Cluster) func(context.Context, harness.Upgraded) error {
	return func(ctx context.Context, on harness.Upgraded) error {
		if err := harness.Create(c)(ctx, on); err != nil {
			return err
		}
		client, err := resources.New(on.Env.Config)
		if err != nil {
			return err
		}
		plane := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "controlplane.cluster.x-k8s.io/v1alpha1", "kind": "KamajiControlPlane",
			"metadata": map[string]any{"name": c.Release(), "namespace": c.Tenant.Namespace()}}}
		err = wait.For(conditions.New(client).ResourceMatch(plane, func(k8s.Object) bool {
			sans, _, _ := unstructured.NestedStringSlice(plane.Object, "spec", "network", "certSANs")
			return slices.ContainsFunc(sans, func(name string) bool { return net.ParseIP(name) != nil })
		}), wait.WithContext(ctx), wait.WithTimeout(time.Minute), wait.WithInterval(time.Second), wait.WithImmediate())
		if apiwait.Interrupted(err) && ctx.Err() == nil {
			return nil
		}
		return err
	}
}
