module cozystack.io/upgrade-e2e/tools/external-snapshotter

go 1.26.0

// Only its CRDs are used; a stand-in plays the CSI driver.
require github.com/kubernetes-csi/external-snapshotter/client/v8 v8.6.0
