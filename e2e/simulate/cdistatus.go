package simulate

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// phaseOfClone is the phase of a DataVolume whose clone populator is in one of its own. An error changes nothing.
var phaseOfClone = map[string]string{
	"": "CloneScheduled", "Pending": "CloneScheduled", "Snapshot": "SnapshotForSmartCloneInProgress",
	"SnapshotClone": "CloneFromSnapshotSourceInProgress", "CSIClone": "CSICloneInProgress", "HostClone": "CloneInProgress",
	"PrepClaim": "PrepClaimInProgress", "Rebind": "RebindInProgress", "Succeeded": "Succeeded",
}

// report writes phase, progress and conditions, and what of them is worth an event.
func (s *volumeSync) report(ctx context.Context) error {
	if s.v.Object["status"] == nil {
		s.v.Object["status"] = map[string]any{}
	}
	old := s.v.DeepCopy()
	before := text(old, "status", "phase")
	phase, e := before, told{}
	claim := s.claim
	if s.told != nil {
		phase, e, claim = s.told.phase, *s.told, nil
	} else {
		var err error
		if phase, e, err = s.phase(ctx); err != nil {
			return err
		}
	}
	if claim != nil && claim.DeletionTimestamp == nil {
		set(s.v.Unstructured, claim.Name, "status", "claimName")
		s.progress(phase)
	}
	set(s.v.Unstructured, phase, "status", "phase")
	s.conditions(phase, claim, e)
	patch := client.MergeFrom(old)
	if data, err := patch.Data(s.v.Unstructured); err != nil || string(data) == "{}" {
		return err
	}
	if err := s.client.Status().Patch(ctx, s.v.Unstructured, patch); err != nil {
		return client.IgnoreNotFound(err)
	}
	if e.kind != "" && before != phase {
		s.events.Event(s.v, e.kind, e.reason, e.words)
	}
	s.conditionEvents(old, phase)
	return nil
}

// phase reads the phase off the claim.
func (s *volumeSync) phase(ctx context.Context) (string, told, error) {
	phase := text(s.v.Unstructured, "status", "phase")
	if s.claim == nil {
		if has(s.v, prePopulatedKey) || phase == "" {
			phase = "Pending"
		}
		return phase, told{}, nil
	}
	if s.claim.DeletionTimestamp != nil {
		return phase, told{}, nil
	}
	work, err := s.requiresWork(ctx)
	if err != nil {
		return phase, told{}, err
	}
	if work && s.claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded) {
		return s.phaseOfWork(ctx, phase)
	}
	switch s.claim.Status.Phase {
	case corev1.ClaimPending:
		if !work {
			return "Succeeded", told{}, nil
		}
		return s.phaseOfPending(ctx, phase)
	case corev1.ClaimBound:
		if !work {
			return "Succeeded", told{}, nil
		}
		if phase == "Pending" || phase == "WaitForFirstConsumer" || phase == "Unknown" {
			phase = "PVCBound"
		}
		return s.phaseOfWork(ctx, phase)
	case corev1.ClaimLost:
		return "Failed", told{"Failed", corev1.EventTypeWarning, "ErrClaimLost", fmt.Sprintf("PVC %s lost", s.claim.Name)}, nil
	}
	return phase, told{}, nil
}

// byPopulator tells whether a populator fills the claim.
func byPopulator(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.DataSourceRef != nil && isTrue(claim, usePopulatorKey)
}

func (s *volumeSync) phaseOfPending(ctx context.Context, phase string) (string, told, error) {
	class, err := s.class(ctx, s.claim.Spec.StorageClassName, contentArchive)
	if err != nil {
		return phase, told{}, err
	}
	late := class != nil && waits(class)
	if byPopulator(s.claim) {
		if late && s.claim.Annotations[selectedNodeAnnotation] == "" && !has(s.claim, bindImmediateKey) {
			return "PendingPopulation", told{}, nil
		}
		return s.phaseOfWork(ctx, phase)
	}
	if gate, err := s.gate(ctx, "HonorWaitForFirstConsumer"); err != nil || gate && late {
		return "WaitForFirstConsumer", told{}, err
	}
	return "Pending", told{}, nil
}

// phaseOfWork reads the phase off what populator or pods have written.
func (s *volumeSync) phaseOfWork(ctx context.Context, phase string) (string, told, error) {
	pod, started := s.claim.Annotations[podPhaseKey]
	switch {
	case s.v.isClone() && byPopulator(s.claim):
		if next, ok := phaseOfClone[s.claim.Annotations[clonePhaseKey]]; ok {
			return next, s.eventOfPhase(next), nil
		}
		return phase, told{}, nil
	case s.v.isClone():
		if pod != string(corev1.PodSucceeded) {
			if !has(s.claim, cloneRequestKey) || s.claim.Status.Phase != corev1.ClaimBound {
				return phase, told{}, nil
			}
			phase = "CloneScheduled"
		}
		switch pod {
		case string(corev1.PodPending):
			return "CloneScheduled", s.eventOfPhase("CloneScheduled"), nil
		case string(corev1.PodRunning):
			return "CloneInProgress", s.eventOfPhase("CloneInProgress"), nil
		case string(corev1.PodSucceeded):
			return "Succeeded", s.eventOfPhase("Succeeded"), nil
		}
		return phase, told{}, nil
	}
	if pod != string(corev1.PodSucceeded) {
		if begun, err := s.importBegun(ctx); err != nil || !begun {
			return phase, told{}, err
		}
	}
	if !started {
		return "ImportScheduled", told{}, nil
	}
	into := s.claim.Name
	switch pod {
	case string(corev1.PodPending):
		return "ImportScheduled", told{"", corev1.EventTypeNormal, "ImportScheduled", "Import into " + into + " scheduled"}, nil
	case string(corev1.PodRunning):
		return "ImportInProgress", told{"", corev1.EventTypeNormal, "ImportInProgress", "Import into " + into + " in progress"}, nil
	case string(corev1.PodFailed):
		return "ImportScheduled", told{"", corev1.EventTypeWarning, "ImportFailed", "Failed to import into PVC " + into}, nil
	case string(corev1.PodSucceeded):
		return "Succeeded", told{"", corev1.EventTypeNormal, "ImportSucceeded", "Successfully imported into PVC " + into}, nil
	}
	return "ImportScheduled", told{}, nil
}

// importBegun tells whether the claim that is written to is there and has its pod.
func (s *volumeSync) importBegun(ctx context.Context) (bool, error) {
	work := s.claim
	if s.claim.Spec.DataSourceRef != nil && s.claim.Spec.DataSourceRef.Kind == importSourceRef {
		work = &corev1.PersistentVolumeClaim{}
		if ok, err := s.get(ctx, keyOf(s.claim.Namespace, primeName(s.claim)), work); !ok {
			return false, err
		}
	}
	return has(work, importPodKey) && work.Status.Phase == corev1.ClaimBound, nil
}

func (s *volumeSync) progress(phase string) {
	p := orElse(text(s.v.Unstructured, "status", "progress"), "N/A")
	switch {
	case byPopulator(s.claim):
		p = orElse(s.claim.Annotations[progressKey], "N/A")
	case phase == "Succeeded" && s.claim.Annotations[podPhaseKey] == string(corev1.PodSucceeded):
		p = "100.0%"
	}
	set(s.v.Unstructured, p, "status", "progress")
}

// state is a condition's status, reason and message.
type state struct{ status, reason, message string }

// conditions derives Bound, Ready and Running from the claim and its annotations.
func (s *volumeSync) conditions(phase string, claim *corev1.PersistentVolumeClaim, e told) {
	ready := state{status: "False"}
	switch phase {
	case "Succeeded":
		ready.status = "True"
	case "Unknown":
		ready.status = "Unknown"
	}
	bound, running := state{"False", orElse(e.reason, "NotFound"), orElse(e.words, "No PVC found")}, state{status: "False"}
	if claim == nil && s.told != nil {
		ready.reason, ready.message = e.reason, e.words
	} else if claim == nil {
		bound = state{"False", "NotFound", "No PVC found"}
	}
	if claim != nil {
		bound = boundState(claim)
		running = runningState(claim.Annotations)
		if running.status == "True" {
			ready = state{"False", "TransferRunning", ""}
		}
	}
	now := time.Now()
	list, _, _ := unstructured.NestedSlice(s.v.Object, "status", "conditions")
	for _, c := range []struct {
		kind string
		state
	}{{"Bound", bound}, {"Ready", ready}, {"Running", running}} {
		if condition(s.v.Unstructured, c.kind) != nil && stateOf(s.v.Unstructured, c.kind) == c.state {
			continue
		}
		fresh := map[string]any{"type": c.kind, "status": c.status, "lastHeartbeatTime": stamp(now)}
		if c.reason != "" {
			fresh["reason"] = c.reason
		}
		if c.message != "" {
			fresh["message"] = c.message
		}
		list = setCondition(list, fresh, now)
	}
	set(s.v.Unstructured, list, "status", "conditions")
}

func stateOf(u *unstructured.Unstructured, kind string) state {
	c := condition(u, kind)
	word := func(k string) string { w, _ := c[k].(string); return w }
	return state{word("status"), word("reason"), word("message")}
}

func boundState(claim *corev1.PersistentVolumeClaim) state {
	said := claim.Annotations[boundKey]
	told := has(claim, boundKey) && !strings.EqualFold(said, "true")
	reason, message := claim.Annotations[boundKey+".reason"], claim.Annotations[boundKey+".message"]
	switch claim.Status.Phase {
	case corev1.ClaimBound:
		if told {
			return state{"False", reason, message}
		}
		return state{"True", "Bound", fmt.Sprintf("PVC %s Bound", claim.Name)}
	case corev1.ClaimPending:
		if !told {
			return state{"False", "Pending", fmt.Sprintf("PVC %s Pending", claim.Name)}
		}
		if prime, ok := claim.Annotations[primeNameKey]; ok {
			message = fmt.Sprintf("[%s] : %s", prime, message)
		}
		return state{"False", reason, fmt.Sprintf("target PVC %s Pending and %s", claim.Name, message)}
	case corev1.ClaimLost:
		return state{"False", "ClaimLost", "Claim Lost"}
	}
	return state{status: "False"}
}

// runningState is of the pod that writes, joined by that of the pod that reads where there are two.
func runningState(a map[string]string) state {
	if a[podSchedulableKey] == "false" {
		return state{"False", "Unschedulable", "Importer pod cannot be scheduled"}
	}
	target := state{a[runningKey], a[runningKey+".reason"], a[runningKey+".message"]}
	source, two := state{a[sourceRunningKey], a[sourceRunningKey+".reason"], a[sourceRunningKey+".message"]}, false
	_, two = a[sourceRunningKey]
	switch strings.ToLower(target.status) {
	case "":
		target.status = "False"
	case "true":
		target.status = "True"
		if two && !strings.EqualFold(source.status, "true") {
			return state{"False", source.reason, source.message}
		}
	case "false":
		target.status = "False"
		if two && strings.EqualFold(source.status, "false") {
			target.reason, target.message = target.reason+" and "+source.reason, target.message+" and "+source.message
		}
	}
	return target
}

// conditionEvents says every change of Bound, and why nothing runs although something should.
func (s *volumeSync) conditionEvents(old *unstructured.Unstructured, phase string) {
	bound, running := stateOf(s.v.Unstructured, "Bound"), stateOf(s.v.Unstructured, "Running")
	if bound != stateOf(old, "Bound") {
		s.events.Event(s.v, corev1.EventTypeNormal, bound.reason, bound.message)
	}
	going := bound.status == "True" || isTrue(s.v, usePopulatorKey) && phase != "Pending" && phase != "PendingPopulation"
	if stateOf(s.v.Unstructured, "Ready").status == "False" && running.status == "False" && going && running.message != "" &&
		running.message != scratchWords && running.message != stateOf(old, "Running").message {
		s.events.Event(s.v, corev1.EventTypeWarning, running.reason, running.message)
	}
}

// seenClaims remembers which controller has looked at which claim. CDI's first look at one comes before its events.
type seenClaims struct{ known sync.Map }

func (s *seenClaims) first(component string, claim *corev1.PersistentVolumeClaim) bool {
	_, known := s.known.LoadOrStore(component+uidOf(claim), true)
	return !known
}

// boundFromEvents notes on a claim that waits what its latest event says; of a claim that is filled through another one
// what was said of that.
func (c *cdi) boundFromEvents(ctx context.Context, component string, claim *corev1.PersistentVolumeClaim) error {
	if c.clock.first(component, claim) || claim.Annotations == nil {
		return nil
	}
	old := claim.DeepCopy()
	if claim.Status.Phase == corev1.ClaimBound {
		for _, k := range []string{boundKey, boundKey + ".reason", boundKey + ".message"} {
			delete(claim.Annotations, k)
		}
		return c.patch(ctx, old, claim)
	}
	if claim.Status.Phase != corev1.ClaimPending {
		return nil
	}
	var events corev1.EventList
	if err := c.client.List(ctx, &events, client.InNamespace(claim.Namespace)); err != nil {
		return err
	}
	prefix := ""
	if prime, ok := claim.Annotations[primeNameKey]; ok {
		prefix = fmt.Sprintf("[%s] : ", prime)
	}
	var latest *corev1.Event
	for i := range events.Items {
		e := &events.Items[i]
		if e.InvolvedObject.UID != claim.UID || !strings.Contains(e.Message, prefix) {
			continue
		}
		switch {
		case latest == nil, e.LastTimestamp.After(latest.LastTimestamp.Time):
			latest = e
		case e.LastTimestamp.Equal(&latest.LastTimestamp) && len(e.Message) > len(latest.Message):
			latest = e
		}
	}
	if latest == nil {
		return nil
	}
	_, words, _ := strings.Cut(latest.Message, prefix)
	annotate(claim, boundKey, "false")
	annotate(claim, boundKey+".reason", "Pending")
	annotate(claim, boundKey+".message", words)
	return c.patch(ctx, old, claim)
}

// copyEvents repeats the events of a temporary claim on the target.
func (c *cdi) copyEvents(ctx context.Context, component string, from, to *corev1.PersistentVolumeClaim) error {
	said := map[string]bool{}
	var events corev1.EventList
	if err := c.client.List(ctx, &events, client.InNamespace(to.Namespace)); err != nil {
		return err
	}
	for _, e := range events.Items {
		if e.InvolvedObject.UID == to.UID {
			said[e.Message] = true
		}
	}
	if err := c.client.List(ctx, &events, client.InNamespace(from.Namespace)); err != nil {
		return err
	}
	for _, e := range events.Items {
		words := fmt.Sprintf("[%s] : %s", from.Name, e.Message)
		if e.InvolvedObject.UID == from.UID && !said[e.Message] && !said[words] {
			c.events[component].Event(to, e.Type, e.Reason, words)
		}
	}
	return nil
}
