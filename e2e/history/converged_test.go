package history_test

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
)

func ready(status string, generation int64, message string) func(*unstructured.Unstructured) {
	return ht.Set("status.conditions", []any{
		map[string]any{"type": "Reconciling", "status": "True"},
		map[string]any{"type": "Ready", "status": status, "observedGeneration": generation, "message": message},
	})
}

func TestReleaseWaiting(t *testing.T) {
	digest := ht.Object("ExternalArtifact", "cozy-system/chart", ht.Set("status.artifact.revision", "1.0.0@sha256:new"))
	version := ht.Object("ExternalArtifact", "cozy-system/chart", ht.Set("status.artifact.revision", "1.0.0"))
	mayFail := func(ns, name, message string) bool { return ns == "t" && name == "r" && message == "refused" }
	for name, c := range map[string]struct {
		change   []func(*unstructured.Unstructured)
		artifact *unstructured.Unstructured
		mayFail  history.MayFail
		want     string // substring; "" for converged
	}{
		"ready":                     {nil, digest, nil, ""},
		"ready, nothing known":      {nil, nil, nil, ""},
		"old digest":                {[]func(*unstructured.Unstructured){ht.Set("status.lastAttemptedRevisionDigest", "sha256:old")}, digest, nil, `has chart "sha256:old", its source offers "1.0.0@sha256:new"`},
		"digest under another name": {[]func(*unstructured.Unstructured){ht.Set("status.lastAttemptedRevisionDigest", "latest@sha256:new")}, digest, nil, ""},
		"version":                   {nil, version, nil, ""},
		"old version":               {[]func(*unstructured.Unstructured){ht.Set("status.lastAttemptedRevision", "0.9.0")}, version, nil, `has chart "0.9.0"`},
		"never reconciled":          {[]func(*unstructured.Unstructured){ht.Set("status", map[string]any{})}, digest, nil, "generation 2 is not reconciled (0 is)"},
		"older generation":          {[]func(*unstructured.Unstructured){ready("True", 1, "")}, digest, nil, "generation 2 is not reconciled (1 is)"},
		"not observed":              {[]func(*unstructured.Unstructured){ht.Set("status.observedGeneration", int64(1))}, digest, nil, "generation 2 is not observed (1 is)"},
		"failed":                    {[]func(*unstructured.Unstructured){ready("False", 2, "refused")}, digest, nil, "is not Ready: refused"},
		"failed as expected":        {[]func(*unstructured.Unstructured){ready("False", 2, "refused")}, digest, mayFail, ""},
		"failed for another reason": {[]func(*unstructured.Unstructured){ready("False", 2, "timeout")}, digest, mayFail, "is not Ready: timeout"},
		"failed, the reason is in Released": {[]func(*unstructured.Unstructured){ht.Set("status.conditions", []any{
			map[string]any{"type": "Ready", "status": "False", "observedGeneration": int64(2), "message": "Will retry after 30s"},
			map[string]any{"type": "Released", "status": "False", "observedGeneration": int64(2), "message": "no room"}})}, digest, mayFail, "is not Ready: Will retry after 30s: no room"},
		"failed with old generation": {[]func(*unstructured.Unstructured){ready("False", 1, "refused")}, digest, mayFail, "generation 2"},
		"may fail and does not":      {nil, digest, mayFail, ""},
		"in progress":                {[]func(*unstructured.Unstructured){ready("Unknown", 2, "running")}, digest, mayFail, "is being reconciled: running"},
		"suspended":                  {[]func(*unstructured.Unstructured){ht.Set("spec.suspend", true), ht.Set("status", map[string]any{})}, digest, nil, ""},
	} {
		hr := ht.Object("HelmRelease", "t/r", append([]func(*unstructured.Unstructured){
			ready("True", 2, ""), ht.Set("status.observedGeneration", int64(2)), ht.Set("status.lastAttemptedRevision", "1.0.0"), ht.Set("status.lastAttemptedRevisionDigest", "sha256:new"),
		}, c.change...)...)
		hr.SetGeneration(2)
		got := history.ReleaseWaiting(hr, c.artifact, c.mayFail)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: waiting for %q, want %q", name, got, c.want)
		}
	}
	hr := ht.Object("HelmRelease", "t/r", ready("True", 0, ""))
	ht.New().AskDelete(ht.Human, hr)
	if got := history.ReleaseWaiting(hr, nil, nil); got != "is being deleted" {
		t.Errorf("deleted: %q", got)
	}
}

func TestConvergedOverLiveObjects(t *testing.T) {
	observed := ht.Set("status.observedGeneration", int64(1))
	generation := func(o *unstructured.Unstructured) { o.SetGeneration(1) }
	ref := ht.Set("spec.chartRef", map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": "chart"})
	digest := ht.Set("status.lastAttemptedRevisionDigest", "sha256:new")
	of := func(cluster string) func(*unstructured.Unstructured) { return ht.Set("spec.clusterName", cluster) }
	objects := []runtime.Object{
		ht.Object("ExternalArtifact", "cozy-system/chart", ht.Set("status.artifact.revision", "1.0.0@sha256:new")),
		ht.Object("ExternalArtifact", "t/chart", ht.Set("status.artifact.revision", "1.0.0@sha256:wrong")),
		ht.Object("HelmRelease", "t/good", generation, observed, ready("True", 1, ""), ref, digest),
		ht.Object("HelmRelease", "t/old", generation, observed, ready("True", 1, ""), ref),
		ht.Object("Cluster", "t/prod"),
		ht.Object("MachineDeployment", "t/good", generation, observed, of("prod")),
		ht.Object("MachineDeployment", "t/fresh", generation, of("prod")),
		ht.Object("MachineSet", "t/fresh", generation, of("prod")),
		ht.Object("MachineDeployment", "t/of-none", generation, of("none")), // nobody will ever look at it
		ht.Object("MachineDeployment", "t2/elsewhere", generation, of("prod")),
	}
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), lists(), objects...)
	got, err := history.NewRest(client, nil).Waiting(t.Context())
	want := []string{
		`HelmRelease t/old: has chart "", its source offers "1.0.0@sha256:new"`,
		"MachineDeployment t/fresh: generation 1 is not observed (0 is)",
		"MachineSet t/fresh: generation 1 is not observed (0 is)",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("waiting for %q (error %v), want %q", got, err, want)
	}
}

func TestAReleaseThatFailsInVainHasComeToItsEnd(t *testing.T) {
	mayFail := func(_, _, message string) bool { return message == "refused" }
	for name, c := range map[string]struct {
		failures   int64
		generation int64
		message    string
		digest     string
		ended      bool
	}{
		"first failure":                     {1, 1, "timeout", "sha256:new", false},
		"first failure, expected":           {1, 1, "refused", "sha256:new", true},
		"second failure":                    {2, 1, "timeout", "sha256:new", true},
		"second failure with the old chart": {2, 1, "timeout", "sha256:old", false},
		"second failure with old values":    {2, 0, "timeout", "sha256:new", false},
	} {
		hr := ht.Object("HelmRelease", "t/r", ready("False", c.generation, c.message), ht.Set("status.failures", c.failures), ht.Set("status.lastAttemptedRevisionDigest", c.digest),
			ht.Set("spec.chartRef", map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": "chart"}))
		hr.SetGeneration(1)
		artifact := ht.Object("ExternalArtifact", "cozy-system/chart", ht.Set("status.artifact.revision", "1.0.0@sha256:new"))
		rest := history.NewRest(fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), lists(), hr, artifact), mayFail)
		waiting, err := rest.Waiting(t.Context())
		if err != nil || (len(waiting) == 0) != c.ended {
			t.Errorf("%s: waiting for %q (error %v), want an end: %v", name, waiting, err, c.ended)
		}
		for ref, want := range map[history.Ref]bool{
			ht.Ref(hr): c.ended, {Resource: "secrets", Namespace: "t", Name: "sh.helm.release.v1.r.v7"}: c.ended, {Resource: "secrets", Namespace: "t", Name: "sh.helm.release.v1.other.v1"}: false,
		} {
			if rest.Ignore(ref) != want {
				t.Errorf("%s: writes to %v are ignored: %v, want %v", name, ref, !want, want)
			}
		}
	}
}

// lists are the kinds of list that a fake client needs.
func lists() map[schema.GroupVersionResource]string {
	lists := map[schema.GroupVersionResource]string{}
	for _, gvr := range history.DefaultKinds() {
		switch gvr.Resource {
		case "externalartifacts":
			lists[gvr] = "ExternalArtifactList"
		case "helmreleases":
			lists[gvr] = "HelmReleaseList"
		case "clusters":
			lists[gvr] = "ClusterList"
		case "machinedeployments":
			lists[gvr] = "MachineDeploymentList"
		case "machinesets":
			lists[gvr] = "MachineSetList"
		}
	}
	return lists
}

func TestAReleaseWithoutASourceHasComeToItsEnd(t *testing.T) {
	for status, ended := range map[string]bool{"False": true, "Unknown": false} {
		hr := ht.Object("HelmRelease", "t/r", ready(status, 1, "could not get Source object"),
			ht.Set("spec.chartRef", map[string]any{"kind": "ExternalArtifact", "namespace": "cozy-system", "name": "chart"}))
		hr.SetGeneration(1)
		rest := history.NewRest(fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), lists(), hr), nil)
		waiting, err := rest.Waiting(t.Context())
		if err != nil || (len(waiting) == 0) != ended {
			t.Errorf("Ready %s: waiting for %q (error %v), want an end: %v", status, waiting, err, ended)
		}
	}
}
