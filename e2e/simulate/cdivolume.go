package simulate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// pollEvery is how often CDI looks again at what it has no watch for. CDI's own 2 to 5 s would only cost time.
const pollEvery = time.Second

// volumeSync is one look at a DataVolume.
type volumeSync struct {
	*cdi
	v         *volume
	claim     *corev1.PersistentVolumeClaim // nil while there is none
	spec      *corev1.PersistentVolumeClaimSpec
	populator bool
	events    record.EventRecorder
	told      *told // what the status has to say instead of what the claim says
	after     time.Duration
}

// told is a phase with its event. The event's reason and message are the conditions' while there is no claim.
type told struct {
	phase         string
	kind          string
	reason, words string
}

func (c *cdi) reconcileVolume(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	dv := object(dataVolumeKind)
	if ok, err := c.get(ctx, req.NamespacedName, dv); !ok {
		return ctrl.Result{}, err
	}
	v, err := c.read(ctx, dv)
	if v == nil || err != nil {
		return ctrl.Result{}, err
	}
	s := &volumeSync{cdi: c, v: v, events: c.events[v.component()]}
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, claim); err != nil {
		return ctrl.Result{}, err
	} else if ok {
		s.claim = claim
	}
	failed := s.run(ctx)
	if err := s.report(ctx); err != nil {
		return ctrl.Result{}, errors.Join(failed, err)
	}
	return ctrl.Result{RequeueAfter: s.after}, failed
}

// run brings a DataVolume one step on; report says how far it is.
func (s *volumeSync) run(ctx context.Context) error {
	old := s.v.DeepCopy()
	save := func() error {
		err := s.patch(ctx, old, s.v.Unstructured)
		old = s.v.DeepCopy()
		return err
	}
	if err := s.cleanUp(ctx); err != nil {
		return err
	}
	if s.v.GetDeletionTimestamp() != nil {
		return save()
	}
	var err error
	if s.spec, err = s.render(ctx, s.v, s.claim); err != nil {
		bad := &invalid{}
		if errors.As(err, &bad) {
			if bad.event != "" {
				s.events.Event(s.v, corev1.EventTypeWarning, "ErrClaimNotValid", bad.event)
			}
			s.told = &told{"", corev1.EventTypeWarning, "ErrClaimNotValid", bad.message}
			if bad.final {
				return nil
			}
		}
		return err
	}
	if s.populator, err = s.usePopulator(ctx, s.v, s.spec); err != nil {
		return err
	}
	annotate(s.v, usePopulatorKey, strconv.FormatBool(s.populator))
	if s.claim != nil {
		if err := s.ownClaim(ctx); err != nil {
			return err
		}
		if s.claim.Status.Phase == corev1.ClaimBound && s.claim.Annotations[populatedForKey] == s.v.GetName() {
			annotate(s.v, prePopulatedKey, s.claim.Name)
		}
	}
	if err := save(); err != nil {
		return err
	}
	if s.v.isClone() {
		err = s.cloneStep(ctx)
	} else {
		err = s.importStep(ctx)
	}
	if err != nil {
		return err
	}
	return save()
}

func (s *volumeSync) succeeded() bool {
	return text(s.v.Unstructured, "status", "phase") == "Succeeded"
}

// imported tells whether an import that ran is done, and told so: a claim that was adopted had none.
func (s *volumeSync) imported() bool {
	return s.claim != nil && s.claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded) && s.succeeded()
}

// cleanUp removes what a DataVolume needs no more.
func (s *volumeSync) cleanUp(ctx context.Context) error {
	if !s.v.isClone() {
		if isTrue(s.v, usePopulatorKey) && s.imported() {
			return s.removeSource(ctx, importSourceKind.Kind, s.v.GetNamespace())
		}
		return nil
	}
	if s.v.GetDeletionTimestamp() == nil && !s.succeeded() {
		return nil
	}
	if err := s.removeSource(ctx, cloneSourceKind.Kind, s.v.clone.Namespace); err != nil {
		return err
	}
	controllerutil.RemoveFinalizer(s.v, cdiFinalizer)
	source := &corev1.PersistentVolumeClaim{}
	if s.v.clone.kind == snapshotName {
		if ok, err := s.get(ctx, keyOf(s.v.clone.Namespace, uidOf(s.v)+"-host-assisted-source-pvc"), source); !ok {
			return err
		}
		return s.delete(ctx, source)
	}
	if ok, err := s.get(ctx, s.v.clone.ObjectKey, source); !ok || s.claim != nil && isTrue(s.claim, retainPodKey) {
		return err
	}
	pod := &corev1.Pod{}
	if ok, err := s.get(ctx, keyOf(source.Namespace, sizePodName(source)), pod); !ok {
		return err
	}
	for _, r := range volumesOfHelper(ctx, pod) {
		if r.NamespacedName == key(s.v) {
			return s.delete(ctx, pod)
		}
	}
	return nil
}

func (s *volumeSync) removeSource(ctx context.Context, kind, namespace string) error {
	source := object(dataVolumeKind.GroupVersion().WithKind(kind))
	if ok, err := s.get(ctx, keyOf(namespace, s.sourceName(kind)), source); !ok {
		return err
	}
	return s.delete(ctx, source)
}

func (s *volumeSync) sourceName(kind string) string {
	if kind == cloneSourceRef {
		return "volume-clone-source-" + uidOf(s.v)
	}
	return "volume-import-source-" + uidOf(s.v)
}

// requiresWork is false for a claim that is to be taken as it is.
func (s *volumeSync) requiresWork(ctx context.Context) (bool, error) {
	switch {
	case s.claim == nil:
		return true, nil
	case s.claim.Annotations[populatedForKey] == s.v.GetName() && s.v.GetName() != "":
		return false, nil
	case s.claim.Annotations[createdForKey] == uidOf(s.v):
		return true, nil
	}
	if a, ok := s.v.GetAnnotations()[allowAdoptionKey]; ok {
		adopt, _ := strconv.ParseBool(a)
		return !adopt, nil
	}
	adopt, err := s.gate(ctx, "DataVolumeClaimAdoption")
	return !adopt, err
}

// ownClaim makes sure that the claim is this DataVolume's.
func (s *volumeSync) ownClaim(ctx context.Context) error {
	if s.claim.DeletionTimestamp != nil {
		//lint:ignore ST1005 these are CDI's words
		err := fmt.Errorf("Resource %q marked for deletion", s.claim.Name)
		s.events.Event(s.v, corev1.EventTypeWarning, "ErrResourceMarkedForDeletion", err.Error())
		return err
	}
	if metav1.IsControlledBy(s.claim, s.v) {
		return nil
	}
	work, err := s.requiresWork(ctx)
	if err != nil {
		return err
	}
	if work {
		//lint:ignore ST1005 these are CDI's words
		err := fmt.Errorf("Resource %q already exists and is not managed by DataVolume", s.claim.Name)
		s.events.Event(s.v, corev1.EventTypeWarning, "ErrResourceExists", err.Error())
		return err
	}
	old := s.claim.DeepCopy()
	if err := controllerutil.SetControllerReference(s.v, s.claim, scheme); err != nil {
		return err
	}
	return s.patch(ctx, old, s.claim)
}

// importStep makes the claim of an import and, for the populator, the description of its source.
func (s *volumeSync) importStep(ctx context.Context) error {
	if s.populator && !s.imported() {
		source := map[string]any{"blank": map[string]any{}}
		if http := s.v.spec.Source.HTTP; http != nil {
			source = map[string]any{"http": map[string]any{"url": http.URL}}
		}
		if err := s.describe(ctx, importSourceKind.Kind, s.v.GetNamespace(), map[string]any{"source": source, "contentType": s.v.contentType()}); err != nil {
			return err
		}
	}
	if s.claim != nil || has(s.v, prePopulatedKey) {
		return nil
	}
	return s.makeClaim(ctx)
}

// describe makes the object that tells a populator its source.
func (s *volumeSync) describe(ctx context.Context, kind, namespace string, spec map[string]any) error {
	o := object(dataVolumeKind.GroupVersion().WithKind(kind))
	if ok, err := s.get(ctx, keyOf(namespace, s.sourceName(kind)), o); ok || err != nil {
		return err
	}
	o.SetNamespace(namespace)
	o.SetName(s.sourceName(kind))
	set(o, spec, "spec")
	if s.v.spec.Preallocation != nil {
		set(o, *s.v.spec.Preallocation, "spec", "preallocation")
	}
	if namespace != s.v.GetNamespace() {
		annotate(o, helperOfKey, key(s.v).String()) // no owner in another namespace
	} else if err := controllerutil.SetControllerReference(s.v, o, scheme); err != nil {
		return err
	}
	return s.create(ctx, o)
}

// makeClaim makes the target claim, marked as CDI marks it.
func (s *volumeSync) makeClaim(ctx context.Context) error {
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.v.GetNamespace(), Name: s.v.GetName(),
			Annotations: maps.Clone(s.v.GetAnnotations()), Labels: cdiLabels(s.v.GetLabels())},
		Spec: *s.spec,
	}
	if volumeMode(s.spec.VolumeMode) == corev1.PersistentVolumeFilesystem {
		claim.Labels["alerts.k8s.io/KubePersistentVolumeFillingUp"] = "disabled"
	}
	maps.Copy(claim.Annotations, map[string]string{
		contentTypeKey:   s.v.contentType(),
		podRestartsKey:   "0",
		preallocationKey: strconv.FormatBool(ptr.Deref(s.v.spec.Preallocation, false)),
		createdForKey:    uidOf(s.v),
	})
	if s.v.spec.PriorityClassName != "" {
		claim.Annotations[priorityClassKey] = s.v.spec.PriorityClassName
	}
	delete(claim.Annotations, populatedForKey)
	delete(claim.Annotations, cloneTokenKey)
	delete(claim.Annotations, extendedTokenKey)
	switch {
	case s.v.isClone() && s.v.acrossNamespaces():
		token, ok := s.v.GetAnnotations()[cloneTokenKey]
		if !ok {
			return errors.New("no clone token")
		}
		claim.Annotations[cloneTokenKey] = token
		if s.populator {
			claim.Annotations[sourceNamespaceKey] = s.v.clone.Namespace
		}
	case !s.v.isClone() && !s.populator:
		markImport(claim, s.v.spec.Source)
	}
	if s.populator {
		kind := importSourceRef
		if s.v.isClone() {
			kind = cloneSourceRef
		}
		claim.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: ptr.To(cdiGroup), Kind: kind, Name: s.sourceName(kind)}
		if gate, err := s.gate(ctx, "HonorWaitForFirstConsumer"); err != nil {
			return err
		} else if !gate {
			claim.Annotations[bindImmediateKey] = ""
		}
	} else if s.v.isClone() {
		claim.Annotations[cloneRequestKey] = s.copySource()
	}
	if err := controllerutil.SetControllerReference(s.v, claim, scheme); err != nil {
		return err
	}
	err := s.create(ctx, claim)
	switch {
	case exceededQuota(err):
		s.told = &told{"Pending", corev1.EventTypeWarning, "ErrExceededQuota", err.Error()}
		return err
	case err != nil:
		return err
	case claim.UID != "": // not one that was there already
		s.claim = claim
	}
	return nil
}

// copySource is the claim that a copy without populator reads, as <namespace>/<name>.
func (s *volumeSync) copySource() string {
	if s.v.clone.kind == snapshotName {
		return keyOf(s.v.clone.Namespace, uidOf(s.v)+"-host-assisted-source-pvc").String()
	}
	return s.v.clone.String()
}

// markImport tells the importer where the data comes from.
func markImport(claim *corev1.PersistentVolumeClaim, source *volumeSource) {
	if source.HTTP == nil {
		claim.Annotations[importSourceKey] = "none"
		return
	}
	claim.Annotations[importSourceKey], claim.Annotations[endpointKey] = "http", source.HTTP.URL
}

// cloneStep makes the claim of a clone once its source will do, and ties it to the populator or to the copying pods.
func (s *volumeSync) cloneStep(ctx context.Context) error {
	if work, err := s.requiresWork(ctx); !work || err != nil || has(s.v, prePopulatedKey) {
		return err
	}
	if added, err := s.extendToken(); err != nil || added {
		return err // what is signed is written down first
	}
	if s.claim == nil {
		if ready, err := s.sourceWillDo(ctx); err != nil || !ready {
			return err
		}
		if s.populator && s.v.acrossNamespaces() && !controllerutil.ContainsFinalizer(s.v, cdiFinalizer) {
			controllerutil.AddFinalizer(s.v, cdiFinalizer) // helpers in another namespace have no owner
			s.scheduled()
			return nil
		}
		if !s.populator && s.v.clone.kind == snapshotName {
			if err := s.restoreForCopy(ctx); err != nil {
				return err
			}
		}
		if err := s.makeClaim(ctx); err != nil || s.claim == nil {
			return err
		}
	}
	if s.populator {
		if !s.succeeded() { // cleanUp would remove it again, and so on
			ref := map[string]any{"kind": s.v.clone.kind, "name": s.v.clone.Name}
			if s.v.clone.kind == snapshotName {
				ref["apiGroup"] = snapshotKind.Group
			}
			if err := s.describe(ctx, cloneSourceKind.Kind, s.v.clone.Namespace, map[string]any{"source": ref}); err != nil {
				return err
			}
		}
		if t := s.claim.Annotations[cloneTypeKey]; t != "" {
			annotate(s.v, cloneTypeKey, t)
		}
	} else {
		annotate(s.v, cloneTypeKey, strategyCopy)
		if err := s.fallBack(ctx); err != nil {
			return err
		}
	}
	return s.extendClaimToken(ctx)
}

// fallBack marks the claim of a clone without populator: it is copied, whatever class and profile say.
func (s *volumeSync) fallBack(ctx context.Context) error {
	const reason = "In tree storage class does not support snapshot/clone"
	if s.claim.Annotations[cloneTypeKey] == strategyCopy && s.claim.Annotations[cloneFallbackKey] == reason {
		return nil
	}
	old := s.claim.DeepCopy()
	annotate(s.claim, cloneTypeKey, strategyCopy)
	annotate(s.claim, cloneFallbackKey, reason)
	s.events.Event(s.claim, corev1.EventTypeWarning, "NoPopulator", reason)
	return s.patch(ctx, old, s.claim)
}

func (s *volumeSync) scheduled() {
	e := s.eventOfPhase("CloneScheduled")
	s.told = &told{"CloneScheduled", e.kind, e.reason, e.words}
}

// refuse keeps the phase and says why there is no claim yet.
func (s *volumeSync) refuse(reason, words string) {
	s.told = &told{text(s.v.Unstructured, "status", "phase"), corev1.EventTypeWarning, reason, words}
}

// sourceWillDo looks at the source before there is a claim, and finds the claim's size when none was asked for.
func (s *volumeSync) sourceWillDo(ctx context.Context) (bool, error) {
	const failed = "The clone doesn't meet the validation requirements: "
	if s.v.clone.kind == snapshotName {
		snapshot := object(snapshotKind)
		if ok, err := s.get(ctx, s.v.clone.ObjectKey, snapshot); err != nil {
			return false, err
		} else if !ok {
			s.refuse("CloneWithoutSource", fmt.Sprintf("The source snapshot %s doesn't exist", s.v.clone.Name))
			return false, nil
		}
		if err := s.validateSnapshot(ctx, snapshot, s.v); err != nil {
			s.refuse("CloneValidationFailed", failed+err.Error())
			return false, nil
		}
		if size, _ := requested(s.spec); s.v.spec.Storage != nil && size.IsZero() {
			size, _ = restoreSize(snapshot)
			request(s.spec, size)
		}
		return true, nil
	}
	source := &corev1.PersistentVolumeClaim{}
	if ok, err := s.get(ctx, s.v.clone.ObjectKey, source); err != nil {
		return false, err
	} else if !ok {
		s.refuse("CloneWithoutSource", fmt.Sprintf("The source pvc %s doesn't exist", s.v.clone.Name))
		return false, nil
	}
	if err := s.validateClone(ctx, source, s.v); err != nil {
		s.refuse("CloneValidationFailed", failed+err.Error())
		return false, nil
	}
	if s.v.spec.Storage == nil {
		return true, nil
	}
	found, err := s.findSize(ctx, source)
	if found || err != nil {
		return found, err
	}
	users, err := s.users(ctx, s.v.clone.ObjectKey, false)
	if err != nil {
		return false, err
	}
	for _, pod := range users {
		s.events.Eventf(s.v, corev1.EventTypeWarning, "CloneSourceInUse", "pod %s/%s using PersistentVolumeClaim %s", pod.Namespace, pod.Name, source.Name)
	}
	if done, err := s.populated(ctx, source); err != nil {
		return false, err
	} else if len(users) > 0 || !done {
		s.after = pollEvery
		s.scheduled()
	}
	return false, nil
}

// findSize settles the size of the target's claim: the one asked for, or what the source holds. A pod has to look into
// an image on a filesystem.
func (s *volumeSync) findSize(ctx context.Context, source *corev1.PersistentVolumeClaim) (bool, error) {
	asked, _ := requested(s.spec)
	onFilesystem := volumeMode(source.Spec.VolumeMode) == corev1.PersistentVolumeFilesystem
	image := source.Annotations[contentTypeKey] == contentKubeVirt
	if !asked.IsZero() && (volumeMode(s.spec.VolumeMode) != corev1.PersistentVolumeBlock || !onFilesystem || !image) {
		return true, nil
	}
	capacity := source.Status.Capacity[corev1.ResourceStorage]
	size := capacity.Value()
	if onFilesystem && image {
		var err error
		if size, err = s.imageSize(ctx, source); size == 0 || err != nil {
			return false, err
		}
	}
	if asked.IsZero() && capacity.CmpInt64(size) > 0 || !asked.IsZero() && asked.CmpInt64(size) >= 0 {
		annotate(s.v, permissiveCloneKey, "true")
	}
	if !asked.IsZero() {
		return true, nil
	}
	inflated, err := s.inflate(ctx, size, s.spec)
	request(s.spec, inflated)
	return err == nil, err
}

// fallbackClaim marks a snapshot's restored claim that a copy reads from.
const fallbackClaim = "cdi-clone-from-snapshot-source-host-assisted-fallback-pvc"

const (
	virtualSizeKey    = "cdi.Kubervirt.io/virtualSize" // sic
	sourceCapacityKey = "cdi.Kubervirt.io/sourceCapacity"
)

func sizePodName(source *corev1.PersistentVolumeClaim) string { return sizePod + uidOf(source) }

// imageSize is the virtual size of the image in a claim, 0 while it is not known.
func (s *volumeSync) imageSize(ctx context.Context, source *corev1.PersistentVolumeClaim) (int64, error) {
	capacity := source.Status.Capacity[corev1.ResourceStorage]
	if then, err := resource.ParseQuantity(source.Annotations[sourceCapacityKey]); err == nil && then.Cmp(capacity) == 0 {
		return strconv.ParseInt(source.Annotations[virtualSizeKey], 10, 64)
	}
	if done, err := s.populated(ctx, source); err != nil {
		return 0, err
	} else if !done {
		s.events.Event(s.v, corev1.EventTypeNormal, "ImportPVCNotReady", "The source PVC is not fully imported")
		return 0, nil
	}
	pod := &corev1.Pod{}
	ok, err := s.get(ctx, keyOf(source.Namespace, sizePodName(source)), pod)
	if err != nil {
		return 0, err
	}
	if !ok {
		pod = mover(source.Namespace, sizePodName(source), "importer", source.Name, volumeMode(source.Spec.VolumeMode))
		pod.Spec.Containers[0].Name = sizeContainer
		if source.Namespace == s.v.GetNamespace() {
			err = controllerutil.SetControllerReference(s.v, pod, scheme)
		} else {
			annotate(pod, helperOfKey, key(s.v).String())
			annotate(pod, ownerUIDKey, uidOf(s.v))
		}
		if err == nil {
			err = s.create(ctx, pod)
		}
		if err != nil {
			return 0, err
		}
		s.events.Event(s.v, corev1.EventTypeNormal, "SizeDetectionPodCreated", "Size-detection pod created")
	}
	if !terminal(pod) {
		s.events.Event(s.v, corev1.EventTypeNormal, "SizeDetectionPodNotReady", "The size detection pod is not finished yet")
		return 0, nil
	}
	words := containerStatus(pod.Status.ContainerStatuses, sizeContainer).State.Terminated.Message
	size, err := strconv.ParseInt(words, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("size detection of claim %s: %w", key(source), err)
	}
	old := source.DeepCopy()
	annotate(source, virtualSizeKey, words)
	annotate(source, sourceCapacityKey, capacity.String())
	return size, s.patch(ctx, old, source)
}

// restoreForCopy restores a snapshot, so that a copy without populator has a claim to read from. CDI takes any class
// of the driver.
func (s *volumeSync) restoreForCopy(ctx context.Context) error {
	snapshot := object(snapshotKind)
	if err := s.client.Get(ctx, s.v.clone.ObjectKey, snapshot); err != nil {
		return err
	}
	snapshotClass := object(snapshotClassKind)
	if err := s.client.Get(ctx, keyOf("", text(snapshot, "spec", "volumeSnapshotClassName")), snapshotClass); err != nil {
		return err
	}
	class, err := s.firstClassOf(ctx, text(snapshotClass, "driver"))
	if err != nil {
		return err
	}
	size, _ := restoreSize(snapshot)
	if size.IsZero() {
		size, _ = requested(s.spec)
	}
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: snapshot.GetNamespace(), Name: uidOf(s.v) + "-host-assisted-source-pvc",
			Labels:      cdiLabels(map[string]string{cdiPodLabel: fallbackClaim}),
			Annotations: map[string]string{helperOfKey: key(s.v).String(), ownerUIDKey: uidOf(s.v)}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class, AccessModes: s.spec.AccessModes, VolumeMode: s.spec.VolumeMode,
			DataSource: &corev1.TypedLocalObjectReference{APIGroup: ptr.To(snapshotKind.Group), Kind: snapshotName, Name: snapshot.GetName()}},
	}
	request(&claim.Spec, size)
	err = s.create(ctx, claim)
	if exceededQuota(err) {
		s.told = &told{"Pending", corev1.EventTypeWarning, "ErrExceededQuota", err.Error()}
	}
	return err
}

// event of a phase, as the controllers word it.
func (s *volumeSync) eventOfPhase(phase string) told {
	from, to := s.v.clone.String(), key(s.v).String()
	words := map[string]string{
		"CloneScheduled":                    fmt.Sprintf("Cloning from %s into %s scheduled", from, to),
		"CloneInProgress":                   fmt.Sprintf("Cloning from %s into %s in progress", from, to),
		"SnapshotForSmartCloneInProgress":   fmt.Sprintf("Creating snapshot for smart-clone is in progress (for pvc %s)", from),
		"CloneFromSnapshotSourceInProgress": fmt.Sprintf("Creating PVC from snapshot source is in progress (for %s %s)", sourceWord(s.v.clone.kind), from),
		"CSICloneInProgress":                fmt.Sprintf("CSI Volume clone in progress (for pvc %s)", from),
		"PrepClaimInProgress":               fmt.Sprintf("Prepping PersistentVolumeClaim for DataVolume %s", to),
		"RebindInProgress":                  fmt.Sprintf("Rebinding PersistentVolumeClaim for DataVolume %s", to),
	}
	if phase == "Succeeded" {
		return told{phase, corev1.EventTypeNormal, "CloneSucceeded", fmt.Sprintf("Successfully cloned from %s into %s", from, to)}
	}
	return told{phase, corev1.EventTypeNormal, phase, words[phase]}
}

func sourceWord(kind string) string {
	if kind == snapshotName {
		return "snapshot"
	}
	return "pvc"
}
