package main

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/defects"
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func TestMain(m *testing.M) {
	process.Main()
	os.Exit(m.Run())
}

func TestCleanKeepsTheFolderOfARunThatHasNotEnded(t *testing.T) {
	artifacts := t.TempDir()
	if err := os.WriteFile(filepath.Join(artifacts, "lock"), nil, 0o600); err != nil { // no run's
		t.Fatal(err)
	}
	run, err := process.Open(filepath.Join(artifacts, "run"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("run", filepath.Join(artifacts, "latest")); err != nil {
		t.Fatal(err)
	}
	err = allEnded(artifacts)
	if status(err) != 2 || !strings.HasPrefix(err.Error(), "clean: "+run.Dir()+" is still running") {
		t.Errorf("while a run is there: %v, status %d", err, status(err))
	}
	if err := run.Close(); err != nil {
		t.Fatal(err)
	}
	if err := allEnded(artifacts); err != nil {
		t.Errorf("after its end: %v", err)
	}
}

func TestChoose(t *testing.T) {
	var all []string
	for _, f := range families() {
		all = append(all, f.Name)
	}
	for name, c := range map[string]struct {
		family     string
		tags, skip []string
		want       []string
		line       string
	}{
		"all":               {"", nil, nil, all, ""},
		"by tag":            {"", []string{"re-run"}, nil, []string{"adoption"}, ""},
		"by family":         {"adoption", nil, nil, []string{"adoption"}, ""},
		"by family and tag": {"adoption", []string{"re-run"}, nil, []string{"adoption"}, ""},
		"unknown family":    {"nope", nil, nil, nil, `unknown family "nope"`},
		"unknown tag":       {"", []string{"nope"}, nil, nil, `unknown tag "nope"`},
		"unknown skip":      {"", nil, []string{"nope"}, nil, `unknown tag "nope"`},
		"nothing left":      {"", []string{"re-run"}, []string{"re-run"}, nil, "no scenario is left"},
	} {
		got, err := choose(c.family, c.tags, c.skip)
		var names []string
		for _, f := range got {
			names = append(names, f.Name)
		}
		if !slices.Equal(names, c.want) || c.line != "" && (err == nil || !strings.Contains(err.Error(), c.line)) {
			t.Errorf("%s: families %v, error %v", name, names, err)
		}
	}
}

func TestStatus(t *testing.T) {
	for want, err := range map[int]error{
		harness.ExitPass:         exit(verify.Passed),
		harness.ExitFail:         exit(verify.Failed),
		harness.ExitInconclusive: exit(verify.Inconclusive),
		harness.ExitUsage:        errors.New("no such directory"),
	} {
		if got := status(err); got != want {
			t.Errorf("%v: status %d, want %d", err, got, want)
		}
	}
	if got := status(fmt.Errorf("wrapped: %w", verdictError(harness.ExitUsage))); got != harness.ExitUsage {
		t.Errorf("a wrapped verdict: status %d", got)
	}
}

func TestTagsAreUniqueAndListed(t *testing.T) {
	var out bytes.Buffer
	cmd := listCommand()
	cmd.SetOut(&out)
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	seen := map[string]bool{}
	for _, line := range lines {
		fields := strings.Fields(line)
		if len(fields) < 3 || seen[fields[1]] {
			t.Errorf("line %q: want family, a tag that is there once, one line", line)
		}
		seen[fields[1]] = true
	}
	for _, tag := range []string{"plain-pool", "sibling-pools", "long-names", "re-run", "foreign-owner"} {
		if !seen[tag] {
			t.Errorf("tag %s is not listed", tag)
		}
	}
}

func TestARunThatBrokeOffIsNoCaughtDefect(t *testing.T) {
	r := judgeBatch(defects.Batch{{Number: 1, Name: "x"}}, report.New(report.Run{Family: "adoption", Reason: "settle: interrupted"}), 0)
	if len(r) != 1 || len(r[0].Missed) != 1 || !strings.Contains(r[0].Missed[0], "interrupted") {
		t.Errorf("rows %+v", r)
	}
}

func TestABatchTellsEachOfItsDefects(t *testing.T) {
	b := defects.Batch{
		{Number: 4, Red: []defects.Red{{Scenario: "siblings", Checks: []string{"adopted"}}}},
		{Number: 6, Red: []defects.Red{{Scenario: "foreign", Checks: []string{"warned"}}}},
	}
	scenario := func(tag string, failed ...string) report.Scenario {
		s := report.Scenario{Tag: tag, Checks: []report.Check{{Name: "record", Verdict: verify.Passed}}}
		for _, name := range failed {
			s.Checks = append(s.Checks, report.Check{Name: name, Verdict: verify.Failed})
		}
		return s
	}
	judge := func(scenarios ...report.Scenario) []row {
		run := report.Run{Family: "adoption", Scenarios: scenarios}
		run.Judge()
		return judgeBatch(b, report.New(run), 0)
	}
	rows := judge(scenario("siblings", "adopted t/a/md0"), scenario("foreign", "warned t"), scenario("plain"))
	if verdictOf(rows) != nil || !slices.Equal(rows[0].With, []int{6}) || rows[0].Verdict["foreign"] != "" || rows[1].Verdict["foreign"] != "fail" {
		t.Errorf("both caught: %+v", rows)
	}
	rows = judge(scenario("siblings"), scenario("foreign", "warned t"), scenario("plain"))
	if len(rows[0].Missed) != 1 || len(rows[1].Missed) != 0 {
		t.Errorf("4 not caught: %+v", rows)
	}
	rows = judge(scenario("siblings", "adopted t/a/md0"), scenario("foreign", "warned t"), scenario("plain", "kept"))
	if len(rows[0].Missed) != 1 || len(rows[1].Missed) != 1 {
		t.Errorf("a third scenario is red: %+v", rows)
	}
}

func TestBundledDefectsFitIntoFewRuns(t *testing.T) {
	root := "../../.."
	all, err := defects.Load(filepath.Join(root, "fixtures", "defects"))
	if err != nil {
		t.Fatal(err)
	}
	batches, err := together(t.Context(), root, all)
	if err != nil {
		t.Fatal(err)
	}
	planted := 0
	for _, b := range batches {
		planted += len(b)
		t.Logf("%v", b)
	}
	if planted != len(all) || len(batches) > len(all)/2 {
		t.Errorf("%d of %d defects in %d runs", planted, len(all), len(batches))
	}
}

// unproven says of checks that no defect turns red why that is so.
var unproven = map[string]string{
	"record":                "it is about the recorder and the settling, not about the platform; package verify's tests break a record in every way",
	"rolling":               "it is about the row: without a rollout under way there is nothing to prove",
	"asked while importing": "it is about the row: an image that was there before it was asked for proves nothing",
	"within surge":          "a MachineDeployment's own limits are Cluster API's to keep, which no chart can break; package verify's tests do",
}

// A check that no planted mistake turns red proves nothing. One of another family's under the same name is the same check.
func TestEveryCheckIsTurnedRedByADefect(t *testing.T) {
	all, err := defects.Load("../../../fixtures/defects")
	if err != nil {
		t.Fatal(err)
	}
	subject := regexp.MustCompile(`( of)? tenant-\S+$`)
	red := map[string]bool{} // by the check's name without its subject; families share checks
	for _, f := range families() {
		for _, s := range f.Scenarios {
			for _, check := range f.Checks(s, 57, nil) {
				kind := subject.ReplaceAllString(check.Name, "")
				red[kind] = red[kind] || slices.ContainsFunc(all, func(d defects.Defect) bool {
					return d.Family == f.Name && d.Awaits == "" && slices.ContainsFunc(d.Red, func(r defects.Red) bool { return r.Covers(s.Tag) && r.Names(check.Name) })
				})
			}
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(red)) {
		switch {
		case !red[kind] && unproven[kind] == "":
			t.Errorf("no defect turns check %q red", kind)
		case red[kind] && unproven[kind] != "":
			t.Errorf("check %q is turned red, and is excused too", kind)
		}
	}
}

// A defect that speaks of a scenario which is not there would never be missed.
func TestDefectsSpeakOfScenariosThatAreThere(t *testing.T) {
	all, err := defects.Load("../../../fixtures/defects")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range families() {
		for _, tag := range f.Tags() {
			known[f.Name+" "+tag] = true
		}
		known[f.Name+" "+defects.All] = true
	}
	for _, d := range all {
		for _, r := range d.Red {
			for _, tag := range append(slices.Clone(r.Except), r.Scenario) {
				if d.Awaits == "" && !known[d.Family+" "+tag] {
					t.Errorf("defect %s: family %s has no scenario %q", d, d.Family, tag)
				}
			}
		}
	}
}

func TestTable(t *testing.T) {
	got := table([]row{{Number: 4, Name: "unanchored", Plants: "a|b", Origin: "pull request 1", Seconds: 71.6, Failed: map[string][]string{
		"sibling-pools": {"adopted tenant-s/prod/md0", "adopted tenant-s/prod/md1", "no churn of tenant-s"}}}})
	want := "| 4 unanchored | a\\|b | pull request 1 | **sibling-pools**: adopted, no churn | 72 |\n"
	if !strings.HasSuffix(got, want) {
		t.Errorf("%s\nshould end with\n%s", got, want)
	}
}

// A defect that was mended and planted again counts once, as it was the last time.
func TestJoin(t *testing.T) {
	got := join([]row{{Number: 12, Missed: []string{"long-names is red"}}, {Number: 4, Name: "first"}}, []row{{Number: 12}, {Number: 2}})
	var numbers []int
	for _, r := range got {
		numbers = append(numbers, r.Number)
	}
	if !slices.Equal(numbers, []int{2, 4, 12}) || verdictOf(got) != nil {
		t.Errorf("%+v, verdict %v", got, verdictOf(got))
	}
	if verdictOf(join(got, []row{{Number: 2, Missed: []string{"not caught"}}})) == nil {
		t.Error("the last time it was not caught, and the matrix says nothing")
	}
}

func TestJoinNeedsAMatrix(t *testing.T) {
	if _, err := readRows(t.TempDir()); !errors.As(err, new(harness.UsageError)) {
		t.Errorf("a folder without a matrix: %v", err)
	}
}

func TestRunsGetAbsolutePaths(t *testing.T) {
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{harness.EnvOld, harness.EnvNew, harness.EnvAuditLog, harness.EnvProvider, harness.EnvKubeconfig} {
		t.Setenv(name, "")
	}
	t.Setenv(harness.EnvKubeconfig, "one:/two")
	f := runFlags{old: "../cozystack@feat/branch", new: "/abs:olute@main", auditLog: "logs/audit.log", provider: "existing"}
	if err := f.setEnvironment(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		harness.EnvOld: filepath.Join(filepath.Dir(here), "cozystack@feat/branch"), harness.EnvNew: "/abs:olute@main",
		harness.EnvAuditLog: filepath.Join(here, "logs/audit.log"), harness.EnvKubeconfig: filepath.Join(here, "one") + ":/two", harness.EnvProvider: "existing",
	} {
		if got := os.Getenv(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
