package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
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
// everything, it has a Cozystack, which the run would upgrade, or its API server does not write its audit log to auditLog.
func CheckExisting(ctx context.Context, kubeconfig, auditLog string) error {
	_, cfg, err := load(kubeconfig)
	if err != nil {
		return err
	}
	cfg.Timeout = 10 * time.Second
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("existing: kubeconfig %s: %w", kubeconfig, err)
	}
	if err := usable(ctx, cfg.Host, client); err != nil {
		return err
	}
	return audited(ctx, cfg.Host, client, auditLog, auditBound)
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

// DefaultClass is the name of a StorageClass that is the default of a kubeconfig's cluster, "" when there is none.
func DefaultClass(ctx context.Context, kubeconfig string) (string, error) {
	_, cfg, err := load(kubeconfig)
	if err != nil {
		return "", err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return "", fmt.Errorf("existing: kubeconfig %s: %w", kubeconfig, err)
	}
	classes, err := client.StorageV1().StorageClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("existing: list StorageClasses: %w", err)
	}
	for _, class := range classes.Items {
		if class.Annotations["storageclass.kubernetes.io/is-default-class"] == "true" {
			return class.Name, nil
		}
	}
	return "", nil
}

// auditBound is how long an API server may take to write down a request; the mode `batch` takes up to 30 s.
const auditBound = 40 * time.Second

// audited fails unless every write to the cluster is written down in a file: with another cluster's log, or one API server's of
// several, nobody would be seen to touch anything.
func audited(ctx context.Context, host string, client kubernetes.Interface, auditLog string, bound time.Duration) error {
	servers, err := client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		return fmt.Errorf("existing: count the API servers at %s: %w", host, err)
	}
	n := 0
	for _, slice := range servers.Items {
		for _, endpoint := range slice.Endpoints {
			n += len(endpoint.Addresses)
		}
	}
	if n > 1 {
		return fmt.Errorf("existing: the cluster at %s has %d API servers and each writes an audit log of its own; a run reads one: use a cluster with one API server", host, n)
	}
	log, err := os.Open(auditLog)
	if err != nil {
		return fmt.Errorf("existing: AUDIT_LOG: %w", err)
	}
	defer log.Close()
	if _, err := log.Seek(0, io.SeekEnd); err != nil {
		return fmt.Errorf("existing: AUDIT_LOG: %w", err)
	}
	// Nothing stays of a dry run but the line about it.
	marker := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "upgrade-e2e-" + rand.String(12)}}
	if _, err := client.CoreV1().ConfigMaps("default").Create(ctx, marker, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		return fmt.Errorf("existing: write to the cluster at %s: %w", host, err)
	}
	var said []byte
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, bound, true, func(context.Context) (bool, error) {
		more, err := io.ReadAll(log)
		said = append(said, more...)
		return bytes.Contains(said, []byte(marker.Name)), err
	})
	if err != nil {
		return fmt.Errorf("existing: the API server at %s did not write a request down in %s within %.0f s (%w); see e2e/cluster/audit.yaml for the policy that it needs", host, auditLog, bound.Seconds(), err)
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
	if err := audited(ctx, e.admin.Host, e.client, e.auditLog, auditBound); err != nil {
		return fail(err)
	}
	if e.reach, err = e.address(ctx); err != nil {
		return fail(err)
	}
	if err := e.begin(ctx, e.run, *e.raw, e.admin, e.leave, ""); err != nil {
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

// Expose implements Provider.
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
