package history_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
)

const policy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: Metadata, resources: [{group: "", resources: [secrets, configmaps]}]}
- {level: RequestResponse}
`

// TestRecorderAgainstARealAPIServer proves what the joins rest on: what audit log and watch say of the same change.
func TestRecorderAgainstARealAPIServer(t *testing.T) {
	if testing.Short() {
		t.Skip("boots an API server twice")
	}
	bin, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if assets := os.Getenv("KUBEBUILDER_ASSETS"); assets != "" {
		bin = assets
	}
	for _, program := range []string{"etcd", "kube-apiserver"} {
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			t.Skipf("no %s in %s: run `make tools`", program, bin)
		}
	}
	dir := t.TempDir()
	auditLog := filepath.Join(dir, "audit.log")
	if err := os.WriteFile(filepath.Join(dir, "policy.yaml"), []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	env := &envtest.Environment{BinaryAssetsDirectory: bin, ControlPlaneStartTimeout: 2 * time.Minute, ControlPlaneStopTimeout: time.Minute}
	certs := filepath.Join(dir, "certs") // a folder of our own outlives the server's restart
	if err := os.Mkdir(certs, 0o700); err != nil {
		t.Fatal(err)
	}
	env.ControlPlane.GetAPIServer().CertDir = certs
	args := env.ControlPlane.GetAPIServer().Configure()
	args.Set("audit-policy-file", filepath.Join(dir, "policy.yaml")).Set("audit-log-path", auditLog).Set("endpoint-reconciler-type", "none").
		Set("request-timeout", "5s") // it also bounds how long a stopping server waits for its watches
	config, err := env.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	ctx := t.Context()
	user := func(name string) dynamic.Interface {
		c := rest.CopyConfig(config)
		c.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: []string{"system:masters"}}
		client, err := dynamic.NewForConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	must := func(o *unstructured.Unstructured, err error) *unstructured.Unstructured {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	core := func(resource string) schema.GroupVersionResource {
		return schema.GroupVersionResource{Version: "v1", Resource: resource}
	}
	object := func(kind, at string, change ...func(*unstructured.Unstructured)) *unstructured.Unstructured {
		return ht.Object(kind, at, append(change, ht.UID(""))...)
	}
	claim := func(name string) *unstructured.Unstructured {
		return object("PersistentVolumeClaim", "cozy-system/"+name, ht.Set("spec.accessModes", []any{"ReadWriteOnce"}), ht.Set("spec.resources.requests.storage", "1Gi"))
	}
	admin := user("admin")
	// A server that is ready makes its own Service a moment later; a slow machine must not put that into the history.
	if err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		_, err := admin.Resource(core("services")).Namespace("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		return err == nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	must(admin.Resource(core("namespaces")).Create(ctx, object("Namespace", "cozy-system"), metav1.CreateOptions{}))
	claims := func(who string) dynamic.ResourceInterface {
		return user(who).Resource(core("persistentvolumeclaims")).Namespace("cozy-system")
	}
	must(claims("admin").Create(ctx, claim("before"), metav1.CreateOptions{}))

	out := filepath.Join(dir, "history.jsonl")
	r, err := history.Start(ctx, history.RecorderOptions{Config: config, AuditLog: auditLog, Out: out})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Mark(history.PhaseUpgrade); err != nil {
		t.Fatal(err)
	}
	patch := func(client dynamic.ResourceInterface, name, text string, options metav1.PatchOptions) {
		t.Helper()
		must(client.Patch(ctx, name, types.MergePatchType, []byte(text), options))
	}
	patch(claims("patcher"), "before", `{"metadata":{"annotations":{"a":"1"}}}`, metav1.PatchOptions{})
	patch(claims("no-op"), "before", `{"metadata":{"annotations":{"a":"1"}}}`, metav1.PatchOptions{})
	patch(claims("dry"), "before", `{"metadata":{"annotations":{"a":"2"}}}`, metav1.PatchOptions{DryRun: []string{"All"}})
	must(claims("creator").Create(ctx, claim("during"), metav1.CreateOptions{}))
	remove := func(client dynamic.ResourceInterface, name string) {
		t.Helper()
		if err := client.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	remove(claims("asker"), "during")                                                               // its protection finalizer keeps it
	patch(claims("finalizer"), "during", `{"metadata":{"finalizers":null}}`, metav1.PatchOptions{}) // and now it goes
	patch(claims("patcher"), "before", `{"metadata":{"finalizers":null}}`, metav1.PatchOptions{})
	remove(claims("remover"), "before")
	must(claims("creator").Create(ctx, claim("many"), metav1.CreateOptions{}))
	patch(claims("patcher"), "many", `{"metadata":{"finalizers":null}}`, metav1.PatchOptions{})
	if err := claims("sweeper").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	version := object("ConfigMap", "cozy-system/cozystack-version", ht.Set("data.version", "57"))
	must(user("migration").Resource(core("configmaps")).Namespace("cozy-system").Create(ctx, version, metav1.CreateOptions{}))
	elsewhere := object("ConfigMap", "default/other")
	must(user("migration").Resource(core("configmaps")).Namespace("default").Create(ctx, elsewhere, metav1.CreateOptions{}))
	stored := ht.Stored{Release: "cozy-system/platform", Revision: 1}.Secret()
	ht.UID("")(stored)
	must(user("helm").Resource(core("secrets")).Namespace("cozy-system").Create(ctx, stored, metav1.CreateOptions{}))
	private := object("Secret", "cozy-system/private", ht.Set("stringData.key", "do not record me"))
	must(user("helm").Resource(core("secrets")).Namespace("cozy-system").Create(ctx, private, metav1.CreateOptions{}))
	server := env.ControlPlane.GetAPIServer()
	if err := server.Stop(); err != nil { // what it forgets, the audit log must make up for
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	patch(user("migration").Resource(core("configmaps")).Namespace("cozy-system"), "cozystack-version", `{"data":{"version":"58"}}`, metav1.PatchOptions{})
	if err := r.Stop(ctx); err != nil {
		t.Fatal(err)
	}

	h, err := history.Read(out)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range h.Events {
		if e.Type != history.Baseline && e.Resource != "namespaces" {
			writer := "?"
			if e.Writer != nil {
				writer = e.Writer.User
			}
			got = append(got, fmt.Sprintf("%s %s %s", writer, e.Type, e.Object.GetName()))
		}
	}
	for _, want := range []string{
		"patcher MODIFIED before,creator ADDED during,asker MODIFIED during,finalizer DELETED during,patcher MODIFIED before,remover DELETED before,creator ADDED many,patcher MODIFIED many,sweeper DELETED many",
		"migration ADDED cozystack-version,migration MODIFIED cozystack-version", "helm ADDED sh.helm.release.v1.platform.v1",
	} {
		last := -1
		for _, event := range strings.Split(want, ",") { // in this order; other kinds may come between
			at := -1
			for i := last + 1; i < len(got) && at < 0; i++ {
				if got[i] == event {
					at = i
				}
			}
			if at < 0 {
				t.Errorf("no %q after %d in\n  %s", event, last, strings.Join(got, "\n  "))
				break
			}
			last = at
		}
	}
	if len(got) != 12 {
		t.Errorf("%d events, want 12:\n  %s", len(got), strings.Join(got, "\n  "))
	}
	t.Logf("%d watches expired over the restart", len(h.Gaps))
	if len(h.OpenGaps()) != 0 || h.End == nil || len(h.Header.Unserved) != len(history.DefaultKinds())-8 {
		t.Errorf("open gaps %v, end %v, unserved %v", h.OpenGaps(), h.End, h.Header.Unserved)
	}
	if h.Deployed(history.ReleaseKey{Namespace: "cozy-system", Name: "platform"}) == nil {
		t.Error("the release's Secret was not decoded")
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"do not record me", "managedFields", `"user":"dry"`} {
		if strings.Contains(string(text), word) {
			t.Errorf("the history holds %q", word)
		}
	}
}
