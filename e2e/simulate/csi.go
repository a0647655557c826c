package simulate

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	provisionerAnnotation   = "volume.kubernetes.io/storage-provisioner"
	selectedNodeAnnotation  = "volume.kubernetes.io/selected-node"
	provisionedByAnnotation = "pv.kubernetes.io/provisioned-by"
)

var csiStandIn = standIn{
	name: "csi", namespace: "kube-system", serviceAccount: "csi-stand-in",
	rules: []rbacv1.PolicyRule{
		allow("", []string{"persistentvolumes"}, "get", "list", "watch", "create", "patch", "delete"),
		allow("", []string{"persistentvolumeclaims"}, "get", "list", "watch"),
		allow("", []string{"persistentvolumeclaims/status"}, "patch"),
		allow("storage.k8s.io", []string{"storageclasses", "csidrivers"}, "get", "list", "watch"),
		allow("storage.k8s.io", []string{"csidrivers"}, "create"),
		allow("", []string{"pods"}, "get", "list", "watch"),
		allow("", []string{"events"}, "create", "patch"),
		allow("snapshot.storage.k8s.io", []string{"volumesnapshots", "volumesnapshotclasses"}, "get", "list", "watch"),
		allow("snapshot.storage.k8s.io", []string{"volumesnapshots/status"}, "patch"),
		allow("snapshot.storage.k8s.io", []string{"volumesnapshotcontents"}, "get", "list", "watch", "create", "delete"),
	},
	setup: setupCSI,
}

// csi plays the CSI drivers of all StorageClasses: provisioner, resizer, snapshotter and the CSIDriver object. A volume
// is nothing but its PersistentVolume; the handle says what it was made from. Binding is the real controller-manager's
// work, WaitForFirstConsumer the real scheduler's.
type csi struct {
	sim    *Simulation
	client client.Client
	events record.EventRecorder
	taken  sync.Map // when a snapshot was first seen taken
}

// noDriverKey is the annotation of a StorageClass whose driver is not to be registered.
const noDriverKey = "upgrade-e2e/no-csi-driver"

func setupCSI(s *Simulation, mgr manager.Manager) error {
	c := &csi{sim: s, client: mgr.GetClient(), events: newRecorder(mgr.GetClient(), mgr.GetLogger(), "external-provisioner")}
	if err := ctrl.NewControllerManagedBy(mgr).Named("csi-claims").For(&corev1.PersistentVolumeClaim{}).
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(c.claimsOfClass)).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(claimsOfUser)).
		Complete(s.own(reconcile.Func(c.claim))); err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(mgr).Named("csi-snapshots").For(object(snapshotKind)).
		Watches(object(snapshotClassKind), handler.EnqueueRequestsFromMapFunc(nobody)).
		Complete(s.own(reconcile.Func(c.snapshot))); err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(mgr).Named("csi-contents").For(object(snapshotContentKind)).
		Watches(object(snapshotKind), handler.EnqueueRequestsFromMapFunc(contentOf)).
		Complete(reconcile.Func(c.content)); err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(mgr).Named("csi-volumes").For(&corev1.PersistentVolume{}).
		Complete(reconcile.Func(c.volume)); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).Named("csi-drivers").For(&storagev1.StorageClass{}).
		Watches(&storagev1.CSIDriver{}, handler.EnqueueRequestsFromMapFunc(nobody)).
		Complete(reconcile.Func(c.driver))
}

// claimsOfClass lists the claims that wait for a class.
func (c *csi) claimsOfClass(ctx context.Context, class client.Object) []reconcile.Request {
	var list corev1.PersistentVolumeClaimList
	if err := c.client.List(ctx, &list); err != nil {
		return nil // the cache ends with the run
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if ptr.Deref(list.Items[i].Spec.StorageClassName, "") == class.GetName() && list.Items[i].Spec.VolumeName == "" {
			requests = append(requests, reconcile.Request{NamespacedName: key(&list.Items[i])})
		}
	}
	return requests
}

// claim provisions the volume of a claim, or grows it.
func (c *csi) claim(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pvc := &corev1.PersistentVolumeClaim{}
	if err := c.client.Get(ctx, req.NamespacedName, pvc); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	class := &storagev1.StorageClass{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: ptr.Deref(pvc.Spec.StorageClassName, "")}, class); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pv := provision(pvc, class); pv != nil {
		from, err := c.origin(ctx, pvc)
		if err != nil {
			return ctrl.Result{}, err
		}
		if from != "" {
			pv.Spec.CSI.VolumeHandle = from + "-" + pv.Spec.CSI.VolumeHandle
		}
		if err := c.client.Create(ctx, pv); client.IgnoreAlreadyExists(err) != nil {
			return ctrl.Result{}, fmt.Errorf("provision claim %s: %w", key(pvc), err)
		}
		c.events.Eventf(pvc, corev1.EventTypeNormal, "ProvisioningSucceeded", "Successfully provisioned volume %s", pv.Name)
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, c.grow(ctx, pvc, class)
}

// provision is the volume that a claim is to get now, nil for none: claims of other drivers, of CDI's populators, and
// those whose first consumer is not scheduled yet.
func provision(pvc *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) *corev1.PersistentVolume {
	switch {
	case pvc.DeletionTimestamp != nil, pvc.Spec.VolumeName != "", pvc.Status.Phase == corev1.ClaimBound, pvc.Status.Phase == corev1.ClaimLost:
		return nil
	case inTree(class), pvc.Annotations[provisionerAnnotation] != class.Provisioner:
		return nil // the controller-manager has not asked for this driver
	case pvc.Spec.DataSourceRef != nil && ptr.Deref(pvc.Spec.DataSourceRef.APIGroup, "") == dataVolumeKind.Group:
		return nil
	case waits(class) && pvc.Annotations[selectedNodeAnnotation] == "":
		return nil
	}
	name := "pvc-" + string(pvc.UID)
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{provisionedByAnnotation: class.Provisioner}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: pvc.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes:                   pvc.Spec.AccessModes,
			VolumeMode:                    pvc.Spec.VolumeMode,
			StorageClassName:              class.Name,
			MountOptions:                  class.MountOptions,
			PersistentVolumeReclaimPolicy: ptr.Deref(class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete),
			PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: class.Provisioner, VolumeHandle: name}},
			ClaimRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: pvc.Namespace, Name: pvc.Name, UID: pvc.UID, ResourceVersion: pvc.ResourceVersion},
		},
	}
}

func inTree(class *storagev1.StorageClass) bool {
	return strings.HasPrefix(class.Provisioner, "kubernetes.io/")
}

func waits(class *storagev1.StorageClass) bool {
	return ptr.Deref(class.VolumeBindingMode, storagev1.VolumeBindingImmediate) == storagev1.VolumeBindingWaitForFirstConsumer
}

// origin says what a claim's volume is made from, as the beginning of its handle: another claim's volume, a snapshot,
// nothing.
func (c *csi) origin(ctx context.Context, pvc *corev1.PersistentVolumeClaim) (string, error) {
	source := pvc.Spec.DataSource
	if source == nil {
		return "", nil
	}
	name := client.ObjectKey{Namespace: pvc.Namespace, Name: source.Name}
	switch source.Kind {
	case claimKindName:
		from := &corev1.PersistentVolumeClaim{}
		if err := c.client.Get(ctx, name, from); err != nil {
			return "", fmt.Errorf("source of claim %s: %w", key(pvc), err)
		}
		if from.Spec.VolumeName == "" {
			return "", fmt.Errorf("source of claim %s: claim %s has no volume", key(pvc), from.Name)
		}
		return "clone-of-" + from.Spec.VolumeName, nil
	case snapshotName:
		snapshot := object(snapshotKind)
		if err := c.client.Get(ctx, name, snapshot); err != nil {
			return "", fmt.Errorf("source of claim %s: %w", key(pvc), err)
		}
		if !truth(snapshot, "status", "readyToUse") {
			return "", fmt.Errorf("source of claim %s: snapshot %s is not ready", key(pvc), source.Name)
		}
		return "restore-of-" + text(snapshot, "status", "boundVolumeSnapshotContentName"), nil
	}
	return "", nil
}

// snapshot takes the snapshot of a claim whose VolumeSnapshotClass is of its volume's driver.
func (c *csi) snapshot(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	snapshot := object(snapshotKind)
	if err := c.client.Get(ctx, req.NamespacedName, snapshot); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	_, taken, _ := unstructured.NestedMap(snapshot.Object, "status")
	switch {
	case snapshot.GetDeletionTimestamp() != nil, truth(snapshot, "status", "readyToUse"):
		return ctrl.Result{}, nil
	case taken:
		return c.ready(ctx, snapshot)
	}
	class, pvc, pv := object(snapshotClassKind), &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	for _, read := range []struct {
		from client.ObjectKey
		to   client.Object
	}{
		{client.ObjectKey{Name: text(snapshot, "spec", "volumeSnapshotClassName")}, class},
		{client.ObjectKey{Namespace: req.Namespace, Name: text(snapshot, "spec", "source", "persistentVolumeClaimName")}, pvc},
	} {
		if err := c.client.Get(ctx, read.from, read.to); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err) // no such class or claim: nobody answers
		}
	}
	if pvc.Spec.VolumeName == "" {
		return ctrl.Result{RequeueAfter: pollEvery}, nil
	}
	if err := c.client.Get(ctx, client.ObjectKey{Name: pvc.Spec.VolumeName}, pv); err != nil {
		return ctrl.Result{}, err
	}
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != text(class, "driver") {
		return ctrl.Result{}, nil
	}
	name, size := "snapcontent-"+string(snapshot.GetUID()), pvc.Status.Capacity[corev1.ResourceStorage]
	content := object(snapshotContentKind)
	content.SetName(name)
	set(content, map[string]any{
		"driver": pv.Spec.CSI.Driver, "deletionPolicy": orElse(text(class, "deletionPolicy"), "Delete"),
		"volumeSnapshotClassName": class.GetName(), "sourceVolumeMode": string(volumeMode(pv.Spec.VolumeMode)),
		"source":            map[string]any{"volumeHandle": pv.Spec.CSI.VolumeHandle},
		"volumeSnapshotRef": map[string]any{"namespace": snapshot.GetNamespace(), "name": snapshot.GetName(), "uid": string(snapshot.GetUID())},
	}, "spec")
	if err := c.client.Create(ctx, content); client.IgnoreAlreadyExists(err) != nil {
		return ctrl.Result{}, fmt.Errorf("content of snapshot %s: %w", key(snapshot), err)
	}
	old := snapshot.DeepCopy()
	set(snapshot, map[string]any{"boundVolumeSnapshotContentName": name, "creationTime": stamp(time.Now()), "readyToUse": false,
		"restoreSize": size.String()}, "status")
	return ctrl.Result{}, client.IgnoreNotFound(c.client.Status().Patch(ctx, snapshot, client.MergeFrom(old)))
}

// ready lets a snapshot that was taken be restored from, a little later: drivers upload it or tidy up first.
func (c *csi) ready(ctx context.Context, snapshot *unstructured.Unstructured) (ctrl.Result, error) {
	first, _ := c.taken.LoadOrStore(snapshot.GetUID(), time.Now())
	if left := shown - time.Since(first.(time.Time)); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	old := snapshot.DeepCopy()
	set(snapshot, true, "status", "readyToUse")
	return ctrl.Result{}, client.IgnoreNotFound(c.client.Status().Patch(ctx, snapshot, client.MergeFrom(old)))
}

// content deletes the content of a snapshot that is gone.
func (c *csi) content(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	content := object(snapshotContentKind)
	if err := c.client.Get(ctx, req.NamespacedName, content); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	snapshot := object(snapshotKind)
	of := client.ObjectKey{Namespace: text(content, "spec", "volumeSnapshotRef", "namespace"), Name: text(content, "spec", "volumeSnapshotRef", "name")}
	if !c.sim.owns(of.Namespace) {
		return ctrl.Result{}, nil
	}
	err := c.client.Get(ctx, of, snapshot)
	if err == nil || !apierrors.IsNotFound(err) || text(content, "spec", "deletionPolicy") != "Delete" {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	return ctrl.Result{}, client.IgnoreNotFound(c.client.Delete(ctx, content))
}

func contentOf(_ context.Context, o client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: "snapcontent-" + string(o.GetUID())}}}
}

// mounted tells whether a running pod uses a claim: only its node can grow the filesystem on it.
func (c *csi) mounted(ctx context.Context, pvc *corev1.PersistentVolumeClaim) (bool, error) {
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(pvc.Namespace)); err != nil {
		return false, err
	}
	for _, pod := range pods.Items {
		if pod.Status.StartTime != nil && mounts(&pod, pvc.Name) {
			return true, nil
		}
	}
	return false, nil
}

func mounts(pod *corev1.Pod, claim string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim
	})
}

func claimsOfUser(_ context.Context, o client.Object) []reconcile.Request {
	var list []reconcile.Request
	for _, v := range o.(*corev1.Pod).Spec.Volumes {
		if v.PersistentVolumeClaim != nil {
			list = append(list, reconcile.Request{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: v.PersistentVolumeClaim.ClaimName}})
		}
	}
	return list
}

// grow gives a bound claim the size that it asks for.
func (c *csi) grow(ctx context.Context, pvc *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	want, have := pvc.Spec.Resources.Requests[corev1.ResourceStorage], pvc.Status.Capacity[corev1.ResourceStorage]
	if pvc.Status.Phase != corev1.ClaimBound || have.IsZero() || want.Cmp(have) <= 0 || !ptr.Deref(class.AllowVolumeExpansion, false) {
		return nil
	}
	if volumeMode(pvc.Spec.VolumeMode) == corev1.PersistentVolumeFilesystem {
		if used, err := c.mounted(ctx, pvc); err != nil || !used {
			return err
		}
	}
	pv := &corev1.PersistentVolume{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: pvc.Spec.VolumeName}, pv); err != nil {
		return client.IgnoreNotFound(err)
	}
	old := pv.DeepCopy()
	pv.Spec.Capacity[corev1.ResourceStorage] = want
	if err := c.client.Patch(ctx, pv, client.MergeFrom(old)); err != nil {
		return fmt.Errorf("grow volume %s: %w", pv.Name, err)
	}
	oldClaim := pvc.DeepCopy()
	pvc.Status.Capacity[corev1.ResourceStorage] = want
	pvc.Status.Conditions = nil
	if err := c.client.Status().Patch(ctx, pvc, client.MergeFrom(oldClaim)); err != nil {
		return fmt.Errorf("grow claim %s: %w", key(pvc), err)
	}
	return nil
}

// volume deletes a released volume whose policy says so.
func (c *csi) volume(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pv := &corev1.PersistentVolume{}
	if err := c.client.Get(ctx, req.NamespacedName, pv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pv.Spec.ClaimRef == nil || !c.sim.owns(pv.Spec.ClaimRef.Namespace) {
		return ctrl.Result{}, nil
	}
	if pv.Status.Phase != corev1.VolumeReleased || pv.DeletionTimestamp != nil || pv.Spec.CSI == nil ||
		pv.Annotations[provisionedByAnnotation] != pv.Spec.CSI.Driver ||
		pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(c.client.Delete(ctx, pv, client.Preconditions{UID: &pv.UID}))
}

// driver registers the driver of a class. It needs no attaching, whatever the real one does: there is nothing to attach
// to, and the controller-manager would wait for it.
func (c *csi) driver(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	class := &storagev1.StorageClass{}
	if err := c.client.Get(ctx, req.NamespacedName, class); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	driver := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: class.Provisioner}, Spec: storagev1.CSIDriverSpec{AttachRequired: ptr.To(false)}}
	if inTree(class) || isTrue(class, noDriverKey) || c.client.Get(ctx, key(driver), &storagev1.CSIDriver{}) == nil {
		return ctrl.Result{}, nil
	}
	if err := c.client.Create(ctx, driver); client.IgnoreAlreadyExists(err) != nil {
		return ctrl.Result{}, fmt.Errorf("register driver of StorageClass %s: %w", class.Name, err)
	}
	return ctrl.Result{}, nil
}
