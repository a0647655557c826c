package simulate

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// TestDecide settles the recorded rows of clones and imports without a cluster: usePopulator, strategy, fallback reason
// and the claim's size, class and modes. TestDecisions plays them all.
func TestDecide(t *testing.T) {
	rows, err := readRows(filepath.Join("testdata", "decisions.json"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for _, w := range worlds(rows) {
		for _, r := range w.rows {
			if r.admission() || len(r.Given.Actions) > 0 || r.says(`same[- ]name|PVC exists|DataSource|capacity \(|without status|restoreSize|phase Failed|at the same moment|import takes|importing|importer pod fails|prePopulated|ResourceQuota`) ||
				strings.Contains(r.ID, "H03") || r.Given.Source.Unbound || r.Given.Source.Kind == "none" {
				continue // needs a cluster, or time
			}
			count++
			t.Run(r.ID, func(t *testing.T) { decideRow(t, w, r, tokenKeys{key}) })
		}
	}
	if count < 100 {
		t.Errorf("only %d rows", count)
	}
}

func decideRow(t *testing.T, w *world, r *decisionRow, keys tokenKeys) {
	ctx := context.Background()
	p := &play{lab: &lab{keys: keys, spots: map[string]*spot{}}, row: r, src: "src", dst: "dst", disk: "disk"}
	if r.Given.SameNamespace {
		p.src = p.dst
	}
	dv, err := p.dataVolume(ctx)
	if err != nil {
		t.Fatal(err)
	}
	dv.SetUID("dv-uid")
	objects := append(worldObjects(w), dv)
	objects = append(objects, sourceObjects(r, p.src)...)
	c := &cdi{clock: &seenClaims{}, events: map[string]record.EventRecorder{}, keys: keys, sim: &Simulation{o: Options{ImageSize: 8 << 30}}}
	for _, name := range []string{importController, pvcCloneController, snapshotCloneController, clonePopulator, importPopulator} {
		c.events[name] = record.NewFakeRecorder(1000)
	}
	status := []client.Object{object(dataVolumeKind)}
	c.client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(status...).Build()
	claim := &corev1.PersistentVolumeClaim{}
	there := false
	for range 8 { // as often as CDI looks until a claim that nobody binds is decided about
		_, _ = c.reconcileVolume(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(dv)}) // an error is a row's outcome, too
		var pods corev1.PodList
		if err := c.client.List(ctx, &pods); err != nil {
			t.Fatal(err)
		}
		for i := range pods.Items {
			pod := &pods.Items[i]
			pod.Status.Phase = corev1.PodSucceeded
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: sizeContainer, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Message: "8589934592"}}}}
			if err := c.client.Status().Update(ctx, pod); err != nil {
				t.Fatal(err)
			}
		}
		if there, err = c.get(ctx, client.ObjectKeyFromObject(dv), claim); err != nil {
			t.Fatal(err)
		} else if !there {
			continue
		}
		if claim.UID == "" || claim.Status.Phase == "" {
			claim.UID, claim.Status.Phase = "claim-uid", corev1.ClaimPending
			if claim.Spec.StorageClassName == nil { // what the API server's admission does
				if class, _ := c.class(ctx, nil, contentArchive); class != nil {
					claim.Spec.StorageClassName = &class.Name
				}
			}
			if err := c.client.Update(ctx, claim); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = c.reconcileClone(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(dv)})
	}
	if err := c.client.Get(ctx, client.ObjectKeyFromObject(dv), dv); err != nil {
		t.Fatal(err)
	}
	seen := map[string]any{"usePopulator": annotation(dv, usePopulatorKey), "strategy": nil, "fallbackReason": nil, "storageClass": nil, "volumeMode": nil, "accessModes": nil, "request": nil}
	if there {
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(dv), claim); err != nil {
			t.Fatal(err)
		}
		size, _ := requested(&claim.Spec)
		seen["strategy"], seen["fallbackReason"], seen["storageClass"] = annotation(claim, cloneTypeKey), annotation(claim, cloneFallbackKey), claim.Spec.StorageClassName
		seen["volumeMode"], seen["accessModes"], seen["request"] = volumeMode(claim.Spec.VolumeMode), claim.Spec.AccessModes, size.String()
	}
	for name, got := range seen {
		p.either(name, r.Expected[name], got)
	}
	for _, problem := range p.problems {
		t.Error(problem)
	}
	if t.Failed() {
		t.Logf("%s; conditions %v", r.Description, dv.Object["status"])
	}
}

// worldObjects are a world's classes, drivers, profiles and CDI's configuration.
func worldObjects(w *world) []client.Object {
	platform, config := object(cdiKind), object(cdiConfigKind)
	platform.SetName("cdi")
	config.SetName("config")
	set(platform, map[string]any{}, "spec")
	if w.global.Override != nil {
		set(platform, *w.global.Override, "spec", "cloneStrategyOverride")
	}
	var gates []any
	for _, g := range w.global.FeatureGates {
		gates = append(gates, g)
	}
	set(config, gates, "spec", "featureGates")
	set(config, orElse(w.global.Overhead, defaultOverhead), "status", "filesystemOverhead", "global")
	list := []client.Object{platform, config}
	drivers, snapshotClasses := map[string]bool{}, map[string]bool{}
	for _, c := range w.classes {
		sc := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: c.Name, Annotations: map[string]string{}}, Provisioner: c.Provisioner,
			AllowVolumeExpansion: &c.Expansion, VolumeBindingMode: ptr.To(storagev1.VolumeBindingMode(c.BindingMode))}
		for _, d := range w.global.defaults() {
			if d == c.Name {
				sc.Annotations[defaultClassKey] = "true"
			}
		}
		if ptr.Deref(w.global.Defaults.Virt, "") == c.Name {
			sc.Annotations[virtDefaultClassKey] = "true"
		}
		profile := object(profileKind)
		profile.SetName(c.Name)
		set(profile, ptr.Deref(c.Strategy, strategyCopy), "status", "cloneStrategy")
		if c.SnapshotClass != nil {
			set(profile, *c.SnapshotClass, "status", "snapshotClass")
		}
		sets := knownSets[c.Name]
		for _, s := range knownOf(sc).sets() {
			sets = append(sets, map[string]any{"accessModes": []any{string(s.AccessModes[0])}, "volumeMode": string(*s.VolumeMode)})
		}
		if sets != nil {
			set(profile, sets, "status", "claimPropertySets")
		}
		list = append(list, sc, profile)
		if c.Driver && !drivers[c.Provisioner] {
			drivers[c.Provisioner] = true
			list = append(list, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: c.Provisioner}})
		}
		for _, name := range c.SnapshotClasses {
			name, def := strings.CutSuffix(name, " (default)")
			if snapshotClasses[name] {
				continue
			}
			snapshotClasses[name] = true
			s := object(snapshotClassKind)
			s.SetName(name)
			s.Object["driver"] = c.Provisioner
			if def {
				annotate(s, defaultSnapshotClassKey, "true")
			}
			list = append(list, s)
		}
	}
	return list
}

// sourceObjects are a row's golden claim, bound to its volume, and its snapshot.
func sourceObjects(r *decisionRow, namespace string) []client.Object {
	g := r.Given.Source
	if g.StorageClass == nil {
		return nil
	}
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(g.Size)}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "golden", UID: types.UID("golden-uid"), Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &g.StorageClass.Name, VolumeName: "pv", VolumeMode: ptr.To(corev1.PersistentVolumeMode(g.VolumeMode)),
			Resources: corev1.VolumeResourceRequirements{Requests: size}},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: size}}
	if strings.Contains(g.VolumeMode, "Block") {
		claim.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
	}
	if g.ContentType != "none" {
		claim.Annotations[contentTypeKey] = orElse(g.ContentType, contentKubeVirt)
	}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		ClaimRef:               &corev1.ObjectReference{Namespace: namespace, Name: "golden"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: g.StorageClass.Provisioner}}}}
	if g.Kind != "snapshot" {
		return []client.Object{claim, pv}
	}
	snapshot, content := object(snapshotKind), object(snapshotContentKind)
	snapshot.SetNamespace(namespace)
	snapshot.SetName("golden-snap")
	set(snapshot, "class", "spec", "volumeSnapshotClassName")
	set(snapshot, map[string]any{"boundVolumeSnapshotContentName": "content", "readyToUse": true, "restoreSize": g.Size, "creationTime": stamp(time.Now())}, "status")
	content.SetName("content")
	set(content, map[string]any{"driver": g.StorageClass.Provisioner, "sourceVolumeMode": g.VolumeMode}, "spec")
	return []client.Object{claim, pv, snapshot, content}
}
