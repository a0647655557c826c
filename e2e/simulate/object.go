package simulate

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Kinds of other modules are handled without their types: the stand-ins touch few of their fields, and the modules
// would bring their whole dependencies with them.
var (
	vmiKind             = schema.GroupVersionKind{Group: "kubevirt.io", Version: "v1", Kind: "VirtualMachineInstance"}
	migrationKind       = schema.GroupVersionKind{Group: "kubevirt.io", Version: "v1", Kind: "VirtualMachineInstanceMigration"}
	dataVolumeKind      = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "DataVolume"}
	cdiConfigKind       = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "CDIConfig"}
	cdiKind             = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "CDI"}
	profileKind         = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "StorageProfile"}
	dataSourceKind      = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "DataSource"}
	cloneSourceKind     = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "VolumeCloneSource"}
	importSourceKind    = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "VolumeImportSource"}
	clusterKind         = schema.GroupVersionKind{Group: "cluster.x-k8s.io", Version: "v1beta1", Kind: "Cluster"}
	machineKind         = schema.GroupVersionKind{Group: "cluster.x-k8s.io", Version: "v1beta1", Kind: "Machine"}
	machineSetKind      = schema.GroupVersionKind{Group: "cluster.x-k8s.io", Version: "v1beta1", Kind: "MachineSet"}
	controlPlaneKind    = schema.GroupVersionKind{Group: "controlplane.cluster.x-k8s.io", Version: "v1alpha1", Kind: "KamajiControlPlane"}
	tenantPlaneKind     = schema.GroupVersionKind{Group: "kamaji.clastix.io", Version: "v1alpha1", Kind: "TenantControlPlane"}
	kubevirtCluster     = schema.GroupVersionKind{Group: "infrastructure.cluster.x-k8s.io", Version: "v1alpha1", Kind: "KubevirtCluster"}
	snapshotKind        = schema.GroupVersionKind{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshot"}
	snapshotClassKind   = schema.GroupVersionKind{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotClass"}
	snapshotContentKind = schema.GroupVersionKind{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"}
	kubevirtMachine     = schema.GroupVersionKind{Group: "infrastructure.cluster.x-k8s.io", Version: "v1alpha1", Kind: "KubevirtMachine"}
)

// Labels by which objects of the one controller are found from another's.
const (
	clusterNameLabel   = "cluster.x-k8s.io/cluster-name"
	machineNameLabel   = "capk.cluster.x-k8s.io/kubevirt-machine-name"
	machineNamespace   = "capk.cluster.x-k8s.io/kubevirt-machine-namespace"
	launcherLabel      = "kubevirt.io"
	launcherLabelValue = "virt-launcher"
)

// object is a new, empty object of a kind.
func object(kind schema.GroupVersionKind) *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(kind)
	return u
}

func objectList(kind schema.GroupVersionKind) *unstructured.UnstructuredList {
	u := &unstructured.UnstructuredList{}
	u.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	return u
}

// text is the string at a path, "" when there is none.
func text(u *unstructured.Unstructured, path ...string) string {
	s, _, _ := unstructured.NestedString(u.Object, path...)
	return s
}

func truth(u *unstructured.Unstructured, path ...string) bool {
	b, _, _ := unstructured.NestedBool(u.Object, path...)
	return b
}

// items is the list of maps at a path; what is no map is left out.
func items(o map[string]any, path ...string) []map[string]any {
	list, _, _ := unstructured.NestedSlice(o, path...)
	var out []map[string]any
	for _, e := range list {
		if m, ok := e.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

// set sets fields of an object that was made here; a field that can't be set is a mistake in this package.
func set(u *unstructured.Unstructured, value any, path ...string) {
	if err := unstructured.SetNestedField(u.Object, value, path...); err != nil {
		panic(fmt.Sprintf("set %v of %s: %v", path, u.GetKind(), err))
	}
}

// condition finds the condition of a type in status.conditions.
func condition(u *unstructured.Unstructured, kind string) map[string]any {
	for _, c := range items(u.Object, "status", "conditions") {
		if c["type"] == kind {
			return c
		}
	}
	return nil
}

func conditionTrue(u *unstructured.Unstructured, kind string) bool {
	return condition(u, kind)["status"] == "True"
}

// setCondition puts c into conditions, replacing the one of its type. The transition time of an unchanged status stays;
// times are in whole seconds, as the API stores them.
func setCondition(conditions []any, c map[string]any, now time.Time) []any {
	c["lastTransitionTime"] = stamp(now)
	for i, e := range conditions {
		old, ok := e.(map[string]any)
		if !ok || old["type"] != c["type"] {
			continue
		}
		if old["status"] == c["status"] && old["lastTransitionTime"] != nil {
			c["lastTransitionTime"] = old["lastTransitionTime"]
		}
		conditions[i] = c
		return conditions
	}
	return append(conditions, c)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// podIP is the address of a pod on our nodes: made from its UID, so that nobody has to remember addresses and the
// virt-handler knows a VMI's without asking the kubelet.
func podIP(uid types.UID) string {
	sum := sha256.Sum256([]byte(uid))
	return netip.AddrFrom4([4]byte{10, sum[0]&63 | 64, sum[1], sum[2]}).String()
}

func key(o client.Object) client.ObjectKey { return client.ObjectKeyFromObject(o) }

// readCRDs reads the CRDs of this package.
func readCRDs() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	files, err := fs.Glob(crds, "crds/*.yaml")
	if err != nil {
		return nil, err
	}
	var list []*apiextensionsv1.CustomResourceDefinition
	for _, file := range files {
		data, err := crds.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096); ; {
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := dec.Decode(crd); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("decode %s: %w", file, err)
			}
			list = append(list, crd)
		}
	}
	return list, nil
}

// merge is a JSON merge patch.
func merge(change map[string]any) client.Patch {
	data, err := json.Marshal(change)
	if err != nil {
		panic(fmt.Sprintf("marshal patch: %v", err)) // maps of this package
	}
	return client.RawPatch(types.MergePatchType, data)
}
