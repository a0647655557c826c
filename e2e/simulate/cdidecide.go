package simulate

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
)

// What CDI 1.64 decides about a DataVolume, as pure functions. cdi.go acts on it.

// Names that CDI writes and reads.
const (
	cdiPodLabel           = "cdi.kubevirt.io"
	usePopulatorKey       = "cdi.kubevirt.io/storage.usePopulator"
	bindImmediateKey      = "cdi.kubevirt.io/storage.bind.immediate.requested"
	allowAdoptionKey      = "cdi.kubevirt.io/allowClaimAdoption"
	cloneTypeKey          = "cdi.kubevirt.io/cloneType"
	cloneFallbackKey      = "cdi.kubevirt.io/cloneFallbackReason"
	defaultClassKey       = "storageclass.kubernetes.io/is-default-class"
	virtDefaultClassKey   = "storageclass.kubevirt.io/is-default-virt-class"
	cloneStrategyClassKey = "cdi.kubevirt.io/clone-strategy"

	strategyCSI      = "csi-clone"
	strategySnapshot = "snapshot"
	strategyCopy     = "copy"

	filesystemOverhead = 0.06
	mebibyte           = 1 << 20
)

// situation is all that a decision depends on.
type situation struct {
	Volume    *unstructured.Unstructured // the DataVolume
	Class     *storagev1.StorageClass    // the resolved class, nil for none
	CSIDriver bool                       // a CSIDriver named like the class's provisioner exists
	Override  string                     // the CDI object's spec.cloneStrategyOverride
	Source    *corev1.PersistentVolumeClaim
	// SourceDriver is the driver of the source's volume.
	SourceDriver string
}

// decision is what CDI settles once, before it makes the claim.
type decision struct {
	Populator bool
	// Strategy and Fallback are of a clone: csi-clone, snapshot or copy, and why it had to be copy.
	Strategy, Fallback string
	Claim              corev1.PersistentVolumeClaimSpec
	// Refusal is the reason why there can be no claim yet, "" for none, with its message.
	Refusal, Message string
}

// decide settles a DataVolume that has no claim yet.
func decide(s situation) decision {
	var d decision
	d.Populator = s.CSIDriver
	if v, ok := s.Volume.GetAnnotations()[usePopulatorKey]; ok {
		d.Populator, _ = strconv.ParseBool(v)
	}
	if isClone(s.Volume) {
		if s.Source == nil {
			return decision{Populator: d.Populator, Refusal: "CloneWithoutSource", Message: "The source pvc doesn't exist"}
		}
		d.Strategy, d.Fallback = cloneStrategy(s, d.Populator)
	}
	d.Claim, d.Refusal, d.Message = renderClaim(s)
	return d
}

func isClone(dv *unstructured.Unstructured) bool {
	return text(dv, "spec", "source", "pvc", "name") != ""
}

// cloneStrategy picks how a claim is cloned and why it falls back to copying over the network.
func cloneStrategy(s situation, populator bool) (strategy, fallback string) {
	if preset := s.Volume.GetAnnotations()[cloneTypeKey]; preset != "" && populator {
		return preset, ""
	}
	if !populator {
		return strategyCopy, "In tree storage class does not support snapshot/clone"
	}
	strategy = s.Override
	if strategy == "" && s.Class != nil {
		strategy = profileStrategy(s.Class)
	}
	if strategy == strategyCopy {
		return strategyCopy, ""
	}
	if s.Class == nil || s.SourceDriver != s.Class.Provisioner {
		if strategy == strategySnapshot {
			return strategyCopy, "No compatible volumesnapshotclass found"
		}
		return strategyCopy, "Provisioners are incompatible"
	}
	if volumeMode(s.Source.Spec.VolumeMode) != volumeMode(targetMode(s)) {
		return strategyCopy, "The volume modes of source and target are incompatible"
	}
	have, want := s.Source.Status.Capacity[corev1.ResourceStorage], targetSize(s.Volume)
	if have.IsZero() {
		have = s.Source.Spec.Resources.Requests[corev1.ResourceStorage]
	}
	if want.Cmp(have) > 0 && !ptr.Deref(s.Class.AllowVolumeExpansion, false) {
		return strategyCopy, "No volume expansion is possible"
	}
	return strategy, ""
}

func targetMode(s situation) *corev1.PersistentVolumeMode {
	spec, _, _ := renderClaim(s)
	return spec.VolumeMode
}

func volumeMode(m *corev1.PersistentVolumeMode) corev1.PersistentVolumeMode {
	return ptr.Deref(m, corev1.PersistentVolumeFilesystem)
}

// claimForm is "pvc" or "storage", whichever form the DataVolume describes its claim in.
func claimForm(dv *unstructured.Unstructured) string {
	if _, ok, _ := unstructured.NestedMap(dv.Object, "spec", "pvc"); ok {
		return "pvc"
	}
	return "storage"
}

func targetSize(dv *unstructured.Unstructured) resource.Quantity {
	q, err := resource.ParseQuantity(text(dv, "spec", claimForm(dv), "resources", "requests", "storage"))
	if err != nil {
		return resource.Quantity{}
	}
	return q
}

// renderClaim makes the claim's spec: spec.pvc as it stands, spec.storage completed from the class's profile.
func renderClaim(s situation) (spec corev1.PersistentVolumeClaimSpec, refusal, message string) {
	form := claimForm(s.Volume)
	modes, _, _ := unstructured.NestedStringSlice(s.Volume.Object, "spec", form, "accessModes")
	for _, m := range modes {
		spec.AccessModes = append(spec.AccessModes, corev1.PersistentVolumeAccessMode(m))
	}
	if m := text(s.Volume, "spec", form, "volumeMode"); m != "" {
		spec.VolumeMode = ptr.To(corev1.PersistentVolumeMode(m))
	}
	size := targetSize(s.Volume)
	if class, ok, _ := unstructured.NestedString(s.Volume.Object, "spec", form, "storageClassName"); ok {
		spec.StorageClassName = &class
	}
	if form == "storage" {
		if s.Class == nil && len(spec.AccessModes) == 0 {
			return spec, "ErrClaimNotValid", "PVC spec is missing accessMode and no storageClass to choose profile"
		}
		if s.Class != nil {
			spec.StorageClassName = &s.Class.Name
			complete(&spec, claimSets(s.Class.Provisioner))
			if len(spec.AccessModes) == 0 {
				return spec, "ErrClaimNotValid", "no accessMode defined in StorageProfile for " + s.Class.Name
			}
		}
		if size.IsZero() && s.Source != nil {
			size = s.Source.Status.Capacity[corev1.ResourceStorage]
		}
		if volumeMode(spec.VolumeMode) == corev1.PersistentVolumeFilesystem {
			size = inflate(size)
		}
	}
	if s.Source != nil && form == "pvc" {
		if asked := s.Source.Spec.Resources.Requests[corev1.ResourceStorage]; size.Cmp(asked) < 0 {
			return spec, "CloneValidationFailed", "target resources requests storage size is smaller than the source"
		}
	}
	spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: size}
	return spec, "", ""
}

// inflate adds the overhead of a filesystem, rounded as CDI does.
func inflate(size resource.Quantity) resource.Quantity {
	bytes := (size.Value() + mebibyte - 1) / mebibyte * mebibyte
	withOverhead := float64(bytes) * (1 + filesystemOverhead)
	whole := int64(withOverhead)
	if float64(whole) < withOverhead {
		whole++
	}
	return *resource.NewQuantity(whole, resource.BinarySI)
}

// claimSet is one entry of a StorageProfile's claimPropertySets.
type claimSet struct {
	Access corev1.PersistentVolumeAccessMode
	Mode   corev1.PersistentVolumeMode
}

// claimSets is what CDI knows about a provisioner. Unknown ones have none.
func claimSets(provisioner string) []claimSet {
	if provisioner == "linstor.csi.linbit.com" {
		return []claimSet{
			{corev1.ReadWriteMany, corev1.PersistentVolumeBlock},
			{corev1.ReadWriteOnce, corev1.PersistentVolumeBlock},
			{corev1.ReadWriteOnce, corev1.PersistentVolumeFilesystem},
		}
	}
	return nil
}

// profileStrategy is the clone strategy of a class's StorageProfile. Snapshot needs a VolumeSnapshotClass, which no
// run has yet, and so becomes copy unless the class asks for it.
func profileStrategy(class *storagev1.StorageClass) string {
	if s := class.Annotations[cloneStrategyClassKey]; s != "" {
		return s
	}
	return strategyCopy
}

// complete fills in missing modes: the first set that agrees with what is there.
func complete(spec *corev1.PersistentVolumeClaimSpec, sets []claimSet) {
	for _, set := range sets {
		if spec.VolumeMode != nil && *spec.VolumeMode != set.Mode ||
			len(spec.AccessModes) > 0 && !slices.Contains(spec.AccessModes, set.Access) {
			continue
		}
		if len(spec.AccessModes) == 0 {
			spec.AccessModes = []corev1.PersistentVolumeAccessMode{set.Access}
		}
		if spec.VolumeMode == nil {
			spec.VolumeMode = ptr.To(set.Mode)
		}
		return
	}
}

// resolveClass finds the class that a DataVolume means: the named one, or the default, virt before general for
// spec.storage. Of two defaults the newest wins, then the first by name.
func resolveClass(dv *unstructured.Unstructured, classes []storagev1.StorageClass) *storagev1.StorageClass {
	form := claimForm(dv)
	if name, ok, _ := unstructured.NestedString(dv.Object, "spec", form, "storageClassName"); ok {
		for i := range classes {
			if classes[i].Name == name {
				return &classes[i]
			}
		}
		return nil
	}
	if form == "storage" {
		if class := newest(classes, virtDefaultClassKey); class != nil {
			return class
		}
	}
	return newest(classes, defaultClassKey)
}

func newest(classes []storagev1.StorageClass, annotation string) *storagev1.StorageClass {
	var found *storagev1.StorageClass
	for i := range classes {
		c := &classes[i]
		switch {
		case c.Annotations[annotation] != "true":
		case found == nil, c.CreationTimestamp.After(found.CreationTimestamp.Time):
			found = c
		case c.CreationTimestamp.Equal(&found.CreationTimestamp) && strings.Compare(c.Name, found.Name) < 0:
			found = c
		}
	}
	return found
}

// seen is what there is of a DataVolume's helpers.
type seen struct {
	Clone, Populator bool
	Strategy         string // of a clone
	Waits            bool   // WaitForFirstConsumer without a consumer
	ClaimBound       bool   // the target claim
	WorkBound        bool   // the claim that is written to: the target itself, or a temporary one
	PodNeeded        bool
	Pod              corev1.PodPhase // "" for none
}

// nextPhase is the phase of a DataVolume whose helpers are as seen.
func nextPhase(s seen) string {
	moved := !s.PodNeeded || s.Pod == corev1.PodSucceeded
	switch {
	case s.Waits && s.Populator:
		return "PendingPopulation"
	case s.Waits:
		return "WaitForFirstConsumer"
	case moved && s.ClaimBound:
		return "Succeeded"
	case moved && s.WorkBound:
		return "RebindInProgress"
	case s.Clone && s.Strategy == strategyCSI:
		return "CSICloneInProgress"
	case s.Clone && s.Strategy == strategySnapshot:
		return "SnapshotForSmartCloneInProgress"
	case s.Clone && s.Pod == corev1.PodRunning:
		return "CloneInProgress"
	case s.Clone:
		return "CloneScheduled"
	case s.Pod == corev1.PodRunning:
		return "ImportInProgress"
	case s.Pod != "":
		return "ImportScheduled"
	case s.ClaimBound:
		return "PVCBound"
	}
	return "Pending"
}
