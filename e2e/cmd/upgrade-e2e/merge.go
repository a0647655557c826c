package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func mergeCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{Use: "merge DIR...", Short: "Join the artifacts of several jobs of one upgrade into one verdict", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, dirs []string) error {
			chosen, err := choose(f.family, f.tags, f.skip)
			if err != nil {
				return err
			}
			var runs []report.Run
			for _, dir := range dirs {
				doc, err := report.Read(dir)
				if err != nil {
					return harness.UsageError{Line: err.Error()}
				}
				for _, run := range doc.Runs {
					if first := append(runs, run)[0]; upgradeOf(first) != upgradeOf(run) {
						return harness.UsageError{Line: fmt.Sprintf("%s ran %s, and %s ran %s: not one upgrade", first.ID, upgradeOf(first), run.ID, upgradeOf(run))}
					}
					runs = append(runs, run)
				}
			}
			doc := report.New(append(runs, absent(runs, chosen, f.wanted)...)...)
			doc.Text(cmd.OutOrStdout())
			_, artifacts, err := f.folders()
			if err != nil {
				return err
			}
			dir := filepath.Join(artifacts, harness.RunID("merged"))
			if err := errors.Join(os.MkdirAll(dir, 0o700), doc.Write(dir)); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "artifacts: %s\n", dir)
			return exit(doc.Verdict)
		}}
	f.choice(cmd.Flags())
	return cmd
}

// upgradeOf is the upgrade of a run, whatever folder each machine had its trees in.
func upgradeOf(r report.Run) string {
	name := func(spec string) string {
		dir, ref, _ := strings.Cut(spec, "@")
		return strings.TrimSuffix(filepath.Base(dir)+"@"+ref, "@")
	}
	return name(r.Old) + " → " + name(r.New)
}

// absent are runs that stand for scenarios that no job has run, on each provider that there is a run of: a job that died has
// left no artifacts, and a verdict without it proves nothing.
func absent(runs []report.Run, chosen []harness.Family, wanted func(tag string) bool) []report.Run {
	ran, providers := map[string]bool{}, []string(nil)
	key := func(provider, family, tag string) string { return strings.Join([]string{provider, family, tag}, "/") }
	for _, r := range runs {
		if !slices.Contains(providers, r.Provider) {
			providers = append(providers, r.Provider)
		}
		for _, s := range r.Scenarios {
			ran[key(r.Provider, r.Family, s.Tag)] = true
		}
	}
	var out []report.Run
	for _, provider := range providers {
		for _, f := range chosen {
			missing := slices.DeleteFunc(f.Tags(), func(tag string) bool { return !wanted(tag) || ran[key(provider, f.Name, tag)] })
			if len(missing) == 0 {
				continue
			}
			out = append(out, report.Run{ID: "none", Family: f.Name, Provider: provider, Old: runs[0].Old, New: runs[0].New, Verdict: verify.Inconclusive,
				Reason: "in no job's artifacts: " + strings.Join(missing, ", "), Scenarios: []report.Scenario{}})
		}
	}
	return out
}
