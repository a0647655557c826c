package adoption

import (
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// HostileValues has every shape of nodeGroups and of a group that no pool can be made of. Most stand in a live release
// that fails since somebody edited it.
func HostileValues() harness.Scenario {
	t := tenant.New("hostile")
	array := t.Cluster("array")
	text := t.Cluster("text")
	null := t.Cluster("null", tenant.Set("nodeGroups", nil)) // to the old chart the same as none: md0
	groups := t.Cluster("groups")

	healthy := groups.Pool("md0")
	// Cozystack adopts it as what an empty nodeGroups stands for, the bundled platform leaves it alone: both are safe.
	implicit := null.Pool("md0", tenant.Machines(0))
	pools := []*tenant.Pool{
		array.Pool("md0", tenant.Machines(0)),
		text.Pool("md0", tenant.Machines(0)),
		groups.Pool("flat", tenant.Machines(0)),
		groups.Pool("nested", tenant.Machines(0)),
		groups.Pool("a.b", tenant.Machines(0)),
	}
	array.Break("nodeGroups an array", map[string]any{"nodeGroups": []any{"md0"}})
	text.Break("nodeGroups a string", map[string]any{"nodeGroups": "md0"})
	edit := map[string]any{"flat": "u1.medium", "nested": map[string]any{"maxReplicas": map[string]any{"a": int64(1)}}}
	keys := []string{"My_Pool", "my pool", "dash-"}
	for _, key := range keys {
		edit[key] = map[string]any{"minReplicas": int64(0)}
	}
	groups.Break("a group a string, an object for a number, keys that are no names", map[string]any{"nodeGroups": edit})

	checks := append(append(adopted(healthy), leftAlone(pools...)...), safe(subject(implicit))...)
	for _, key := range keys {
		checks = append(checks, verify.About("warned of "+key, verify.Subject{Namespace: t.Namespace(), Cluster: groups.Name},
			verify.LogLine("migration", regexp.MustCompile(`WARNING.*\bgroups\b.*\b`+key), 1)))
	}
	return harness.Scenario{
		Tag:     "hostile-values",
		Line:    "nodeGroups an array, a string, null; groups and keys that are none: pinned, skipped and named; a sane pool beside them adopted",
		Given:   []*tenant.Tenant{t},
		MayFail: refused(array, text, groups),
		Checks:  checks,
	}
}

// refused excuses releases whose chart has a schema and goes on refusing their nodeGroups. The fixture's has none.
func refused(clusters ...*tenant.Cluster) []harness.Failure {
	var out []harness.Failure
	for _, c := range clusters {
		out = append(out, harness.Failure{Namespace: c.Tenant.Namespace(), Release: c.Release(), Because: regexp.MustCompile(`(?s)schema.*nodeGroups`)})
	}
	return out
}
