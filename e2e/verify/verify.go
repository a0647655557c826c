// Package verify judges a recorded upgrade. Every check is a pure function of the history: it can be run again over a
// recorded file, on another machine, without a cluster.
package verify

import (
	"fmt"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Verdict is the outcome of a check.
type Verdict string

// The three verdicts. Inconclusive means that the record cannot bear a claim; it fails a run under its own name.
const (
	Passed       Verdict = "pass"
	Failed       Verdict = "fail"
	Inconclusive Verdict = "inconclusive"
)

// Check is one claim about a history.
type Check struct {
	Name  string
	Judge func(*history.History) Result
}

// About is a check under another name, which tells it from the same check of another subject.
func About(name string, s Subject, c Check) Check {
	c.Name = fmt.Sprintf("%s %s", name, s)
	return c
}

// Result is what a check found. Reason is set when the verdict is inconclusive.
type Result struct {
	Verdict  Verdict    `json:"verdict"`
	Reason   string     `json:"reason,omitempty"`
	Evidence []Evidence `json:"evidence,omitempty"`
}

// Named is the result of a check under the check's name.
type Named struct {
	Name string `json:"name"`
	Result
}

// Evidence is one thing that contradicts a claim.
type Evidence struct {
	Object        string   `json:"object"` // "Kind namespace/name"
	UID           string   `json:"uid"`
	Change        string   `json:"change"`
	Phase         string   `json:"phase"`
	OffsetSeconds float64  `json:"offsetSeconds"` // from the upgrade's begin
	Writer        Writer   `json:"writer"`
	Chain         []string `json:"chain"` // the write itself first, what it goes back to last
}

// Writer is who made a change; empty when the record does not tell.
type Writer struct {
	User  string `json:"user"`
	Agent string `json:"agent"`
}

// Worst is the verdict over several: fail before inconclusive before pass. Nothing judged is inconclusive.
func Worst(verdicts ...Verdict) Verdict {
	worst := Passed
	for _, v := range verdicts {
		switch {
		case v == Failed:
			return Failed
		case v != Passed:
			worst = Inconclusive
		}
	}
	if len(verdicts) == 0 {
		return Inconclusive
	}
	return worst
}

// Record checks the assumptions of every other check: the record has no gap, every watch was seen to be complete, the
// writers are known, and the cluster settled.
func Record() Check {
	return Check{"record", func(h *history.History) Result {
		r := Result{Verdict: Passed}
		for _, p := range unsound(h) {
			r.Verdict = Inconclusive
			r.Evidence = append(r.Evidence, Evidence{Object: "history", Change: p})
		}
		r.Reason = strings.Join(unsound(h), "; ")
		return r
	}}
}

func unsound(h *history.History) []string {
	var out []string
	for _, g := range h.OpenGaps() {
		out = append(out, strings.TrimPrefix(g.Resource+": "+g.Reason, ": "))
	}
	if h.End == nil {
		out = append(out, "the recording has no end: it was not stopped in an orderly way")
	}
	if !h.Header.Audit {
		out = append(out, "no audit log was recorded, so no change has a writer")
	} else if len(h.Writes) == 0 {
		out = append(out, "the audit log has no write at all: is it the right one?")
	}
	switch s := h.Settlement; {
	case s == nil:
		out = append(out, "nobody waited for the cluster to settle")
	case !s.OK:
		out = append(out, fmt.Sprintf("the cluster did not settle within %.0f s, still moving: %s", s.Seconds, strings.Join(s.Waiting, "; ")))
	}
	return out
}

// kindOfClaim tells what evidence against a claim is worth when the record is not sound.
type kindOfClaim int

const (
	// never: something did not happen. Seeing it happen refutes it, whatever else the record lacks.
	never kindOfClaim = iota
	// atTheEnd: something is so in the end. An end that was not recorded, or not reached, refutes nothing.
	atTheEnd
)

// newCheck makes a check of a function that collects evidence. It may also return a doubt: the claim had nothing to be
// about, and would pass for no reason.
func newCheck(name string, claim kindOfClaim, collect func(*history.History) (evidence []Evidence, doubt string)) Check {
	return Check{name, func(h *history.History) Result {
		evidence, doubt := collect(h)
		record := unsound(h)
		switch {
		case len(evidence) > 0 && (claim == never || len(record) == 0):
			return Result{Verdict: Failed, Evidence: evidence}
		case len(record) > 0:
			return Result{Verdict: Inconclusive, Reason: strings.Join(record, "; "), Evidence: evidence}
		case doubt != "":
			return Result{Verdict: Inconclusive, Reason: doubt}
		}
		return Result{Verdict: Passed}
	}}
}

// of makes evidence of an event.
func of(h *history.History, e *history.Event, change string) Evidence {
	out := Evidence{
		Object: e.Life.String(), UID: e.Life.UID, Change: change,
		Phase: h.Phase(e.When()), OffsetSeconds: h.Offset(e.When()), Chain: h.Chain(e),
	}
	if e.Writer != nil {
		out.Writer = Writer{e.Writer.User, e.Writer.Agent}
	}
	return out
}

// lastOf makes evidence of an object's end.
func lastOf(h *history.History, l *history.Lifetime, change string) Evidence {
	return of(h, l.Events[len(l.Events)-1], change)
}

// ofWrite makes evidence of a request.
func ofWrite(h *history.History, w *history.Write, change string) Evidence {
	object := w.Resource + " " + strings.TrimPrefix(w.Namespace+"/"+w.Name, "/")
	if l := h.Lifetime(w.UID); l != nil {
		object = l.String()
	} else if named := h.Named(history.Ref{Resource: w.Resource, Namespace: w.Namespace, Name: w.Name}); len(named) > 0 {
		object = named[len(named)-1].String()
	}
	return Evidence{
		Object: object, UID: w.UID, Change: change, Phase: h.Phase(w.Time), OffsetSeconds: h.Offset(w.Time),
		Writer: Writer{w.User, w.Agent}, Chain: []string{fmt.Sprintf("%s %s by %s", object, change, history.ShortUser(w.User))},
	}
}

// missing makes evidence of an object that is not there.
func missing(object, change string) Evidence { return Evidence{Object: object, Change: change} }

// String tells a result to a reader: one paragraph per piece of evidence.
func (n Named) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", n.Name, n.Verdict)
	if n.Reason != "" {
		fmt.Fprintf(&b, ": %s", n.Reason)
	}
	for _, e := range n.Evidence {
		fmt.Fprintf(&b, "\n  %s", e)
	}
	return b.String()
}

// String is the evidence in a sentence, and the chain below it.
func (e Evidence) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", e.Object, strings.ReplaceAll(e.Change, "\n", "\n    "))
	if e.Phase != "" {
		fmt.Fprintf(&b, " (phase %s, %+.1f s)", e.Phase, e.OffsetSeconds)
	}
	if e.Writer.User != "" {
		fmt.Fprintf(&b, " by %s", e.Writer.User)
	}
	for i, link := range e.Chain {
		if i == 0 && len(e.Chain) == 1 {
			break // says no more than the sentence
		}
		fmt.Fprintf(&b, "\n    %s%s", map[bool]string{true: "", false: "← "}[i == 0], link)
	}
	return b.String()
}
