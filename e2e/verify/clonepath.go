package verify

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
)

const (
	cloneType      = "cdi.kubevirt.io/cloneType"
	cloneFallback  = "cdi.kubevirt.io/cloneFallbackReason"
	networkBytes   = "upgrade-e2e/network-bytes" // the stand-ins count what an upload pod takes; real CDI does not say
	cloneTarget    = "cdi.kubevirt.io/storage.ownerRef"
	componentLabel = "cdi.kubevirt.io"
)

// ClonePath claims that at least n disks of the subject were cloned from the golden image, each in the storage layer: by
// snapshot or csi-clone in the end, without a reason to fall back, without a pod at any time that sends or takes its data,
// and so without a byte over the pod network; and that the golden itself was imported once.
func ClonePath(s Subject, golden history.Ref, n int) Check {
	return newCheck("clone path of "+s.String(), atTheEnd, func(h *history.History) (found []Evidence, doubt string) {
		clones := 0
		for _, l := range h.Lifetimes(volumeClaims) {
			if !s.Selects(h, l) || !clonedFrom(h, l, golden) {
				continue
			}
			if l.Alive() && text(l.Last(), "status", "phase") == "Bound" {
				clones++
			}
			found = append(append(found, strategy(h, l)...), copied(h, l)...)
		}
		if clones < n {
			found = append(found, missing("disks of "+s.String(), fmt.Sprintf("%d are clones of %s/%s, want %d", clones, golden.Namespace, golden.Name, n)))
		}
		if imports := importers(h, golden); len(imports) != 1 {
			found = append(found, missing(fmt.Sprintf("golden image %s/%s", golden.Namespace, golden.Name), fmt.Sprintf("was imported %d times, want once", len(imports))))
		}
		return found, ""
	})
}

// DisksOn claims that every disk of the subject that a DataVolume asks for is of a StorageClass, whatever class is the
// default when.
func DisksOn(s Subject, class string) Check {
	return newCheck("class of disks of "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		seen := false
		for _, l := range h.Lifetimes(volumeClaims) {
			if !s.Selects(h, l) || !anyOf(h.Ancestors(l), func(a *history.Lifetime) bool { return a.Kind == "DataVolume" }) {
				continue
			}
			seen = true
			if got := text(l.Last(), "spec", "storageClassName"); got != class {
				found = append(found, lastOf(h, l, fmt.Sprintf("is of StorageClass %q", got)))
			}
		}
		if !seen {
			doubt = "no disk of " + s.String() + " is in the record"
		}
		return found, doubt
	})
}

// CloneWaits claims that in the end a DataVolume of the subject still waits for the golden image, and that one of its
// conditions tells the reason.
func CloneWaits(s Subject, golden history.Ref, because *regexp.Regexp) Check {
	return newCheck("clone waits of "+s.String(), atTheEnd, func(h *history.History) (found []Evidence, doubt string) {
		for _, l := range h.Lifetimes(dataVolumes) {
			if !l.Alive() || !s.Selects(h, l) || !asksFor(l, golden) {
				continue
			}
			if phase := text(l.Last(), "status", "phase"); phase == "Succeeded" || phase == "Failed" {
				found = append(found, lastOf(h, l, "does not wait, it is "+phase))
				continue
			}
			conditions, _, _ := unstructured.NestedSlice(l.Last().Object, "status", "conditions")
			var said []string
			for _, c := range conditions {
				condition, _ := c.(map[string]any)
				said = append(said, fmt.Sprintf("%v=%v %v %v", condition["type"], condition["status"], condition["reason"], condition["message"]))
			}
			if because.MatchString(strings.Join(said, "\n")) {
				return nil, ""
			}
			found = append(found, lastOf(h, l, "waits and says "+strings.Join(said, ", ")))
		}
		if len(found) == 0 {
			found = append(found, missing("disks of "+s.String(), fmt.Sprintf("no DataVolume asks for %s/%s", golden.Namespace, golden.Name)))
		}
		return found, ""
	})
}

// AskedWhileImporting claims that the subject's first clone was asked for before the golden image was there: that it
// waited is seen only then.
func AskedWhileImporting(s Subject, golden history.Ref) Check {
	return newCheck("asked while importing of "+s.String(), never, func(h *history.History) ([]Evidence, string) {
		var first, imported *history.Event
		for _, l := range h.Lifetimes(dataVolumes) {
			if first == nil && s.Selects(h, l) && asksFor(l, golden) {
				first = l.Events[0]
			}
		}
		for _, l := range h.Named(golden) {
			for _, e := range l.Events {
				if imported == nil && text(e.Object, "status", "phase") == "Succeeded" {
					imported = e
				}
			}
		}
		switch {
		case first == nil:
			return nil, fmt.Sprintf("no disk of %s asks for %s", s, golden.Name)
		case imported == nil:
			return nil, golden.Name + " was never imported"
		case !first.When().Before(imported.When()):
			return nil, fmt.Sprintf("%s was imported %s before a disk of %s asked for it", golden.Name, first.When().Sub(imported.When()).Round(time.Second), s)
		}
		return nil, ""
	})
}

// asksFor says whether a DataVolume is a clone of the golden image.
func asksFor(l *history.Lifetime, golden history.Ref) bool {
	return text(l.First(), "spec", "source", "pvc", "name") == golden.Name && text(l.First(), "spec", "source", "pvc", "namespace") == golden.Namespace
}

// clonedFrom says whether a claim's DataVolume names the golden image as its source.
func clonedFrom(h *history.History, claim *history.Lifetime, golden history.Ref) bool {
	return anyOf(h.Ancestors(claim), func(l *history.Lifetime) bool {
		return l.Kind == "DataVolume" && asksFor(l, golden)
	})
}

func strategy(h *history.History, l *history.Lifetime) []Evidence {
	a := l.Last().GetAnnotations()
	switch t := a[cloneType]; {
	case a[cloneFallback] != "":
		return []Evidence{lastOf(h, l, fmt.Sprintf("was cloned by %q: %s", t, a[cloneFallback]))}
	case t == "" && text(l.Last(), "status", "phase") != "Bound": // not decided yet
		return nil
	case t != "snapshot" && t != "csi-clone":
		return []Evidence{lastOf(h, l, fmt.Sprintf("was cloned by %q", t))}
	}
	return nil
}

// copied are the pods that copied a claim's data, alive or not.
func copied(h *history.History, claim *history.Lifetime) (found []Evidence) {
	temporary := "tmp-pvc-" + claim.UID
	for _, l := range h.Lifetimes(pods) {
		pod := l.First()
		kind := pod.GetLabels()[componentLabel]
		to := pod.GetAnnotations()[cloneTarget]
		mine := kind == "cdi-clone-source" && (to == claim.Namespace+"/"+claim.Name || strings.HasSuffix(to, "/"+temporary)) ||
			kind == "cdi-upload-server" && (l.Namespace == claim.Namespace && uses(pod, claim.Name) || uses(pod, temporary))
		if !mine {
			continue
		}
		change := fmt.Sprintf("copies the data of PersistentVolumeClaim %s/%s", claim.Namespace, claim.Name)
		if q, err := resource.ParseQuantity(pod.GetAnnotations()[networkBytes]); err == nil {
			change += fmt.Sprintf(": %d bytes over the pod network", q.Value())
		}
		found = append(found, of(h, l.Events[0], change))
	}
	return found
}

// importers are the pods that imported a golden image, to its own claim or to the one that its volume comes from.
func importers(h *history.History, golden history.Ref) (found []*history.Lifetime) {
	written := []string{golden.Name}
	for _, l := range h.Named(history.Ref{Resource: volumeClaims, Namespace: golden.Namespace, Name: golden.Name}) {
		written = append(written, "prime-"+l.UID)
	}
	for _, l := range h.Lifetimes(pods) {
		pod := l.First()
		if l.Namespace == golden.Namespace && pod.GetLabels()[componentLabel] == "importer" &&
			!strings.HasPrefix(l.Name, "size-detection-") && slices.ContainsFunc(written, func(name string) bool { return uses(pod, name) }) {
			found = append(found, l)
		}
	}
	return found
}

// uses says whether a pod has a claim among its volumes.
func uses(pod *unstructured.Unstructured, claim string) bool {
	volumes, _, _ := unstructured.NestedSlice(pod.Object, "spec", "volumes")
	return slices.ContainsFunc(volumes, func(v any) bool {
		volume, _ := v.(map[string]any)
		name, _, _ := unstructured.NestedString(volume, "persistentVolumeClaim", "claimName")
		return name == claim
	})
}
