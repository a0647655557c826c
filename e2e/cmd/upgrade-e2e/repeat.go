package main

import (
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// A spread is how often each verdict was given over some repeats: of a scenario, or of one of its checks.
type spread struct {
	Name     string                 `json:"name"` // "adoption/plain-pool", for a check with " " and its name behind it
	Verdicts map[verify.Verdict]int `json:"verdicts"`
}

// differs tells whether repeats did not agree.
func (s spread) differs() bool { return len(s.Verdicts) > 1 }

// repeats is repeat.json.
type repeats struct {
	Runs      int                `json:"runs"`
	Seconds   map[string]seconds `json:"seconds"` // by phase
	Scenarios []spread           `json:"scenarios"`
	Differ    []spread           `json:"differ"` // scenarios and checks whose verdicts differ: each is a bug
}

// seconds are the least, the middle and the most of a phase.
type seconds struct {
	Least  float64 `json:"least"`
	Middle float64 `json:"middle"`
	Most   float64 `json:"most"`
}

func repeatCommand() *cobra.Command {
	var f runFlags
	var times int
	cmd := &cobra.Command{Use: "repeat", Short: "Run the same upgrade again and again, and report what differs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if times < 1 {
				return harness.UsageError{Line: fmt.Sprintf("N=%d: repeat at least once", times)}
			}
			chosen, err := choose(f.family, f.tags, f.skip)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			root, artifacts, err := f.prepare(cmd.Context(), out)
			if err != nil {
				return err
			}
			dir := filepath.Join(artifacts, harness.RunID("repeat"))
			var docs []report.Document
			for i := range times {
				fmt.Fprintf(out, "\nrun %d of %d\n", i+1, times)
				doc, err := f.runAll(cmd.Context(), root, filepath.Join(dir, fmt.Sprintf("%03d", i+1)), chosen, out)
				if err != nil {
					return err
				}
				docs = append(docs, doc)
				if cmd.Context().Err() != nil {
					break
				}
			}
			r := compare(docs)
			r.text(out)
			if err := writeJSON(filepath.Join(dir, "repeat.json"), r); err != nil {
				return err
			}
			if err := latest(artifacts, dir); err != nil {
				return err
			}
			fmt.Fprintf(out, "artifacts: %s\n", dir)
			if len(r.Differ) > 0 {
				return verdictError(harness.ExitFail)
			}
			return exit(docs[0].Verdict)
		}}
	f.add(cmd.Flags())
	cmd.Flags().IntVar(&times, "times", 20, "how often")
	return cmd
}

// compare counts verdicts over runs of the same. A scenario that one of the runs did not come to counts as
// inconclusive in it.
func compare(docs []report.Document) repeats {
	out := repeats{Runs: len(docs), Seconds: map[string]seconds{}, Scenarios: []spread{}, Differ: []spread{}}
	scenarios, checks := map[string]map[verify.Verdict]int{}, map[string]map[verify.Verdict]int{}
	count := func(in map[string]map[verify.Verdict]int, name string, v verify.Verdict) {
		if in[name] == nil {
			in[name] = map[verify.Verdict]int{}
		}
		in[name][v]++
	}
	phases := map[string][]float64{}
	for _, doc := range docs {
		for _, run := range doc.Runs {
			for name, took := range map[string]float64{"boot": run.Seconds.Boot, "install": run.Seconds.Install, "populate": run.Seconds.Populate,
				"upgrade": run.Seconds.Upgrade, "settle": run.Seconds.Settle, "total": run.Seconds.Total} {
				phases[run.Family+" "+name] = append(phases[run.Family+" "+name], took)
			}
			for _, s := range run.Scenarios {
				count(scenarios, s.Family+"/"+s.Tag, s.Verdict)
				for _, c := range s.Checks {
					count(checks, s.Family+"/"+s.Tag+" "+c.Name, c.Verdict)
				}
			}
		}
	}
	for name, took := range phases {
		slices.Sort(took)
		out.Seconds[name] = seconds{took[0], took[len(took)/2], took[len(took)-1]}
	}
	for _, found := range []map[string]map[verify.Verdict]int{scenarios, checks} {
		for _, name := range slices.Sorted(maps.Keys(found)) {
			total := 0
			for _, n := range found[name] {
				total += n
			}
			if total < len(docs) {
				found[name][verify.Inconclusive] += len(docs) - total
			}
			s := spread{name, found[name]}
			if s.differs() {
				out.Differ = append(out.Differ, s)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(scenarios)) {
		out.Scenarios = append(out.Scenarios, spread{name, scenarios[name]})
	}
	return out
}

func (r repeats) text(out io.Writer) {
	table := tabwriter.NewWriter(out, 2, 0, 2, ' ', 0)
	fmt.Fprintf(table, "\n%d runs\tpass\tfail\tinconclusive\n", r.Runs)
	for _, s := range r.Scenarios {
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\n", s.Name, s.Verdicts[verify.Passed], s.Verdicts[verify.Failed], s.Verdicts[verify.Inconclusive])
	}
	fmt.Fprintln(table, "\nseconds\tleast\tmiddle\tmost")
	for _, phase := range slices.Sorted(maps.Keys(r.Seconds)) {
		s := r.Seconds[phase]
		fmt.Fprintf(table, "%s\t%.1f\t%.1f\t%.1f\n", phase, s.Least, s.Middle, s.Most)
	}
	_ = table.Flush()
	for _, s := range r.Differ {
		var parts []string
		for _, v := range slices.Sorted(maps.Keys(s.Verdicts)) {
			parts = append(parts, fmt.Sprintf("%s %d×", v, s.Verdicts[v]))
		}
		fmt.Fprintf(out, "differs: %s: %s\n", s.Name, strings.Join(parts, ", "))
	}
}
