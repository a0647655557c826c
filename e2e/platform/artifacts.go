package platform

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
)

// ArtifactNamespace is where charts are published and the platform chart lives.
const ArtifactNamespace = "cozy-system"

var externalArtifacts = schema.GroupVersionResource{Group: "source.toolkit.fluxcd.io", Version: "v1", Resource: "externalartifacts"}

// publisherLabel marks the ExternalArtifacts that a run made, so that those of charts which a version has no more go.
const publisherLabel = "upgrade-e2e.cozystack.io/publisher"

// ArtifactServer serves packed charts over HTTP. Archives of earlier versions stay: a controller may still
// be fetching one.
type ArtifactServer struct {
	url   string
	mu    sync.RWMutex
	files map[string][]byte
}

// ServeArtifacts listens on a free port of 127.0.0.1 until ctx ends. By expose helm-controller reaches that port, at the host
// that comes back.
func ServeArtifacts(ctx context.Context, expose func(port int) (host string, err error)) (*ArtifactServer, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("artifact server: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	host, err := expose(port)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("artifact server: %w", err), l.Close())
	}
	s := &ArtifactServer{url: "http://" + net.JoinHostPort(host, strconv.Itoa(port)), files: map[string][]byte{}}
	server := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	go server.Serve(l)
	context.AfterFunc(ctx, func() { server.Close() })
	return s, nil
}

// ServeHTTP implements http.Handler: GET of a published archive.
func (s *ArtifactServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.RLock()
	data, ok := s.files[strings.TrimPrefix(r.URL.Path, "/")]
	s.mu.RUnlock()
	if !ok || r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/gzip")
	w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	if r.Method == http.MethodGet {
		w.Write(data)
	}
}

// add serves the chart and returns its path and URL.
func (s *ArtifactServer) add(c Chart) (name, url string) {
	name = path.Join("externalartifact", ArtifactNamespace, c.Artifact, c.file())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[name] = c.data
	return name, s.url + "/" + name
}

func (c Chart) file() string { return strings.TrimPrefix(c.Digest, "sha256:")[:12] + ".tar.gz" }

// Publish makes the cluster's ExternalArtifacts those of the version, under the operator's identity: Flux then installs
// or upgrades whatever refers to them. Publishing the same version again only renews the URLs (after a restore from a
// snapshot the server has another port). ExternalArtifacts of charts that the version lacks are deleted, as the
// platform's own generator does.
func Publish(ctx context.Context, e *Env, v *Version) error {
	config, err := e.operator(ctx)
	if err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	if err := e.keepCharts(v); err != nil {
		return err
	}
	artifacts := client.Resource(externalArtifacts).Namespace(ArtifactNamespace)
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, c := range v.Charts {
		group.Go(func() error {
			if err := publish(gctx, artifacts, e.Charts, c); err != nil {
				return fmt.Errorf("publish ExternalArtifact %s/%s: %w", ArtifactNamespace, c.Artifact, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	revisions := v.ChartRevisions()
	old, err := artifacts.List(ctx, metav1.ListOptions{LabelSelector: publisherLabel})
	if err != nil {
		return fmt.Errorf("list ExternalArtifacts: %w", err)
	}
	for _, o := range old.Items {
		if _, ok := revisions[o.GetName()]; ok {
			continue
		}
		if err := artifacts.Delete(ctx, o.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete ExternalArtifact %s: %w", o.GetName(), err)
		}
	}
	e.logf("published %d charts of %s", len(v.Charts), v.Spec)
	return nil
}

func publish(ctx context.Context, artifacts dynamic.ResourceInterface, server *ArtifactServer, c Chart) error {
	name, url := server.add(c)
	want := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": externalArtifacts.GroupVersion().String(),
		"kind":       "ExternalArtifact",
		"metadata":   map[string]any{"name": c.Artifact, "namespace": ArtifactNamespace, "labels": map[string]any{publisherLabel: "e2e"}},
		"spec":       map[string]any{"sourceRef": map[string]any{"apiVersion": "cozystack.io/v1alpha1", "kind": "PackageSource", "name": c.Source}},
	}}
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		live, err := artifacts.Apply(ctx, c.Artifact, want, metav1.ApplyOptions{FieldManager: FieldManager, Force: true})
		if err != nil {
			return err
		}
		artifact, _, _ := unstructured.NestedMap(live.Object, "status", "artifact")
		if artifact["digest"] == c.Digest && artifact["url"] == url {
			return nil // an unchanged chart must not look like a new one
		}
		now := time.Now().UTC().Format(time.RFC3339)
		status := map[string]any{
			"artifact": map[string]any{
				"digest": c.Digest, "revision": c.Revision, "path": name, "url": url,
				"size": int64(len(c.data)), "lastUpdateTime": now,
			},
			"conditions": []any{map[string]any{
				"type": "Ready", "status": "True", "reason": "Succeeded", "message": "stored artifact: revision '" + c.Revision + "'",
				"lastTransitionTime": now, "observedGeneration": live.GetGeneration(),
			}},
		}
		live.Object["status"] = status
		_, err = artifacts.UpdateStatus(ctx, live, metav1.UpdateOptions{FieldManager: FieldManager})
		return err
	})
}

// keepCharts saves the packed charts below ArtifactsDir/charts, one file per artifact and digest.
func (e *Env) keepCharts(v *Version) error {
	if e.ArtifactsDir == "" {
		return nil
	}
	var errs []error
	for _, c := range v.Charts {
		errs = append(errs, e.keep("charts", c.Artifact+"-"+c.file(), c.data))
	}
	return errors.Join(errs...)
}

func (e *Env) keep(folder, name string, data []byte) error {
	if e.ArtifactsDir == "" {
		return nil
	}
	dir := filepath.Join(e.ArtifactsDir, folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), data, 0o600)
}
