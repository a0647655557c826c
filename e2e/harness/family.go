// Package harness puts a run in order: one cluster, the old platform, a fleet, one upgrade, one record, many verdicts.
// It is built on e2e-framework: a family is an environment, a scenario a feature, a check an assessment.
package harness

import (
	"context"
	"strings"

	"sigs.k8s.io/e2e-framework/pkg/envconf"

	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/simulate"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// A Family is one package under scenarios/: its scenarios share one cluster, one fleet and one upgrade.
type Family struct {
	Name      string
	Line      string // what the family is about, in a few words
	Invalid   error  // a UsageError: its environment asks for what can't be
	Scenarios []Scenario
	// DefaultClass says that they take the platform's StorageClass for the cluster's default.
	DefaultClass bool
}

// A Scenario is one row of the catalogue: what is given on the old platform, and what must hold after the upgrade.
type Scenario struct {
	Tag   string // names it, also as a label
	Line  string // the row in a few words
	Given []*tenant.Tenant
	// Acts happen after the upgrade has settled, in rounds: everybody's first, everybody's second, and so on; scenarios
	// share them by name. The cluster settles after each round.
	Acts []Act
	// ActsOnWorkers says that its acts change its own workers, so that the standing no churn ends where the first begins.
	ActsOnWorkers bool
	// Images is how imports fare whose URL holds the key, where CDI is a stand-in; others succeed at once.
	Images map[string]simulate.Download
	// MayFail are releases that the scenario leaves not Ready on purpose.
	MayFail []Failure
	// Checks come after the standing ones.
	Checks []verify.Check
}

// An Act is something that is done to the platform after the upgrade. Its name is the phase in the record.
type Act struct {
	Name string
	Do   func(ctx context.Context, on Upgraded) error
	// Until, if set, waits for what the act brings about, once everything of its round is done. Whether it came is for checks.
	Until func(ctx context.Context, on Upgraded) error
	// Last acts come after all others: they leave behind what others would stumble over.
	Last bool
	// Brings are pools whose machines the act makes: it lasts until they run, or actBound. Whether they run is for checks.
	Brings []*tenant.Pool
}

// Upgraded is what an act works on.
type Upgraded struct {
	Env      *platform.Env
	Old, New *platform.Version
	Log      func(source string, lines ...string) // into the record
}

// Checks are the standing checks of a scenario, then its own. target is the version that the platform is upgraded to,
// tolerated the profile's globs of releases that need not be Ready.
func (f Family) Checks(s Scenario, target int, tolerated []string) []verify.Check {
	return append(f.standing(s, target, tolerated), s.Checks...)
}

// download is how the import of an image fares, as the first scenario says that names its URL.
func download(scenarios []Scenario, url string) simulate.Download {
	for _, s := range scenarios {
		for part, fares := range s.Images {
			if strings.Contains(url, part) {
				return fares
			}
		}
	}
	return simulate.Download{}
}

// Labels are what a scenario is selected by.
func (s Scenario) Labels(family string) map[string][]string {
	return map[string][]string{"family": {family}, "tag": {s.Tag}}
}

// selected are the scenarios that e2e-framework will run with these flags, by the same rule: every wanted key has one of
// the wanted values, and no unwanted one is there.
func (f Family) selected(cfg *envconf.Config) ([]Scenario, error) {
	if f.Invalid != nil {
		return nil, f.Invalid
	}
	for _, wanted := range []map[string][]string{cfg.Labels(), cfg.SkipLabels()} {
		for _, tag := range wanted["tag"] {
			if !f.Has(tag) {
				return nil, usagef("tag %q is not in family %s; it has %s", tag, f.Name, strings.Join(f.Tags(), ", "))
			}
		}
	}
	var out []Scenario
	for _, s := range f.Scenarios {
		labels, match := s.Labels(f.Name), true
		for key, values := range cfg.Labels() {
			match = match && overlap(labels[key], values)
		}
		for key, values := range cfg.SkipLabels() {
			match = match && !overlap(labels[key], values)
		}
		if match {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		return nil, usagef("no scenario of family %s is left with labels %v without %v", f.Name, cfg.Labels(), cfg.SkipLabels())
	}
	return out, nil
}

// Tags are the tags of the family's scenarios, in order.
func (f Family) Tags() []string {
	var out []string
	for _, s := range f.Scenarios {
		out = append(out, s.Tag)
	}
	return out
}

// Has tells whether the family has a scenario of this tag.
func (f Family) Has(tag string) bool { return overlap(f.Tags(), []string{tag}) }

func overlap(a, b []string) bool {
	for _, x := range a {
		for _, y := range b {
			if x == y {
				return true
			}
		}
	}
	return false
}
