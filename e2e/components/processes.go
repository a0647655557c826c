package components

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cozystack.io/upgrade-e2e/e2e/process"
)

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// processes runs controllers on loopback, where the API server is a process, too, or reaches what is exposed to it.
type processes struct{ *installer }

func (processes) as() string           { return "a process" }
func (processes) pause() time.Duration { return 50 * time.Millisecond }

// prepare picks free ports and issues the certificate.
func (h processes) prepare(c controller) (*started, error) {
	s := &started{controller: c}
	s.listen, s.version = "127.0.0.1", h.programs.Version(c.name)
	for _, port := range []*int{&s.webhook, &s.metrics, &s.health} {
		var err error
		if *port, err = process.FreePort(); err != nil {
			return nil, err
		}
	}
	host := s.listen
	var err error
	if c.serves {
		if host, err = h.cluster.Expose(s.webhook); err != nil {
			return nil, err
		}
	}
	s.certs = h.run.State("certs", c.name)
	if err := h.ca.WriteServing(s.certs, host, "virt-api.kubevirt.svc"); err != nil {
		return nil, err
	}
	s.manifest, err = readManifest(h.programs.Manifest(c.installs), byURL{host: host, port: s.webhook, ca: h.ca.PEM()})
	return s, err
}

func (h processes) start(ctx context.Context, s *started) error {
	var err error
	if s.kubeconfig, err = h.cluster.Kubeconfig(ctx, s.identity()); err != nil {
		return err
	}
	home := h.run.State("home", s.name)
	if err := os.MkdirAll(home, 0o700); err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	args, env := s.shipped()
	_, err = h.run.Start(ctx, process.Spec{
		Name: s.name, Path: h.programs.Path(s.name), Dir: home,
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

func (h processes) serving(ctx context.Context, s *started) error {
	if !s.serves {
		return nil
	}
	dialer := tls.Dialer{Config: &tls.Config{RootCAs: h.roots(), ServerName: "127.0.0.1"}}
	conn, err := dialer.DialContext(ctx, "tcp", loopback(s.webhook))
	if err != nil {
		return fmt.Errorf("webhooks: %w", err)
	}
	return conn.Close()
}

func (h processes) get(ctx context.Context, _ *started, e endpoint) ([]byte, error) {
	client := &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: h.roots()}, DisableKeepAlives: true},
	}
	return get(ctx, client, e.scheme+"://"+loopback(e.port)+e.path)
}

// roots trusts the run's authority.
func (h processes) roots() *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(h.ca.PEM())
	return roots
}

func (h processes) condition(_ context.Context, s *started) string {
	p := h.run.Find(s.name)
	if p == nil {
		return "it was not started"
	}
	return fmt.Sprintf("it was restarted %d times; see %s", p.Restarts(), p.Log())
}
