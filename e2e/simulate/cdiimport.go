package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// primeName is the claim that is written to before its volume becomes the target's.
func primeName(target *corev1.PersistentVolumeClaim) string { return "prime-" + uidOf(target) }

func importsOfClaim(ctx context.Context, o client.Object) []reconcile.Request {
	claim := o.(*corev1.PersistentVolumeClaim)
	if refersTo(claim, importSourceRef) {
		return itself(ctx, o)
	}
	if claim.Annotations[populatorKindKey] == importSourceRef {
		return controllerOf(claim, claimKindName)
	}
	return nil
}

func (c *cdi) importsOfSource(ctx context.Context, o client.Object) []reconcile.Request {
	return c.claims(ctx, func(claim *corev1.PersistentVolumeClaim) bool {
		return refersTo(claim, importSourceRef) && claim.Spec.DataSourceRef.Name == o.GetName() && claim.Namespace == o.GetNamespace()
	})
}

// importsOfEvent is the claim that an event is about; only temporary ones matter.
func importsOfEvent(_ context.Context, o client.Object) []reconcile.Request {
	e := o.(*corev1.Event)
	if e.InvolvedObject.Kind != claimKindName || !strings.HasPrefix(e.InvolvedObject.Name, "prime-") {
		return nil
	}
	return []reconcile.Request{{NamespacedName: keyOf(e.InvolvedObject.Namespace, e.InvolvedObject.Name)}}
}

// reconcileImport fills the claim of an import through a temporary one.
func (c *cdi) reconcileImport(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	target := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, target); !ok || target.DeletionTimestamp != nil {
		return ctrl.Result{}, err
	}
	if owner := metav1.GetControllerOf(target); owner != nil && owner.Kind == claimKindName { // an event of the temporary one
		if ok, err := c.get(ctx, keyOf(target.Namespace, owner.Name), target); !ok || target.DeletionTimestamp != nil {
			return ctrl.Result{}, err
		}
	}
	if !refersTo(target, importSourceRef) {
		return ctrl.Result{}, nil
	}
	prime := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, keyOf(target.Namespace, primeName(target)), prime); err != nil {
		return ctrl.Result{}, err
	} else if !ok {
		return ctrl.Result{}, c.makePrime(ctx, target)
	}
	if !has(target, primeNameKey) {
		old := target.DeepCopy()
		annotate(target, primeNameKey, prime.Name)
		if err := c.patch(ctx, old, target); err != nil {
			return ctrl.Result{}, err
		}
	}
	if err := c.copyEvents(ctx, importPopulator, prime, target); err != nil {
		return ctrl.Result{}, err
	}
	if err := c.boundFromEvents(ctx, importPopulator, target); err != nil {
		return ctrl.Result{}, err
	}
	done := prime.Annotations[podPhaseKey] == string(corev1.PodSucceeded)
	if prime.Annotations[podPhaseKey] == string(corev1.PodFailed) {
		c.events[importPopulator].Eventf(target, corev1.EventTypeWarning, "importFailed", "import into PVC %s failed", target.Name)
	}
	if err := c.mirror(ctx, target, prime); err != nil {
		return ctrl.Result{}, err
	}
	if done && target.Status.Phase != corev1.ClaimBound {
		if err := c.rebind(ctx, prime, target); err != nil {
			return ctrl.Result{}, err
		}
	}
	if done {
		c.events[importPopulator].Eventf(target, corev1.EventTypeNormal, "importSucceeded", "import into PVC %s succeeded", target.Name)
	}
	if !done || target.Status.Phase != corev1.ClaimBound || prime.Status.Phase != corev1.ClaimLost {
		return ctrl.Result{}, nil
	}
	if isTrue(prime, retainPodKey) {
		c.events[importPopulator].Event(prime, corev1.EventTypeWarning, "RetainedPVCPrime", "PVC Prime retained in Lost state for debugging purposes")
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, c.delete(ctx, prime)
}

// makePrime makes the temporary claim, once the target's class allows it.
func (c *cdi) makePrime(ctx context.Context, target *corev1.PersistentVolumeClaim) error {
	described := object(importSourceKind)
	if ok, err := c.get(ctx, keyOf(target.Namespace, target.Spec.DataSourceRef.Name), described); !ok {
		return err
	}
	if ready, err := c.readyToFill(ctx, target); err != nil || !ready {
		return err
	}
	if target.Status.Phase == corev1.ClaimBound || target.Status.Phase == corev1.ClaimLost {
		return nil
	}
	prime := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: target.Namespace, Name: primeName(target), Labels: maps.Clone(target.Labels),
			Annotations: map[string]string{bindImmediateKey: "", populatorKindKey: importSourceRef, preallocationKey: "false",
				contentTypeKey: orElse(text(described, "spec", "contentType"), contentKubeVirt)}},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: target.Spec.AccessModes, Resources: target.Spec.Resources,
			StorageClassName: target.Spec.StorageClassName, VolumeMode: target.Spec.VolumeMode},
	}
	for _, k := range []string{selectedNodeAnnotation, retainPodKey} {
		if v, ok := target.Annotations[k]; ok {
			prime.Annotations[k] = v
		}
	}
	source := &volumeSource{}
	fields, _, _ := unstructured.NestedMap(described.Object, "spec", "source")
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(fields, source); err != nil {
		return err
	}
	markImport(prime, source)
	controlledBy(prime, target)
	if err := c.create(ctx, prime); err != nil {
		c.events[importPopulator].Event(target, corev1.EventTypeWarning, "ErrCreatingPVCPrime", err.Error())
		return err
	}
	c.events[importPopulator].Event(target, corev1.EventTypeNormal, "CreatedPVCPrimeSuccessfully", "PVC Prime created successfully")
	return nil
}

// mirror shows on the target what is known of the temporary claim.
func (c *cdi) mirror(ctx context.Context, target, prime *corev1.PersistentVolumeClaim) error {
	old := target.DeepCopy()
	for _, k := range []string{podPhaseKey, podReadyKey, podRestartsKey, preallocationKey, runningKey, runningKey + ".message", runningKey + ".reason", podSchedulableKey} {
		if v, ok := prime.Annotations[k]; ok {
			annotate(target, k, v)
		} else {
			delete(target.Annotations, k)
		}
	}
	switch {
	case prime.Annotations[podPhaseKey] == string(corev1.PodSucceeded):
		annotate(target, progressKey, "100.0%")
	case prime.Status.Phase == corev1.ClaimBound && !has(target, progressKey):
		annotate(target, progressKey, "N/A")
	}
	return c.patch(ctx, old, target)
}

// claimsOfPod is the claim that owns a pod.
func claimsOfPod(_ context.Context, o client.Object) []reconcile.Request {
	return controllerOf(o, claimKindName)
}

const (
	sizeContainer = "size-detection"
	sizePod       = "size-detection-" // and the UID of the claim
	scratchWords  = "scratch space required and none found"
	endpointEnv   = "IMPORTER_ENDPOINT"
)

// reconcileImporter runs the pod that writes an image to a claim, and notes on the claim how it fares.
func (c *cdi) reconcileImporter(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, claim); !ok || !has(claim, importSourceKey) {
		return ctrl.Result{}, err
	}
	if err := c.boundFromEvents(ctx, importerController, claim); err != nil {
		return ctrl.Result{}, err
	}
	honor, err := c.honorsConsumers(ctx, claim)
	if err != nil || claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded) || honor && claim.Status.Phase != corev1.ClaimBound {
		return ctrl.Result{}, err
	}
	pod := &corev1.Pod{}
	name := orElse(claim.Annotations[importPodKey], "importer-"+claim.Name)
	exists, err := c.get(ctx, keyOf(claim.Namespace, name), pod)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case exists && claim.DeletionTimestamp != nil:
		return ctrl.Result{}, c.delete(ctx, pod)
	case exists && !metav1.IsControlledBy(pod, claim):
		return ctrl.Result{}, fmt.Errorf("pod %s is not owned by PVC", pod.Name)
	case exists:
		return ctrl.Result{}, c.noteImporter(ctx, claim, pod)
	case claim.DeletionTimestamp != nil:
		return ctrl.Result{}, nil
	}
	users, err := c.users(ctx, key(claim), false)
	if err != nil {
		return ctrl.Result{}, err
	}
	for _, u := range users {
		c.events[importerController].Eventf(claim, corev1.EventTypeWarning, "ImportTargetInUse",
			"pod %s/%s using PersistentVolumeClaim %s", u.Namespace, u.Name, claim.Name)
	}
	if len(users) > 0 {
		return ctrl.Result{RequeueAfter: pollEvery}, nil
	}
	if !has(claim, importPodKey) {
		old := claim.DeepCopy()
		annotate(claim, importPodKey, name)
		if scratch(claim) {
			annotate(claim, scratchKey, "true")
		}
		return ctrl.Result{}, c.patch(ctx, old, claim)
	}
	return ctrl.Result{}, c.makeImporter(ctx, claim, name)
}

func scratch(claim *corev1.PersistentVolumeClaim) bool {
	return claimContent(claim) == contentArchive || isTrue(claim, scratchKey)
}

func (c *cdi) makeImporter(ctx context.Context, claim *corev1.PersistentVolumeClaim, name string) error {
	pod := mover(claim.Namespace, name, "importer", claim.Name, volumeMode(claim.Spec.VolumeMode))
	controlledBy(pod, claim)
	pod.Spec.Containers[0].Env = []corev1.EnvVar{{Name: endpointEnv, Value: claim.Annotations[endpointKey]}}
	if c.sim.download(claim.Annotations[endpointKey]).Unschedulable {
		pod.Spec.NodeSelector = map[string]string{"upgrade-e2e/nowhere": ""}
	}
	if scratch(claim) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume("scratch", claim.Name+"-scratch"))
		use(&pod.Spec.Containers[0], "scratch", corev1.PersistentVolumeFilesystem, "/scratch")
	}
	return c.create(ctx, pod)
}

// noteImporter writes the state of the importer's pod on its claim.
func (c *cdi) noteImporter(ctx context.Context, claim *corev1.PersistentVolumeClaim, pod *corev1.Pod) error {
	if pod.DeletionTimestamp != nil {
		return nil
	}
	old := claim.DeepCopy()
	again := noteRunning(claim, pod, runningKey)
	if end := pod.Status.ContainerStatuses; len(end) > 0 && end[0].State.Terminated != nil && end[0].State.Terminated.ExitCode > 0 {
		c.events[importerController].Event(claim, corev1.EventTypeWarning, "ErrImportFailed", end[0].State.Terminated.Message)
	}
	annotate(claim, importPodKey, pod.Name)
	if !again {
		annotate(claim, podPhaseKey, string(orPending(pod.Status.Phase)))
	}
	annotate(claim, podSchedulableKey, "true")
	if orPending(pod.Status.Phase) == corev1.PodPending {
		for _, cond := range pod.Status.Conditions {
			if cond.Type == corev1.PodScheduled && cond.Reason == corev1.PodReasonUnschedulable {
				annotate(claim, podSchedulableKey, "false")
			}
		}
	}
	made := false
	if orPending(pod.Status.Phase) == corev1.PodPending && scratch(claim) {
		var err error
		if made, err = c.makeScratch(ctx, claim, pod); err != nil {
			return err
		}
	}
	switch {
	case made:
		annotate(claim, boundKey, "false")
		annotate(claim, boundKey+".reason", "CreatingScratchSpace")
		annotate(claim, boundKey+".message", "Creating scratch space")
	case !(orPending(pod.Status.Phase) == corev1.PodPending && scratch(claim)):
		for _, k := range []string{boundKey, boundKey + ".reason", boundKey + ".message"} {
			delete(claim.Annotations, k)
		}
	}
	if err := c.patch(ctx, old, claim); err != nil {
		return err
	}
	done := claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded)
	if done && !again {
		c.events[importerController].Event(claim, corev1.EventTypeNormal, "ImportSucceeded", "Import Successful")
	}
	if again || done && (!isTrue(claim, retainPodKey) || isTrue(claim, scratchKey)) {
		return c.delete(ctx, pod)
	}
	return nil
}

func orPending(p corev1.PodPhase) corev1.PodPhase {
	if p == "" {
		return corev1.PodPending
	}
	return p
}

// makeScratch makes the claim that an importer unpacks in, true when it was not there.
func (c *cdi) makeScratch(ctx context.Context, claim *corev1.PersistentVolumeClaim, pod *corev1.Pod) (bool, error) {
	space := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name + "-scratch", Labels: cdiLabels(nil)},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			StorageClassName: claim.Spec.StorageClassName, Resources: claim.Spec.Resources}}
	if ok, err := c.get(ctx, key(space), &corev1.PersistentVolumeClaim{}); ok || err != nil {
		return false, err
	}
	space.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))}
	return true, c.create(ctx, space)
}

// noteRunning writes the state of a pod's container under a prefix, true when the pod has to start again with scratch
// space.
func noteRunning(claim *corev1.PersistentVolumeClaim, pod *corev1.Pod, prefix string) bool {
	if len(pod.Status.ContainerStatuses) == 0 {
		return false
	}
	c := pod.Status.ContainerStatuses[0]
	if before, _ := strconv.Atoi(claim.Annotations[podRestartsKey]); int(c.RestartCount) >= before {
		annotate(claim, podRestartsKey, strconv.Itoa(int(c.RestartCount)))
	}
	say := func(reason, message string) {
		annotate(claim, prefix+".reason", reason)
		annotate(claim, prefix+".message", message)
	}
	if c.State.Running != nil {
		annotate(claim, prefix, "true")
		say("Pod is running", "")
		return false
	}
	annotate(claim, runningKey, "false")
	switch w, t := c.State.Waiting, c.State.Terminated; {
	case w != nil && !ptr.Deref(c.Started, true) && (w.Reason == "ImagePullBackOff" || w.Reason == "ErrImagePull" || w.Reason == "InvalidImageName"):
		say("ImagePullFailed", "failed to pull image: "+c.Image)
	case w != nil && w.Reason != "CrashLoopBackOff":
		say(w.Reason, w.Message)
	case t != nil:
		var end struct{ ScratchSpaceRequired bool }
		if json.Unmarshal([]byte(t.Message), &end) == nil && end.ScratchSpaceRequired {
			annotate(claim, scratchKey, "true")
			say("ScratchSpaceRequired", scratchWords)
			return true
		}
		say(t.Reason, t.Message)
	}
	return false
}
