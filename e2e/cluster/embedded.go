package cluster

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/e2e-framework/klient"
	"sigs.k8s.io/e2e-framework/pkg/types"

	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/programs"
)

const (
	contextName  = "upgrade-e2e"
	startTimeout = 3 * time.Minute // for a machine that has other work as well
	adminGroup   = "system:masters"
)

//go:embed audit.yaml
var auditPolicy []byte

// Embedded is a cluster of four processes on 127.0.0.1: etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler. It has no nodes of its own. It
// needs neither root nor a container engine.
type Embedded struct {
	run      *process.Run
	programs Programs
	name     string
	version  string
	plane    *envtest.ControlPlane
	admin    *rest.Config
	client   kubernetes.Interface
	manager  int    // port of kube-controller-manager
	saved    string // folder that Save has made, "" for an empty cluster
}

var _ Provider = (*Embedded)(nil)

// NewEmbedded describes a cluster whose processes belong to run; Create boots it.
func NewEmbedded(run *process.Run, programs Programs) *Embedded {
	return &Embedded{run: run, programs: programs, name: "embedded"}
}

// From makes Create start from what Save has put into dir.
func (e *Embedded) From(dir string) *Embedded {
	e.saved = dir
	return e
}

// Save copies the cluster's objects, those of the tenants' API among them, into dir, which must not exist. etcd stands
// still meanwhile, so that the copy is what a crash would leave, from which etcd recovers. Secrets are in it: dir is
// readable by its owner alone.
func (e *Embedded) Save(ctx context.Context, dir string) error {
	if e.plane == nil {
		return errors.New("save cluster: it was not created")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("save cluster: %w", err)
	}
	err := e.run.Freeze(ctx, e.programs.Path("etcd"), func() error { return os.CopyFS(dir, os.DirFS(e.plane.Etcd.DataDir)) })
	if err != nil {
		return fmt.Errorf("save cluster: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	return nil
}

// Kind is "embedded".
func (e *Embedded) Kind() string { return "embedded" }

// Processes is the run that NewEmbedded was given.
func (e *Embedded) Processes() *process.Run { return e.run }

// AuditLog is logs/audit.log in the run's folder. audit.yaml, beside this file,
// tells what is in it.
func (e *Embedded) AuditLog() string { return filepath.Join(e.logs(), "audit.log") }

// EtcdURL is where etcd serves clients, "" before Create.
func (e *Embedded) EtcdURL() string {
	if e.plane == nil {
		return ""
	}
	return e.plane.Etcd.URL.String()
}

// Create boots the cluster, waits until it is ready and returns the path of an
// administrator's kubeconfig. args are further flags of kube-apiserver,
// "name=value".
func (e *Embedded) Create(ctx context.Context, args ...string) (string, error) {
	if e.plane != nil {
		return "", fmt.Errorf("create cluster %s: it was created before", e.name)
	}
	if err := e.startControlPlane(args); err != nil {
		return "", fmt.Errorf("create cluster %s: %w", e.name, err)
	}
	for _, step := range []func(context.Context) error{e.startControllerManager, e.startScheduler, e.ready} {
		if err := step(ctx); err != nil {
			return "", fmt.Errorf("create cluster %s: %w", e.name, err)
		}
	}
	return e.GetKubeconfig(), nil
}

// startControlPlane starts etcd and kube-apiserver, waits until the latter is
// healthy and writes the administrator's kubeconfig.
func (e *Embedded) startControlPlane(args []string) error {
	etcd, err := e.etcd()
	if err != nil {
		return err
	}
	api, err := e.apiServer(args)
	if err != nil {
		return err
	}
	// The end of the run kills both: their data does not outlive it, and an API
	// server that is asked to stop waits for its watches first.
	plane := &envtest.ControlPlane{Etcd: etcd, APIServer: api}
	if err := plane.Start(); err != nil {
		return fmt.Errorf("start etcd and kube-apiserver: %w; see their logs in %s", err, e.logs())
	}
	e.plane = plane
	if err := e.ownFilesOnly(); err != nil {
		return err
	}
	if e.admin, err = e.userConfig("upgrade-e2e-admin", adminGroup); err != nil {
		return err
	}
	e.admin.QPS = -1 // the API server's own fairness is enough
	if e.client, err = kubernetes.NewForConfig(e.admin); err != nil {
		return err
	}
	return writeKubeconfig(e.GetKubeconfig(), "upgrade-e2e-admin", e.admin)
}

func (e *Embedded) etcd() (*envtest.Etcd, error) {
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	peer, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	log, err := e.log("etcd")
	if err != nil {
		return nil, err
	}
	etcd := &envtest.Etcd{
		Path: e.programs.Path("etcd"), DataDir: e.run.State("etcd"),
		URL:          &url.URL{Scheme: "http", Host: "127.0.0.1:" + strconv.Itoa(port)},
		StartTimeout: startTimeout, Out: log, Err: log,
	}
	etcd.Configure().
		Set("listen-peer-urls", "http://127.0.0.1:"+strconv.Itoa(peer)).
		Set("unsafe-no-fsync", "true"). // its data does not outlive the run
		Set("log-level", "warn")
	if err := os.MkdirAll(etcd.DataDir, 0o700); err != nil || e.saved == "" {
		return etcd, err
	}
	if err := os.CopyFS(etcd.DataDir, os.DirFS(e.saved)); err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	return etcd, nil
}

func (e *Embedded) apiServer(args []string) (*envtest.APIServer, error) {
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	log, err := e.log("kube-apiserver")
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(e.pki(), 0o700); err != nil {
		return nil, err
	}
	policy := e.run.State("audit-policy.yaml")
	if err := os.WriteFile(policy, auditPolicy, 0o600); err != nil {
		return nil, err
	}
	// Aggregated API servers trust the users that this authority vouches for.
	proxy, err := NewAuthority("front-proxy")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(e.pki("front-proxy.crt"), proxy.PEM(), 0o600); err != nil {
		return nil, err
	}
	if err := proxy.WriteClient(e.pki("front-proxy"), "front-proxy-client"); err != nil {
		return nil, err
	}

	api := &envtest.APIServer{
		Path: e.programs.Path("kube-apiserver"), CertDir: e.pki(),
		StartTimeout: startTimeout, StopTimeout: time.Second, Out: log, Err: log,
	}
	api.SecureServing.Address, api.SecureServing.Port = "127.0.0.1", strconv.Itoa(port)
	flags := api.Configure().
		Disable("disable-admission-plugins"). // envtest's default takes ServiceAccount out
		Set("service-cluster-ip-range", "10.96.0.0/16").
		Set("endpoint-reconciler-type", "none"). // a loopback address is no endpoint
		Set("allow-privileged", "true").
		Set("authorization-mode", "RBAC").
		Set("max-requests-inflight", "2000").
		Set("max-mutating-requests-inflight", "1000").
		Set("requestheader-client-ca-file", e.pki("front-proxy.crt")).
		Set("requestheader-allowed-names", "front-proxy-client").
		Set("requestheader-username-headers", "X-Remote-User").
		Set("requestheader-uid-headers", "X-Remote-Uid").
		Set("requestheader-group-headers", "X-Remote-Group").
		Set("requestheader-extra-headers-prefix", "X-Remote-Extra-").
		Set("proxy-client-cert-file", e.pki("front-proxy", "tls.crt")).
		Set("proxy-client-key-file", e.pki("front-proxy", "tls.key")).
		Set("audit-policy-file", policy).
		Set("audit-log-path", e.AuditLog()).
		Set("audit-log-mode", "blocking").  // a write is in the log before its answer is sent
		Set("audit-log-maxsize", "1000000") // megabytes: never rotated
	for _, arg := range args {
		name, value, ok := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if !ok {
			return nil, fmt.Errorf("flag %q of kube-apiserver is not name=value", arg)
		}
		flags.Set(name, value)
	}
	return api, nil
}

func (e *Embedded) startControllerManager(ctx context.Context) error {
	rootCA := e.pki("root-ca.crt")
	if err := os.WriteFile(rootCA, e.admin.CAData, 0o600); err != nil {
		return err
	}
	var err error
	if e.manager, err = process.FreePort(); err != nil {
		return err
	}
	return e.startController(ctx, "kube-controller-manager", e.manager,
		"--root-ca-file="+rootCA,
		"--service-account-private-key-file="+e.pki("sa-signer.key"),
		// Each controller acts under its own name, which the audit log shows.
		"--use-service-account-credentials=true",
		"--kube-api-qps=200", "--kube-api-burst=400")
}

func (e *Embedded) startScheduler(ctx context.Context) error {
	port, err := process.FreePort()
	if err != nil {
		return err
	}
	return e.startController(ctx, "kube-scheduler", port, "--kube-api-qps=200", "--kube-api-burst=400")
}

// startController starts a program of the control plane under the user name
// that RBAC's bootstrap roles know it by.
func (e *Embedded) startController(ctx context.Context, name string, port int, args ...string) error {
	cfg, err := e.userConfig("system:" + name)
	if err != nil {
		return err
	}
	kubeconfig := e.run.State("kubeconfigs", name)
	if err := writeKubeconfig(kubeconfig, name, cfg); err != nil {
		return err
	}
	_, err = e.run.Start(ctx, process.Spec{
		Name: name, Path: e.programs.Path(name), Restart: true, // both exit when they lose the API server
		Args: append([]string{
			"--kubeconfig=" + kubeconfig,
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(port),
			"--cert-dir=" + e.pki(name),
			"--leader-elect=false",
		}, args...),
	})
	return err
}

// ControllerManagerMetrics is the URL of kube-controller-manager's metrics and a
// client that may read them.
func (e *Embedded) ControllerManagerMetrics() (string, *http.Client, error) {
	if e.admin == nil {
		return "", nil, errors.New("metrics of kube-controller-manager: the cluster was not created")
	}
	cfg := rest.AnonymousClientConfig(e.admin)
	cfg.TLSClientConfig = rest.TLSClientConfig{
		CertData: e.admin.CertData, KeyData: e.admin.KeyData,
		Insecure: true, // it signs its certificate itself
	}
	cfg.Timeout = 5 * time.Second
	client, err := rest.HTTPClientFor(cfg)
	return "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(e.manager)) + "/metrics", client, err
}

// Expose implements Provider: everything is on this machine.
func (e *Embedded) Expose(int) (host string, err error) { return "127.0.0.1", nil }

// RestartAPIServer stops kube-apiserver and starts it again on the same port.
// Watches end with it. It returns when the cluster is ready; etcd keeps running.
func (e *Embedded) RestartAPIServer(ctx context.Context) error {
	if e.plane == nil {
		return errors.New("restart kube-apiserver: the cluster was not created")
	}
	api := e.plane.APIServer
	// Stop's only complaint is that it had to kill, which open watches cause.
	_ = api.Stop()
	address := net.JoinHostPort(api.SecureServing.Address, api.SecureServing.Port)
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, startTimeout, true, func(context.Context) (bool, error) {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return false, nil // still held
		}
		return true, l.Close()
	})
	if err != nil {
		return fmt.Errorf("wait for kube-apiserver to end: %w", err)
	}
	if err := api.Start(); err != nil {
		return fmt.Errorf("start kube-apiserver again: %w; see its log in %s", err, e.logs())
	}
	return e.ready(ctx)
}

// ready waits until the API server says so, discovery works, and pods can be
// created in namespace default, which takes the controller manager.
func (e *Embedded) ready(ctx context.Context) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, startTimeout, true, func(ctx context.Context) (bool, error) {
		last = e.isReady(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the cluster to be ready: %w; last: %w", err, last)
	}
	return nil
}

func (e *Embedded) isReady(ctx context.Context) error {
	if e.client == nil {
		return errors.New("the cluster was not created")
	}
	if err := e.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
		return fmt.Errorf("/readyz: %w", err)
	}
	version, err := e.client.Discovery().ServerVersion()
	if err != nil {
		return fmt.Errorf("discovery: %w", err)
	}
	if e.version != "" && version.GitVersion != e.version {
		return fmt.Errorf("kube-apiserver is %s, not %s", version.GitVersion, e.version)
	}
	if _, err := e.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return fmt.Errorf("get the default ServiceAccount: %w", err)
	}
	return nil
}

// Kubeconfig implements Provider.
func (e *Embedded) Kubeconfig(ctx context.Context, sa ServiceAccount) (string, error) {
	if e.client == nil {
		return "", fmt.Errorf("kubeconfig of %s: the cluster was not created", sa)
	}
	return accountKubeconfig(ctx, e.run, e.admin, e.client, sa)
}

// userConfig is a configuration for a user by client certificate.
func (e *Embedded) userConfig(name string, groups ...string) (*rest.Config, error) {
	user, err := e.plane.AddUser(envtest.User{Name: name, Groups: groups}, nil)
	if err != nil {
		return nil, fmt.Errorf("make user %s: %w", name, err)
	}
	return user.Config(), nil
}

// ownFilesOnly takes group and others off what envtest wrote, keys among it.
func (e *Embedded) ownFilesOnly() error {
	return filepath.WalkDir(e.pki(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return os.Chmod(path, 0o600)
	})
}

func (e *Embedded) pki(elem ...string) string {
	return e.run.State(append([]string{"pki"}, elem...)...)
}

func (e *Embedded) logs() string { return filepath.Join(e.run.Dir(), "logs") }

func (e *Embedded) log(name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(e.logs(), name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err == nil {
		e.run.AtClose(f.Close)
	}
	return f, err
}

// Destroy ends the run that the cluster belongs to: every process of it, not
// only the cluster's, and its state. The logs stay.
func (e *Embedded) Destroy(context.Context) error { return e.run.Close() }

// ExportLogs copies the logs of the run's processes to dest, which must not
// hold them yet.
func (e *Embedded) ExportLogs(_ context.Context, dest string) error {
	if err := os.MkdirAll(dest, 0o700); err != nil {
		return fmt.Errorf("export logs: %w", err)
	}
	if err := os.CopyFS(dest, os.DirFS(e.logs())); err != nil {
		return fmt.Errorf("export logs: %w", err)
	}
	return nil
}

// GetKubeconfig is the path of the administrator's kubeconfig.
func (e *Embedded) GetKubeconfig() string { return e.run.State("admin.kubeconfig") }

// GenerateKubeconfig is GetKubeconfig; there is one administrator.
func (e *Embedded) GenerateKubeconfig(...string) (string, error) {
	if e.admin == nil {
		return "", errors.New("generate kubeconfig: the cluster was not created")
	}
	return e.GetKubeconfig(), nil
}

// GetKubectlContext is the only context of every kubeconfig of this cluster.
func (e *Embedded) GetKubectlContext() string { return contextName }

// KubernetesRestConfig is the administrator's configuration without a
// client-side rate limit, nil before Create. It is the caller's own copy.
func (e *Embedded) KubernetesRestConfig() *rest.Config {
	if e.admin == nil {
		return nil
	}
	return rest.CopyConfig(e.admin)
}

// WaitForControlPlane waits until the cluster is ready. It does not need client.
func (e *Embedded) WaitForControlPlane(ctx context.Context, _ klient.Client) error {
	return e.ready(ctx)
}

// CreateWithConfig is not supported: an embedded cluster has no config file.
func (e *Embedded) CreateWithConfig(context.Context, string) (string, error) {
	return "", errors.New("an embedded cluster has no config file; use Create")
}

// WithName names the cluster in messages.
func (e *Embedded) WithName(name string) types.E2EClusterProvider {
	e.name = name
	return e
}

// WithVersion makes Create fail unless kube-apiserver is of this version, for
// example "v1.34.4". The version itself is that of the program.
func (e *Embedded) WithVersion(version string) types.E2EClusterProvider {
	e.version = version
	return e
}

// WithPath takes the programs from another folder.
func (e *Embedded) WithPath(path string) types.E2EClusterProvider {
	e.programs = &programs.Programs{Dir: path}
	return e
}

// WithOpts applies opts at once.
func (e *Embedded) WithOpts(opts ...types.ClusterOpts) types.E2EClusterProvider {
	for _, opt := range opts {
		opt(e)
	}
	return e
}

// SetDefaults has nothing to do; NewEmbedded sets them.
func (e *Embedded) SetDefaults() types.E2EClusterProvider { return e }
