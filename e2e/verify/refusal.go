package verify

import (
	"fmt"
	"regexp"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Refused claims that in the end a HelmRelease is not Ready with its last generation, and that its message tells the reason.
func Refused(of history.ReleaseKey, because *regexp.Regexp) Check {
	return each(fmt.Sprintf("%s refused with %q", of.Name, because), release(of), func(_ *history.History, l *history.Lifetime, o *unstructured.Unstructured) []string {
		if l.Alive() && o.GetResourceVersion() == l.Last().GetResourceVersion() { // not an earlier state, asked for since when
			o = history.LastTry(l)
		}
		switch why := history.ReleaseWaiting(o, nil, nil); {
		case why == "":
			return []string{"is Ready, and should not be"}
		case !because.MatchString(why):
			return []string{why}
		}
		return nil
	})
}

// PoolRefused claims the same of the release that renders a pool: its own, or its cluster's where the record has no release of
// the pool.
func PoolRefused(s Subject, because *regexp.Regexp) Check {
	return Check{Name: Refused(s.PoolRelease(), because).Name, Judge: func(h *history.History) Result { return Refused(s.renders(h), because).Judge(h) }}
}

// renders is the release that renders a pool.
func (s Subject) renders(h *history.History) history.ReleaseKey {
	own := s.PoolRelease()
	if len(h.Named(history.Ref{Resource: helmReleases, Namespace: own.Namespace, Name: own.Name})) > 0 {
		return own
	}
	return s.ClusterRelease()
}

// NeverRefused claims that no try of the release that renders a pool ended with a message that matches.
func NeverRefused(s Subject, because *regexp.Regexp) Check {
	return newCheck("never refused "+s.PoolRelease().Name, never, func(h *history.History) (found []Evidence, doubt string) {
		key := s.renders(h)
		tries := h.Named(history.Ref{Resource: helmReleases, Namespace: key.Namespace, Name: key.Name})
		if len(tries) == 0 {
			return nil, fmt.Sprintf("no HelmRelease %s/%s is in the record", key.Namespace, key.Name)
		}
		for _, l := range tries {
			for _, e := range l.Events {
				if why := history.ReleaseWaiting(e.Object, nil, nil); because.MatchString(why) {
					found = append(found, of(h, e, why))
					break // each try says it again
				}
			}
		}
		return found, ""
	})
}

// Workers claims that in the end at least n machines of the subject run.
func Workers(s Subject, n int) Check {
	return newCheck("workers of "+s.String(), atTheEnd, func(h *history.History) ([]Evidence, string) {
		var running int
		var found []Evidence
		for _, l := range h.Lifetimes(machines) {
			if !l.Alive() || !s.Selects(h, l) {
				continue
			}
			if phase := text(l.Last(), "status", "phase"); phase == "Running" {
				running++
			} else {
				found = append(found, lastOf(h, l, "is "+quoted(phase)+", not Running"))
			}
		}
		if running >= n {
			return nil, ""
		}
		return append(found, missing("workers of "+s.String(), fmt.Sprintf("%d machines run, want %d", running, n))), ""
	})
}

// WithinSurge claims that the subject's MachineDeployments never had more machines than asked for and their maxSurge, nor,
// once they had them all, fewer available ones than asked for less their maxUnavailable.
func WithinSurge(s Subject) Check {
	return newCheck("within surge of "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		seen := false
		for _, l := range h.Lifetimes(machineDeployments) {
			if !s.Selects(h, l) {
				continue
			}
			full := false
			for _, e := range l.Events {
				number := func(path ...string) int64 { n, _, _ := unstructured.NestedInt64(e.Object.Object, path...); return n }
				limit := func(field string, otherwise int) int64 {
					v, set, _ := unstructured.NestedFieldNoCopy(e.Object.Object, "spec", "strategy", "rollingUpdate", field)
					bound := intstr.FromInt(otherwise)
					if set {
						bound = intstr.Parse(fmt.Sprint(v))
					}
					n, err := intstr.GetScaledValueFromIntOrPercent(&bound, int(number("spec", "replicas")), field == "maxSurge")
					if err != nil {
						doubt = err.Error()
					}
					return int64(n)
				}
				seen = true
				want, have, available := number("spec", "replicas"), number("status", "replicas"), number("status", "availableReplicas")
				if most := want + limit("maxSurge", 1); have > most {
					found = append(found, of(h, e, fmt.Sprintf("has %d machines, at most %d are allowed", have, most)))
				}
				if least := want - limit("maxUnavailable", 0); full && available < least {
					found = append(found, of(h, e, fmt.Sprintf("has %d available machines, at least %d are wanted", available, least)))
				}
				full = full || available >= want
			}
		}
		if !seen {
			doubt = "no MachineDeployment of " + s.String() + " is in the record"
		}
		return found, doubt
	})
}
