// Package history records one upgrade and answers questions about the record.
//
// A history is a file of JSON lines, only ever appended to. The first line is the header; each further line holds
// exactly one of: an object of the baseline or a watch event, a list (its resource version and count), a bookmark, a
// write from the audit log, a mark of the run's phases, a log line, a gap, the settlement, the end. The recorder
// (Start) writes it while the run goes on, Read loads it again, on any machine and without a cluster. Nothing is judged here.
package history

import (
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Schema is the version of the file format.
const Schema = 1

// Phases of every run. Others are an act's name.
const (
	PhaseUpgrade  = "upgrade"  // the platform chart with its migration hook; its begin is second zero of every offset
	PhaseMigrated = "migrated" // the hook has ended, however it went; the new charts come
)

// Header is the first line of a history.
type Header struct {
	Schema   int    `json:"schema"`
	RunID    string `json:"runID"`
	Family   string `json:"family"`
	Provider string `json:"provider"`
	Seed     int64  `json:"seed"`
	Old      string `json:"old"`
	New      string `json:"new"`
	Target   int    `json:"target"` // platform version that the upgrade goes to
	// Tolerated are globs over "namespace/name" of HelmReleases that the platform's profile lets be not Ready.
	Tolerated []string  `json:"tolerated,omitempty"`
	Kinds     []string  `json:"kinds"`              // recorded, "machines.cluster.x-k8s.io"
	Unserved  []string  `json:"unserved,omitempty"` // asked for, but the API server does not serve them
	Audit     bool      `json:"audit"`              // an audit log was read
	Started   time.Time `json:"started"`
}

// Change says what an event reports.
type Change string

// The four kinds of event. A baseline event is an object as it was before anything happened.
const (
	Baseline Change = "BASELINE"
	Added    Change = "ADDED"
	Modified Change = "MODIFIED"
	Deleted  Change = "DELETED"
)

// Event is one object of the baseline, or one event of a watch with the whole object after the change (for Deleted: its
// last state). managedFields are left out.
type Event struct {
	Time     time.Time                  `json:"time"` // when the recorder received it
	Type     Change                     `json:"type"`
	Resource string                     `json:"resource"`           // "machines.cluster.x-k8s.io", "pods"
	Relisted bool                       `json:"relisted,omitempty"` // found by a list after an expired watch, not seen as it happened
	Object   *unstructured.Unstructured `json:"object"`

	// Derived by Read.
	Before *unstructured.Unstructured `json:"-"` // state before it; nil for Baseline and Added
	Writer *Write                     `json:"-"` // the request that made it; nil when the audit log has none
	Life   *Lifetime                  `json:"-"` // the object it belongs to
}

// List is one complete listing of a resource, from which a watch starts.
type List struct {
	Time            time.Time `json:"time"`
	Resource        string    `json:"resource"`
	ResourceVersion string    `json:"resourceVersion"`
	Count           int       `json:"count"`
}

// Bookmark is the API server's word that a watch has delivered everything up to a resource version.
type Bookmark struct {
	Time            time.Time `json:"time"`
	Resource        string    `json:"resource"`
	ResourceVersion string    `json:"resourceVersion"`
}

// Write is one request that writes, from the audit log. UID and ResourceVersion are those of the answer and are empty
// when the audit policy keeps no answers for the resource. Dry runs and requests that store nothing (reviews, tokens)
// are left out; refused requests are in, with their code.
type Write struct {
	Time            time.Time `json:"time"` // when the API server received it
	User            string    `json:"user"`
	Agent           string    `json:"agent,omitempty"`
	Groups          []string  `json:"groups,omitempty"`
	Verb            string    `json:"verb"` // create, update, patch, delete, deletecollection
	Resource        string    `json:"resource"`
	Subresource     string    `json:"subresource,omitempty"`
	Namespace       string    `json:"namespace,omitempty"`
	Name            string    `json:"name,omitempty"`
	UID             string    `json:"uid,omitempty"`
	ResourceVersion string    `json:"resourceVersion,omitempty"`
	Code            int       `json:"code"`
}

// Succeeded says whether the API server accepted the request.
func (w *Write) Succeeded() bool { return w.Code >= 200 && w.Code < 300 }

// Mark is the begin or end of a phase of the run.
type Mark struct {
	Time  time.Time `json:"time"`
	Phase string    `json:"phase"`
	At    string    `json:"at"` // "begin" or "end"
}

// Gap is something that the record may lack. One open gap keeps every verdict from passing.
type Gap struct {
	Time     time.Time  `json:"time"`
	Resource string     `json:"resource,omitempty"`
	Since    *time.Time `json:"since,omitempty"` // of an expired watch: when it was last known to be complete
	Reason   string     `json:"reason"`
}

// Log is one line that somebody printed, for example the migration.
type Log struct {
	Time   time.Time `json:"time"`
	Source string    `json:"source"`
	Line   string    `json:"line"`
}

// Settlement tells whether the cluster came to rest, and what was still moving if not.
type Settlement struct {
	Time    time.Time `json:"time"`
	OK      bool      `json:"ok"`
	Waiting []string  `json:"waiting,omitempty"`
	Seconds float64   `json:"seconds"` // how long it took, or was waited for
	Quiet   float64   `json:"quiet"`   // seconds without a write that were asked for
}

// End closes a history: every watch was seen to have delivered all there was.
type End struct {
	Time time.Time `json:"time"`
}

// line is one line of the file; exactly one field is set.
type line struct {
	Header     *Header     `json:"header,omitempty"`
	Event      *Event      `json:"event,omitempty"`
	List       *List       `json:"list,omitempty"`
	Bookmark   *Bookmark   `json:"bookmark,omitempty"`
	Write      *Write      `json:"write,omitempty"`
	Mark       *Mark       `json:"mark,omitempty"`
	Gap        *Gap        `json:"gap,omitempty"`
	Log        *Log        `json:"log,omitempty"`
	Settlement *Settlement `json:"settlement,omitempty"`
	End        *End        `json:"end,omitempty"`
}
