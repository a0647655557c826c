package computeplane

import (
	"context"
	"errors"
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// IngressRole has groups none of which may run the ingress controller: one computeplane that runs and loses the role, and
// one that is switched on without it. Neither platform renders that, so that it is done after the upgrade.
func IngressRole() harness.Scenario {
	running, bare := tenant.New("role"), tenant.New("no-role")
	plane := running.ComputePlane()
	md0 := plane.Pool("md0", tenant.Roles(tenant.IngressRole))
	barePlane := tenant.New("no-role").ComputePlane()
	barePlane.Pool("md0")

	lose := harness.Change(plane.Regroup("the role taken away", map[string]any{"md0": map[string]any{"roles": []any{}}}))
	begin := harness.Create(barePlane)
	because := regexp.MustCompile(`ingress-nginx`)
	return harness.Scenario{
		Tag:   "ingress-role",
		Line:  "groups without the role ingress-nginx: refused with the reason; what runs lives on, and nothing new is made",
		Given: []*tenant.Tenant{running, bare},
		Acts: []harness.Act{{Name: "groups without the role", Do: func(ctx context.Context, on harness.Upgraded) error {
			return errors.Join(lose(ctx, on), begin(ctx, on))
		}}},
		MayFail: []harness.Failure{
			{Namespace: running.Namespace(), Release: tenant.PlaneModule, Because: because},
			{Namespace: bare.Namespace(), Release: tenant.PlaneModule, Because: because},
		},
		Checks: append(adopted(md0), refused(running, because), refused(bare, because),
			nothingMade(bare)),
	}
}
