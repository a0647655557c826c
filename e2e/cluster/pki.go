package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// Authority is a certificate authority for one run. Its key never leaves memory.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// NewAuthority makes an authority with a new key.
func NewAuthority(name string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key of authority %s: %w", name, err)
	}
	cert, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: name}, key)
	if err != nil {
		return nil, fmt.Errorf("make authority %s: %w", name, err)
	}
	return &Authority{cert: cert, key: key}, nil
}

// PEM is the authority's certificate.
func (a *Authority) PEM() []byte {
	pem, err := certutil.EncodeCertificates(a.cert)
	if err != nil {
		panic(err) // of a parsed certificate: cannot be
	}
	return pem
}

// Serving issues a certificate, with its key, for a server on 127.0.0.1 that
// also answers to localhost and the given DNS names and addresses.
func (a *Authority) Serving(names ...string) (cert, key []byte, err error) {
	if cert, key, err = a.issue(serving(names)); err != nil {
		return nil, nil, fmt.Errorf("issue certificate of %s: %w", strings.Join(names, ", "), err)
	}
	return cert, key, nil
}

// WriteServing writes such a certificate to dir/tls.crt, its key to dir/tls.key.
func (a *Authority) WriteServing(dir string, names ...string) error {
	return a.write(dir, serving(names))
}

func serving(names []string) x509.Certificate {
	template := x509.Certificate{
		Subject:     pkix.Name{CommonName: "localhost"},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	return template
}

// WriteClient writes dir/tls.crt and dir/tls.key, a client certificate with
// user as common name.
func (a *Authority) WriteClient(dir, user string) error {
	return a.write(dir, x509.Certificate{
		Subject:     pkix.Name{CommonName: user},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

func (a *Authority) write(dir string, template x509.Certificate) error {
	fail := func(err error) error {
		return fmt.Errorf("issue certificate of %s in %s: %w", template.Subject.CommonName, dir, err)
	}
	cert, key, err := a.issue(template)
	if err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tls.crt"), cert, 0o600); err != nil {
		return fail(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600); err != nil {
		return fail(err)
	}
	return nil
}

// issue signs a certificate with a new key; both come as PEM.
func (a *Authority) issue(template x509.Certificate) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return nil, nil, err
	}
	template.NotBefore = a.cert.NotBefore
	template.NotAfter = time.Now().Add(7 * 24 * time.Hour)
	template.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
	der, err := x509.CreateCertificate(rand.Reader, &template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	if certPEM, err = certutil.EncodeCertificates(cert); err != nil {
		return nil, nil, err
	}
	keyPEM, err = keyutil.MarshalPrivateKeyToPEM(key)
	return certPEM, keyPEM, err
}
