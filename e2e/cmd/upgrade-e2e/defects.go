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
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"cozystack.io/upgrade-e2e/e2e/defects"
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/platform"
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
	// With are the defects that were planted in the same run; of the scenarios that they turn red nothing is said here.
	With []int `json:"with,omitempty"`
}

// company is " (with 5, 6)", or nothing.
func (r row) company() string {
	if len(r.With) == 0 {
		return ""
	}
	return " (with " + strings.Trim(strings.ReplaceAll(fmt.Sprint(r.With), " ", ", "), "[]") + ")"
}

func defectsCommand() *cobra.Command {
	var f runFlags
	var numbers []int
	var parallel int
	var batched bool
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
			begin := time.Now()
			batches := defects.Batches(all, func(defects.Batch) bool { return false }) // a run each
			if batched {
				if batches, err = together(cmd.Context(), root, all); err != nil {
					return err
				}
				fmt.Fprintf(out, "%d defects in %d runs\n", len(all), len(batches))
			}
			p := &planting{runFlags: f, root: root, dir: filepath.Join(artifacts, harness.RunID("defects")), out: out}
			err = p.all(cmd.Context(), batches, cmp.Or(parallel, roomFor(runtime.NumCPU())))
			interrupted := cmd.Context().Err() != nil
			if err != nil && !interrupted {
				return err
			}
			matrix(out, p.rows)
			fmt.Fprintf(out, "%d of %d defects in %.0f s\n", len(p.rows), len(all), time.Since(begin).Seconds())
			if err := latest(artifacts, p.dir); err != nil {
				return err
			}
			fmt.Fprintf(out, "artifacts: %s\n", p.dir)
			if interrupted {
				return verdictError(harness.ExitInconclusive)
			}
			return verdictOf(p.rows)
		}}
	cmd.Flags().IntSliceVar(&numbers, "defect", nil, "only these (all)")
	cmd.Flags().BoolVar(&batched, "batch", false, "plant defects that turn different scenarios red in one run; what is not as it must be is planted alone then")
	cmd.Flags().IntVar(&parallel, "parallel", 0, "how many at a time (one per core, as far as there are 6 GiB of memory for each)")
	cmd.Flags().StringSliceVar(&f.tags, "tags", nil, "scenarios to run (all); some mistakes show in one tenant only because of another")
	cmd.Flags().StringVar(&f.artifacts, "artifacts", "", "folder that gets a folder per call (_artifacts)")
	cmd.Flags().StringVar(&f.flux, "flux", "", "helm-controller: 1.6 with Helm 4 (default), or 1.4 with Helm 3")
	cmd.Flags().StringVar(&f.provider, "provider", "embedded", "cluster provider")
	f.snapshots = true
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

// roomFor is how many of n runs have room in memory at a time, at least one. A run of the largest family takes some 5 GiB.
func roomFor(n int) int {
	const each = 6 << 20 // KiB
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

// planting is a call's way through the defects: what is told so far, and where it goes.
type planting struct {
	runFlags
	root, dir string
	out       io.Writer
	told      sync.Mutex
	rows      []row
}

// all runs each batch's family with its defects, several runs at a time. The first run of a family is alone: it makes the
// snapshot that the others start from.
func (p *planting) all(ctx context.Context, batches []defects.Batch, parallel int) error {
	var rest []defects.Batch
	begun := map[string]bool{}
	for _, b := range batches {
		fam, err := family(b[0].Family)
		if err != nil {
			return err
		}
		if begun[fam.Name] {
			rest = append(rest, b)
			continue
		}
		begun[fam.Name] = true
		if err := compile(ctx, p.root, fam); err != nil {
			return err
		}
		if err := p.batch(ctx, b); err != nil {
			return err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for _, b := range rest {
		g.Go(func() error { return p.batch(gctx, b) })
	}
	return g.Wait()
}

// batch plants the defects of a batch in one run. If one of them is not as it must be, each gets a run of its own, which tells
// whether it is that one or the company.
func (p *planting) batch(ctx context.Context, b defects.Batch) error {
	rows, err := p.plant(ctx, b)
	if err := cmp.Or(err, context.Cause(ctx)); err != nil {
		return err // a run that was interrupted says nothing about its defects
	}
	if len(b) > 1 && verdictOf(rows) != nil {
		for _, r := range rows {
			for _, line := range r.Missed {
				fmt.Fprintf(p.out, "defect %d %s, with others: %s; each is planted alone now\n", r.Number, r.Name, line)
			}
		}
		for _, d := range b {
			if err := p.batch(ctx, defects.Batch{d}); err != nil {
				return err
			}
		}
		return nil
	}
	return p.tell(rows)
}

// tell prints rows and writes the matrix of all so far, so that a call that is broken off keeps what it told.
func (p *planting) tell(rows []row) error {
	p.told.Lock()
	defer p.told.Unlock()
	p.rows = join(p.rows, rows)
	for _, r := range rows {
		fmt.Fprintf(p.out, "defect %d %s: %s in %.0f s%s\n", r.Number, r.Name, map[bool]string{true: "as it must be", false: "NOT as it must be"}[len(r.Missed) == 0], r.Seconds, r.company())
	}
	return write(p.dir, p.rows)
}

// plant runs the family of a batch with its defects in the bundled platform. What the run prints goes to run.log in its folder.
func (p *planting) plant(ctx context.Context, b defects.Batch) ([]row, error) {
	fam, err := family(b[0].Family)
	if err != nil {
		return nil, err
	}
	planted := map[string]string{"old": harness.EnvOldOverlay, "new": harness.EnvNewOverlay}[b[0].Tree] + "=" + strings.Join(b.Diffs(), string(filepath.ListSeparator))
	if b[0].Harness.PublishBeforeHook {
		planted = harness.EnvPublishFirst + "=1"
	}
	name := fmt.Sprintf("%02d-%s", b[0].Number, b[0].Name)
	if len(b) > 1 {
		name += fmt.Sprintf("-and-%d-more", len(b)-1)
	}
	dir := filepath.Join(p.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "run.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	begin := time.Now()
	doc, err := p.runFamily(ctx, p.root, dir, fam, log, planted)
	if err != nil {
		return nil, fmt.Errorf("defect %s: %w", b[0], err)
	}
	return judgeBatch(b, doc, time.Since(begin)), nil
}

// judgeBatch compares what a run found with what each of its defects must turn red.
func judgeBatch(b defects.Batch, doc report.Document, took time.Duration) []row {
	var reasons []string
	var found []defects.Finding
	for _, run := range doc.Runs {
		if run.Reason != "" {
			reasons = append(reasons, fmt.Sprintf("the run of %s could not be judged: %s", run.Family, run.Reason))
		}
		for _, s := range run.Scenarios {
			f := defects.Finding{Scenario: s.Tag, Verdict: string(s.Verdict)}
			for _, c := range s.Checks {
				if c.Verdict == verify.Failed {
					f.Failed = append(f.Failed, c.Name)
				}
			}
			found = append(found, f)
		}
	}
	var rows []row
	for _, d := range b {
		r := row{Number: d.Number, Name: d.Name, Family: d.Family, Plants: d.Plants, Origin: d.Origin, Seconds: took.Seconds(),
			Verdict: map[string]string{}, Failed: map[string][]string{}, Missed: slices.Clone(reasons)}
		for _, other := range b {
			if other.Number != d.Number {
				r.With = append(r.With, other.Number)
			}
		}
		of := b.Of(d, found)
		for _, f := range of {
			r.Verdict[f.Scenario] = f.Verdict
			if len(f.Failed) > 0 {
				r.Failed[f.Scenario] = f.Failed
			}
		}
		r.Missed = append(r.Missed, d.Missed(of)...)
		rows = append(rows, r)
	}
	return rows
}

// together puts defects into batches whose diffs can be applied to the bundled platform one after the other.
func together(ctx context.Context, root string, all []defects.Defect) ([]defects.Batch, error) {
	scratch, err := os.MkdirTemp("", "upgrade-e2e-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	tried := 0
	return defects.Batches(all, func(b defects.Batch) bool {
		tried++
		_, err := platform.Load(ctx, filepath.Join(root, "fixtures", "platform", b[0].Tree), filepath.Join(scratch, strconv.Itoa(tried)), platform.Options{Overlay: b.Diffs()})
		return err == nil
	}), ctx.Err()
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
		fmt.Fprintf(&b, "| %d %s | %s | %s | %s | %.0f%s |\n", r.Number, r.Name, cell(r.Plants), cell(r.Origin), cell(strings.Join(caught, "; ")), r.Seconds, r.company())
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
