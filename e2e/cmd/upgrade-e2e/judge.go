package main

import (
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/report"
)

func judgeCommand() *cobra.Command {
	return &cobra.Command{Use: "judge DIR", Short: "Judge the record of a run folder again, without a cluster", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			recorded, err := report.Read(args[0])
			if err != nil {
				return harness.UsageError{Line: err.Error()}
			}
			var runs []report.Run
			for _, run := range recorded.Runs {
				dir := args[0]
				if len(recorded.Runs) > 1 {
					dir = filepath.Join(dir, run.Family)
				}
				again, err := judge(dir, run)
				if err != nil {
					return err
				}
				runs = append(runs, again)
			}
			doc := report.New(runs...)
			doc.Text(cmd.OutOrStdout())
			return exit(doc.Verdict)
		}}
}

// judge runs today's checks of the recorded scenarios over the record.
func judge(dir string, run report.Run) (report.Run, error) {
	fam, err := family(run.Family)
	if err != nil {
		return run, err
	}
	h, err := history.Read(filepath.Join(dir, "history.jsonl"))
	if err != nil {
		return run, harness.UsageError{Line: err.Error()}
	}
	var tags []string
	for _, s := range run.Scenarios {
		tags = append(tags, s.Tag)
	}
	run.Scenarios = []report.Scenario{}
	for _, s := range fam.Scenarios {
		if slices.Contains(tags, s.Tag) {
			run.Scenarios = append(run.Scenarios, fam.Judge(s, h))
		}
	}
	run.Judge()
	return run, nil
}
