package harness

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/e2e-framework/pkg/envconf"

	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func family() Family {
	return Family{Name: "f", Scenarios: []Scenario{
		{Tag: "a", Given: []*tenant.Tenant{tenant.New("a")}},
		{Tag: "b", Given: []*tenant.Tenant{withCluster("b"), tenant.New("b2")}},
		{Tag: "c", Given: []*tenant.Tenant{tenant.New("c")}},
	}}
}

func withCluster(name string) *tenant.Tenant {
	t := tenant.New(name)
	t.Cluster("prod").Pool("md0")
	return t
}

func TestSelected(t *testing.T) {
	for name, c := range map[string]struct {
		labels, skip map[string][]string
		want         []string
		line         string
	}{
		"all":            {nil, nil, []string{"a", "b", "c"}, ""},
		"two":            {map[string][]string{"tag": {"c", "a"}}, nil, []string{"a", "c"}, ""},
		"all but one":    {nil, map[string][]string{"tag": {"b"}}, []string{"a", "c"}, ""},
		"by family":      {map[string][]string{"family": {"f"}}, nil, []string{"a", "b", "c"}, ""},
		"another family": {map[string][]string{"family": {"g"}}, nil, nil, "no scenario of family f is left"},
		"unknown":        {map[string][]string{"tag": {"d"}}, nil, nil, `tag "d" is not in family f; it has a, b, c`},
		"unknown skip":   {nil, map[string][]string{"tag": {"d"}}, nil, `tag "d" is not in family f`},
		"nothing left":   {map[string][]string{"tag": {"a"}}, map[string][]string{"tag": {"a"}}, nil, "no scenario of family f is left"},
	} {
		got, err := family().selected(envconf.New().WithLabels(c.labels).WithSkipLabels(c.skip))
		var tags []string
		for _, s := range got {
			tags = append(tags, s.Tag)
		}
		if !slices.Equal(tags, c.want) {
			t.Errorf("%s: selected %v, want %v", name, tags, c.want)
		}
		var usage UsageError
		if c.line != "" && (!errors.As(err, &usage) || !strings.Contains(err.Error(), c.line)) {
			t.Errorf("%s: error %v, want %q", name, err, c.line)
		}
	}
}

func TestEveryScenarioGetsTheStandingChecks(t *testing.T) {
	f := family()
	var names []string
	for _, c := range f.Checks(f.Scenarios[1], 57, nil) {
		names = append(names, c.Name)
	}
	want := []string{"record", "no churn of tenant-b", "converged tenant-b", "isolated tenant-b",
		"no churn of tenant-b2", "isolated tenant-b2", "fleet done"}
	if !slices.Equal(names, want) {
		t.Errorf("checks %q, want %q", names, want)
	}
	// Without machines at the baseline, that none came is all that can be claimed.
	checks := f.Checks(f.Scenarios[1], 57, nil)
	h := ht.New().Baseline(ht.Object("Namespace", "tenant-b"), ht.Object("Namespace", "tenant-b2")).Read(t)
	if a, b := checks[1].Judge(h), checks[4].Judge(h); a.Verdict != verify.Inconclusive || b.Verdict != verify.Passed {
		t.Errorf("no churn of a tenant that should have machines: %v, of one that has none: %v", a, b)
	}
	var others []string
	for _, s := range f.others(f.Scenarios[1]) {
		others = append(others, s.Namespace)
	}
	if !slices.Equal(others, []string{"tenant-neighbour", "tenant-a", "tenant-c"}) {
		t.Errorf("others are %v", others)
	}
}

func TestMayFailExcusesNothingElse(t *testing.T) {
	may := mayFail([]Failure{{Namespace: "t", Release: "r", Because: regexp.MustCompile("refused")}})
	for name, c := range map[string]struct {
		namespace, release, message string
		want                        bool
	}{
		"expected":          {"t", "r", "it was refused", true},
		"another reason":    {"t", "r", "timeout", false},
		"another release":   {"t", "s", "refused", false},
		"another namespace": {"u", "r", "refused", false},
	} {
		if got := may(c.namespace, c.release, c.message); got != c.want {
			t.Errorf("%s: excused %v, want %v", name, got, c.want)
		}
	}
}

func TestToleratingExcusesByGlob(t *testing.T) {
	may := tolerating([]string{"tenant-*/kubernetes-*-cilium"}, mayFail(nil))
	if !may("tenant-a", "kubernetes-prod-cilium", "no source") || may("tenant-a", "kubernetes-prod", "no source") {
		t.Error("the glob excuses the wrong releases")
	}
}

func TestBadOptions(t *testing.T) {
	for name, c := range map[string]struct{ variable, value, line string }{
		"provider":           {EnvProvider, "cloud", "PROVIDER=cloud"},
		"flux":               {EnvFlux, "2.0", "FLUX=2.0"},
		"seed":               {EnvSeed, "x", "SEED=x"},
		"no cluster":         {EnvProvider, "existing", "PROVIDER=existing needs KUBECONFIG="},
		"no number of nodes": {EnvNodes, "many", "NODES=many"},
		"no nodes":           {EnvNodes, "0", "NODES=0"},
		"nodes of embedded":  {EnvNodes, "3", "NODES= and REUSE= are for PROVIDER=kind, not for embedded"},
		"reuse of embedded":  {EnvReuse, "mine", "are for PROVIDER=kind"},
		"a name for a path":  {EnvReuse, "../mine", "REUSE=../mine is no name"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(EnvKubeconfig, "")
			t.Setenv(c.variable, c.value)
			_, err := FromEnvironment("adoption")
			var usage UsageError
			if !errors.As(err, &usage) || !strings.Contains(err.Error(), c.line) {
				t.Errorf("error %v, want %q", err, c.line)
			}
		})
	}
}

func TestRounds(t *testing.T) {
	act := func(name string) Act { return Act{Name: name} }
	last := func(name string) Act { return Act{Name: name, Last: true} }
	for name, c := range map[string]struct {
		scenarios []Scenario
		want      string
	}{
		"nobody acts":                {[]Scenario{{}, {}}, ""},
		"by place, shared ones once": {[]Scenario{{Acts: []Act{act("catalog"), act("a")}}, {Acts: []Act{act("catalog"), act("b"), act("c")}}}, "catalog; a b; c"},
		"nothing left in between":    {[]Scenario{{Acts: []Act{act("x"), act("y")}}, {Acts: []Act{act("x"), act("y"), act("z")}}}, "x; y; z"},
		"last ones after all others": {[]Scenario{{Acts: []Act{last("end"), last("very end")}}, {Acts: []Act{act("a"), act("b"), last("stop")}}}, "a; b; end stop; very end"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, round := range rounds(c.scenarios) {
				var names []string
				for _, a := range round {
					names = append(names, a.Name)
				}
				got = append(got, strings.Join(names, " "))
			}
			if g := strings.Join(got, "; "); g != c.want {
				t.Errorf("got %q, want %q", g, c.want)
			}
		})
	}
}
