package report

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/verify"
)

func run(checks ...Check) Run {
	return Run{ID: "r", Family: "adoption", Scenarios: []Scenario{{Family: "adoption", Tag: "plain", Checks: checks}}}
}

var (
	good  = Check{Name: "kept", Verdict: verify.Passed}
	bad   = Check{Name: "no churn", Verdict: verify.Failed, Evidence: []verify.Evidence{{Object: "VirtualMachine t/x", Change: "deleted", Phase: "upgrade", OffsetSeconds: 2}}}
	blind = Check{Name: "record", Verdict: verify.Inconclusive, Reason: "a gap"}
)

func TestVerdictOfARun(t *testing.T) {
	for name, c := range map[string]struct {
		run  Run
		want verify.Verdict
	}{
		"all pass":                    {run(good), verify.Passed},
		"fail before inconclusive":    {run(good, blind, bad), verify.Failed},
		"inconclusive before pass":    {run(good, blind), verify.Inconclusive},
		"no check":                    {run(), verify.Inconclusive},
		"no scenario":                 {Run{}, verify.Inconclusive},
		"broke off with a good check": {Run{Reason: "settle: interrupted", Scenarios: run(good).Scenarios}, verify.Inconclusive},
		"broke off with a bad check":  {Run{Reason: "settle: interrupted", Scenarios: run(bad).Scenarios}, verify.Failed},
	} {
		c.run.Judge()
		if c.run.Verdict != c.want || New(c.run).Verdict != c.want {
			t.Errorf("%s: run %s, document %s, want %s", name, c.run.Verdict, New(c.run).Verdict, c.want)
		}
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	r := run(good, bad, blind)
	r.Judge()
	if err := New(r).Write(dir); err != nil {
		t.Fatal(err)
	}
	again, err := Read(dir)
	if err != nil || again.Verdict != verify.Failed || again.Runs[0].Scenarios[0].Checks[1].Evidence[0].OffsetSeconds != 2 {
		t.Errorf("read back %+v, error %v", again, err)
	}
	junit, err := os.ReadFile(filepath.Join(dir, "junit.xml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`tests="3" failures="1" errors="1"`, `classname="adoption.plain"`, "VirtualMachine t/x deleted (phase upgrade, +2.0 s)"} {
		if !strings.Contains(string(junit), want) {
			t.Errorf("junit.xml lacks %q:\n%s", want, junit)
		}
	}
	var raw map[string]any
	body, _ := os.ReadFile(filepath.Join(dir, "verdict.json"))
	if err := json.Unmarshal(body, &raw); err != nil || raw["schema"] != float64(1) || raw["verdict"] != "fail" {
		t.Errorf("verdict.json: %v, error %v", raw, err)
	}
}

func TestAnotherSchemaIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "verdict.json"), []byte(`{"schema":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), "schema 2") {
		t.Errorf("error %v", err)
	}
}

func TestTextTellsWhatFailed(t *testing.T) {
	r := run(good, bad)
	r.Judge()
	var out bytes.Buffer
	New(r).Text(&out)
	for _, want := range []string{"plain, no churn: fail", "VirtualMachine t/x deleted", "verdict: fail"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "kept: ") {
		t.Errorf("a passed check takes a line:\n%s", out.String())
	}
}
