package history

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
)

var machineGVR = schema.GroupVersionResource{Group: "cluster.x-k8s.io", Version: "v1beta1", Resource: "machines"}

// server is an API server of one resource, as far as the recorder talks to it.
type server struct {
	mu      sync.Mutex
	version int
	objects map[string]*unstructured.Unstructured
	history []watch.Event
	oldest  int // watches from before it are answered with 410
	watches []*watch.RaceFreeFakeWatcher
	starts  []string // resource versions that watches began from
	mute    bool     // deliver nothing
}

func (s *server) client() *fake.FakeDynamicClient {
	c := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{machineGVR: "MachineList"})
	c.PrependReactor("list", "machines", func(clienttesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion("cluster.x-k8s.io/v1beta1")
		list.SetKind("MachineList")
		list.SetResourceVersion(strconv.Itoa(s.version))
		for _, o := range s.objects {
			list.Items = append(list.Items, *o.DeepCopy())
		}
		return true, list, nil
	})
	c.PrependWatchReactor("machines", func(a clienttesting.Action) (bool, watch.Interface, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		options := a.(clienttesting.WatchActionImpl).ListOptions
		from, err := strconv.Atoi(options.ResourceVersion)
		if err != nil || !options.AllowWatchBookmarks {
			return true, nil, errors.New("a watch without a resource version, or without bookmarks")
		}
		s.starts = append(s.starts, options.ResourceVersion)
		if from < s.oldest {
			return true, nil, apierrors.NewResourceExpired("too old resource version")
		}
		w := watch.NewRaceFreeFake()
		s.watches = append(s.watches, w)
		for _, e := range s.history {
			if version, _ := strconv.Atoi(e.Object.(*unstructured.Unstructured).GetResourceVersion()); version > from && !s.mute {
				w.Action(e.Type, e.Object.DeepCopyObject())
			}
		}
		return true, w, nil
	})
	return c
}

// change stores an object (or deletes it) and tells the running watches.
func (s *server) change(kind watch.EventType, name string, uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("cluster.x-k8s.io/v1beta1")
	o.SetKind("Machine")
	o.SetNamespace("t")
	o.SetName(name)
	o.SetUID(uid)
	o.SetResourceVersion(strconv.Itoa(s.version))
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: "m"}})
	if s.objects == nil {
		s.objects = map[string]*unstructured.Unstructured{}
	}
	if kind == watch.Deleted {
		delete(s.objects, name)
	} else {
		s.objects[name] = o
	}
	s.history = append(s.history, watch.Event{Type: kind, Object: o})
	if len(s.watches) > 0 && !s.mute {
		s.watches[len(s.watches)-1].Action(kind, o.DeepCopy())
	}
}

// cut ends the running watch; with forget, the server no longer knows what was before.
func (s *server) cut(forget bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if forget {
		s.oldest = s.version + 1
		s.version++
	}
	s.watches[len(s.watches)-1].Stop()
}

func (s *server) send(e watch.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[len(s.watches)-1].Action(e.Type, e.Object)
}

func (s *server) began() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.starts)
}

func (s *server) record(t *testing.T, auditLog string) (*Recorder, string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "history.jsonl")
	missing := schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachines"}
	r, err := start(t.Context(), RecorderOptions{Kinds: []schema.GroupVersionResource{machineGVR, missing}, Out: out, AuditLog: auditLog, Header: Header{RunID: "r", Family: "f"}},
		s.client(), func(gv string) (*metav1.APIResourceList, error) {
			if gv == "cluster.x-k8s.io/v1beta1" {
				return &metav1.APIResourceList{APIResources: []metav1.APIResource{{Name: "machines"}}}, nil
			}
			return nil, apierrors.NewNotFound(schema.GroupResource{}, gv)
		})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Stop(context.Background()) })
	eventually(t, "a watch", func() bool { return len(s.began()) > 0 })
	return r, out
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, 10*time.Second, true, func(context.Context) (bool, error) { return f(), nil })
	if err != nil {
		t.Fatalf("no %s after 10 s", what)
	}
}

// events are the recorded events as "TYPE name", with "!" for those that a list found.
func events(t *testing.T, path string) (*History, []string) {
	t.Helper()
	h, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range h.Events {
		mark := ""
		if e.Relisted {
			mark = "!"
		}
		if len(e.Object.GetManagedFields()) > 0 {
			t.Errorf("%s has managedFields", e.Object.GetName())
		}
		out = append(out, string(e.Type)+mark+" "+e.Object.GetName())
	}
	return h, out
}

func TestRecorderRecordsBaselineEventsAndTheAuditLog(t *testing.T) {
	s := &server{}
	s.change(watch.Added, "a", "a")
	audit := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(audit, []byte(auditLine("patch", "/x", machineRef)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, out := s.record(t, audit)
	if err := r.Mark("upgrade"); err != nil {
		t.Fatal(err)
	}
	s.change(watch.Added, "b", "b")
	s.change(watch.Modified, "a", "a")
	s.change(watch.Deleted, "b", "b")
	r.Log("migration", "hello")
	f, err := os.OpenFile(audit, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(auditLine("patch", "/x", machineRef+`,"responseObject":{"kind":"Machine","metadata":{"name":"a","uid":"a","resourceVersion":"3"}}`) + "\n"); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, got := events(t, out)
	if want := []string{"BASELINE a", "ADDED b", "MODIFIED a", "DELETED b"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	if len(h.Writes) != 1 || h.Events[2].Writer != h.Writes[0] {
		t.Errorf("writes %+v, want only the one after the start, as writer of the change", h.Writes)
	}
	if !slices.Equal(h.Header.Kinds, []string{"machines.cluster.x-k8s.io"}) || !slices.Equal(h.Header.Unserved, []string{"virtualmachines.kubevirt.io"}) || !h.Header.Audit || h.Header.RunID != "r" {
		t.Errorf("header %+v", h.Header)
	}
	if h.End == nil || len(h.Gaps) != 0 || len(h.Logs) != 1 || len(h.Lists) != 1 || h.Lists[0].Count != 1 || h.Lists[0].ResourceVersion != "1" {
		t.Errorf("end %v, gaps %v, logs %v, lists %v", h.End, h.Gaps, h.Logs, h.Lists)
	}
	if len(h.Marks) != 2 || h.Marks[0].At != "begin" || h.Marks[1].At != "end" || h.Marks[1].Phase != "upgrade" {
		t.Errorf("marks %+v", h.Marks)
	}
	if ref, at := r.LastWrite(nil); ref.Name != "b" || at.IsZero() {
		t.Errorf("last write is %v at %v, want b's deletion", ref, at)
	}
	if ref, _ := r.LastWrite(func(r Ref) bool { return r.Name == "b" }); ref.Name != "a" {
		t.Errorf("last write without b is %v", ref)
	}
}

func TestAnEndedWatchIsResumedAndIsNoGap(t *testing.T) {
	s := &server{}
	s.change(watch.Added, "a", "a")
	r, out := s.record(t, "")
	s.change(watch.Modified, "a", "a")
	eventually(t, "second version", func() bool { ref, _ := r.LastWrite(nil); return ref.Name == "a" })
	bookmark := &unstructured.Unstructured{Object: map[string]any{"kind": "Machine", "apiVersion": "cluster.x-k8s.io/v1beta1"}}
	bookmark.SetResourceVersion("2")
	s.send(watch.Event{Type: watch.Bookmark, Object: bookmark})
	s.cut(false)
	s.change(watch.Added, "b", "b") // nobody listens
	eventually(t, "second watch", func() bool { return len(s.began()) > 1 })
	s.send(watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError}})
	eventually(t, "third watch", func() bool { return len(s.began()) > 2 })
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, got := events(t, out)
	if want := []string{"BASELINE a", "MODIFIED a", "ADDED b"}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	if len(h.Gaps) != 0 || len(h.Bookmarks) != 1 || h.Bookmarks[0].ResourceVersion != "2" {
		t.Errorf("gaps %v, bookmarks %v", h.Gaps, h.Bookmarks)
	}
	if got := s.began(); got[0] != "1" || got[1] != "2" || got[2] != "3" {
		t.Errorf("watches began from %q, want each from where the one before had come", got)
	}
}

func TestABookmarkMovesTheWatchOn(t *testing.T) {
	s := &server{}
	r, _ := s.record(t, "")
	bookmark := &unstructured.Unstructured{Object: map[string]any{"kind": "Machine", "apiVersion": "cluster.x-k8s.io/v1beta1"}}
	bookmark.SetResourceVersion("41")
	s.send(watch.Event{Type: watch.Bookmark, Object: bookmark})
	eventually(t, "bookmark", func() bool { r.kinds[0].mu.Lock(); defer r.kinds[0].mu.Unlock(); return r.kinds[0].version == "41" })
	s.cut(false)
	eventually(t, "second watch", func() bool { return len(s.began()) > 1 })
	if got := s.began(); got[1] != "41" {
		t.Errorf("the second watch began from %s, want the bookmark's 41", got[1])
	}
}

func TestAnExpiredWatchIsAGapAndIsListedAgain(t *testing.T) {
	for name, inStream := range map[string]bool{"refused": false, "in the stream": true} {
		t.Run(name, func(t *testing.T) {
			s := &server{}
			for _, n := range []string{"same", "changes", "goes"} {
				s.change(watch.Added, n, types.UID(n))
			}
			r, out := s.record(t, "")
			s.mu.Lock()
			s.mute = true
			s.mu.Unlock()
			s.change(watch.Modified, "changes", "changes")
			s.change(watch.Deleted, "goes", "goes")
			s.change(watch.Added, "new", "new")
			s.mu.Lock()
			s.mute = false
			s.mu.Unlock()
			if inStream {
				s.send(watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired}})
			} else {
				s.cut(true)
			}
			eventually(t, "watch after the list", func() bool { starts := s.began(); return starts[len(starts)-1] >= "6" })
			s.change(watch.Modified, "new", "new")
			if err := r.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			h, got := events(t, out)
			slices.Sort(got)
			if want := []string{"ADDED! new", "BASELINE changes", "BASELINE goes", "BASELINE same", "DELETED! goes", "MODIFIED new", "MODIFIED! changes"}; !slices.Equal(got, want) {
				t.Errorf("events %q, want %q", got, want)
			}
			if len(h.Gaps) != 1 || h.Gaps[0].Resource != "machines.cluster.x-k8s.io" || h.Gaps[0].Since == nil || !strings.Contains(h.Gaps[0].Reason, "between resource versions 3 and") {
				t.Errorf("gaps %+v", h.Gaps)
			}
			if len(h.Lists) != 2 {
				t.Errorf("%d lists, want two", len(h.Lists))
			}
		})
	}
}

func TestStopWritesDownWhatTheWatchDidNotDeliver(t *testing.T) {
	for name, change := range map[string]func(s *server){
		"the state of t/b":    func(s *server) { s.change(watch.Added, "b", "b") },
		"the state of t/a":    func(s *server) { s.change(watch.Modified, "a", "a") },
		"the deletion of t/a": func(s *server) { s.change(watch.Deleted, "a", "a") },
	} {
		s := &server{}
		s.change(watch.Added, "a", "a")
		r, out := s.record(t, "")
		s.mu.Lock()
		s.mute = true
		s.mu.Unlock()
		change(s)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := r.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		h, _ := events(t, out)
		if len(h.Gaps) != 1 || !strings.Contains(h.Gaps[0].Reason, "still missing "+name) {
			t.Errorf("gaps %+v, want one that names %s", h.Gaps, name)
		}
	}
}

func TestStartFailsWhenAKindCannotBeListed(t *testing.T) {
	s := &server{}
	c := s.client()
	c.PrependReactor("list", "machines", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(machineGVR.GroupResource(), "", errors.New("no right"))
	})
	serves := func(string) (*metav1.APIResourceList, error) {
		return &metav1.APIResourceList{APIResources: []metav1.APIResource{{Name: "machines"}}}, nil
	}
	o := RecorderOptions{Kinds: []schema.GroupVersionResource{machineGVR}, Out: filepath.Join(t.TempDir(), "h")}
	if _, err := start(t.Context(), o, c, serves); err == nil || !strings.Contains(err.Error(), "list machines.cluster.x-k8s.io") {
		t.Errorf("error is %v", err)
	}
	o.Out = filepath.Join(t.TempDir(), "h")
	if _, err := start(t.Context(), o, s.client(), func(string) (*metav1.APIResourceList, error) { return nil, errors.New("down") }); err == nil || !strings.Contains(err.Error(), "down") {
		t.Errorf("error is %v", err)
	}
}

func TestKindsAreScoped(t *testing.T) {
	client := fake.NewSimpleDynamicClient(runtime.NewScheme())
	object := func(change func(*unstructured.Unstructured)) *unstructured.Unstructured {
		o := &unstructured.Unstructured{Object: map[string]any{}}
		change(o)
		return o
	}
	label := func(key, value string) func(*unstructured.Unstructured) {
		return func(o *unstructured.Unstructured) { o.SetLabels(map[string]string{key: value}) }
	}
	kindType := func(v string) func(*unstructured.Unstructured) {
		return func(o *unstructured.Unstructured) { o.Object["type"] = v }
	}
	for _, c := range []struct {
		resource string
		o        *unstructured.Unstructured
		want     bool
	}{
		{"pods", object(label("kubevirt.io", "virt-launcher")), true},
		{"pods", object(label("cdi.kubevirt.io", "importer")), true},
		{"pods", object(label("app", "x")), false},
		{"secrets", object(kindType("helm.sh/release.v1")), true},
		{"secrets", object(kindType("Opaque")), false},
		{"secrets", object(func(o *unstructured.Unstructured) { o.Object["type"] = "helm.sh/release.v1"; o.SetNamespace("theirs") }), false},
		{"namespaces", object(label("a", "b")), true},
	} {
		if got := newKind(schema.GroupVersionResource{Version: "v1", Resource: c.resource}, client, []string{"theirs"}).keep(c.o); got != c.want {
			t.Errorf("%s %v: kept is %v", c.resource, c.o.Object, got)
		}
	}
	for _, gvr := range DefaultKinds() {
		if k := newKind(gvr, client, nil); (k.fields != "") != (gvr.Resource == "secrets") {
			t.Errorf("%s has field selector %q", k.name(), k.fields)
		}
	}
}
