package simulate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A host-assisted copy: a pod beside the target takes what a pod beside the source sends over the pod network. Two
// controllers know nothing of each other but the target's annotations.

// targetsOfSourcePod is the claim that a source pod sends to.
func targetsOfSourcePod(_ context.Context, o client.Object) []reconcile.Request {
	return requestFor(o.GetAnnotations()[ownerRefKey])
}

// copyFrom reads the claim that is copied.
func (c *cdi) copyFrom(ctx context.Context, target *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaim, error) {
	namespace, name, _ := strings.Cut(target.Annotations[cloneRequestKey], "/")
	source := &corev1.PersistentVolumeClaim{}
	if err := c.client.Get(ctx, keyOf(namespace, name), source); err != nil {
		return nil, fmt.Errorf("error getting clone source PVC: %w", err)
	}
	if claimContent(source) != claimContent(target) {
		return nil, fmt.Errorf("source contentType (%s) and target contentType (%s) do not match", claimContent(source), claimContent(target))
	}
	return source, nil
}

// fits refuses a target with less usable space than its source.
func (c *cdi) fits(ctx context.Context, source, target *corev1.PersistentVolumeClaim) error {
	have, err := c.usable(ctx, source)
	if err != nil {
		return err
	}
	want, err := c.usable(ctx, target)
	if err == nil && !has(target, permissiveCloneKey) && have.Cmp(want) > 0 {
		err = errors.New("target resources requests storage size is smaller than the source")
	}
	return err
}

func (c *cdi) usable(ctx context.Context, claim *corev1.PersistentVolumeClaim) (resource.Quantity, error) {
	size, _ := requested(&claim.Spec)
	if volumeMode(claim.Spec.VolumeMode) == corev1.PersistentVolumeBlock {
		return size, nil
	}
	overhead, err := c.overhead(ctx, claim.Spec.StorageClassName)
	usable := int64(math.Floor(float64(size.Value()) / (1 + overhead)))
	return *resource.NewScaledQuantity(usable/mebibyte*mebibyte, 0), err
}

// reconcileUpload runs the pod that takes the data.
func (c *cdi) reconcileUpload(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, claim); !ok || !has(claim, cloneRequestKey) {
		return ctrl.Result{}, err
	}
	if err := c.boundFromEvents(ctx, uploadController, claim); err != nil {
		return ctrl.Result{}, err
	}
	honor, err := c.honorsConsumers(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	waiting := honor && claim.Status.Phase != corev1.ClaimBound
	name := "cdi-upload-" + claim.Name
	if waiting || claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded) || claim.DeletionTimestamp != nil {
		result := ctrl.Result{}
		if waiting && claim.Annotations[boundKey] == "" {
			result.RequeueAfter = pollEvery // its events come without an update of the claim
		}
		return result, c.endUpload(ctx, claim, name)
	}
	source, err := c.copyFrom(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := c.fits(ctx, source, claim); err != nil {
		c.events[uploadController].Event(claim, corev1.EventTypeWarning, "ErrIncompatiblePVC", err.Error())
		return ctrl.Result{}, nil
	}
	pod := &corev1.Pod{}
	if ok, err := c.get(ctx, keyOf(claim.Namespace, name), pod); err != nil {
		return ctrl.Result{}, err
	} else if !ok {
		users, err := c.users(ctx, key(claim), false)
		if err != nil {
			return ctrl.Result{}, err
		}
		for _, u := range users {
			c.sayToTarget(ctx, uploadController, claim, "UploadTargetInUse", u, claim.Name)
		}
		if len(users) > 0 {
			return ctrl.Result{RequeueAfter: pollEvery}, nil
		}
		if pod, err = c.makeUpload(ctx, claim, source, name); err != nil {
			return ctrl.Result{}, err
		}
	}
	if pod.DeletionTimestamp != nil {
		return ctrl.Result{}, nil
	}
	old := claim.DeepCopy()
	annotate(claim, uploadClientKey, fmt.Sprintf("%s-%s", key(source), key(claim)))
	annotate(claim, uploadPodKey, name)
	annotate(claim, podPhaseKey, string(orPending(pod.Status.Phase)))
	annotate(claim, podReadyKey, strconv.FormatBool(podReady(pod)))
	noteRunning(claim, pod, runningKey)
	return ctrl.Result{}, c.patch(ctx, old, claim)
}

func podReady(pod *corev1.Pod) bool {
	for _, s := range pod.Status.ContainerStatuses {
		if !s.Ready {
			return false
		}
	}
	return len(pod.Status.ContainerStatuses) > 0
}

// sayToTarget writes an event where a user looks: on the clone's target, not on its temporary claim.
func (c *cdi) sayToTarget(ctx context.Context, component string, claim *corev1.PersistentVolumeClaim, reason string, user corev1.Pod, used string) {
	about := claim
	if namespace, name, ok := strings.Cut(claim.Annotations[eventSourceKey], "/"); ok {
		target := &corev1.PersistentVolumeClaim{}
		if found, err := c.get(ctx, keyOf(namespace, name), target); found && err == nil {
			about = target
		}
	}
	c.events[component].Eventf(about, corev1.EventTypeWarning, reason, "pod %s/%s using PersistentVolumeClaim %s", user.Namespace, user.Name, used)
}

func (c *cdi) makeUpload(ctx context.Context, claim, source *corev1.PersistentVolumeClaim, name string) (*corev1.Pod, error) {
	pod := mover(claim.Namespace, name, "cdi-upload-server", claim.Name, volumeMode(claim.Spec.VolumeMode))
	pod.Labels["cdi.kubevirt.io/uploadTarget"], pod.Labels["service"] = uidOf(claim), name
	annotate(pod, networkBytesKey, source.Status.Capacity.Storage().String())
	controlledBy(pod, claim)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: name, Labels: cdiLabels(nil)}}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: name, Labels: cdiLabels(nil)},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"service": name}, Ports: []corev1.ServicePort{{Port: 443}}}}
	controlledBy(service, claim)
	for _, o := range []client.Object{pod, secret, service} {
		if o == secret {
			secret.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))}
			if pod.UID == "" {
				continue
			}
		}
		if err := c.create(ctx, o); err != nil {
			return nil, err
		}
	}
	return pod, nil
}

func (c *cdi) endUpload(ctx context.Context, claim *corev1.PersistentVolumeClaim, name string) error {
	if !has(claim, uploadPodKey) {
		return nil
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: name}}
	pod := &corev1.Pod{}
	ok, err := c.get(ctx, keyOf(claim.Namespace, name), pod)
	if !ok {
		return err
	}
	if err := c.delete(ctx, service); err != nil {
		return err
	}
	if isTrue(claim, retainPodKey) && claim.DeletionTimestamp == nil {
		return nil
	}
	return c.delete(ctx, pod)
}

// reconcileCopy runs the pod that sends the data, once the other one is ready to take it.
func (c *cdi) reconcileCopy(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, claim); !ok || !has(claim, cloneRequestKey) {
		return ctrl.Result{}, err
	}
	if err := c.boundFromEvents(ctx, cloneController, claim); err != nil {
		return ctrl.Result{}, err
	}
	if claim.DeletionTimestamp != nil || isTrue(claim, cloneOfKey) || claim.Status.Phase != corev1.ClaimBound {
		if claim.DeletionTimestamp == nil && !controllerutil.ContainsFinalizer(claim, sourcePodFinalizer) {
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, c.endCopy(ctx, claim)
	}
	taken := claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded)
	if !isTrue(claim, podReadyKey) && !taken {
		return ctrl.Result{}, nil
	}
	if !has(claim, sourcePodKey) {
		old := claim.DeepCopy()
		annotate(claim, sourcePodKey, uidOf(claim)+"-source-pod")
		controllerutil.AddFinalizer(claim, sourcePodFinalizer) // the pod has no owner in another namespace
		return ctrl.Result{}, c.patch(ctx, old, claim)
	}
	namespace, _, _ := strings.Cut(claim.Annotations[cloneRequestKey], "/")
	pod := &corev1.Pod{}
	exists, err := c.get(ctx, keyOf(namespace, claim.Annotations[sourcePodKey]), pod)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !exists && !taken {
		return c.send(ctx, claim)
	}
	old := claim.DeepCopy()
	if taken && (!exists || terminal(pod)) {
		annotate(claim, cloneOfKey, "true")
		c.events[cloneController].Event(claim, corev1.EventTypeNormal, "CloneSucceeded", "Clone Complete")
	}
	if exists {
		noteRunning(claim, pod, sourceRunningKey)
	}
	return ctrl.Result{}, c.patch(ctx, old, claim)
}

// send makes the source pod, when the source is complete, written by nobody, and may be read.
func (c *cdi) send(ctx context.Context, claim *corev1.PersistentVolumeClaim) (ctrl.Result, error) {
	source, err := c.copyFrom(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	if done, err := c.populated(ctx, source); err != nil || !done {
		return ctrl.Result{RequeueAfter: pollEvery}, err
	}
	from := cloneSource{key(source), claimKindName}
	if source.Labels[cdiPodLabel] == fallbackClaim && source.Spec.DataSource != nil { // the token is for the snapshot
		from = cloneSource{keyOf(source.Namespace, source.Spec.DataSource.Name), snapshotName}
	}
	if err := c.checkToken(claim, from); err != nil {
		return ctrl.Result{}, err
	}
	if err := c.fits(ctx, source, claim); err != nil {
		return ctrl.Result{}, err
	}
	users, err := c.users(ctx, key(source), true)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, u := range users {
		c.sayToTarget(ctx, cloneController, claim, "CloneSourceInUse", u, source.Name)
	}
	if len(users) > 0 {
		return ctrl.Result{RequeueAfter: pollEvery}, nil
	}
	name := claim.Annotations[sourcePodKey]
	pod := mover(source.Namespace, name, "cdi-clone-source", source.Name, volumeMode(source.Spec.VolumeMode))
	pod.Labels["cdi.kubevirt.io/hostAssistedSourcePodCloneSource"] = uidOf(source)
	pod.Labels["cdi.kubevirt.io/storage.clone.cloneUniqeId"] = name // sic
	annotate(pod, ownerRefKey, key(claim).String())
	if err := c.create(ctx, pod); err != nil || pod.UID == "" {
		return ctrl.Result{}, err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: source.Namespace, Name: name, Labels: cdiLabels(nil),
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))}}}
	return ctrl.Result{}, c.create(ctx, secret)
}

func (c *cdi) endCopy(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	namespace, _, _ := strings.Cut(claim.Annotations[cloneRequestKey], "/")
	pod := &corev1.Pod{}
	ok, err := c.get(ctx, keyOf(namespace, claim.Annotations[sourcePodKey]), pod)
	if err != nil {
		return err
	}
	if ok && (!isTrue(claim, retainPodKey) || claim.DeletionTimestamp != nil) {
		if err := c.delete(ctx, pod); err != nil {
			return err
		}
	}
	old := claim.DeepCopy()
	controllerutil.RemoveFinalizer(claim, sourcePodFinalizer)
	return c.patch(ctx, old, claim)
}
