package adoption

import (
	"regexp"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// LongNames has clusters on both sides of what fits into the name of a pool's own release. The old platform accepted
// them all.
func LongNames() harness.Scenario {
	t := tenant.New("long")
	var fit, tooLong []*tenant.Pool
	var mayFail []harness.Failure
	pool := func(clusterLength, poolLength int) {
		p := t.Cluster(name("c", clusterLength)).Pool(name("md0", poolLength))
		if p.Fits() {
			fit = append(fit, p)
		} else {
			tooLong = append(tooLong, p)
		}
		// Cozystack up to migration 57 runs the machines of such a cluster and fails on a label: from 30 characters on on that of Job
		// kubernetes-<cluster>-bootstrap-token-tenant, from 34 on on that of Deployment kubernetes-<cluster>-cluster-autoscaler.
		mayFail = append(mayFail, harness.Failure{Namespace: t.Namespace(), Release: p.Cluster.Release(), Because: labelTooLong})
	}
	longest := tenant.MaxPoolApp - len("-md0") // 32 characters, the longest cluster that fits with md0
	pool(longest, len("md0"))
	pool(longest+1, len("md0"))
	pool(tenant.MaxClusterName, len("md0"))
	pool(20, tenant.MaxPoolApp-1-20)   // "<cluster>-<pool>" of exactly 36 characters
	pool(21, tenant.MaxPoolApp-1-21+1) // and of 37
	return harness.Scenario{
		Tag:     "long-names",
		Line:    "names on both sides of Helm's limit: what fits is adopted; what does not is pinned, skipped and named in the log",
		Given:   []*tenant.Tenant{t},
		MayFail: mayFail,
		Checks:  append(append([]verify.Check{}, adopted(fit...)...), leftAlone(tooLong...)...),
	}
}

var labelTooLong = regexp.MustCompile(`(bootstrap-token-tenant|cluster-autoscaler)"?: must be no more than 63 characters`)

// name is prefix, filled up to length.
func name(prefix string, length int) string { return prefix + strings.Repeat("x", length-len(prefix)) }
