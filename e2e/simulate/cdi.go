package simulate

import (
	"context"
	"fmt"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Names that CDI writes and reads.
const (
	cdiGroup    = "cdi.kubevirt.io"
	cdiPodLabel = "cdi.kubevirt.io"

	usePopulatorKey    = "cdi.kubevirt.io/storage.usePopulator"
	bindImmediateKey   = "cdi.kubevirt.io/storage.bind.immediate.requested"
	allowAdoptionKey   = "cdi.kubevirt.io/allowClaimAdoption"
	populatedForKey    = "cdi.kubevirt.io/storage.populatedFor"
	prePopulatedKey    = "cdi.kubevirt.io/storage.prePopulated"
	staticVolumeKey    = "cdi.kubevirt.io/storage.checkStaticVolume"
	createdForKey      = "cdi.kubevirt.io/createdForDataVolume"
	contentTypeKey     = "cdi.kubevirt.io/storage.contentType"
	preallocationKey   = "cdi.kubevirt.io/storage.preallocation.requested"
	retainPodKey       = "cdi.kubevirt.io/storage.pod.retainAfterCompletion"
	priorityClassKey   = "cdi.kubevirt.io/storage.pod.priorityclassname"
	permissiveCloneKey = "cdi.kubevirt.io/permissiveClone"
	sourceNamespaceKey = "cdi.kubevirt.io/dataSourceNamespace"
	helperOfKey        = "cdi.kubevirt.io/ownedByDataVolume" // annotation of helpers: <namespace>/<name> of the DataVolume
	ownedByLabel       = "cdi.kubevirt.io/OwnedByUID"        // label of helpers: UID of the target claim
	ownerUIDKey        = "cdi.kubevirt.io/ownerUID"
	populatorKindKey   = "cdi.kubevirt.io/storage.populator.kind"
	eventSourceKindKey = "cdi.kubevirt.io/events.source.kind"
	eventSourceKey     = "cdi.kubevirt.io/events.source"
	primeNameKey       = "cdi.kubevirt.io/storage.populator.pvcPrime"
	progressKey        = "cdi.kubevirt.io/storage.populator.progress"

	cloneTypeKey     = "cdi.kubevirt.io/cloneType"
	cloneFallbackKey = "cdi.kubevirt.io/cloneFallbackReason"
	clonePhaseKey    = "cdi.kubevirt.io/clonePhase"
	cloneErrorKey    = "cdi.kubevirt.io/cloneError"
	cloneRequestKey  = "k8s.io/CloneRequest"
	cloneOfKey       = "k8s.io/CloneOf"

	podPhaseKey       = "cdi.kubevirt.io/storage.pod.phase"
	podReadyKey       = "cdi.kubevirt.io/storage.pod.ready"
	podRestartsKey    = "cdi.kubevirt.io/storage.pod.restarts"
	podSchedulableKey = "cdi.kubevirt.io/storage.pod.schedulable"
	importPodKey      = "cdi.kubevirt.io/storage.import.importPodName"
	importSourceKey   = "cdi.kubevirt.io/storage.import.source"
	endpointKey       = "cdi.kubevirt.io/storage.import.endpoint"
	scratchKey        = "cdi.kubevirt.io/storage.import.requiresScratch"
	uploadPodKey      = "cdi.kubevirt.io/storage.uploadPodName"
	uploadClientKey   = "cdi.kubevirt.io/uploadClientName"
	sourcePodKey      = "cdi.kubevirt.io/storage.sourceClonePodName"
	ownerRefKey       = "cdi.kubevirt.io/storage.ownerRef" // of a source pod: <namespace>/<name> of the target claim
	runningKey        = "cdi.kubevirt.io/storage.condition.running"
	sourceRunningKey  = "cdi.kubevirt.io/storage.condition.source.running"
	boundKey          = "cdi.kubevirt.io/storage.condition.bound"

	cdiFinalizer       = "cdi.kubevirt.io/dataVolumeFinalizer"
	populatorFinalizer = "cdi.kubevirt.io/clonePopulator"
	sourcePodFinalizer = "cdi.kubevirt.io/cloneSource"

	defaultClassKey         = "storageclass.kubernetes.io/is-default-class"
	virtDefaultClassKey     = "storageclass.kubevirt.io/is-default-virt-class"
	cloneStrategyClassKey   = "cdi.kubevirt.io/clone-strategy"
	minimumSizeKey          = "cdi.kubevirt.io/minimumSupportedPvcSize"
	defaultSnapshotClassKey = "snapshot.storage.kubernetes.io/is-default-class"

	strategyCSI      = "csi-clone"
	strategySnapshot = "snapshot"
	strategyCopy     = "copy"

	importSourceRef = "VolumeImportSource"
	cloneSourceRef  = "VolumeCloneSource"
	claimKindName   = "PersistentVolumeClaim"
	snapshotName    = "VolumeSnapshot"
)

// CDI's controllers, by the names that they write events under.
const (
	importController        = "datavolume-import-controller"
	pvcCloneController      = "datavolume-pvc-clone-controller"
	snapshotCloneController = "datavolume-snapshot-clone-controller"
	clonePopulator          = "clone-populator"
	importPopulator         = "import-populator"
	importerController      = "import-controller"
	uploadController        = "upload-controller"
	cloneController         = "clone-controller"
	profileController       = "storageprofile-controller"
)

var cdiStandIn = standIn{
	name: "cdi", namespace: "cdi", serviceAccount: "cdi-sa",
	rules: []rbacv1.PolicyRule{
		allow(cdiGroup, []string{"datavolumes", "volumeclonesources", "volumeimportsources", "cdiconfigs", "storageprofiles"},
			"get", "list", "watch", "create", "patch", "delete"),
		allow(cdiGroup, []string{"datavolumes/status", "datavolumes/finalizers", "storageprofiles/status"}, "patch", "update"),
		allow(cdiGroup, []string{"cdis", "datasources"}, "get", "list", "watch"),
		allow("", []string{"persistentvolumeclaims", "pods"}, "get", "list", "watch", "create", "patch", "delete"),
		allow("", []string{"persistentvolumeclaims/finalizers", "pods/finalizers"}, "update"),
		allow("", []string{"persistentvolumes"}, "get", "list", "watch", "patch"),
		allow("", []string{"services"}, "get", "create", "delete"),
		allow("", []string{"secrets"}, "get", "create"),
		allow("", []string{"namespaces"}, "get"),
		allow("", []string{"events"}, "get", "list", "watch", "create", "patch"),
		allow("storage.k8s.io", []string{"storageclasses", "csidrivers"}, "get", "list", "watch"),
		allow("snapshot.storage.k8s.io", []string{"volumesnapshots"}, "get", "list", "watch", "create", "delete"),
		allow("snapshot.storage.k8s.io", []string{"volumesnapshotclasses", "volumesnapshotcontents"}, "get", "list", "watch"),
		allow("authorization.k8s.io", []string{"subjectaccessreviews"}, "create"),
		allow("admissionregistration.k8s.io", []string{"mutatingwebhookconfigurations", "validatingwebhookconfigurations"}, "create", "patch"),
	},
	setup: setupCDI,
}

// cdi plays CDI's controllers and webhooks: DataVolumes (cdivolume.go, cdistatus.go), the clone and import populators
// (cdiclone.go, cdiimport.go), host-assisted copies (cdicopy.go), StorageProfiles (cdiprofile.go), admission
// (cdiadmission.go). As in CDI they are independent and talk through annotations of claims; what they settle is in
// cdidecide.go. Nothing is transferred: the pods are real objects that the stand-in for kubelet completes.
type cdi struct {
	client client.Client
	reader client.Reader // past the cache, for kinds that are not watched
	sim    *Simulation
	keys   tokenKeys
	clock  *seenClaims
	events map[string]record.EventRecorder
}

func setupCDI(s *Simulation, mgr manager.Manager) error {
	c := &cdi{client: mgr.GetClient(), reader: mgr.GetAPIReader(), sim: s, clock: &seenClaims{}, events: map[string]record.EventRecorder{}}
	for _, name := range []string{importController, pvcCloneController, snapshotCloneController, clonePopulator, importPopulator,
		importerController, uploadController, cloneController, profileController} {
		c.events[name] = newRecorder(mgr.GetClient(), mgr.GetLogger(), name)
	}
	if err := mgr.Add(&cdiServer{cdi: c, config: mgr.GetConfig()}); err != nil {
		return err
	}
	claims, pods := &corev1.PersistentVolumeClaim{}, &corev1.Pod{}
	for _, b := range []struct {
		name      string
		reconcile reconcile.Func
		watch     map[client.Object]handler.MapFunc
	}{
		{"cdi-profiles", c.profile, map[client.Object]handler.MapFunc{
			&storagev1.StorageClass{}: itself, object(profileKind): itself, object(snapshotClassKind): c.allClasses, object(cdiKind): c.allClasses}},
		{"cdi-volumes", c.reconcileVolume, map[client.Object]handler.MapFunc{
			object(dataVolumeKind): itself, claims: c.volumesOfClaim, pods: volumesOfHelper, object(snapshotKind): c.volumesOfSource,
			object(dataSourceKind): c.volumesWithoutClaim, &storagev1.StorageClass{}: c.volumesWithoutClaim, object(profileKind): c.volumesWithoutClaim,
			object(cloneSourceKind): volumesOfHelper, object(importSourceKind): volumesOfHelper}},
		{"cdi-clone-populator", c.reconcileClone, map[client.Object]handler.MapFunc{
			claims: c.clonesOfClaim, pods: c.clonesOfHelper, object(snapshotKind): c.clonesOfHelper, object(cloneSourceKind): c.clonesOfSource}},
		{"cdi-import-populator", c.reconcileImport, map[client.Object]handler.MapFunc{
			claims: importsOfClaim, object(importSourceKind): c.importsOfSource, &corev1.Event{}: importsOfEvent}},
		{"cdi-importer", c.reconcileImporter, map[client.Object]handler.MapFunc{claims: itself, pods: claimsOfPod}},
		{"cdi-upload", c.reconcileUpload, map[client.Object]handler.MapFunc{claims: itself, pods: claimsOfPod}},
		{"cdi-clone", c.reconcileCopy, map[client.Object]handler.MapFunc{claims: itself, pods: targetsOfSourcePod}},
	} {
		controller := ctrl.NewControllerManagedBy(mgr).Named(b.name)
		for kind, f := range b.watch {
			controller = controller.Watches(kind, handler.EnqueueRequestsFromMapFunc(f))
		}
		if b.name == "cdi-profiles" { // kinds that are only read: their watch fills the cache
			for _, kind := range []client.Object{&storagev1.CSIDriver{}, &corev1.PersistentVolume{}, object(cdiConfigKind), object(snapshotContentKind)} {
				controller = controller.Watches(kind, handler.EnqueueRequestsFromMapFunc(nobody))
			}
		}
		if err := controller.Complete(s.own(b.reconcile)); err != nil {
			return err
		}
	}
	return nil
}

// nobody is the map of a kind that is only read.
func nobody(context.Context, client.Object) []reconcile.Request { return nil }

func itself(_ context.Context, o client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: key(o)}}
}

// requestFor is the request for an object named <namespace>/<name>, none for anything else.
func requestFor(name string) []reconcile.Request {
	namespace, name, ok := strings.Cut(name, "/")
	if !ok {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: namespace, Name: name}}}
}

// controllerOf is the request for the owner of a kind.
func controllerOf(o client.Object, kind string) []reconcile.Request {
	owner := metav1.GetControllerOf(o)
	if owner == nil || owner.Kind != kind {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: owner.Name}}}
}

func volumesOfHelper(_ context.Context, o client.Object) []reconcile.Request {
	return append(controllerOf(o, dataVolumeKind.Kind), requestFor(o.GetAnnotations()[helperOfKey])...)
}

func (c *cdi) volumesOfClaim(ctx context.Context, o client.Object) []reconcile.Request {
	list := volumesOfHelper(ctx, o)
	if name := o.GetAnnotations()[populatedForKey]; name != "" {
		list = append(list, reconcile.Request{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: name}})
	}
	return append(list, c.volumesOfSource(ctx, o)...)
}

// volumesOfSource lists the DataVolumes that clone a claim or snapshot.
func (c *cdi) volumesOfSource(ctx context.Context, o client.Object) []reconcile.Request {
	return c.volumes(ctx, func(v *volume) bool { return v.clone.ObjectKey == key(o) })
}

// volumesWithoutClaim lists the DataVolumes that a class, a profile or a DataSource may let go on.
func (c *cdi) volumesWithoutClaim(ctx context.Context, _ client.Object) []reconcile.Request {
	return c.volumes(ctx, func(v *volume) bool { return text(v.Unstructured, "status", "phase") == "" })
}

func (c *cdi) volumes(ctx context.Context, match func(*volume) bool) []reconcile.Request {
	list := objectList(dataVolumeKind)
	if err := c.client.List(ctx, list); err != nil {
		return nil // the cache ends with the run
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if v, err := c.read(ctx, &list.Items[i]); err == nil && v != nil && match(v) {
			requests = append(requests, reconcile.Request{NamespacedName: key(v)})
		}
	}
	return requests
}

// annotations returns those of an object, never nil, so that they can be written to.
func annotations(o client.Object) map[string]string {
	a := o.GetAnnotations()
	if a == nil {
		a = map[string]string{}
		o.SetAnnotations(a)
	}
	return a
}

// annotate writes one annotation. An unstructured object hands out copies of its maps.
func annotate(o client.Object, k, v string) {
	a := maps.Clone(annotations(o))
	if a == nil {
		a = map[string]string{}
	}
	a[k] = v
	o.SetAnnotations(a)
}

func isTrue(o client.Object, k string) bool { return o.GetAnnotations()[k] == "true" }

func has(o client.Object, k string) bool {
	_, ok := o.GetAnnotations()[k]
	return ok
}

// patch writes what has changed. Two of CDI's controllers write to a claim at once; each writes its own annotations.
func (c *cdi) patch(ctx context.Context, old, changed client.Object) error {
	return c.write(ctx, old, changed, client.MergeFrom(old))
}

// patchSeen writes what has changed if the object still is what was seen. Annotations that make sense together only are
// written so: what looks unchanged in an old copy would be left out, and the rest mixed with what somebody wrote since.
func (c *cdi) patchSeen(ctx context.Context, old, changed client.Object) error {
	return c.write(ctx, old, changed, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
}

func (c *cdi) write(ctx context.Context, old, changed client.Object, how client.Patch) error {
	if equality.Semantic.DeepEqual(old, changed) {
		return nil
	}
	if err := c.client.Patch(ctx, changed, how); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("patch %T %s: %w", changed, key(changed), err)
	}
	return nil
}

// get reads an object, false for one that is not there.
func (c *cdi) get(ctx context.Context, k client.ObjectKey, into client.Object) (bool, error) {
	err := c.client.Get(ctx, k, into)
	return err == nil, client.IgnoreNotFound(err)
}

func (c *cdi) create(ctx context.Context, o client.Object) error {
	return client.IgnoreAlreadyExists(c.client.Create(ctx, o))
}

func (c *cdi) delete(ctx context.Context, o client.Object) error {
	if o.GetDeletionTimestamp() != nil {
		return nil
	}
	return client.IgnoreNotFound(c.client.Delete(ctx, o))
}

func exceededQuota(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota")
}

// platform is the CDI object, CDI's own configuration.
func (c *cdi) platform(ctx context.Context) (*unstructured.Unstructured, error) {
	list := objectList(cdiKind)
	if err := c.client.List(ctx, list); err != nil {
		return nil, err
	}
	var active []*unstructured.Unstructured
	for i := range list.Items {
		if len(list.Items) == 1 || text(&list.Items[i], "status", "phase") != "Error" {
			active = append(active, &list.Items[i])
		}
	}
	switch {
	case len(list.Items) == 0:
		return nil, fmt.Errorf("no active CDI")
	case len(active) != 1:
		return nil, fmt.Errorf("invalid number of active CDI resources: %d", len(active))
	}
	return active[0], nil
}

func (c *cdi) config(ctx context.Context) (*unstructured.Unstructured, error) {
	config := object(cdiConfigKind)
	_, err := c.get(ctx, client.ObjectKey{Name: "config"}, config)
	return config, err
}

// honorsConsumers tells whether a claim has to wait for its first consumer: by feature gate, unless the claim itself
// asks to be bound immediately. What the annotation says does not matter, only that it is there.
func (c *cdi) honorsConsumers(ctx context.Context, claim client.Object) (bool, error) {
	gate, err := c.gate(ctx, "HonorWaitForFirstConsumer")
	return gate && !has(claim, bindImmediateKey), err
}

func (c *cdi) gate(ctx context.Context, name string) (bool, error) {
	config, err := c.config(ctx)
	if err != nil {
		return false, err
	}
	gates, _, _ := unstructured.NestedStringSlice(config.Object, "spec", "featureGates")
	for _, g := range gates {
		if g == name {
			return true, nil
		}
	}
	return false, nil
}

// users are the pods that use a claim; readOnly leaves out those that only read it, among them CDI's source pods.
func (c *cdi) users(ctx context.Context, claim client.ObjectKey, readOnly bool) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := c.client.List(ctx, &pods, client.InNamespace(claim.Namespace)); err != nil {
		return nil, err
	}
	var list []corev1.Pod
	for _, pod := range pods.Items {
		if terminal(&pod) {
			continue
		}
		for _, v := range pod.Spec.Volumes {
			if v.PersistentVolumeClaim == nil || v.PersistentVolumeClaim.ClaimName != claim.Name {
				continue
			}
			if readOnly && (v.PersistentVolumeClaim.ReadOnly || !written(&pod, v.Name) || pod.Labels[cdiPodLabel] == "cdi-clone-source") {
				continue
			}
			list = append(list, pod)
			break
		}
	}
	return list, nil
}

func written(pod *corev1.Pod, volume string) bool {
	for _, c := range pod.Spec.Containers {
		for _, m := range c.VolumeMounts {
			if m.Name == volume && !m.ReadOnly {
				return true
			}
		}
		for _, d := range c.VolumeDevices {
			if d.Name == volume {
				return true
			}
		}
	}
	return false
}

// populated tells whether the DataVolume that made a claim is done with it.
func (c *cdi) populated(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	owner := metav1.GetControllerOf(claim)
	if owner == nil || owner.Kind != dataVolumeKind.Kind {
		return true, nil
	}
	dv := object(dataVolumeKind)
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: claim.Namespace, Name: owner.Name}, dv); err != nil {
		return false, err
	}
	return text(dv, "status", "phase") == "Succeeded", nil
}

// rebind gives the volume of one claim to another.
func (c *cdi) rebind(ctx context.Context, from, to *corev1.PersistentVolumeClaim) error {
	pv := &corev1.PersistentVolume{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: from.Spec.VolumeName}, pv); err != nil {
		return err
	}
	switch ref := pv.Spec.ClaimRef; {
	case ref == nil:
		return fmt.Errorf("PV %s claimRef is nil", pv.Name)
	case ref.UID == to.UID:
		return nil
	case ref.UID != from.UID:
		return fmt.Errorf("PV %s bound to unexpected claim %s", pv.Name, ref.Name)
	}
	old := pv.DeepCopy()
	pv.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: claimKindName, Namespace: to.Namespace, Name: to.Name,
		UID: to.UID, ResourceVersion: to.ResourceVersion}
	return c.patch(ctx, old, pv)
}

// mover is a pod of CDI's that works on a claim.
func mover(namespace, name, kind, claim string, mode corev1.PersistentVolumeMode) *corev1.Pod {
	c := corev1.Container{Name: kind, Image: "cdi/" + kind, SecurityContext: restricted(), Resources: moverResources()}
	use(&c, "data", mode, "/data")
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{
			cdiPodLabel: kind, "app": "containerized-data-importer", "app.kubernetes.io/managed-by": "cdi-controller"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{c}, RestartPolicy: corev1.RestartPolicyOnFailure,
			AutomountServiceAccountToken: new(bool), Volumes: []corev1.Volume{claimVolume("data", claim)}},
	}
}

func controlledBy(o client.Object, claim *corev1.PersistentVolumeClaim) {
	o.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(claim, corev1.SchemeGroupVersion.WithKind(claimKindName))})
}

func cdiLabels(more map[string]string) map[string]string {
	l := map[string]string{"app": "containerized-data-importer", "app.kubernetes.io/component": "storage", "app.kubernetes.io/managed-by": "cdi-controller"}
	maps.Copy(l, more)
	return l
}

func uidOf(o client.Object) string { return string(o.GetUID()) }

func keyOf(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}
