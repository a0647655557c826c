package verify

import (
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
)

func release(k history.ReleaseKey) Objects {
	return These(history.Ref{Resource: helmReleases, Namespace: k.Namespace, Name: k.Name})
}

// ValuesCarried claims that in the end the HelmRelease's spec.values hold what is wanted; other values may be there.
// Maps are compared key by key, everything else whole. A nil wants the key not to be there.
func ValuesCarried(of history.ReleaseKey, want map[string]any) Check {
	return each("values of "+of.Name, release(of), func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		have, _, _ := unstructured.NestedMap(o.Object, "spec", "values")
		return lacking("", normal(want).(map[string]any), normal(have).(map[string]any))
	})
}

func lacking(at string, want, have map[string]any) (why []string) {
	for _, key := range sortedKeys(want) {
		path := strings.TrimPrefix(at+"."+key, ".")
		value, has := have[key]
		inner, isMap := want[key].(map[string]any)
		innerHave, haveMap := value.(map[string]any)
		switch {
		case want[key] == nil && has:
			why = append(why, fmt.Sprintf("value %s is %s, and should not be there", path, asJSON(value)))
		case want[key] == nil:
		case !has:
			why = append(why, fmt.Sprintf("value %s is not there, want %s", path, asJSON(want[key])))
		case isMap && haveMap && len(inner) > 0:
			why = append(why, lacking(path, inner, innerHave)...)
		case !reflect.DeepEqual(want[key], value):
			why = append(why, fmt.Sprintf("value %s is %s, want %s", path, asJSON(value), asJSON(want[key])))
		}
	}
	return why
}

// ValuesDeclared claims that in the end the HelmRelease's spec.values hold only fields that the schema of its deployed
// chart declares.
func ValuesDeclared(of history.ReleaseKey) Check {
	return each("values of "+of.Name+" declared", release(of), func(h *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		r := h.Deployed(of)
		if r == nil || len(r.Schema) == 0 {
			return []string{"its release has no deployed revision whose chart has a schema"}
		}
		var schema map[string]any
		if err := json.Unmarshal(r.Schema, &schema); err != nil {
			return []string{fmt.Sprintf("the schema of its chart %s cannot be read: %v", r.Chart, err)}
		}
		values, _, _ := unstructured.NestedMap(o.Object, "spec", "values")
		return undeclared("", schema, values)
	})
}

// undeclared follows properties. A schema without properties declares nothing more, so anything may be below it.
func undeclared(at string, schema map[string]any, value any) (why []string) {
	values, isMap := value.(map[string]any)
	properties, declares := schema["properties"].(map[string]any)
	if !isMap || !declares {
		return nil
	}
	for _, key := range sortedKeys(values) {
		path := strings.TrimPrefix(at+"."+key, ".")
		property, has := properties[key].(map[string]any)
		if !has {
			why = append(why, fmt.Sprintf("value %s is not in the chart's schema", path))
			continue
		}
		why = append(why, undeclared(path, property, values[key])...)
	}
	return why
}

// LogLine claims that source printed at least n lines that match.
func LogLine(source string, pattern *regexp.Regexp, n int) Check {
	return newCheck(fmt.Sprintf("%s says %q", source, pattern), atTheEnd, func(h *history.History) ([]Evidence, string) {
		lines, matching := 0, 0
		for _, l := range h.Logs {
			if l.Source == source {
				lines++
				if pattern.MatchString(l.Line) {
					matching++
				}
			}
		}
		if matching < n {
			return []Evidence{missing("log "+source, fmt.Sprintf("%d of its %d lines match %q, want at least %d", matching, lines, pattern, n))}, ""
		}
		return nil, ""
	})
}

// Writes are the accepted requests to the objects by users that match, in the given phases (none given: in all of them).
// Requests without effect count: they were sent.
func Writes(h *history.History, user *regexp.Regexp, objects Objects, phases ...string) []*history.Write {
	var out []*history.Write
	for _, ref := range objects(h) {
		for _, l := range h.Named(ref) {
			for _, w := range h.WritesTo(l) {
				if w.Succeeded() && user.MatchString(w.User) && !slices.Contains(out, w) && (len(phases) == 0 || slices.Contains(phases, h.Phase(w.Time))) {
					out = append(out, w)
				}
			}
		}
	}
	return out
}

// NoWritesBy claims that no user that matches wrote to the objects.
func NoWritesBy(user *regexp.Regexp, objects Objects, phases ...string) Check {
	return newCheck(fmt.Sprintf("no write by %q", user), never, func(h *history.History) (found []Evidence, doubt string) {
		if doubt = unknownPhase(h, phases); len(objects(h)) == 0 {
			doubt = "no object was selected"
		}
		for _, w := range Writes(h, user, objects, phases...) {
			found = append(found, ofWrite(h, w, "written: "+strings.TrimSuffix(w.Verb+" "+w.Subresource, " ")))
		}
		return found, doubt
	})
}

// unknownPhase names a phase that never began: nothing can have happened in it.
func unknownPhase(h *history.History, phases []string) string {
	for _, p := range phases {
		if !anyOf(h.Marks, func(m history.Mark) bool { return m.Phase == p }) {
			return fmt.Sprintf("there was no phase %q", p)
		}
	}
	return ""
}

// NeverThere claims that no object of these names was ever seen.
func NeverThere(refs ...history.Ref) Check {
	return newCheck("never there", never, func(h *history.History) (found []Evidence, doubt string) {
		for _, ref := range refs {
			if !slices.Contains(h.Header.Kinds, ref.Resource) {
				doubt = ref.Resource + " was not recorded"
			}
			for _, l := range h.Named(ref) {
				found = append(found, of(h, l.Events[0], "was there"))
			}
		}
		return found, doubt
	})
}

// normal turns Go numbers, structs and slices into what JSON makes of them.
func normal(v any) any {
	var out any
	if err := json.Unmarshal([]byte(asJSON(v)), &out); err != nil || out == nil {
		return map[string]any{}
	}
	return out
}

func asJSON(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprintf("%v", v)
	}
	return string(out)
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
