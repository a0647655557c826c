package components

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"cozystack.io/upgrade-e2e/e2e/cluster"
)

// startBound is how long a controller may take until it is ready. As a pod, on a busy machine, it takes a minute.
const startBound = 4 * time.Minute

// controller is a program that is a component.
type controller struct {
	name     string                 // of the program
	installs string                 // name of its manifest
	account  cluster.ServiceAccount // used where the manifest has no Deployment
	flags    func(settings) []string
	inPod    ports                   // that its manifest counts on
	serves   bool                    // webhooks, on settings.webhook
	scraped  func(settings) endpoint // its metrics; nil for none
	ready    func(settings) endpoint // answers 200 …
	says     string                  // … and this text once the controller works
}

// ports are where a controller listens; 0 where it does not.
type ports struct{ webhook, metrics, health int }

// settings are what a controller's flags are made of.
type settings struct {
	ports
	listen     string // address of all ports
	certs      string // folder with tls.crt, tls.key
	kubeconfig string // "": that of a pod
	version    string // of the program
}

func (s settings) at(port int) string { return net.JoinHostPort(s.listen, strconv.Itoa(port)) }

// endpoint is a URL path of one of a controller's servers.
type endpoint struct {
	scheme string
	port   int
	path   string
}

func onHealth(path string) func(settings) endpoint {
	return func(s settings) endpoint { return endpoint{"http", s.health, path} }
}

func onWebhook(path string) func(settings) endpoint {
	return func(s settings) endpoint { return endpoint{"https", s.webhook, path} }
}

func onMetrics(scheme, path string) func(settings) endpoint {
	return func(s settings) endpoint { return endpoint{scheme, s.metrics, path} }
}

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
			name: o.HelmController, installs: "helm-controller",
			inPod: ports{metrics: 8080, health: 9440}, scraped: onMetrics("http", "/metrics"), ready: onHealth("/readyz"),
			flags: func(s settings) []string {
				return []string{
					"--enable-leader-election=false", "--events-addr=",
					"--metrics-addr=" + s.at(s.metrics), "--health-addr=" + s.at(s.health),
					"--concurrent=8", "--requeue-dependency=5s",
					"--kube-api-qps=500", "--kube-api-burst=1000",
				}
			},
		},
		{
			name: "cluster-api", installs: "cluster-api", serves: true,
			inPod: ports{webhook: 9443, metrics: 8443, health: 9440}, scraped: onMetrics("http", "/metrics"), ready: onHealth("/readyz"),
			flags: func(s settings) []string {
				return []string{
					single, "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--diagnostics-address=" + s.at(s.metrics), "--insecure-diagnostics=true",
					"--health-addr=" + s.at(s.health),
					"--kube-api-qps=200", "--kube-api-burst=400",
				}
			},
		},
		{
			name: "cluster-api-provider-kubevirt", installs: "cluster-api-provider-kubevirt", serves: true,
			inPod: ports{webhook: 9443, metrics: 8080, health: 9440}, scraped: onMetrics("http", "/metrics"), ready: onHealth("/readyz"),
			flags: func(s settings) []string {
				return []string{
					single, "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--metrics-bind-addr=" + s.at(s.metrics), "--health-addr=" + s.at(s.health),
				}
			},
		},
		{
			name: "cluster-api-bootstrap-provider-talos", installs: "cluster-api-bootstrap-provider-talos", serves: true,
			inPod: ports{webhook: 9443, metrics: 8443, health: 9440}, scraped: onMetrics("http", "/metrics"), ready: onHealth("/readyz"),
			flags: func(s settings) []string {
				return []string{
					"--enable-leader-election=false", "--webhook-port=" + strconv.Itoa(s.webhook), "--webhook-cert-dir=" + s.certs,
					"--diagnostics-address=" + s.at(s.metrics), "--insecure-diagnostics=true",
					"--health-addr=" + s.at(s.health),
				}
			},
		},
		{
			name: "virt-api", installs: "kubevirt", account: kubevirt("kubevirt-apiserver"), serves: true,
			inPod: ports{webhook: 8443}, ready: onWebhook("/healthz"),
			flags: func(s settings) []string {
				return []string{
					"--kubeconfig=" + s.kubeconfig, "--listen=" + s.listen, "--port=" + strconv.Itoa(s.webhook),
					"--tls-cert-file=" + filepath.Join(s.certs, "tls.crt"), "--tls-key-file=" + filepath.Join(s.certs, "tls.key"),
					"--handler-cert-file=" + filepath.Join(s.certs, "tls.crt"), "--handler-key-file=" + filepath.Join(s.certs, "tls.key"),
				}
			},
		},
		{
			name: "virt-controller", installs: "kubevirt", account: kubevirt("kubevirt-controller"),
			inPod: ports{metrics: 8443}, scraped: onMetrics("https", "/metrics"), ready: onMetrics("https", "/leader"), says: `"true"`,
			flags: func(s settings) []string {
				return []string{
					"--kubeconfig=" + s.kubeconfig, "--listen=" + s.listen, "--port=" + strconv.Itoa(s.metrics),
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
}

// identity is that of the Deployment which the controller ships with.
func (s *started) identity() cluster.ServiceAccount {
	d := s.manifest.deployment
	if d == nil {
		return s.account
	}
	name := d.Spec.Template.Spec.ServiceAccountName
	if name == "" {
		name = "default"
	}
	return cluster.ServiceAccount{Namespace: d.Namespace, Name: name}
}

// host is where the controllers run.
type host interface {
	// prepare chooses where c listens, and reads its manifest, turned to there.
	prepare(c controller) (*started, error)
	// start starts it under the identity that it ships with.
	start(ctx context.Context, s *started) error
	// serving is an error as long as the API server would not reach what s serves.
	serving(ctx context.Context, s *started) error
	// get reads from one of its servers.
	get(ctx context.Context, s *started, e endpoint) ([]byte, error)
	// condition tells how it fares, for the error of one that does not get ready.
	condition(ctx context.Context, s *started) string
	// as says as what controllers run, with an article.
	as() string
	// pause is the time between two looks at one that is starting.
	pause() time.Duration
}

// wait returns once the controller says that it works and its webhooks answer.
func (s *started) wait(ctx context.Context, on host) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, on.pause(), startBound, true, func(ctx context.Context) (bool, error) {
		last = s.isReady(ctx, on)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%s is not ready: %w (%w); %s", s.name, last, err, on.condition(context.WithoutCancel(ctx), s))
	}
	return nil
}

func (s *started) isReady(ctx context.Context, on host) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := on.serving(ctx, s); err != nil {
		return err
	}
	e := s.ready(s.settings)
	body, err := on.get(ctx, s, e)
	if err != nil {
		return err
	}
	if !strings.Contains(string(body), s.says) {
		return fmt.Errorf("%s says %s", e.path, body)
	}
	return nil
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
