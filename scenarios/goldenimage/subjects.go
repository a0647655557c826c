package goldenimage

import (
	"context"
	"fmt"
	"regexp"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

const (
	public         = "cozy-public"
	catalogRelease = "golden-images"
	schematic      = "ce4c980550dd2ab1b17bbf2b08801c7eb59418eafe8f279833297925d67c7515"
	version        = "v1.10.6" // in the catalog
	absent         = "v1.99.0" // not in the catalog
)

// golden is the DataVolume of the image of a version.
func golden(version string) history.Ref {
	return history.Ref{Resource: "datavolumes.cdi.kubevirt.io", Namespace: public, Name: "talos-worker-" + schematic + "-" + version}
}

// builtin is osImage of a pool that is cloned from an image.
func builtin(version string) map[string]any {
	return map[string]any{"builtin": map[string]any{"schematicID": schematic, "version": version}}
}

// subject selects a pool's objects in a record.
func subject(p *tenant.Pool) verify.Subject {
	return verify.Subject{Namespace: p.Namespace(), Cluster: p.Cluster.Name, Pool: p.Name}
}

// named gives a check a name that tells it from the same check of another pool.
func named(name string, s verify.Subject, c verify.Check) verify.Check {
	c.Name = fmt.Sprintf("%s %s", name, s)
	return c
}

// release is a HelmRelease of one of the platform's charts.
func release(namespace, name, chart string, values map[string]any) *unstructured.Unstructured {
	retry := map[string]any{"timeout": "15m", "disableWait": true, "strategy": map[string]any{"name": "RetryOnFailure", "retryInterval": "30s"}}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "helm.toolkit.fluxcd.io/v2",
		"kind":       "HelmRelease",
		"metadata":   map[string]any{"namespace": namespace, "name": name, "labels": map[string]any{"sharding.fluxcd.io/key": "tenants"}},
		"spec": map[string]any{
			"interval": "5m", "maxHistory": int64(5), "install": retry, "upgrade": retry,
			"chartRef": map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": chart},
			"values":   values,
		},
	}}
}

// offer is a catalog of one image.
func offer(namespace string, values map[string]any) *unstructured.Unstructured {
	values["images"] = []any{map[string]any{"schematicID": schematic, "version": version}}
	return release(namespace, catalogRelease, "cozystack-golden-images-default-golden-images", values)
}

// catalog is the act that every scenario begins with: the image is offered, and imported.
func catalog() harness.Act {
	begin := harness.Make(offer(public, map[string]any{}))
	return harness.Act{Name: "catalog", Do: func(ctx context.Context, on harness.Upgraded) error {
		if err := begin(ctx, on); err != nil {
			return err
		}
		return until(ctx, on, "the image to be imported", 2*time.Minute, func(ctx context.Context, c dynamic.Interface) (bool, error) {
			list, err := c.Resource(dataVolumes).Namespace(public).List(ctx, metav1.ListOptions{})
			if err != nil || len(list.Items) == 0 {
				return false, err
			}
			phase, _, _ := unstructured.NestedString(list.Items[0].Object, "status", "phase")
			return phase == "Succeeded", nil
		})
	}}
}

var (
	dataVolumes        = schema.GroupVersionResource{Group: "cdi.kubevirt.io", Version: "v1beta1", Resource: "datavolumes"}
	machineDeployments = schema.GroupVersionResource{Group: "cluster.x-k8s.io", Version: "v1beta1", Resource: "machinedeployments"}
)

// ask sets a pool's osImage, as its owner would.
func ask(p *tenant.Pool, why string, version string) tenant.Edit {
	return tenant.Edit{Why: why, APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease", Namespace: p.Namespace(), Name: p.Release(),
		Spec: map[string]any{"values": map[string]any{"osImage": builtin(version)}}}
}

// switched is the act that asks for the image and waits until the pool has rolled.
func switched(name string, p *tenant.Pool) harness.Act {
	change := harness.Change(ask(p, name, version))
	return harness.Act{Name: name, Do: func(ctx context.Context, on harness.Upgraded) error {
		before := ""
		template := func(ctx context.Context, c dynamic.Interface) (*unstructured.Unstructured, string, error) {
			md, err := c.Resource(machineDeployments).Namespace(p.Namespace()).Get(ctx, p.Object(), metav1.GetOptions{})
			if err != nil {
				return nil, "", err
			}
			name, _, _ := unstructured.NestedString(md.Object, "spec", "template", "spec", "infrastructureRef", "name")
			return md, name, nil
		}
		if err := until(ctx, on, "", 10*time.Second, func(ctx context.Context, c dynamic.Interface) (ok bool, err error) {
			_, before, err = template(ctx, c)
			return true, err
		}); err != nil {
			return err
		}
		if err := change(ctx, on); err != nil {
			return err
		}
		return until(ctx, on, "pool "+p.Object()+" to roll", 5*time.Minute, func(ctx context.Context, c dynamic.Interface) (bool, error) {
			md, now, err := template(ctx, c)
			if err != nil || now == before {
				return false, err
			}
			number := func(path ...string) int64 { n, _, _ := unstructured.NestedInt64(md.Object, path...); return n }
			want := number("spec", "replicas")
			return number("status", "observedGeneration") == md.GetGeneration() && number("status", "updatedReplicas") == want &&
				number("status", "replicas") == want && number("status", "readyReplicas") == want, nil
		})
	}}
}

// until waits for what an act brings about. That it does not come is for checks to say.
func until(ctx context.Context, on harness.Upgraded, what string, bound time.Duration, ok func(context.Context, dynamic.Interface) (bool, error)) error {
	client, err := dynamic.NewForConfig(on.Env.Config)
	if err != nil {
		return err
	}
	err = wait.PollUntilContextTimeout(ctx, time.Second, bound, true, func(ctx context.Context) (bool, error) { return ok(ctx, client) })
	if wait.Interrupted(err) && ctx.Err() == nil {
		on.Log("acts", "waited in vain for "+what)
		return nil
	}
	return err
}

// refused is a scenario whose pool asks for an image that it can't have: the release says why, the machines live on.
func refused(tag, line string, t *tenant.Tenant, p *tenant.Pool, version string, because *regexp.Regexp) harness.Scenario {
	s := subject(p)
	return harness.Scenario{
		Tag: tag, Line: line, Given: []*tenant.Tenant{t},
		Acts:    []harness.Act{catalog(), {Name: tag, Do: harness.Change(ask(p, tag, version))}},
		MayFail: []harness.Failure{{Namespace: p.Namespace(), Release: p.Release(), Because: because}},
		Checks:  []verify.Check{named("refused", s, verify.Refused(s.PoolRelease(), because)), verify.TemplateUnchanged(s), verify.Workers(s, p.Machines())},
	}
}
