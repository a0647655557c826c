package platform

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const (
	// OperatorServiceAccount in ArtifactNamespace is who installs, upgrades and publishes: it plays Cozystack's operator
	// with Flux behind it, which is cluster-admin there too, so the audit log tells it from the run's administrator.
	OperatorServiceAccount = "cozystack-operator"
	// UserAgent of the operator's requests.
	UserAgent = "upgrade-e2e-platform"
	// FieldManager of what this package applies.
	FieldManager = "upgrade-e2e-platform"
)

// operator returns a config of the operator's identity, making namespace, ServiceAccount and binding when missing.
func (e *Env) operator(ctx context.Context) (*rest.Config, error) {
	admin, err := kubernetes.NewForConfig(e.Config)
	if err != nil {
		return nil, err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ArtifactNamespace}}
	if _, err = admin.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create Namespace %s: %w", ArtifactNamespace, err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: OperatorServiceAccount, Namespace: ArtifactNamespace}}
	accounts := admin.CoreV1().ServiceAccounts(ArtifactNamespace)
	if _, err = accounts.Create(ctx, account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create ServiceAccount %s: %w", OperatorServiceAccount, err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: OperatorServiceAccount},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: OperatorServiceAccount, Namespace: ArtifactNamespace}},
	}
	if _, err = admin.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create ClusterRoleBinding %s: %w", OperatorServiceAccount, err)
	}
	day := int64(24 * 60 * 60)
	token, err := accounts.CreateToken(ctx, OperatorServiceAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &day},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token of ServiceAccount %s: %w", OperatorServiceAccount, err)
	}
	config := rest.AnonymousClientConfig(e.Config)
	config.BearerToken = token.Status.Token
	// Whoever looks at the administrator's requests looks at the operator's as well.
	config.WrapTransport, config.ContentType, config.AcceptContentTypes = e.Config.WrapTransport, e.Config.ContentType, e.Config.AcceptContentTypes
	config.UserAgent = UserAgent
	config.QPS = -1 // the API server's own priorities and fairness are the limit
	config.WarningHandler = rest.NoWarnings{}
	return config, nil
}

// getter gives Helm and the applier their clients from a rest.Config; no kubeconfig file is involved.
type getter struct {
	config    *rest.Config
	namespace string
	discovery discovery.CachedDiscoveryInterface
	mapper    meta.RESTMapper
}

func newGetter(config *rest.Config, namespace string) (*getter, error) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	cached := memory.NewMemCacheClient(client)
	return &getter{config, namespace, cached, restmapper.NewDeferredDiscoveryRESTMapper(cached)}, nil
}

func (g *getter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.config), nil }

func (g *getter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	return g.discovery, nil
}

func (g *getter) ToRESTMapper() (meta.RESTMapper, error) { return g.mapper, nil }

func (g *getter) ToRawKubeConfigLoader() clientcmd.ClientConfig {
	overrides := &clientcmd.ConfigOverrides{Context: clientcmdapi.Context{Namespace: g.namespace}}
	return clientcmd.NewDefaultClientConfig(*clientcmdapi.NewConfig(), overrides)
}
