package components

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// manifest is what one component installs, sorted by when it is applied.
type manifest struct {
	namespaces []*unstructured.Unstructured
	crds       []*unstructured.Unstructured
	services   []*unstructured.Unstructured // aggregated APIs: once their server answers
	others     []*unstructured.Unstructured
	deployment *appsv1.Deployment // nil when the manifest has none
}

// server is where the API server reaches a component's webhooks and aggregated
// APIs, and the authority of its certificate.
type server struct {
	host string // an address, or a name that resolves without a cluster
	port int
	ca   []byte // PEM
}

// readManifest reads the YAML documents of the file at path and turns its
// webhooks, conversions and aggregated APIs towards s. What only works inside
// of pods (Deployments, cert-manager's certificates) is left out.
func readManifest(path string, s server) (*manifest, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	m := &manifest{}
	docs := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(raw)))
	for {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return m, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read manifest %s: %w", path, err)
		}
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(doc, &u.Object); err != nil {
			return nil, fmt.Errorf("read manifest %s: %w", path, err)
		}
		if len(u.Object) == 0 {
			continue
		}
		if err := m.add(u, s); err != nil {
			return nil, fmt.Errorf("manifest %s: %s %s: %w", path, u.GetKind(), u.GetName(), err)
		}
	}
}

func (m *manifest) add(u *unstructured.Unstructured, s server) error {
	switch kind := u.GroupVersionKind().GroupKind(); {
	case kind.Group == "cert-manager.io":
		// The run issues the certificates itself.
	case kind == schema.GroupKind{Group: "apps", Kind: "Deployment"}:
		m.deployment = &appsv1.Deployment{}
		return runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, m.deployment)
	case kind.Kind == "Namespace":
		m.namespaces = append(m.namespaces, u)
	case kind.Kind == "CustomResourceDefinition":
		m.crds = append(m.crds, u)
		dropDescriptions(u)
		return s.serveConversion(u)
	case kind.Kind == "APIService":
		m.services = append(m.services, u)
		return s.serveAPI(u)
	case kind == schema.GroupKind{Kind: "Service"}:
		m.others = append(m.others, u)
		return s.externalName(u)
	case strings.HasSuffix(kind.Kind, "WebhookConfiguration"):
		m.others = append(m.others, u)
		return s.serveWebhooks(u)
	default:
		m.others = append(m.others, u)
	}
	return nil
}

func (s server) caBundle() string { return base64.StdEncoding.EncodeToString(s.ca) }

// byURL turns a webhook's clientConfig from its Service to the URL of s.
func (s server) byURL(clientConfig map[string]any) error {
	service, ok, err := unstructured.NestedMap(clientConfig, "service")
	if err != nil || !ok {
		return err
	}
	path, _, err := unstructured.NestedString(service, "path")
	if err != nil {
		return err
	}
	delete(clientConfig, "service")
	clientConfig["url"] = fmt.Sprintf("https://%s:%d/%s", s.host, s.port, strings.TrimPrefix(path, "/"))
	clientConfig["caBundle"] = s.caBundle()
	return nil
}

func (s server) serveWebhooks(u *unstructured.Unstructured) error {
	webhooks, _, err := unstructured.NestedFieldNoCopy(u.Object, "webhooks")
	if err != nil {
		return err
	}
	list, _ := webhooks.([]any)
	for _, item := range list {
		webhook, _ := item.(map[string]any)
		clientConfig, ok := webhook["clientConfig"].(map[string]any)
		if !ok {
			return fmt.Errorf("webhook %v has no clientConfig", webhook["name"])
		}
		if err := s.byURL(clientConfig); err != nil {
			return err
		}
	}
	return nil
}

func (s server) serveConversion(u *unstructured.Unstructured) error {
	clientConfig, ok, err := unstructured.NestedFieldNoCopy(u.Object, "spec", "conversion", "webhook", "clientConfig")
	if err != nil || !ok {
		return err
	}
	m, ok := clientConfig.(map[string]any)
	if !ok {
		return fmt.Errorf("spec.conversion.webhook.clientConfig is a %T", clientConfig)
	}
	return s.byURL(m)
}

// serveAPI names the port of an aggregated API's Service; its address comes from
// externalName.
func (s server) serveAPI(u *unstructured.Unstructured) error {
	service, ok, err := unstructured.NestedFieldNoCopy(u.Object, "spec", "service")
	if err != nil || !ok {
		return err
	}
	if m, ok := service.(map[string]any); ok && m != nil {
		m["port"] = int64(s.port)
		return unstructured.SetNestedField(u.Object, s.caBundle(), "spec", "caBundle")
	}
	return nil
}

// externalName makes a Service a name for this machine, since there are no
// endpoints and nobody who would route to them.
func (s server) externalName(u *unstructured.Unstructured) error {
	name := s.host
	if name == "127.0.0.1" {
		name = "localhost"
	}
	return unstructured.SetNestedMap(u.Object, map[string]any{
		"type": string(corev1.ServiceTypeExternalName), "externalName": name,
	}, "spec")
}

// dropDescriptions takes the documentation out of a CRD's schemas. It has no
// effect on objects, but on the API server's time and memory.
func dropDescriptions(crd *unstructured.Unstructured) {
	versions, _, _ := unstructured.NestedFieldNoCopy(crd.Object, "spec", "versions")
	list, _ := versions.([]any)
	for _, item := range list {
		version, _ := item.(map[string]any)
		if schema, ok, _ := unstructured.NestedFieldNoCopy(version, "schema", "openAPIV3Schema"); ok {
			dropDescription(schema)
		}
	}
}

// dropDescription does so in one schema and those below it. `properties` maps
// names to schemas, so a property that is called description stays.
func dropDescription(schema any) {
	m, ok := schema.(map[string]any)
	if !ok {
		return
	}
	delete(m, "description")
	properties, _ := m["properties"].(map[string]any)
	for _, property := range properties {
		dropDescription(property)
	}
	dropDescription(m["items"])
	dropDescription(m["additionalProperties"])
}
