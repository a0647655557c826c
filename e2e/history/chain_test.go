package history_test

import (
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
)

func wantChain(t *testing.T, h *history.History, e *history.Event, want ...string) {
	t.Helper()
	if got := h.Chain(e); !reflect.DeepEqual(got, want) {
		t.Errorf("chain is\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// fleet is a pool whose parent release holds its objects, at the baseline of an upgrade.
func fleet() (*ht.Builder, *ht.Pool, ht.Stored) {
	cluster := ht.Object("Cluster", "t/kubernetes-prod")
	pool := ht.NewPool(cluster, "md0", "abc123", 1)
	stored := ht.Stored{Release: "t/kubernetes-prod", Revision: 1, Objects: pool.Rendered()}
	b := ht.New().Baseline(cluster).Baseline(pool.Objects()...).Baseline(stored.Secret())
	return b.Mark(history.PhaseUpgrade), pool, stored
}

func TestChainOfAPrunedPool(t *testing.T) {
	b, p, stored := fleet()
	w := p.Workers[0]
	pending := ht.Stored{Release: stored.Release, Revision: 2, Status: "pending-upgrade"} // the new chart renders no pool
	secret := pending.Secret()
	b.Create(ht.Helm, secret)
	b.AskDelete(ht.Helm, p.Deployment)
	b.AskDelete(ht.CAPI, p.Set)
	b.AskDelete(ht.CAPI, w.Machine)
	b.AskDelete(ht.CAPI, w.KubevirtMachine)
	b.Update(ht.CAPI, w.KubevirtMachine, ht.Set("status.ready", false)) // noise between cause and effect
	b.AskDelete(ht.CAPK, w.VM)
	b.Delete(ht.KubeVirt, w.VMI)
	b.Delete(ht.GC, w.Pod)
	b.Delete(ht.GC, w.DataVolume)
	b.Delete(ht.GC, w.PVC)
	b.Delete(ht.Who{User: "system:serviceaccount:kube-system:persistent-volume-binder"}, w.PV)
	h := b.Read(t)

	helm := "MachineDeployment t/kubernetes-prod-md0 deleted by helm-controller upgrading release kubernetes-prod to revision 2"
	machine := "t/kubernetes-prod-md0-abcde-0"
	vm := []string{
		"VirtualMachine " + machine + " deleted by capk-manager",
		"KubevirtMachine " + machine + " deleted by capi-manager",
		"Machine " + machine + " deleted by capi-manager",
		"MachineSet t/kubernetes-prod-md0-abcde deleted by capi-manager",
		helm,
	}
	life := func(o *unstructured.Unstructured) *history.Event { return h.Lifetime(string(o.GetUID())).Deletion() }
	wantChain(t, h, life(p.Deployment), helm)
	wantChain(t, h, life(w.VM), vm...)
	wantChain(t, h, life(w.Pod), append([]string{"Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 deleted by the garbage collector", "VirtualMachineInstance " + machine + " deleted by kubevirt-controller"}, vm...)...)
	wantChain(t, h, life(w.PV), append([]string{
		"PersistentVolume pv-kubernetes-prod-md0-abcde-0 deleted by persistent-volume-binder",
		"PersistentVolumeClaim " + machine + "-disk deleted by the garbage collector",
		"DataVolume " + machine + "-disk deleted by the garbage collector",
	}, vm...)...)
}

func TestChainOfARollout(t *testing.T) {
	b, p, _ := fleet()
	b.Update(ht.Helm, p.Deployment, ht.Set("spec.template.spec.infrastructureRef.name", "other"))
	set := ht.Object("MachineSet", "t/kubernetes-prod-md0-fresh", ht.Owner(p.Deployment))
	b.Create(ht.CAPI, set)
	fresh := ht.Object("Machine", "t/kubernetes-prod-md0-fresh-0", ht.Owner(set))
	b.Create(ht.CAPI, fresh)
	b.Update(ht.CAPI, p.Set, ht.Set("spec.replicas", int64(0)))
	b.AskDelete(ht.CAPI, p.Workers[0].Machine)
	h := b.Read(t)
	// No release was being worked on, so none is named.
	helm := "MachineDeployment t/kubernetes-prod-md0 changed by helm-controller"
	wantChain(t, h, h.Lifetime("machine:t/kubernetes-prod-md0-fresh-0").Events[0],
		"Machine t/kubernetes-prod-md0-fresh-0 created by capi-manager", "MachineSet t/kubernetes-prod-md0-fresh created by capi-manager", helm)
	wantChain(t, h, h.Lifetime("machine:t/kubernetes-prod-md0-abcde-0").Deletion(),
		"Machine t/kubernetes-prod-md0-abcde-0 deleted by capi-manager", "MachineSet t/kubernetes-prod-md0-abcde changed by capi-manager", helm)
}

func TestChainEndsAtTheFirstWriteThatIsNoReaction(t *testing.T) {
	for _, who := range map[string]ht.Who{"human": ht.Human, "migration": ht.Migration, "helm": ht.Helm, "other human": {User: "alice", Agent: "curl"}} {
		b, p, _ := fleet()
		b.AskDelete(ht.CAPI, p.Set) // would be a cause, were the writer a controller
		b.AskDelete(who, p.Workers[0].Machine)
		h := b.Read(t)
		wantChain(t, h, h.Lifetime(string(p.Workers[0].Machine.GetUID())).Deletion(),
			"Machine t/kubernetes-prod-md0-abcde-0 deleted by "+history.ShortUser(who.User))
	}
}

func TestChainGoesOnOverAnUnknownWriter(t *testing.T) {
	b, p, _ := fleet()
	b.AskDelete(ht.Human, p.Set)
	b.AskDelete(ht.Who{}, p.Workers[0].Machine)
	h := b.Read(t)
	wantChain(t, h, h.Lifetime(string(p.Workers[0].Machine.GetUID())).Deletion(),
		"Machine t/kubernetes-prod-md0-abcde-0 deleted by unknown", "MachineSet t/kubernetes-prod-md0-abcde deleted by kubernetes-admin")
}

func TestChainTakesTheLastCauseBeforeTheEventOnly(t *testing.T) {
	b, p, _ := fleet()
	b.Update(ht.Human, p.Set, ht.Set("spec.replicas", int64(3)))
	b.Update(ht.CAPI, p.Set, ht.Set("status.replicas", int64(3))) // status: no cause
	fresh := ht.NewWorker(p, "fresh")
	b.Create(ht.CAPI, fresh.Machine)
	b.AskDelete(ht.Human, p.Set) // after it: no cause
	h := b.Read(t)
	wantChain(t, h, h.Lifetime("machine:t/fresh").Events[0],
		"Machine t/fresh created by capi-manager", "MachineSet t/kubernetes-prod-md0-abcde changed by kubernetes-admin")
}

func TestALaterDeletionIsNoCause(t *testing.T) {
	b, p, _ := fleet()
	b.AskDelete(ht.CAPI, p.Workers[0].Machine).AskDelete(ht.Human, p.Set)
	h := b.Read(t)
	wantChain(t, h, h.Lifetime(string(p.Workers[0].Machine.GetUID())).Deletion(), "Machine t/kubernetes-prod-md0-abcde-0 deleted by capi-manager")
}

func TestBaselineEventsHaveNoChain(t *testing.T) {
	b, _, _ := fleet()
	h := b.Read(t)
	wantChain(t, h, h.Events[0])
}

func TestOperationIsTheReleaseWhoseManifestsHoldTheObject(t *testing.T) {
	b, p, _ := fleet()
	child := ht.Stored{Release: "t/kubernetes-nodes-prod-md0", Revision: 1, Status: "pending-install", Objects: p.Rendered()}
	bystander := ht.Stored{Release: "t/other", Revision: 4, Status: "pending-upgrade", Objects: []*unstructured.Unstructured{ht.Object("MachineDeployment", "t/other", ht.Set("spec.a", "b"))}}
	secret := child.Secret()
	b.Create(ht.Helm, bystander.Secret(), secret)
	b.Update(ht.Helm, p.Deployment, ht.Set("spec.paused", true))
	child.Status = "deployed"
	b.Update(ht.Helm, secret, ht.Set("data", child.Secret().Object["data"]))
	b.Log("x", "").Log("x", "").Log("x", "")
	b.Update(ht.Helm, p.Deployment, ht.Set("spec.paused", false)) // after the installation
	h := b.Read(t)
	events := h.Lifetime(string(p.Deployment.GetUID())).Events
	if r, word := h.Operation(events[1]); r == nil || r.Name != "kubernetes-nodes-prod-md0" || word != "installing" {
		t.Errorf("the operation is %q of %+v, want installing kubernetes-nodes-prod-md0", word, r)
	}
	if r, word := h.Operation(events[2]); r != nil {
		t.Errorf("after the installation the operation is %q of %s, want none", word, r.Name)
	}
}

func TestParents(t *testing.T) {
	b, p, _ := fleet()
	w := p.Workers[0]
	migration := ht.Object("VirtualMachineInstanceMigration", "t/m", ht.Set("spec.vmiName", w.VMI.GetName()))
	b.Create(ht.KubeVirt, migration)
	elsewhere := ht.Object("VirtualMachine", "t2/x", ht.Label("capk.cluster.x-k8s.io/kubevirt-machine-name", w.KubevirtMachine.GetName()))
	b.Create(ht.CAPK, elsewhere)
	h := b.Read(t)
	names := func(o *unstructured.Unstructured) (out []string) {
		for _, a := range h.Ancestors(h.Lifetime(string(o.GetUID()))) {
			out = append(out, a.Kind)
		}
		return out
	}
	if got, want := names(migration), []string{"VirtualMachineInstance", "VirtualMachine", "KubevirtMachine", "Machine", "MachineSet", "MachineDeployment", "Cluster"}; !reflect.DeepEqual(got, want) {
		t.Errorf("ancestors of the migration: %v, want %v", got, want)
	}
	if got := names(elsewhere); got != nil {
		t.Errorf("a VM of another namespace has ancestors %v by the bare name", got)
	}
}

func TestParentOfTwoLifetimesIsTheOneOfItsTime(t *testing.T) {
	b, p, _ := fleet()
	w := p.Workers[0]
	again := ht.NewWorker(p, w.VM.GetName())
	again.KubevirtMachine.SetUID("km-2")
	again.VM.SetUID("vm-2")
	b.Delete(ht.CAPI, w.KubevirtMachine).Delete(ht.CAPK, w.VM)
	b.Create(ht.CAPI, again.KubevirtMachine).Create(ht.CAPK, again.VM)
	h := b.Read(t)
	for vm, want := range map[string]string{string(w.VM.GetUID()): string(w.KubevirtMachine.GetUID()), "vm-2": "km-2"} {
		if got := h.Parents(h.Lifetime(vm)); len(got) != 1 || got[0].UID != want {
			t.Errorf("parents of VM %s: %+v, want uid %s", vm, got, want)
		}
	}
}
