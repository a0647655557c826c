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
	d := Defect{Red: []Red{{Scenario: "siblings", Checks: []string{"adopted", "no churn"}}}}
	for name, tc := range map[string]struct {
		verdicts map[string]string
		failed   map[string][]string
		want     []string
	}{
		"caught": {map[string]string{"siblings": "fail", "plain": "pass"},
			map[string][]string{"siblings": {"adopted t/prod/md0", "no churn of t"}}, nil},
		"nothing turned red": {map[string]string{"siblings": "pass", "plain": "pass"}, nil,
			[]string{"siblings should be red, it is pass"}},
		"red for another reason": {map[string]string{"siblings": "fail", "plain": "pass"},
			map[string][]string{"siblings": {"adopted x"}},
			[]string{`siblings should be red by its check "no churn", only ["adopted x"] are`}},
		"too much turned red": {map[string]string{"siblings": "fail", "plain": "inconclusive"},
			map[string][]string{"siblings": {"adopted", "no churn"}},
			[]string{`plain should be green, it is inconclusive by []`}},
		"not run": {map[string]string{"plain": "pass"}, nil, nil},
	} {
		if got := d.Missed(tc.verdicts, tc.failed); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %q, want %q", name, got, tc.want)
		}
	}
}
