package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/defects"
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// row is one defect's line of the matrix.
type row struct {
	Number  int                 `json:"number"`
	Name    string              `json:"name"`
	Family  string              `json:"family"`
	Plants  string              `json:"plants"`
	Seconds float64             `json:"seconds"`
	Verdict map[string]string   `json:"verdicts"` // by scenario
	Failed  map[string][]string `json:"failed"`   // checks by scenario
	Missed  []string            `json:"missed"`   // empty: caught, and nothing else turned red
}

func defectsCommand() *cobra.Command {
	var f runFlags
	var number int
	cmd := &cobra.Command{Use: "defects", Short: "Plant each defect, run, and print what turned red", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			root, artifacts, err := f.prepare(cmd.Context(), out)
			if err != nil {
				return err
			}
			all, err := defects.Load(filepath.Join(root, "fixtures", "defects"))
			if err != nil {
				return err
			}
			if number != 0 {
				if all = slices.DeleteFunc(all, func(d defects.Defect) bool { return d.Number != number }); len(all) == 0 {
					return harness.UsageError{Line: fmt.Sprintf("there is no defect %d in fixtures/defects", number)}
				}
			}
			dir := filepath.Join(artifacts, harness.RunID("defects"))
			var rows []row
			for _, d := range all {
				if d.Awaits != "" && number == 0 {
					fmt.Fprintf(out, "defect %s is left out: it awaits %s\n", d, d.Awaits)
					continue
				}
				r, err := f.plant(cmd, root, filepath.Join(dir, fmt.Sprintf("%02d-%s", d.Number, d.Name)), d)
				if err != nil {
					return err
				}
				rows = append(rows, r)
			}
			matrix(out, rows)
			if err := writeJSON(filepath.Join(dir, "defects.json"), rows); err != nil {
				return err
			}
			if err := latest(artifacts, dir); err != nil {
				return err
			}
			fmt.Fprintf(out, "artifacts: %s\n", dir)
			for _, r := range rows {
				if len(r.Missed) > 0 {
					return verdictError(harness.ExitFail)
				}
			}
			return nil
		}}
	cmd.Flags().IntVar(&number, "defect", 0, "only this one")
	cmd.Flags().StringVar(&f.artifacts, "artifacts", "", "folder that gets a folder per call (_artifacts)")
	cmd.Flags().StringVar(&f.flux, "flux", "", "helm-controller: 1.6 with Helm 4 (default), or 1.4 with Helm 3")
	f.provider, f.snapshots = "embedded", true
	return cmd
}

// plant runs the defect's family with it in the bundled platform.
func (f runFlags) plant(cmd *cobra.Command, root, dir string, d defects.Defect) (row, error) {
	out := cmd.OutOrStdout()
	fam, err := family(d.Family)
	if err != nil {
		return row{}, err
	}
	fmt.Fprintf(out, "\ndefect %s: %s\n", d, d.Plants)
	variable := map[string]string{"old": harness.EnvOldOverlay, "new": harness.EnvNewOverlay}[d.Tree]
	if err := os.Setenv(variable, d.Diff); err != nil {
		return row{}, err
	}
	defer os.Unsetenv(variable)
	begin := time.Now()
	doc, err := f.runAll(cmd.Context(), root, dir, []harness.Family{fam}, out)
	if err != nil {
		return row{}, err
	}
	return judgeDefect(d, doc, time.Since(begin)), nil
}

func judgeDefect(d defects.Defect, doc report.Document, took time.Duration) row {
	r := row{Number: d.Number, Name: d.Name, Family: d.Family, Plants: d.Plants, Seconds: took.Seconds(),
		Verdict: map[string]string{}, Failed: map[string][]string{}}
	for _, run := range doc.Runs {
		if run.Reason != "" {
			r.Missed = append(r.Missed, fmt.Sprintf("the run of %s could not be judged: %s", run.Family, run.Reason))
		}
		for _, s := range run.Scenarios {
			r.Verdict[s.Tag] = string(s.Verdict)
			for _, c := range s.Checks {
				if c.Verdict == verify.Failed {
					r.Failed[s.Tag] = append(r.Failed[s.Tag], c.Name)
				}
			}
		}
	}
	r.Missed = append(r.Missed, d.Missed(r.Verdict, r.Failed)...)
	return r
}

// matrix prints defect × scenario, one table for each family.
func matrix(out io.Writer, rows []row) {
	for _, f := range families() {
		if !slices.ContainsFunc(rows, func(r row) bool { return r.Family == f.Name }) {
			continue
		}
		table := tabwriter.NewWriter(out, 2, 0, 2, ' ', 0)
		fmt.Fprintf(table, "\n%s\t%s\tseconds\tas it must be\n", f.Name, strings.Join(f.Tags(), "\t"))
		for _, r := range rows {
			if r.Family != f.Name {
				continue
			}
			fmt.Fprintf(table, "%d %s", r.Number, r.Name)
			for _, tag := range f.Tags() {
				fmt.Fprintf(table, "\t%s", map[string]string{"pass": "·", "fail": "RED", "inconclusive": "?", "": "-"}[r.Verdict[tag]])
			}
			fmt.Fprintf(table, "\t%.0f\t%s\n", r.Seconds, map[bool]string{true: "yes", false: "NO"}[len(r.Missed) == 0])
		}
		_ = table.Flush()
	}
	for _, r := range rows {
		for _, line := range r.Missed {
			fmt.Fprintf(out, "defect %d %s: %s\n", r.Number, r.Name, line)
		}
	}
}

func writeJSON(path string, v any) error {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(body, '\n'), 0o644)
}
