// Package cluster boots the Kubernetes cluster that a run upgrades.
//
// A Provider is an e2e-framework cluster provider that can also hand out
// kubeconfigs of ServiceAccounts and tell where the API server's audit log is.
package cluster

import (
	"context"
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/e2e-framework/pkg/types"

	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/programs"
)

// ServiceAccount names an identity in the cluster.
type ServiceAccount struct{ Namespace, Name string }

// String is the account's user name, as the audit log writes it.
func (sa ServiceAccount) String() string {
	return "system:serviceaccount:" + sa.Namespace + ":" + sa.Name
}

// Provider is a cluster, e2e-framework's interface plus what a recorded run
// needs.
type Provider interface {
	types.E2EClusterProvider

	// Kind names the provider: "embedded", "kind" or "existing".
	Kind() string
	// AuditLog is the path of the API server's audit log, one JSON object per
	// line, or "" where there is none.
	AuditLog() string
	// Kubeconfig writes a kubeconfig with a token of the ServiceAccount, valid
	// for 24 hours, and returns its path. Namespace and account are created when
	// missing. Each call asks for a new token.
	Kubeconfig(ctx context.Context, sa ServiceAccount) (path string, err error)
	// Expose lets the API server and pods reach what listens on a port of this
	// machine's 127.0.0.1, and returns the host by which they do. The cluster has
	// to be created.
	Expose(port int) (host string, err error)
	// Processes is the run that the cluster's processes belong to.
	Processes() *process.Run
}

// ConfigFor is a client configuration for sa, whose name and token it carries.
// It has no client-side rate limit: controllers do not wait for themselves.
func ConfigFor(ctx context.Context, p Provider, sa ServiceAccount) (*rest.Config, error) {
	path, err := p.Kubeconfig(ctx, sa)
	if err != nil {
		return nil, err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig of %s: %w", sa, err)
	}
	cfg.QPS = -1
	if t, ok := p.(interface{ Track(*rest.Config) }); ok {
		t.Track(cfg)
	}
	return cfg, nil
}

// Programs are the built programs; package programs says more.
type Programs = *programs.Programs

// FindPrograms finds the programs built below the project's root. It fails with
// one line, which tells what to do, if one of them is missing.
func FindPrograms(root string) (Programs, error) { return programs.Find(root) }

// ControlPlane lists the programs that the embedded provider runs.
func ControlPlane() []string {
	return []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
}
