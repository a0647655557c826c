package harness

import (
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// A Failure is a HelmRelease that a scenario leaves not Ready on purpose, for a reason that its message must tell.
type Failure struct {
	Namespace, Release string
	Because            *regexp.Regexp
}

// mayFail excuses the expected failures, and nothing else.
func mayFail(failures []Failure) history.MayFail {
	return func(namespace, name, message string) bool {
		for _, f := range failures {
			if f.Namespace == namespace && f.Release == name && f.Because.MatchString(message) {
				return true
			}
		}
		return false
	}
}

// tolerating excuses, beside what mayFail does, every release that a glob of a profile names.
func tolerating(globs []string, mayFail history.MayFail) history.MayFail {
	profile := &platform.Profile{MayBeNotReady: globs}
	return func(namespace, name, message string) bool {
		return mayFail(namespace, name, message) || profile.NotReadyAllowed(namespace, name)
	}
}

// neighbour lives on every cluster, so that "nobody else was touched" is a claim about somebody, also when one scenario
// runs alone.
func neighbour() *tenant.Tenant {
	t := tenant.New("neighbour")
	t.Cluster("prod").Pool("md0")
	return t
}

// standing are the checks that every scenario gets: the record can be trusted, no churn, converged, isolated, fleet done.
// A tenant without machines must not get one; one without clusters has no release that could converge.
func (f Family) standing(s Scenario, target int, tolerated []string) []verify.Check {
	checks := []verify.Check{verify.Record()}
	for _, t := range s.Given {
		subject := verify.Subject{Namespace: t.Namespace()}
		machines := subject
		machines.Empty = t.Machines() == 0
		still := verify.NoChurn(machines)
		if s.ActsOnWorkers {
			still = verify.NoChurnUntil(machines, s.Acts[0].Name)
		}
		checks = append(checks, still)
		if len(t.Clusters) > 0 {
			checks = append(checks, verify.Converged(subject, tolerating(tolerated, mayFail(s.MayFail))))
		}
		checks = append(checks, verify.Isolated(subject, f.others(s)...))
	}
	return append(checks, verify.FleetDone(target))
}

// others are the tenants of the other scenarios, and the neighbour.
func (f Family) others(s Scenario) []verify.Subject {
	out := []verify.Subject{{Namespace: neighbour().Namespace()}}
	for _, other := range f.Scenarios {
		if other.Tag == s.Tag {
			continue
		}
		for _, t := range other.Given {
			out = append(out, verify.Subject{Namespace: t.Namespace()})
		}
	}
	return out
}
