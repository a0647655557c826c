package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func TestMerge(t *testing.T) {
	job := func(family string, verdict verify.Verdict, old string, tags ...string) string {
		run := report.Run{ID: "id", Family: family, Provider: "embedded", Old: old, New: "/b/new"}
		for _, tag := range tags {
			run.Scenarios = append(run.Scenarios, report.Scenario{Family: family, Tag: tag, Checks: []report.Check{{Name: "record", Verdict: verdict}}})
		}
		run.Judge()
		dir := t.TempDir()
		if err := report.New(run).Write(dir); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	plain := job("adoption", verify.Passed, "/a/cozystack@v1", "plain-pool")
	siblings := job("adoption", verify.Passed, "/elsewhere/cozystack@v1", "sibling-pools")
	red := job("computeplane", verify.Failed, "/a/cozystack@v1", "fresh")
	other := job("adoption", verify.Passed, "/a/cozystack@v2", "sibling-pools")
	for name, tc := range map[string]struct {
		args []string
		want int
		says string
	}{
		"all there":            {[]string{"--tags=plain-pool,sibling-pools", plain, siblings}, harness.ExitPass, "verdict: pass"},
		"one job is red":       {[]string{"--tags=plain-pool,sibling-pools,fresh", plain, siblings, red}, harness.ExitFail, "verdict: fail"},
		"one job left nothing": {[]string{"--tags=plain-pool,sibling-pools,fresh", plain, siblings}, harness.ExitInconclusive, "in no job's artifacts: fresh"},
		"a family is missing":  {[]string{"--family=computeplane", plain}, harness.ExitInconclusive, "value-splicing"},
		"another upgrade":      {[]string{plain, other}, harness.ExitUsage, "cozystack@v2"},
		"no artifacts":         {[]string{filepath.Join(plain, "none")}, harness.ExitUsage, "verdict.json"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := root()
			cmd.SetOut(&out)
			cmd.SetArgs(append([]string{"merge", "--artifacts=" + t.TempDir()}, tc.args...))
			err := cmd.Execute()
			if err != nil {
				out.WriteString(err.Error())
			}
			if got := status(err); got != tc.want || !strings.Contains(out.String(), tc.says) {
				t.Errorf("exit status %d, want %d with %q:\n%s", got, tc.want, tc.says, out.String())
			}
		})
	}
}
