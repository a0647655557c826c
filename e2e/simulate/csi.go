package simulate

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	},
	setup: setupCSI,
}

// csi plays the CSI drivers of all StorageClasses: provisioner, resizer and the CSIDriver object. A volume is nothing
// but its PersistentVolume. Binding is the real controller-manager's work, WaitForFirstConsumer the real scheduler's.
type csi struct{ client client.Client }

func setupCSI(_ *Simulation, mgr manager.Manager) error {
	c := &csi{client: mgr.GetClient()}
	if err := ctrl.NewControllerManagedBy(mgr).Named("csi-claims").For(&corev1.PersistentVolumeClaim{}).
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(c.claimsOfClass)).
		Complete(reconcile.Func(c.claim)); err != nil {
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
		if source := volumeSource(pvc); source != "" {
			from := &corev1.PersistentVolumeClaim{}
			if err := c.client.Get(ctx, client.ObjectKey{Namespace: pvc.Namespace, Name: source}, from); err != nil {
				return ctrl.Result{}, fmt.Errorf("source of claim %s: %w", key(pvc), err)
			}
			pv.Spec.CSI.VolumeHandle = "clone-of-" + from.Spec.VolumeName + "-" + pv.Spec.CSI.VolumeHandle
		}
		if err := c.client.Create(ctx, pv); client.IgnoreAlreadyExists(err) != nil {
			return ctrl.Result{}, fmt.Errorf("provision claim %s: %w", key(pvc), err)
		}
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

// volumeSource is the claim that a claim is cloned from by the driver, "" for none.
func volumeSource(pvc *corev1.PersistentVolumeClaim) string {
	if s := pvc.Spec.DataSource; s != nil && s.Kind == "PersistentVolumeClaim" {
		return s.Name
	}
	return ""
}

// grow gives a bound claim the size that it asks for.
func (c *csi) grow(ctx context.Context, pvc *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	want, have := pvc.Spec.Resources.Requests[corev1.ResourceStorage], pvc.Status.Capacity[corev1.ResourceStorage]
	if pvc.Status.Phase != corev1.ClaimBound || have.IsZero() || want.Cmp(have) <= 0 || !ptr.Deref(class.AllowVolumeExpansion, false) {
		return nil
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
	if inTree(class) || c.client.Get(ctx, key(driver), &storagev1.CSIDriver{}) == nil {
		return ctrl.Result{}, nil
	}
	if err := c.client.Create(ctx, driver); client.IgnoreAlreadyExists(err) != nil {
		return ctrl.Result{}, fmt.Errorf("register driver of StorageClass %s: %w", class.Name, err)
	}
	return ctrl.Result{}, nil
}
