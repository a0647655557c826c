// Package defects knows the planted mistakes of fixtures/defects: small diffs to the bundled platform, each with what it
// must turn red. A check that no defect turns red proves nothing.
package defects

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// A Defect is one planted mistake.
type Defect struct {
	Number int    `json:"number"`
	Name   string `json:"name"`
	Family string `json:"family"` // the family of scenarios that shows it; "adoption" when the file names none
	Tree   string `json:"tree"`   // "old" or "new": the platform tree that the diff applies to
	Plants string `json:"plants"` // what is wrong, in a sentence
	Origin string `json:"origin"` // where the mistake was seen
	Red    []Red  `json:"red"`    // what it must turn red; every other scenario stays green
	// Masks are numbers of defects that show nothing beside this one.
	Masks []int `json:"masks"`
	// Awaits says which scenario or check has to come before the defect can show; "" when it shows today.
	Awaits string `json:"awaits"`
	// Harness is the mistake where it is not one of the tree but of whoever upgrades it.
	Harness struct {
		PublishBeforeHook bool `json:"publishBeforeHook"`
	} `json:"harness"`
	// Diff is the unified diff's path; "" when the mistake is the harness's.
	Diff string `json:"-"`
}

// All as a scenario means every one of the defect's family.
const All = "*"

// Red is what a defect turns red: a scenario, and checks (by their names without the subject) that must be among the failed.
type Red struct {
	Scenario string   `json:"scenario"` // its tag, or All
	Except   []string `json:"except"`   // with All: those that stay green
	Checks   []string `json:"checks"`
}

// Covers tells whether a scenario is meant.
func (r Red) Covers(tag string) bool {
	return r.Scenario == tag || r.Scenario == All && !slices.Contains(r.Except, tag)
}

// Names tells whether one of the red checks is meant by a check's name: "adopted" means "adopted tenant-a/prod/md0", and
// not "adopted by the migration tenant-a/prod/md0".
func (r Red) Names(check string) bool {
	return slices.ContainsFunc(r.Checks, func(want string) bool { return named(want, check) })
}

func named(want, check string) bool {
	rest, begins := strings.CutPrefix(check, want)
	return begins && subject.MatchString(rest)
}

var subject = regexp.MustCompile(`^(( of| in)? \S+)?$`)

// String is "4 unanchored-template".
func (d Defect) String() string { return fmt.Sprintf("%d %s", d.Number, d.Name) }

// Load reads every defect below dir (fixtures/defects), by number.
func Load(dir string) ([]Defect, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*", "defect.yaml"))
	if err != nil {
		return nil, err
	}
	var out []Defect
	for _, file := range files {
		body, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var d Defect
		if err := yaml.UnmarshalStrict(body, &d); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if want := fmt.Sprintf("%02d-%s", d.Number, d.Name); want != filepath.Base(filepath.Dir(file)) {
			return nil, fmt.Errorf("%s: its folder should be called %s", file, want)
		}
		if d.Family == "" {
			d.Family = "adoption"
		}
		if d.Tree != "old" && d.Tree != "new" {
			return nil, fmt.Errorf("%s: tree is %q, not old or new", file, d.Tree)
		}
		for _, r := range d.Red {
			if r.Scenario != All && len(r.Except) > 0 {
				return nil, fmt.Errorf("%s: except goes with scenario %q, not with %q", file, All, r.Scenario)
			}
		}
		if diff := filepath.Join(filepath.Dir(file), "tree.diff"); exists(diff) {
			d.Diff = diff
		} else if !d.Harness.PublishBeforeHook {
			return nil, fmt.Errorf("%s: it plants nothing: there is no tree.diff beside it", file)
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Defect) int { return a.Number - b.Number })
	return out, nil
}

// Finding is what a run found in one scenario.
type Finding struct {
	Scenario, Verdict string
	Failed            []string // names of its failed checks
}

// Missed compares what a run of the defect found with what the defect must turn red, one line for each difference; none
// means that the defect was caught, and nothing else was touched.
func (d Defect) Missed(found []Finding) []string {
	var out []string
	for _, f := range found {
		red := slices.DeleteFunc(slices.Clone(d.Red), func(r Red) bool { return !r.Covers(f.Scenario) })
		switch {
		case len(red) == 0 && f.Verdict != "pass":
			out = append(out, fmt.Sprintf("%s should be green, it is %s by %q", f.Scenario, f.Verdict, f.Failed))
		case len(red) > 0 && f.Verdict != "fail":
			out = append(out, fmt.Sprintf("%s should be red, it is %s", f.Scenario, f.Verdict))
		case len(red) > 0:
			for _, r := range red {
				for _, check := range r.Checks {
					if !slices.ContainsFunc(f.Failed, func(name string) bool { return named(check, name) }) {
						out = append(out, fmt.Sprintf("%s should be red by its check %q, only %q are", f.Scenario, check, f.Failed))
					}
				}
			}
		}
	}
	return out
}

// A Batch is defects of one family that are planted in one run. Each turns other scenarios red, so that a scenario that
// turned red tells which one did it.
type Batch []Defect

// Batches puts defects together, as many into one run as it takes. One that turns a whole family red, or that is no mistake of
// the tree, is alone. fit says whether the diffs of a batch can be applied one after the other.
func Batches(all []Defect, fit func(Batch) bool) []Batch {
	var out []Batch
next:
	for _, d := range all {
		for i, batch := range out {
			if with := append(slices.Clone(batch), d); !slices.ContainsFunc(batch, d.clashes) && fit(with) {
				out[i] = with
				continue next
			}
		}
		out = append(out, Batch{d})
	}
	return out
}

// clashes tells whether a run with both could not tell which of them turned a scenario red.
func (d Defect) clashes(other Defect) bool {
	if d.Family != other.Family || d.Tree != other.Tree || d.Diff == "" || other.Diff == "" ||
		slices.Contains(d.Masks, other.Number) || slices.Contains(other.Masks, d.Number) {
		return true
	}
	return slices.ContainsFunc(d.Red, func(r Red) bool {
		return r.Scenario == All || slices.ContainsFunc(other.Red, func(o Red) bool { return o.Scenario == All || o.Scenario == r.Scenario })
	})
}

// Diffs are the paths of the batch's diffs, in their order.
func (b Batch) Diffs() []string {
	var out []string
	for _, d := range b {
		if d.Diff != "" {
			out = append(out, d.Diff)
		}
	}
	return out
}

// Of is what a run of the batch says about one of its defects: everything but the scenarios that another one turns red.
func (b Batch) Of(d Defect, found []Finding) []Finding {
	return slices.DeleteFunc(slices.Clone(found), func(f Finding) bool {
		return slices.ContainsFunc(b, func(other Defect) bool {
			return other.Number != d.Number && slices.ContainsFunc(other.Red, func(r Red) bool { return r.Covers(f.Scenario) })
		})
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
