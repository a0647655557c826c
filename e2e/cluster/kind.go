package cluster

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/e2e-framework/klient"
	support "sigs.k8s.io/e2e-framework/pkg/types"
	kind "sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/cluster/constants"
	"sigs.k8s.io/kind/pkg/cluster/nodes"
	"sigs.k8s.io/kind/pkg/cluster/nodeutils"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/kindconfig"
)

const (
	// kindPrefix begins the names of our clusters, and of their containers; kind gives no way to add a label.
	kindPrefix = "upgrade-e2e-"
	// kindLabel is what kind labels the containers of a cluster with.
	kindLabel = "io.x-k8s.kind.cluster"
	// auditMount is where kindconfig mounts the folder of the audit log in the control plane's node.
	auditMount = "/etc/upgrade-e2e"
)

// Kind is a kind cluster: control plane and a kubelet in a container, which has images of the controllers. What runs as a
// process of this machine is reached from it by the gateway of the container's network.
type Kind struct {
	run      *process.Run
	programs Programs
	image    string
	count    int // of nodes
	name     string
	provider *kind.Provider
	admin    *rest.Config
	client   kubernetes.Interface
	nodes    []nodes.Node
	gateway  string // this machine, as the nodes see it
	etcd     string // URL of the tenants' etcd
	// reuse is the folder of a cluster that stays, "" for one that ends with the run; leave takes away what the run made there.
	reuse  string
	leave  []string
	fresh  bool // made by this run
	soiled bool // by an earlier run, which could not leave it
	visit
}

var _ Provider = (*Kind)(nil)

// NewKind describes a cluster with so many nodes of this image, which must be in the Docker engine: a control plane that is the only
// node, or has workers beside it. It ends with run; Create boots it.
func NewKind(run *process.Run, programs Programs, image string, nodes int) *Kind {
	return &Kind{run: run, programs: programs, image: image, count: nodes, name: kindPrefix + shortSum(run.Dir()),
		provider: kind.NewProvider(kind.ProviderWithDocker())}
}

// shortSum stands for a folder in few characters: host names are built from it.
func shortSum(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return hex.EncodeToString(sum[:])[:8]
}

// Kind is "kind".
func (k *Kind) Kind() string { return "kind" }

// Processes is the run that NewKind was given.
func (k *Kind) Processes() *process.Run { return k.run }

// AuditLog is logs/kind/audit.log in the run's folder, or in that of a cluster that stays. The control plane's node mounts it.
func (k *Kind) AuditLog() string { return filepath.Join(k.auditDir(), "audit.log") }

func (k *Kind) auditDir() string {
	if k.reuse != "" {
		return filepath.Join(k.reuse, "logs", "kind")
	}
	return filepath.Join(k.run.Dir(), "logs", "kind")
}

// EtcdURL is an etcd for the tenants' API server, a process of this machine: that of the cluster lets nobody in.
func (k *Kind) EtcdURL() string { return k.etcd }

// Node lists what a node runs beside the control plane; their versions are those of the programs in its image.
func (k *Kind) Node() []string { return []string{"kubelet", "kube-proxy", "coredns"} }

// Create boots the cluster, waits until it is ready and returns the path of an administrator's kubeconfig.
func (k *Kind) Create(ctx context.Context, args ...string) (string, error) {
	if len(args) > 0 {
		return "", fmt.Errorf("create cluster %s: kind takes no flags of kube-apiserver here", k.name)
	}
	if k.admin != nil {
		return "", fmt.Errorf("create cluster %s: it was created before", k.name)
	}
	for _, step := range []func(context.Context) error{k.boot, k.connect, k.joinPodNetworks, k.keepOff, k.ready, k.complete, k.visitCluster, k.startEtcd} {
		if err := step(ctx); err != nil {
			return "", fmt.Errorf("create cluster %s: %w", k.name, err)
		}
	}
	return k.GetKubeconfig(), nil
}

// boot has kind make the nodes. kind can't be told to stop: when ctx ends, its containers go, and it fails.
func (k *Kind) boot(ctx context.Context) error {
	if k.reuse != "" {
		if err := k.claim(); err != nil {
			return err
		}
		if there, err := k.there(ctx); err != nil || there {
			return err
		}
	}
	k.fresh = true
	remove := []string{"sh", "-c", `docker ps --all --quiet --filter "label=$0=$1" | xargs -r docker rm --force --volumes >/dev/null`, kindLabel, k.name}
	if k.reuse == "" {
		if err := k.run.Leaves("kind-cluster", remove...); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(k.auditDir(), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(k.auditDir(), "audit-policy.yaml"), auditPolicy, 0o600); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(k.GetKubeconfig()), 0o700); err != nil {
		return err
	}
	config := strings.ReplaceAll(kindconfig.One, "${AUDIT_DIR}", strconv.Quote(k.auditDir()))
	config += strings.Repeat("- role: worker\n", k.count-1)
	made := make(chan error, 1)
	go func() {
		made <- k.provider.Create(k.name,
			kind.CreateWithRawConfig([]byte(config)), kind.CreateWithNodeImage(k.image),
			kind.CreateWithKubeconfigPath(k.GetKubeconfig()), kind.CreateWithWaitForReady(startTimeout),
			kind.CreateWithRetain(true), // for its logs; it goes with the run
			kind.CreateWithDisplayUsage(false), kind.CreateWithDisplaySalutation(false))
	}()
	var err error
	select {
	case err = <-made:
	case <-ctx.Done():
		_, _ = k.run.Exec(context.WithoutCancel(ctx), process.Spec{Name: "kind-interrupted", Path: "/bin/sh", Args: remove[1:]})
		<-made
		return context.Cause(ctx)
	}
	if err != nil {
		logs := filepath.Join(k.run.Dir(), "logs", "kind")
		return fmt.Errorf("%w; see %s", errors.Join(err, k.provider.CollectLogs(k.name, logs)), logs)
	}
	return os.Chmod(k.GetKubeconfig(), 0o600)
}

// connect reads what kind has made.
func (k *Kind) connect(context.Context) error {
	var err error
	if k.admin, err = clientcmd.BuildConfigFromFlags("", k.GetKubeconfig()); err != nil {
		return err
	}
	k.admin.QPS = -1 // the API server's own fairness is enough
	if k.client, err = kubernetes.NewForConfig(k.admin); err != nil {
		return err
	}
	if k.nodes, err = k.provider.ListNodes(k.name); err != nil {
		return err
	}
	plane, err := k.controlPlane()
	if err != nil {
		return err
	}
	// The recorder reads it as the user that runs this; the API server writes on as root.
	own := fmt.Sprintf("chown %d:%d %s/audit.log && ip -4 route show default", os.Getuid(), os.Getgid(), auditMount)
	var out bytes.Buffer
	if err := plane.Command("sh", "-c", own).SetStdout(&out).Run(); err != nil {
		return fmt.Errorf("read the network of node %s: %w", plane, err)
	}
	for i, word := range strings.Fields(out.String()) {
		if word == "via" {
			k.gateway = strings.Fields(out.String())[i+1]
		}
	}
	if net.ParseIP(k.gateway) == nil {
		return fmt.Errorf("node %s has no default route, by which it reaches this machine: %q", plane, out.String())
	}
	return nil
}

func (k *Kind) controlPlane() (nodes.Node, error) {
	planes, err := nodeutils.ControlPlaneNodes(k.nodes)
	if err != nil {
		return nil, err
	}
	if len(planes) != 1 {
		return nil, fmt.Errorf("%d control plane nodes, not one", len(planes))
	}
	return planes[0], nil
}

// realNode is the label and the taint of the real nodes on which pods of ours may run: the workers, or the only node.
const realNode = "upgrade-e2e.cozystack.io/real"

// keepOff keeps what is not sent there off the real nodes. What the stand-ins play has nodes of its own.
func (k *Kind) keepOff(ctx context.Context) error {
	patch := []byte(`{"metadata": {"labels": {"` + realNode + `": "true"}}, "spec": {"taints": [{"key": "` + realNode + `", "effect": "NoSchedule"}]}}`)
	for _, node := range k.nodes {
		role, err := node.Role()
		if err != nil {
			return fmt.Errorf("role of node %s: %w", node, err)
		}
		if len(k.nodes) > 1 && role == constants.ControlPlaneNodeRoleValue {
			continue // kubeadm has tainted it
		}
		if _, err := k.client.CoreV1().Nodes().Patch(ctx, node.String(), types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return fmt.Errorf("taint node %s: %w", node, err)
		}
	}
	return nil
}

// Pin sends a pod to the real nodes.
func (k *Kind) Pin(pod *corev1.PodSpec) {
	if pod.NodeSelector == nil {
		pod.NodeSelector = map[string]string{}
	}
	pod.NodeSelector[realNode] = "true"
	pod.Tolerations = append(pod.Tolerations, corev1.Toleration{Key: realNode, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule})
}

// Image is the reference by which the nodes have the image of a controller; they pull none.
func (k *Kind) Image(program string) string { return k.programs.Image(program) }

// Reach opens a connection from the node of the API server to an address of the cluster, a Service's for instance. The
// error tells that it could not.
func (k *Kind) Reach(ctx context.Context, host string, port int) error {
	plane, err := k.controlPlane()
	if err != nil {
		return fmt.Errorf("reach %s port %d: %w", host, port, err)
	}
	// In 2 s: before there are rules for a Service's address, packets to it leave the node and nobody answers.
	connect := plane.CommandContext(ctx, "timeout", "2", "bash", "-c", `exec 3<>"/dev/tcp/$0/$1"`, host, strconv.Itoa(port))
	if err := connect.Run(); err != nil {
		return fmt.Errorf("node %s does not reach %s port %d: %w", plane, host, port, err)
	}
	return nil
}

// ready waits until the API server says so, and pods get addresses, names and a ServiceAccount.
func (k *Kind) ready(ctx context.Context) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, startTimeout, true, func(ctx context.Context) (bool, error) {
		last = k.isReady(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the cluster to be ready: %w; last: %w", err, last)
	}
	return nil
}

func (k *Kind) isReady(ctx context.Context) error {
	if k.client == nil {
		return errors.New("the cluster was not created")
	}
	if err := k.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
		return fmt.Errorf("/readyz: %w", err)
	}
	if _, err := k.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return fmt.Errorf("get the default ServiceAccount: %w", err)
	}
	pods, err := k.client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, pod := range pods.Items {
		if !podReady(&pod) {
			return fmt.Errorf("pod kube-system/%s is %s", pod.Name, pod.Status.Phase)
		}
	}
	return nil
}

func podReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// startEtcd starts the tenants' etcd.
func (k *Kind) startEtcd(ctx context.Context) error {
	var err error
	k.etcd, err = tenantEtcd(ctx, k.run, k.programs)
	return err
}

// Expose implements Provider. Outside of the nodes' network nobody reaches the port.
func (k *Kind) Expose(port int) (host string, err error) {
	if k.gateway == "" {
		return "", errors.New("expose a port: the cluster was not created")
	}
	return k.gateway, expose(k.run, k.gateway, port)
}

// Load puts an archive of images, as `docker save` writes them, onto the nodes, has each known by the reference that as maps
// to its name in the archive, and has pods of Jobs that use one of the references run there.
func (k *Kind) Load(ctx context.Context, archive string, as map[string]string) error {
	for _, node := range k.nodes {
		f, err := os.Open(archive)
		if err != nil {
			return fmt.Errorf("load images: %w", err)
		}
		err = nodeutils.LoadImageArchive(node, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("load images onto node %s: %w", node, err)
		}
		for reference, name := range as {
			tag := node.CommandContext(ctx, "ctr", "--namespace=k8s.io", "images", "tag", "--force", name, lookedUp(reference))
			if err := tag.Run(); err != nil {
				return fmt.Errorf("name image %s on node %s: %w", reference, node, err)
			}
		}
	}
	var quoted []string
	for _, reference := range slices.Sorted(maps.Keys(as)) {
		quoted = append(quoted, strconv.Quote(reference))
	}
	if err := k.apply(ctx, strings.ReplaceAll(kindconfig.RealPods, "${IMAGES}", "["+strings.Join(quoted, ", ")+"]")); err != nil {
		return fmt.Errorf("send pods to the real nodes: %w", err)
	}
	return nil
}

// apply applies the objects of a YAML text, none of which has a namespace.
func (k *Kind) apply(ctx context.Context, text string) error {
	client, err := dynamic.NewForConfig(k.admin)
	if err != nil {
		return err
	}
	for doc := range strings.SplitSeq(text, "\n---\n") {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(doc), &u.Object); err != nil {
			return err
		}
		resource, _ := meta.UnsafeGuessKindToResource(u.GroupVersionKind())
		if _, err := client.Resource(resource).Apply(ctx, u.GetName(), u, metav1.ApplyOptions{FieldManager: "upgrade-e2e", Force: true}); err != nil {
			return fmt.Errorf("apply %s %s: %w", u.GetKind(), u.GetName(), err)
		}
	}
	return nil
}

// lookedUp is the name by which a node looks for a reference: of one with both tag and digest, that without the tag.
func lookedUp(reference string) string {
	name, digest, ok := strings.Cut(reference, "@")
	if !ok {
		return reference
	}
	if at := strings.LastIndex(name, ":"); at > strings.LastIndex(name, "/") {
		name = name[:at]
	}
	return name + "@" + digest
}

// Ended waits until a node has ended, which none does by itself, and says which; nil once ctx has ended.
func (k *Kind) Ended(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, node := range k.nodes {
		g.Go(func() error {
			_, err := k.run.Exec(gctx, process.Spec{Name: "wait-" + node.String(), Path: "/bin/sh", Args: []string{"-c", `exec docker wait "$0"`, node.String()}})
			return cmp.Or(err, fmt.Errorf("node %s of cluster %s has ended: its container was killed, or the Docker engine was", node, k.name))
		})
	}
	if err := g.Wait(); ctx.Err() == nil {
		return err
	}
	return nil
}

// ControllerManagerMetrics is the URL of kube-controller-manager's metrics and a
// client that may read them.
func (k *Kind) ControllerManagerMetrics() (string, *http.Client, error) {
	plane, err := k.controlPlane()
	if err != nil {
		return "", nil, fmt.Errorf("metrics of kube-controller-manager: %w", err)
	}
	address, _, err := plane.IP()
	if err != nil {
		return "", nil, fmt.Errorf("metrics of kube-controller-manager: %w", err)
	}
	cfg := rest.AnonymousClientConfig(k.admin)
	cfg.TLSClientConfig = rest.TLSClientConfig{
		CertData: k.admin.CertData, KeyData: k.admin.KeyData,
		Insecure: true, // it signs its certificate itself
	}
	cfg.Timeout = 5 * time.Second
	client, err := rest.HTTPClientFor(cfg)
	return "https://" + net.JoinHostPort(address, "10257") + "/metrics", client, err
}

// Kubeconfig implements Provider.
func (k *Kind) Kubeconfig(ctx context.Context, sa ServiceAccount) (string, error) {
	if k.client == nil {
		return "", fmt.Errorf("kubeconfig of %s: the cluster was not created", sa)
	}
	return accountKubeconfig(ctx, k.run, k.admin, k.client, sa)
}

// Destroy ends the run that the cluster belongs to, its containers with it unless they stay. The logs stay.
func (k *Kind) Destroy(context.Context) error { return k.run.Close() }

// ExportLogs writes the logs of nodes and pods to dest.
func (k *Kind) ExportLogs(_ context.Context, dest string) error {
	if err := k.provider.CollectLogs(k.name, dest); err != nil {
		return fmt.Errorf("export logs: %w", err)
	}
	return nil
}

// GetKubeconfig is the path of the administrator's kubeconfig.
func (k *Kind) GetKubeconfig() string {
	if k.reuse != "" {
		return filepath.Join(k.reuse, "admin.kubeconfig")
	}
	return k.run.State("admin.kubeconfig")
}

// GenerateKubeconfig is GetKubeconfig; there is one administrator.
func (k *Kind) GenerateKubeconfig(...string) (string, error) {
	if k.admin == nil {
		return "", errors.New("generate kubeconfig: the cluster was not created")
	}
	return k.GetKubeconfig(), nil
}

// GetKubectlContext is kind's name for the context of the administrator's kubeconfig.
func (k *Kind) GetKubectlContext() string { return "kind-" + k.name }

// KubernetesRestConfig is the administrator's configuration without a
// client-side rate limit, nil before Create. It is the caller's own copy.
func (k *Kind) KubernetesRestConfig() *rest.Config {
	if k.admin == nil {
		return nil
	}
	return rest.CopyConfig(k.admin)
}

// WaitForControlPlane waits until the cluster is ready. It does not need client.
func (k *Kind) WaitForControlPlane(ctx context.Context, _ klient.Client) error { return k.ready(ctx) }

// CreateWithConfig is not supported: the configuration is the project's.
func (k *Kind) CreateWithConfig(context.Context, string) (string, error) {
	return "", errors.New("the configuration of a kind cluster is in kindconfig; use Create")
}

// WithName names the cluster in messages and its containers.
func (k *Kind) WithName(name string) support.E2EClusterProvider {
	k.name = kindPrefix + name
	return k
}

// WithVersion does nothing: the version is that of the node image.
func (k *Kind) WithVersion(string) support.E2EClusterProvider { return k }

// WithPath does nothing: kind is a library here.
func (k *Kind) WithPath(string) support.E2EClusterProvider { return k }

// WithOpts applies opts at once.
func (k *Kind) WithOpts(opts ...support.ClusterOpts) support.E2EClusterProvider {
	for _, opt := range opts {
		opt(k)
	}
	return k
}

// SetDefaults has nothing to do; NewKind sets them.
func (k *Kind) SetDefaults() support.E2EClusterProvider { return k }
