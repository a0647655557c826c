package simulate

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/keyutil"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

var (
	certificateKind = schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "Certificate"}
	issuerKind      = schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: "Issuer"}
)

var certManagerStandIn = standIn{
	name: "cert-manager", namespace: "cert-manager", serviceAccount: "cert-manager",
	rules: []rbacv1.PolicyRule{
		allow("cert-manager.io", []string{"certificates", "issuers"}, "get", "list", "watch"),
		allow("cert-manager.io", []string{"certificates/status"}, "patch"),
		allow("", []string{"secrets"}, "get", "create"),
	},
	setup: func(s *Simulation, mgr manager.Manager) error {
		direct, err := client.New(mgr.GetConfig(), client.Options{Scheme: scheme, Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
		if err != nil {
			return err
		}
		c := &certManager{client: mgr.GetClient(), direct: direct}
		return ctrl.NewControllerManagedBy(mgr).Named("cert-manager").For(object(certificateKind)).Complete(s.own(c))
	},
}

// certManager plays cert-manager as far as a chart needs it: a Certificate of a self-signed or CA Issuer gets its Secret,
// once. Nothing is renewed; keys are Ed25519, whatever was asked for.
type certManager struct {
	client client.Client
	direct client.Client // as in kamaji: no cache of every Secret
}

// issuerWait is how soon an issuer or its CA is looked for again; both come with the same release.
const issuerWait = time.Second

// Reconcile implements reconcile.Reconciler for Certificates.
func (c *certManager) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	certificate := object(certificateKind)
	if err := c.client.Get(ctx, req.NamespacedName, certificate); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if certificate.GetDeletionTimestamp() != nil || conditionTrue(certificate, "Ready") {
		return ctrl.Result{}, nil
	}
	parent, wait, err := c.issuer(ctx, certificate)
	if err != nil || wait {
		return ctrl.Result{RequeueAfter: issuerWait}, err
	}
	data, err := issue(certificate, parent, time.Now())
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("issue %s: %w", req, err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: req.Namespace, Name: text(certificate, "spec", "secretName"),
			Annotations: map[string]string{"cert-manager.io/certificate-name": req.Name}},
		Type: corev1.SecretTypeTLS, Data: data,
	}
	if err := c.direct.Create(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
		return ctrl.Result{}, fmt.Errorf("create Secret %s: %w", key(secret), err)
	}
	conditions := setCondition(nil, map[string]any{"type": "Ready", "status": "True", "reason": "Ready"}, time.Now())
	return ctrl.Result{}, c.client.Status().Patch(ctx, certificate, merge(map[string]any{"status": map[string]any{"conditions": conditions}}))
}

// issuer is the CA of a certificate's issuer, nil for a self-signed one; wait tells that it is not there yet.
func (c *certManager) issuer(ctx context.Context, certificate *unstructured.Unstructured) (ca *tls.Certificate, wait bool, err error) {
	issuer := object(issuerKind)
	name := client.ObjectKey{Namespace: certificate.GetNamespace(), Name: text(certificate, "spec", "issuerRef", "name")}
	if err := c.client.Get(ctx, name, issuer); err != nil {
		return nil, apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	}
	from := text(issuer, "spec", "ca", "secretName")
	if from == "" {
		return nil, false, nil
	}
	secret := &corev1.Secret{}
	if err := c.direct.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: from}, secret); err != nil {
		return nil, apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, false, fmt.Errorf("CA of Issuer %s: %w", name, err)
	}
	return &pair, false, nil
}

// issue makes the Secret's data: tls.crt, tls.key, ca.crt. A nil parent signs itself.
func issue(certificate *unstructured.Unstructured, parent *tls.Certificate, now time.Time) (map[string][]byte, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	names, _, _ := unstructured.NestedStringSlice(certificate.Object, "spec", "dnsNames")
	template := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: text(certificate, "spec", "commonName")},
		DNSNames: names, NotBefore: now.Add(-time.Minute), NotAfter: now.AddDate(1, 0, 0), KeyUsage: x509.KeyUsageDigitalSignature}
	if truth(certificate, "spec", "isCA") {
		template.IsCA, template.BasicConstraintsValid = true, true
		template.KeyUsage |= x509.KeyUsageCertSign
	}
	signer, signerKey := template, any(private)
	if parent != nil {
		signer, signerKey = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, public, signerKey)
	if err != nil {
		return nil, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, err
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: keyutil.PrivateKeyBlockType, Bytes: pkcs8})
	ca := encode(der)
	if parent != nil {
		ca = encode(parent.Certificate[0])
	}
	return map[string][]byte{corev1.TLSCertKey: encode(der), corev1.TLSPrivateKeyKey: keyPEM, "ca.crt": ca}, nil
}
