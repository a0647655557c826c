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

// route is how the API server reaches a component's webhooks and aggregated
// APIs. Its methods change what a manifest says of it.
type route interface {
	// webhook turns the clientConfig of a webhook or a conversion, which names a Service.
	webhook(clientConfig map[string]any) error
	// aggregated turns the spec of an APIService that names a Service.
	aggregated(spec map[string]any) error
	service(u *unstructured.Unstructured) error
}

// byService leaves the way as it is, over real Services to pods, and says whom
// to trust there, as cert-manager would.
type byService struct {
	ca []byte // PEM
}

// byURL leads to a process of this machine.
type byURL struct {
	host string // address of this machine, as the API server sees it
	port int
	ca   []byte // PEM
}

// readManifest reads the YAML documents of the file at path and turns its
// webhooks, conversions and aggregated APIs by r. cert-manager's certificates are
// left out.
func readManifest(path string, r route) (*manifest, error) {
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
		if err := m.add(u, r); err != nil {
			return nil, fmt.Errorf("manifest %s: %s %s: %w", path, u.GetKind(), u.GetName(), err)
		}
	}
}

func (m *manifest) add(u *unstructured.Unstructured, r route) error {
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
		return turnConversion(u, r)
	case kind.Kind == "APIService":
		m.services = append(m.services, u)
		return turnAPI(u, r)
	case kind == schema.GroupKind{Kind: "Service"}:
		m.others = append(m.others, u)
		return r.service(u)
	case strings.HasSuffix(kind.Kind, "WebhookConfiguration"):
		m.others = append(m.others, u)
		return turnWebhooks(u, r)
	default:
		m.others = append(m.others, u)
	}
	return nil
}

func bundle(ca []byte) string { return base64.StdEncoding.EncodeToString(ca) }

func (r byService) webhook(clientConfig map[string]any) error {
	clientConfig["caBundle"] = bundle(r.ca)
	return nil
}

func (r byService) aggregated(spec map[string]any) error {
	spec["caBundle"] = bundle(r.ca)
	return nil
}

func (r byService) service(*unstructured.Unstructured) error { return nil }

func (r byURL) webhook(clientConfig map[string]any) error {
	path, _, err := unstructured.NestedString(clientConfig, "service", "path")
	if err != nil {
		return err
	}
	delete(clientConfig, "service")
	clientConfig["url"] = fmt.Sprintf("https://%s:%d/%s", r.host, r.port, strings.TrimPrefix(path, "/"))
	clientConfig["caBundle"] = bundle(r.ca)
	return nil
}

// aggregated names the port of the Service; its address comes from the Service.
func (r byURL) aggregated(spec map[string]any) error {
	spec["caBundle"] = bundle(r.ca)
	return unstructured.SetNestedField(spec, int64(r.port), "service", "port")
}

// service makes a Service a name for this machine, since there are no endpoints
// and nobody who would route to them.
func (r byURL) service(u *unstructured.Unstructured) error {
	name := r.host
	if name == "127.0.0.1" {
		name = "localhost" // an address of loopback is refused
	}
	return unstructured.SetNestedMap(u.Object, map[string]any{
		"type": string(corev1.ServiceTypeExternalName), "externalName": name,
	}, "spec")
}

// turnClient turns a clientConfig unless it goes by URL.
func turnClient(clientConfig map[string]any, r route) error {
	if clientConfig["service"] == nil {
		return nil
	}
	return r.webhook(clientConfig)
}

func turnWebhooks(u *unstructured.Unstructured, r route) error {
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
		if err := turnClient(clientConfig, r); err != nil {
			return err
		}
	}
	return nil
}

func turnConversion(u *unstructured.Unstructured, r route) error {
	clientConfig, ok, err := unstructured.NestedFieldNoCopy(u.Object, "spec", "conversion", "webhook", "clientConfig")
	if err != nil || !ok {
		return err
	}
	m, ok := clientConfig.(map[string]any)
	if !ok {
		return fmt.Errorf("spec.conversion.webhook.clientConfig is a %T", clientConfig)
	}
	return turnClient(m, r)
}

func turnAPI(u *unstructured.Unstructured, r route) error {
	spec, _, err := unstructured.NestedFieldNoCopy(u.Object, "spec")
	if err != nil {
		return err
	}
	if m, ok := spec.(map[string]any); ok && m["service"] != nil {
		return r.aggregated(m)
	}
	return nil
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
