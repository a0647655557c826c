package history_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
)

func TestReadToleratesATornLastLineAndNoOther(t *testing.T) {
	vm := ht.Object("VirtualMachine", "t/x")
	b := ht.New().Baseline(vm).Killed()
	h := b.Read(t)
	if len(h.Events) != 1 || h.End != nil {
		t.Errorf("read %d events and end %v, want 1 and none", len(h.Events), h.End)
	}
	if len(h.Gaps) != 1 || !strings.Contains(h.Gaps[0].Reason, "torn") {
		t.Errorf("gaps %+v, want one that says torn", h.Gaps)
	}
	middle := bytes.Replace(b.Text(), []byte(`{"event"`), []byte(`{"eve\n`), 1)
	if _, err := history.Decode(bytes.NewReader(middle)); err == nil || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("a broken line in the middle gives %v, want an error that names line 3", err)
	}
}

func TestReadRefusesWhatIsNoHistory(t *testing.T) {
	for name, text := range map[string]string{
		"empty":         "",
		"no header":     `{"end":{"time":"2026-01-01T00:00:00Z"}}` + "\n",
		"other schema":  `{"header":{"schema":2}}` + "\n",
		"torn header":   `{"header":{"sche`,
		"no object":     `{"header":{"schema":1}}` + "\n" + `{"event":{"type":"ADDED","resource":"pods"}}` + "\n",
		"broken secret": `{"header":{"schema":1}}` + "\n" + `{"event":{"type":"ADDED","resource":"secrets","object":{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s","namespace":"n","uid":"u"},"data":{"release":"!"}}}}` + "\n",
	} {
		path := filepath.Join(t.TempDir(), "history.jsonl")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := history.Read(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error is %v, want one that names the file", name, err)
		}
	}
}

func TestWriterIsTheRequestThatMadeTheVersion(t *testing.T) {
	vm := ht.Object("VirtualMachine", "t/x")
	b := ht.New().Baseline(vm).Update(ht.CAPK, vm, ht.Set("spec.a", "1"))
	// A later request without effect is answered with the same version; a refused one with none.
	b.Request(history.Write{User: "noop", Verb: "patch", Resource: "virtualmachines.kubevirt.io", Namespace: "t", Name: "x", UID: string(vm.GetUID()), ResourceVersion: vm.GetResourceVersion()})
	b.Request(history.Write{User: "refused", Verb: "delete", Code: 403, Resource: "virtualmachines.kubevirt.io", Namespace: "t", Name: "x", UID: string(vm.GetUID())})
	b.Delete(ht.KubeVirt, vm)
	h := b.Read(t)
	wantWriters(t, h, "", ht.CAPK.User, ht.KubeVirt.User)
	lone := ht.Object("VirtualMachine", "t/lone")
	wantWriters(t, ht.New().Baseline(lone).
		Request(history.Write{User: "refused", Verb: "delete", Code: 403, Resource: "virtualmachines.kubevirt.io", UID: string(lone.GetUID())}).
		Delete(ht.Who{}, lone).Read(t), "", "")
	if got := len(h.WritesTo(h.Lifetimes()[0])); got != 4 {
		t.Errorf("%d writes to the VM, want 4 with the refused one", got)
	}
}

func TestWriterOfARemovalTakesTheLastFinalizer(t *testing.T) {
	m := ht.Object("Machine", "t/m")
	h := ht.New().Baseline(m).AskDelete(ht.Human, m).Finalize(ht.CAPI, m).Read(t)
	wantWriters(t, h, "", ht.Human.User, ht.CAPI.User)
	if d := h.Lifetimes()[0].Deletion(); d != h.Events[1] {
		t.Errorf("the deletion is event %+v, want the one that set the timestamp", d)
	}
}

func TestWriterIsFoundByNameWhereAnswersAreNotKept(t *testing.T) {
	s := ht.Stored{Release: "t/r", Revision: 1}.Secret()
	other := ht.Stored{Release: "t/other", Revision: 1}.Secret()
	b := ht.New().Baseline(s, other)
	write := func(user, verb, name string) {
		b.Request(history.Write{User: user, Verb: verb, Resource: "secrets", Namespace: "t", Name: name})
	}
	write("early", "update", s.GetName())
	write("right", "update", s.GetName())
	write("elsewhere", "update", other.GetName())
	b.Request(history.Write{User: "refused", Verb: "update", Code: 409, Resource: "secrets", Namespace: "t", Name: s.GetName()})
	write("deleter", "delete", s.GetName())
	b.Update(ht.Who{}, s) // without a write of its own
	b.Update(ht.Who{}, s) // and another one, of nobody
	write("late", "update", s.GetName())
	b.Delete(ht.Who{}, s)
	wantWriters(t, b.Read(t), "", "", "right", "", "deleter")
}

func wantWriters(t *testing.T, h *history.History, users ...string) {
	t.Helper()
	if len(h.Events) != len(users) {
		t.Fatalf("%d events, want %d", len(h.Events), len(users))
	}
	for i, e := range h.Events {
		user := ""
		if e.Writer != nil {
			user = e.Writer.User
		}
		if user != users[i] {
			t.Errorf("event %d (%s) has writer %q, want %q", i, e.Type, user, users[i])
		}
	}
}

func TestLifetimesTellARecreatedObjectFromItsPredecessor(t *testing.T) {
	old := ht.Object("VirtualMachine", "t/x")
	young := ht.Object("VirtualMachine", "t/x", ht.UID("second"))
	b := ht.New().Baseline(old).Delete(ht.CAPK, old).Create(ht.CAPK, young)
	h := b.Read(t)
	lives := h.Named(ht.Ref(old))
	if len(lives) != 2 || lives[0].Alive() || !lives[1].Alive() || !lives[0].AtBaseline() || lives[1].AtBaseline() {
		t.Fatalf("lifetimes %+v, want a dead one of the baseline and a living one", lives)
	}
	if h.Final(ht.Ref(old)).GetUID() != "second" || h.Initial(ht.Ref(old)).GetUID() != old.GetUID() {
		t.Error("final and initial object are mixed up")
	}
	gone := ht.New().Baseline(young).Delete(ht.CAPK, young).Read(t)
	if gone.Final(ht.Ref(young)) != nil || gone.Final(history.Ref{Resource: "pods"}) != nil {
		t.Error("a deleted object, or one that never was, has a final state")
	}
}

func TestDeletionAskedForBeforeTheBaselineIsNone(t *testing.T) {
	m := ht.Object("Machine", "t/m")
	ht.New().AskDelete(ht.CAPI, m) // sets the timestamp
	h := ht.New().Baseline(m).Finalize(ht.CAPI, m).Read(t)
	if d := h.Lifetimes()[0].Deletion(); d != nil {
		t.Errorf("deletion is %+v, want none", d)
	}
}

func TestPhaseAndOffset(t *testing.T) {
	b := ht.New().Mark("baseline").Mark(history.PhaseUpgrade)
	begun := b.Now()
	b.Mark("settle").Mark(history.PhaseUpgrade) // a re-run is not second zero
	h := b.Read(t)
	for _, c := range []struct {
		at     time.Duration
		phase  string
		offset float64
	}{{-2 * time.Second, "", -2}, {-500 * time.Millisecond, "baseline", -0.5}, {0, "upgrade", 0}, {1500 * time.Millisecond, "settle", 1.5}, {time.Minute, "upgrade", 60}} {
		if at := begun.Add(c.at); h.Phase(at) != c.phase || h.Offset(at) != c.offset {
			t.Errorf("at %s: phase %q offset %v, want %q and %v", c.at, h.Phase(at), h.Offset(at), c.phase, c.offset)
		}
	}
	if h := ht.New().Read(t); h.Offset(h.Header.Started.Add(time.Second)) != 1 {
		t.Error("without an upgrade the offset does not count from the start")
	}
}

func TestBefore(t *testing.T) {
	md := ht.Object("MachineDeployment", "t/md")
	b := ht.New().Baseline(md).Mark(history.PhaseUpgrade).Update(ht.Migration, md, ht.Label("a", "b"))
	b.Mark(history.PhaseMigrated).Update(ht.Helm, md, ht.Label("a", "c")).Create(ht.Helm, ht.Object("Pod", "t/p"))
	b.Mark("again").Mark(history.PhaseMigrated) // the first one counts
	h := b.Read(t)
	then := h.Before(history.PhaseMigrated)
	if then == nil || then != h.Before(history.PhaseMigrated) {
		t.Fatal("the record before a phase is not made, or made twice")
	}
	last := then.Final(ht.Ref(md))
	if len(then.Lifetimes()) != 1 || last.GetLabels()["a"] != "b" || len(then.Writes) != 1 || then.End == nil || then.Settlement == nil {
		t.Errorf("before the phase: %d objects, labels %v, %d writes", len(then.Lifetimes()), last.GetLabels(), len(then.Writes))
	}
	if e := then.Events[len(then.Events)-1]; e.Writer == nil || e.Writer.User != ht.Migration.User || e.Before == nil || e.Life.AtBaseline() != true {
		t.Errorf("the last event before the phase is not joined: %+v", e)
	}
	if h.Before("typo") != nil {
		t.Error("there is a record before a phase that never was")
	}
	// At is strictly before a time.
	update := h.Lifetime(string(md.GetUID())).Events[1]
	if e := h.At(ht.Ref(md), update.When()); e == nil || e.Type != history.Baseline {
		t.Errorf("before the update: %+v", e)
	}
	if e := h.At(ht.Ref(md), update.When().Add(1)); e != update {
		t.Errorf("after the update: %+v", e)
	}
	if e := h.At(history.Ref{Resource: "pods", Namespace: "t", Name: "p"}, update.When()); e != nil {
		t.Errorf("before it was there: %+v", e)
	}
}

func TestOpenGaps(t *testing.T) {
	// A record whose watch expired; the list after it saw the Machine's last state.
	record := func(change func(b *ht.Builder)) *history.History {
		m := ht.Object("Machine", "t/m")
		b := ht.New().Baseline(m)
		b.Request(history.Write{User: "u", Verb: "delete", Resource: "machines.cluster.x-k8s.io", Namespace: "t", Name: "of-old", UID: "of-old"}) // long before
		b.Mark("a").Mark("b").Mark("c")
		since := b.Now()
		b.Update(ht.CAPI, m, ht.Set("spec.a", "1"))
		change(b)
		return b.Gap(history.Gap{Resource: "machines.cluster.x-k8s.io", Since: &since, Reason: "expired"}).Read(t)
	}
	lost := history.Write{User: "u", Verb: "create", Resource: "machines.cluster.x-k8s.io", Namespace: "t", Name: "other", UID: "other", ResourceVersion: "7"}
	sameUID := lost
	sameUID.UID = "machine:t/m"
	refused, elsewhere := lost, lost
	refused.Code, elsewhere.Resource = 409, "pods"
	gone := ht.Object("Machine", "t/gone")
	for name, c := range map[string]struct {
		change func(b *ht.Builder)
		open   int
	}{
		"every write has its event":        {func(*ht.Builder) {}, 0},
		"a deletion has its event":         {func(b *ht.Builder) { b.Create(ht.CAPI, gone).Delete(ht.CAPI, gone) }, 0},
		"an object came and went unseen":   {func(b *ht.Builder) { b.Request(lost) }, 1},
		"a version in between was missed":  {func(b *ht.Builder) { b.Request(sameUID) }, 1},
		"a refused write proves nothing":   {func(b *ht.Builder) { b.Request(refused) }, 0},
		"another resource's write":         {func(b *ht.Builder) { b.Request(elsewhere) }, 0},
		"without an audit log":             {func(b *ht.Builder) { b.WithoutAudit() }, 1},
		"a gap of another kind stays open": {func(b *ht.Builder) { b.Gap(history.Gap{Reason: "killed"}) }, 1},
	} {
		if got := record(c.change).OpenGaps(); len(got) != c.open {
			t.Errorf("%s: open gaps %+v, want %d", name, got, c.open)
		}
	}
}
