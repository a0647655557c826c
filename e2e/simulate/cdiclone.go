package simulate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// refersTo tells whether a claim is to be filled from one of CDI's source objects of a kind.
func refersTo(claim *corev1.PersistentVolumeClaim, kind string) bool {
	ref := claim.Spec.DataSourceRef
	return ref != nil && ptr.Deref(ref.APIGroup, "") == cdiGroup && ref.Kind == kind && ref.Name != ""
}

func (c *cdi) claims(ctx context.Context, match func(*corev1.PersistentVolumeClaim) bool) []reconcile.Request {
	var list corev1.PersistentVolumeClaimList
	if err := c.client.List(ctx, &list); err != nil {
		return nil // the cache ends with the run
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if match(&list.Items[i]) {
			requests = append(requests, reconcile.Request{NamespacedName: key(&list.Items[i])})
		}
	}
	return requests
}

// clonesOfClaim is a target itself, the target of a temporary claim, or the targets that wait for a source.
func (c *cdi) clonesOfClaim(ctx context.Context, o client.Object) []reconcile.Request {
	claim := o.(*corev1.PersistentVolumeClaim)
	if refersTo(claim, cloneSourceRef) {
		return itself(ctx, o)
	}
	return c.clonesOfHelper(ctx, o)
}

func (c *cdi) clonesOfHelper(ctx context.Context, o client.Object) []reconcile.Request {
	uid, source := o.GetLabels()[ownedByLabel], ""
	if uid == "" {
		source = c.cloneSourceFor(ctx, o)
	}
	if uid == "" && source == "" {
		return nil
	}
	return c.claims(ctx, func(claim *corev1.PersistentVolumeClaim) bool {
		return refersTo(claim, cloneSourceRef) && (uid != "" && uidOf(claim) == uid ||
			source != "" && strings.Contains(source, sourceNamespace(claim)+"/"+claim.Spec.DataSourceRef.Name+" "))
	})
}

// cloneSourceFor lists the VolumeCloneSources, as "<namespace>/<name> ", that name an object as their source.
func (c *cdi) cloneSourceFor(ctx context.Context, o client.Object) string {
	list := objectList(cloneSourceKind)
	if err := c.client.List(ctx, list, client.InNamespace(o.GetNamespace())); err != nil {
		return ""
	}
	var names strings.Builder
	for i := range list.Items {
		if text(&list.Items[i], "spec", "source", "name") == o.GetName() {
			names.WriteString(key(&list.Items[i]).String() + " ")
		}
	}
	return names.String()
}

func (c *cdi) clonesOfSource(ctx context.Context, o client.Object) []reconcile.Request {
	return c.claims(ctx, func(claim *corev1.PersistentVolumeClaim) bool {
		return refersTo(claim, cloneSourceRef) && claim.Spec.DataSourceRef.Name == o.GetName() && sourceNamespace(claim) == o.GetNamespace()
	})
}

func sourceNamespace(claim *corev1.PersistentVolumeClaim) string {
	return orElse(claim.Annotations[sourceNamespaceKey], claim.Namespace)
}

// readyToFill tells whether a populator may begin: the class is known and, where it waits for the first consumer,
// there is one.
func (c *cdi) readyToFill(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	if claim.Spec.StorageClassName == nil {
		return false, nil // one may be assigned later
	}
	if *claim.Spec.StorageClassName == "" {
		return false, fmt.Errorf("PVC %s has empty storage class name", key(claim))
	}
	class := &storagev1.StorageClass{}
	if ok, err := c.get(ctx, client.ObjectKey{Name: *claim.Spec.StorageClassName}, class); err != nil {
		return false, err
	} else if !ok {
		return false, fmt.Errorf("storage class %s not found", *claim.Spec.StorageClassName)
	}
	if inTree(class) && claim.Annotations["pv.kubernetes.io/migrated-to"] == "" {
		return false, fmt.Errorf("can't use populator for PVC %s with in-tree storage class %s", key(claim), class.Provisioner)
	}
	return !waits(class) || claim.Annotations[selectedNodeAnnotation] != "" || has(claim, bindImmediateKey), nil
}

// reconcileClone fills the claim of a clone.
func (c *cdi) reconcileClone(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	target := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, req.NamespacedName, target); !ok {
		return ctrl.Result{}, err
	}
	if !refersTo(target, cloneSourceRef) {
		return ctrl.Result{}, nil
	}
	if err := c.boundFromEvents(ctx, clonePopulator, target); err != nil {
		return ctrl.Result{}, err
	}
	if target.DeletionTimestamp != nil || target.Annotations[clonePhaseKey] == "Succeeded" {
		return ctrl.Result{}, c.endClone(ctx, target)
	}
	after, phase, progress, err := c.cloneOn(ctx, target)
	if err != nil {
		return ctrl.Result{}, errors.Join(err, c.tellClone(ctx, target, "Error", err.Error(), progress))
	}
	if phase == "" { // it was written down already
		return ctrl.Result{}, nil
	}
	err = c.tellClone(ctx, target, phase, "", progress)
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: shortly}, nil // the cache has not caught up
	}
	return ctrl.Result{RequeueAfter: after}, err
}

// shortly is when a cache that was behind is read again.
const shortly = 50 * time.Millisecond

// cloneOn takes a clone as far as it goes now and returns the phase that it is in.
func (c *cdi) cloneOn(ctx context.Context, target *corev1.PersistentVolumeClaim) (after time.Duration, phase string, work *corev1.PersistentVolumeClaim, err error) {
	if ready, err := c.readyToFill(ctx, target); err != nil || !ready {
		return pollEvery, "Pending", nil, err
	}
	described := object(cloneSourceKind)
	if ok, err := c.get(ctx, keyOf(sourceNamespace(target), target.Spec.DataSourceRef.Name), described); err != nil || !ok {
		return 0, "", nil, err // it comes in a moment, and with an event
	}
	source := cloneSource{keyOf(described.GetNamespace(), text(described, "spec", "source", "name")), text(described, "spec", "source", "kind")}
	if err := c.checkToken(target, source); err != nil {
		return 0, "", nil, err
	}
	w := &way{strategy: target.Annotations[cloneTypeKey]} // what was settled once stays
	if !has(target, cloneTypeKey) {
		if w, err = c.chooseWay(ctx, target, source); err != nil {
			return 0, "", nil, err
		}
		if w == nil {
			return pollEvery, "Pending", nil, nil
		}
		if w.reason != "" {
			c.events[clonePopulator].Event(target, corev1.EventTypeWarning, w.reason, w.fallback)
		}
	}
	if begun, err := c.beginClone(ctx, target, w); err != nil || begun {
		return 0, "", nil, err
	}
	p := &cloning{cdi: c, target: target, source: source, events: c.events[clonePopulator]}
	steps, err := p.plan(ctx, w.strategy)
	if err != nil {
		return 0, "", nil, err
	}
	for _, s := range steps {
		wait, err := s.do(ctx)
		if err != nil {
			return 0, "", p.copied, err
		}
		if wait != nil {
			return *wait, s.name, p.copied, nil
		}
	}
	return 0, "Succeeded", p.copied, nil
}

// beginClone writes down what was settled, true when it was not there yet.
func (c *cdi) beginClone(ctx context.Context, target *corev1.PersistentVolumeClaim, w *way) (bool, error) {
	old := target.DeepCopy()
	target.Labels = cdiLabels(target.Labels)
	annotate(target, cloneTypeKey, w.strategy)
	if target.Annotations[clonePhaseKey] == "" {
		annotate(target, clonePhaseKey, "Pending")
	}
	if w.fallback != "" && target.Annotations[cloneFallbackKey] == "" {
		annotate(target, cloneFallbackKey, w.fallback)
	}
	added := controllerutil.AddFinalizer(target, populatorFinalizer)
	return added || old.Annotations[cloneTypeKey] != w.strategy || !has(old, cloneTypeKey), c.patch(ctx, old, target)
}

// tellClone writes a phase, and what the DataVolume's Running condition is to say.
func (c *cdi) tellClone(ctx context.Context, target *corev1.PersistentVolumeClaim, phase, failure string, copied *corev1.PersistentVolumeClaim) error {
	old := target.DeepCopy()
	annotate(target, clonePhaseKey, phase)
	delete(target.Annotations, cloneErrorKey)
	running := state{"false", "Pending", "Clone Pending"}
	switch {
	case phase == "Error":
		annotate(target, cloneErrorKey, failure)
		running = state{"false", "Error", failure}
	case phase == "Succeeded":
		annotate(target, progressKey, "100.0%")
		running = state{"false", "Completed", "Clone Complete"}
	case phase == "Pending":
	case copied != nil && has(copied, runningKey):
		running = state{copied.Annotations[runningKey], copied.Annotations[runningKey+".reason"], copied.Annotations[runningKey+".message"]}
		if r, ok := copied.Annotations[podRestartsKey]; ok {
			annotate(target, podRestartsKey, r)
		}
	default:
		running = state{"true", "Populator is running", ""}
	}
	if copied != nil && copied.Annotations[podPhaseKey] == string(corev1.PodSucceeded) {
		annotate(target, progressKey, "100.0%")
	}
	annotate(target, runningKey, running.status)
	annotate(target, runningKey+".reason", running.reason)
	annotate(target, runningKey+".message", running.message)
	return c.patchSeen(ctx, old, target)
}

// endClone removes the helpers of a clone that is done or deleted.
func (c *cdi) endClone(ctx context.Context, target *corev1.PersistentVolumeClaim) error {
	if !controllerutil.ContainsFinalizer(target, populatorFinalizer) {
		return nil
	}
	if target.Annotations[cloneTypeKey] == strategyCopy && isTrue(target, retainPodKey) && sourceNamespace(target) == target.Namespace {
		c.events[clonePopulator].Event(target, corev1.EventTypeWarning, "RetainedPVCPrime", "PVC Prime retained in Lost state for debugging purposes")
	} else if err := c.removeHelpers(ctx, uidOf(target)); err != nil {
		return err
	}
	old := target.DeepCopy()
	controllerutil.RemoveFinalizer(target, populatorFinalizer)
	return c.patch(ctx, old, target)
}

func (c *cdi) removeHelpers(ctx context.Context, uid string) error {
	var claims corev1.PersistentVolumeClaimList
	var pods corev1.PodList
	snapshots := objectList(snapshotKind)
	var helpers []client.Object
	for _, list := range []client.ObjectList{&claims, &pods, snapshots} {
		if err := c.client.List(ctx, list, client.MatchingLabels{ownedByLabel: uid}); err != nil {
			return err
		}
	}
	for i := range claims.Items {
		helpers = append(helpers, &claims.Items[i])
	}
	for i := range pods.Items {
		helpers = append(helpers, &pods.Items[i])
	}
	for i := range snapshots.Items {
		helpers = append(helpers, &snapshots.Items[i])
	}
	for _, o := range helpers {
		if err := c.delete(ctx, o); err != nil {
			return fmt.Errorf("delete helper %s: %w", key(o), err)
		}
	}
	return nil
}

// cloning is one clone on its way.
type cloning struct {
	*cdi
	target *corev1.PersistentVolumeClaim
	source cloneSource
	events record.EventRecorder
	copied *corev1.PersistentVolumeClaim // what a copy is written to
}

// step is a phase of the populator: nil when it is over, else how long to wait, 0 for an event.
type step struct {
	name string
	do   func(context.Context) (*time.Duration, error)
}

func waitFor(d time.Duration) *time.Duration { return &d }

// plan is the phases of a way.
func (p *cloning) plan(ctx context.Context, strategy string) ([]step, error) {
	work := p.temporary()
	rebind := step{"Rebind", func(ctx context.Context) (*time.Duration, error) { return p.rebindFrom(ctx, work) }}
	prepare := step{"PrepClaim", func(ctx context.Context) (*time.Duration, error) { return p.prepare(ctx, work) }}
	fromClaim, snapshot := p.source.kind == claimKindName, p.source.kind == snapshotName
	restore := func(name string, into *corev1.PersistentVolumeClaim) step {
		return step{"SnapshotClone", func(ctx context.Context) (*time.Duration, error) { return p.restore(ctx, name, into) }}
	}
	switch {
	case fromClaim && strategy == strategyCopy:
		return []step{p.copy(p.source.Name, work), rebind}, nil
	case fromClaim && strategy == strategySnapshot:
		if ok, err := p.get(ctx, p.source.ObjectKey, &corev1.PersistentVolumeClaim{}); err != nil {
			return nil, err
		} else if !ok {
			return nil, errors.New("source claim does not exist")
		}
		class, err := p.snapshotClass(ctx, p.target)
		if err != nil {
			return nil, err
		}
		if class == "" {
			return nil, errors.New("no compatible volumesnapshotclass")
		}
		name := "tmp-snapshot-" + uidOf(p.target)
		return []step{{"Snapshot", func(ctx context.Context) (*time.Duration, error) { return p.snapshot(ctx, name, class) }},
			restore(name, work), prepare, rebind}, nil
	case fromClaim && strategy == strategyCSI:
		return []step{{"CSIClone", func(ctx context.Context) (*time.Duration, error) { return p.cloneVolume(ctx, work) }}, prepare, rebind}, nil
	case snapshot && strategy == strategySnapshot:
		if ok, err := p.get(ctx, p.source.ObjectKey, object(snapshotKind)); err != nil {
			return nil, err
		} else if !ok {
			return nil, errors.New("source claim does not exist")
		}
		return []step{restore(p.source.Name, work), prepare, rebind}, nil
	case snapshot && strategy == strategyCopy:
		from, err := p.temporarySource(ctx)
		if err != nil {
			return nil, err
		}
		return []step{restore(p.source.Name, from),
			{"PrepClaim", func(ctx context.Context) (*time.Duration, error) { return p.prepare(ctx, from) }},
			p.copy(from.Name, work), rebind}, nil
	}
	return nil, fmt.Errorf("unknown strategy/source %s", strategy)
}

// temporary is the claim in the source's namespace that gets the volume first.
func (p *cloning) temporary() *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{Spec: *p.target.Spec.DeepCopy()}
	claim.Namespace, claim.Name = p.source.Namespace, "tmp-pvc-"+uidOf(p.target)
	p.mark(claim)
	claim.Spec.DataSource, claim.Spec.DataSourceRef = nil, nil
	return claim
}

// temporarySource is the claim that a snapshot is restored to, to be copied from: of the driver's first class by name.
func (p *cloning) temporarySource(ctx context.Context) (*corev1.PersistentVolumeClaim, error) {
	snapshot := object(snapshotKind)
	if ok, err := p.get(ctx, p.source.ObjectKey, snapshot); err != nil {
		return nil, err
	} else if !ok {
		return nil, errors.New("source claim does not exist")
	}
	content, err := p.content(ctx, snapshot)
	if err != nil {
		return nil, err
	}
	class, err := p.firstClassOf(ctx, text(content, "spec", "driver"))
	if err != nil {
		return nil, err
	}
	size, ok := restoreSize(snapshot)
	if !ok {
		return nil, errors.New("snapshot has no RestoreSize")
	}
	if size.IsZero() {
		size, _ = requested(&p.target.Spec)
	}
	claim := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class,
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeMode: p.target.Spec.VolumeMode}}
	if m := text(content, "spec", "sourceVolumeMode"); m != "" {
		claim.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeMode(m))
	}
	claim.Namespace, claim.Name = p.source.Namespace, "tmp-source-pvc-"+uidOf(p.target)
	p.mark(claim)
	delete(claim.Annotations, selectedNodeAnnotation)
	request(&claim.Spec, size)
	return claim, nil
}

func (c *cdi) firstClassOf(ctx context.Context, driver string) (string, error) {
	var classes storagev1.StorageClassList
	if err := c.client.List(ctx, &classes); err != nil {
		return "", err
	}
	first := ""
	for _, class := range classes.Items {
		if class.Provisioner == driver && (first == "" || class.Name < first) {
			first = class.Name
		}
	}
	if first == "" {
		return "", errors.New("no storage class match for snapshot driver")
	}
	return first, nil
}

// mark ties a helper to its target: with the target's labels and annotations, by UID for its removal.
func (p *cloning) mark(claim *corev1.PersistentVolumeClaim) {
	claim.Labels, claim.Annotations = maps.Clone(p.target.Labels), maps.Clone(p.target.Annotations)
	delete(claim.Annotations, bindCompletedKey) // a volume that was bound once is not for the helper
	delete(claim.Annotations, boundByControllerKey)
	claim.Labels[ownedByLabel] = uidOf(p.target)
	maps.Copy(claim.Annotations, map[string]string{
		populatorKindKey: cloneSourceRef, eventSourceKindKey: claimKindName, eventSourceKey: key(p.target).String()})
}

const (
	bindCompletedKey     = "pv.kubernetes.io/bind-completed"
	boundByControllerKey = "pv.kubernetes.io/bound-by-controller"
)

// sourceFree tells whether the source may be read in the storage layer: bound, written by nobody, complete.
func (p *cloning) sourceFree(ctx context.Context) (bool, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := p.get(ctx, p.source.ObjectKey, claim); !ok || claim.Status.Phase != corev1.ClaimBound {
		return false, err
	}
	users, err := p.users(ctx, p.source.ObjectKey, true)
	if err != nil {
		return false, err
	}
	for _, pod := range users {
		p.events.Eventf(p.target, corev1.EventTypeWarning, "CloneSourceInUse", "pod %s/%s using PersistentVolumeClaim %s", pod.Namespace, pod.Name, claim.Name)
	}
	if len(users) > 0 {
		return false, nil
	}
	return p.populated(ctx, claim)
}

// make creates a helper claim.
func (p *cloning) make(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	err := p.create(ctx, claim)
	if exceededQuota(err) {
		p.events.Eventf(p.target, corev1.EventTypeWarning, "ErrExceededQuota", "%s", err.Error())
	}
	return err
}

// boundOrLate ends a phase whose claim has its volume or waits for a consumer.
func (p *cloning) boundOrLate(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*time.Duration, error) {
	if err := p.copyEvents(ctx, clonePopulator, claim, p.target); err != nil {
		return nil, err
	}
	if claim.Status.Phase == corev1.ClaimBound || claim.Status.Phase == corev1.ClaimLost {
		return nil, nil
	}
	class := &storagev1.StorageClass{}
	if ok, err := p.get(ctx, client.ObjectKey{Name: ptr.Deref(claim.Spec.StorageClassName, "")}, class); err != nil {
		return nil, err
	} else if !ok {
		return nil, errors.New("no storageclass for pvc")
	}
	if waits(class) {
		return nil, nil
	}
	return waitFor(0), nil
}

func (p *cloning) snapshot(ctx context.Context, name, class string) (*time.Duration, error) {
	snapshot := object(snapshotKind)
	ok, err := p.get(ctx, keyOf(p.source.Namespace, name), snapshot)
	if err != nil {
		return nil, err
	}
	if !ok {
		if free, err := p.sourceFree(ctx); err != nil || !free {
			return waitFor(pollEvery), err
		}
		snapshot.SetNamespace(p.source.Namespace)
		snapshot.SetName(name)
		snapshot.SetLabels(cdiLabels(map[string]string{ownedByLabel: uidOf(p.target)}))
		set(snapshot, map[string]any{"volumeSnapshotClassName": class, "source": map[string]any{"persistentVolumeClaimName": p.source.Name}}, "spec")
		if err := p.create(ctx, snapshot); err != nil {
			return nil, err
		}
	}
	if text(snapshot, "status", "creationTime") == "" {
		return waitFor(0), nil
	}
	return nil, nil
}

func (p *cloning) restore(ctx context.Context, name string, into *corev1.PersistentVolumeClaim) (*time.Duration, error) {
	claim := &corev1.PersistentVolumeClaim{}
	ok, err := p.get(ctx, key(into), claim)
	if err != nil {
		return nil, err
	}
	if !ok {
		snapshot := object(snapshotKind)
		if ok, err := p.get(ctx, keyOf(p.source.Namespace, name), snapshot); err != nil {
			return nil, err
		} else if !ok {
			return nil, errors.New("source snapshot does not exist")
		}
		if !truth(snapshot, "status", "readyToUse") {
			return waitFor(0), nil
		}
		size, ok := restoreSize(snapshot)
		if !ok {
			return nil, errors.New("snapshot missing restoresize")
		}
		claim = into.DeepCopy()
		if !size.IsZero() {
			request(&claim.Spec, size)
		}
		claim.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: ptr.To(snapshotKind.Group), Kind: snapshotName, Name: name}
		if err := p.make(ctx, claim); err != nil {
			return nil, err
		}
	}
	return p.boundOrLate(ctx, claim)
}

func (p *cloning) cloneVolume(ctx context.Context, into *corev1.PersistentVolumeClaim) (*time.Duration, error) {
	claim := &corev1.PersistentVolumeClaim{}
	ok, err := p.get(ctx, key(into), claim)
	if err != nil {
		return nil, err
	}
	if !ok {
		if free, err := p.sourceFree(ctx); err != nil || !free {
			return waitFor(pollEvery), err
		}
		source := &corev1.PersistentVolumeClaim{}
		if err := p.client.Get(ctx, p.source.ObjectKey, source); err != nil {
			return nil, err
		}
		claim = into.DeepCopy()
		request(&claim.Spec, source.Status.Capacity[corev1.ResourceStorage])
		claim.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: claimKindName, Name: source.Name}
		if err := p.make(ctx, claim); err != nil {
			return nil, err
		}
	}
	return p.boundOrLate(ctx, claim)
}

// prepare binds a claim that waits for a consumer and grows it to its size. A pod does what takes a node.
func (p *cloning) prepare(ctx context.Context, want *corev1.PersistentVolumeClaim) (*time.Duration, error) {
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := p.get(ctx, key(want), claim); err != nil {
		return nil, err
	} else if !ok {
		return nil, fmt.Errorf("claim %s does not exist", key(want))
	}
	pod := &corev1.Pod{}
	exists, err := p.get(ctx, keyOf(want.Namespace, "prep-"+uidOf(p.target)), pod)
	if err != nil {
		return nil, err
	}
	size, _ := requested(&want.Spec)
	asked, _ := requested(&claim.Spec)
	capacity, has := claim.Status.Capacity[corev1.ResourceStorage]
	if claim.Status.Phase == corev1.ClaimLost { // its volume is on the way to the target
		has, capacity, asked = true, size, size
	}
	needed := !has || capacity.Cmp(size) < 0
	if has && asked.Cmp(size) < 0 {
		old := claim.DeepCopy()
		request(&claim.Spec, size)
		return waitFor(0), p.patch(ctx, old, claim)
	}
	if !needed && !exists {
		return nil, nil
	}
	if exists && pod.Status.Phase == corev1.PodSucceeded {
		return waitFor(0), p.delete(ctx, pod)
	}
	if needed && !exists {
		pod = mover(want.Namespace, "prep-"+uidOf(p.target), "cdi-populator-prep", claim.Name, volumeMode(claim.Spec.VolumeMode))
		pod.Labels[ownedByLabel] = uidOf(p.target)
		pod.Spec.NodeName = claim.Annotations[selectedNodeAnnotation]
		return waitFor(0), p.create(ctx, pod)
	}
	return waitFor(0), nil
}

// copy has pods read one claim and write another.
func (p *cloning) copy(from string, into *corev1.PersistentVolumeClaim) step {
	return step{"HostClone", func(ctx context.Context) (*time.Duration, error) {
		claim := &corev1.PersistentVolumeClaim{}
		ok, err := p.get(ctx, key(into), claim)
		if err != nil {
			return nil, err
		}
		if !ok {
			claim = into.DeepCopy()
			maps.Copy(claim.Annotations, map[string]string{preallocationKey: "false", ownerUIDKey: uidOf(p.target), podRestartsKey: "0",
				cloneRequestKey: keyOf(into.Namespace, from).String(), bindImmediateKey: ""})
			for _, k := range []string{runningKey, runningKey + ".reason", runningKey + ".message", podPhaseKey} {
				delete(claim.Annotations, k)
			}
			if err := p.make(ctx, claim); err != nil {
				return nil, err
			}
		}
		p.copied = claim
		if err := p.copyEvents(ctx, clonePopulator, claim, p.target); err != nil {
			return nil, err
		}
		if claim.Annotations[podPhaseKey] != string(corev1.PodSucceeded) {
			return waitFor(0), nil
		}
		return nil, nil
	}}
}

func (p *cloning) rebindFrom(ctx context.Context, work *corev1.PersistentVolumeClaim) (*time.Duration, error) {
	if p.target.Spec.VolumeName != "" {
		return nil, nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	if ok, err := p.get(ctx, key(work), claim); err != nil {
		return nil, err
	} else if !ok {
		return nil, errors.New("source claim does not exist")
	}
	return waitFor(0), p.rebind(ctx, claim, p.target)
}
