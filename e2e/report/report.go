// Package report writes what a run found: verdict.json, junit.xml and the text that ends on the screen. It decides nothing.
package report

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Schema is the version of verdict.json.
const Schema = 1

// A Document is verdict.json.
type Document struct {
	Schema  int            `json:"schema"`
	Verdict verify.Verdict `json:"verdict"`
	Runs    []Run          `json:"runs"`
}

// A Run is one cluster and one upgrade.
type Run struct {
	ID       string         `json:"id"`
	Family   string         `json:"family"`
	Provider string         `json:"provider"`
	Seed     int64          `json:"seed"`
	Restored bool           `json:"restored"` // its fleet came out of a snapshot, made by an earlier run with this seed
	Old      string         `json:"old"`
	New      string         `json:"new"`
	Verdict  verify.Verdict `json:"verdict"`
	// Reason says why a run that could not be judged is inconclusive, and in which phase.
	Reason    string     `json:"reason,omitempty"`
	Seconds   Seconds    `json:"seconds"`
	Fidelity  []Fidelity `json:"fidelity"`
	Scenarios []Scenario `json:"scenarios"`
}

// Seconds is how long each phase took.
type Seconds struct {
	Boot     float64 `json:"boot"`
	Install  float64 `json:"install"`
	Populate float64 `json:"populate"`
	Upgrade  float64 `json:"upgrade"`
	Settle   float64 `json:"settle"`
	Judge    float64 `json:"judge"`
	Total    float64 `json:"total"`
}

// Fidelity says of one component whether it was the real one, and if not, why.
type Fidelity struct {
	Component string `json:"component"`
	Version   string `json:"version"`
	Real      bool   `json:"real"`
	Why       string `json:"why"`
}

// A Scenario is one row of the catalogue with what each of its checks found.
type Scenario struct {
	Family  string         `json:"family"`
	Tag     string         `json:"tag"`
	Verdict verify.Verdict `json:"verdict"`
	Checks  []Check        `json:"checks"`
}

// A Check is one check's name and finding.
type Check struct {
	Name     string            `json:"name"`
	Verdict  verify.Verdict    `json:"verdict"`
	Reason   string            `json:"reason,omitempty"`
	Evidence []verify.Evidence `json:"evidence"`
}

// String is the check's name and verdict, why, and the evidence, as package verify tells a result.
func (c Check) String() string {
	return verify.Named{Name: c.Name, Result: verify.Result{Verdict: c.Verdict, Reason: c.Reason, Evidence: c.Evidence}}.String()
}

// Judge sets the verdicts of the run and its scenarios from those of the checks. A run with a Reason was not recorded
// completely, so that it can't pass.
func (r *Run) Judge() {
	var all []verify.Verdict
	for i := range r.Scenarios {
		s := &r.Scenarios[i]
		var checks []verify.Verdict
		for _, c := range s.Checks {
			checks = append(checks, c.Verdict)
		}
		s.Verdict = verify.Worst(checks...)
		all = append(all, s.Verdict)
	}
	if r.Reason != "" {
		all = append(all, verify.Inconclusive)
	}
	r.Verdict = verify.Worst(all...)
}

// New joins runs into a document.
func New(runs ...Run) Document {
	d := Document{Schema: Schema, Runs: runs}
	var all []verify.Verdict
	for _, r := range runs {
		all = append(all, r.Verdict)
	}
	d.Verdict = verify.Worst(all...)
	return d
}

// Write puts verdict.json and junit.xml into dir.
func (d Document) Write(dir string) error {
	body, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return fmt.Errorf("encode verdict: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "verdict.json"), append(body, '\n'), 0o644); err != nil {
		return fmt.Errorf("write verdict: %w", err)
	}
	return d.writeJUnit(filepath.Join(dir, "junit.xml"))
}

// Read reads dir/verdict.json.
func Read(dir string) (Document, error) {
	var d Document
	path := filepath.Join(dir, "verdict.json")
	body, err := os.ReadFile(path)
	if err != nil {
		return d, fmt.Errorf("read verdict: %w", err)
	}
	if err := json.Unmarshal(body, &d); err != nil {
		return d, fmt.Errorf("read verdict %s: %w", path, err)
	}
	if d.Schema != Schema {
		return d, fmt.Errorf("read verdict %s: schema %d, this program reads %d", path, d.Schema, Schema)
	}
	return d, nil
}
