package goldenimage

import (
	"context"
	"maps"
	"regexp"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	public    = "cozy-public"
	schematic = "ce4c980550dd2ab1b17bbf2b08801c7eb59418eafe8f279833297925d67c7515"
	version   = "v1.10.6" // in the catalog from the first act on
	absent    = "v1.99.0" // never in the catalog
)

// golden is the DataVolume of the image of a version.
func golden(version string) history.Ref {
	return history.Ref{Resource: "datavolumes.cdi.kubevirt.io", Namespace: public, Name: "talos-worker-" + schematic + "-" + version}
}

// builtin is osImage of a pool that is cloned from an image; without a version it is the one of the pool's Talos.
func builtin(version string) map[string]any {
	image := map[string]any{}
	if version != "" {
		image["schematicID"], image["version"] = schematic, version
	}
	return map[string]any{"builtin": image}
}

// subject selects a pool's objects in a record.
func subject(p *tenant.Pool) verify.Subject {
	return verify.Subject{Namespace: p.Namespace(), Cluster: p.Cluster.Name, Pool: p.Name}
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

// deed is what an act does.
type deed = func(context.Context, harness.Upgraded) error

// offer is a deed: a catalog of one image, in the words of the platform.
func offer(namespace string, values map[string]any) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		words := on.New.GoldenImages
		if words == nil {
			on.Log("acts", "this version of the platform offers no golden images")
			return nil
		}
		all := map[string]any{"images": []any{map[string]any{"schematicID": schematic, "version": version}}}
		maps.Copy(all, values)
		return harness.Make(release(namespace, words.Release, words.Chart, all))(ctx, on)
	}
}

// offerAs is a deed: other values for a catalog.
func offerAs(namespace, why string, values map[string]any) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		if on.New.GoldenImages == nil {
			return nil
		}
		return harness.Change(tenant.Edit{Why: why, APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease", Namespace: namespace,
			Name: on.New.GoldenImages.Release, Spec: map[string]any{"values": values}})(ctx, on)
	}
}

// catalog is the act that every scenario begins with: the image is offered, and imported.
func catalog() harness.Act {
	return harness.Act{Name: "catalog", Do: offer(public, nil), Until: untilGolden(version, "Succeeded")}
}

// offered is a deed: the catalog gets one image more. It returns once the image is in a phase, one of CDI's.
func offered(version, phase string) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		if on.New.GoldenImages == nil {
			return nil
		}
		client, err := dynamic.NewForConfig(on.Env.Config)
		if err != nil {
			return err
		}
		live, err := client.Resource(helmReleases).Namespace(public).Get(ctx, on.New.GoldenImages.Release, metav1.GetOptions{})
		if err != nil {
			return err
		}
		images, _, err := unstructured.NestedSlice(live.Object, "spec", "values", "images")
		if err != nil {
			return err
		}
		images = append(images, map[string]any{"schematicID": schematic, "version": version})
		if err := offerAs(public, "one image more", map[string]any{"images": images})(ctx, on); err != nil {
			return err
		}
		return untilGolden(version, phase)(ctx, on)
	}
}

// untilGolden waits for an image to be in a phase.
func untilGolden(version, phase string) func(context.Context, harness.Upgraded) error {
	return func(ctx context.Context, on harness.Upgraded) error {
		if on.New.GoldenImages == nil {
			return nil
		}
		return until(ctx, on, "image "+version+" to be "+phase, 2*time.Minute, func(ctx context.Context, c dynamic.Interface) (bool, error) {
			image, err := c.Resource(dataVolumes).Namespace(public).Get(ctx, golden(version).Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			if err != nil {
				return false, err
			}
			now, _, _ := unstructured.NestedString(image.Object, "status", "phase")
			return now == phase, nil
		})
	}
}

var (
	helmReleases       = schema.GroupVersionResource{Group: "helm.toolkit.fluxcd.io", Version: "v2", Resource: "helmreleases"}
	dataVolumes        = schema.GroupVersionResource{Group: "cdi.kubevirt.io", Version: "v1beta1", Resource: "datavolumes"}
	machineDeployments = schema.GroupVersionResource{Group: "cluster.x-k8s.io", Version: "v1beta1", Resource: "machinedeployments"}
)

// set is a deed: other values for a pool, as its owner would give them, where the platform has them.
func set(p *tenant.Pool, why string, values map[string]any) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		name := p.Release()
		if words := on.New.GoldenImages; words != nil && words.InCluster {
			name, values = p.Cluster.Release(), map[string]any{"nodeGroups": map[string]any{p.Name: values}}
		}
		return harness.Change(tenant.Edit{Why: why, APIVersion: "helm.toolkit.fluxcd.io/v2", Kind: "HelmRelease", Namespace: p.Namespace(), Name: name,
			Spec: map[string]any{"values": values}})(ctx, on)
	}
}

// ask is a deed: a pool asks for an image.
func ask(p *tenant.Pool, why string, version string) deed { return askFor(p, why, builtin(version)) }

func askFor(p *tenant.Pool, why string, image map[string]any) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		if on.New.GoldenImages == nil {
			return nil
		}
		return set(p, why, map[string]any{on.New.GoldenImages.Value: image})(ctx, on)
	}
}

// switched is the act that asks for the image and waits until the pool has rolled.
func switched(name string, p *tenant.Pool) harness.Act {
	return rolled(name, p, ask(p, name, version))
}

// rolled is an act that waits until what it does has rolled a pool.
func rolled(name string, p *tenant.Pool, deeds ...deed) harness.Act {
	before := ""
	template := func(ctx context.Context, c dynamic.Interface) (*unstructured.Unstructured, string, error) {
		md, err := c.Resource(machineDeployments).Namespace(p.Namespace()).Get(ctx, p.Object(), metav1.GetOptions{})
		if err != nil {
			return nil, "", err
		}
		name, _, _ := unstructured.NestedString(md.Object, "spec", "template", "spec", "infrastructureRef", "name")
		return md, name, nil
	}
	remember := func(ctx context.Context, on harness.Upgraded) error {
		client, err := dynamic.NewForConfig(on.Env.Config)
		if err != nil {
			return err
		}
		_, before, err = template(ctx, client)
		return err
	}
	return harness.Act{Name: name, Do: inTurn(append([]deed{remember}, deeds...)...),
		Until: func(ctx context.Context, on harness.Upgraded) error {
			return until(ctx, on, "pool "+p.Object()+" to roll", 5*time.Minute, func(ctx context.Context, c dynamic.Interface) (bool, error) {
				if no, err := refusedAgain(ctx, c, p); err != nil {
					return false, err
				} else if no {
					on.Log("acts", "pool "+p.Object()+" does not roll: its release is refused again and again")
					return true, nil
				}
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

// refusedAgain tells whether Flux has tried the release that renders a pool as it is now, and tried it once more, and was refused both times.
func refusedAgain(ctx context.Context, c dynamic.Interface, p *tenant.Pool) (bool, error) {
	hr, err := c.Resource(helmReleases).Namespace(p.Namespace()).Get(ctx, p.Release(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) { // a platform whose pools have none
		hr, err = c.Resource(helmReleases).Namespace(p.Namespace()).Get(ctx, p.Cluster.Release(), metav1.GetOptions{})
	}
	if err != nil {
		return false, err
	}
	observed, _, _ := unstructured.NestedInt64(hr.Object, "status", "observedGeneration")
	failures, _, _ := unstructured.NestedInt64(hr.Object, "status", "failures")
	return observed == hr.GetGeneration() && failures > 1, nil
}

// untilAsked waits until a disk of a pool asks for an image, or the pool's release is refused.
func untilAsked(p *tenant.Pool, version string) func(context.Context, harness.Upgraded) error {
	return func(ctx context.Context, on harness.Upgraded) error {
		return until(ctx, on, "a disk of "+p.Object()+" to ask for image "+version, 2*time.Minute, func(ctx context.Context, c dynamic.Interface) (bool, error) {
			disks, err := c.Resource(dataVolumes).Namespace(p.Namespace()).List(ctx, metav1.ListOptions{})
			if err != nil {
				return false, err
			}
			for _, disk := range disks.Items {
				if source, _, _ := unstructured.NestedString(disk.Object, "spec", "source", "pvc", "name"); source == golden(version).Name {
					return true, nil
				}
			}
			return refusedAgain(ctx, c, p)
		})
	}
}

// inTurn does one deed after the other.
func inTurn(deeds ...deed) deed {
	return func(ctx context.Context, on harness.Upgraded) error {
		for _, deed := range deeds {
			if err := deed(ctx, on); err != nil {
				return err
			}
		}
		return nil
	}
}

// edits does one edit after the other.
func edits(list ...tenant.Edit) deed {
	var deeds []deed
	for _, e := range list {
		deeds = append(deeds, harness.Change(e))
	}
	return inTurn(deeds...)
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
	return harness.Scenario{
		Tag: tag, Line: line, Given: []*tenant.Tenant{t},
		Acts:    []harness.Act{catalog(), {Name: tag, Do: ask(p, tag, version)}},
		MayFail: mayFail(p, because),
		Checks:  refusal(p, because),
	}
}

// mayFail excuses the release that renders a pool, its own or its cluster's, which is refused on purpose.
func mayFail(p *tenant.Pool, because *regexp.Regexp) []harness.Failure {
	return []harness.Failure{{Namespace: p.Namespace(), Release: p.Release(), Because: because},
		{Namespace: p.Namespace(), Release: p.Cluster.Release(), Because: because}}
}

// refusal are the checks of a pool that is refused: with the reason, and nothing else happens to it.
func refusal(p *tenant.Pool, because *regexp.Regexp) []verify.Check {
	s := subject(p)
	return []verify.Check{verify.About("refused", s, verify.PoolRefused(s, because)), verify.TemplateUnchanged(s), verify.Workers(s, p.Machines())}
}
