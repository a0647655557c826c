// Package defects knows the planted mistakes of fixtures/defects: small diffs to the bundled platform, each with what it
// must turn red. A check that no defect turns red proves nothing.
package defects

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
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
	// Awaits says which scenario or check has to come before the defect can show; "" when it shows today.
	Awaits string `json:"awaits"`
	// Harness is the mistake where it is not one of the tree but of whoever upgrades it.
	Harness struct {
		PublishBeforeHook bool `json:"publishBeforeHook"`
	} `json:"harness"`
	// Diff is the unified diff's path; "" when the mistake is the harness's.
	Diff string `json:"-"`
}

// Red is a scenario that a defect turns red, and checks (by the beginning of their names) that must be among the failed.
type Red struct {
	Scenario string   `json:"scenario"`
	Checks   []string `json:"checks"`
}

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

// Missed compares what a run of the defect found with what the defect must turn red, one line for each difference; none
// means that the defect was caught, and nothing else was touched. verdicts holds every scenario that was run, failed the
// names of its failed checks.
func (d Defect) Missed(verdicts map[string]string, failed map[string][]string) []string {
	var out []string
	expected := map[string]bool{}
	for _, r := range d.Red {
		expected[r.Scenario] = true
		verdict, ran := verdicts[r.Scenario]
		if !ran {
			continue
		}
		if verdict != "fail" {
			out = append(out, fmt.Sprintf("%s should be red, it is %s", r.Scenario, verdict))
			continue
		}
		for _, check := range r.Checks {
			if !slices.ContainsFunc(failed[r.Scenario], func(name string) bool { return strings.HasPrefix(name, check) }) {
				out = append(out, fmt.Sprintf("%s should be red by its check %q, only %q are", r.Scenario, check, failed[r.Scenario]))
			}
		}
	}
	for _, s := range slices.Sorted(maps.Keys(verdicts)) {
		if !expected[s] && verdicts[s] != "pass" {
			out = append(out, fmt.Sprintf("%s should be green, it is %s by %q", s, verdicts[s], failed[s]))
		}
	}
	return out
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
