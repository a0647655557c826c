package simulate

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// claimSet is one entry of a StorageProfile's claimPropertySets.
type claimSet struct {
	AccessModes []corev1.PersistentVolumeAccessMode `json:"accessModes,omitempty"`
	VolumeMode  *corev1.PersistentVolumeMode        `json:"volumeMode,omitempty"`
}

// known is what CDI knows about a provisioner: its modes, best first (many or one writer, on a Block device or a
// Filesystem), the advised way to clone, "" for none, and the smallest volume.
type known struct{ modes, strategy, least string }

const (
	anyButSharedFiles = "many:Block one:Block one:Filesystem"
	sharedFiles       = "many:Filesystem one:Filesystem"
	onlyOne           = "one:Block one:Filesystem"
)

// knownProvisioners is by provisioner, or by provisioner and what its class's parameters ask for.
var knownProvisioners = map[string]known{
	"linstor.csi.linbit.com":                {modes: anyButSharedFiles},
	"rbd.csi.ceph.com":                      {anyButSharedFiles, strategyCSI, ""},
	"rook-ceph.rbd.csi.ceph.com":            {anyButSharedFiles, strategyCSI, ""},
	"openshift-storage.rbd.csi.ceph.com":    {anyButSharedFiles, strategyCSI, ""},
	"cephfs.csi.ceph.com":                   {sharedFiles, strategyCSI, ""},
	"rook-ceph.cephfs.csi.ceph.com":         {sharedFiles, strategyCSI, ""},
	"openshift-storage.cephfs.csi.ceph.com": {sharedFiles, strategyCSI, ""},
	"csi.hpe.com":                           {anyButSharedFiles, strategyCSI, ""},
	"hspc.csi.hitachi.com":                  {anyButSharedFiles, strategyCSI, ""},
	"block.csi.ibm.com":                     {anyButSharedFiles, strategyCSI, ""},
	"spectrumscale.csi.ibm.com":             {sharedFiles, strategyCSI, ""},
	"vpc.block.csi.ibm.io":                  {onlyOne, strategyCopy, ""},
	"csi-vxflexos.dellemc.com":              {anyButSharedFiles, strategyCSI, ""},
	"csi-isilon.dellemc.com":                {sharedFiles, strategyCSI, ""},
	"csi-powermax.dellemc.com":              {anyButSharedFiles, strategyCSI, ""},
	"csi-powerstore.dellemc.com":            {anyButSharedFiles, strategyCopy, ""},
	"csi-unity.dellemc.com":                 {modes: anyButSharedFiles},
	"pxd.portworx.com":                      {"many:Block many:Filesystem one:Block one:Filesystem", strategyCSI, ""},
	"infinibox-csi-driver/block":            {anyButSharedFiles, strategyCSI, ""},
	"infinibox-csi-driver/files":            {sharedFiles, strategyCSI, ""},
	"kubesan.gitlab.io":                     {anyButSharedFiles, strategyCSI, ""},
	"csi.san.synology.com":                  {anyButSharedFiles, strategyCSI, "1Gi"},
	"blockvolume.csi.oraclecloud.com":       {anyButSharedFiles, strategyCSI, ""},
	"topolvm.io":                            {"one:Block one:Filesystem", strategyCopy, ""},
	"topolvm.cybozu.com":                    {"one:Block one:Filesystem", strategyCopy, ""},
	"csi.trident.netapp.io/ontap-nas":       {sharedFiles, strategySnapshot, ""},
	"csi.trident.netapp.io/ontap-san":       {"many:Block", strategySnapshot, ""},
	"pd.csi.storage.gke.io":                 {"one:Block", strategySnapshot, ""},
	"pd.csi.storage.gke.io/hyperdisk":       {anyButSharedFiles, strategySnapshot, "4Gi"},
	"ebs.csi.aws.com":                       {modes: "one:Block"},
	"ebs.csi.aws.com/gp":                    {modes: "one:Block", least: "1Gi"},
	"ebs.csi.aws.com/io1":                   {modes: "one:Block", least: "4Gi"},
	"ebs.csi.aws.com/io2":                   {modes: anyButSharedFiles, least: "4Gi"},
	"kubernetes.io/aws-ebs":                 {modes: "one:Block"},
	"disk.csi.azure.com":                    {modes: "one:Block"},
	"file.csi.azure.com":                    {modes: "many:Filesystem"},
	"efs.csi.aws.com":                       {modes: sharedFiles},
	"nfs.csi.k8s.io":                        {modes: "many:Filesystem"},
	"cinder.csi.openstack.org":              {modes: onlyOne},
	"manila.csi.openstack.org":              {modes: "many:Filesystem"},
	"csi.ovirt.org":                         {modes: onlyOne},
	"csi.vsphere.vmware.com":                {modes: onlyOne},
	"csi.huawei.com":                        {modes: anyButSharedFiles},
	"driver.longhorn.io":                    {modes: "one:Block"},
	"kubevirt.io.hostpath-provisioner":      {modes: "one:Filesystem"},
}

// knownOf is what is known about a class's provisioner.
func knownOf(class *storagev1.StorageClass) known {
	name := class.Provisioner
	switch p := class.Parameters; name {
	case "csi.trident.netapp.io":
		for _, backend := range []string{"ontap-nas", "ontap-san"} {
			if strings.HasPrefix(p["backendType"], backend) {
				name += "/" + backend
			}
		}
	case "infinibox-csi-driver":
		name += map[string]string{"iscsi": "/block", "fc": "/block", "nvme": "/block", "nfs": "/files", "nfs_treeq": "/files"}[p["storage_protocol"]]
	case "pd.csi.storage.gke.io":
		if strings.HasPrefix(p["type"], "hyperdisk") {
			name += "/hyperdisk"
		}
	case "ebs.csi.aws.com":
		for _, kind := range []string{"gp", "io1", "io2"} {
			if strings.HasPrefix(p["type"], kind) {
				name += "/" + kind
			}
		}
	}
	return knownProvisioners[name]
}

func (k known) sets() []claimSet {
	var list []claimSet
	for _, pair := range strings.Fields(k.modes) {
		access, mode, _ := strings.Cut(pair, ":")
		m := corev1.ReadWriteOnce
		if access == "many" {
			m = corev1.ReadWriteMany
		}
		list = append(list, claimSet{[]corev1.PersistentVolumeAccessMode{m}, ptr.To(corev1.PersistentVolumeMode(mode))})
	}
	return list
}

// claimSets are those of a class's profile.
func (c *cdi) claimSets(ctx context.Context, class string) ([]claimSet, error) {
	profile := object(profileKind)
	if err := c.client.Get(ctx, client.ObjectKey{Name: class}, profile); err != nil {
		return nil, fmt.Errorf("cannot get StorageProfile: %w", err)
	}
	var list struct {
		ClaimPropertySets []claimSet `json:"claimPropertySets"`
	}
	status, _, _ := unstructured.NestedMap(profile.Object, "status")
	return list.ClaimPropertySets, runtime.DefaultUnstructuredConverter.FromUnstructured(status, &list)
}

func (c *cdi) allClasses(ctx context.Context, _ client.Object) []reconcile.Request {
	var list storagev1.StorageClassList
	if err := c.client.List(ctx, &list); err != nil {
		return nil // the cache ends with the run
	}
	requests := []reconcile.Request{{}} // the configuration
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: key(&list.Items[i])})
	}
	return requests
}

// profile keeps the StorageProfile of a class: what its spec asks for, else what the class or its provisioner suggests.
func (c *cdi) profile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if req.Name == "" {
		return ctrl.Result{}, c.configure(ctx)
	}
	profile, class := object(profileKind), &storagev1.StorageClass{}
	exists, err := c.get(ctx, req.NamespacedName, profile)
	if err != nil {
		return ctrl.Result{}, err
	}
	if ok, err := c.get(ctx, req.NamespacedName, class); err != nil {
		return ctrl.Result{}, err
	} else if !ok || class.DeletionTimestamp != nil {
		if exists {
			err = c.delete(ctx, profile)
		}
		return ctrl.Result{}, err
	}
	old := profile.DeepCopy()
	if !exists {
		profile.SetName(class.Name)
		set(profile, map[string]any{}, "spec")
	}
	k := knownOf(class)
	if k.least != "" && !has(profile, minimumSizeKey) {
		annotate(profile, minimumSizeKey, k.least)
	}
	snapshotClass, _, err := c.snapshotClassOf(ctx, class.Provisioner, text(profile, "spec", "snapshotClass"))
	if err != nil {
		return ctrl.Result{}, err
	}
	status := map[string]any{"storageClass": class.Name, "provisioner": class.Provisioner, "cloneStrategy": profileStrategy(profile, class, k, snapshotClass)}
	if snapshotClass != "" {
		status["snapshotClass"] = snapshotClass
	}
	sets, _, _ := unstructured.NestedSlice(profile.Object, "spec", "claimPropertySets")
	if len(sets) == 0 {
		for _, s := range k.sets() {
			sets = append(sets, map[string]any{"accessModes": []any{string(s.AccessModes[0])}, "volumeMode": string(*s.VolumeMode)})
		}
	}
	if len(sets) > 0 {
		status["claimPropertySets"] = sets
	}
	if !exists {
		if err := c.create(ctx, profile); err != nil {
			return ctrl.Result{}, err
		}
		old = profile.DeepCopy()
	} else if err := c.patch(ctx, old, profile); err != nil {
		return ctrl.Result{}, err
	}
	set(profile, status, "status")
	if equality.Semantic.DeepEqual(old.Object["status"], profile.Object["status"]) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(c.client.Status().Patch(ctx, profile, client.MergeFrom(old)))
}

func profileStrategy(profile *unstructured.Unstructured, class *storagev1.StorageClass, k known, snapshotClass string) string {
	if s := text(profile, "spec", "cloneStrategy"); s != "" {
		return s
	}
	if s, ok := class.Annotations[cloneStrategyClassKey]; ok {
		if s != strategyCopy && s != strategySnapshot && s != strategyCSI {
			return "" // and every clone to this class fails for ever
		}
		return s
	}
	strategy := k.strategy
	if strategy == "" && snapshotClass != "" {
		strategy = strategySnapshot
	}
	if strategy == "" || strategy == strategySnapshot && snapshotClass == "" {
		return strategyCopy
	}
	return strategy
}

// configure keeps the CDIConfig, as CDI's operator and its configuration's controller do.
func (c *cdi) configure(ctx context.Context) error {
	config := object(cdiConfigKind)
	exists, err := c.get(ctx, client.ObjectKey{Name: "config"}, config)
	if err != nil {
		return err
	}
	old := config.DeepCopy()
	config.SetName("config")
	spec := map[string]any{}
	if platform, err := c.platform(ctx); err == nil {
		if s, ok, _ := unstructured.NestedMap(platform.Object, "spec", "config"); ok {
			spec = s
		}
	}
	set(config, spec, "spec")
	overhead, _, _ := unstructured.NestedMap(spec, "filesystemOverhead")
	if overhead == nil {
		overhead = map[string]any{}
	}
	if overhead["global"] == nil {
		overhead["global"] = defaultOverhead
	}
	set(config, overhead, "status", "filesystemOverhead")
	if !exists {
		return c.create(ctx, config)
	}
	return c.patch(ctx, old, config)
}
