package history

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// ReleaseKey names a Helm release.
type ReleaseKey struct{ Namespace, Name string }

// Release is one revision of a Helm release as Helm stored it, in its last recorded state.
type Release struct {
	ReleaseKey
	Revision     int
	Status       string // deployed, superseded, failed, pending-upgrade, uninstalling …
	Chart        string
	ChartVersion string
	Values       map[string]any // as the user gave them, valuesFrom included
	Schema       []byte         // the chart's values.schema.json; nil when it has none
	Objects      []*unstructured.Unstructured

	states []releaseState
}

type releaseState struct {
	when   time.Time
	status string
}

// DecodeRelease decodes a Secret of type helm.sh/release.v1: JSON, gzipped, in base64, and that in the Secret's own base64.
func DecodeRelease(secret *unstructured.Unstructured) (*Release, error) {
	fail := func(err error) (*Release, error) {
		return nil, fmt.Errorf("decode the Helm release in Secret %s/%s: %w", secret.GetNamespace(), secret.GetName(), err)
	}
	text, _, err := unstructured.NestedString(secret.Object, "data", "release")
	if err != nil {
		return fail(err)
	}
	raw := []byte(text)
	for range 2 {
		if raw, err = base64.StdEncoding.DecodeString(string(raw)); err != nil {
			return fail(err)
		}
	}
	zipped, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return fail(err)
	}
	var stored struct {
		Name, Namespace, Manifest string
		Version                   int
		Info                      struct{ Status string }
		Config                    map[string]any
		Chart                     struct {
			Metadata struct{ Name, Version string }
			Schema   []byte
		}
	}
	if err := json.NewDecoder(zipped).Decode(&stored); err != nil {
		return fail(err)
	}
	r := &Release{
		ReleaseKey: ReleaseKey{stored.Namespace, stored.Name}, Revision: stored.Version, Status: stored.Info.Status,
		Chart: stored.Chart.Metadata.Name, ChartVersion: stored.Chart.Metadata.Version, Values: stored.Config, Schema: stored.Chart.Schema,
	}
	if r.Objects, err = decodeManifest(stored.Manifest, stored.Namespace); err != nil {
		return fail(err)
	}
	return r, nil
}

func decodeManifest(manifest, namespace string) ([]*unstructured.Unstructured, error) {
	docs := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(manifest)))
	var out []*unstructured.Unstructured
	for {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		var o map[string]any
		if err := yaml.Unmarshal(doc, &o); err != nil {
			return nil, err
		}
		if len(o) == 0 {
			continue
		}
		u := &unstructured.Unstructured{Object: o}
		if u.GetNamespace() == "" {
			u.SetNamespace(namespace)
		}
		out = append(out, u)
	}
}

// Has says whether the release's stored manifest holds the object: same group, kind and name, and the same namespace
// unless the object has none.
func (r *Release) Has(o *unstructured.Unstructured) bool { return r.Find(o) != nil }

// Find is the object as the stored manifest has it; nil when it has not.
func (r *Release) Find(o *unstructured.Unstructured) *unstructured.Unstructured {
	for _, m := range r.Objects {
		if m.GroupVersionKind().GroupKind() == o.GroupVersionKind().GroupKind() && m.GetName() == o.GetName() &&
			(o.GetNamespace() == "" || m.GetNamespace() == o.GetNamespace()) {
			return m
		}
	}
	return nil
}

func (h *History) addRelease(e *Event) error {
	if e.Resource != "secrets" || e.Type == Deleted {
		return nil
	}
	r, err := DecodeRelease(e.Object)
	if err != nil {
		return err
	}
	known := h.releases[r.ReleaseKey]
	for i, old := range known {
		if old.Revision == r.Revision {
			r.states = append(old.states, releaseState{e.When(), r.Status})
			known[i] = r
			return nil
		}
	}
	r.states = []releaseState{{e.When(), r.Status}}
	known = append(known, r)
	sort.Slice(known, func(i, j int) bool { return known[i].Revision < known[j].Revision })
	h.releases[r.ReleaseKey] = known
	return nil
}

// Releases are all recorded revisions of a release in order, each in its last state.
func (h *History) Releases(k ReleaseKey) []*Release { return h.releases[k] }

// Deployed is the last revision of a release that was deployed at the end; nil when there is none.
func (h *History) Deployed(k ReleaseKey) *Release {
	all := h.releases[k]
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].Status == "deployed" {
			return all[i]
		}
	}
	return nil
}

// slack covers the time that a watch event takes from the API server to the recorder.
const slack = time.Second

// Operation is the revision of a release that Helm was working on when the event happened, found by the stored
// manifests: its own, or that of the revision before, holds the object. The word says what Helm was doing, "upgrading".
// It is nil when no release fits.
func (h *History) Operation(e *Event) (r *Release, word string) {
	words := map[string]string{"pending-install": "installing", "pending-upgrade": "upgrading", "pending-rollback": "rolling back", "uninstalling": "uninstalling"}
	when := e.When()
	var at time.Time
	for _, revisions := range h.releases {
		for i, candidate := range revisions {
			if !candidate.Has(e.Object) && (i == 0 || !revisions[i-1].Has(e.Object)) {
				continue
			}
			for j, s := range candidate.states {
				ended := j+1 < len(candidate.states) && candidate.states[j+1].when.Add(slack).Before(when)
				if words[s.status] != "" && !ended && !s.when.After(when.Add(slack)) && s.when.After(at) {
					r, word, at = candidate, words[s.status], s.when
				}
			}
		}
	}
	return r, word
}
