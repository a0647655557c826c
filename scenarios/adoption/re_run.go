package adoption

import (
	"context"
	"fmt"
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

const phaseReRun = "re-run"

// ReRun runs the migration once more after it has succeeded.
func ReRun() harness.Scenario {
	t := tenant.New("again")
	md0 := t.Cluster("prod").Pool("md0")
	anybody := regexp.MustCompile(`migration-rerun|migration-hook`)
	return harness.Scenario{
		Tag:   "re-run",
		Line:  "the migration once more after success: not one write to a pool's object",
		Given: []*tenant.Tenant{t},
		Acts:  []harness.Act{{Name: phaseReRun, Do: runMigrationsAgain}},
		Checks: append(adopted(md0),
			verify.About("no write in the second run", subject(md0), verify.NoWritesBy(anybody, verify.PoolObjects(subject(md0)), phaseReRun)),
			verify.About("ran again", subject(md0), verify.LogLine(phaseReRun, regexp.MustCompile(`\bprod\b`), 1))),
	}
}

// runMigrationsAgain starts from the version that the old platform left, as if the first success had not been noted.
func runMigrationsAgain(ctx context.Context, on harness.Upgraded) error {
	attempts, err := platform.RunMigrations(ctx, on.Env, on.New, on.Old.Target)
	if err != nil {
		return err
	}
	for _, a := range attempts {
		on.Log(phaseReRun, a.Log...)
		on.Log(phaseReRun, fmt.Sprintf("attempt %s ended with exit status %d", a.Pod, a.Exit))
	}
	return nil
}
