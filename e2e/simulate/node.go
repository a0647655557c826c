package simulate

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	heartbeatAnnotation = "kubevirt.io/heartbeat"
	schedulableLabel    = "kubevirt.io/schedulable"
	leaseNamespace      = "kube-node-lease"

	leaseEvery     = 10 * time.Second // kubelet's own
	heartbeatEvery = time.Minute      // virt-handler's own; KubeVirt gives up on a node after 5 min
	statusEvery    = 5 * time.Minute  // kubelet's own when nothing changes
)

// hosts are the nodes of the management cluster. There are two, so that a VM has somewhere to migrate to.
var hosts = map[string]netip.Addr{
	"host-1": netip.MustParseAddr("10.0.0.1"),
	"host-2": netip.MustParseAddr("10.0.0.2"),
}

func ours(node string) bool { return hosts[node].IsValid() }

// nodes registers the management cluster's nodes and keeps them alive: lease, status and KubeVirt's heartbeat.
type nodes struct {
	client client.Client // reads from the API server: nodes are read once, leases never
	log    logr.Logger
	apart  bool // on a cluster with other users
}

// Start implements manager.Runnable.
func (n *nodes) Start(ctx context.Context) error {
	for name := range hosts {
		if err := n.register(ctx, name); err != nil {
			return err
		}
	}
	lease, heartbeat, status := time.NewTicker(leaseEvery), time.NewTicker(heartbeatEvery), time.NewTicker(statusEvery)
	defer lease.Stop()
	defer heartbeat.Stop()
	defer status.Stop()
	for renew := n.renewLease; ; {
		for name := range hosts {
			if err := renew(ctx, name); err != nil && ctx.Err() == nil {
				n.log.Error(err, "node not renewed, trying again at its next turn") // the API server may be restarting
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-lease.C:
			renew = n.renewLease
		case <-heartbeat.C:
			renew = n.beat
		case <-status.C:
			renew = n.report
		}
	}
}

// register makes the node or, on a restored cluster, brings the old one up to date.
func (n *nodes) register(ctx context.Context, name string) error {
	node := hostNode(name, time.Now())
	if n.apart {
		setApart(node)
	}
	err := n.client.Create(ctx, node)
	if err == nil {
		return nil
	}
	if !apierrors.IsAlreadyExists(err) || n.apart {
		return fmt.Errorf("register node %s: %w", name, err)
	}
	node = hostNode(name, time.Now())
	patch := merge(map[string]any{"metadata": map[string]any{"labels": node.Labels, "annotations": node.Annotations}})
	if err := n.client.Patch(ctx, node, patch); err != nil {
		return fmt.Errorf("update node %s: %w", name, err)
	}
	return n.report(ctx, name)
}

// report writes the node's status.
func (n *nodes) report(ctx context.Context, name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := n.client.Get(ctx, key(node), node); err != nil {
		return fmt.Errorf("read node %s: %w", name, err)
	}
	old := node.DeepCopy()
	node.Status = hostStatus(name, old.Status, metav1.Now())
	if n.apart {
		node.Status.Addresses = nil // see setApart
	}
	if err := n.client.Status().Patch(ctx, node, client.StrategicMergeFrom(old)); err != nil {
		return fmt.Errorf("report status of node %s: %w", name, err)
	}
	return nil
}

// beat is virt-handler's heartbeat. Like the real one it makes the node schedulable again.
func (n *nodes) beat(ctx context.Context, name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := n.client.Patch(ctx, node, merge(map[string]any{"metadata": map[string]any{
		"labels":      map[string]any{schedulableLabel: "true"},
		"annotations": map[string]any{heartbeatAnnotation: stamp(time.Now())}}})); err != nil {
		return fmt.Errorf("heartbeat of node %s: %w", name, err)
	}
	return nil
}

func (n *nodes) renewLease(ctx context.Context, name string) error {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: leaseNamespace, Name: name}}
	spec := coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: ptr.To[int32](40), RenewTime: ptr.To(metav1.NowMicro())}
	err := n.client.Patch(ctx, lease, merge(map[string]any{"spec": spec}))
	if apierrors.IsNotFound(err) {
		lease.Spec = spec
		err = n.client.Create(ctx, lease)
	}
	if err != nil {
		return fmt.Errorf("renew lease of node %s: %w", name, err)
	}
	return nil
}

// hostNode is a node as kubelet and virt-handler register it.
func hostNode(name string, now time.Time) *corev1.Node {
	// With its status, as kubelet does: the node is Ready from the first event on.
	return &corev1.Node{Status: hostStatus(name, corev1.NodeStatus{}, metav1.NewTime(now)), ObjectMeta: metav1.ObjectMeta{
		Name: name,
		Labels: map[string]string{
			corev1.LabelHostname:   name,
			corev1.LabelArchStable: "amd64",
			corev1.LabelOSStable:   "linux",
			schedulableLabel:       "true",
			// What virt-handler's node labeller says. Launcher pods select the machine type, migrations the CPU model.
			"machine-type.node.kubevirt.io/q35":                        "true",
			"host-model-cpu.node.kubevirt.io/Skylake-Server-IBRS":      "true",
			"cpu-model-migration.node.kubevirt.io/Skylake-Server-IBRS": "true",
			"cpu-model.node.kubevirt.io/Skylake-Server-IBRS":           "true",
			"cpu-vendor.node.kubevirt.io/Intel":                        "true",
		},
		Annotations: map[string]string{heartbeatAnnotation: stamp(now)},
	}}
}

// hostStatus is the status of a healthy node with room for every pod of a run: scheduling is real, scarcity is not.
// Transition times of conditions that were true before stay.
func hostStatus(name string, old corev1.NodeStatus, now metav1.Time) corev1.NodeStatus {
	room := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("1000"),
		corev1.ResourceMemory:           resource.MustParse("8Ti"),
		corev1.ResourceEphemeralStorage: resource.MustParse("64Ti"),
		corev1.ResourcePods:             resource.MustParse("10k"),
	}
	for _, device := range []corev1.ResourceName{"kvm", "tun", "vhost-net"} {
		room["devices.kubevirt.io/"+device] = resource.MustParse("10k")
	}
	status := old.DeepCopy()
	status.Capacity, status.Allocatable = room, room
	status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: hosts[name].String()}, {Type: corev1.NodeHostName, Address: name}}
	status.NodeInfo = corev1.NodeSystemInfo{
		MachineID: name, SystemUUID: name, BootID: name, KernelVersion: "0", OSImage: "stand-in", Architecture: "amd64",
		OperatingSystem: "linux", ContainerRuntimeVersion: "stand-in://0", KubeletVersion: "v1.34.4",
	}
	status.Conditions = healthy(old.Conditions, now)
	return *status
}

// healthy is the conditions of a node that is Ready and short of nothing.
func healthy(old []corev1.NodeCondition, now metav1.Time) []corev1.NodeCondition {
	want := []corev1.NodeCondition{
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientMemory"},
		{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasNoDiskPressure"},
		{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientPID"},
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "stand-in for kubelet"},
	}
	return transition(old, want, now)
}

// transition dates the wanted conditions: now for one that changed, as before for the others.
func transition(old, want []corev1.NodeCondition, now metav1.Time) []corev1.NodeCondition {
	for i := range want {
		want[i].LastHeartbeatTime, want[i].LastTransitionTime = now, now
		for _, o := range old {
			if o.Type == want[i].Type && o.Status == want[i].Status {
				want[i].LastTransitionTime = o.LastTransitionTime
			}
		}
	}
	return want
}
