package components

import (
	"context"
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/process"
)

func TestMain(m *testing.M) {
	process.Main()
	os.Exit(m.Run())
}

const testManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: x-system}
---
# nothing but a comment
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.x.io}
spec:
  group: x.io
  names: {plural: things}
  conversion:
    strategy: Webhook
    webhook:
      clientConfig: {service: {namespace: x-system, name: webhook, path: /convert}}
  versions:
  - name: v1
    served: true
    schema:
      openAPIV3Schema:
        type: object
        description: goes
        properties:
          description: {type: string, description: goes}
          list:
            type: array
            items: {type: object, description: goes, properties: {a: {type: string, description: goes}}}
          map:
            type: object
            additionalProperties: {type: string, description: goes}
  - name: v0
    served: false
---
apiVersion: v1
kind: Service
metadata: {name: webhook, namespace: x-system}
spec: {ports: [{port: 443, targetPort: 9443}], selector: {app: x}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: x}
webhooks:
- name: one.x.io
  failurePolicy: Fail
  clientConfig: {service: {namespace: x-system, name: webhook, path: /validate}}
- name: two.x.io
  clientConfig: {service: {namespace: x-system, name: webhook}}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.sub.x.io}
spec: {group: sub.x.io, version: v1, service: {namespace: x-system, name: webhook}}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: serving, namespace: x-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: manager, namespace: x-system}
spec:
  selector: {matchLabels: {app: x}}
  template:
    metadata: {labels: {app: x}}
    spec:
      serviceAccountName: x-manager
      tolerations: [{key: master}]
      volumes:
      - {name: other, emptyDir: {}}
      - {name: cert, secret: {secretName: x-cert}}
      containers:
      - name: manager
        image: shipped
        imagePullPolicy: Always
        command: [/manager]
        args: [--leader-elect, --feature-gates=A=true]
        readinessProbe: {httpGet: {path: /readyz, port: healthz}}
        volumeMounts: [{name: other, mountPath: /tmp}, {name: cert, mountPath: /certs}]
        env:
        - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
        - {name: PLAIN, value: b}
`

func readTestManifest(t *testing.T, r route) *manifest {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.yaml")
	if err := os.WriteFile(path, []byte(testManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := readManifest(path, r)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestManifestIsTurnedTowardsTheProcess(t *testing.T) {
	m := readTestManifest(t, byURL{host: "127.0.0.1", port: 1234, ca: []byte("authority")})
	bundle := base64.StdEncoding.EncodeToString([]byte("authority"))
	byURL := func(path string) map[string]any {
		return map[string]any{"url": "https://127.0.0.1:1234/" + path, "caBundle": bundle}
	}
	if len(m.namespaces) != 1 || len(m.crds) != 1 || len(m.services) != 1 || len(m.others) != 2 {
		t.Fatalf("%d namespaces, %d CRDs, %d services, %d others", len(m.namespaces), len(m.crds), len(m.services), len(m.others))
	}
	conversion, _, _ := unstructured.NestedMap(m.crds[0].Object, "spec", "conversion", "webhook", "clientConfig")
	if diff := cmp.Diff(byURL("convert"), conversion); diff != "" {
		t.Error("conversion", diff)
	}
	service, webhooks := m.others[0], m.others[1]
	if diff := cmp.Diff(map[string]any{"type": "ExternalName", "externalName": "localhost"}, service.Object["spec"]); diff != "" {
		t.Error("service", diff)
	}
	want := []any{
		map[string]any{"name": "one.x.io", "failurePolicy": "Fail", "clientConfig": byURL("validate")},
		map[string]any{"name": "two.x.io", "clientConfig": byURL("")},
	}
	if diff := cmp.Diff(want, webhooks.Object["webhooks"]); diff != "" {
		t.Error("webhooks", diff)
	}
	spec, _, _ := unstructured.NestedMap(m.services[0].Object, "spec")
	if diff := cmp.Diff(map[string]any{
		"group": "sub.x.io", "version": "v1", "caBundle": bundle,
		"service": map[string]any{"namespace": "x-system", "name": "webhook", "port": int64(1234)},
	}, spec); diff != "" {
		t.Error("APIService", diff)
	}
}

func TestManifestOfPodsKeepsItsServices(t *testing.T) {
	plain, m := readTestManifest(t, unturned{}), readTestManifest(t, byService{ca: []byte("authority")})
	bundle := base64.StdEncoding.EncodeToString([]byte("authority"))
	if diff := cmp.Diff(plain.others[0].Object, m.others[0].Object); diff != "" {
		t.Error("service", diff)
	}
	// Nothing but the authority is added.
	want := plain.crds[0].DeepCopy()
	if err := unstructured.SetNestedField(want.Object, bundle, "spec", "conversion", "webhook", "clientConfig", "caBundle"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.Object, m.crds[0].Object); diff != "" {
		t.Error("conversion", diff)
	}
	want = plain.services[0].DeepCopy()
	if err := unstructured.SetNestedField(want.Object, bundle, "spec", "caBundle"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.Object, m.services[0].Object); diff != "" {
		t.Error("APIService", diff)
	}
	to := func(service map[string]any) map[string]any {
		service["namespace"], service["name"] = "x-system", "webhook"
		return map[string]any{"service": service, "caBundle": bundle}
	}
	if diff := cmp.Diff([]any{
		map[string]any{"name": "one.x.io", "failurePolicy": "Fail", "clientConfig": to(map[string]any{"path": "/validate"})},
		map[string]any{"name": "two.x.io", "clientConfig": to(map[string]any{})},
	}, m.others[1].Object["webhooks"]); diff != "" {
		t.Error("webhooks", diff)
	}
}

// unturned leaves a manifest as it is written.
type unturned struct{}

func (unturned) webhook(map[string]any) error             { return nil }
func (unturned) aggregated(map[string]any) error          { return nil }
func (unturned) service(*unstructured.Unstructured) error { return nil }

func TestDescriptionsGoAndPropertiesStay(t *testing.T) {
	versions, _, _ := unstructured.NestedSlice(readTestManifest(t, unturned{}).crds[0].Object, "spec", "versions")
	schema, _, _ := unstructured.NestedMap(versions[0].(map[string]any), "schema", "openAPIV3Schema")
	str := map[string]any{"type": "string"}
	want := map[string]any{"type": "object", "properties": map[string]any{
		"description": str,
		"list":        map[string]any{"type": "array", "items": map[string]any{"type": "object", "properties": map[string]any{"a": str}}},
		"map":         map[string]any{"type": "object", "additionalProperties": str},
	}}
	if diff := cmp.Diff(want, schema); diff != "" {
		t.Error(diff)
	}
}

func TestServedVersionsOnly(t *testing.T) {
	got := servedBy(readTestManifest(t, unturned{}).crds[0])
	if len(got) != 1 || got[0].String() != "x.io/v1, Resource=things" {
		t.Errorf("served: %v", got)
	}
}

func TestControllerKeepsWhatItShipsWith(t *testing.T) {
	s := &started{controller: controller{name: "x"}, manifest: readTestManifest(t, unturned{})}
	args, env := s.shipped()
	if want := []string{"--leader-elect", "--feature-gates=A=true"}; !slices.Equal(args, want) {
		t.Errorf("args = %q", args)
	}
	if want := []string{"POD_NAMESPACE=x-system", "POD_NAME=x", "POD_UID=", "PLAIN=b"}; !slices.Equal(env, want) {
		t.Errorf("env = %q", env)
	}
}

func TestManifestErrorsNameTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.yaml")
	if _, err := readManifest(path, unturned{}); err == nil {
		t.Error("no error for a missing file")
	}
	if err := os.WriteFile(path, []byte("kind: ValidatingWebhookConfiguration\nmetadata: {name: x}\nwebhooks: [{name: one}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "manifest " + path + ": ValidatingWebhookConfiguration x: webhook one has no clientConfig"
	if _, err := readManifest(path, unturned{}); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestBusyQueues(t *testing.T) {
	got, err := busyQueues([]byte(`# TYPE workqueue_depth gauge
workqueue_depth{controller="machine",name="machine",priority="0"} 3
workqueue_depth{controller="idle",name="idle"} 0
# TYPE kubevirt_workqueue_unfinished_work_seconds gauge
kubevirt_workqueue_unfinished_work_seconds{name="virt-controller-vm"} 0.25
# TYPE controller_runtime_active_workers gauge
controller_runtime_active_workers{controller="helmrelease"} 1
# TYPE workqueue_adds_total counter
workqueue_adds_total{name="machine"} 7
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"helmrelease controller_runtime_active_workers 1",
		"machine workqueue_depth 3",
		"virt-controller-vm workqueue_unfinished_work_seconds 0.25",
	}
	if !slices.Equal(got, want) {
		t.Errorf("busy: %q, want %q", got, want)
	}
	if _, err := busyQueues([]byte("<html>")); err == nil {
		t.Error("no error for what is no metrics")
	}
}

func TestBusyWhenMetricsCannotBeRead(t *testing.T) {
	port, err := process.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	read := func(ctx context.Context) ([]byte, error) {
		return get(ctx, http.DefaultClient, "http://"+loopback(port))
	}
	i := &Installed{scrapes: []scrape{{"gone", read}}}
	busy, err := i.Busy(t.Context())
	if err != nil || len(busy) != 1 {
		t.Errorf("Busy = %q, %v; want one controller that can't be asked", busy, err)
	}
}
