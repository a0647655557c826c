package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apitypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

var (
	helmReleases       = schema.GroupVersionResource{Group: "helm.toolkit.fluxcd.io", Version: "v2", Resource: "helmreleases"}
	machineDeployments = schema.GroupVersionResource{Group: "cluster.x-k8s.io", Version: "v1beta1", Resource: "machinedeployments"}
)

// fleetBound is how long the fleet may take to run; each machine passes several controllers that poll, and a real platform's
// charts take two cores some ten seconds for each cluster.
const fleetBound = 10 * time.Minute

func (r *run) dynamic() (dynamic.Interface, error) {
	return fleetClient(r.cluster.KubernetesRestConfig())
}

func fleetClient(admin *rest.Config) (dynamic.Interface, error) {
	config := rest.CopyConfig(admin)
	config.UserAgent = "upgrade-e2e-fleet"
	config.QPS, config.Burst = -1, 0
	return dynamic.NewForConfig(config)
}

func (r *run) tenants() []*tenant.Tenant {
	out := []*tenant.Tenant{neighbour()}
	for _, s := range r.scenarios {
		out = append(out, s.Given...)
	}
	// The order in which a fleet comes up must not matter; the seed brings one order back.
	rand.New(rand.NewPCG(uint64(r.options.Seed), 0)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// populate makes the selected scenarios' tenants, waits until every declared machine runs, and does the tenants' edits.
func (r *run) populate(ctx context.Context) error {
	client, err := r.dynamic()
	if err != nil {
		return err
	}
	tenants := r.tenants()
	running := func(broken history.MayFail) func(context.Context) ([]string, error) {
		return func(ctx context.Context) ([]string, error) { return r.notRunning(ctx, client, tenants, broken) }
	}
	if r.restored {
		return r.progress.until(ctx, "the fleet to run", fleetBound, running(r.excused(tenants)))
	}
	making, makeCtx := errgroup.WithContext(ctx)
	making.SetLimit(8)
	for _, t := range tenants {
		making.Go(func() error { return r.create(makeCtx, client, t) })
	}
	if err := making.Wait(); err != nil {
		return err
	}
	r.installed.Simulation.SetNudge(true)
	defer r.installed.Simulation.SetNudge(false)
	if err := r.progress.until(ctx, "the fleet to run", fleetBound, running(r.mayFail())); err != nil {
		return err
	}
	edits := 0
	for _, t := range tenants {
		for _, e := range t.Edits {
			if err := edit(ctx, client, e); err != nil {
				return err
			}
			edits++
		}
	}
	if edits == 0 {
		return nil
	}
	return r.progress.until(ctx, "the fleet to run as edited", fleetBound, running(r.excused(tenants)))
}

// excused are the releases that an edit breaks, beside those that a scenario leaves not Ready anyway.
func (r *run) excused(tenants []*tenant.Tenant) history.MayFail {
	anyway := r.mayFail()
	breaks := map[history.ReleaseKey]bool{}
	for _, t := range tenants {
		for _, e := range t.Edits {
			if e.Breaks {
				breaks[history.ReleaseKey{Namespace: e.Namespace, Name: e.Name}] = true
			}
		}
	}
	return func(namespace, name, message string) bool {
		return breaks[history.ReleaseKey{Namespace: namespace, Name: name}] || anyway(namespace, name, message)
	}
}

// Resume is an act's deed: it resumes the release of a cluster that was suspended.
func Resume(c *tenant.Cluster) func(context.Context, Upgraded) error {
	return Change(tenant.Edit{Why: "resumed", APIVersion: helmReleases.GroupVersion().String(), Kind: "HelmRelease",
		Namespace: c.Tenant.Namespace(), Name: c.Release(), Spec: map[string]any{"suspend": false}})
}

// Create is an act's deed: it makes a cluster that was declared Late.
func Create(c *tenant.Cluster) func(context.Context, Upgraded) error {
	return func(ctx context.Context, on Upgraded) error {
		client, err := fleetClient(on.Env.Config)
		if err != nil {
			return err
		}
		_, err = client.Resource(helmReleases).Namespace(c.Tenant.Namespace()).Create(ctx, c.HelmRelease(), metav1.CreateOptions{})
		return err
	}
}

// create makes a tenant's namespace with the platform's values in it, then its clusters.
func (r *run) create(ctx context.Context, client dynamic.Interface, t *tenant.Tenant) error {
	values, err := yaml.Marshal(r.old.Profile.TenantValues(t.Namespace()))
	if err != nil {
		return fmt.Errorf("values of %s: %w", t.Namespace(), err)
	}
	objects := t.Objects(r.old.Profile.Values.Secret, string(values))
	return makeAll(ctx, client, objects)
}

func makeAll(ctx context.Context, client dynamic.Interface, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		gvr, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
		if _, err := client.Resource(gvr).Namespace(o.GetNamespace()).Create(ctx, o, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create %s %s/%s: %w", o.GetKind(), o.GetNamespace(), o.GetName(), err)
		}
	}
	return nil
}

// notRunning names what of the fleet is not there yet. A broken release is there once it has failed.
func (r *run) notRunning(ctx context.Context, client dynamic.Interface, tenants []*tenant.Tenant, broken history.MayFail) ([]string, error) {
	releases, err := client.Resource(helmReleases).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var waiting []string
	for _, hr := range releases.Items {
		why := history.ReleaseWaiting(&hr, nil, broken)
		if missing := missingKind(&hr, why); missing != "" {
			return nil, hopeless{fmt.Sprintf("%s; give profile %s its CRD", missing, r.old.Profile.Name)}
		}
		if why != "" && !r.old.Profile.NotReadyAllowed(hr.GetNamespace(), hr.GetName()) {
			waiting = append(waiting, fmt.Sprintf("HelmRelease %s/%s: %s", hr.GetNamespace(), hr.GetName(), why))
		}
	}
	var pools []*tenant.Pool
	for _, t := range tenants {
		pools = append(pools, t.Pools()...)
	}
	machines, err := notRunning(ctx, client, pools)
	return append(waiting, machines...), err
}

// notRunning names the pools whose declared machines do not all run.
func notRunning(ctx context.Context, client dynamic.Interface, pools []*tenant.Pool) ([]string, error) {
	list, err := client.Resource(machineDeployments).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	ready, wanted := map[string]int64{}, map[string]int64{}
	for _, md := range list.Items {
		name := md.GetNamespace() + "/" + md.GetName()
		ready[name], _, _ = unstructured.NestedInt64(md.Object, "status", "readyReplicas")
		wanted[name], _, _ = unstructured.NestedInt64(md.Object, "spec", "replicas")
	}
	var waiting []string
	for _, p := range pools {
		name := p.Namespace() + "/" + p.Object()
		// A pool that was scaled wants more than it was declared with.
		if n, want := ready[name], max(wanted[name], int64(p.Machines())); n < want {
			waiting = append(waiting, fmt.Sprintf("pool %s: %d of %d machines", name, n, want))
		}
	}
	return waiting, nil
}

// unmapped is how Helm says that the cluster does not know a kind.
var unmapped = regexp.MustCompile(`resource mapping not found for name: "([^"]*)" namespace: "([^"]*)" from "[^"]*": no matches for kind "([^"]+)" in version "([^"]+)"`)

// missingKind says which chart needs which kind that the cluster lacks, "" when that is not why a release is not Ready.
func missingKind(hr *unstructured.Unstructured, why string) string {
	m := unmapped.FindStringSubmatch(why)
	if m == nil {
		return ""
	}
	chart, _, _ := unstructured.NestedString(hr.Object, "spec", "chartRef", "name")
	return fmt.Sprintf("chart %s (HelmRelease %s/%s) has %s %s/%s, and the cluster has no kind %s in %s",
		chart, hr.GetNamespace(), hr.GetName(), m[3], or(m[2], hr.GetNamespace()), m[1], m[3], m[4])
}

// Make is an act's deed: it makes objects.
func Make(objects ...*unstructured.Unstructured) func(context.Context, Upgraded) error {
	return func(ctx context.Context, on Upgraded) error {
		client, err := fleetClient(on.Env.Config)
		if err != nil {
			return err
		}
		return makeAll(ctx, client, objects)
	}
}

// Change is an act's deed: it does an edit.
func Change(e tenant.Edit) func(context.Context, Upgraded) error {
	return func(ctx context.Context, on Upgraded) error {
		client, err := fleetClient(on.Env.Config)
		if err != nil {
			return err
		}
		return edit(ctx, client, e)
	}
}

func edit(ctx context.Context, client dynamic.Interface, e tenant.Edit) error {
	patch, err := json.Marshal(e.Patch())
	if err != nil {
		return err
	}
	gvr, _ := meta.UnsafeGuessKindToResource(schema.FromAPIVersionAndKind(e.APIVersion, e.Kind))
	_, err = client.Resource(gvr).Namespace(e.Namespace).Patch(ctx, e.Name, apitypes.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("edit %s (%s): %w", e.Object(), e.Why, err)
	}
	return nil
}
