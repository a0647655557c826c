package computeplane

import (
	"fmt"
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// subject selects a pool's objects in a record.
func subject(p *tenant.Pool) verify.Subject {
	return verify.Subject{Namespace: p.Namespace(), Cluster: p.Cluster.Name, Pool: p.Name, Release: p.Cluster.Release()}
}

// module is the release that renders the computeplane's releases.
func module(t *tenant.Tenant) history.ReleaseKey {
	return history.ReleaseKey{Namespace: t.Namespace(), Name: tenant.PlaneModule}
}

// adopted claims of each pool that its four kinds of object are the same as before, pinned, and belong to the pool's own
// release and no longer to the cluster's.
func adopted(pools ...*tenant.Pool) []verify.Check {
	var checks []verify.Check
	for _, p := range pools {
		s := subject(p)
		checks = append(append(checks, verify.About("adopted", s, verify.Owned(verify.PoolObjects(s), s.PoolRelease(), s.ClusterRelease()))), unchanged(s)...)
	}
	return checks
}

// leftAlone claims of each pool that its objects are the same as before, pinned, and belong to whom they belonged to; that
// it got no release; and that the migration said so.
func leftAlone(pools ...*tenant.Pool) []verify.Check {
	var checks []verify.Check
	for _, p := range pools {
		s := subject(p)
		checks = append(append(checks, verify.About("not adopted", s, verify.NotAdopted(verify.PoolObjects(s), s.PoolRelease())),
			verify.About("no release", s, verify.NeverThere(helmRelease(p.Namespace(), p.Release()))),
			verify.About("warned", s, verify.LogLine("migration", regexp.MustCompile(`WARNING.*\b`+p.Name+`\b`), 1))), unchanged(s)...)
	}
	return checks
}

func unchanged(s verify.Subject) []verify.Check {
	objects := verify.PoolObjects(s)
	return []verify.Check{verify.About("pinned", s, verify.Pinned(objects)), verify.About("kept", s, verify.Kept(objects)), verify.TemplateUnchanged(s)}
}

// managed claims of each pool that its release is one that the module renders, so that the tenant's next change reaches it.
func managed(pools ...*tenant.Pool) []verify.Check {
	var checks []verify.Check
	for _, p := range pools {
		release := verify.These(helmRelease(p.Namespace(), p.Release()))
		checks = append(checks, verify.About("managed", subject(p), verify.Owned(release, module(p.Cluster.Tenant), history.ReleaseKey{})))
	}
	return checks
}

// refused claims that the module is not Ready in the end, for this reason.
func refused(t *tenant.Tenant, because *regexp.Regexp) verify.Check {
	c := verify.Refused(module(t), because)
	c.Name = fmt.Sprintf("refused %s", t.Namespace())
	return c
}

// nothingMade claims that the tenant's module never had a cluster made.
func nothingMade(t *tenant.Tenant) verify.Check {
	c := verify.NeverThere(helmRelease(t.Namespace(), tenant.PlaneCluster))
	c.Name = fmt.Sprintf("nothing made %s", t.Namespace())
	return c
}

func helmRelease(namespace, name string) history.Ref {
	return history.Ref{Resource: "helmreleases.helm.toolkit.fluxcd.io", Namespace: namespace, Name: name}
}
