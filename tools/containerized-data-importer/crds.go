// Package crds pins what controller-gen turns into CDI's CRDs: CDI's own
// module is not served, its API module is. Upload tokens are left out, as CDI
// serves them from an aggregated API server, and so are forklift's populators.
package crds

import _ "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
