package adoption

import (
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// ForeignOwner has one object that somebody annotated to another release. Taking it over could break that release,
// leaving it unpinned would lose the machines.
func ForeignOwner() harness.Scenario {
	t := tenant.New("foreign")
	md0 := t.Cluster("prod").Pool("md0")
	md0.Annotate("MachineDeployment", "annotated to another release by hand",
		map[string]any{"meta.helm.sh/release-name": "somebody-else"})
	s := subject(md0)
	foreign := verify.These(history.Ref{Resource: "machinedeployments.cluster.x-k8s.io", Namespace: md0.Namespace(), Name: md0.Object()})
	siblings := func(h *history.History) (out []history.Ref) {
		for _, ref := range verify.PoolObjects(s)(h) {
			if ref.Resource != "machinedeployments.cluster.x-k8s.io" {
				out = append(out, ref)
			}
		}
		return out
	}
	return harness.Scenario{
		Tag:   "foreign-owner",
		Line:  "a MachineDeployment annotated to another release: not taken over, pinned, named in the log; its siblings adopted",
		Given: []*tenant.Tenant{t},
		// The pool's chart refuses a MachineDeployment of another release, so that the pool's release waits for a human.
		MayFail: []harness.Failure{{Namespace: t.Namespace(), Release: md0.Release(), Because: regexp.MustCompile(`somebody-else`)}},
		Checks: []verify.Check{
			verify.About("not taken over", s, verify.NotAdopted(foreign, s.PoolRelease())),
			verify.About("pinned", s, verify.Pinned(verify.PoolObjects(s))),
			verify.About("kept", s, verify.Kept(verify.PoolObjects(s))),
			verify.About("siblings adopted by the migration", s, verify.Before(history.PhaseMigrated, verify.Annotated(siblings, s.PoolRelease()))),
			verify.About("siblings adopted before their release was made", s, verify.AdoptedFirst(siblings, s.PoolRelease())),
			verify.About("siblings annotated", s, verify.Annotated(siblings, s.PoolRelease())),
			verify.About("warned", s, verify.LogLine("migration", regexp.MustCompile(`WARNING.*somebody-else`), 1)),
			verify.TemplateUnchanged(s),
		},
	}
}
