package simulate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// tenantAPI is the one API server that plays the API of every tenant cluster. It keeps its objects in the management
// cluster's etcd under a prefix of its own. Nothing controls anything in it: no controller-manager, no scheduler.
//
// Tenants share it because each would cost some 300 MB. What they can see of one another is their Nodes. Node names end
// in the ten random characters of their Machine's name, so two of a run do not meet; CAPI finds nodes by providerID,
// which holds that name, and maps node events back by the cluster that a node is annotated with.
type tenantAPI struct {
	config     *rest.Config
	kubeconfig []byte // the tenants', for controllers wherever they run
	ca         *authority
	spec       process.Spec
	processes  *process.Run
}

// newTenantAPI makes keys, certificates and flags.
func newTenantAPI(o Options) (*tenantAPI, error) {
	if o.EtcdURL == "" {
		return nil, errors.New("tenant API: this cluster does not tell where its etcd is, and the tenants' API server has none of its own")
	}
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	dir := o.Processes.State("tenant-api")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ca, err := newAuthority("tenant-api")
	if err != nil {
		return nil, err
	}
	host, err := o.Expose(port)
	if err != nil {
		return nil, fmt.Errorf("tenant API: %w", err)
	}
	server, err := ca.server("127.0.0.1", host)
	if err != nil {
		return nil, err
	}
	admin, err := ca.client("kubernetes-super-admin", "system:masters")
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{"ca.crt": ca.certPEM, "server.crt": server.certPEM, "server.key": server.keyPEM}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return nil, err
		}
	}
	t := &tenantAPI{ca: ca, processes: o.Processes, config: &rest.Config{
		Host: "https://127.0.0.1:" + strconv.Itoa(port), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: ca.certPEM, CertData: admin.certPEM, KeyData: admin.keyPEM},
	}}
	reached := rest.CopyConfig(t.config)
	reached.Host = "https://" + net.JoinHostPort(host, strconv.Itoa(port))
	if t.kubeconfig, err = clientcmd.Write(kubeconfig(reached)); err != nil {
		return nil, err
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	program := o.APIServer
	if program == "" {
		program = filepath.Join(o.Programs, "kube-apiserver")
	}
	t.spec = process.Spec{Name: "tenant-api", Path: program, Restart: true, Args: []string{
		"--etcd-servers=" + o.EtcdURL, "--etcd-prefix=/tenant-clusters",
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port),
		"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.95.0.0/16",
		"--tls-cert-file=" + file("server.crt"), "--tls-private-key-file=" + file("server.key"), "--client-ca-file=" + file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + file("server.key"),
		"--service-account-signing-key-file=" + file("server.key"),
		"--authorization-mode=RBAC", "--allow-privileged=true", "--enable-bootstrap-token-auth=true",
		"--disable-admission-plugins=ServiceAccount", // nobody makes ServiceAccounts here
		"--enable-priority-and-fairness=false",
	}}
	return t, nil
}

// kubeconfig is a kubeconfig with one cluster, user and context from config.
func kubeconfig(config *rest.Config) clientcmdapi.Config {
	out := clientcmdapi.NewConfig()
	out.Clusters["tenant"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	out.AuthInfos["admin"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	out.Contexts["admin@tenant"] = &clientcmdapi.Context{Cluster: "tenant", AuthInfo: "admin"}
	out.CurrentContext = "admin@tenant"
	return *out
}

// start runs the API server and returns when it is ready.
func (t *tenantAPI) start(ctx context.Context) error {
	if _, err := os.Stat(t.spec.Path); err != nil {
		return fmt.Errorf("tenant API: %w; run `make tools`", err)
	}
	if _, err := t.processes.Start(ctx, t.spec); err != nil {
		return err
	}
	httpClient, err := rest.HTTPClientFor(t.config)
	if err != nil {
		return err
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 2*time.Minute, true, func(ctx context.Context) (bool, error) {
		last = ready(ctx, httpClient, t.config.Host)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("tenant API at %s is not ready: %w; last: %w; see logs/tenant-api.log", t.config.Host, err, last)
	}
	return nil
}

func ready(ctx context.Context, c *http.Client, host string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, host+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

// hostPort splits an API server's URL.
func hostPort(server string) (host, port string, err error) {
	u, err := url.Parse(server)
	if err != nil {
		return "", "", fmt.Errorf("address of the API server: %w", err)
	}
	if u.Port() == "" {
		return u.Hostname(), "443", nil
	}
	return u.Hostname(), u.Port(), nil
}
