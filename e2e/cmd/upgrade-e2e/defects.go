package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

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
	Origin  string              `json:"origin"`
	Seconds float64             `json:"seconds"`
	Verdict map[string]string   `json:"verdicts"` // by scenario
	Failed  map[string][]string `json:"failed"`   // checks by scenario
	Missed  []string            `json:"missed"`   // empty: caught, and nothing else turned red
}

func defectsCommand() *cobra.Command {
	var f runFlags
	var numbers []int
	var parallel int
	cmd := &cobra.Command{Use: "defects", Short: "Plant each defect, run, and print what turned red", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			if _, err := choose("", f.tags, nil); err != nil {
				return err
			}
			root, artifacts, err := f.prepare(cmd.Context(), out)
			if err != nil {
				return err
			}
			all, err := defects.Load(filepath.Join(root, "fixtures", "defects"))
			if err != nil {
				return err
			}
			for _, n := range numbers {
				if !slices.ContainsFunc(all, func(d defects.Defect) bool { return d.Number == n }) {
					return harness.UsageError{Line: fmt.Sprintf("there is no defect %d in fixtures/defects", n)}
				}
			}
			all = slices.DeleteFunc(all, func(d defects.Defect) bool {
				if len(numbers) > 0 {
					return !slices.Contains(numbers, d.Number)
				}
				if d.Awaits == "" {
					return false
				}
				fmt.Fprintf(out, "defect %s is left out: it awaits %s\n", d, d.Awaits)
				return true
			})
			dir := filepath.Join(artifacts, harness.RunID("defects"))
			begin := time.Now()
			rows, err := f.plantAll(cmd.Context(), root, dir, all, cmp.Or(parallel, roomFor(runtime.NumCPU())), out)
			if err != nil {
				return err
			}
			matrix(out, rows)
			fmt.Fprintf(out, "%d defects in %.0f s\n", len(rows), time.Since(begin).Seconds())
			if err := latest(artifacts, dir); err != nil {
				return err
			}
			fmt.Fprintf(out, "artifacts: %s\n", dir)
			return verdictOf(rows)
		}}
	cmd.Flags().IntSliceVar(&numbers, "defect", nil, "only these (all)")
	cmd.Flags().IntVar(&parallel, "parallel", 0, "how many at a time (one per core, as far as there are 5 GiB of memory for each)")
	cmd.Flags().StringSliceVar(&f.tags, "tags", nil, "scenarios to run (all); some mistakes show in one tenant only because of another")
	cmd.Flags().StringVar(&f.artifacts, "artifacts", "", "folder that gets a folder per call (_artifacts)")
	cmd.Flags().StringVar(&f.flux, "flux", "", "helm-controller: 1.6 with Helm 4 (default), or 1.4 with Helm 3")
	f.provider, f.snapshots = "embedded", true
	cmd.AddCommand(joinCommand())
	return cmd
}

// joinCommand makes one matrix of those of several calls: a long one can be split, and a mended defect planted again alone.
func joinCommand() *cobra.Command {
	return &cobra.Command{Use: "join DIR...", Short: "Print one matrix of the artifacts of several calls; of a defect the last one counts", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, dirs []string) error {
			var rows []row
			for _, dir := range dirs {
				more, err := readRows(dir)
				if err != nil {
					return err
				}
				rows = join(rows, more)
			}
			matrix(cmd.OutOrStdout(), rows)
			fmt.Fprintf(cmd.OutOrStdout(), "\n%s", table(rows))
			return verdictOf(rows)
		}}
}

func readRows(dir string) ([]row, error) {
	file := filepath.Join(dir, "defects.json")
	body, err := os.ReadFile(file)
	if err != nil {
		return nil, harness.UsageError{Line: fmt.Sprintf("%s is not a folder of make e2e-defects: %v", dir, err)}
	}
	var rows []row
	if err := json.Unmarshal(body, &rows); err != nil {
		return nil, harness.UsageError{Line: fmt.Sprintf("%s: %v", file, err)}
	}
	return rows, nil
}

// join replaces those of rows that are in more, adds the others, and sorts by number.
func join(rows, more []row) []row {
	out := slices.DeleteFunc(slices.Clone(rows), func(r row) bool {
		return slices.ContainsFunc(more, func(m row) bool { return m.Number == r.Number })
	})
	out = append(out, more...)
	slices.SortStableFunc(out, func(a, b row) int { return cmp.Compare(a.Number, b.Number) })
	return out
}

// write leaves the matrix in a folder, for programs and for the docs.
func write(dir string, rows []row) error {
	if err := writeJSON(filepath.Join(dir, "defects.json"), rows); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "defects.md"), []byte(table(rows)), 0o644)
}

func verdictOf(rows []row) error {
	for _, r := range rows {
		if len(r.Missed) > 0 {
			return verdictError(harness.ExitFail)
		}
	}
	return nil
}

// roomFor is how many of n runs have room in memory at a time, at least one. A run of a whole family takes some 4 GiB.
func roomFor(n int) int {
	const each = 5 << 20 // KiB
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 1
	}
	for line := range strings.Lines(string(info)) {
		var kib int
		if k, err := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); err == nil && k == 1 {
			return max(1, min(n, kib/each))
		}
	}
	return 1
}

// plantAll runs the families with one defect each, several at a time. What a run prints goes to run.log in its folder. The first
// defect of a family runs alone: it makes the snapshot that the others start from. The matrix is written after each defect, so
// that a call that is broken off keeps what it told.
func (f runFlags) plantAll(ctx context.Context, root, dir string, all []defects.Defect, parallel int, out io.Writer) ([]row, error) {
	var rows []row
	told := sync.Mutex{}
	do := func(ctx context.Context, i int) error {
		r, err := f.plant(ctx, root, filepath.Join(dir, fmt.Sprintf("%02d-%s", all[i].Number, all[i].Name)), all[i])
		if err != nil {
			return fmt.Errorf("defect %s: %w", all[i], err)
		}
		told.Lock()
		defer told.Unlock()
		rows = join(rows, []row{r})
		fmt.Fprintf(out, "defect %s: %s in %.0f s\n", all[i], map[bool]string{true: "as it must be", false: "NOT as it must be"}[len(r.Missed) == 0], r.Seconds)
		return write(dir, rows)
	}
	var rest []int
	begun := map[string]bool{}
	for i, d := range all {
		if begun[d.Family] {
			rest = append(rest, i)
			continue
		}
		begun[d.Family] = true
		fam, err := family(d.Family)
		if err != nil {
			return nil, err
		}
		if err := compile(ctx, root, fam); err != nil {
			return nil, err
		}
		if err := do(ctx, i); err != nil {
			return nil, err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for _, i := range rest {
		g.Go(func() error { return do(gctx, i) })
	}
	err := g.Wait()
	return rows, err
}

// plant runs the defect's family with it in the bundled platform.
func (f runFlags) plant(ctx context.Context, root, dir string, d defects.Defect) (row, error) {
	fam, err := family(d.Family)
	if err != nil {
		return row{}, err
	}
	planted := map[string]string{"old": harness.EnvOldOverlay, "new": harness.EnvNewOverlay}[d.Tree] + "=" + d.Diff
	if d.Harness.PublishBeforeHook {
		planted = harness.EnvPublishFirst + "=1"
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return row{}, err
	}
	log, err := os.Create(filepath.Join(dir, "run.log"))
	if err != nil {
		return row{}, err
	}
	defer log.Close()
	begin := time.Now()
	doc, err := f.runFamily(ctx, root, dir, fam, log, planted)
	if err != nil {
		return row{}, err
	}
	return judgeDefect(d, doc, time.Since(begin)), nil
}

func judgeDefect(d defects.Defect, doc report.Document, took time.Duration) row {
	r := row{Number: d.Number, Name: d.Name, Family: d.Family, Plants: d.Plants, Origin: d.Origin, Seconds: took.Seconds(),
		Verdict: map[string]string{}, Failed: map[string][]string{}}
	var found []defects.Finding
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
			found = append(found, defects.Finding{Scenario: s.Tag, Verdict: string(s.Verdict), Failed: r.Failed[s.Tag]})
		}
	}
	r.Missed = append(r.Missed, d.Missed(found)...)
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

// table is the matrix for docs/defects.md: what each defect plants, where it comes from, what caught it, and in how many seconds.
func table(rows []row) string {
	var b strings.Builder
	b.WriteString("| defect | plants | comes from | caught by | seconds |\n| --- | --- | --- | --- | --- |\n")
	cell := func(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
	for _, r := range rows {
		var caught []string
		for _, tag := range slices.Sorted(maps.Keys(r.Failed)) {
			var checks []string
			for _, name := range r.Failed[tag] {
				if short := withoutSubject(name); !slices.Contains(checks, short) {
					checks = append(checks, short)
				}
			}
			caught = append(caught, fmt.Sprintf("**%s**: %s", tag, strings.Join(checks, ", ")))
		}
		if len(caught) > 4 { // the whole fleet
			caught = append(caught[:3], fmt.Sprintf("and %d more scenarios", len(caught)-3))
		}
		fmt.Fprintf(&b, "| %d %s | %s | %s | %s | %.0f |\n", r.Number, r.Name, cell(r.Plants), cell(r.Origin), cell(strings.Join(caught, "; ")), r.Seconds)
	}
	return b.String()
}

// withoutSubject is a check's name without the tenant, cluster or pool that it is about.
func withoutSubject(check string) string {
	words := strings.Fields(check)
	if n := len(words); n > 1 && strings.HasPrefix(words[n-1], "tenant-") {
		words = words[:n-1]
	}
	return strings.TrimSuffix(strings.Join(words, " "), " of")
}

func writeJSON(path string, v any) error {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(body, '\n'), 0o644)
}
