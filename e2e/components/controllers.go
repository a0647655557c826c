package components

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
)

// startBound is how long a controller may take until it is ready.
const startBound = 2 * time.Minute

// controller is a program that runs as a process.
type controller struct {
	name     string                 // of the program
	installs string                 // name of its manifest
	account  cluster.ServiceAccount // used where the manifest has no Deployment
	flags    func(settings) []string
	serves   bool                  // webhooks, on settings.webhook
	scheme   string                // of /metrics on settings.metrics; "" for none
	ready    string                // URL path that answers 200 …
	says     string                // … and holds this text once the controller works
	readyOn  func(settings) string // scheme and address of ready
}

// settings are what a controller's flags are made of. All ports are free ones
// on 127.0.0.1.
type settings struct {
	webhook, metrics, health int
	certs                    string // folder with tls.crt, tls.key
	kubeconfig               string
	version                  string // of the program
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func onHealth(s settings) string  { return "http://" + loopback(s.health) }
func onWebhook(s settings) string { return "https://" + loopback(s.webhook) }
func onMetrics(s settings) string { return "https://" + loopback(s.metrics) }

// controllers lists the real controllers. Their flags are added to those of the
// Deployment that they ship with, and win over them.
func controllers(o Options) []controller {
	kubevirt := func(account string) cluster.ServiceAccount {
		return cluster.ServiceAccount{Namespace: "kubevirt", Name: account}
	}
	// Nobody stands by to take over, and a lease would have to run out first.
	const single = "--leader-elect=false"
	return []controller{
		{
			name: o.HelmController, installs: "helm-controller", scheme: "http",
			ready: "/readyz", readyOn: onHealth,
			flags: func(s settings) []string {
				return []string{
					"--enable-leader-election=false", "--events-addr=",
					"--metrics-addr=" + loopback(s.metrics), "--health-addr=" + loopback(s.health),
					"--concurrent=8", "--requeue-dependency=5s",
					"--kube-api-qps=500", "--kube-api-burst=1000",
				}
			},
		},
		{
			name: "cluster-api", installs: "cluster-api", serves: true, scheme: "http",
			ready: "/readyz", readyOn: onHealth,
			flags: func(s settings) []string {
				return []string{
					single, "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--diagnostics-address=" + loopback(s.metrics), "--insecure-diagnostics=true",
					"--health-addr=" + loopback(s.health),
					"--kube-api-qps=200", "--kube-api-burst=400",
				}
			},
		},
		{
			name: "cluster-api-provider-kubevirt", installs: "cluster-api-provider-kubevirt", serves: true, scheme: "http",
			ready: "/readyz", readyOn: onHealth,
			flags: func(s settings) []string {
				return []string{
					single, "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--metrics-bind-addr=" + loopback(s.metrics), "--health-addr=" + loopback(s.health),
				}
			},
		},
		{
			name: "cluster-api-bootstrap-provider-talos", installs: "cluster-api-bootstrap-provider-talos", serves: true, scheme: "http",
			ready: "/readyz", readyOn: onHealth,
			flags: func(s settings) []string {
				return []string{
					"--enable-leader-election=false", "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--diagnostics-address=" + loopback(s.metrics), "--insecure-diagnostics=true",
					"--health-addr=" + loopback(s.health),
				}
			},
		},
		{
			name: "virt-api", installs: "kubevirt", account: kubevirt("kubevirt-apiserver"), serves: true,
			ready: "/healthz", readyOn: onWebhook,
			flags: func(s settings) []string {
				return []string{
					"--kubeconfig=" + s.kubeconfig, "--listen=127.0.0.1", "--port=" + strconv.Itoa(s.webhook),
					"--tls-cert-file=" + filepath.Join(s.certs, "tls.crt"), "--tls-key-file=" + filepath.Join(s.certs, "tls.key"),
					"--handler-cert-file=" + filepath.Join(s.certs, "tls.crt"), "--handler-key-file=" + filepath.Join(s.certs, "tls.key"),
				}
			},
		},
		{
			name: "virt-controller", installs: "kubevirt", account: kubevirt("kubevirt-controller"), scheme: "https",
			ready: "/leader", says: `"true"`, readyOn: onMetrics,
			flags: func(s settings) []string {
				return []string{
					"--kubeconfig=" + s.kubeconfig, "--listen=127.0.0.1", "--port=" + strconv.Itoa(s.metrics),
					"--prom-cert-file=" + filepath.Join(s.certs, "tls.crt"), "--prom-key-file=" + filepath.Join(s.certs, "tls.key"),
					"--launcher-image=virt-launcher:" + s.version, "--exporter-image=virt-exportserver:" + s.version,
				}
			},
		},
	}
}

// started is a controller with what it runs with.
type started struct {
	controller
	settings
	manifest *manifest
	account  cluster.ServiceAccount
	process  *process.Process
	roots    *x509.CertPool
}

// prepare picks ports, issues the certificate and reads the manifest.
func (in *installer) prepare(c controller) (*started, error) {
	s := &started{controller: c, account: c.account, roots: x509.NewCertPool()}
	s.roots.AppendCertsFromPEM(in.ca.PEM())
	for _, port := range []*int{&s.webhook, &s.metrics, &s.health} {
		var err error
		if *port, err = process.FreePort(); err != nil {
			return nil, err
		}
	}
	host := "127.0.0.1"
	if e, ok := in.cluster.(exposer); ok && c.serves {
		var err error
		if host, err = e.Expose(s.webhook); err != nil {
			return nil, err
		}
	}
	s.certs = in.run.State("certs", c.name)
	if err := in.ca.WriteServing(s.certs, host, "virt-api.kubevirt.svc"); err != nil {
		return nil, err
	}
	s.version = in.programs.Version(c.name)
	var err error
	s.manifest, err = readManifest(in.programs.Manifest(c.installs), server{host: host, port: s.webhook, ca: in.ca.PEM()})
	if err != nil {
		return nil, err
	}
	if d := s.manifest.deployment; d != nil {
		s.account = cluster.ServiceAccount{Namespace: d.Namespace, Name: d.Spec.Template.Spec.ServiceAccountName}
		if s.account.Name == "" {
			s.account.Name = "default"
		}
	}
	return s, nil
}

// start starts the controller under the identity that it ships with.
func (s *started) start(ctx context.Context, in *installer) error {
	var err error
	if s.kubeconfig, err = in.cluster.Kubeconfig(ctx, s.account); err != nil {
		return err
	}
	home := in.run.State("home", s.name)
	if err := os.MkdirAll(home, 0o700); err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	args, env := s.shipped()
	s.process, err = in.run.Start(ctx, process.Spec{
		Name: s.name, Path: in.programs.Path(s.name), Dir: home,
		Args: append(args, s.flags(s.settings)...),
		Env:  append(env, "KUBECONFIG="+s.kubeconfig, "HOME="+home, "TMPDIR="+home),
		// KubeVirt's exit by design when CDI appears, all when they lose the API server.
		Restart: true,
	})
	return err
}

// shipped are the arguments and the environment of the Deployment that the
// controller ships with.
func (s *started) shipped() (args, env []string) {
	d := s.manifest.deployment
	if d == nil {
		return nil, nil
	}
	container := d.Spec.Template.Spec.Containers[0]
	for _, v := range container.Env {
		value := v.Value
		if from := v.ValueFrom; from != nil && from.FieldRef != nil {
			value = podField(from.FieldRef, d.Namespace, s.name)
		}
		env = append(env, v.Name+"="+value)
	}
	return append([]string{}, container.Args...), env
}

func podField(ref *corev1.ObjectFieldSelector, namespace, name string) string {
	switch ref.FieldPath {
	case "metadata.namespace":
		return namespace
	case "metadata.name":
		return name
	}
	return ""
}

// wait returns once the controller says that it works and its webhooks answer.
func (s *started) wait(ctx context.Context) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, startBound, true, func(ctx context.Context) (bool, error) {
		last = s.isReady(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%s is not ready: %w (%w); it was restarted %d times; see %s",
			s.name, last, err, s.process.Restarts(), s.process.Log())
	}
	return nil
}

func (s *started) isReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if s.serves {
		dialer := tls.Dialer{Config: &tls.Config{RootCAs: s.roots, ServerName: "127.0.0.1"}}
		conn, err := dialer.DialContext(ctx, "tcp", loopback(s.webhook))
		if err != nil {
			return fmt.Errorf("webhooks: %w", err)
		}
		_ = conn.Close()
	}
	body, err := get(ctx, s.client(), s.readyOn(s.settings)+s.ready)
	if err != nil {
		return err
	}
	if !strings.Contains(string(body), s.says) {
		return fmt.Errorf("%s says %s", s.ready, body)
	}
	return nil
}

// client trusts the run's authority.
func (s *started) client() *http.Client {
	return &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: s.roots}, DisableKeepAlives: true},
	}
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("get %s: %s", url, response.Status)
	}
	return body, nil
}
