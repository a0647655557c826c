package simulate

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

var tenantNodeStandIn = standIn{
	name: "tenant-node", namespace: "kube-system", serviceAccount: "upgrade-e2e-tenant-node",
	rules: []rbacv1.PolicyRule{
		allow("kubevirt.io", []string{"virtualmachineinstances"}, "get", "list", "watch"),
		allow("infrastructure.cluster.x-k8s.io", []string{"kubevirtmachines"}, "get", "list", "watch", "patch"), // patch: nudge
		allow("cluster.x-k8s.io", []string{"machines"}, "get"),
	},
	setup: func(s *Simulation, mgr manager.Manager) error {
		tenant, err := client.New(s.tenant.config, client.Options{Scheme: scheme})
		if err != nil {
			return err
		}
		t := &tenantNode{client: mgr.GetClient(), reader: mgr.GetAPIReader(), tenant: tenant, sim: s}
		return ctrl.NewControllerManagedBy(mgr).Named("tenant-node").For(object(kubevirtMachine)).
			Watches(object(vmiKind), handler.EnqueueRequestsFromMapFunc(vmiToMachine)).
			Complete(s.own(t))
	},
}

// tenantNode plays the kubelet inside each worker: a Node in the tenants' API for each KubevirtMachine whose guest runs.
// The node turns NotReady at once when the guest is gone (a real tenant takes its grace period of 40 s) and goes with
// its KubevirtMachine.
type tenantNode struct {
	client client.Client
	reader client.Reader // of the API server, not of a cache
	tenant client.Client
	sim    *Simulation
}

// vmiToMachine is the KubevirtMachine that CAPK made a VMI for.
func vmiToMachine(_ context.Context, vmi client.Object) []reconcile.Request {
	k := client.ObjectKey{Namespace: vmi.GetLabels()[machineNamespace], Name: vmi.GetLabels()[machineNameLabel]}
	if k.Name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: k}}
}

// Reconcile implements reconcile.Reconciler for KubevirtMachines.
func (t *tenantNode) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	machine := object(kubevirtMachine)
	err := t.client.Get(ctx, req.NamespacedName, machine)
	if apierrors.IsNotFound(err) {
		err := t.tenant.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: req.Name}})
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	vmi, err := t.guest(ctx, machine)
	if err != nil {
		return ctrl.Result{}, err
	}
	up := vmi != nil && vmi.GetDeletionTimestamp() == nil && conditionTrue(vmi, "Ready")
	if err := t.node(ctx, machine, vmi, up); err != nil {
		return ctrl.Result{}, err
	}
	if !up {
		return ctrl.Result{}, nil
	}
	if err := t.nudge(ctx, machine, vmi); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: statusEvery}, nil // to renew the heartbeat, as kubelet does when nothing changes
}

// guest is the VMI of a KubevirtMachine, nil for none. CAPK names it like the machine.
func (t *tenantNode) guest(ctx context.Context, machine *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	k := key(machine)
	if namespace := text(machine, "spec", "virtualMachineTemplate", "metadata", "namespace"); namespace != "" {
		k.Namespace = namespace
	}
	vmi := object(vmiKind)
	if err := t.client.Get(ctx, k, vmi); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return vmi, nil
}

// node writes the Node: registered when the guest comes up, NotReady when it goes.
func (t *tenantNode) node(ctx context.Context, machine, vmi *unstructured.Unstructured, up bool) error {
	node := &corev1.Node{}
	err := t.tenant.Get(ctx, client.ObjectKey{Name: machine.GetName()}, node)
	switch {
	case apierrors.IsNotFound(err) && (!up || machine.GetDeletionTimestamp() != nil):
		return nil // never came up, or CAPI has removed it and it is not to come back
	case apierrors.IsNotFound(err):
		node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: machine.GetName(), Labels: map[string]string{
			corev1.LabelHostname: machine.GetName(), corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}}}
		if err := t.tenant.Create(ctx, node); err != nil {
			return fmt.Errorf("register tenant node %s: %w", node.Name, err)
		}
	case err != nil:
		return fmt.Errorf("read tenant node %s: %w", machine.GetName(), err)
	}
	version := node.Status.NodeInfo.KubeletVersion
	if version == "" {
		if version, err = t.kubeletVersion(ctx, machine); err != nil {
			return err
		}
	}
	address := ""
	if vmi != nil {
		if interfaces := items(vmi.Object, "status", "interfaces"); len(interfaces) > 0 {
			address, _ = interfaces[0]["ipAddress"].(string)
		}
	}
	old := node.DeepCopy()
	node.Status = workerStatus(node.Name, address, version, up, old.Status, metav1.Now())
	if equality.Semantic.DeepEqual(old.Status, node.Status) {
		return nil
	}
	if err := t.tenant.Status().Patch(ctx, node, client.StrategicMergeFrom(old)); err != nil {
		return fmt.Errorf("report status of tenant node %s: %w", node.Name, err)
	}
	return nil
}

// kubeletVersion is what the worker's Machine asks for.
func (t *tenantNode) kubeletVersion(ctx context.Context, infra *unstructured.Unstructured) (string, error) {
	for _, owner := range infra.GetOwnerReferences() {
		if owner.Kind != machineKind.Kind {
			continue
		}
		machine := object(machineKind)
		if err := t.reader.Get(ctx, client.ObjectKey{Namespace: infra.GetNamespace(), Name: owner.Name}, machine); err != nil {
			return "", fmt.Errorf("machine of KubevirtMachine %s: %w", key(infra), err)
		}
		if v := text(machine, "spec", "version"); v != "" {
			return v, nil
		}
	}
	return "v0.0.0", nil
}

// workerStatus is the status of a worker's Node.
func workerStatus(name, address, version string, up bool, old corev1.NodeStatus, now metav1.Time) corev1.NodeStatus {
	status := *old.DeepCopy()
	if !up {
		if len(old.Conditions) > 0 && !readyNode(old.Conditions) {
			return status
		}
		// What the node lifecycle controller writes when a kubelet has fallen silent.
		var unknown []corev1.NodeCondition
		for _, kind := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeReady} {
			unknown = append(unknown, corev1.NodeCondition{Type: kind, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown",
				Message: "Kubelet stopped posting node status."})
		}
		status.Conditions = transition(old.Conditions, unknown, now)
		return status
	}
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("20Gi"), corev1.ResourcePods: resource.MustParse("110")}
	status.Capacity, status.Allocatable = room, room
	status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}}
	if address != "" {
		status.Addresses = append(status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: address})
	}
	status.NodeInfo = corev1.NodeSystemInfo{MachineID: name, SystemUUID: name, BootID: name, KernelVersion: "0", OSImage: "stand-in",
		Architecture: "amd64", OperatingSystem: "linux", ContainerRuntimeVersion: "stand-in://0", KubeletVersion: version}
	if fresh(old.Conditions, now) {
		return status
	}
	status.Conditions = healthy(old.Conditions, now)
	return status
}

func readyNode(conditions []corev1.NodeCondition) bool {
	for _, c := range conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// fresh is true for a Ready node whose heartbeat need not be renewed yet.
func fresh(conditions []corev1.NodeCondition, now metav1.Time) bool {
	for _, c := range conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue && now.Sub(c.LastHeartbeatTime.Time) < statusEvery-time.Second
		}
	}
	return false
}

// nudge wakes CAPK, which does not watch VMIs and looks again only after 20 s. It does so once for each VMI, and only
// after the Node is there, so that CAPK finds both at once.
func (t *tenantNode) nudge(ctx context.Context, machine, vmi *unstructured.Unstructured) error {
	uid := string(vmi.GetUID())
	if !t.sim.nudge.Load() || truth(machine, "status", "ready") || machine.GetDeletionTimestamp() != nil || machine.GetAnnotations()[nudgeKey] == uid {
		return nil
	}
	patch := merge(map[string]any{"metadata": map[string]any{"annotations": map[string]any{nudgeKey: uid}}})
	if err := t.client.Patch(ctx, machine, patch); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("nudge KubevirtMachine %s: %w", key(machine), err)
	}
	return nil
}
