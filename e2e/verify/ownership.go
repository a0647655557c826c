package verify

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pmezard/go-difflib/difflib"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/history"
)

const keepPolicy = "helm.sh/resource-policy"

// ownerOf is the release that an object's annotations name.
func ownerOf(o *unstructured.Unstructured) history.ReleaseKey {
	a := o.GetAnnotations()
	return history.ReleaseKey{Namespace: a["meta.helm.sh/release-namespace"], Name: a["meta.helm.sh/release-name"]}
}

// each runs judge over the last lifetime of every selected object that is there at the end, and reports those that are not.
func each(name string, objects Objects, judge func(*history.History, *history.Lifetime, *unstructured.Unstructured) []string) Check {
	return newCheck(name, atTheEnd, func(h *history.History) (found []Evidence, doubt string) {
		refs := objects(h)
		for _, ref := range refs {
			lives := h.Named(ref)
			o := h.Final(ref)
			switch {
			case len(lives) == 0:
				found = append(found, missing(ref.Resource+" "+ref.Namespace+"/"+ref.Name, "was never there"))
			case o == nil:
				found = append(found, lastOf(h, lives[len(lives)-1], "is gone"))
			default:
				l := lives[len(lives)-1]
				for _, why := range judge(h, l, o) {
					found = append(found, of(h, since(l, func(o *unstructured.Unstructured) bool {
						return slices.Contains(judge(h, l, o), why)
					}), why))
				}
			}
		}
		if len(refs) == 0 {
			return found, "no object was selected"
		}
		return found, ""
	})
}

// since is the event from which on something has been so until the end.
func since(l *history.Lifetime, so func(*unstructured.Unstructured) bool) *history.Event {
	i := len(l.Events) - 1
	for i > 0 && so(l.Events[i-1].Object) {
		i--
	}
	return l.Events[i]
}

// Annotated claims that in the end the live objects name the release, by annotations and label. It is half of Owned, for
// objects whose release was not installed.
func Annotated(objects Objects, release history.ReleaseKey) Check {
	return each("annotated to "+release.Name, objects, func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		return notAnnotated(o, release)
	})
}

func notAnnotated(o *unstructured.Unstructured, release history.ReleaseKey) (why []string) {
	if is := ownerOf(o); is != release {
		why = append(why, fmt.Sprintf("its annotations name release %q in %q, not %q in %q", is.Name, is.Namespace, release.Name, release.Namespace))
	}
	if by := o.GetLabels()["app.kubernetes.io/managed-by"]; by != "Helm" {
		why = append(why, fmt.Sprintf("label app.kubernetes.io/managed-by is %q, not Helm", by))
	}
	return why
}

// Owned claims that in the end the objects belong to a release: by annotations and label, by its last deployed stored
// manifest, and no longer by the former release's one (zero: there was none).
func Owned(objects Objects, release, former history.ReleaseKey) Check {
	return each("owned by "+release.Name, objects, func(h *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		why := notAnnotated(o, release)
		if r := h.Deployed(release); r == nil {
			why = append(why, fmt.Sprintf("release %s has no deployed revision", release.Name))
		} else if !r.Has(o) {
			why = append(why, fmt.Sprintf("the stored manifest of %s revision %d lacks it", r.Name, r.Revision))
		}
		if r := h.Deployed(former); r != nil && r.Has(o) {
			why = append(why, fmt.Sprintf("the stored manifest of %s revision %d still holds it", r.Name, r.Revision))
		}
		return why
	})
}

// Pinned claims that in the end the live objects carry helm.sh/resource-policy: keep.
func Pinned(objects Objects) Check {
	return each("pinned", objects, func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		if policy := o.GetAnnotations()[keepPolicy]; policy != "keep" {
			return []string{fmt.Sprintf("annotation %s is %q, not keep", keepPolicy, policy)}
		}
		return nil
	})
}

// Kept claims that the objects are there at the end and are the same ones as at the baseline, by UID.
func Kept(objects Objects) Check {
	return each("kept", objects, func(h *history.History, l *history.Lifetime, o *unstructured.Unstructured) []string {
		first := h.Named(l.Ref)[0]
		switch {
		case !first.AtBaseline():
			return []string{"was not there at the baseline"}
		case first.UID != string(o.GetUID()):
			return []string{"was recreated, at the baseline it had uid " + first.UID}
		case !l.Alive():
			return []string{"is being deleted"}
		}
		return nil
	})
}

// NotAdopted claims that in the end the objects belong to whom they belonged to at the baseline, and that the release
// does not hold them.
func NotAdopted(objects Objects, release history.ReleaseKey) Check {
	return each("not adopted by "+release.Name, objects, func(h *history.History, l *history.Lifetime, o *unstructured.Unstructured) (why []string) {
		if was := h.Initial(l.Ref); was == nil {
			why = append(why, "was not there at the baseline")
		} else if before, now := ownerOf(was), ownerOf(o); before != now {
			why = append(why, fmt.Sprintf("its annotations name release %q, at the baseline %q", now.Name, before.Name))
		}
		if r := h.Deployed(release); r != nil && r.Has(o) {
			why = append(why, fmt.Sprintf("the stored manifest of %s revision %d holds it", r.Name, r.Revision))
		}
		return why
	})
}

// Labelled claims that in the end the objects carry the labels.
func Labelled(objects Objects, labels map[string]string) Check {
	return each("labelled", objects, func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) (why []string) {
		for _, key := range slices.Sorted(maps.Keys(labels)) {
			if is := o.GetLabels()[key]; is != labels[key] {
				why = append(why, fmt.Sprintf("label %s is %q, not %q", key, is, labels[key]))
			}
		}
		return why
	})
}

// FieldKept claims that a field of the objects is the same at the end as at the baseline, for example
// FieldKept(deployments, "spec", "replicas").
func FieldKept(objects Objects, path ...string) Check {
	return each(fmt.Sprintf("kept field %v", path), objects, func(h *history.History, l *history.Lifetime, o *unstructured.Unstructured) []string {
		was := h.Initial(l.Ref)
		if was == nil {
			return []string{"was not there at the baseline"}
		}
		if before, now := text(was, path...), text(o, path...); before != now {
			return []string{fmt.Sprintf("%v: %s → %s", path, quoted(before), quoted(now))}
		}
		return nil
	})
}

// FieldIs claims that a field of the objects has this value in the end, for example
// FieldIs(deployments, "3", "spec", "replicas").
func FieldIs(objects Objects, want string, path ...string) Check {
	return each(fmt.Sprintf("field %v is %s", path, want), objects, func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		if is := text(o, path...); is != want {
			return []string{fmt.Sprintf("%v is %s, want %s", path, quoted(is), quoted(want))}
		}
		return nil
	})
}

// SpecKept claims that in the end the objects have the spec that they had at the baseline. What differs is told as a diff. A
// WorkloadMonitor's version may move: it is that of its chart.
func SpecKept(objects Objects) Check {
	return each("spec kept", objects, func(h *history.History, l *history.Lifetime, o *unstructured.Unstructured) []string {
		was := h.Initial(l.Ref)
		if was == nil {
			return []string{"was not there at the baseline"}
		}
		if d := specDiff(unversioned(was), unversioned(o)); d != "" {
			return []string{"has another spec:\n" + d}
		}
		return nil
	})
}

// unversioned is a WorkloadMonitor without its version, and any other object as it is.
func unversioned(o *unstructured.Unstructured) *unstructured.Unstructured {
	if o.GetKind() == "WorkloadMonitor" {
		o = o.DeepCopy()
		unstructured.RemoveNestedField(o.Object, "spec", "version")
	}
	return o
}

// TemplateUnchanged claims that the machine templates of the subject are the same objects with the same spec, and that no
// other one appeared. What differs is told as a diff: between before and after, or from the pool's template of the
// baseline to the one that appeared.
func TemplateUnchanged(s Subject) Check {
	return newCheck("templates unchanged of "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		var old []*history.Lifetime
		for _, l := range h.Lifetimes(machineTemplates) {
			if !s.Selects(h, l) {
				continue
			}
			if !l.AtBaseline() {
				what := "appeared"
				for _, o := range old { // names differ in the hash alone
					if stem(o.Name) == stem(l.Name) {
						what = "appeared; against " + o.Name + ":\n" + specDiff(o.First(), l.First())
					}
				}
				found = append(found, of(h, l.Events[0], what))
				continue
			}
			old = append(old, l)
			if d := l.Deletion(); d != nil {
				found = append(found, of(h, d, "deleted"))
			}
			for _, e := range l.Events[1:] {
				if d := specDiff(e.Before, e.Object); d != "" {
					found = append(found, of(h, e, "changed:\n"+d))
				}
			}
		}
		if len(old) == 0 {
			return found, s.String() + " has no machine template at the baseline"
		}
		return found, ""
	})
}

// stem is a template's name without its hash.
func stem(name string) string { return name[:strings.LastIndex(name, "-")+1] }

// specDiff is the unified diff of two specs as YAML; "" when they are equal.
func specDiff(a, b *unstructured.Unstructured) string {
	lines := func(o *unstructured.Unstructured) []string {
		out, err := yaml.Marshal(o.Object["spec"])
		if err != nil { // cannot happen for what came out of JSON
			return []string{err.Error()}
		}
		return difflib.SplitLines(string(out))
	}
	diff, err := difflib.GetUnifiedDiffString(difflib.UnifiedDiff{A: lines(a), B: lines(b), FromFile: a.GetName(), ToFile: b.GetName(), Context: 2})
	if err != nil {
		return err.Error()
	}
	return diff
}
