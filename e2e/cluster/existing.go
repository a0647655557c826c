package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/e2e-framework/klient"
	support "sigs.k8s.io/e2e-framework/pkg/types"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// Existing is a cluster that somebody else made and keeps. A run brings what is missing, leaves what was there before as it
// was, and takes away what it brought. The API server reaches this machine's processes by the address from which this
// machine reaches the nodes.
type Existing struct {
	run      *process.Run
	programs Programs
	path     string // of the kubeconfig, as in KUBECONFIG
	auditLog string
	leave    []string
	raw      *clientcmdapi.Config
	admin    *rest.Config
	client   kubernetes.Interface
	reach    string // this machine, as the nodes see it
	etcd     string // URL of the tenants' etcd
	visit
}

var _ Provider = (*Existing)(nil)

// NewExisting describes the cluster of a kubeconfig (one path or several, as in KUBECONFIG) whose API server's audit log is at
// auditLog, written with a policy that holds as much as AuditPolicy does. leave is a command that calls Leave with the folder
// that is appended to it, and is run however the run ends.
func NewExisting(run *process.Run, programs Programs, kubeconfig, auditLog string, leave ...string) *Existing {
	return &Existing{run: run, programs: programs, path: kubeconfig, auditLog: auditLog, leave: leave}
}

// AuditPolicy is the policy that a run's audit log is written with, for those who set up a cluster themselves.
func AuditPolicy() []byte { return slices.Clone(auditPolicy) }

// Kind is "existing".
func (e *Existing) Kind() string { return "existing" }

// Processes is the run that NewExisting was given.
func (e *Existing) Processes() *process.Run { return e.run }

// AuditLog is the path that NewExisting was given.
func (e *Existing) AuditLog() string { return e.auditLog }

// EtcdURL is an etcd for the tenants' API server, a process of this machine.
func (e *Existing) EtcdURL() string { return e.etcd }

// CheckExisting tells in one line why a run can't use the cluster of a kubeconfig: it does not answer, its user may not do
// everything, or it has a Cozystack, which the run would upgrade.
func CheckExisting(ctx context.Context, kubeconfig string) error {
	_, cfg, err := load(kubeconfig)
	if err != nil {
		return err
	}
	cfg.Timeout = 10 * time.Second
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("existing: kubeconfig %s: %w", kubeconfig, err)
	}
	return usable(ctx, cfg.Host, client)
}

// load reads the current context of a kubeconfig, with what it refers to.
func load(kubeconfig string) (*clientcmdapi.Config, *rest.Config, error) {
	fail := func(err error) (*clientcmdapi.Config, *rest.Config, error) {
		return nil, nil, fmt.Errorf("existing: kubeconfig %s: %w", kubeconfig, err)
	}
	raw, err := (&clientcmd.ClientConfigLoadingRules{Precedence: filepath.SplitList(kubeconfig)}).Load()
	if err != nil {
		return fail(err)
	}
	if raw.CurrentContext == "" {
		return fail(errors.New("no such file, or it has no current context"))
	}
	if err := errors.Join(clientcmdapi.MinifyConfig(raw), clientcmdapi.FlattenConfig(raw)); err != nil {
		return fail(err)
	}
	cfg, err := clientcmd.NewDefaultClientConfig(*raw, nil).ClientConfig()
	if err != nil {
		return fail(err)
	}
	if len(cfg.CAData) == 0 {
		return fail(errors.New("it names no CA of the API server, which the components' kubeconfigs need"))
	}
	return raw, cfg, nil
}

func usable(ctx context.Context, host string, client kubernetes.Interface) error {
	all := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "*", Group: "*", Resource: "*"}}}
	review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, all, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("existing: the API server at %s does not answer: %w", host, err)
	}
	if !review.Status.Allowed {
		return fmt.Errorf("existing: the kubeconfig's user may not do everything at %s; installing kinds and rights takes a cluster-admin", host)
	}
	namespaces, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("existing: list namespaces: %w", err)
	}
	for _, ns := range namespaces.Items {
		if strings.HasPrefix(ns.Name, "cozy-") || strings.HasPrefix(ns.Name, "tenant-") {
			return fmt.Errorf("existing: namespace %s is there: the cluster at %s has a Cozystack, which a run would upgrade, or a killed run was here, which `make clean` ends", ns.Name, host)
		}
	}
	return nil
}

// Create notes what is there and returns the path of an administrator's kubeconfig. It makes nothing on the cluster.
func (e *Existing) Create(ctx context.Context, args ...string) (string, error) {
	fail := func(err error) (string, error) { return "", fmt.Errorf("use the existing cluster: %w", err) }
	if len(args) > 0 {
		return fail(errors.New("its kube-apiserver takes no flags"))
	}
	var err error
	if e.raw, e.admin, err = load(e.path); err != nil {
		return fail(err)
	}
	e.admin.QPS = -1
	if e.client, err = kubernetes.NewForConfig(e.admin); err != nil {
		return fail(err)
	}
	if err := usable(ctx, e.admin.Host, e.client); err != nil {
		return fail(err)
	}
	if _, err := os.Stat(e.auditLog); err != nil {
		return fail(fmt.Errorf("its audit log: %w", err))
	}
	if e.reach, err = e.address(ctx); err != nil {
		return fail(err)
	}
	if err := e.begin(ctx, e.run, *e.raw, e.admin, e.leave); err != nil {
		return fail(err)
	}
	if e.client, err = kubernetes.NewForConfig(e.admin); err != nil { // what it makes is written down from here on
		return fail(err)
	}
	if e.etcd, err = tenantEtcd(ctx, e.run, e.programs); err != nil {
		return fail(err)
	}
	return e.GetKubeconfig(), nil
}

// address is the one from which this machine reaches the nodes, and by which they reach it back.
func (e *Existing) address(ctx context.Context) (string, error) {
	nodes, err := e.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list nodes: %w", err)
	}
	for _, node := range nodes.Items {
		for _, a := range node.Status.Addresses {
			if a.Type != corev1.NodeInternalIP {
				continue
			}
			// UDP: the kernel chooses the route, and nothing is sent.
			conn, err := net.Dial("udp", net.JoinHostPort(a.Address, "10250"))
			if err != nil {
				return "", fmt.Errorf("find the way to node %s: %w", node.Name, err)
			}
			defer conn.Close()
			return conn.LocalAddr().(*net.UDPAddr).IP.String(), nil
		}
	}
	return "", errors.New("none of its nodes has an InternalIP, by which to find the address where it reaches this machine")
}

// Others are the namespaces that were there before: what is in them is none of the run's business.
func (e *Existing) Others() []string {
	if e.found == nil {
		return nil
	}
	return slices.Clone(e.found.Namespaces)
}

// Expose lets the cluster reach what listens on a port of 127.0.0.1, and returns the address by which it does.
func (e *Existing) Expose(port int) (host string, err error) {
	if e.reach == "" {
		return "", errors.New("expose a port: the cluster is not in use yet")
	}
	return e.reach, expose(e.run, e.reach, port)
}

// Kubeconfig implements Provider.
func (e *Existing) Kubeconfig(ctx context.Context, sa ServiceAccount) (string, error) {
	if e.client == nil {
		return "", fmt.Errorf("kubeconfig of %s: the cluster is not in use yet", sa)
	}
	return accountKubeconfig(ctx, e.run, e.admin, e.client, sa)
}

// Destroy ends the run and takes away what it has made on the cluster.
func (e *Existing) Destroy(context.Context) error { return e.run.Close() }

// ExportLogs does nothing: the nodes are somebody else's.
func (e *Existing) ExportLogs(context.Context, string) error { return nil }

// GetKubeconfig is the path of a copy of the administrator's kubeconfig.
func (e *Existing) GetKubeconfig() string { return filepath.Join(e.stock, stockKubeconfig) }

// GenerateKubeconfig is GetKubeconfig; there is one administrator.
func (e *Existing) GenerateKubeconfig(...string) (string, error) {
	if e.admin == nil {
		return "", errors.New("generate kubeconfig: the cluster is not in use yet")
	}
	return e.GetKubeconfig(), nil
}

// GetKubectlContext is the context of that copy.
func (e *Existing) GetKubectlContext() string {
	if e.raw == nil {
		return ""
	}
	return e.raw.CurrentContext
}

// KubernetesRestConfig is the administrator's configuration without a client-side rate limit, nil before Create. What its
// clients create is written down.
func (e *Existing) KubernetesRestConfig() *rest.Config {
	if e.admin == nil {
		return nil
	}
	return rest.CopyConfig(e.admin)
}

// WaitForControlPlane returns an error when the API server does not answer.
func (e *Existing) WaitForControlPlane(ctx context.Context, _ klient.Client) error {
	if e.client == nil {
		return errors.New("the cluster is not in use yet")
	}
	return e.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

// CreateWithConfig is not supported: the cluster is there.
func (e *Existing) CreateWithConfig(context.Context, string) (string, error) {
	return "", errors.New("an existing cluster takes no configuration; use Create")
}

// WithName does nothing: the cluster has a name.
func (e *Existing) WithName(string) support.E2EClusterProvider { return e }

// WithVersion does nothing: the cluster has a version.
func (e *Existing) WithVersion(string) support.E2EClusterProvider { return e }

// WithPath does nothing: nothing is started.
func (e *Existing) WithPath(string) support.E2EClusterProvider { return e }

// WithOpts applies opts at once.
func (e *Existing) WithOpts(opts ...support.ClusterOpts) support.E2EClusterProvider {
	for _, opt := range opts {
		opt(e)
	}
	return e
}

// SetDefaults has nothing to do.
func (e *Existing) SetDefaults() support.E2EClusterProvider { return e }
