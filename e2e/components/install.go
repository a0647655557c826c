// Package components puts on a cluster what Cozystack's tenants run on: Flux's
// helm-controller, Cluster API with its KubeVirt and Talos providers, KubeVirt,
// and stand-ins for what can't be had. Each controller is a pod, or without real
// nodes a process, with the ServiceAccount and the rights that it ships with.
package components

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/simulate"
)

// owner is the field manager of what is installed here.
const owner = "upgrade-e2e"

// Fidelity says of one component which version of it runs, whether it is the
// real one, and if not (or not quite), why.
type Fidelity struct {
	Component string `json:"component"`
	Version   string `json:"version"`
	Real      bool   `json:"real"`
	Why       string `json:"why"`
}

// Options is what can be chosen.
type Options struct {
	// HelmController is the program that is Flux's helm-controller,
	// "helm-controller" by default.
	HelmController string
	// Entrypoint tells how the images of Jobs run on the host; may be nil.
	Entrypoint simulate.EntrypointFunc
	// Download is how an import fares; nil: all succeed at once.
	Download func(url string) simulate.Download
	// Restored says that the cluster was saved with all components on it, by a run that had other ports, keys and
	// processes.
	Restored bool
	// Progress gets a line per step; may be nil.
	Progress func(format string, a ...any)
}

// Installed is what Install has made.
type Installed struct {
	// Fidelity has a row for each component, real ones first.
	Fidelity []Fidelity
	// Simulation are the running stand-ins.
	Simulation *simulate.Simulation
	scrapes    []scrape
}

// etcd is a provider whose etcd can be shared by the tenants' API server.
type etcd interface{ EtcdURL() string }

// shared is a cluster that has other users: what was there before stays as it is.
type shared interface {
	// Others are the namespaces that were there before.
	Others() []string
	// Owns tells whether a namespace was made by the run.
	Owns(namespace string) bool
}

// Install installs all components and returns once each of them works. The
// controllers end with the cluster's run; the stand-ins end with ctx. On a
// provider with nodes the controllers are pods there, else processes. An object that is there already is brought to what it should be.
func Install(ctx context.Context, c cluster.Provider, programs cluster.Programs, o Options) (*Installed, error) {
	if o.HelmController == "" {
		o.HelmController = "helm-controller"
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	in := &installer{options: o, cluster: c, programs: programs, run: c.Processes()}
	installed, err := in.install(ctx)
	if err != nil {
		return nil, fmt.Errorf("install components: %w", err)
	}
	return installed, nil
}

type installer struct {
	options  Options
	cluster  cluster.Provider
	programs cluster.Programs
	run      *process.Run
	config   *rest.Config
	client   client.Client
	ca       *cluster.Authority

	host        host
	controllers []*started
	kinds       []*manifest // of components that have no program here
	found       []string    // components that were on the cluster before
	server      string      // version of a shared cluster
}

// shared is nil unless the cluster has other users.
func (in *installer) shared() shared {
	s, _ := in.cluster.(shared)
	return s
}

func (in *installer) install(ctx context.Context) (*Installed, error) {
	in.config = in.cluster.KubernetesRestConfig()
	if in.config == nil {
		return nil, errors.New("the cluster was not created")
	}
	in.config.UserAgent = owner + "-components"
	var err error
	if in.client, err = client.New(in.config, client.Options{}); err != nil {
		return nil, err
	}
	if in.ca, err = cluster.NewAuthority("components"); err != nil {
		return nil, err
	}
	if in.host, err = in.chooseHost(); err != nil {
		return nil, err
	}
	if err := in.step("read manifests", func() error { return in.read() }); err != nil {
		return nil, err
	}
	if in.shared() != nil {
		if err := in.keepFound(ctx); err != nil {
			return nil, err
		}
		disco, err := discovery.NewDiscoveryClientForConfig(in.config)
		if err != nil {
			return nil, err
		}
		version, err := disco.ServerVersion()
		if err != nil {
			return nil, err
		}
		in.server = version.GitVersion
	}
	apply, name := in.applyManifests, "apply kinds, rights and webhooks"
	if in.options.Restored {
		apply, name = in.turnWebhooks, "turn webhooks to this run"
	}
	if err := in.step(name, func() error { return apply(ctx) }); err != nil {
		return nil, err
	}
	installed := &Installed{Fidelity: in.fidelity()}
	err = in.step("start controllers and stand-ins", func() error {
		var err error
		installed.Simulation, err = in.start(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	installed.scrapes, err = in.scrapes()
	return installed, err
}

func (in *installer) chooseHost() (host, error) {
	n, ok := in.cluster.(nodes)
	if !ok {
		return processes{in}, nil
	}
	api, err := kubernetes.NewForConfig(in.config)
	return pods{in, n, api}, err
}

func (in *installer) step(name string, do func() error) error {
	began := time.Now()
	if err := do(); err != nil {
		return err
	}
	in.options.Progress("%s: %.1f s", name, time.Since(began).Seconds())
	return nil
}

// kindsOnly are the manifests of which only the kinds are needed.
func kindsOnly() []string {
	return []string{"source-controller", "containerized-data-importer", "external-snapshotter"}
}

func (in *installer) read() error {
	all := controllers(in.options)
	in.controllers = make([]*started, len(all))
	in.kinds = make([]*manifest, len(kindsOnly()))
	var g errgroup.Group
	for i, c := range all {
		g.Go(func() (err error) {
			in.controllers[i], err = in.host.prepare(c)
			return err
		})
	}
	for i, name := range kindsOnly() {
		g.Go(func() (err error) {
			in.kinds[i], err = readManifest(in.programs.Manifest(name), byService{})
			return err
		})
	}
	return g.Wait()
}

// manifests are those of all components, each once: of the programs that share
// one, the one that serves its webhooks has it.
func (in *installer) manifests() []*manifest {
	all := in.kinds
	seen := map[string]bool{}
	for _, serving := range []bool{true, false} {
		for _, c := range in.controllers {
			if c.serves == serving && !seen[c.installs] {
				seen[c.installs] = true
				all = append(all, c.manifest)
			}
		}
	}
	return all
}

// applyManifests applies everything but aggregated APIs, whose servers do not
// run yet, and returns when the kinds are served and the rights in force.
func (in *installer) applyManifests(ctx context.Context) error {
	var namespaces, crds, others []*unstructured.Unstructured
	for _, m := range in.manifests() {
		namespaces = append(namespaces, m.namespaces...)
		crds = append(crds, m.crds...)
		others = append(others, m.others...)
	}
	if err := in.applyAll(ctx, namespaces); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := in.applyAll(gctx, crds); err != nil {
			return err
		}
		return in.waitServed(gctx, crds)
	})
	g.Go(func() error {
		if err := in.applyAll(gctx, others); err != nil {
			return err
		}
		return in.waitAggregated(gctx, others)
	})
	return g.Wait()
}

func (in *installer) applyAll(ctx context.Context, objects []*unstructured.Unstructured) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for _, u := range objects {
		g.Go(func() error { return in.apply(gctx, u) })
	}
	return g.Wait()
}

// apply creates u, or brings what is there to what it says. To create is half the
// work for the API server, and on a new cluster it always succeeds.
func (in *installer) apply(ctx context.Context, u *unstructured.Unstructured) error {
	err := in.client.Create(ctx, u.DeepCopy(), client.FieldOwner(owner))
	if apierrors.IsAlreadyExists(err) && in.shared() != nil {
		if u.GetKind() == "Namespace" {
			return nil
		}
		return fmt.Errorf("%s %s is on the cluster already and not the run's: its component is there in part", u.GetKind(), client.ObjectKeyFromObject(u))
	}
	if apierrors.IsAlreadyExists(err) {
		err = in.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(owner), client.ForceOwnership)
	}
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", u.GetKind(), client.ObjectKeyFromObject(u), err)
	}
	return nil
}

// waitServed waits until discovery has every served version of the CRDs, all of
// them at once: it is one request.
func (in *installer) waitServed(ctx context.Context, crds []*unstructured.Unstructured) error {
	disco, err := discovery.NewDiscoveryClientForConfig(in.config)
	if err != nil {
		return err
	}
	want := map[schema.GroupVersionResource]bool{}
	for _, crd := range crds {
		for _, gvr := range servedBy(crd) {
			want[gvr] = true
		}
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, startBound, true, func(context.Context) (bool, error) {
		_, lists, err := disco.ServerGroupsAndResources()
		if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
			return false, nil
		}
		for _, list := range lists {
			gv, err := schema.ParseGroupVersion(list.GroupVersion)
			if err != nil {
				return false, err
			}
			for _, r := range list.APIResources {
				delete(want, gv.WithResource(r.Name))
			}
		}
		return len(want) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("wait until %d kinds are served, for example %v: %w", len(want), first(want), err)
	}
	return nil
}

func servedBy(crd *unstructured.Unstructured) []schema.GroupVersionResource {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	var served []schema.GroupVersionResource
	for _, item := range versions {
		version, _ := item.(map[string]any)
		name, _, _ := unstructured.NestedString(version, "name")
		if ok, _, _ := unstructured.NestedBool(version, "served"); ok {
			served = append(served, schema.GroupVersionResource{Group: group, Version: name, Resource: plural})
		}
	}
	return served
}

func first(set map[schema.GroupVersionResource]bool) schema.GroupVersionResource {
	for gvr := range set {
		return gvr
	}
	return schema.GroupVersionResource{}
}

// waitAggregated waits until the aggregated ClusterRoles have got their rules: a
// controller that starts before sees refusals and backs off.
func (in *installer) waitAggregated(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, u := range objects {
		if _, ok, _ := unstructured.NestedMap(u.Object, "aggregationRule"); !ok {
			continue
		}
		role := &rbacv1.ClusterRole{}
		err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, startBound, true, func(ctx context.Context) (bool, error) {
			err := in.client.Get(ctx, client.ObjectKeyFromObject(u), role)
			return err == nil && len(role.Rules) > 0, client.IgnoreNotFound(err)
		})
		if err != nil {
			return fmt.Errorf("wait for the rules of ClusterRole %s: %w", u.GetName(), err)
		}
	}
	return nil
}

// start starts controllers and stand-ins and waits for all of them: side by side on a new cluster. On a restored one the
// stand-ins are first, for Cluster API connects to the tenants as soon as it starts, and again only after 30 s.
func (in *installer) start(ctx context.Context) (*simulate.Simulation, error) {
	if !in.options.Restored {
		if err := in.createKubeVirt(ctx); err != nil {
			return nil, err
		}
		var simulation *simulate.Simulation
		g, gctx := errgroup.WithContext(ctx)
		g.Go(func() error { return in.startControllers(gctx) })
		// The stand-ins live as long as their context: not the group's.
		g.Go(func() (err error) {
			simulation, err = in.simulate(ctx)
			return err
		})
		return simulation, g.Wait()
	}
	simulation, err := in.simulate(ctx)
	if err != nil {
		return nil, err
	}
	if err := simulation.TenantsMoved(ctx); err != nil {
		return nil, err
	}
	return simulation, in.startControllers(ctx)
}

func (in *installer) startControllers(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range in.controllers {
		g.Go(func() error {
			if err := in.host.start(gctx, c); err != nil {
				return err
			}
			if err := c.wait(gctx, in.host); err != nil {
				return err
			}
			return in.aggregate(gctx, c)
		})
	}
	return g.Wait()
}

// aggregate adds the APIs that c serves and waits until they are available. Were
// they there before, the API server would have backed off from them by now.
func (in *installer) aggregate(ctx context.Context, c *started) error {
	if !c.serves {
		return nil
	}
	if err := in.applyAll(ctx, c.manifest.services); err != nil {
		return err
	}
	for _, u := range c.manifest.services {
		got := &unstructured.Unstructured{}
		got.SetGroupVersionKind(u.GroupVersionKind())
		err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, startBound, true, func(ctx context.Context) (bool, error) {
			err := in.client.Get(ctx, client.ObjectKeyFromObject(u), got)
			return err == nil && available(got), client.IgnoreNotFound(err)
		})
		if err != nil {
			return fmt.Errorf("wait for APIService %s: %w; its status: %v", u.GetName(), err, got.Object["status"])
		}
	}
	return nil
}

func available(u *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, item := range conditions {
		condition, _ := item.(map[string]any)
		if condition["type"] == "Available" {
			return condition["status"] == "True"
		}
	}
	return false
}

func (in *installer) simulate(ctx context.Context) (*simulate.Simulation, error) {
	log, err := os.OpenFile(filepath.Join(in.run.Dir(), "logs", "stand-ins.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of the stand-ins: %w", err)
	}
	in.run.AtClose(log.Close)
	o := simulate.Options{
		Admin: in.config, Processes: in.run, Programs: in.programs.Dir, APIServer: in.programs.Path("kube-apiserver"), Entrypoint: in.options.Entrypoint,
		Log: zap.New(zap.WriteTo(log)), Download: in.options.Download, Expose: in.cluster.Expose,
		As: func(ctx context.Context, namespace, name string) (*rest.Config, error) {
			return cluster.ConfigFor(ctx, in.cluster, cluster.ServiceAccount{Namespace: namespace, Name: name})
		},
	}
	if e, ok := in.cluster.(etcd); ok {
		o.EtcdURL = e.EtcdURL()
	}
	if s := in.shared(); s != nil {
		o.Shared = &simulate.Shared{Others: s.Others(), Owns: s.Owns}
	}
	return simulate.Start(ctx, o)
}

// fidelity has a row for every component, in the order in which one thinks of a
// cluster.
func (in *installer) fidelity() []Fidelity {
	var rows []Fidelity
	real, how := cluster.ControlPlane(), ""
	if in.shared() != nil {
		real = nil // somebody else's
		rows = append(rows, Fidelity{Component: "Kubernetes", Version: in.server, Real: true, Why: "as it was there"})
	}
	node, onNode := in.cluster.(interface{ Node() []string })
	if onNode {
		real, how = append(real, node.Node()...), "in a container that is a node"
	}
	for _, name := range real {
		rows = append(rows, Fidelity{Component: name, Version: in.programs.Version(name), Real: true, Why: how})
	}
	for _, c := range in.controllers {
		rows = append(rows, Fidelity{Component: c.name, Version: c.version, Real: true, Why: "as " + in.host.as() + ", as " + c.identity().String()})
	}
	for _, name := range in.found {
		rows = append(rows, Fidelity{Component: name, Real: true, Why: "as it was there, with its own metrics, which are not looked at"})
	}
	for _, row := range []struct{ name, why string }{
		{"source-controller", "its kinds are real; the run itself publishes charts as ExternalArtifacts"},
		{"external-snapshotter", "its kinds are real; the CSI stand-in answers snapshots"},
	} {
		if slices.Contains(in.found, row.name) {
			continue
		}
		rows = append(rows, Fidelity{Component: row.name, Version: in.programs.Version(row.name), Why: row.why})
	}
	for _, row := range simulate.Fidelity(onNode) {
		rows = append(rows, Fidelity{Component: row.Component, Why: row.Why})
	}
	return rows
}

// scrapes are the metrics endpoints of the controllers, and of Kubernetes' own.
func (in *installer) scrapes() ([]scrape, error) {
	var all []scrape
	for _, c := range in.controllers {
		if c.scraped != nil {
			all = append(all, scrape{c.name, func(ctx context.Context) ([]byte, error) { return in.host.get(ctx, c, c.scraped(c.settings)) }})
		}
	}
	if m, ok := in.cluster.(interface {
		ControllerManagerMetrics() (string, *http.Client, error)
	}); ok {
		url, client, err := m.ControllerManagerMetrics()
		if err != nil {
			return nil, err
		}
		all = append(all, scrape{"kube-controller-manager", func(ctx context.Context) ([]byte, error) { return get(ctx, client, url) }})
	}
	return all, nil
}
