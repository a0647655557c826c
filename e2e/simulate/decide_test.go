package simulate

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
)

const linstor = "linstor.csi.linbit.com"

func sized(size string, more map[string]any) map[string]any {
	form := map[string]any{"resources": map[string]any{"requests": map[string]any{"storage": size}}}
	for k, v := range more {
		form[k] = v
	}
	return form
}

func class(name string, expandable bool) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: linstor, AllowVolumeExpansion: &expandable}
}

func TestResolveClass(t *testing.T) {
	at := func(name string, second int64, annotations map[string]string) storagev1.StorageClass {
		return storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(second, 0), Annotations: annotations}}
	}
	isDefault := map[string]string{defaultClassKey: "true"}
	classes := []storagev1.StorageClass{at("b", 5, isDefault), at("a", 5, isDefault), at("old", 1, isDefault), at("plain", 9, nil),
		at("virt", 2, map[string]string{virtDefaultClassKey: "true"})}
	for _, tc := range []struct {
		name    string
		class   *string
		content string
		want    string
	}{
		{"named", ptr.To("plain"), contentKubeVirt, "plain"},
		{"unknown", ptr.To("none"), contentKubeVirt, ""},
		{"newest default, first by name", nil, contentArchive, "a"},
		{"virt default, for disks of VMs alone", nil, contentKubeVirt, "virt"},
	} {
		got := ""
		if c := resolveClass(tc.class, tc.content, classes); c != nil {
			got = c.Name
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestProvision(t *testing.T) {
	waiting := class("local", true)
	waiting.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
	asked := map[string]string{provisionerAnnotation: linstor}
	for _, tc := range []struct {
		name  string
		class *storagev1.StorageClass
		claim corev1.PersistentVolumeClaim
		want  bool
	}{
		{"asked for", class("c", true), corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u", Annotations: asked}}, true},
		{"not asked for yet", class("c", true), corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u"}}, false},
		{"no consumer", waiting, corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u", Annotations: asked}}, false},
		{"consumer on a node", waiting, corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u", Annotations: map[string]string{
			provisionerAnnotation: linstor, selectedNodeAnnotation: "host-1"}}}, true},
		{"CDI's populator fills it", class("c", true), corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u", Annotations: asked},
			Spec: corev1.PersistentVolumeClaimSpec{DataSourceRef: &corev1.TypedObjectReference{APIGroup: ptr.To("cdi.kubevirt.io")}}}, false},
		{"bound", class("c", true), corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "u", Annotations: asked},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}}, false},
	} {
		pv := provision(&tc.claim, tc.class)
		if (pv != nil) != tc.want {
			t.Errorf("%s: %v", tc.name, pv)
		} else if pv != nil && (pv.Spec.ClaimRef.UID != "u" || pv.Spec.CSI.Driver != linstor || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete) {
			t.Errorf("%s: volume %+v", tc.name, pv.Spec)
		}
	}
}

func vmi(phase string, more map[string]any) *unstructured.Unstructured {
	v := object(vmiKind)
	v.SetName("vm")
	v.SetUID("vmi-uid")
	v.SetLabels(map[string]string{"kubevirt.io/nodeName": "host-1"})
	status := map[string]any{"phase": phase, "nodeName": "host-1", "activePods": map[string]any{"pod-1": "host-1"},
		"conditions": []any{map[string]any{"type": "Ready", "status": "False"}}}
	for k, x := range more {
		status[k] = x
	}
	set(v, status, "status")
	return v
}

func TestAdvanceBoots(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	v := vmi("Scheduled", nil)
	if !advance(v, "", now) || text(v, "status", "phase") != "Running" {
		t.Fatalf("phase %s", text(v, "status", "phase"))
	}
	if len(items(v.Object, "status", "conditions")) != 3 {
		t.Error("virt-controller's condition is gone")
	}
	c := condition(v, "LiveMigratable")
	if c["status"] != "True" || c["lastProbeTime"] != "2026-01-02T03:04:05Z" || c["lastTransitionTime"] != "2026-01-02T03:04:05Z" {
		t.Errorf("LiveMigratable %v: virt-controller compares it literally, in whole seconds", c)
	}
	if ip := items(v.Object, "status", "interfaces")[0]["ipAddress"]; ip != podIP("pod-1") {
		t.Errorf("address %v, the pod has %s", ip, podIP("pod-1"))
	}
	if advance(v, "", now) {
		t.Error("a running guest has nothing to do")
	}
	deleted := metav1.NewTime(now)
	v.SetDeletionTimestamp(&deleted)
	if !advance(v, "", now) || text(v, "status", "phase") != "Succeeded" {
		t.Errorf("deleted: phase %s", text(v, "status", "phase"))
	}
	if advance(v, "", now) {
		t.Error("a guest that has ended has nothing to do")
	}
}

func TestAdvanceUnsharedDisk(t *testing.T) {
	v := vmi("Scheduled", map[string]any{"volumeStatus": []any{map[string]any{"name": "system",
		"persistentVolumeClaimInfo": map[string]any{"claimName": "disk", "accessModes": []any{"ReadWriteOnce"}}}}})
	advance(v, "", time.Now())
	if c := condition(v, "LiveMigratable"); c["status"] != "False" || c["reason"] != "DisksNotLiveMigratable" {
		t.Errorf("LiveMigratable %v", c)
	}
}

func TestAdvanceBridge(t *testing.T) {
	v := vmi("Scheduled", nil)
	set(v, []any{map[string]any{"name": "default", "pod": map[string]any{}}}, "spec", "networks")
	set(v, []any{map[string]any{"name": "default", "bridge": map[string]any{}}}, "spec", "domain", "devices", "interfaces")
	allowed := v.DeepCopy()
	allowed.SetAnnotations(map[string]string{"kubevirt.io/allow-pod-bridge-network-live-migration": "true"})
	advance(v, "", time.Now())
	advance(allowed, "", time.Now())
	if c := condition(v, "LiveMigratable"); c["status"] != "False" || c["reason"] != "InterfaceNotLiveMigratable" {
		t.Errorf("LiveMigratable %v", c)
	}
	if c := condition(allowed, "LiveMigratable"); c["status"] != "True" {
		t.Errorf("LiveMigratable %v", c)
	}
}

func TestAdvanceMigrates(t *testing.T) {
	v := vmi("Running", map[string]any{"activePods": map[string]any{"pod-1": "host-1", "pod-2": "host-2"},
		"migrationState": map[string]any{"migrationUid": "m", "targetNode": "host-2", "sourceNode": "host-1", "sourcePod": "one"}})
	now := time.Now()
	for _, step := range []struct {
		phase string
		moves bool
		node  string
	}{
		{"Scheduling", false, "host-1"}, {"PreparingTarget", true, "host-1"}, {"PreparingTarget", false, "host-1"},
		{"TargetReady", true, "host-1"}, {"Running", true, "host-2"}, {"Running", false, "host-2"},
	} {
		if moved := advance(v, step.phase, now); moved != step.moves || text(v, "status", "nodeName") != step.node {
			t.Fatalf("%s: moved %v, on %s", step.phase, moved, text(v, "status", "nodeName"))
		}
	}
	if v.GetLabels()["kubevirt.io/nodeName"] != "host-2" || !truth(v, "status", "migrationState", "completed") {
		t.Errorf("labels %v, completed %v", v.GetLabels(), truth(v, "status", "migrationState", "completed"))
	}
	if ip := items(v.Object, "status", "interfaces")[0]["ipAddress"]; ip != podIP("pod-2") {
		t.Errorf("address %v is not the target pod's", ip)
	}
}

func TestWorkerStatus(t *testing.T) {
	first, later := metav1.Unix(1000, 0), metav1.Unix(1030, 0)
	up := workerStatus("w", "10.1.1.1", "v1.33.1", true, corev1.NodeStatus{}, first)
	if !readyNode(up.Conditions) || up.NodeInfo.KubeletVersion != "v1.33.1" {
		t.Fatalf("status %+v", up)
	}
	if again := workerStatus("w", "10.1.1.1", "v1.33.1", true, up, later); again.Conditions[0].LastHeartbeatTime != first {
		t.Error("a heartbeat after 30 s is a write that no kubelet makes")
	}
	down := workerStatus("w", "", "v1.33.1", false, up, later)
	if readyNode(down.Conditions) || down.Conditions[3].Status != corev1.ConditionUnknown || down.Conditions[3].LastTransitionTime != later {
		t.Errorf("conditions %+v", down.Conditions)
	}
	back := workerStatus("w", "10.1.1.2", "v1.33.1", true, down, metav1.Unix(1040, 0))
	if !readyNode(back.Conditions) {
		t.Errorf("conditions %+v", back.Conditions)
	}
}

func TestRunningStatus(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u"}, Spec: corev1.PodSpec{NodeName: "host-2",
		InitContainers: []corev1.Container{{Name: "init"}}, Containers: []corev1.Container{{Name: "compute"}},
		ReadinessGates: []corev1.PodReadinessGate{{ConditionType: "kubevirt.io/virtual-machine-unpaused"}}}}
	now := metav1.Unix(1000, 0)
	pod.Status = runningStatus(pod, now)
	if pod.Status.Phase != corev1.PodRunning || pod.Status.PodIP != podIP("u") || pod.Status.HostIP != "10.0.0.2" {
		t.Errorf("status %+v", pod.Status)
	}
	if podCondition(pod, corev1.PodReady) || !podCondition(pod, corev1.ContainersReady) {
		t.Error("Ready must wait for the readiness gate")
	}
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: "kubevirt.io/virtual-machine-unpaused", Status: corev1.ConditionTrue})
	pod.Status = runningStatus(pod, metav1.Unix(2000, 0))
	if !podCondition(pod, corev1.PodReady) || !podCondition(pod, "kubevirt.io/virtual-machine-unpaused") {
		t.Errorf("conditions %+v", pod.Status.Conditions)
	}
	before := pod.Status.DeepCopy()
	if after := runningStatus(pod, metav1.Unix(3000, 0)); !before.StartTime.Equal(after.StartTime) || after.ContainerStatuses[0].State.Running.StartedAt != now {
		t.Error("times of what did not change moved")
	}
}
