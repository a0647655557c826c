package simulate

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	helperOfKey  = "cdi.kubevirt.io/ownedByDataVolume" // annotation of helpers: <namespace>/<name> of the DataVolume
	ownedByLabel = "cdi.kubevirt.io/OwnedByUID"        // label of helpers: UID of the target claim
	cdiFinalizer = "cdi.kubevirt.io/dataVolumeFinalizer"
	podPhaseKey  = "cdi.kubevirt.io/storage.pod.phase"
)

var cdiStandIn = standIn{
	name: "cdi", namespace: "cdi", serviceAccount: "cdi-sa",
	rules: []rbacv1.PolicyRule{
		allow("cdi.kubevirt.io", []string{"datavolumes"}, "get", "list", "watch", "patch"),
		allow("cdi.kubevirt.io", []string{"datavolumes/status"}, "patch"),
		allow("cdi.kubevirt.io", []string{"cdis"}, "get", "list", "watch"),
		allow("cdi.kubevirt.io", []string{"cdiconfigs", "storageprofiles"}, "create"),
		allow("", []string{"persistentvolumeclaims", "pods"}, "get", "list", "watch", "create", "patch", "delete"),
		allow("", []string{"persistentvolumes"}, "get", "list", "watch", "patch"),
		allow("storage.k8s.io", []string{"storageclasses", "csidrivers"}, "get", "list", "watch"),
	},
	setup: setupCDI,
}

// cdi plays CDI's controller for DataVolumes with source.http and source.pvc. Nothing is transferred; its pods are real
// objects that the stand-in for kubelet completes. What it decides is in cdidecide.go.
type cdi struct{ client client.Client }

func setupCDI(_ *Simulation, mgr manager.Manager) error {
	c := &cdi{client: mgr.GetClient()}
	if err := mgr.Add(manager.RunnableFunc(c.configure)); err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(mgr).Named("cdi-profiles").For(&storagev1.StorageClass{}).
		Complete(reconcile.Func(c.profile)); err != nil {
		return err
	}
	helper := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetAnnotations()[helperOfKey] != "" })
	return ctrl.NewControllerManagedBy(mgr).Named("cdi").For(object(dataVolumeKind)).
		Owns(&corev1.PersistentVolumeClaim{}).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(helperToVolume)).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(c.waiting)).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(helperToVolume), builder.WithPredicates(helper)).
		Watches(object(dataVolumeKind), handler.EnqueueRequestsFromMapFunc(c.waiting)).
		Watches(&storagev1.StorageClass{}, handler.EnqueueRequestsFromMapFunc(c.waiting)).
		Watches(&storagev1.CSIDriver{}, handler.EnqueueRequestsFromMapFunc(nobody)).
		Watches(&corev1.PersistentVolume{}, handler.EnqueueRequestsFromMapFunc(nobody)).
		Watches(object(cdiKind), handler.EnqueueRequestsFromMapFunc(nobody)).
		Complete(c)
}

// nobody is the map of a kind that is only read: its watch fills the cache.
func nobody(context.Context, client.Object) []reconcile.Request { return nil }

func helperToVolume(_ context.Context, o client.Object) []reconcile.Request {
	namespace, name, ok := strings.Cut(o.GetAnnotations()[helperOfKey], "/")
	if !ok {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}}}
}

// waiting lists the DataVolumes that a new StorageClass or a changed source claim may let go on.
func (c *cdi) waiting(ctx context.Context, changed client.Object) []reconcile.Request {
	list := objectList(dataVolumeKind)
	if err := c.client.List(ctx, list); err != nil {
		return nil // the cache ends with the run
	}
	var requests []reconcile.Request
	for i := range list.Items {
		dv := &list.Items[i]
		if text(dv, "status", "phase") == "Succeeded" {
			continue
		}
		if _, class := changed.(*storagev1.StorageClass); class || sourceKey(dv) == key(changed) {
			requests = append(requests, reconcile.Request{NamespacedName: key(dv)})
		}
	}
	return requests
}

// sourceKey is the claim that a DataVolume clones, empty for an import.
func sourceKey(dv *unstructured.Unstructured) client.ObjectKey {
	if !isClone(dv) {
		return client.ObjectKey{}
	}
	k := client.ObjectKey{Namespace: text(dv, "spec", "source", "pvc", "namespace"), Name: text(dv, "spec", "source", "pvc", "name")}
	if k.Namespace == "" {
		k.Namespace = dv.GetNamespace()
	}
	return k
}

// Reconcile implements reconcile.Reconciler for DataVolumes.
func (c *cdi) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	dv := object(dataVolumeKind)
	if err := c.client.Get(ctx, req.NamespacedName, dv); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err := c.client.Get(ctx, req.NamespacedName, pvc)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return ctrl.Result{}, err
	case dv.GetDeletionTimestamp() != nil, text(dv, "status", "phase") == "Succeeded":
		return ctrl.Result{}, c.tidy(ctx, dv, pvc)
	case err != nil:
		return ctrl.Result{}, c.makeClaim(ctx, dv)
	case !metav1.IsControlledBy(pvc, dv):
		return ctrl.Result{}, c.adopt(ctx, dv, pvc)
	}
	return ctrl.Result{}, c.populate(ctx, dv, pvc)
}

// makeClaim decides about the DataVolume, writes the decision down and makes the target claim.
func (c *cdi) makeClaim(ctx context.Context, dv *unstructured.Unstructured) error {
	s, err := c.look(ctx, dv)
	if err != nil {
		return err
	}
	d := decide(s)
	if d.Refusal != "" {
		return c.report(ctx, dv, text(dv, "status", "phase"), verdict{bound: "False", boundReason: d.Refusal, boundMessage: d.Message, readyReason: d.Refusal})
	}
	old := dv.DeepCopy()
	annotations := dv.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[usePopulatorKey] = fmt.Sprint(d.Populator)
	if d.Strategy != "" {
		annotations[cloneTypeKey] = d.Strategy
	}
	dv.SetAnnotations(annotations)
	if isClone(dv) && d.Populator && sourceKey(dv).Namespace != dv.GetNamespace() {
		controllerutil.AddFinalizer(dv, cdiFinalizer) // helpers in another namespace have no owner
	}
	if err := c.client.Patch(ctx, dv, client.MergeFrom(old)); err != nil {
		return fmt.Errorf("write decision to DataVolume %s: %w", key(dv), err)
	}
	pvc := targetClaim(dv, d)
	if err := controllerutil.SetControllerReference(dv, pvc, scheme); err != nil {
		return err
	}
	if err := c.client.Create(ctx, pvc); client.IgnoreAlreadyExists(err) != nil {
		refused := verdict{bound: "False", boundReason: "ErrExceededQuota", boundMessage: err.Error(), readyReason: "ErrExceededQuota"}
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("create claim of DataVolume %s: %w", key(dv), err)
		}
		if err := c.report(ctx, dv, "Pending", refused); err != nil {
			return err
		}
		return fmt.Errorf("create claim of DataVolume %s: %w", key(dv), err) // retried, with growing pauses
	}
	return nil
}

// look collects what a decision depends on.
func (c *cdi) look(ctx context.Context, dv *unstructured.Unstructured) (situation, error) {
	s := situation{Volume: dv}
	var classes storagev1.StorageClassList
	if err := c.client.List(ctx, &classes); err != nil {
		return s, err
	}
	if s.Class = resolveClass(dv, classes.Items); s.Class != nil {
		err := c.client.Get(ctx, client.ObjectKey{Name: s.Class.Provisioner}, &storagev1.CSIDriver{})
		if client.IgnoreNotFound(err) != nil {
			return s, err
		}
		s.CSIDriver = err == nil
	}
	platform := objectList(cdiKind)
	if err := c.client.List(ctx, platform); err != nil {
		return s, err
	}
	for i := range platform.Items {
		s.Override = text(&platform.Items[i], "spec", "cloneStrategyOverride")
	}
	if !isClone(dv) {
		return s, nil
	}
	source := &corev1.PersistentVolumeClaim{}
	if err := c.client.Get(ctx, sourceKey(dv), source); err != nil {
		return s, client.IgnoreNotFound(err)
	}
	s.Source = source
	for i := range classes.Items { // what counts until there is a volume
		if classes.Items[i].Name == ptr.Deref(source.Spec.StorageClassName, "") {
			s.SourceDriver = classes.Items[i].Provisioner
		}
	}
	if source.Spec.VolumeName == "" {
		return s, nil
	}
	pv := &corev1.PersistentVolume{}
	err := c.client.Get(ctx, client.ObjectKey{Name: source.Spec.VolumeName}, pv)
	if err == nil && pv.Spec.CSI != nil {
		s.SourceDriver = pv.Spec.CSI.Driver
	}
	return s, client.IgnoreNotFound(err)
}

// targetClaim is the claim of a DataVolume, marked as CDI marks it.
func targetClaim(dv *unstructured.Unstructured, d decision) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: dv.GetNamespace(), Name: dv.GetName(), Annotations: maps.Clone(dv.GetAnnotations()), Labels: map[string]string{
			"app": "containerized-data-importer", "app.kubernetes.io/component": "storage", "app.kubernetes.io/managed-by": "cdi-controller"}},
		Spec: d.Claim,
	}
	maps.Copy(pvc.Labels, dv.GetLabels())
	if volumeMode(d.Claim.VolumeMode) == corev1.PersistentVolumeFilesystem {
		pvc.Labels["alerts.k8s.io/KubePersistentVolumeFillingUp"] = "disabled"
	}
	maps.Copy(pvc.Annotations, map[string]string{
		"cdi.kubevirt.io/storage.contentType":             "kubevirt",
		"cdi.kubevirt.io/storage.pod.restarts":            "0",
		"cdi.kubevirt.io/storage.preallocation.requested": "false",
		"cdi.kubevirt.io/createdForDataVolume":            string(dv.GetUID()),
	})
	source, kind := sourceKey(dv), "VolumeImportSource"
	switch {
	case isClone(dv):
		kind = "VolumeCloneSource"
		pvc.Annotations[cloneTypeKey] = d.Strategy
		if d.Fallback != "" {
			pvc.Annotations[cloneFallbackKey] = d.Fallback
		}
		if !d.Populator {
			pvc.Annotations["k8s.io/CloneRequest"] = source.String()
		}
		if d.Populator && source.Namespace != dv.GetNamespace() {
			pvc.Annotations["cdi.kubevirt.io/dataSourceNamespace"] = source.Namespace
		}
	case !d.Populator:
		pvc.Annotations["cdi.kubevirt.io/storage.import.source"] = "http"
		pvc.Annotations["cdi.kubevirt.io/storage.import.endpoint"] = text(dv, "spec", "source", "http", "url")
	}
	if d.Populator {
		name := map[string]string{"VolumeImportSource": "volume-import-source-", "VolumeCloneSource": "volume-clone-source-"}[kind]
		pvc.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: ptr.To(dataVolumeKind.Group), Kind: kind, Name: name + string(dv.GetUID())}
	}
	return pvc
}

// adopt takes a claim of the same name that somebody else made, if the DataVolume allows it, whatever it holds.
func (c *cdi) adopt(ctx context.Context, dv *unstructured.Unstructured, pvc *corev1.PersistentVolumeClaim) error {
	if dv.GetAnnotations()[allowAdoptionKey] != "true" {
		return c.report(ctx, dv, text(dv, "status", "phase"), verdict{bound: "False", boundReason: "ErrResourceExists",
			boundMessage: fmt.Sprintf("Resource %q already exists and is not managed by DataVolume", pvc.Name), readyReason: "ErrResourceExists"})
	}
	return c.report(ctx, dv, "Succeeded", verdict{bound: boundStatus(pvc), boundReason: string(pvc.Status.Phase), ready: true, progress: "N/A"})
}

// populate brings the target claim's data there, one step for each call.
func (c *cdi) populate(ctx context.Context, dv *unstructured.Unstructured, pvc *corev1.PersistentVolumeClaim) error {
	class := &storagev1.StorageClass{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: ptr.Deref(pvc.Spec.StorageClassName, "")}, class); client.IgnoreNotFound(err) != nil {
		return err
	}
	_, immediate := pvc.Annotations[bindImmediateKey] // presence counts, the value does not
	s := seen{
		Clone: isClone(dv), Strategy: pvc.Annotations[cloneTypeKey], Populator: dv.GetAnnotations()[usePopulatorKey] == "true",
		ClaimBound: pvc.Status.Phase == corev1.ClaimBound, WorkBound: pvc.Status.Phase == corev1.ClaimBound,
	}
	s.Waits = waits(class) && !s.ClaimBound && !immediate && pvc.Annotations[selectedNodeAnnotation] == ""
	h := helpersFor(dv, pvc, s, waits(class))
	s.PodNeeded = len(h.pods) > 0
	switch {
	case s.Waits:
	case s.Populator && s.ClaimBound:
		s.Pod = corev1.PodSucceeded
	default:
		if there, err := c.sourceThere(ctx, dv); err != nil {
			return err
		} else if !there {
			return c.report(ctx, dv, "CloneScheduled", verdictOf("CloneScheduled", s, pvc))
		}
		work, err := c.ensureWork(ctx, pvc, h)
		if err != nil {
			return err
		}
		// A temporary claim that was rebound is Lost; its volume is on its way to the target.
		s.WorkBound = work.Status.Phase == corev1.ClaimBound || work.Status.Phase == corev1.ClaimLost
		if s.Pod = corev1.PodSucceeded; pvc.Annotations[podPhaseKey] == string(corev1.PodSucceeded) {
			break // moved before; the pods may be gone
		}
		if s.Pod = ""; !s.WorkBound && !waits(class) {
			break // its event comes back
		}
		if s.Pod, err = c.ensurePods(ctx, h); err != nil {
			return err
		}
	}
	// Not between the volume's creation and its binding: the controller-manager, refused because of our write, would try
	// again only after 15 s.
	if s.PodNeeded && s.Pod != "" && pvc.Annotations[podPhaseKey] != string(s.Pod) && (s.ClaimBound || s.Populator) {
		old := pvc.DeepCopy()
		pvc.Annotations[podPhaseKey] = string(s.Pod)
		if err := c.client.Patch(ctx, pvc, client.MergeFrom(old)); err != nil {
			return fmt.Errorf("annotate claim %s: %w", key(pvc), err)
		}
	}
	phase := nextPhase(s)
	if phase == "RebindInProgress" {
		if err := c.rebind(ctx, h.work, pvc); err != nil {
			return err
		}
	}
	return c.report(ctx, dv, phase, verdictOf(phase, s, pvc))
}

// sourceThere tells whether what is cloned is complete: its claim bound, its own DataVolume done.
func (c *cdi) sourceThere(ctx context.Context, dv *unstructured.Unstructured) (bool, error) {
	if !isClone(dv) {
		return true, nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	if err := c.client.Get(ctx, sourceKey(dv), claim); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	source := object(dataVolumeKind)
	switch err := c.client.Get(ctx, sourceKey(dv), source); {
	case apierrors.IsNotFound(err):
		return claim.Status.Phase == corev1.ClaimBound, nil
	case err != nil:
		return false, err
	}
	return claim.Status.Phase == corev1.ClaimBound && text(source, "status", "phase") == "Succeeded", nil
}

// helpers are what CDI makes beside the target claim.
type helpers struct {
	work *corev1.PersistentVolumeClaim // written to; the target itself when nil
	pods []*corev1.Pod
}

// helpersFor is the helpers of a DataVolume as its decision asks for them.
func helpersFor(dv *unstructured.Unstructured, pvc *corev1.PersistentVolumeClaim, s seen, consumer bool) helpers {
	var h helpers
	source := sourceKey(dv)
	target, targetNamespace := pvc.Name, pvc.Namespace // where the data is written first
	if s.Populator {
		target = "prime-" + string(pvc.UID)
		if s.Clone {
			target, targetNamespace = "tmp-pvc-"+string(pvc.UID), source.Namespace
		}
		h.work = &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: targetNamespace, Name: target,
			Annotations: map[string]string{bindImmediateKey: ""}}}
		h.work.Spec = *pvc.Spec.DeepCopy()
		h.work.Spec.DataSource, h.work.Spec.DataSourceRef, h.work.Spec.VolumeName = nil, nil, ""
		if s.Clone && s.Strategy != strategyCopy {
			h.work.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source.Name}
		}
		mark(h.work, dv, pvc)
	}
	add := func(namespace, name, kind, claim string) {
		pod := mover(namespace, name, kind, claim, volumeMode(pvc.Spec.VolumeMode))
		mark(pod, dv, pvc)
		h.pods = append(h.pods, pod)
	}
	switch {
	case !s.Clone && s.Populator:
		add(targetNamespace, "importer-prime-"+string(pvc.UID), "importer", target)
	case !s.Clone:
		add(targetNamespace, "importer-"+dv.GetName(), "importer", target)
	case s.Strategy == strategyCopy:
		add(targetNamespace, "cdi-upload-"+target, "cdi-upload-server", target)
		add(source.Namespace, string(pvc.UID)+"-source-pod", "cdi-clone-source", source.Name)
	case consumer:
		add(targetNamespace, "prep-"+string(pvc.UID), "cdi-populator-prep", target) // a claim nobody uses is not provisioned
	}
	return h
}

// mark ties a helper to its DataVolume: by owner where that is possible, by label for its removal, by annotation for
// the way back.
func mark(o client.Object, dv *unstructured.Unstructured, pvc *corev1.PersistentVolumeClaim) {
	labels, annotations := o.GetLabels(), o.GetAnnotations()
	if labels == nil {
		labels = map[string]string{}
	}
	if annotations == nil {
		annotations = map[string]string{}
	}
	labels["app"], labels[ownedByLabel] = "containerized-data-importer", string(pvc.UID)
	annotations[helperOfKey] = key(dv).String()
	o.SetLabels(labels)
	o.SetAnnotations(annotations)
	if o.GetNamespace() == pvc.Namespace {
		o.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(pvc, corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"))})
	}
}

// mover is a pod of CDI's that works on a claim.
func mover(namespace, name, kind, claim string, mode corev1.PersistentVolumeMode) *corev1.Pod {
	c := corev1.Container{Name: kind, Image: "cdi/" + kind, Resources: corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("60M")},
		Limits:   corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("750m"), corev1.ResourceMemory: resource.MustParse("600M")}},
		SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](107),
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
	}
	if mode == corev1.PersistentVolumeBlock {
		c.VolumeDevices = []corev1.VolumeDevice{{Name: "data", DevicePath: "/dev/cdi-block-volume"}}
	} else {
		c.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{cdiPodLabel: kind}},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{c}, RestartPolicy: corev1.RestartPolicyOnFailure, AutomountServiceAccountToken: ptr.To(false),
			Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
		},
	}
}

// ensureWork returns the claim that is written to, made when missing.
func (c *cdi) ensureWork(ctx context.Context, target *corev1.PersistentVolumeClaim, h helpers) (*corev1.PersistentVolumeClaim, error) {
	if h.work == nil {
		return target, nil
	}
	work := &corev1.PersistentVolumeClaim{}
	err := c.client.Get(ctx, key(h.work), work)
	if apierrors.IsNotFound(err) {
		work = h.work.DeepCopy()
		err = client.IgnoreAlreadyExists(c.client.Create(ctx, work))
	}
	if err != nil {
		return nil, fmt.Errorf("temporary claim %s: %w", key(h.work), err)
	}
	return work, nil
}

// ensurePods makes missing pods and returns the phase of the one that is least far, "" while one was missing.
func (c *cdi) ensurePods(ctx context.Context, h helpers) (corev1.PodPhase, error) {
	least := corev1.PodSucceeded
	for _, want := range h.pods {
		pod := &corev1.Pod{}
		err := c.client.Get(ctx, key(want), pod)
		if apierrors.IsNotFound(err) {
			pod = want.DeepCopy()
			err = client.IgnoreAlreadyExists(c.client.Create(ctx, pod))
		}
		if err != nil {
			return "", fmt.Errorf("pod %s: %w", key(want), err)
		}
		switch {
		case pod.Status.Phase == corev1.PodSucceeded:
		case pod.Status.Phase == corev1.PodRunning && least != corev1.PodPending:
			least = corev1.PodRunning
		default:
			least = corev1.PodPending
		}
	}
	return least, nil
}

// rebind gives the temporary claim's volume to the target.
func (c *cdi) rebind(ctx context.Context, work, target *corev1.PersistentVolumeClaim) error {
	bound := &corev1.PersistentVolumeClaim{}
	if err := c.client.Get(ctx, key(work), bound); err != nil {
		return client.IgnoreNotFound(err)
	}
	pv := &corev1.PersistentVolume{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: bound.Spec.VolumeName}, pv); err != nil {
		return fmt.Errorf("volume of claim %s: %w", key(work), err)
	}
	if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == target.UID {
		return nil
	}
	old := pv.DeepCopy()
	pv.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: target.Namespace,
		Name: target.Name, UID: target.UID, ResourceVersion: target.ResourceVersion}
	if err := c.client.Patch(ctx, pv, client.MergeFrom(old)); err != nil {
		return fmt.Errorf("rebind volume %s to claim %s: %w", pv.Name, key(target), err)
	}
	return nil
}

// tidy removes the helpers of a DataVolume that is done or deleted.
func (c *cdi) tidy(ctx context.Context, dv *unstructured.Unstructured, pvc *corev1.PersistentVolumeClaim) error {
	if pvc.UID != "" {
		var pods corev1.PodList
		var claims corev1.PersistentVolumeClaimList
		if err := c.client.List(ctx, &pods, client.MatchingLabels{ownedByLabel: string(pvc.UID)}); err != nil {
			return err
		}
		if err := c.client.List(ctx, &claims, client.MatchingLabels{ownedByLabel: string(pvc.UID)}); err != nil {
			return err
		}
		var list []client.Object
		for i := range pods.Items {
			list = append(list, &pods.Items[i])
		}
		for i := range claims.Items {
			list = append(list, &claims.Items[i])
		}
		for _, o := range list {
			if o.GetDeletionTimestamp() != nil {
				continue
			}
			if err := c.client.Delete(ctx, o); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete helper %s of DataVolume %s: %w", key(o), key(dv), err)
			}
		}
	}
	if !controllerutil.ContainsFinalizer(dv, cdiFinalizer) {
		return nil
	}
	old := dv.DeepCopy()
	controllerutil.RemoveFinalizer(dv, cdiFinalizer)
	return client.IgnoreNotFound(c.client.Patch(ctx, dv, client.MergeFrom(old)))
}

// verdict is the conditions of a DataVolume.
type verdict struct {
	bound, boundReason, boundMessage string
	ready                            bool
	readyReason                      string
	running                          bool
	runningReason, runningMessage    string
	progress                         string
}

func boundStatus(pvc *corev1.PersistentVolumeClaim) string {
	if pvc.Status.Phase == corev1.ClaimBound {
		return "True"
	}
	return "False"
}

// verdictOf is the conditions that go with a phase.
func verdictOf(phase string, s seen, pvc *corev1.PersistentVolumeClaim) verdict {
	v := verdict{bound: boundStatus(pvc), boundReason: "Pending", boundMessage: fmt.Sprintf("PVC %s Pending", pvc.Name), progress: "N/A"}
	if s.ClaimBound {
		v.boundReason, v.boundMessage = "Bound", fmt.Sprintf("PVC %s Bound", pvc.Name)
	}
	what := map[bool]string{true: "Clone Complete", false: "Import Complete"}[s.Clone]
	switch {
	case phase == "Succeeded":
		v.ready, v.progress = true, "100.0%"
		v.runningReason, v.runningMessage = "Completed", what
	case s.Pod == corev1.PodRunning:
		v.running, v.runningReason, v.readyReason = true, "Pod is running", "TransferRunning"
	case s.Pod == corev1.PodPending:
		v.runningReason = "ContainerCreating"
	}
	return v
}

// report writes phase and conditions unless they are there already.
func (c *cdi) report(ctx context.Context, dv *unstructured.Unstructured, phase string, v verdict) error {
	old := dv.DeepCopy()
	now := time.Now()
	conditions, _, _ := unstructured.NestedSlice(dv.Object, "status", "conditions")
	status := map[bool]string{true: "True", false: "False"}
	for _, cond := range []map[string]any{
		{"type": "Bound", "status": v.bound, "reason": v.boundReason, "message": v.boundMessage},
		{"type": "Ready", "status": status[v.ready], "reason": v.readyReason},
		{"type": "Running", "status": status[v.running], "reason": v.runningReason, "message": v.runningMessage},
	} {
		before := condition(old, cond["type"].(string))
		if before != nil && before["status"] == cond["status"] && before["reason"] == cond["reason"] {
			continue
		}
		cond["lastHeartbeatTime"] = stamp(now)
		conditions = setCondition(conditions, cond, now)
	}
	set(dv, conditions, "status", "conditions")
	set(dv, phase, "status", "phase")
	set(dv, dv.GetName(), "status", "claimName")
	if v.progress != "" {
		set(dv, v.progress, "status", "progress")
	}
	patch := client.MergeFrom(old)
	if data, err := patch.Data(dv); err == nil && string(data) == "{}" {
		return nil
	}
	if err := c.client.Status().Patch(ctx, dv, patch); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report phase %s of DataVolume %s: %w", phase, key(dv), err)
	}
	return nil
}

// configure makes the CDIConfig that KubeVirt reads the filesystem overhead from.
func (c *cdi) configure(ctx context.Context) error {
	config := object(cdiConfigKind)
	config.SetName("config")
	set(config, map[string]any{}, "spec")
	set(config, map[string]any{"filesystemOverhead": map[string]any{"global": fmt.Sprint(filesystemOverhead)}}, "status")
	if err := c.client.Create(ctx, config); client.IgnoreAlreadyExists(err) != nil {
		return fmt.Errorf("create CDIConfig: %w", err)
	}
	return nil
}

// profile makes the StorageProfile of a class.
func (c *cdi) profile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	class := &storagev1.StorageClass{}
	if err := c.client.Get(ctx, req.NamespacedName, class); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	profile := object(profileKind)
	profile.SetName(class.Name)
	var sets []any
	for _, s := range claimSets(class.Provisioner) {
		sets = append(sets, map[string]any{"accessModes": []any{string(s.Access)}, "volumeMode": string(s.Mode)})
	}
	set(profile, map[string]any{}, "spec")
	set(profile, map[string]any{"storageClass": class.Name, "provisioner": class.Provisioner,
		"cloneStrategy": profileStrategy(class), "claimPropertySets": sets}, "status")
	if err := c.client.Create(ctx, profile); client.IgnoreAlreadyExists(err) != nil {
		return ctrl.Result{}, fmt.Errorf("create StorageProfile %s: %w", class.Name, err)
	}
	return ctrl.Result{}, nil
}
