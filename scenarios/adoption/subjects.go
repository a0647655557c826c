package adoption

import (
	"fmt"
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// subject selects a pool's objects in a record.
func subject(p *tenant.Pool) verify.Subject {
	return verify.Subject{Namespace: p.Namespace(), Cluster: p.Cluster.Name, Pool: p.Name}
}

// adopted claims of each pool that its four kinds of object are the same as before, pinned, and belong to the pool's own
// release and no longer to the cluster's; that the migration and not Flux gave them to it, and before it made the release.
func adopted(pools ...*tenant.Pool) []verify.Check {
	var checks []verify.Check
	for _, p := range pools {
		s := subject(p)
		objects := verify.PoolObjects(s)
		checks = append(checks,
			verify.About("adopted by the migration", s, verify.Before(history.PhaseMigrated, verify.Annotated(objects, s.PoolRelease()))),
			verify.About("adopted before its release was made", s, verify.AdoptedFirst(objects, s.PoolRelease())),
			verify.About("adopted", s, verify.Owned(objects, s.PoolRelease(), s.ClusterRelease())),
			verify.About("pinned", s, verify.Pinned(objects)),
			verify.About("kept", s, verify.Kept(objects)),
			verify.About("spec kept", s, verify.SpecKept(objects)),
			verify.TemplateUnchanged(s))
	}
	return checks
}

// leftAlone claims of each pool that its objects are the same as before, pinned, and belong to whom they belonged to;
// that it got no release; and that the migration said so.
func leftAlone(pools ...*tenant.Pool) []verify.Check {
	var checks []verify.Check
	for _, p := range pools {
		s := subject(p)
		checks = append(append(checks, safe(s)...),
			verify.About("not adopted", s, verify.NotAdopted(verify.PoolObjects(s), s.PoolRelease())),
			verify.About("no release", s, verify.NeverThere(helmRelease(s.PoolRelease()))),
			verify.About("warned", s, verify.LogLine("migration", warning(p), 1)))
	}
	return checks
}

// safe claims that a pool's objects are the same as before, and pinned, whoever they belong to.
func safe(s verify.Subject) []verify.Check {
	objects := verify.PoolObjects(s)
	return []verify.Check{verify.About("pinned", s, verify.Pinned(objects)), verify.About("kept", s, verify.Kept(objects)), verify.TemplateUnchanged(s)}
}

func helmRelease(k history.ReleaseKey) history.Ref {
	return history.Ref{Resource: "helmreleases.helm.toolkit.fluxcd.io", Namespace: k.Namespace, Name: k.Name}
}

// warning matches a warning of the migration that names the pool, the release that it would have got, or all pools of its cluster.
func warning(p *tenant.Pool) *regexp.Regexp {
	cluster, pool := regexp.QuoteMeta(p.Cluster.Name), regexp.QuoteMeta(p.Name)
	return regexp.MustCompile(fmt.Sprintf(`WARNING.*(\b%[1]s\b.*\b%[2]s\b|\b%[2]s\b.*\b%[1]s\b|%[3]s|nodeGroups of cluster '?%[1]s\b)`,
		cluster, pool, regexp.QuoteMeta(p.Release())))
}
