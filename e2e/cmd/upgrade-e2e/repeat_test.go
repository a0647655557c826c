package main

import (
	"strings"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func documentOf(took float64, verdicts ...verify.Verdict) report.Document {
	s := report.Scenario{Family: "adoption", Tag: "plain-pool", Verdict: verdicts[0]}
	for i, v := range verdicts {
		s.Checks = append(s.Checks, report.Check{Name: string(rune('a' + i)), Verdict: v})
	}
	return report.Document{Runs: []report.Run{{Family: "adoption", Seconds: report.Seconds{Total: took}, Scenarios: []report.Scenario{s}}}}
}

func TestCompare(t *testing.T) {
	same := compare([]report.Document{documentOf(3, verify.Passed, verify.Failed), documentOf(1, verify.Passed, verify.Failed), documentOf(2, verify.Passed, verify.Failed)})
	if len(same.Differ) != 0 || same.Scenarios[0].Verdicts[verify.Passed] != 3 {
		t.Errorf("three runs that agree: %+v", same)
	}
	if got := same.Seconds["adoption total"]; got != (seconds{1, 2, 3}) {
		t.Errorf("seconds %+v, want 1, 2, 3", got)
	}
	differ := compare([]report.Document{documentOf(1, verify.Passed, verify.Passed), documentOf(1, verify.Passed, verify.Failed)})
	if len(differ.Differ) != 1 || differ.Differ[0].Name != "adoption/plain-pool b" {
		t.Errorf("a check that differs: %+v", differ.Differ)
	}
	var out strings.Builder
	differ.text(&out)
	if !strings.Contains(out.String(), "differs: adoption/plain-pool b: fail 1×, pass 1×") {
		t.Errorf("text:\n%s", out.String())
	}
	missing := compare([]report.Document{documentOf(1, verify.Passed), {Runs: []report.Run{{Family: "adoption"}}}})
	if len(missing.Differ) != 2 { // the scenario and its check
		t.Errorf("a run that judged nothing: %+v", missing.Differ)
	}
}
