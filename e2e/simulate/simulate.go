// Package simulate plays what a run does not have: the nodes of the management cluster with their kubelet and
// virt-handler, CSI driver and CDI, Kamaji, and the API and nodes of the tenants' clusters. Every stand-in does the
// least that lets the real controllers (Cluster API, CAPK, Talos bootstrap provider, KubeVirt, Flux) bring worker
// pools to Running and notice when one is disturbed. Each runs under an identity of its own with rights of its own.
package simulate

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"cozystack.io/upgrade-e2e/e2e/process"
)

//go:embed crds/*.yaml
var crds embed.FS

// Options is what the stand-ins work with.
type Options struct {
	// Admin may create CRDs and RBAC in the management cluster. It is used by Start alone, for the stand-ins' own kinds
	// and rights, and for the API server's address and CA.
	Admin *rest.Config
	// As returns the identity of a ServiceAccount, creating both namespace and ServiceAccount when missing.
	As func(ctx context.Context, namespace, serviceAccount string) (*rest.Config, error)
	// Processes owns the tenants' API server and the processes of Jobs.
	Processes *process.Run
	// Programs is the folder with the built programs; the processes of Jobs find kubectl there.
	Programs string
	// APIServer is the kube-apiserver that serves the tenants; empty means the one in Programs.
	APIServer string
	// EtcdURL is the etcd that the tenants' API server shares with the management cluster, under a prefix of its own.
	EtcdURL string
	// Entrypoint tells how a container image that brings its own entrypoint runs on the host; may be nil. It can be
	// exchanged later with SetEntrypoint.
	Entrypoint EntrypointFunc
	// NudgeCAPK starts with nudging on, see Simulation.SetNudge.
	NudgeCAPK bool
	// Expose lets the API server and controllers reach a port of 127.0.0.1, at the host that it returns.
	Expose func(port int) (host string, err error)
	// Download tells how importers fare with an image; nil means that all succeed.
	Download func(url string) Download
	// Transfer is how long CDI's pods run; 0 means that they end as soon as they were seen running.
	Transfer time.Duration
	// ImageSize is the virtual size of every image, in bytes; 0 means 5Gi.
	ImageSize int64
	// NoTenants leaves the tenants' API server out, where nothing runs that needs it.
	NoTenants bool
	// Shared is set where the cluster has other users.
	Shared *Shared
	// Log gets what the stand-ins have to say.
	Log logr.Logger
}

// EntrypointFunc maps an image reference to a host program and the arguments that it gets when the container names
// none. It returns false for an image that it does not know.
type EntrypointFunc func(image string) (path string, args []string, ok bool)

// Simulation is the running set of stand-ins. It ends with the context of Start.
type Simulation struct {
	o          Options
	tenant     *tenantAPI
	kubelet    *kubelet
	handler    *virtHandler
	nudge      atomic.Bool
	entrypoint atomic.Pointer[EntrypointFunc]

	wait func() error
}

// reachedAt is where the API server reaches what listens at an address of 127.0.0.1.
func (s *Simulation) reachedAt(listening net.Addr) (host, address string, err error) {
	port := listening.(*net.TCPAddr).Port
	if host, err = s.o.Expose(port); err != nil {
		return "", "", err
	}
	return host, net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// standIn is one identity and what runs under it.
type standIn struct {
	name           string
	namespace      string
	serviceAccount string
	rules          []rbacv1.PolicyRule
	setup          func(*Simulation, manager.Manager) error
}

// standIns is everything that is played, in no particular order.
var standIns = []standIn{
	kubeletStandIn,
	virtHandlerStandIn,
	csiStandIn,
	cdiStandIn,
	kamajiStandIn,
	certManagerStandIn,
	tenantNodeStandIn,
}

// Start installs the stand-ins' kinds and rights, starts the tenants' API server and the stand-ins, and returns when
// they have seen the state of the cluster. The CRDs of Cluster API, CAPK, KubeVirt and CDI must be established. The
// stand-ins run until ctx ends.
func Start(ctx context.Context, o Options) (*Simulation, error) {
	return start(ctx, o, standIns)
}

func start(ctx context.Context, o Options, list []standIn) (*Simulation, error) {
	s := &Simulation{o: o}
	s.SetNudge(o.NudgeCAPK)
	s.SetEntrypoint(o.Entrypoint)

	if !o.NoTenants {
		tenant, err := newTenantAPI(o)
		if err != nil {
			return nil, err
		}
		s.tenant = tenant
	}

	// The tenants' API server takes seconds to come up; everything else is prepared meanwhile.
	prepare, prepareCtx := errgroup.WithContext(ctx)
	if !o.NoTenants {
		prepare.Go(func() error { return s.tenant.start(prepareCtx) })
	}
	managers := make([]manager.Manager, len(list))
	prepare.Go(func() error {
		if err := installKinds(prepareCtx, o.Admin); err != nil {
			return err
		}
		if err := grantRights(prepareCtx, o.Admin); err != nil {
			return err
		}
		each, eachCtx := errgroup.WithContext(prepareCtx)
		for i, si := range list {
			each.Go(func() error {
				mgr, err := s.manager(eachCtx, ctx, si)
				if err != nil {
					return fmt.Errorf("stand-in %s: %w", si.name, err)
				}
				managers[i] = mgr
				return nil
			})
		}
		return each.Wait()
	})
	if err := prepare.Wait(); err != nil {
		return nil, fmt.Errorf("prepare the stand-ins: %w", err)
	}
	for i, si := range list {
		if err := si.setup(s, managers[i]); err != nil {
			return nil, fmt.Errorf("set up stand-in %s: %w", si.name, err)
		}
	}
	return s, s.run(ctx, list, managers)
}

// run starts the managers and waits until their caches hold the cluster's state.
func (s *Simulation) run(ctx context.Context, list []standIn, managers []manager.Manager) error {
	running, runCtx := errgroup.WithContext(ctx)
	for i, mgr := range managers {
		running.Go(func() error {
			if err := mgr.Start(runCtx); err != nil {
				return fmt.Errorf("stand-in %s: %w", list[i].name, err)
			}
			return nil
		})
	}
	s.wait = sync.OnceValue(running.Wait)
	for i, mgr := range managers {
		if !mgr.GetCache().WaitForCacheSync(runCtx) {
			return fmt.Errorf("stand-in %s saw no state of the cluster: %w", list[i].name, errors.Join(context.Cause(runCtx), s.wait()))
		}
	}
	return nil
}

// Wait blocks until the stand-ins have ended and returns the first error that ended one of them, nil when the context
// of Start did.
func (s *Simulation) Wait() error { return s.wait() }

// SetNudge switches nudging: while it is on, a controller that would only look again after a fixed time (CAPK: 20 s,
// CAPI's MachineSets: 15 s) is woken by one annotation as soon as what it waits for is there. It saves time while a
// run builds its baseline and must be off from the baseline on, for it writes to the very objects that are judged.
func (s *Simulation) SetNudge(on bool) { s.nudge.Store(on) }

// SetEntrypoint replaces what is known about images, for instance once the new platform is loaded.
func (s *Simulation) SetEntrypoint(f EntrypointFunc) { s.entrypoint.Store(&f) }

// TenantConfig is the administrator's access to the API that all tenant clusters share.
func (s *Simulation) TenantConfig() *rest.Config { return rest.CopyConfig(s.tenant.config) }

// ShutdownGuest plays a guest that powers itself off: the VMI succeeds and its launcher pod completes.
func (s *Simulation) ShutdownGuest(ctx context.Context, namespace, name string) error {
	return s.handler.shutdown(ctx, client.ObjectKey{Namespace: namespace, Name: name})
}

// manager makes the manager of one stand-in, under its identity.
func (s *Simulation) manager(ctx, runCtx context.Context, si standIn) (manager.Manager, error) {
	config, err := s.o.As(ctx, si.namespace, si.serviceAccount)
	if err != nil {
		return nil, fmt.Errorf("identity %s/%s: %w", si.namespace, si.serviceAccount, err)
	}
	config = rest.CopyConfig(config)
	config.UserAgent = "upgrade-e2e-" + si.name
	config.QPS = -1 // the API server's own fairness is enough on one machine
	return manager.New(config, manager.Options{
		Scheme:                 scheme,
		Logger:                 s.o.Log.WithName(si.name),
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
		BaseContext:            func() context.Context { return runCtx },
		Cache:                  cache.Options{DefaultTransform: cache.TransformStripManagedFields()},
		Client:                 client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Controller:             controllerConfig(),
	})
}

func controllerConfig() config.Controller {
	return config.Controller{
		SkipNameValidation:      ptr.To(true), // one process may run several simulations, one after another
		MaxConcurrentReconciles: 8,
		RecoverPanic:            ptr.To(true),
	}
}

var scheme = newScheme()

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err) // a duplicate registration, seen by the first test
		}
	}
	return s
}

// installKinds installs the CRDs in crds/ and waits until they are served. One that is there already stays.
func installKinds(ctx context.Context, config *rest.Config) error {
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	list, err := readCRDs()
	if err != nil {
		return err
	}
	for _, crd := range list {
		if err := c.Create(ctx, crd); client.IgnoreAlreadyExists(err) != nil {
			return fmt.Errorf("create CRD %s: %w", crd.Name, err)
		}
	}
	options := envtest.CRDInstallOptions{PollInterval: 50 * time.Millisecond, MaxTime: 2 * time.Minute} // beside a cluster that starts
	if err := envtest.WaitForCRDs(config, list, options); err != nil {
		return fmt.Errorf("wait for the stand-ins' CRDs to be served: %w", err)
	}
	return nil
}
