package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cozystack.io/upgrade-e2e/e2e/process"
)

const tokenSeconds = 24 * 60 * 60

// writeKubeconfig writes cfg as a kubeconfig, 0600, whose context and user are
// called name.
func writeKubeconfig(path, name string, cfg *rest.Config) error {
	out := clientcmdapi.NewConfig()
	out.Clusters[contextName] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	out.AuthInfos[name] = &clientcmdapi.AuthInfo{
		ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Token: cfg.BearerToken,
	}
	out.Contexts[contextName] = &clientcmdapi.Context{Cluster: contextName, AuthInfo: name}
	out.CurrentContext = contextName
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write kubeconfig of %s: %w", name, err)
	}
	if err := clientcmd.WriteToFile(*out, path); err != nil { // 0600
		return fmt.Errorf("write kubeconfig of %s: %w", name, err)
	}
	return nil
}

// accountKubeconfig writes a kubeconfig with a new token of sa below the run's state.
func accountKubeconfig(ctx context.Context, run *process.Run, admin *rest.Config, client kubernetes.Interface, sa ServiceAccount) (string, error) {
	token, err := token(ctx, client, sa)
	if err != nil {
		return "", err
	}
	path := run.State("kubeconfigs", sa.Namespace+"."+sa.Name)
	return path, writeKubeconfig(path, sa.String(), &rest.Config{
		Host: admin.Host, TLSClientConfig: rest.TLSClientConfig{CAData: admin.CAData}, BearerToken: token,
	})
}

// token asks for a token of sa and makes sure that sa exists.
func token(ctx context.Context, admin kubernetes.Interface, sa ServiceAccount) (string, error) {
	request := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenSeconds))}}
	got, err := admin.CoreV1().ServiceAccounts(sa.Namespace).CreateToken(ctx, sa.Name, request, metav1.CreateOptions{})
	if apierrors.IsNotFound(err) {
		if err := ensure(ctx, admin, sa); err != nil {
			return "", err
		}
		got, err = admin.CoreV1().ServiceAccounts(sa.Namespace).CreateToken(ctx, sa.Name, request, metav1.CreateOptions{})
	}
	if err != nil {
		return "", fmt.Errorf("get token of %s: %w", sa, err)
	}
	return got.Status.Token, nil
}

func ensure(ctx context.Context, admin kubernetes.Interface, sa ServiceAccount) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: sa.Namespace}}
	if _, err := admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace of %s: %w", sa, err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: sa.Name}}
	if _, err := admin.CoreV1().ServiceAccounts(sa.Namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create %s: %w", sa, err)
	}
	return nil
}
