package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// History is a record of one run, indexed. All of it is read-only.
type History struct {
	Header     Header
	Events     []*Event // baseline first; then in the order of their arrival
	Writes     []*Write // in the order of the audit log
	Lists      []List
	Bookmarks  []Bookmark
	Marks      []Mark
	Gaps       []Gap
	Logs       []Log
	Settlement *Settlement // the last one; nil when settling was never reached
	End        *End        // nil when the recorder was not stopped in an orderly way

	lives    []*Lifetime
	byUID    map[string]*Lifetime
	byName   map[Ref][]*Lifetime
	writes   map[string][]*Write // by UID
	unnamed  map[Ref][]*Write    // writes whose answer was not kept, by name
	releases map[ReleaseKey][]*Release

	cutting sync.Mutex
	cuts    map[string]*History // by phase, see Before
}

// Read loads a history from a file. A torn last line, as a killed run leaves it, becomes a gap.
func Read(path string) (*History, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	defer func() { _ = f.Close() }()
	h, err := Decode(f)
	if err != nil {
		return nil, fmt.Errorf("read history %s: %w", path, err)
	}
	return h, nil
}

// Decode is Read from any reader.
func Decode(r io.Reader) (*History, error) {
	h := &History{}
	in := bufio.NewReaderSize(r, 1<<20)
	for n := 1; ; n++ {
		text, err := in.ReadBytes('\n')
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if len(bytes.TrimSpace(text)) > 0 {
			var l line
			switch err := json.Unmarshal(text, &l); {
			case err != nil && last && n > 1:
				h.Gaps = append(h.Gaps, Gap{Reason: fmt.Sprintf("the last line (%d) is torn: the run was killed while it recorded", n)})
			case err != nil:
				return nil, fmt.Errorf("line %d: %w", n, err)
			case n == 1 && (l.Header == nil || l.Header.Schema != Schema):
				return nil, fmt.Errorf("line 1 is no header of schema %d", Schema)
			default:
				h.add(l)
			}
		} else if last && n == 1 {
			return nil, errors.New("the file is empty: no header was written")
		}
		if last {
			break
		}
	}
	return h, h.index()
}

func (h *History) add(l line) {
	switch {
	case l.Header != nil:
		h.Header = *l.Header
	case l.Event != nil:
		h.Events = append(h.Events, l.Event)
	case l.List != nil:
		h.Lists = append(h.Lists, *l.List)
	case l.Bookmark != nil:
		h.Bookmarks = append(h.Bookmarks, *l.Bookmark)
	case l.Write != nil:
		h.Writes = append(h.Writes, l.Write)
	case l.Mark != nil:
		h.Marks = append(h.Marks, *l.Mark)
	case l.Gap != nil:
		h.Gaps = append(h.Gaps, *l.Gap)
	case l.Log != nil:
		h.Logs = append(h.Logs, *l.Log)
	case l.Settlement != nil:
		h.Settlement = l.Settlement
	case l.End != nil:
		h.End = l.End
	}
}

// index derives what the queries need: lifetimes, writers, releases, relations.
func (h *History) index() error {
	h.byUID, h.byName = map[string]*Lifetime{}, map[Ref][]*Lifetime{}
	h.writes, h.unnamed = map[string][]*Write{}, map[Ref][]*Write{}
	h.releases = map[ReleaseKey][]*Release{}
	for _, w := range h.Writes {
		if w.UID != "" {
			h.writes[w.UID] = append(h.writes[w.UID], w)
		} else {
			ref := Ref{w.Resource, w.Namespace, w.Name}
			h.unnamed[ref] = append(h.unnamed[ref], w)
		}
	}
	for _, e := range h.Events {
		if e.Object == nil {
			return fmt.Errorf("an event of %s has no object", e.Resource)
		}
		uid := string(e.Object.GetUID())
		life := h.byUID[uid]
		if life == nil {
			life = &Lifetime{Ref: RefOf(e.Resource, e.Object), UID: uid, Kind: e.Object.GetKind()}
			h.byUID[uid] = life
			h.byName[life.Ref] = append(h.byName[life.Ref], life)
			h.lives = append(h.lives, life)
		} else {
			e.Before = life.Last()
		}
		e.Life = life
		e.Writer = h.writerOf(e)
		life.Events = append(life.Events, e)
		if err := h.addRelease(e); err != nil {
			return err
		}
	}
	for _, l := range h.lives {
		l.parents = h.parentsOf(l)
	}
	for _, l := range h.lives {
		l.ancestors = ancestorsOf(l)
	}
	return nil
}

// Before is the record as it would be had it ended when the phase began (for the first time): events and writes up to
// there, everything else as it is. It is nil when the phase never began.
func (h *History) Before(phase string) *History {
	end, began := h.Begin(phase)
	if !began {
		return nil
	}
	h.cutting.Lock()
	defer h.cutting.Unlock()
	if cut := h.cuts[phase]; cut != nil {
		return cut
	}
	cut := &History{Header: h.Header, Lists: h.Lists, Bookmarks: h.Bookmarks, Marks: h.Marks, Gaps: h.Gaps, Logs: h.Logs,
		Settlement: h.Settlement, End: h.End}
	for _, w := range h.Writes {
		if !w.Time.After(end) {
			cut.Writes = append(cut.Writes, w)
		}
	}
	for _, e := range h.Events {
		if !e.When().After(end) {
			cut.Events = append(cut.Events, &Event{Time: e.Time, Type: e.Type, Resource: e.Resource, Relisted: e.Relisted, Object: e.Object})
		}
	}
	if err := cut.index(); err != nil {
		panic(err) // the same events could be indexed before
	}
	if h.cuts == nil {
		h.cuts = map[string]*History{}
	}
	h.cuts[phase] = cut
	return cut
}

// writerOf joins an event with the request that made it: by UID and resource version of the answer; a final removal by
// the delete request, or by the write that took the last finalizer away; and by name where answers are not kept.
func (h *History) writerOf(e *Event) *Write {
	if e.Type == Baseline {
		return nil
	}
	uid, version := string(e.Object.GetUID()), e.Object.GetResourceVersion()
	var removal *Write
	pending := e.Before != nil && len(e.Before.GetFinalizers()) > 0
	for _, w := range h.writes[uid] {
		if !w.Succeeded() {
			continue
		}
		if w.ResourceVersion == version && version != "" {
			return w // the first one: later requests with the same version changed nothing
		}
		if isDelete := w.Verb == "delete" || w.Verb == "deletecollection"; isDelete != pending && !w.Time.After(e.Time) {
			removal = w
		}
	}
	if e.Type == Deleted && removal != nil {
		return removal
	}
	var named *Write
	for _, w := range h.unnamed[e.Life.Ref] {
		if w.Succeeded() && !w.Time.After(e.Time) && (w.Verb == "delete" || w.Verb == "deletecollection") == (e.Type == Deleted) {
			named = w
		}
	}
	if n := len(e.Life.Events); named != nil && n > 0 && e.Life.Events[n-1].Writer == named {
		return nil // it made the event before; who made this one is not known
	}
	return named
}

// deleting says whether the object's deletion has been asked for.
func deleting(o *unstructured.Unstructured) bool { return o != nil && o.GetDeletionTimestamp() != nil }
