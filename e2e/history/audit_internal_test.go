package history

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

func auditLine(verb, uri, extra string) string {
	return fmt.Sprintf(`{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"RequestResponse","stage":"ResponseComplete","requestURI":%q,"verb":%q,`+
		`"user":{"username":"system:serviceaccount:capi-system:capi-manager","groups":["g"]},"userAgent":"manager/v1","responseStatus":{"code":200},`+
		`"requestReceivedTimestamp":"2026-11-30T09:00:00.123456Z","stageTimestamp":"2026-11-30T09:00:01.000000Z"%s}`, uri, verb, extra)
}

const machineRef = `,"objectRef":{"resource":"machines","apiGroup":"cluster.x-k8s.io","apiVersion":"v1beta1","namespace":"t","name":"m"}`

func TestParseAudit(t *testing.T) {
	full := Write{Time: time.Date(2026, 11, 30, 9, 0, 0, 123456000, time.UTC), User: "system:serviceaccount:capi-system:capi-manager", Agent: "manager/v1", Groups: []string{"g"},
		Verb: "patch", Resource: "machines.cluster.x-k8s.io", Namespace: "t", Name: "m", UID: "u", ResourceVersion: "7", Code: 200}
	answer := `,"responseObject":{"kind":"Machine","metadata":{"name":"m","namespace":"t","uid":"u","resourceVersion":"7"}}`
	with := func(change func(*Write)) Write { w := full; change(&w); return w }
	for name, c := range map[string]struct {
		line string
		want []Write
	}{
		"patch":            {auditLine("patch", "/x", machineRef+answer), []Write{full}},
		"metadata only":    {auditLine("patch", "/x", machineRef), []Write{with(func(w *Write) { w.UID, w.ResourceVersion = "", "" })}},
		"generated name":   {auditLine("create", "/x", strings.Replace(machineRef, `,"name":"m"`, "", 1)+answer), []Write{with(func(w *Write) { w.Verb = "create" })}},
		"status":           {auditLine("patch", "/x", strings.Replace(machineRef, `"name"`, `"subresource":"status","name"`, 1)+answer), []Write{with(func(w *Write) { w.Subresource = "status" })}},
		"immediate delete": {auditLine("delete", "/x", machineRef+`,"responseObject":{"kind":"Status","details":{"name":"m","uid":"u"}}`), []Write{with(func(w *Write) { w.Verb, w.ResourceVersion = "delete", "" })}},
		"refused": {strings.Replace(auditLine("patch", "/x", machineRef+`,"responseObject":{"kind":"Status","details":{"uid":"u"}}`), `"code":200`, `"code":409`, 1),
			[]Write{with(func(w *Write) { w.UID, w.ResourceVersion, w.Code = "", "", 409 })}},
		"impersonated": {auditLine("patch", "/x", machineRef+answer+`,"impersonatedUser":{"username":"alice"}`), []Write{with(func(w *Write) { w.User, w.Groups = "alice", nil })}},
		"deletecollection": {auditLine("deletecollection", "/x", strings.Replace(machineRef, `,"name":"m"`, "", 1)+`,"responseObject":{"kind":"MachineList","items":[{"metadata":{"name":"m","namespace":"t","uid":"u","resourceVersion":"7"}},{"metadata":{"name":"n","namespace":"t","uid":"v","resourceVersion":"8"}}]}`),
			[]Write{with(func(w *Write) { w.Verb = "deletecollection" }), with(func(w *Write) { w.Verb, w.Name, w.UID, w.ResourceVersion = "deletecollection", "n", "v", "8" })}},
		"read":           {auditLine("list", "/x", machineRef), nil},
		"dry run":        {auditLine("patch", "/x?fieldManager=f&dryRun=All", machineRef+answer), nil},
		"dry-run delete": {auditLine("delete", "/x", machineRef+`,"requestObject":{"kind":"DeleteOptions","dryRun":["All"]}`), nil},
		"delete, wet":    {auditLine("delete", "/x", machineRef+answer+`,"requestObject":{"kind":"DeleteOptions","propagationPolicy":"Background"}`), []Write{with(func(w *Write) { w.Verb = "delete" })}},
		"token":          {auditLine("create", "/x", `,"objectRef":{"resource":"serviceaccounts","subresource":"token","namespace":"t","name":"m","apiVersion":"v1"}`), nil},
		"review":         {auditLine("create", "/x", `,"objectRef":{"resource":"subjectaccessreviews","apiGroup":"authorization.k8s.io"}`), nil},
		"no object":      {auditLine("create", "/x", ""), nil},
		"only received":  {strings.Replace(auditLine("patch", "/x", machineRef), "ResponseComplete", "RequestReceived", 1), nil},
	} {
		got, err := parseAudit([]byte(c.line))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !slices.EqualFunc(got, c.want, func(g *Write, w Write) bool { return fmt.Sprintf("%+v", *g) == fmt.Sprintf("%+v", w) }) {
			for _, g := range got {
				t.Errorf("%s: got %+v", name, *g)
			}
			t.Errorf("%s: want %+v", name, c.want)
		}
	}
	if _, err := parseAudit([]byte("{")); err == nil {
		t.Error("a torn line is no error")
	}
}

func TestTailReadsFromItsStartOverRotationsToTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	one := func(name string) string {
		return auditLine("patch", "/x", strings.Replace(machineRef, `"m"`, `"`+name+`"`, 1)) + "\n"
	}
	appendTo := func(p, text string) {
		f, err := os.OpenFile(p, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	appendTo(path, one("before"))
	var got []string
	tl, err := newTail(path, func(l line) {
		if l.Gap != nil {
			got = append(got, "gap: "+l.Gap.Reason)
		} else {
			got = append(got, l.Write.Name)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	appendTo(path, one("a")+one("b")[:40])
	tl.read()
	appendTo(path, one("b")[40:])
	tl.read()
	appendTo(path, one("c"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	appendTo(path, one("d")+"no json\n")
	tl.read()
	appendTo(path, one("e")+"{")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	tl.follow(ctx)
	want := []string{"a", "b", "c", "d", "gap: the audit log " + path + " has a line that is no audit event: ", "e", "gap: the audit log " + path + " ends in the middle of a line"}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("read %q, want %q", got, want)
	}
}

func TestTailSaysThatTheLogNeverCame(t *testing.T) {
	var gaps []string
	tl, err := newTail(filepath.Join(t.TempDir(), "none"), func(l line) { gaps = append(gaps, l.Gap.Reason) })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	tl.follow(ctx)
	if len(gaps) != 1 || !strings.HasSuffix(gaps[0], "never appeared") {
		t.Errorf("gaps %q", gaps)
	}
}

func TestFileIsOnDiskWithoutAStop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl")
	f, err := create(t.Context(), path, Header{Schema: Schema, RunID: "killed"})
	if err != nil {
		t.Fatal(err)
	}
	f.add(line{Log: &Log{Source: "s", Line: "last words"}})
	err = wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 5*time.Second, true, func(context.Context) (bool, error) {
		text, err := os.ReadFile(path)
		return strings.HasSuffix(string(text), "\"last words\"}}\n"), err
	})
	if err != nil {
		t.Errorf("a line is not on disk after five seconds: %v", err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode is %v (%v), want 0600: it holds Helm's Secrets", info.Mode(), err)
	}
	if _, err := create(t.Context(), path, Header{}); err == nil {
		t.Error("a history is written over another one")
	}
	if err := f.close(); err != nil {
		t.Error(err)
	}
	f.add(line{Log: &Log{Line: "too late"}}) // must not panic
	if err := f.sync(); err == nil {
		t.Error("a sync after the end succeeds")
	}
}
