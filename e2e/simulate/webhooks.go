package simulate

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/utils/ptr"
)

// serveWebhooks serves webhooks until ctx ends. register tells the API server of them once they are served: at an address, with
// a certificate of an authority (PEM).
func (s *Simulation) serveWebhooks(ctx context.Context, name string, handle http.Handler, register func(address string, ca []byte) error) error {
	authority, err := newAuthority(name)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	host, address, err := s.reachedAt(listener.Addr())
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	serving, err := authority.server(host)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	certificate, err := tls.X509KeyPair(serving.certPEM, serving.keyPEM)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	listener = tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12})
	server := &http.Server{Handler: handle, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := register(address, authority.certPEM); err != nil {
		return errors.Join(err, server.Close())
	}
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
		return server.Close()
	}
}

func webhookAt(address, path string, ca []byte) admissionregistrationv1.WebhookClientConfig {
	return admissionregistrationv1.WebhookClientConfig{CABundle: ca, URL: ptr.To((&url.URL{Scheme: "https", Host: address, Path: path}).String())}
}

func review(answer func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var ar admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&ar); err != nil || ar.Request == nil {
			http.Error(w, "no AdmissionReview", http.StatusBadRequest)
			return
		}
		ar.Response = answer(ar.Request)
		ar.Response.UID = ar.Request.UID
		ar.Request = nil
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(ar); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}
