package history

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	audit "k8s.io/apiserver/pkg/apis/audit/v1"
)

// auditPoll is how often the audit log is looked at.
const auditPoll = 250 * time.Millisecond

// tail follows an audit log from a point on, over rotations.
type tail struct {
	path string
	from int64
	file *os.File
	in   *bufio.Reader
	part []byte // begin of a line whose rest is not there yet
	sink func(line)
}

func newTail(path string, sink func(line)) (*tail, error) {
	t := &tail{path: path, sink: sink}
	info, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	if err == nil {
		t.from = info.Size()
	}
	return t, nil
}

// follow reads until ctx ends, and then once more to the end.
func (t *tail) follow(ctx context.Context) {
	tick := time.NewTicker(auditPoll)
	defer tick.Stop()
	for {
		t.read()
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.read()
			t.finish()
			return
		}
	}
}

func (t *tail) finish() {
	switch {
	case t.file == nil:
		t.gap("the audit log %s never appeared", t.path)
	case len(t.part) > 0:
		t.gap("the audit log %s ends in the middle of a line", t.path)
	}
	if t.file != nil {
		_ = t.file.Close()
	}
}

func (t *tail) gap(format string, args ...any) {
	t.sink(line{Gap: &Gap{Time: time.Now(), Reason: fmt.Sprintf(format, args...)}})
}

func (t *tail) read() {
	for {
		if t.file == nil {
			f, err := os.Open(t.path)
			if err != nil {
				return
			}
			if _, err := f.Seek(t.from, io.SeekStart); err != nil {
				_ = f.Close()
				return
			}
			t.file, t.in, t.from = f, bufio.NewReaderSize(f, 1<<20), 0
		}
		rotated := t.rotated() // before reading, so that all of the old file has been read when it is left
		for {
			text, err := t.in.ReadBytes('\n')
			t.part = append(t.part, text...)
			if err != nil {
				break
			}
			t.line(t.part)
			t.part = nil
		}
		if !rotated {
			return
		}
		_ = t.file.Close()
		t.file = nil
	}
}

func (t *tail) rotated() bool {
	now, err := os.Stat(t.path)
	if err != nil {
		return false
	}
	open, err := t.file.Stat()
	return err == nil && !os.SameFile(now, open)
}

func (t *tail) line(text []byte) {
	if len(bytes.TrimSpace(text)) == 0 {
		return
	}
	writes, err := parseAudit(text)
	if err != nil {
		t.gap("the audit log %s has a line that is no audit event: %v", t.path, err)
	}
	for _, w := range writes {
		t.sink(line{Write: w})
	}
}

// parseAudit turns one line of an audit log into the writes that it reports: none for reads, dry runs, unfinished
// requests and requests that store nothing; one for each deleted object of a deletecollection whose answer lists them.
func parseAudit(text []byte) ([]*Write, error) {
	var e audit.Event
	if err := json.Unmarshal(text, &e); err != nil {
		return nil, err
	}
	if e.Stage != audit.StageResponseComplete && e.Stage != audit.StagePanic || e.ObjectRef == nil || !stores(&e) {
		return nil, nil
	}
	w := Write{
		Time: e.RequestReceivedTimestamp.Time, User: e.User.Username, Agent: e.UserAgent, Groups: e.User.Groups, Verb: e.Verb,
		Resource:    schema.GroupResource{Group: e.ObjectRef.APIGroup, Resource: e.ObjectRef.Resource}.String(),
		Subresource: e.ObjectRef.Subresource, Namespace: e.ObjectRef.Namespace, Name: e.ObjectRef.Name, UID: string(e.ObjectRef.UID),
	}
	if e.ImpersonatedUser != nil {
		w.User, w.Groups = e.ImpersonatedUser.Username, e.ImpersonatedUser.Groups
	}
	if e.ResponseStatus != nil {
		w.Code = int(e.ResponseStatus.Code)
	}
	if e.ResponseObject == nil || len(e.ResponseObject.Raw) == 0 || !w.Succeeded() {
		return []*Write{&w}, nil
	}
	answer := &unstructured.Unstructured{}
	if err := json.Unmarshal(e.ResponseObject.Raw, &answer.Object); err != nil {
		return nil, fmt.Errorf("answer: %w", err)
	}
	if items, isList := answer.Object["items"].([]any); isList {
		var out []*Write
		for _, item := range items {
			if o, ok := item.(map[string]any); ok {
				one := w
				one.answer(&unstructured.Unstructured{Object: o})
				out = append(out, &one)
			}
		}
		return out, nil
	}
	w.answer(answer)
	return []*Write{&w}, nil
}

// answer takes name, UID and resource version from the object, or the Status, that was answered.
func (w *Write) answer(o *unstructured.Unstructured) {
	if o.GetKind() == "Status" {
		if uid, _, _ := unstructured.NestedString(o.Object, "details", "uid"); uid != "" {
			w.UID = uid
		}
		return
	}
	if w.Name == "" {
		w.Name = o.GetName()
	}
	if w.Namespace == "" {
		w.Namespace = o.GetNamespace()
	}
	if o.GetUID() != "" {
		w.UID, w.ResourceVersion = string(o.GetUID()), o.GetResourceVersion()
	}
}

// stores says whether the request, if accepted, changes what is stored.
func stores(e *audit.Event) bool {
	switch e.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
	default:
		return false
	}
	switch e.ObjectRef.Subresource {
	case "token", "exec", "attach", "portforward", "proxy":
		return false
	}
	switch e.ObjectRef.APIGroup {
	case "authentication.k8s.io", "authorization.k8s.io":
		return false
	}
	if at, err := url.Parse(e.RequestURI); err == nil && at.Query().Has("dryRun") {
		return false
	}
	if strings.HasPrefix(e.Verb, "delete") && e.RequestObject != nil { // a delete's options may come in the body
		var options struct {
			DryRun []string `json:"dryRun"`
		}
		return json.Unmarshal(e.RequestObject.Raw, &options) != nil || len(options.DryRun) == 0
	}
	return true
}
