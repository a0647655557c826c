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

func TestBatches(t *testing.T) {
	red := func(number int, scenarios ...string) Defect {
		d := Defect{Number: number, Family: "adoption", Tree: "new", Diff: "d"}
		for _, s := range scenarios {
			d.Red = append(d.Red, Red{Scenario: s})
		}
		return d
	}
	elsewhere, harness := red(7, "h"), red(8, "i")
	elsewhere.Family, harness.Diff = "computeplane", ""
	masked := red(9, "j")
	masked.Masks = []int{1}
	all := []Defect{red(1, "a"), red(2, "b", "c"), red(3, All), red(4, "c"), red(5, "d"), red(6, "e"), elsewhere, harness, masked}
	var got [][]int
	for _, b := range Batches(all, func(b Batch) bool { return b[len(b)-1].Number != 6 }) {
		var numbers []int
		for _, d := range b {
			numbers = append(numbers, d.Number)
		}
		got = append(got, numbers)
	}
	// 4 shares a scenario with 2, 6 does not fit with anybody, 9 hides 1, the others are of another kind.
	want := [][]int{{1, 2, 5}, {3}, {4, 9}, {6}, {7}, {8}}
	if !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %v, want %v", got, want)
	}
}
