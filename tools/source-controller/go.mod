module cozystack.io/upgrade-e2e/tools/source-controller

go 1.26.0

// Only its CRDs are used: charts reach helm-controller as ExternalArtifacts,
// so the controller itself (one of whose dependencies no proxy serves) stays
// out. v1.9.0 is the one that helm-controller v1.6.0 names in its manifests.
require github.com/fluxcd/source-controller v1.9.0
