package verify

import (
	"fmt"
	"strconv"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Converged claims that every HelmRelease of the subject is Ready at the end, with its last generation and with the
// artifact that its chart's source offers at the end. mayFail (nil: none) excuses releases that are expected to fail.
func Converged(s Subject, mayFail history.MayFail) Check {
	return newCheck("converged "+s.String(), atTheEnd, func(h *history.History) (found []Evidence, doubt string) {
		releases := 0
		for _, l := range h.Lifetimes(helmReleases) {
			if !s.Selects(h, l) {
				continue
			}
			releases++
			hr := h.Final(l.Ref)
			switch {
			case hr == nil:
				found = append(found, lastOf(h, l, "is gone"))
			case string(hr.GetUID()) == l.UID: // an earlier lifetime says nothing about the end
				if l.Alive() {
					hr = history.LastTry(l)
				}
				kind, ns, name := history.ChartRef(hr)
				artifact := h.Final(history.Ref{Resource: externalArtifacts, Namespace: ns, Name: name})
				if excused := history.ReleaseWaiting(hr, nil, mayFail) == "" && history.ReleaseWaiting(hr, nil, nil) != ""; excused {
					continue
				}
				if kind == "ExternalArtifact" && artifact == nil && text(hr, "spec", "suspend") != "true" {
					found = append(found, lastOf(h, l, fmt.Sprintf("its chart's source ExternalArtifact %s/%s is not there", ns, name)))
				} else if why := history.ReleaseWaiting(hr, artifact, mayFail); why != "" {
					found = append(found, lastOf(h, l, why))
				}
			}
		}
		if releases == 0 {
			return found, s.String() + " has no HelmRelease"
		}
		return found, ""
	})
}

// Isolated claims that no object of the others was written because of the subject: none came under a release of the
// subject, none was changed by a chain of writes that goes through an object of the subject, and no service account of
// the subject's namespace wrote into another's.
func Isolated(s Subject, others ...Subject) Check {
	return newCheck("isolated "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		foreign := 0
		for _, l := range h.Lifetimes() {
			if l.Kind == "Event" || namespaceOf(l) == s.Namespace && s.Selects(h, l) || !anyOf(others, func(o Subject) bool { return o.Selects(h, l) }) {
				continue
			}
			foreign++
			for _, e := range l.Events {
				if why := s.because(h, e); why != "" {
					found = append(found, of(h, e, why))
				}
			}
		}
		own := "system:serviceaccount:" + s.Namespace + ":"
		for _, w := range h.Writes {
			if w.Succeeded() && strings.HasPrefix(w.User, own) && w.Namespace != s.Namespace &&
				anyOf(others, func(o Subject) bool { return o.Namespace == w.Namespace }) {
				found = append(found, ofWrite(h, w, w.Verb+" by a service account of "+s.Namespace))
			}
		}
		if foreign == 0 {
			return found, "the others have no object that could have been written"
		}
		return found, ""
	})
}

// because says how an event of another's object goes back to the subject; "" when it does not.
func (s Subject) because(h *history.History, e *history.Event) string {
	if e.Type == history.Baseline {
		return ""
	}
	before := history.ReleaseKey{}
	if e.Before != nil {
		before = ownerOf(e.Before)
	}
	if owner := ownerOf(e.Object); owner != before && owner.Name != "" {
		for _, hr := range h.Named(history.Ref{Resource: helmReleases, Namespace: owner.Namespace, Name: owner.Name}) {
			if s.Selects(h, hr) {
				return "taken over by release " + owner.Name
			}
		}
	}
	for _, cause := range h.Causes(e)[1:] {
		if s.Selects(h, cause.Life) {
			return e.Word() + " because of " + cause.Life.String()
		}
	}
	return ""
}

// Untouched claims that nothing was written in the namespaces, by the audit log. Events and leases do not count.
func Untouched(names ...string) Check {
	return newCheck("untouched "+strings.Join(names, ", "), never, func(h *history.History) (found []Evidence, doubt string) {
		for _, ns := range names {
			if h.Initial(history.Ref{Resource: namespaces, Name: ns}) == nil {
				return found, fmt.Sprintf("there is no namespace %s at the baseline", ns)
			}
		}
		for _, w := range h.Writes {
			noise := w.Resource == "events" || w.Resource == "events.events.k8s.io" || w.Resource == "leases.coordination.k8s.io"
			if w.Succeeded() && !noise && anyOf(names, func(ns string) bool {
				return w.Namespace == ns || w.Resource == namespaces && w.Name == ns
			}) {
				found = append(found, ofWrite(h, w, "written: "+w.Verb))
			}
		}
		return found, ""
	})
}

// FleetDone claims that the platform's version stands at the target in the end.
func FleetDone(target int) Check {
	return newCheck("fleet done", atTheEnd, func(h *history.History) ([]Evidence, string) {
		ref := history.Ref{Resource: configMaps, Namespace: "cozy-system", Name: "cozystack-version"}
		if h.Final(ref) == nil {
			return []Evidence{missing("ConfigMap cozy-system/cozystack-version", "is not there")}, ""
		}
		if version := text(h.Final(ref), "data", "version"); version != strconv.Itoa(target) {
			lives := h.Named(ref)
			return []Evidence{lastOf(h, lives[len(lives)-1], fmt.Sprintf("version is %q, not %d", version, target))}, ""
		}
		return nil, ""
	})
}
