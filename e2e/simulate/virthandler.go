package simulate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// virtHandlerStandIn must be KubeVirt's own virt-handler: virt-api silently reverts a VMI status that anybody but a
// component of KubeVirt writes.
var virtHandlerStandIn = standIn{
	name: "virt-handler", namespace: "kubevirt", serviceAccount: "kubevirt-handler",
	rules: []rbacv1.PolicyRule{
		allow("kubevirt.io", []string{"virtualmachineinstances"}, "get", "list", "watch", "update", "patch"),
		allow("kubevirt.io", []string{"virtualmachineinstancemigrations"}, "get", "list", "watch"),
	},
	setup: func(s *Simulation, mgr manager.Manager) error {
		s.handler = &virtHandler{client: mgr.GetClient(), sim: s}
		return ctrl.NewControllerManagedBy(mgr).Named("virt-handler").For(object(vmiKind)).
			Watches(object(migrationKind), handler.EnqueueRequestsFromMapFunc(migrationToVMI)).
			Complete(s.own(s.handler))
	},
}

// virtHandler plays the virt-handlers and guests of all hosts. A guest boots and shuts down in no time; it lives until
// its VMI is deleted, its launcher pod is gone, or shutdown is called. No guest agent, no hotplug, no pause.
type virtHandler struct {
	client client.Client
	sim    *Simulation
}

func migrationToVMI(_ context.Context, o client.Object) []reconcile.Request {
	name := text(o.(*unstructured.Unstructured), "spec", "vmiName")
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}}}
}

// Reconcile implements reconcile.Reconciler for VMIs on our nodes.
func (h *virtHandler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	vmi := object(vmiKind)
	if err := h.client.Get(ctx, req.NamespacedName, vmi); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !ours(text(vmi, "status", "nodeName")) {
		return ctrl.Result{}, nil
	}
	var migrations unstructured.UnstructuredList
	migrations.SetGroupVersionKind(migrationKind.GroupVersion().WithKind(migrationKind.Kind + "List"))
	if err := h.client.List(ctx, &migrations, client.InNamespace(vmi.GetNamespace())); err != nil {
		return ctrl.Result{}, err
	}
	source := sourcePod(vmi)
	updated := vmi.DeepCopy()
	if !advance(updated, migrationPhase(vmi, migrations.Items), time.Now()) {
		return ctrl.Result{}, nil
	}
	if err := h.update(ctx, updated); err != nil {
		return ctrl.Result{}, err
	}
	if text(updated, "status", "nodeName") != text(vmi, "status", "nodeName") {
		// The guest has left: its old launcher ends.
		return ctrl.Result{}, h.sim.kubelet.finish(ctx, vmi.GetNamespace(), func(p *corev1.Pod) bool { return p.Name == source })
	}
	return ctrl.Result{}, nil
}

// update writes the VMI as a whole, as virt-handler does, unless somebody wrote in between. A merge patch would take
// the nulls out of the conditions of virt-controller, which compares them literally before its next write.
func (h *virtHandler) update(ctx context.Context, updated *unstructured.Unstructured) error {
	if err := h.client.Update(ctx, updated); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("update VMI %s: %w", key(updated), err)
	}
	return nil
}

// shutdown ends the guest from inside.
func (h *virtHandler) shutdown(ctx context.Context, vmi client.ObjectKey) error {
	old := object(vmiKind)
	if err := h.client.Get(ctx, vmi, old); err != nil {
		return fmt.Errorf("shut down guest of VMI %s: %w", vmi, err)
	}
	if phase := text(old, "status", "phase"); phase != "Running" {
		return fmt.Errorf("shut down guest of VMI %s: phase is %q, not Running", vmi, phase)
	}
	updated := old.DeepCopy()
	setPhase(updated, "Succeeded", time.Now())
	err := h.update(ctx, updated)
	return errors.Join(err, h.sim.kubelet.finish(ctx, vmi.Namespace, func(p *corev1.Pod) bool {
		return p.Labels[launcherLabel] == launcherLabelValue && p.Labels["kubevirt.io/created-by"] == string(old.GetUID())
	}))
}

// advance does to a VMI what virt-handler would do next and tells whether that is anything.
func advance(vmi *unstructured.Unstructured, migration string, now time.Time) bool {
	phase := text(vmi, "status", "phase")
	switch {
	case phase != "Scheduled" && phase != "Running":
		return false
	case vmi.GetDeletionTimestamp() != nil:
		setPhase(vmi, "Succeeded", now)
		return true
	case phase == "Scheduled":
		setPhase(vmi, "Running", now)
		boot(vmi, now)
		return true
	}
	return migrate(vmi, migration, now)
}

func setPhase(vmi *unstructured.Unstructured, phase string, now time.Time) {
	set(vmi, phase, "status", "phase")
	times, _, _ := unstructured.NestedSlice(vmi.Object, "status", "phaseTransitionTimestamps")
	set(vmi, append(times, map[string]any{"phase": phase, "phaseTransitionTimestamp": stamp(now)}), "status", "phaseTransitionTimestamps")
}

// boot fills in what virt-handler reports of a guest that runs.
func boot(vmi *unstructured.Unstructured, now time.Time) {
	conditions, _, _ := unstructured.NestedSlice(vmi.Object, "status", "conditions")
	migratable := map[string]any{"type": "LiveMigratable", "status": "True"}
	if reason, message := immovable(vmi); reason != "" {
		migratable["status"], migratable["reason"], migratable["message"] = "False", reason, message
	}
	for _, c := range []map[string]any{migratable, {"type": "StorageLiveMigratable", "status": "True"}} {
		c["lastProbeTime"] = stamp(now) // virt-controller compares conditions literally, with this field in them
		conditions = setCondition(conditions, c, now)
	}
	set(vmi, conditions, "status", "conditions")
	set(vmi, "LiveMigration", "status", "migrationMethod")
	set(vmi, "none", "status", "selinuxContext") // virt-controller refuses to migrate without one
	setAddress(vmi, text(vmi, "status", "nodeName"))
}

// setAddress gives the guest's first interface the address of its pod on node.
func setAddress(vmi *unstructured.Unstructured, node string) {
	pods, _, _ := unstructured.NestedStringMap(vmi.Object, "status", "activePods")
	var uids []string
	for uid, on := range pods {
		if on == node {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	if len(uids) == 0 {
		uids = []string{string(vmi.GetUID())}
	}
	ip := podIP(types.UID(uids[len(uids)-1]))
	list, _, _ := unstructured.NestedSlice(vmi.Object, "status", "interfaces")
	first := map[string]any{"name": "default"}
	if networks := items(vmi.Object, "spec", "networks"); len(networks) > 0 {
		first["name"] = networks[0]["name"]
	}
	if len(list) == 0 {
		list = []any{first}
	} else if m, ok := list[0].(map[string]any); ok {
		first = m
	}
	first["ipAddress"], first["ipAddresses"], first["infoSource"] = ip, []any{ip}, "domain"
	list[0] = first
	set(vmi, list, "status", "interfaces")
}

// immovable says why a guest can't be migrated, "" when it can: a disk that only one node can use, or a bridge to the
// pod network that nobody has allowed to move.
func immovable(vmi *unstructured.Unstructured) (reason, message string) {
	for _, v := range items(vmi.Object, "status", "volumeStatus") {
		info, ok := v["persistentVolumeClaimInfo"].(map[string]any)
		if !ok {
			continue
		}
		modes, _, _ := unstructured.NestedStringSlice(info, "accessModes")
		if !slices.Contains(modes, string(corev1.ReadWriteMany)) {
			return "DisksNotLiveMigratable", fmt.Sprintf("cannot migrate VMI: PVC %v is not shared, live migration requires that all PVCs must be shared (using ReadWriteMany access mode)", info["claimName"])
		}
	}
	if _, allowed := vmi.GetAnnotations()["kubevirt.io/allow-pod-bridge-network-live-migration"]; allowed {
		return "", ""
	}
	for _, network := range items(vmi.Object, "spec", "networks") {
		for _, i := range items(vmi.Object, "spec", "domain", "devices", "interfaces") {
			if network["pod"] != nil && i["name"] == network["name"] && i["bridge"] != nil {
				return "InterfaceNotLiveMigratable", "cannot migrate VMI which does not use masquerade or a migratable plugin to connect to the pod network"
			}
		}
	}
	return "", ""
}

// migrate does the virt-handlers' part of a live migration, one step for each phase that virt-controller moves it to.
func migrate(vmi *unstructured.Unstructured, phase string, now time.Time) bool {
	state, ok, _ := unstructured.NestedMap(vmi.Object, "status", "migrationState")
	if !ok || state["completed"] == true || state["failed"] == true {
		return false
	}
	target, _ := state["targetNode"].(string)
	if !ours(target) {
		return false
	}
	targetState := func(field string, value any) { // virt-controller keeps a copy there for migrations between clusters
		if m, ok := state["targetState"].(map[string]any); ok {
			m[field] = value
		}
	}
	switch {
	case phase == "PreparingTarget" && state["targetNodeAddress"] == nil:
		address, ports := hosts[target].String(), map[string]any{"49152": int64(49152), "49153": int64(49153)}
		state["targetNodeAddress"], state["targetDirectMigrationNodePorts"] = address, ports
		targetState("nodeAddress", address)
		targetState("directMigrationNodePorts", ports)
	case phase == "TargetReady" && state["startTimestamp"] == nil:
		state["startTimestamp"] = stamp(now)
	case phase == "Running":
		state["completed"], state["endTimestamp"] = true, stamp(now)
		state["targetNodeDomainDetected"], state["targetNodeDomainReadyTimestamp"] = true, stamp(now)
		targetState("domainDetected", true)
		targetState("domainReadyTimestamp", stamp(now))
		labels := vmi.GetLabels()
		labels["kubevirt.io/nodeName"] = target
		vmi.SetLabels(labels)
		set(vmi, target, "status", "nodeName")
		unstructured.RemoveNestedField(vmi.Object, "status", "evacuationNodeName")
		setAddress(vmi, target)
	default:
		return false
	}
	set(vmi, state, "status", "migrationState")
	return true
}

// migrationPhase is the phase of the migration that a VMI's migrationState belongs to.
func migrationPhase(vmi *unstructured.Unstructured, migrations []unstructured.Unstructured) string {
	uid := text(vmi, "status", "migrationState", "migrationUid")
	for i := range migrations {
		if string(migrations[i].GetUID()) == uid {
			return text(&migrations[i], "status", "phase")
		}
	}
	return ""
}

func sourcePod(vmi *unstructured.Unstructured) string {
	return text(vmi, "status", "migrationState", "sourcePod")
}
