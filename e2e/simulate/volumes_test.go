package simulate

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// TestVolumes takes DataVolumes from creation to Succeeded on the stand-ins for CDI, CSI and kubelet.
func TestVolumes(t *testing.T) {
	ctx, _, o := embedded(t)
	manifest, err := filepath.Abs("../../bin/manifests/containerized-data-importer.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(manifest); err != nil {
		t.Skip("CDI's CRDs are not built; run `make tools`")
	}
	if _, err := envtest.InstallCRDs(o.Admin, envtest.CRDInstallOptions{Paths: []string{manifest}, ErrorIfPathMissing: true}); err != nil {
		t.Fatal(err)
	}
	simCtx, stop := context.WithCancel(ctx)
	sim, err := start(simCtx, o, []standIn{kubeletStandIn, csiStandIn, cdiStandIn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := sim.Wait(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.NewWithWatch(o.Admin, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	create := func(o client.Object) {
		t.Helper()
		if err := c.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range []string{"golden", "workers"} {
		create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}
	newClass := func(name string, mode storagev1.VolumeBindingMode, annotations map[string]string) {
		create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}, Provisioner: linstor, VolumeBindingMode: &mode,
			AllowVolumeExpansion: ptr.To(true)})
	}
	newClass("replicated", storagev1.VolumeBindingImmediate, map[string]string{defaultClassKey: "true"})
	newClass("local", storagev1.VolumeBindingWaitForFirstConsumer, nil)
	newClass("cloning", storagev1.VolumeBindingImmediate, map[string]string{cloneStrategyClassKey: strategyCSI})

	data := func(namespace, name, class, size string, source map[string]any, annotations map[string]string) *unstructured.Unstructured {
		dv := object(dataVolumeKind)
		dv.SetNamespace(namespace)
		dv.SetName(name)
		dv.SetAnnotations(annotations)
		form := sized(size, map[string]any{"accessModes": []any{"ReadWriteMany"}, "volumeMode": "Block"})
		if class != "" {
			form["storageClassName"] = class
		}
		set(dv, map[string]any{"source": source, "pvc": form}, "spec")
		return dv
	}
	importing := []string{"Pending", "ImportScheduled", "ImportInProgress", "RebindInProgress", "Succeeded"}
	http := map[string]any{"http": map[string]any{"url": "https://example.org/image"}}
	clone := map[string]any{"pvc": map[string]any{"namespace": "golden", "name": "image"}}

	// phases follows a DataVolume until it succeeds.
	phases := func(t *testing.T, dv *unstructured.Unstructured) []string {
		t.Helper()
		began := time.Now()
		w, err := c.Watch(ctx, objectList(dataVolumeKind), client.InNamespace(dv.GetNamespace()), client.MatchingFields{"metadata.name": dv.GetName()})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		var seen []string
		for deadline := time.After(30 * time.Second); ; {
			select {
			case e := <-w.ResultChan():
				u, ok := e.Object.(*unstructured.Unstructured)
				if !ok {
					t.Fatalf("watch: %v", e.Object)
				}
				if p := text(u, "status", "phase"); p != "" && (len(seen) == 0 || seen[len(seen)-1] != p) {
					seen = append(seen, p)
				}
				if text(u, "status", "phase") == "Succeeded" {
					t.Logf("%v after %.2f s", seen, time.Since(began).Seconds())
					return seen
				}
			case <-deadline:
				t.Fatalf("not Succeeded in 30 s: %v", seen)
			}
		}
	}
	helpersGone := func(t *testing.T, dv *unstructured.Unstructured) {
		t.Helper()
		claim := &corev1.PersistentVolumeClaim{}
		if err := c.Get(ctx, key(dv), claim); err != nil {
			t.Fatal(err)
		}
		if claim.Status.Phase != corev1.ClaimBound {
			t.Errorf("claim is %s", claim.Status.Phase)
		}
		eventually(ctx, t, "helpers to go", func(ctx context.Context) bool {
			var pods corev1.PodList
			var claims corev1.PersistentVolumeClaimList
			l := client.MatchingLabels{ownedByLabel: string(claim.UID)}
			return c.List(ctx, &pods, l) == nil && c.List(ctx, &claims, l) == nil && len(pods.Items)+len(claims.Items) == 0
		})
	}
	inOrder := func(t *testing.T, got []string, want ...string) {
		t.Helper()
		for _, p := range got {
			if len(want) > 0 && p == want[0] {
				want = want[1:]
			}
		}
		if len(want) > 0 {
			t.Errorf("phases %v lack %v in this order", got, want)
		}
	}

	t.Run("worker disk: import without populator", func(t *testing.T) {
		dv := data("workers", "disk-system", "", "20Gi", http, map[string]string{usePopulatorKey: "false"})
		create(dv)
		inOrder(t, phases(t, dv), "Succeeded")
		helpersGone(t, dv)
	})
	t.Run("golden image: import with populator", func(t *testing.T) {
		dv := data("golden", "image", "", "6Gi", http, map[string]string{usePopulatorKey: "true", bindImmediateKey: "true"})
		create(dv)
		if got := phases(t, dv); !slices.IsSortedFunc(got, func(a, b string) int { return slices.Index(importing, a) - slices.Index(importing, b) }) {
			t.Errorf("phases %v go back", got)
		}
		helpersGone(t, dv)
		claim := &corev1.PersistentVolumeClaim{}
		if err := c.Get(ctx, key(dv), claim); err != nil || claim.Spec.DataSourceRef == nil || claim.Spec.DataSourceRef.Kind != "VolumeImportSource" {
			t.Errorf("dataSourceRef %v, %v", claim.Spec.DataSourceRef, err)
		}
	})
	t.Run("clone in the storage layer, across namespaces", func(t *testing.T) {
		dv := data("workers", "smart", "cloning", "20Gi", clone, nil)
		create(dv)
		got := phases(t, dv)
		inOrder(t, got, "Succeeded")
		if slices.Contains(got, "CloneInProgress") {
			t.Errorf("phases %v", got)
		}
		helpersGone(t, dv)
		claim, pv := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
		if err := c.Get(ctx, key(dv), claim); err != nil || claim.Annotations[cloneTypeKey] != strategyCSI || claim.Annotations[cloneFallbackKey] != "" {
			t.Errorf("annotations %v, %v", claim.Annotations, err)
		}
		if err := c.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, pv); err != nil || pv.Spec.CSI.VolumeHandle[:9] != "clone-of-" {
			t.Errorf("volume %v, %v", pv.Spec.CSI, err)
		}
		if err := c.Get(ctx, key(dv), dv); err != nil || len(dv.GetFinalizers()) != 0 {
			t.Errorf("finalizers %v, %v", dv.GetFinalizers(), err)
		}
	})
	t.Run("usePopulator=false makes a clone a copy", func(t *testing.T) {
		dv := data("workers", "copied", "cloning", "20Gi", clone, map[string]string{usePopulatorKey: "false"})
		create(dv)
		inOrder(t, phases(t, dv), "CloneScheduled", "Succeeded")
		helpersGone(t, dv)
		claim := &corev1.PersistentVolumeClaim{}
		if err := c.Get(ctx, key(dv), claim); err != nil || claim.Annotations[cloneTypeKey] != strategyCopy || claim.Annotations[cloneFallbackKey] == "" {
			t.Errorf("annotations %v, %v", claim.Annotations, err)
		}
	})
	t.Run("first consumer", func(t *testing.T) {
		dv := data("workers", "late", "local", "20Gi", http, map[string]string{usePopulatorKey: "false"})
		create(dv)
		eventually(ctx, t, "volume to wait", func(ctx context.Context) bool {
			return c.Get(ctx, key(dv), dv) == nil && text(dv, "status", "phase") == "WaitForFirstConsumer"
		})
		pod := mover("workers", "consumer", "consumer", "late", corev1.PersistentVolumeBlock)
		pod.Labels = nil
		create(pod)
		inOrder(t, phases(t, dv), "WaitForFirstConsumer", "Succeeded")
		helpersGone(t, dv)
	})
	t.Run("a clone waits for its source", func(t *testing.T) {
		dv := data("workers", "early", "cloning", "20Gi", map[string]any{"pvc": map[string]any{"namespace": "golden", "name": "later"}}, nil)
		create(dv)
		eventually(ctx, t, "refusal", func(ctx context.Context) bool {
			return c.Get(ctx, key(dv), dv) == nil && condition(dv, "Ready")["reason"] == "CloneWithoutSource"
		})
		create(data("golden", "later", "", "6Gi", http, map[string]string{usePopulatorKey: "false"}))
		if got := phases(t, dv); !slices.Equal(got, []string{"CloneScheduled", "CSICloneInProgress", "RebindInProgress", "Succeeded"}) {
			t.Errorf("phases %v", got)
		}
	})
	t.Run("deleting a volume deletes claim and disk", func(t *testing.T) {
		dv, claim := object(dataVolumeKind), &corev1.PersistentVolumeClaim{}
		dv.SetNamespace("workers")
		dv.SetName("disk-system")
		if err := c.Get(ctx, key(dv), claim); err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(ctx, dv); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "claim and volume to go", func(ctx context.Context) bool {
			return apierrors.IsNotFound(c.Get(ctx, key(dv), &corev1.PersistentVolumeClaim{})) &&
				apierrors.IsNotFound(c.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, &corev1.PersistentVolume{}))
		})
	})
}
