package computeplane

import (
	"regexp"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// PoolKey has names of pools on both sides of what fits into a release's name, and one that is no label. The old platform
// took the long ones; a bad one stops the module, and nothing else.
func PoolKey() harness.Scenario {
	fitting, long := tenant.New("keys"), tenant.New("long-keys")
	plane := fitting.ComputePlane()
	fits := plane.Pool(strings.Repeat("p", tenant.MaxPlaneKey), tenant.Roles(tenant.IngressRole))
	longPlane := long.ComputePlane()
	tooLong := longPlane.Pool(strings.Repeat("p", tenant.MaxPlaneKey+1), tenant.Roles(tenant.IngressRole))
	muchTooLong := longPlane.Pool(strings.Repeat("q", 2*tenant.MaxPlaneKey), tenant.Machines(0))

	length := regexp.MustCompile(`\b` + tooLong.Name + `\b.*\bcharacters\b`)
	label := regexp.MustCompile(`\bMd_0\b.*\bRFC 1123\b`)
	add := plane.Regroup("a key that is no label", map[string]any{"Md_0": map[string]any{
		"minReplicas": int64(0), "maxReplicas": int64(1), "instanceType": "u1.medium", "diskSize": "20Gi"}})
	return harness.Scenario{
		Tag:   "pool-key",
		Line:  "keys of 15 and more characters, and Md_0: what fits is adopted and rendered, the others are refused with the reason, and their VMs live on",
		Given: []*tenant.Tenant{fitting, long},
		Acts:  []harness.Act{{Name: "key Md_0", Do: harness.Change(add)}},
		MayFail: []harness.Failure{
			{Namespace: long.Namespace(), Release: tenant.PlaneModule, Because: length},
			{Namespace: fitting.Namespace(), Release: tenant.PlaneModule, Because: label},
		},
		Checks: append(append(append(adopted(fits), managed(fits)...), leftAlone(tooLong, muchTooLong)...),
			refused(long, length), refused(fitting, label)),
	}
}
