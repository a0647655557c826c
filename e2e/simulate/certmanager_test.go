package simulate

import (
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"
)

func TestIssue(t *testing.T) {
	authority := object(certificateKind)
	set(authority, true, "spec", "isCA")
	set(authority, "talos", "spec", "commonName")
	root, err := issue(authority, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	parent, err := tls.X509KeyPair(root["tls.crt"], root["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	server := object(certificateKind)
	set(server, []any{"kubernetes-prod.tenant-a.svc"}, "spec", "dnsNames")
	leaf, err := issue(server, &parent, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(leaf["tls.crt"], leaf["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(leaf["ca.crt"])
	for name, valid := range map[string]bool{"kubernetes-prod.tenant-a.svc": true, "other.svc": false} {
		_, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		if (err == nil) != valid {
			t.Errorf("%s: %v, want valid: %v", name, err, valid)
		}
	}
	if pair.Leaf.IsCA || !parent.Leaf.IsCA || parent.Leaf.Subject.CommonName != "talos" {
		t.Errorf("leaf is CA: %v, root is CA: %v of %q", pair.Leaf.IsCA, parent.Leaf.IsCA, parent.Leaf.Subject.CommonName)
	}
}
