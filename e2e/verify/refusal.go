package verify

import (
	"fmt"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

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

// NoKeyTwice claims that no stored manifest of the release names a key of an object twice. Whoever applies such a manifest
// takes the last one, and what the chart wrote before is void.
func NoKeyTwice(of history.ReleaseKey) Check {
	return newCheck("no key twice in "+of.Name, never, func(h *history.History) (found []Evidence, doubt string) {
		for _, r := range h.Releases(of) {
			for _, doc := range strings.Split("\n"+r.Manifest, "\n---") {
				var o map[string]any
				if err := yaml.UnmarshalStrict([]byte(doc), &o); err != nil {
					found = append(found, missing(fmt.Sprintf("Helm release %s/%s revision %d", r.Namespace, r.Name, r.Revision), err.Error()))
				}
			}
		}
		if len(h.Releases(of)) == 0 {
			return nil, fmt.Sprintf("no revision of release %s/%s was recorded", of.Namespace, of.Name)
		}
		return found, ""
	})
}
