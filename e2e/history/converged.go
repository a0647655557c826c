package history

import (
	"context"
	"fmt"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// MayFail says whether a HelmRelease is expected to fail with this message. A nil MayFail expects none to.
type MayFail func(namespace, name, message string) bool

// vain is how many failures in a row on the same wish tell that a release will not heal by itself. The first may only have
// come too early: Flux tries again after its retry interval.
const vain = 2

// Rest asks a live cluster, after an upgrade, what still moves towards its wish. Flux retries a failing release for ever;
// one that has failed twice with the wish unchanged, or whose chart was not published, counts as come to its end, with
// the failure for the checks to judge.
type Rest struct {
	client  dynamic.Interface
	mayFail MayFail
	mu      sync.Mutex
	failed  map[Ref]bool // HelmReleases that only retry
}

// NewRest makes a Rest; mayFail (nil: none) names releases whose first failure is expected.
func NewRest(client dynamic.Interface, mayFail MayFail) *Rest {
	return &Rest{client: client, mayFail: mayFail, failed: map[Ref]bool{}}
}

// Ignore tells of an object that only the retries of a failed release write it: the HelmRelease and its release Secrets.
func (r *Rest) Ignore(ref Ref) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return IgnoreReleases(func(namespace, name string) bool {
		return r.failed[Ref{"helmreleases.helm.toolkit.fluxcd.io", namespace, name}]
	})(ref)
}

// note remembers whether a release has come to its end by failing, and says so.
func (r *Rest) note(hr, artifact *unstructured.Unstructured) bool {
	status, generation, message := condition(hr, "Ready")
	failures, _, _ := unstructured.NestedInt64(hr.Object, "status", "failures")
	expected := r.mayFail != nil && r.mayFail(hr.GetNamespace(), hr.GetName(), message)
	kind, _, _ := ChartRef(hr)
	sourceless := kind == "ExternalArtifact" && artifact == nil // nobody will publish it any more
	end := status == "False" && generation == hr.GetGeneration() &&
		(sourceless || (failures >= vain || expected) && behind(hr, artifact) == "")
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed[RefOf("helmreleases.helm.toolkit.fluxcd.io", hr)] = end
	return end
}

// Waiting names what has not come to rest: every HelmRelease has reconciled its generation with its chart's current
// artifact, to success or for the last time, and every MachineDeployment and MachineSet of a Cluster that is there has been observed.
func (r *Rest) Waiting(ctx context.Context) ([]string, error) {
	list := func(group, version, resource string) ([]unstructured.Unstructured, error) {
		gvr := schema.GroupVersionResource{Group: group, Version: version, Resource: resource}
		l, err := r.client.Resource(gvr).List(ctx, metav1.ListOptions{})
		if apierrors.IsNotFound(err) { // the kind is not served
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", resource, err)
		}
		return l.Items, nil
	}
	artifacts, err := list("source.toolkit.fluxcd.io", "v1", "externalartifacts")
	if err != nil {
		return nil, err
	}
	releases, err := list("helm.toolkit.fluxcd.io", "v2", "helmreleases")
	if err != nil {
		return nil, err
	}
	var waiting []string
	for i := range releases {
		hr := &releases[i]
		var artifact *unstructured.Unstructured
		for j := range artifacts {
			if kind, ns, name := ChartRef(hr); kind == "ExternalArtifact" && artifacts[j].GetNamespace() == ns && artifacts[j].GetName() == name {
				artifact = &artifacts[j]
			}
		}
		if r.note(hr, artifact) {
			continue
		}
		if why := ReleaseWaiting(hr, artifact, r.mayFail); why != "" {
			waiting = append(waiting, fmt.Sprintf("HelmRelease %s/%s: %s", hr.GetNamespace(), hr.GetName(), why))
		}
	}
	clusters, err := list("cluster.x-k8s.io", "v1beta1", "clusters")
	if err != nil {
		return nil, err
	}
	there := map[Ref]bool{}
	for i := range clusters {
		there[RefOf("clusters.cluster.x-k8s.io", &clusters[i])] = true
	}
	for _, resource := range []string{"machinedeployments", "machinesets"} {
		items, err := list("cluster.x-k8s.io", "v1beta1", resource)
		if err != nil {
			return nil, err
		}
		for i := range items {
			// Cluster API does not look at what belongs to no Cluster.
			name, _, _ := unstructured.NestedString(items[i].Object, "spec", "clusterName")
			if why := Unobserved(&items[i]); why != "" && there[Ref{"clusters.cluster.x-k8s.io", items[i].GetNamespace(), name}] {
				waiting = append(waiting, fmt.Sprintf("%s %s/%s: %s", items[i].GetKind(), items[i].GetNamespace(), items[i].GetName(), why))
			}
		}
	}
	return waiting, nil
}

// ChartRef is what spec.chartRef of a HelmRelease names; empty when it has none.
func ChartRef(hr *unstructured.Unstructured) (kind, namespace, name string) {
	ref, _, _ := unstructured.NestedStringMap(hr.Object, "spec", "chartRef")
	namespace = ref["namespace"]
	if namespace == "" {
		namespace = hr.GetNamespace()
	}
	return ref["kind"], namespace, ref["name"]
}

// ReleaseWaiting says why a HelmRelease has not converged; "" when it has. artifact is its chart's source (nil: not
// looked at). A suspended release has nothing to do. One that mayFail has converged when its controller has failed with
// the current generation, too; whether that was with the current chart only its message can tell.
func ReleaseWaiting(hr, artifact *unstructured.Unstructured, mayFail MayFail) string {
	if suspended, _, _ := unstructured.NestedBool(hr.Object, "spec", "suspend"); suspended {
		return ""
	}
	status, generation, message := condition(hr, "Ready")
	// Flux 1.4 says only "Will retry after 30s" there, and why in Released.
	if released, _, why := condition(hr, "Released"); status == "False" && released == "False" && !strings.Contains(message, why) {
		message += ": " + why
	}
	switch {
	case deleting(hr):
		return "is being deleted"
	case generation != hr.GetGeneration(): // also when there is no condition yet
		return fmt.Sprintf("generation %d is not reconciled (%d is)", hr.GetGeneration(), generation)
	case status == "False" && mayFail != nil && mayFail(hr.GetNamespace(), hr.GetName(), message):
		return ""
	case status == "False":
		return "is not Ready: " + message
	case status != "True":
		return "is being reconciled: " + message
	}
	if why := Unobserved(hr); why != "" {
		return why
	}
	return behind(hr, artifact)
}

// LastTry is the last state in which a HelmRelease's controller had come to an end with the generation that the release has
// in the end, be it with success or not. A release that keeps failing is tried again and again, and a record may end in
// the middle of a try. Without such a state it is the last one.
func LastTry(l *Lifetime) *unstructured.Unstructured {
	for i := len(l.Events) - 1; i >= 0; i-- {
		hr := l.Events[i].Object
		if hr.GetGeneration() != l.Last().GetGeneration() {
			break
		}
		if status, generation, _ := condition(hr, "Ready"); generation == hr.GetGeneration() && (status == "True" || status == "False") {
			return hr
		}
	}
	return l.Last()
}

// behind says that a HelmRelease has not tried its chart's current artifact; "" when it has, or artifact is nil.
func behind(hr, artifact *unstructured.Unstructured) string {
	if artifact == nil {
		return ""
	}
	revision, _, _ := unstructured.NestedString(artifact.Object, "status", "artifact", "revision")
	field := "lastAttemptedRevision"
	if strings.Contains(revision, ":") { // a digest, alone or behind name@
		field = "lastAttemptedRevisionDigest"
	}
	digest := func(revision string) string { return revision[strings.LastIndex(revision, "@")+1:] }
	if attempted, _, _ := unstructured.NestedString(hr.Object, "status", field); digest(attempted) != digest(revision) {
		return fmt.Sprintf("has chart %q, its source offers %q", attempted, revision)
	}
	return ""
}

// Unobserved says that an object's controller has not seen its generation; "" when it has.
func Unobserved(o *unstructured.Unstructured) string {
	observed, _, _ := unstructured.NestedInt64(o.Object, "status", "observedGeneration")
	if observed != o.GetGeneration() {
		return fmt.Sprintf("generation %d is not observed (%d is)", o.GetGeneration(), observed)
	}
	return ""
}

func condition(o *unstructured.Unstructured, kind string) (status string, generation int64, message string) {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["type"] == kind {
			status, _ = m["status"].(string)
			message, _ = m["message"].(string)
			generation, _ = m["observedGeneration"].(int64)
			return status, generation, message
		}
	}
	return "", 0, "no condition " + kind
}
