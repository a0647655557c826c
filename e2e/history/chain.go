package history

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Resources that the relations between objects need to name.
const (
	kubevirtMachines = "kubevirtmachines.infrastructure.cluster.x-k8s.io"
	instances        = "virtualmachineinstances.kubevirt.io"
	labelMachine     = "capk.cluster.x-k8s.io/kubevirt-machine-name"
	labelMachineNS   = "capk.cluster.x-k8s.io/kubevirt-machine-namespace"
)

// Parents are the objects on whose account this one exists: its owners, and where Kubernetes has no owner reference,
// CAPK's label from VirtualMachine to KubevirtMachine, the claim of a PersistentVolume, the instance of a migration.
func (h *History) Parents(l *Lifetime) []*Lifetime { return l.parents }

func (h *History) parentsOf(l *Lifetime) []*Lifetime {
	var out []*Lifetime
	o := l.Last()
	add := func(p *Lifetime) {
		if p != nil && p != l {
			out = append(out, p)
		}
	}
	for _, ref := range o.GetOwnerReferences() {
		add(h.byUID[string(ref.UID)])
	}
	if name := o.GetLabels()[labelMachine]; name != "" {
		ns := o.GetLabels()[labelMachineNS]
		if ns == "" {
			ns = l.Namespace
		}
		add(h.alongside(Ref{kubevirtMachines, ns, name}, l))
	}
	switch l.Kind {
	case "PersistentVolume":
		uid, _, _ := unstructured.NestedString(o.Object, "spec", "claimRef", "uid")
		add(h.byUID[uid])
	case "VirtualMachineInstanceMigration":
		name, _, _ := unstructured.NestedString(o.Object, "spec", "vmiName")
		add(h.alongside(Ref{instances, l.Namespace, name}, l))
	}
	return out
}

// alongside is the last object of that name that was there before l was first seen, or the first one after it.
func (h *History) alongside(ref Ref, l *Lifetime) *Lifetime {
	var found *Lifetime
	for _, p := range h.byName[ref] {
		if found == nil || !p.Events[0].When().After(l.Events[0].When()) {
			found = p
		}
	}
	return found
}

// Ancestors are the object's parents, their parents and so on, nearest first, each once.
func (h *History) Ancestors(l *Lifetime) []*Lifetime { return l.ancestors }

func ancestorsOf(l *Lifetime) []*Lifetime {
	seen, out := map[*Lifetime]bool{l: true}, []*Lifetime{}
	for queue := []*Lifetime{l}; len(queue) > 0; queue = queue[1:] {
		for _, p := range queue[0].parents {
			if !seen[p] {
				seen[p] = true
				out, queue = append(out, p), append(queue, p)
			}
		}
	}
	return out
}

// Causes are the events that led to this one, itself first, back to the first write that no controller made on account
// of another object: by Helm, the migration or a human, or where the record knows no more.
func (h *History) Causes(e *Event) []*Event {
	out, seen := []*Event{e}, map[*Lifetime]bool{e.Life: true}
	for !original(e.Writer) {
		var cause *Event
		for _, p := range e.Life.parents {
			if c := trigger(p, e); c != nil && !seen[p] && (cause == nil || c.When().After(cause.When())) {
				cause = c
			}
		}
		if cause == nil {
			break
		}
		seen[cause.Life] = true
		out, e = append(out, cause), cause
	}
	return out
}

// trigger is what e's writer can have acted on: the parent's deletion if e is one too, else the parent's last change of
// substance before e.
func trigger(parent *Lifetime, e *Event) *Event {
	if e.Type == Deleted || deleting(e.Object) {
		if d := parent.Deletion(); d != nil && !d.When().After(e.When()) {
			return d
		}
	}
	var last *Event
	for _, p := range parent.Events {
		if substantial(p) && !p.When().After(e.When()) {
			last = p
		}
	}
	return last
}

// substantial says whether an event is more than a change of status or metadata.
func substantial(e *Event) bool {
	return e.Type == Added || e.Type == Deleted || e.Before != nil && e.Object.GetGeneration() != e.Before.GetGeneration()
}

// original says whether a write was not a controller's reaction to another object.
func original(w *Write) bool {
	return w != nil && (!strings.HasPrefix(w.User, "system:") || strings.HasPrefix(w.Agent, "helm") || strings.HasPrefix(w.Agent, "Helm") || strings.HasPrefix(w.Agent, "kubectl"))
}

// Chain tells Causes in words, one link each: "VirtualMachine t/x deleted by capk-manager", "KubevirtMachine t/x deleted
// by capi-manager", "MachineDeployment t/m deleted by helm-controller upgrading release kubernetes-prod to revision 2".
func (h *History) Chain(e *Event) []string {
	var out []string
	if e.Type == Baseline {
		return nil
	}
	for _, c := range h.Causes(e) {
		link := fmt.Sprintf("%s %s by %s", c.Life, c.Word(), c.by())
		if c.Writer != nil && strings.Contains(strings.ToLower(c.Writer.Agent+c.Writer.User), "helm") {
			if r, word := h.Operation(c); r != nil {
				link += fmt.Sprintf(" %s release %s to revision %d", word, r.Name, r.Revision)
			}
		}
		out = append(out, link)
	}
	return out
}

// Word is what the event did: created, deleted, changed, or updated where the spec stayed as it was.
func (e *Event) Word() string {
	switch {
	case e.Type == Deleted || deleting(e.Object) && !deleting(e.Before):
		return "deleted"
	case e.Type == Added:
		return "created"
	case substantial(e):
		return "changed"
	}
	return "updated"
}

func (e *Event) by() string {
	if e.Writer == nil {
		return "unknown"
	}
	if strings.Contains(e.Writer.User, "generic-garbage-collector") || strings.Contains(e.Writer.Agent, "generic-garbage-collector") {
		return "the garbage collector"
	}
	return ShortUser(e.Writer.User)
}
