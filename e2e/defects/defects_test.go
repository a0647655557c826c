package defects

import (
	"slices"
	"testing"
)

func TestBundledDefectsLoad(t *testing.T) {
	all, err := Load("../../fixtures/defects")
	if err != nil {
		t.Fatal(err)
	}
	var numbers []int
	for _, d := range all {
		numbers = append(numbers, d.Number)
		if d.Family == "" || d.Plants == "" || d.Origin == "" || len(d.Red) == 0 {
			t.Errorf("defect %s says too little: %+v", d, d)
		}
		for _, red := range d.Red {
			if red.Scenario == "" || len(red.Checks) == 0 {
				t.Errorf("defect %s: red needs a scenario and checks: %+v", d, red)
			}
		}
	}
	for _, n := range []int{1, 2, 4, 6} {
		if !slices.Contains(numbers, n) {
			t.Errorf("defect %d is missing, there are %v", n, numbers)
		}
	}
}

func TestMissed(t *testing.T) {
	siblings := []Red{{Scenario: "siblings", Checks: []string{"adopted", "no churn"}}}
	everyone := []Red{{Scenario: All, Except: []string{"bystander"}, Checks: []string{"fleet done"}}, {Scenario: "plain", Checks: []string{"kept"}}}
	is := func(scenario, verdict string, failed ...string) Finding {
		return Finding{Scenario: scenario, Verdict: verdict, Failed: failed}
	}
	for name, tc := range map[string]struct {
		red   []Red
		found []Finding
		want  []string
	}{
		"caught": {siblings, []Finding{is("siblings", "fail", "adopted t/prod/md0", "no churn of t"), is("plain", "pass")}, nil},
		"nothing turned red": {siblings, []Finding{is("siblings", "pass"), is("plain", "pass")},
			[]string{"siblings should be red, it is pass"}},
		"red for another reason": {siblings, []Finding{is("siblings", "fail", "adopted x")},
			[]string{`siblings should be red by its check "no churn", only ["adopted x"] are`}},
		"a longer name is another check": {siblings, []Finding{is("siblings", "fail", "adopted by the migration x", "no churn of t")},
			[]string{`siblings should be red by its check "adopted", only ["adopted by the migration x" "no churn of t"] are`}},
		"too much turned red": {siblings, []Finding{is("siblings", "fail", "adopted", "no churn"), is("plain", "inconclusive")},
			[]string{`plain should be green, it is inconclusive by []`}},
		"not run":  {siblings, []Finding{is("plain", "pass")}, nil},
		"a family": {everyone, []Finding{is("plain", "fail", "fleet done", "kept t"), is("siblings", "fail", "fleet done"), is("bystander", "pass")}, nil},
		"a family, and not all of it": {everyone, []Finding{is("plain", "fail", "fleet done"), is("siblings", "pass"), is("bystander", "fail", "fleet done")},
			[]string{`plain should be red by its check "kept", only ["fleet done"] are`, "siblings should be red, it is pass",
				`bystander should be green, it is fail by ["fleet done"]`}},
	} {
		if got := (Defect{Red: tc.red}).Missed(tc.found); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %q, want %q", name, got, tc.want)
		}
	}
}
