package simulate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// What CDI 1.64 decides about a DataVolume: the claim's spec, populator or not, how a clone is made.

const (
	defaultOverhead = "0.06"
	mebibyte        = 1 << 20
	contentArchive  = "archive"
	contentKubeVirt = "kubevirt"
)

// volumeSpec is what is read of a DataVolume's spec. spec.storage has the fields of a claim, too.
type volumeSpec struct {
	Source            *volumeSource                     `json:"source,omitempty"`
	SourceRef         *sourceRef                        `json:"sourceRef,omitempty"`
	PVC               *corev1.PersistentVolumeClaimSpec `json:"pvc,omitempty"`
	Storage           *corev1.PersistentVolumeClaimSpec `json:"storage,omitempty"`
	ContentType       string                            `json:"contentType,omitempty"`
	PriorityClassName string                            `json:"priorityClassName,omitempty"`
	Preallocation     *bool                             `json:"preallocation,omitempty"`
}

type volumeSource struct {
	HTTP *struct {
		URL string `json:"url"`
	} `json:"http,omitempty"`
	Blank    *struct{}   `json:"blank,omitempty"`
	PVC      *namedThing `json:"pvc,omitempty"`
	Snapshot *namedThing `json:"snapshot,omitempty"`
}

type namedThing struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

type sourceRef struct {
	Kind      string  `json:"kind"`
	Namespace *string `json:"namespace,omitempty"`
	Name      string  `json:"name"`
}

// cloneSource is what a DataVolume clones: a claim, a snapshot, or nothing (kind "").
type cloneSource struct {
	client.ObjectKey
	kind string
}

// volume is a DataVolume with its source resolved.
type volume struct {
	*unstructured.Unstructured
	spec  volumeSpec
	clone cloneSource
}

// read decodes a DataVolume and resolves its source, nil for one that is not ours: no such DataSource, no known source.
func (c *cdi) read(ctx context.Context, dv *unstructured.Unstructured) (*volume, error) {
	v := &volume{Unstructured: dv}
	spec, _, _ := unstructured.NestedMap(dv.Object, "spec")
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &v.spec); err != nil {
		return nil, fmt.Errorf("spec of DataVolume %s: %w", key(dv), err)
	}
	source := v.spec.Source
	if ref := v.spec.SourceRef; ref != nil {
		found, err := c.dataSource(ctx, c.client, keyOf(orElse(ptr.Deref(ref.Namespace, ""), dv.GetNamespace()), ref.Name))
		if err != nil {
			return nil, client.IgnoreNotFound(err)
		}
		source = found
	}
	switch {
	case source == nil:
		return nil, nil
	case source.PVC != nil:
		v.clone = cloneSource{keyOf(orElse(source.PVC.Namespace, dv.GetNamespace()), source.PVC.Name), claimKindName}
	case source.Snapshot != nil:
		v.clone = cloneSource{keyOf(orElse(source.Snapshot.Namespace, dv.GetNamespace()), source.Snapshot.Name), snapshotName}
	case source.HTTP == nil && source.Blank == nil:
		return nil, nil
	}
	return v, nil
}

// dataSource is the source that a DataSource points to, through one more DataSource if need be.
func (c *cdi) dataSource(ctx context.Context, reader client.Reader, name client.ObjectKey) (*volumeSource, error) {
	ds := object(dataSourceKind)
	if err := reader.Get(ctx, name, ds); err != nil {
		return nil, err
	}
	if next := text(ds, "spec", "source", "dataSource", "name"); next != "" {
		if err := reader.Get(ctx, keyOf(orElse(text(ds, "spec", "source", "dataSource", "namespace"), name.Namespace), next), ds); err != nil {
			return nil, err
		}
	}
	fields, _, _ := unstructured.NestedMap(ds.Object, "spec", "source")
	source := &volumeSource{}
	return source, runtime.DefaultUnstructuredConverter.FromUnstructured(fields, source)
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func (v *volume) isClone() bool { return v.clone.kind != "" }

func (v *volume) acrossNamespaces() bool { return v.isClone() && v.clone.Namespace != v.GetNamespace() }

func (v *volume) contentType() string {
	if v.spec.ContentType == contentArchive {
		return contentArchive
	}
	return contentKubeVirt
}

// component is the controller that a DataVolume belongs to.
func (v *volume) component() string {
	switch v.clone.kind {
	case claimKindName:
		return pvcCloneController
	case snapshotName:
		return snapshotCloneController
	}
	return importController
}

func claimContent(claim *corev1.PersistentVolumeClaim) string {
	if claim.Annotations[contentTypeKey] == contentArchive {
		return contentArchive
	}
	return contentKubeVirt
}

func volumeMode(m *corev1.PersistentVolumeMode) corev1.PersistentVolumeMode {
	return ptr.Deref(m, corev1.PersistentVolumeFilesystem)
}

func requested(spec *corev1.PersistentVolumeClaimSpec) (resource.Quantity, bool) {
	q, ok := spec.Resources.Requests[corev1.ResourceStorage]
	return q, ok
}

func request(spec *corev1.PersistentVolumeClaimSpec, q resource.Quantity) {
	spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: q}
}

// invalid is a claim that can't be rendered. What is said in the event may be more than in the condition.
type invalid struct {
	message, event string
	final          bool // nothing to try again: a class or its profile has to come
}

func (e *invalid) Error() string { return e.message }

// render makes the claim's spec: spec.pvc as it stands; spec.storage completed by class, modes and size. Of a claim
// that is there already only the size is looked at again.
func (c *cdi) render(ctx context.Context, v *volume, claim *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaimSpec, error) {
	if v.spec.PVC != nil {
		return v.spec.PVC.DeepCopy(), nil
	}
	if v.spec.Storage == nil {
		return nil, errors.New("datavolume one of {pvc, storage} field is required")
	}
	spec := v.spec.Storage.DeepCopy()
	if claim != nil {
		spec = claim.Spec.DeepCopy()
	} else if err := c.renderModes(ctx, v.contentType(), spec); err != nil {
		return nil, err
	}
	return spec, c.renderSize(ctx, spec, v.isClone())
}

func (c *cdi) renderModes(ctx context.Context, content string, spec *corev1.PersistentVolumeClaimSpec) error {
	if content == contentArchive {
		if volumeMode(spec.VolumeMode) == corev1.PersistentVolumeBlock {
			const text = "ContentType Archive cannot have block volumeMode"
			return &invalid{message: text, event: text}
		}
		spec.VolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
	}
	class, err := c.class(ctx, spec.StorageClassName, content)
	if err != nil {
		return err
	}
	if class == nil {
		if err := c.modesOfVolume(ctx, spec); err != nil {
			return err
		}
		if len(spec.AccessModes) == 0 {
			const text = "PVC spec is missing accessMode and no storageClass to choose profile"
			return &invalid{message: text, event: text, final: true}
		}
		return nil
	}
	spec.StorageClassName = &class.Name
	sets, err := c.claimSets(ctx, class.Name)
	if err != nil {
		return err
	}
	switch {
	case ptr.Deref(spec.VolumeMode, "") == "" && len(spec.AccessModes) == 0:
		if len(sets) == 0 || len(sets[0].AccessModes) == 0 {
			return &invalid{message: "no accessMode specified in StorageProfile " + class.Name,
				event: "Spec is missing accessMode and volumeMode, cannot get access mode from StorageProfile " + class.Name}
		}
		spec.AccessModes, spec.VolumeMode = sets[0].AccessModes, sets[0].VolumeMode
	case len(spec.AccessModes) == 0:
		for _, s := range sets {
			if s.VolumeMode != nil && *s.VolumeMode == *spec.VolumeMode && len(s.AccessModes) > 0 {
				spec.AccessModes = s.AccessModes
				return nil
			}
		}
		return &invalid{message: "no matching accessMode specified in StorageProfile " + class.Name,
			event: "Spec is missing accessMode and cannot get access mode from StorageProfile " + class.Name}
	case ptr.Deref(spec.VolumeMode, "") == "":
		for _, s := range sets {
			if slices.ContainsFunc(s.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool { return slices.Contains(spec.AccessModes, m) }) {
				spec.VolumeMode = s.VolumeMode
				return nil
			}
		}
	}
	return nil
}

// modesOfVolume takes the modes of a volume of the named class that would do, when there is no such class.
func (c *cdi) modesOfVolume(ctx context.Context, spec *corev1.PersistentVolumeClaimSpec) error {
	if spec.StorageClassName == nil {
		return nil
	}
	var volumes corev1.PersistentVolumeList
	if err := c.client.List(ctx, &volumes); err != nil {
		return err
	}
	size, _ := requested(spec)
	for _, pv := range volumes.Items {
		fits := pv.DeletionTimestamp == nil && pv.Spec.Capacity.Storage().Cmp(size) >= 0 && pv.Spec.StorageClassName == *spec.StorageClassName &&
			(spec.VolumeMode == nil || *spec.VolumeMode == volumeMode(pv.Spec.VolumeMode))
		for _, m := range spec.AccessModes {
			fits = fits && slices.Contains(pv.Spec.AccessModes, m)
		}
		if fits {
			spec.VolumeMode = pv.Spec.VolumeMode
			if len(spec.AccessModes) == 0 {
				spec.AccessModes = pv.Spec.AccessModes
			}
			return nil
		}
	}
	return nil
}

func (c *cdi) renderSize(ctx context.Context, spec *corev1.PersistentVolumeClaimSpec, clone bool) error {
	size, ok := requested(spec)
	switch {
	case !ok && !clone:
		return &invalid{message: "PVC Spec is not valid - missing storage size"}
	case !ok:
		request(spec, resource.Quantity{})
		return nil
	case clone && size.IsZero(): // left open by an earlier rendering
		return nil
	case size.Value() < mebibyte:
		return &invalid{message: "PVC Spec is not valid - storage size should be at least 1MiB"}
	}
	size, err := c.inflate(ctx, size.Value(), spec)
	if err != nil {
		return err
	}
	if spec.StorageClassName != nil {
		if size, err = c.atLeast(ctx, size, *spec.StorageClassName); err != nil {
			return err
		}
	}
	request(spec, size)
	return nil
}

// inflate adds the overhead of a filesystem to a size.
func (c *cdi) inflate(ctx context.Context, size int64, spec *corev1.PersistentVolumeClaimSpec) (resource.Quantity, error) {
	if volumeMode(spec.VolumeMode) == corev1.PersistentVolumeBlock {
		return *resource.NewScaledQuantity(size, 0), nil
	}
	overhead, err := c.overhead(ctx, spec.StorageClassName)
	return *resource.NewScaledQuantity(withOverhead(size, overhead), 0), err
}

func withOverhead(size int64, overhead float64) int64 {
	aligned := (size + mebibyte - 1) / mebibyte * mebibyte
	return int64(math.Ceil(float64(aligned) * (1 + overhead)))
}

// overhead is a filesystem's share: of the class, of the default class when there is no such class, or of all.
func (c *cdi) overhead(ctx context.Context, className *string) (float64, error) {
	config, err := c.config(ctx)
	if err != nil {
		return 0, err
	}
	if ptr.Deref(className, "none") == "" {
		return 0, nil
	}
	class, err := c.class(ctx, className, contentArchive)
	if class == nil && err == nil {
		class, err = c.class(ctx, nil, contentArchive)
	}
	if err != nil {
		return 0, err
	}
	share := orElse(text(config, "status", "filesystemOverhead", "global"), defaultOverhead)
	if class != nil {
		share = orElse(text(config, "status", "filesystemOverhead", "storageClass", class.Name), share)
	}
	return strconv.ParseFloat(share, 64)
}

// atLeast is a size, or the smallest that the class's driver makes.
func (c *cdi) atLeast(ctx context.Context, size resource.Quantity, class string) (resource.Quantity, error) {
	profile := object(profileKind)
	if ok, err := c.get(ctx, client.ObjectKey{Name: class}, profile); !ok {
		return size, err
	}
	if least, err := resource.ParseQuantity(profile.GetAnnotations()[minimumSizeKey]); err == nil && size.Cmp(least) < 0 {
		return least, nil
	}
	return size, nil
}

// class resolves a class by name, or the default one: for disks of VMs virt's own before the cluster's. Of two
// defaults the newest wins, then the first by name.
func (c *cdi) class(ctx context.Context, name *string, content string) (*storagev1.StorageClass, error) {
	var classes storagev1.StorageClassList
	if err := c.client.List(ctx, &classes); err != nil {
		return nil, err
	}
	return resolveClass(name, content, classes.Items), nil
}

func resolveClass(name *string, content string, classes []storagev1.StorageClass) *storagev1.StorageClass {
	if name != nil {
		for i := range classes {
			if classes[i].Name == *name {
				return &classes[i]
			}
		}
		return nil
	}
	if content == contentKubeVirt {
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

// usePopulator tells whether a populator fills the claim: as the DataVolume says, else whether the class has a driver.
func (c *cdi) usePopulator(ctx context.Context, v *volume, spec *corev1.PersistentVolumeClaimSpec) (bool, error) {
	if s, ok := v.GetAnnotations()[usePopulatorKey]; ok {
		return strconv.ParseBool(s)
	}
	class, err := c.class(ctx, spec.StorageClassName, contentArchive)
	if class == nil || err != nil {
		return false, err
	}
	return c.get(ctx, client.ObjectKey{Name: class.Provisioner}, &storagev1.CSIDriver{})
}

// smaller is the error for a target that asks for less than its source.
func smaller(source, target resource.Quantity) error {
	if source.Value() > target.Value() {
		return fmt.Errorf("target resources requests storage size is smaller than the source %d < %d", target.Value(), source.Value())
	}
	return nil
}

// validateClone refuses a clone of a claim before there is a target.
func (c *cdi) validateClone(ctx context.Context, source *corev1.PersistentVolumeClaim, v *volume) error {
	if s := claimContent(source); s != v.contentType() {
		//lint:ignore ST1005 these are CDI's words
		return fmt.Errorf("Source contentType (%s) and target contentType (%s) do not match", s, v.contentType())
	}
	have, _ := requested(&source.Spec)
	if v.spec.PVC != nil {
		want, _ := requested(v.spec.PVC)
		return smaller(have, want)
	}
	want, ok, err := c.wanted(ctx, v)
	if err != nil || !ok || volumeMode(source.Spec.VolumeMode) != corev1.PersistentVolumeBlock {
		return err
	}
	return smaller(have, want)
}

// wanted is the size that spec.storage asks for, not less than the class's driver makes.
func (c *cdi) wanted(ctx context.Context, v *volume) (resource.Quantity, bool, error) {
	want, ok := requested(v.spec.Storage)
	if !ok {
		return want, false, nil
	}
	class, err := c.class(ctx, v.spec.Storage.StorageClassName, v.contentType())
	if class == nil || err != nil {
		return want, true, err
	}
	want, err = c.atLeast(ctx, want, class.Name)
	return want, true, err
}

// validateSnapshot refuses a clone of a snapshot before there is a target.
func (c *cdi) validateSnapshot(ctx context.Context, snapshot *unstructured.Unstructured, v *volume) error {
	if _, ok, _ := unstructured.NestedMap(snapshot.Object, "status"); !ok {
		return errors.New("no status on source snapshot yet")
	}
	if _, ok, _ := unstructured.NestedMap(snapshot.Object, "status", "error"); ok {
		return fmt.Errorf("snapshot in error state with msg: %s", orElse(text(snapshot, "status", "error", "message"), "no details"))
	}
	if text(snapshot, "spec", "volumeSnapshotClassName") == "" {
		return fmt.Errorf("snapshot %s/%s does not have volume snap class populated, can't clone", snapshot.GetName(), snapshot.GetNamespace())
	}
	have, ok := restoreSize(snapshot)
	if !ok {
		return errors.New("snapshot has no restore size")
	}
	var want resource.Quantity
	hasSize := true
	if v.spec.PVC != nil {
		want, _ = requested(v.spec.PVC)
	} else {
		var err error
		if want, hasSize, err = c.wanted(ctx, v); err != nil {
			return err
		}
	}
	switch {
	case hasSize && !have.IsZero():
		return smaller(have, want)
	case !hasSize && have.IsZero():
		return errors.New("size not specified by user/provisioner, can't tell how much needed for restore")
	}
	return nil
}

func restoreSize(snapshot *unstructured.Unstructured) (resource.Quantity, bool) {
	q, err := resource.ParseQuantity(text(snapshot, "status", "restoreSize"))
	return q, err == nil && q.Sign() >= 0
}

// way is how a clone is made, and why it has to be copied over the network.
type way struct{ strategy, reason, fallback string }

var (
	noSnapshotClass  = way{strategyCopy, "NoVolumeSnapshotClass", "No compatible volumesnapshotclass found"}
	otherProvisioner = way{strategyCopy, "IncompatibleProvisioners", "Provisioners are incompatible"}
	otherMode        = way{strategyCopy, "IncompatibleVolumeModes", "The volume modes of source and target are incompatible"}
	noExpansion      = way{strategyCopy, "NoVolumeExpansion", "No volume expansion is possible"}
	otherDriver      = way{strategyCopy, "NoProvisionerMatch", "The storageclass provisioner does not match the volumesnapshotcontent driver"}
)

// chooseWay settles how the target claim of a populator is cloned, nil while the source is missing.
func (c *cdi) chooseWay(ctx context.Context, target *corev1.PersistentVolumeClaim, source cloneSource) (*way, error) {
	class, err := c.class(ctx, target.Spec.StorageClassName, contentArchive)
	if err != nil {
		return nil, err
	}
	if class == nil {
		return nil, errors.New("target storage class not found")
	}
	if source.kind == snapshotName {
		return c.wayFromSnapshot(ctx, target, source, class)
	}
	events := c.events[clonePopulator]
	from := &corev1.PersistentVolumeClaim{}
	if ok, err := c.get(ctx, source.ObjectKey, from); err != nil {
		return nil, err
	} else if !ok {
		events.Eventf(target, corev1.EventTypeWarning, "CloneWithoutSource", "The source pvc %s doesn't exist", source.Name)
		return nil, nil
	}
	if !has(target, permissiveCloneKey) {
		have, _ := requested(&from.Spec)
		want, _ := requested(&target.Spec)
		if want, err = c.atLeast(ctx, want, class.Name); err != nil {
			return nil, err
		}
		if err := smaller(have, want); err != nil {
			events.Event(target, corev1.EventTypeWarning, "ErrIncompatiblePVC", err.Error())
			events.Event(target, corev1.EventTypeWarning, "CloneValidationFailed", "The clone doesn't meet the validation requirements")
			return nil, err
		}
	}
	platform, err := c.platform(ctx)
	if err != nil {
		return nil, err
	}
	strategy, ok, _ := unstructured.NestedString(platform.Object, "spec", "cloneStrategyOverride")
	if !ok {
		strategy = strategySnapshot
		profile := object(profileKind)
		if _, err := c.get(ctx, client.ObjectKey{Name: class.Name}, profile); err != nil {
			return nil, err
		}
		if s, ok, _ := unstructured.NestedString(profile.Object, "status", "cloneStrategy"); ok {
			strategy = s
		}
	}
	if strategy == strategySnapshot {
		if name, err := c.snapshotClass(ctx, from, target); err != nil {
			return nil, err
		} else if name == "" {
			return &noSnapshotClass, nil
		}
	}
	if strategy != strategySnapshot && strategy != strategyCSI {
		return &way{strategy: strategy}, nil
	}
	driver, err := c.commonDriver(ctx, from, target)
	if err != nil {
		return nil, err
	}
	have, hasCapacity := from.Status.Capacity[corev1.ResourceStorage]
	want, hasSize := requested(&target.Spec)
	switch {
	case driver == "":
		return &otherProvisioner, nil
	case volumeMode(from.Spec.VolumeMode) != volumeMode(target.Spec.VolumeMode):
		return &otherMode, nil
	case !hasCapacity || !hasSize:
		return nil, errors.New("source/target size info missing")
	case have.Cmp(want) < 0 && !ptr.Deref(class.AllowVolumeExpansion, false):
		return &noExpansion, nil
	}
	return &way{strategy: strategy}, nil
}

func (c *cdi) wayFromSnapshot(ctx context.Context, target *corev1.PersistentVolumeClaim, source cloneSource, class *storagev1.StorageClass) (*way, error) {
	snapshot := object(snapshotKind)
	if ok, err := c.get(ctx, source.ObjectKey, snapshot); err != nil {
		return nil, err
	} else if !ok {
		c.events[clonePopulator].Eventf(target, corev1.EventTypeWarning, "CloneWithoutSource", "The source snapshot %s doesn't exist", source.Name)
		return nil, nil
	}
	content, err := c.content(ctx, snapshot)
	if err != nil {
		return nil, err
	}
	have, ok := restoreSize(snapshot)
	want, _ := requested(&target.Spec)
	switch {
	case class.Provisioner != text(content, "spec", "driver"):
		return &otherDriver, nil
	case !ok:
		return nil, errors.New("snapshot has no RestoreSize")
	case have.Cmp(want) < 0 && !ptr.Deref(class.AllowVolumeExpansion, false):
		return &noExpansion, nil
	case orElse(text(content, "spec", "sourceVolumeMode"), "Filesystem") != string(volumeMode(target.Spec.VolumeMode)):
		return &otherMode, nil
	}
	return &way{strategy: strategySnapshot}, nil
}

func (c *cdi) content(ctx context.Context, snapshot *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	name := text(snapshot, "status", "boundVolumeSnapshotContentName")
	if name == "" {
		return nil, errors.New("volumeSnapshotContent name not found")
	}
	content := object(snapshotContentKind)
	return content, c.client.Get(ctx, client.ObjectKey{Name: name}, content)
}

// commonDriver is the driver of all claims, by their volumes or, unbound, their classes; "" when they differ.
func (c *cdi) commonDriver(ctx context.Context, claims ...*corev1.PersistentVolumeClaim) (string, error) {
	common := ""
	for _, claim := range claims {
		driver := ""
		if claim.Spec.VolumeName != "" {
			pv := &corev1.PersistentVolume{}
			ok, err := c.get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, pv)
			if err != nil {
				return "", err
			}
			if ok && pv.Spec.ClaimRef != nil {
				if pv.Spec.ClaimRef.Namespace != claim.Namespace || pv.Spec.ClaimRef.Name != claim.Name {
					return "", errors.New("pvc does not match volume claim ref")
				}
				if pv.Spec.CSI != nil {
					driver = pv.Spec.CSI.Driver
				}
			}
		}
		if driver == "" {
			class := &storagev1.StorageClass{}
			if ok, err := c.get(ctx, client.ObjectKey{Name: ptr.Deref(claim.Spec.StorageClassName, "")}, class); !ok {
				return "", err
			}
			driver = class.Provisioner
		}
		if common == "" {
			common = driver
		}
		if common != driver {
			return "", nil
		}
	}
	return common, nil
}

// snapshotClass is the VolumeSnapshotClass that serves all claims, "" for none: the one that the profiles of all agree
// on, else the driver's default one, else its first by name. The last claim gets the event.
func (c *cdi) snapshotClass(ctx context.Context, claims ...*corev1.PersistentVolumeClaim) (string, error) {
	driver, err := c.commonDriver(ctx, claims...)
	if driver == "" || err != nil {
		return "", err
	}
	agreed := ""
	for i, claim := range claims {
		class, err := c.class(ctx, claim.Spec.StorageClassName, contentArchive)
		if err != nil {
			return "", err
		}
		name := ""
		if class != nil {
			profile := object(profileKind)
			if _, err := c.get(ctx, client.ObjectKey{Name: class.Name}, profile); err != nil {
				return "", err
			}
			name = text(profile, "status", "snapshotClass")
		}
		if name == "" || i > 0 && name != agreed {
			agreed = ""
			break
		}
		agreed = name
	}
	name, why, err := c.snapshotClassOf(ctx, driver, agreed)
	if name != "" {
		c.events[clonePopulator].Eventf(claims[len(claims)-1], corev1.EventTypeNormal, "VolumeSnapshotClassSelected", "%s %s", why, name)
	}
	return name, err
}

// snapshotClassOf finds the VolumeSnapshotClass of a driver: the wanted one, the default, the first by name.
func (c *cdi) snapshotClassOf(ctx context.Context, driver, wanted string) (name, why string, err error) {
	list := objectList(snapshotClassKind)
	if err := c.client.List(ctx, list); err != nil {
		return "", "", err
	}
	var candidates []string
	for i := range list.Items {
		s := &list.Items[i]
		switch {
		case text(s, "driver") != driver:
		case wanted != "" && s.GetName() == wanted:
			return wanted, "VolumeSnapshotClass selected according to StorageProfile", nil
		case wanted == "" && isTrue(s, defaultSnapshotClassKey):
			return s.GetName(), "Default VolumeSnapshotClass selected", nil
		default:
			candidates = append(candidates, s.GetName())
		}
	}
	if wanted != "" || len(candidates) == 0 {
		return "", "", nil
	}
	return slices.Min(candidates), "First VolumeSnapshotClass selected", nil
}
