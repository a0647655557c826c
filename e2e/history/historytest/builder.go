// Package historytest makes histories by hand, for the tests of whatever reads them.
package historytest

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Who sends a request. The zero Who is somebody whose request the audit log lacks.
type Who struct{ User, Agent string }

// The writers of a usual run.
var (
	Helm      = Who{"system:serviceaccount:flux-system:helm-controller", "helm-controller/v1.6.0"}
	CAPI      = Who{"system:serviceaccount:capi-system:capi-manager", "manager/v1.10.1"}
	CAPK      = Who{"system:serviceaccount:capk-system:capk-manager", "manager/v0.1.10"}
	KubeVirt  = Who{"system:serviceaccount:kubevirt:kubevirt-controller", "virt-controller/v1.8.4"}
	Handler   = Who{"system:serviceaccount:kubevirt:kubevirt-handler", "virt-handler/v1.8.4"}
	GC        = Who{"system:serviceaccount:kube-system:generic-garbage-collector", "kube-controller-manager/v1.34.4"}
	CDI       = Who{"system:serviceaccount:cdi:cdi-sa", "cdi-controller/v1.64"}
	Migration = Who{"system:serviceaccount:cozy-system:cozystack-migration-hook", "kubectl/v1.34.4"}
	Human     = Who{"kubernetes-admin", "kubectl/v1.34.4"}
)

var kinds = map[string]struct{ apiVersion, resource string }{
	"Namespace":                       {"v1", "namespaces"},
	"Pod":                             {"v1", "pods"},
	"Secret":                          {"v1", "secrets"},
	"ConfigMap":                       {"v1", "configmaps"},
	"Event":                           {"v1", "events"},
	"PersistentVolumeClaim":           {"v1", "persistentvolumeclaims"},
	"PersistentVolume":                {"v1", "persistentvolumes"},
	"DataVolume":                      {"cdi.kubevirt.io/v1beta1", "datavolumes.cdi.kubevirt.io"},
	"VirtualMachine":                  {"kubevirt.io/v1", "virtualmachines.kubevirt.io"},
	"VirtualMachineInstance":          {"kubevirt.io/v1", "virtualmachineinstances.kubevirt.io"},
	"VirtualMachineInstanceMigration": {"kubevirt.io/v1", "virtualmachineinstancemigrations.kubevirt.io"},
	"KubevirtMachine":                 {"infrastructure.cluster.x-k8s.io/v1alpha1", "kubevirtmachines.infrastructure.cluster.x-k8s.io"},
	"KubevirtMachineTemplate":         {"infrastructure.cluster.x-k8s.io/v1alpha1", "kubevirtmachinetemplates.infrastructure.cluster.x-k8s.io"},
	"Cluster":                         {"cluster.x-k8s.io/v1beta1", "clusters.cluster.x-k8s.io"},
	"Machine":                         {"cluster.x-k8s.io/v1beta1", "machines.cluster.x-k8s.io"},
	"MachineSet":                      {"cluster.x-k8s.io/v1beta1", "machinesets.cluster.x-k8s.io"},
	"MachineDeployment":               {"cluster.x-k8s.io/v1beta1", "machinedeployments.cluster.x-k8s.io"},
	"MachineHealthCheck":              {"cluster.x-k8s.io/v1beta1", "machinehealthchecks.cluster.x-k8s.io"},
	"TalosConfigTemplate":             {"bootstrap.cluster.x-k8s.io/v1alpha3", "talosconfigtemplates.bootstrap.cluster.x-k8s.io"},
	"KamajiControlPlane":              {"controlplane.cluster.x-k8s.io/v1alpha1", "kamajicontrolplanes.controlplane.cluster.x-k8s.io"},
	"Service":                         {"v1", "services"},
	"HelmRelease":                     {"helm.toolkit.fluxcd.io/v2", "helmreleases.helm.toolkit.fluxcd.io"},
	"ExternalArtifact":                {"source.toolkit.fluxcd.io/v1", "externalartifacts.source.toolkit.fluxcd.io"},
	"WorkloadMonitor":                 {"cozystack.io/v1alpha1", "workloadmonitors.cozystack.io"},
}

// Object makes an object of one of the recorded kinds. at is "namespace/name" or "name"; its UID is kind:at.
func Object(kind, at string, change ...func(*unstructured.Unstructured)) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	known, has := kinds[kind]
	if !has {
		panic("historytest knows no kind " + kind)
	}
	o.SetAPIVersion(known.apiVersion)
	o.SetKind(kind)
	ns, name, found := strings.Cut(at, "/")
	if !found {
		ns, name = "", at
	}
	o.SetNamespace(ns)
	o.SetName(name)
	o.SetUID(types.UID(strings.ToLower(kind) + ":" + at))
	for _, f := range change {
		f(o)
	}
	return o
}

// Ref is the name of an object.
func Ref(o *unstructured.Unstructured) history.Ref {
	return history.RefOf(kinds[o.GetKind()].resource, o)
}

// Set sets a field; path is dotted.
func Set(path string, value any) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		if err := unstructured.SetNestedField(o.Object, value, strings.Split(path, ".")...); err != nil {
			panic(err)
		}
	}
}

// Label sets labels, given as key, value, key, value.
func Label(pairs ...string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) { o.SetLabels(merged(o.GetLabels(), pairs)) }
}

// Annotate sets annotations, given as key, value, key, value.
func Annotate(pairs ...string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) { o.SetAnnotations(merged(o.GetAnnotations(), pairs)) }
}

// OwnedBy annotates and labels an object as belonging to a Helm release.
func OwnedBy(release string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		Annotate("meta.helm.sh/release-name", release, "meta.helm.sh/release-namespace", o.GetNamespace())(o)
		Label("app.kubernetes.io/managed-by", "Helm")(o)
	}
}

// Owner adds an owner reference.
func Owner(owner *unstructured.Unstructured) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		o.SetOwnerReferences(append(o.GetOwnerReferences(), metav1.OwnerReference{
			APIVersion: owner.GetAPIVersion(), Kind: owner.GetKind(), Name: owner.GetName(), UID: owner.GetUID(),
		}))
	}
}

// UID sets the UID.
func UID(uid string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) { o.SetUID(types.UID(uid)) }
}

func merged(m map[string]string, pairs []string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

// Builder makes a history. Every call happens one second after the one before. A new Builder has a sound header; Read
// adds, unless told otherwise, a settlement and the end.
type Builder struct {
	now     time.Time
	version int
	lines   bytes.Buffer
	phase   string
	header  history.Header
	settled bool
	torn    bool
	writes  int
}

// New begins a history of family adoption that records every kind, with an audit log.
func New() *Builder {
	start := time.Date(2026, 11, 30, 9, 0, 0, 0, time.UTC)
	b := &Builder{now: start, version: 1000}
	b.header = history.Header{Schema: history.Schema, RunID: "by-hand", Family: "adoption", Provider: "embedded", Seed: 1, Audit: true, Started: start}
	for _, k := range kinds {
		b.header.Kinds = append(b.header.Kinds, k.resource)
	}
	slices.Sort(b.header.Kinds)
	return b
}

func (b *Builder) tick() time.Time {
	b.now = b.now.Add(time.Second)
	return b.now
}

func (b *Builder) put(field string, value any) *Builder {
	text, err := json.Marshal(map[string]any{field: value})
	if err != nil {
		panic(err)
	}
	b.lines.Write(append(text, '\n'))
	return b
}

func (b *Builder) stamp(o *unstructured.Unstructured) {
	b.version++
	o.SetResourceVersion(strconv.Itoa(b.version))
}

func (b *Builder) event(change history.Change, o *unstructured.Unstructured) {
	b.put("event", history.Event{Time: b.now.Add(10 * time.Millisecond), Type: change, Resource: kinds[o.GetKind()].resource, Object: o})
}

// Baseline has objects from before the record began.
func (b *Builder) Baseline(objects ...*unstructured.Unstructured) *Builder {
	for _, o := range objects {
		if o.GetGeneration() == 0 {
			o.SetGeneration(1)
		}
		b.stamp(o)
		b.event(history.Baseline, o)
	}
	return b
}

// Request adds a write of the audit log as it is; its time, if missing, is now.
func (b *Builder) Request(w history.Write) *Builder {
	if w.Time.IsZero() {
		w.Time = b.tick()
	}
	if w.Code == 0 {
		w.Code = 200
	}
	b.writes++
	return b.put("write", w)
}

func (b *Builder) write(who Who, verb string, o *unstructured.Unstructured, answered bool) {
	if who == (Who{}) {
		return
	}
	w := history.Write{
		Time: b.now, User: who.User, Agent: who.Agent, Verb: verb, Code: 200, Resource: kinds[o.GetKind()].resource,
		Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID()),
	}
	if answered {
		w.ResourceVersion = o.GetResourceVersion()
	}
	b.Request(w)
}

// Create adds an object.
func (b *Builder) Create(who Who, objects ...*unstructured.Unstructured) *Builder {
	for _, o := range objects {
		b.tick()
		o.SetGeneration(1)
		b.stamp(o)
		b.write(who, "create", o, true)
		b.event(history.Added, o)
	}
	return b
}

// Update changes an object. Its generation grows when its spec changes.
func (b *Builder) Update(who Who, o *unstructured.Unstructured, change ...func(*unstructured.Unstructured)) *Builder {
	b.tick()
	before := fmt.Sprint(o.Object["spec"])
	for _, f := range change {
		f(o)
	}
	if fmt.Sprint(o.Object["spec"]) != before {
		o.SetGeneration(o.GetGeneration() + 1)
	}
	b.stamp(o)
	b.write(who, "patch", o, true)
	b.event(history.Modified, o)
	return b
}

// Delete removes an object at once, as an object without finalizers goes.
func (b *Builder) Delete(who Who, o *unstructured.Unstructured) *Builder {
	b.tick()
	b.write(who, "delete", o, false)
	b.stamp(o)
	b.event(history.Deleted, o)
	return b
}

// AskDelete asks for the deletion of an object that has a finalizer.
func (b *Builder) AskDelete(who Who, o *unstructured.Unstructured) *Builder {
	b.tick()
	o.SetFinalizers([]string{"test/finalizer"})
	at := metav1.NewTime(b.now)
	o.SetDeletionTimestamp(&at)
	o.SetGeneration(o.GetGeneration() + 1)
	b.stamp(o)
	b.write(who, "delete", o, true)
	b.event(history.Modified, o)
	return b
}

// Finalize takes away the finalizer, and the object with it.
func (b *Builder) Finalize(who Who, o *unstructured.Unstructured) *Builder {
	b.tick()
	b.stamp(o)
	b.write(who, "patch", o, true)
	b.stamp(o)
	b.event(history.Deleted, o)
	return b
}

// Mark begins a phase.
func (b *Builder) Mark(phase string) *Builder {
	b.tick()
	if b.phase != "" {
		b.put("mark", history.Mark{Time: b.now, Phase: b.phase, At: "end"})
	}
	b.phase = phase
	return b.put("mark", history.Mark{Time: b.now, Phase: phase, At: "begin"})
}

// Log adds a line that source printed.
func (b *Builder) Log(source, text string) *Builder {
	return b.put("log", history.Log{Time: b.tick(), Source: source, Line: text})
}

// Gap adds a gap.
func (b *Builder) Gap(g history.Gap) *Builder {
	if g.Time.IsZero() {
		g.Time = b.tick()
	}
	return b.put("gap", g)
}

// Settled adds a settlement; with something it waited for, one that did not come about.
func (b *Builder) Settled(waiting ...string) *Builder {
	b.settled = true
	return b.put("settlement", history.Settlement{Time: b.tick(), OK: len(waiting) == 0, Waiting: waiting, Seconds: 60, Quiet: 10})
}

// Unsettled leaves the settlement out.
func (b *Builder) Unsettled() *Builder { b.settled = true; return b }

// Killed ends the file in the middle of a line.
func (b *Builder) Killed() *Builder { b.torn = true; return b }

// WithoutAudit makes a record without an audit log.
func (b *Builder) WithoutAudit() *Builder { b.header.Audit = false; return b }

// Now is the time of the last call.
func (b *Builder) Now() time.Time { return b.now }

// Stored is one revision of a Helm release.
type Stored struct {
	Release  string // "namespace/name"
	Revision int
	Status   string // "": deployed
	Values   map[string]any
	Schema   string
	Objects  []*unstructured.Unstructured
}

// Secret is how Helm stores it.
func (s Stored) Secret() *unstructured.Unstructured {
	ns, name, _ := strings.Cut(s.Release, "/")
	if s.Status == "" {
		s.Status = "deployed"
	}
	var manifest strings.Builder
	for _, o := range s.Objects {
		doc := map[string]any{"apiVersion": o.GetAPIVersion(), "kind": o.GetKind(), "metadata": map[string]any{"name": o.GetName()}, "spec": o.Object["spec"]}
		text, err := yaml.Marshal(doc)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&manifest, "---\n# Source: chart/templates/x.yaml\n%s", text)
	}
	text, err := json.Marshal(map[string]any{
		"name": name, "namespace": ns, "version": s.Revision, "info": map[string]any{"status": s.Status}, "manifest": manifest.String(), "config": s.Values,
		"chart": map[string]any{"metadata": map[string]any{"name": "chart", "version": "1.2.3"}, "schema": []byte(s.Schema)},
	})
	if err != nil {
		panic(err)
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := z.Write(text); err != nil {
		panic(err)
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	inner := base64.StdEncoding.EncodeToString(zipped.Bytes())
	return Object("Secret", fmt.Sprintf("%s/sh.helm.release.v1.%s.v%d", ns, name, s.Revision),
		Set("type", "helm.sh/release.v1"), Set("data.release", base64.StdEncoding.EncodeToString([]byte(inner))))
}

// Text is the history's file.
func (b *Builder) Text() []byte {
	var out Builder
	out.put("header", b.header)
	if b.writes == 0 && b.header.Audit { // somebody always writes something
		out.put("write", history.Write{Time: b.header.Started, User: "system:node", Verb: "update", Resource: "leases.coordination.k8s.io", Namespace: "kube-system", Name: "x", Code: 200})
	}
	out.lines.Write(b.lines.Bytes())
	if !b.settled {
		out.put("settlement", history.Settlement{Time: b.now, OK: true, Seconds: 20, Quiet: 10})
	}
	if b.torn {
		out.lines.WriteString(`{"event":{"time":"2026`)
	} else {
		out.put("end", history.End{Time: b.now.Add(time.Second)})
	}
	return out.lines.Bytes()
}

// Read is the history as Read gives it.
func (b *Builder) Read(t testing.TB) *history.History {
	t.Helper()
	h, err := history.Decode(bytes.NewReader(b.Text()))
	if err != nil {
		t.Fatalf("read the history made by hand: %v", err)
	}
	return h
}
