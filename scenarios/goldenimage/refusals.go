package goldenimage

import (
	"regexp"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
)

// ClassMismatch has a pool whose disks are of another StorageClass than the image.
func ClassMismatch() harness.Scenario {
	t := tenant.New("class")
	p := t.Cluster("prod").Pool("md0", tenant.Set("storageClass", "local"))
	return refused("class-mismatch", "a pool of another StorageClass asks for the image: refused with both classes, its machines live on",
		t, p, version, regexp.MustCompile(`(?i)StorageClass "local".*"replicated"`))
}

// DiskTooSmall has a pool whose disks the image does not fit into.
func DiskTooSmall() harness.Scenario {
	t := tenant.New("small")
	p := t.Cluster("prod").Pool("md0", tenant.Set("diskSize", "5Gi"))
	return refused("disk-too-small", "a pool with smaller disks asks for the image: refused with both sizes, its machines live on",
		t, p, version, regexp.MustCompile(`5Gi is smaller than golden image.*6Gi`))
}

// GoldenAbsent has a pool that asks for an image that nobody offers.
func GoldenAbsent() harness.Scenario {
	t := tenant.New("absent")
	p := t.Cluster("prod").Pool("md0")
	return refused("golden-absent", "a pool asks for an image that is not in the catalog: refused with its name, its machines live on",
		t, p, absent, regexp.MustCompile(golden(absent).Name+`"? (does not exist|not found)`))
}
