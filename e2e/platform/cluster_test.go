package platform

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
)

func TestMain(m *testing.M) {
	process.Main()
	os.Exit(m.Run())
}

// boot starts a control plane with Flux's source CRDs, or skips the test where the programs are not built.
func boot(t *testing.T) *Env {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	programs, err := cluster.FindPrograms(root)
	if err != nil {
		t.Skip(err)
	}
	manifest := programs.Manifest("source-controller")
	if _, err := os.Stat(manifest); err != nil {
		t.Skipf("not built: %s; run `make tools`", manifest)
	}
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	c := cluster.NewEmbedded(run, programs)
	if _, err := c.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	charts, err := ServeArtifacts(t.Context(), c.Expose)
	if err != nil {
		t.Fatal(err)
	}
	e := &Env{
		Config: c.KubernetesRestConfig(), Programs: programs.Dir, Processes: run, Charts: charts, Log: t.Logf,
		ArtifactsDir: run.Dir(), HookTimeout: 3 * time.Minute,
	}
	applySourceCRDs(t, e, manifest)
	return e
}

func applySourceCRDs(t *testing.T, e *Env, manifest string) {
	t.Helper()
	dir := t.TempDir()
	data, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "all.yaml"), string(data))
	objects, err := readObjects(dir, "all.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects = slices.DeleteFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() != "CustomResourceDefinition" })
	a, err := newApplier(e.Config, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.apply(t.Context(), manifest, objects); err != nil {
		t.Fatal(err)
	}
	if err := a.waitEstablished(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
}

// playKubelet runs the pods of Jobs as host processes under their ServiceAccount, as much as these tests need of it.
func playKubelet(t *testing.T, e *Env, entrypoint func(string) (string, []string, bool)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	client := kubernetes.NewForConfigOrDie(e.Config)
	go func() {
		defer close(done)
		w, err := client.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, metav1.ListOptions{LabelSelector: "batch.kubernetes.io/job-name"})
		if err != nil {
			t.Error(err)
			return
		}
		defer w.Stop()
		started := map[string]bool{}
		for {
			select {
			case <-ctx.Done():
				return
			case event, ok := <-w.ResultChan():
				pod, isPod := event.Object.(*corev1.Pod)
				if !ok || !isPod {
					return
				}
				if started[string(pod.UID)] {
					continue
				}
				started[string(pod.UID)] = true
				if err := runPod(ctx, e, client, pod, entrypoint); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		}
	}()
}

func runPod(ctx context.Context, e *Env, client kubernetes.Interface, pod *corev1.Pod, entrypoint func(string) (string, []string, bool)) error {
	c := pod.Spec.Containers[0]
	path, args, ok := entrypoint(c.Image)
	if !ok {
		return fmt.Errorf("image %s is unknown", c.Image)
	}
	token, err := client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	kubeconfig := e.Processes.State(pod.Name + ".kubeconfig")
	content, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{"server": e.Config.Host, "certificate-authority-data": e.Config.CAData}}},
		"users":    []any{map[string]any{"name": "u", "user": map[string]any{"token": token.Status.Token}}},
		"contexts": []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c", "user": "u"}}},
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(kubeconfig, content, 0o600); err != nil {
		return err
	}
	env := []string{"KUBECONFIG=" + kubeconfig, "PATH=" + e.Programs + ":" + os.Getenv("PATH")}
	for _, v := range c.Env {
		env = append(env, v.Name+"="+v.Value)
	}
	if err := os.MkdirAll(filepath.Join(e.Processes.Dir(), "logs", "pods"), 0o700); err != nil {
		return err
	}
	name := fmt.Sprintf("pods/%s_%s_%s", pod.Namespace, pod.Name, c.Name)
	code, err := e.Processes.Exec(ctx, process.Spec{Name: name, Path: path, Args: args, Env: env})
	if err != nil {
		return err
	}
	phase := corev1.PodSucceeded
	if code != 0 {
		phase = corev1.PodFailed
	}
	now := metav1.Now()
	// A patch, for the scheduler and the Job controller write the pod as well.
	patch, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
		Phase: phase, StartTime: &now,
		ContainerStatuses: []corev1.ContainerStatus{{Name: c.Name, State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: int32(code), StartedAt: now, FinishedAt: now},
		}}},
	}})
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

func version(t *testing.T, client kubernetes.Interface) string {
	t.Helper()
	cm, err := client.CoreV1().ConfigMaps(ArtifactNamespace).Get(t.Context(), "cozystack-version", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return cm.Data["version"]
}

// published reads the ExternalArtifacts by name and fetches each from its URL.
func published(t *testing.T, config *rest.Config) map[string]Revision {
	t.Helper()
	list, err := dynamic.NewForConfigOrDie(config).Resource(externalArtifacts).Namespace(ArtifactNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]Revision{}
	for _, o := range list.Items {
		artifact, _, _ := unstructured.NestedStringMap(map[string]any{"a": map[string]any{
			"url": nested(o, "url"), "revision": nested(o, "revision"), "digest": nested(o, "digest")}}, "a")
		response, err := http.Get(artifact["url"])
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(data)
		if got := "sha256:" + hex.EncodeToString(sum[:]); got != artifact["digest"] {
			t.Errorf("%s: its URL serves %s, its status says %s", o.GetName(), got, artifact["digest"])
		}
		out[o.GetName()] = Revision{Revision: artifact["revision"], Digest: artifact["digest"]}
	}
	return out
}

func nested(o unstructured.Unstructured, field string) string {
	s, _, _ := unstructured.NestedString(o.Object, "status", "artifact", field)
	return s
}

func equal(a, b map[string]Revision) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

// besideOthers applies a default StorageClass and a ConfigMap to a cluster with a default class and such a ConfigMap.
func besideOthers(t *testing.T, e *Env, client kubernetes.Interface) {
	class := func(name string, annotations map[string]string) *storagev1.StorageClass {
		return &storagev1.StorageClass{TypeMeta: metav1.TypeMeta{APIVersion: "storage.k8s.io/v1", Kind: "StorageClass"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}, Provisioner: "example.org/" + name}
	}
	settings := func(of string) *corev1.ConfigMap {
		return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "dns"},
			Data: map[string]string{"of": of}}
	}
	wanted := func() []*unstructured.Unstructured {
		var list []*unstructured.Unstructured
		for _, o := range []any{class("ours", map[string]string{defaultClass: "true", "keep": "this"}), settings("ours")} {
			content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, &unstructured.Unstructured{Object: content})
		}
		return list
	}
	if _, err := client.CoreV1().ConfigMaps("default").Create(t.Context(), settings("theirs"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		outlived bool
		theirs   bool   // a default class of somebody's is there
		isOurs   string // whether the platform's class is the default
		of       string // whose the ConfigMap is
	}{{true, false, "true", "theirs"}, {true, true, "", "theirs"}, {false, true, "true", "ours"}} {
		if c.theirs {
			_, err := client.StorageV1().StorageClasses().Create(t.Context(), class("theirs", map[string]string{defaultClass: "true"}), metav1.CreateOptions{})
			if err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
		}
		a, err := newApplier(e.Config, c.outlived)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // what is ours by now is no one else's
			if err := a.apply(t.Context(), "test", wanted()); err != nil {
				t.Fatal(err)
			}
		}
		got, err := client.StorageV1().StorageClasses().Get(t.Context(), "ours", metav1.GetOptions{})
		if err != nil || got.Annotations[defaultClass] != c.isOurs || (got.Annotations[virtDefaultClass] == "true") != (c.outlived && c.theirs) || got.Annotations["keep"] != "this" {
			t.Errorf("%+v: class is %v, %v", c, got.Annotations, err)
		}
		dns, err := client.CoreV1().ConfigMaps("default").Get(t.Context(), "dns", metav1.GetOptions{})
		if err != nil || dns.Data["of"] != c.of {
			t.Errorf("%+v: their ConfigMap has %v, %v", c, dns.Data, err)
		}
	}
	for _, name := range []string{"ours", "theirs"} {
		if err := client.StorageV1().StorageClasses().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestUpgradeOnACluster(t *testing.T) {
	e := boot(t)
	client := kubernetes.NewForConfigOrDie(e.Config)
	t.Run("what others have stays as it is", func(t *testing.T) { besideOthers(t, e, client) })
	oldTree, newTree, badTree := testTree(t), testTree(t), testTree(t)
	replaceIn(t, filepath.Join(oldTree, "packages/core/platform/values.yaml"), "targetVersion: 3", "targetVersion: 2")
	if err := os.Remove(filepath.Join(oldTree, "packages/core/platform/sources/web.yaml")); err != nil {
		t.Fatal(err)
	}
	replaceIn(t, filepath.Join(newTree, "packages/library/cozy-lib/templates/_name.tpl"), ".Release.Name", ".Chart.Name")
	write(t, filepath.Join(badTree, "packages/core/platform/images/migrations/migrations/2"), "#!/bin/sh\nset -o pipefail\necho no tenant | grep tenants\n")
	replaceIn(t, filepath.Join(badTree, "packages/core/platform/values.yaml"), "migrations:v3", "migrations:bad")
	old, bad, next := load(t, oldTree), load(t, badTree), load(t, newTree)
	if err := CheckUpgrade(old, next, e.Programs); err != nil {
		t.Skip(err)
	}
	playKubelet(t, e, Entrypoints(bad, next, old))

	if _, err := Upgrade(t.Context(), e, next); err == nil || !strings.Contains(err.Error(), "there is no release cozystack-platform to upgrade") {
		t.Fatalf("upgrade of nothing: %v", err)
	}

	poor, profile := *old, *old.Profile
	profile.CRDs.Files = nil
	poor.Profile = &profile
	if err := Install(t.Context(), e, &poor); err == nil || !strings.Contains(err.Error(), "apply Gadget cozy-system/g of profile testdata: no kind Gadget.example.org on the cluster") {
		t.Errorf("install without the CRD of an object: %v", err)
	}

	if err := Install(t.Context(), e, old); err != nil {
		t.Fatal(err)
	}
	if got := version(t, client); got != "2" {
		t.Errorf("cozystack-version %s after the install of 2", got)
	}
	if got := published(t, e.Config); !equal(got, old.ChartRevisions()) {
		t.Errorf("published %v, want %v", got, old.ChartRevisions())
	}
	secret, err := client.CoreV1().Secrets("tenant-a").Get(t.Context(), "cozystack-values", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if want := "_cluster:\n  root-host: example.org\n_namespace:\n  etcd: tenant-root\n  host: tenant-a.example.org\n"; string(secret.Data["values.yaml"]) != want {
		t.Errorf("values of tenant-a: %q, want %q", secret.Data["values.yaml"], want)
	}
	if _, err := RunMigrations(t.Context(), e, old, 1); err == nil || !strings.Contains(err.Error(), "nothing was ever migrated here") {
		t.Errorf("run again before any migration: %v", err)
	}

	var migrated []map[string]Revision // what was published when each hook ended
	e.Migrated = func() error { migrated = append(migrated, published(t, e.Config)); return nil }
	out, err := Upgrade(t.Context(), e, bad)
	if err != nil {
		t.Fatal(err)
	}
	if out.Failure == "" || out.Exit() != 1 || len(out.Attempts) != 2 || !out.Published.IsZero() {
		t.Errorf("a failing migration: %+v, want two attempts with exit code 1 and nothing published", out)
	}
	if want := "run-migrations.sh: migration 2"; !slices.Contains(out.HookLog(), want) || !strings.Contains(out.Failure, want) || strings.Contains(out.Failure, "\n") {
		t.Errorf("failure %q, log %q: want %q in both", out.Failure, out.HookLog(), want)
	}
	if got := published(t, e.Config); !equal(got, old.ChartRevisions()) || version(t, client) != "2" {
		t.Errorf("after a failed hook: version %s, published %v; want the old ones", version(t, client), got)
	}

	out, err = Upgrade(t.Context(), e, next)
	if err != nil {
		t.Fatal(err)
	}
	if out.Failure != "" || out.Exit() != 0 || len(out.Attempts) != 1 || !slices.Contains(out.HookLog(), "configmap/cozystack-version patched") {
		t.Errorf("upgrade: %+v", out)
	}
	if !out.Started.Before(out.HookDone) || !out.HookDone.Before(out.Published) {
		t.Errorf("times out of order: %v, %v, %v", out.Started, out.HookDone, out.Published)
	}
	if len(migrated) != 2 || !equal(migrated[0], old.ChartRevisions()) || !equal(migrated[1], old.ChartRevisions()) {
		t.Errorf("published when the hooks ended: %v, want the old charts twice", migrated)
	}
	if got := version(t, client); got != "3" {
		t.Errorf("cozystack-version %s after the upgrade to 3", got)
	}
	if got := published(t, e.Config); !equal(got, next.ChartRevisions()) || equal(got, bad.ChartRevisions()) {
		t.Errorf("published %v, want %v", got, next.ChartRevisions())
	}

	before := resourceVersions(t, e.Config)
	if err := Publish(t.Context(), e, next); err != nil {
		t.Fatal(err)
	}
	if after := resourceVersions(t, e.Config); after != before {
		t.Errorf("publishing the same charts again wrote: %s, then %s", before, after)
	}
	if err := Publish(t.Context(), e, old); err != nil {
		t.Fatal(err)
	}
	if got := published(t, e.Config); !equal(got, old.ChartRevisions()) {
		t.Errorf("charts of the old version: %v, want %v and none of the new one's", got, old.ChartRevisions())
	}

	for range 2 { // a second call replaces the first one's Job
		attempts, err := RunMigrations(t.Context(), e, next, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(attempts) != 1 || attempts[0].Exit != 0 || !slices.Contains(attempts[0].Log, "configmap/cozystack-version patched (no change)") {
			t.Errorf("run again: %+v", attempts)
		}
	}
	if _, err := client.RbacV1().RoleBindings(ArtifactNamespace).Get(t.Context(), RerunJob, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the rights of the second run are still there: %v", err)
	}

	for _, name := range []string{"charts/cozystack-platform-3.yaml", "logs/migration-hook.log", "logs/migration-rerun.log"} {
		info, err := os.Stat(filepath.Join(e.ArtifactsDir, name))
		if err != nil || info.Mode().Perm() != 0o600 || info.Size() == 0 {
			t.Errorf("artifact %s: %v, %v", name, info, err)
		}
	}
}

func resourceVersions(t *testing.T, config *rest.Config) string {
	t.Helper()
	list, err := dynamic.NewForConfigOrDie(config).Resource(externalArtifacts).Namespace(ArtifactNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, o := range list.Items {
		out = append(out, o.GetName()+"="+o.GetResourceVersion())
	}
	return strings.Join(out, " ")
}
