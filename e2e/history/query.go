package history

import (
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Ref names an object, whichever UID it has.
type Ref struct {
	Resource  string // "machines.cluster.x-k8s.io", "pods"
	Namespace string
	Name      string
}

// RefOf is the name of an object of the given resource.
func RefOf(resource string, o *unstructured.Unstructured) Ref {
	return Ref{resource, o.GetNamespace(), o.GetName()}
}

// Lifetime is one object from its first to its last sighting. An object recreated under its name is another lifetime.
type Lifetime struct {
	Ref
	UID    string
	Kind   string
	Events []*Event // never empty; the first is Baseline or Added

	parents, ancestors []*Lifetime
}

// String is "Kind namespace/name".
func (l *Lifetime) String() string {
	if l.Namespace == "" {
		return l.Kind + " " + l.Name
	}
	return l.Kind + " " + l.Namespace + "/" + l.Name
}

// Last is the object's last known state.
func (l *Lifetime) Last() *unstructured.Unstructured { return l.Events[len(l.Events)-1].Object }

// First is the object's first known state.
func (l *Lifetime) First() *unstructured.Unstructured { return l.Events[0].Object }

// AtBaseline says whether the object was there before anything happened.
func (l *Lifetime) AtBaseline() bool { return l.Events[0].Type == Baseline }

// Alive says whether the object was still there at the end, deletion not even asked for.
func (l *Lifetime) Alive() bool {
	return l.Events[len(l.Events)-1].Type != Deleted && !deleting(l.Last())
}

// Deletion is the event by which the deletion was asked for or, without finalizers, done; nil when there is none.
// An object that was already being deleted at the baseline has none.
func (l *Lifetime) Deletion() *Event {
	if l.AtBaseline() && deleting(l.First()) {
		return nil
	}
	for _, e := range l.Events {
		if e.Type == Deleted || deleting(e.Object) {
			return e
		}
	}
	return nil
}

// Lifetimes are all objects of the given resources (all, when none is given), in the order of their first sighting.
func (h *History) Lifetimes(resources ...string) []*Lifetime {
	if len(resources) == 0 {
		return h.lives
	}
	var out []*Lifetime
	for _, l := range h.lives {
		for _, r := range resources {
			if l.Resource == r {
				out = append(out, l)
			}
		}
	}
	return out
}

// Lifetime is the object with this UID; nil when it was never seen.
func (h *History) Lifetime(uid string) *Lifetime { return h.byUID[uid] }

// Named are all lifetimes under one name, in order.
func (h *History) Named(ref Ref) []*Lifetime { return h.byName[ref] }

// Final is the object that had this name at the end; nil when there was none.
func (h *History) Final(ref Ref) *unstructured.Unstructured {
	lives := h.byName[ref]
	if len(lives) == 0 || lives[len(lives)-1].Events[len(lives[len(lives)-1].Events)-1].Type == Deleted {
		return nil
	}
	return lives[len(lives)-1].Last()
}

// Initial is the object that had this name at the baseline; nil when there was none.
func (h *History) Initial(ref Ref) *unstructured.Unstructured {
	for _, l := range h.byName[ref] {
		if l.AtBaseline() {
			return l.First()
		}
	}
	return nil
}

// At is the last event of the object of this name before a time; nil when there was none.
func (h *History) At(ref Ref, t time.Time) *Event {
	var last *Event
	for _, l := range h.byName[ref] {
		for _, e := range l.Events {
			if e.When().Before(t) {
				last = e
			}
		}
	}
	return last
}

// When is the time of an event: of the request that made it where that is known, else of its arrival.
func (e *Event) When() time.Time {
	if e.Writer != nil {
		return e.Writer.Time
	}
	return e.Time
}

// Phase is the phase that was running at a time; "" before the first.
func (h *History) Phase(t time.Time) string {
	phase := ""
	for _, m := range h.Marks {
		if m.At == "begin" && !m.Time.After(t) {
			phase = m.Phase
		}
	}
	return phase
}

// Begin is when a phase began (the first one of that name); ok is false when it never did.
func (h *History) Begin(phase string) (t time.Time, ok bool) {
	for _, m := range h.Marks {
		if m.Phase == phase && m.At == "begin" {
			return m.Time, true
		}
	}
	return time.Time{}, false
}

// Offset is the distance of a time from the begin of the upgrade (the first one) in seconds; from the record's start
// when no upgrade began.
func (h *History) Offset(t time.Time) float64 {
	zero, began := h.Begin(PhaseUpgrade)
	if !began {
		zero = h.Header.Started
	}
	return t.Sub(zero).Seconds()
}

// WritesTo are all requests that wrote to an object, refused ones included: by its UID, or by its name where the audit
// log kept no answer.
func (h *History) WritesTo(l *Lifetime) []*Write {
	var out []*Write
	for _, w := range h.Writes {
		if w.UID == l.UID || w.UID == "" && (Ref{w.Resource, w.Namespace, w.Name}) == l.Ref {
			out = append(out, w)
		}
	}
	return out
}

// OpenGaps are the gaps that nothing closes. An expired watch, as a restarted API server leaves it, is closed by the
// audit log: when the record has the result of every write to the resource from the time that the watch was last known
// to be complete until it was listed again.
func (h *History) OpenGaps() []Gap {
	var out []Gap
	for _, g := range h.Gaps {
		if g.Since == nil || !h.Header.Audit || !h.covered(g) {
			out = append(out, g)
		}
	}
	return out
}

func (h *History) covered(g Gap) bool {
	for _, w := range h.Writes {
		if w.Resource != g.Resource || !w.Succeeded() || w.Time.Before(g.Since.Add(-slack)) || w.Time.After(g.Time) || !inScope(w) {
			continue
		}
		lives := h.byName[Ref{w.Resource, w.Namespace, w.Name}]
		if w.UID != "" {
			lives = []*Lifetime{h.byUID[w.UID]}
		}
		if !slices.ContainsFunc(lives, func(l *Lifetime) bool {
			return l != nil && slices.ContainsFunc(l.Events, func(e *Event) bool {
				return e.Writer == w || w.UID != "" && e.Object.GetResourceVersion() == w.ResourceVersion
			})
		}) {
			return false
		}
	}
	return true
}

// inScope says whether the recorder would have kept the object of a write, as far as its name tells.
func inScope(w *Write) bool {
	switch w.Resource {
	case "secrets":
		return strings.HasPrefix(w.Name, releaseSecret)
	case "configmaps":
		return w.Namespace == platformNamespace
	}
	return true
}

// ShortUser is the last part of a service account's or system user's name: "capi-manager".
func ShortUser(user string) string {
	if user == "" {
		return "unknown"
	}
	return user[strings.LastIndex(user, ":")+1:]
}
