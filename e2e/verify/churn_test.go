package verify_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// world is a cluster prod with pools md0 and md0-large in tenant t, at the begin of an upgrade.
type world struct {
	*ht.Builder
	cluster    *unstructured.Unstructured
	md0, large *ht.Pool
}

func newWorld() *world {
	w := &world{Builder: ht.New(), cluster: ht.Object("Cluster", "t/kubernetes-prod")}
	w.md0, w.large = ht.NewPool(w.cluster, "md0", "abc123", 1), ht.NewPool(w.cluster, "md0-large", "def456", 1)
	w.Baseline(ht.Object("Namespace", "t"), w.cluster)
	w.Baseline(w.md0.Objects()...).Baseline(w.large.Objects()...)
	w.Mark(history.PhaseUpgrade)
	return w
}

var (
	md0   = verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0"}
	large = verify.Subject{Namespace: "t", Cluster: "prod", Pool: "md0-large"}
)

// wantEvidence compares verdict and evidence, told as "Object change".
func wantEvidence(t *testing.T, r verify.Result, verdict verify.Verdict, evidence ...string) {
	t.Helper()
	var got []string
	for _, e := range r.Evidence {
		got = append(got, e.Object+" "+e.Change)
	}
	if r.Verdict != verdict || !reflect.DeepEqual(got, evidence) {
		t.Errorf("%s (%s)\n  %s\nwant %s\n  %s", r.Verdict, r.Reason, strings.Join(got, "\n  "), verdict, strings.Join(evidence, "\n  "))
	}
}

const worker = "t/kubernetes-prod-md0-abcde-0"

func TestNoChurn(t *testing.T) {
	restarts := func(field string, n int64) func(*unstructured.Unstructured) {
		return ht.Set("status."+field, []any{map[string]any{"name": "compute", "restartCount": n}})
	}
	annotation := func(key, value string) func(*unstructured.Unstructured) { return ht.Annotate(key, value) }
	for name, c := range map[string]struct {
		happens func(w *world, m ht.Worker)
		want    []string // none: passes
	}{
		"nothing": {func(*world, ht.Worker) {}, nil},
		"status and metadata": {func(w *world, m ht.Worker) {
			w.Update(ht.CAPK, m.VM, ht.Label("a", "b")).Update(ht.CAPI, m.Machine, ht.Set("status.phase", "Running")).Update(ht.Helm, w.md0.Deployment, ht.OwnedBy("kubernetes-nodes-prod-md0"))
		}, nil},
		"another pool":                 {func(w *world, _ ht.Worker) { w.Delete(ht.CAPK, w.large.Workers[0].VM) }, nil},
		"VM deleted":                   {func(w *world, m ht.Worker) { w.AskDelete(ht.CAPK, m.VM).Finalize(ht.KubeVirt, m.VM) }, []string{"VirtualMachine " + worker + " deleted"}},
		"VMI deleted":                  {func(w *world, m ht.Worker) { w.Delete(ht.KubeVirt, m.VMI) }, []string{"VirtualMachineInstance " + worker + " deleted"}},
		"pod deleted":                  {func(w *world, m ht.Worker) { w.Delete(ht.KubeVirt, m.Pod) }, []string{"Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 deleted"}},
		"KubevirtMachine deleted":      {func(w *world, m ht.Worker) { w.Delete(ht.CAPI, m.KubevirtMachine) }, []string{"KubevirtMachine " + worker + " deleted"}},
		"Machine deletion asked for":   {func(w *world, m ht.Worker) { w.AskDelete(ht.Human, m.Machine) }, []string{"Machine " + worker + " deleted"}},
		"MachineSet deleted":           {func(w *world, _ ht.Worker) { w.Delete(ht.CAPI, w.md0.Set) }, []string{"MachineSet t/kubernetes-prod-md0-abcde deleted"}},
		"MachineDeployment deleted":    {func(w *world, _ ht.Worker) { w.Delete(ht.Helm, w.md0.Deployment) }, []string{"MachineDeployment t/kubernetes-prod-md0 deleted"}},
		"template deleted":             {func(w *world, _ ht.Worker) { w.Delete(ht.Helm, w.md0.Template) }, []string{"KubevirtMachineTemplate t/kubernetes-prod-md0-abc123 deleted"}},
		"DataVolume deleted":           {func(w *world, m ht.Worker) { w.Delete(ht.GC, m.DataVolume) }, []string{"DataVolume " + worker + "-disk deleted"}},
		"PVC deleted":                  {func(w *world, m ht.Worker) { w.Delete(ht.GC, m.PVC) }, []string{"PersistentVolumeClaim " + worker + "-disk deleted"}},
		"PV deleted":                   {func(w *world, m ht.Worker) { w.Delete(ht.GC, m.PV) }, []string{"PersistentVolume pv-kubernetes-prod-md0-abcde-0 deleted"}},
		"health check is not workload": {func(w *world, _ ht.Worker) { w.Delete(ht.Helm, w.md0.HealthCheck) }, nil},
		"VM recreated": {func(w *world, m ht.Worker) {
			again := m.VM.DeepCopy()
			again.SetUID("second")
			w.Delete(ht.CAPK, m.VM).Create(ht.CAPK, again)
		}, []string{"VirtualMachine " + worker + " deleted", "VirtualMachine " + worker + " recreated (was uid virtualmachine:" + worker + ")"}},
		"Machine appears": {func(w *world, _ ht.Worker) { w.Create(ht.CAPI, ht.NewWorker(w.md0, "new").Machine) }, []string{"Machine t/new appeared"}},
		"template appears": {func(w *world, _ ht.Worker) {
			w.Create(ht.Helm, ht.Object("KubevirtMachineTemplate", "t/kubernetes-prod-md0-ffffff", ht.OwnedBy("kubernetes-nodes-prod-md0")))
		}, []string{"KubevirtMachineTemplate t/kubernetes-prod-md0-ffffff appeared"}},
		"VM stops": {func(w *world, m ht.Worker) { w.Update(ht.KubeVirt, m.VM, ht.Set("status.printableStatus", "Stopped")) }, []string{"VirtualMachine " + worker + " no longer running: Running → Stopped"}},
		"VM starts": {func(w *world, m ht.Worker) {
			stopped(m.VM)
			w.Update(ht.KubeVirt, w.large.Workers[0].VM, ht.Set("status.a", "b"))
		}, nil},
		"run strategy": {func(w *world, m ht.Worker) { w.Update(ht.Human, m.VM, ht.Set("spec.runStrategy", "Halted")) }, []string{"VirtualMachine " + worker + " run strategy changed: Always → Halted"}},
		"running":      {func(w *world, m ht.Worker) { w.Update(ht.Human, m.VM, ht.Set("spec.running", false)) }, []string{"VirtualMachine " + worker + " run strategy changed: nothing → false"}},
		"VMI fails":    {func(w *world, m ht.Worker) { w.Update(ht.Handler, m.VMI, ht.Set("status.phase", "Failed")) }, []string{"VirtualMachineInstance " + worker + " no longer running: Running → Failed"}},
		"VMI moves":    {func(w *world, m ht.Worker) { w.Update(ht.Handler, m.VMI, ht.Set("status.nodeName", "node-2")) }, []string{"VirtualMachineInstance " + worker + " migrated: node-1 → node-2"}},
		"VMI migrates": {func(w *world, m ht.Worker) {
			w.Update(ht.Handler, m.VMI, ht.Set("status.migrationState.migrationUid", "u"))
		}, []string{"VirtualMachineInstance " + worker + " migrated: nothing → u"}},
		"a migration appears": {func(w *world, m ht.Worker) {
			w.Create(ht.Human, ht.Object("VirtualMachineInstanceMigration", "t/m", ht.Set("spec.vmiName", m.VMI.GetName())))
		}, []string{"VirtualMachineInstanceMigration t/m appeared: a migration"}},
		"container restarts": {func(w *world, m ht.Worker) { w.Update(ht.Handler, m.Pod, restarts("containerStatuses", 1)) }, []string{"Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 restarted: 0 container restarts → 1"}},
		"init restarts":      {func(w *world, m ht.Worker) { w.Update(ht.Handler, m.Pod, restarts("initContainerStatuses", 2)) }, []string{"Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 restarted: 0 container restarts → 2"}},
		"pod ends":           {func(w *world, m ht.Worker) { w.Update(ht.Handler, m.Pod, ht.Set("status.phase", "Succeeded")) }, []string{"Pod t/virt-launcher-kubernetes-prod-md0-abcde-0 no longer running: Running → Succeeded"}},
		"an importer appears": {func(w *world, m ht.Worker) {
			w.Create(ht.CDI, ht.Object("Pod", "t/importer", ht.Owner(m.PVC), ht.Label("cdi.kubevirt.io", "importer")))
		}, []string{"Pod t/importer appeared: a disk is re-imaged"}},
		"DataVolume imports": {func(w *world, m ht.Worker) {
			w.Update(ht.CDI, m.DataVolume, ht.Set("status.phase", "ImportInProgress"))
		}, []string{"DataVolume " + worker + "-disk re-imaged: Succeeded → ImportInProgress"}},
		"PVC cloned": {func(w *world, m ht.Worker) { w.Update(ht.CDI, m.PVC, annotation("cdi.kubevirt.io/cloneType", "copy")) }, []string{"PersistentVolumeClaim " + worker + "-disk re-imaged: cdi.kubevirt.io/cloneType: nothing → copy"}},
		"PVC imported": {func(w *world, m ht.Worker) {
			w.Update(ht.CDI, m.PVC, annotation("cdi.kubevirt.io/storage.import.endpoint", "http://factory/y"))
		},
			[]string{"PersistentVolumeClaim " + worker + "-disk re-imaged: cdi.kubevirt.io/storage.import.endpoint: http://factory/x → http://factory/y"}},
		"PVC annotated": {func(w *world, m ht.Worker) { w.Update(ht.CDI, m.PVC, annotation("a", "b")) }, nil},
		"PVC lost":      {func(w *world, m ht.Worker) { w.Update(ht.CDI, m.PVC, ht.Set("status.phase", "Lost")) }, []string{"PersistentVolumeClaim " + worker + "-disk disk lost: Bound → Lost"}},
		"PV released":   {func(w *world, m ht.Worker) { w.Update(ht.CDI, m.PV, ht.Set("status.phase", "Released")) }, []string{"PersistentVolume pv-kubernetes-prod-md0-abcde-0 disk lost: Bound → Released"}},
		"scaled":        {func(w *world, _ ht.Worker) { w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.replicas", int64(0))) }, []string{"MachineDeployment t/kubernetes-prod-md0 scaled: 1 → 0"}},
		"template exchanged": {func(w *world, _ ht.Worker) {
			w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.template.spec.infrastructureRef.name", "x"))
		}, []string{"MachineDeployment t/kubernetes-prod-md0 rolls its machines: infrastructureRef.name: kubernetes-prod-md0-abc123 → x"}},
		"bootstrap exchanged": {func(w *world, _ ht.Worker) {
			w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.template.spec.bootstrap.configRef.name", "x"))
		}, []string{"MachineDeployment t/kubernetes-prod-md0 rolls its machines: bootstrap.configRef.name: kubernetes-prod-md0 → x"}},
		"version": {func(w *world, _ ht.Worker) {
			w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.template.spec.version", "v1.35.0"))
		}, []string{"MachineDeployment t/kubernetes-prod-md0 rolls its machines: version: v1.34.0 → v1.35.0"}},
		"changed in place": {func(w *world, _ ht.Worker) {
			w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.template.spec.nodeDrainTimeout", "10s"))
		}, nil},
		"a kind of change counts once": {func(w *world, m ht.Worker) {
			w.Update(ht.Handler, m.VMI, ht.Set("status.nodeName", "node-2")).Update(ht.Handler, m.VMI, ht.Set("status.nodeName", "node-3"))
		}, []string{"VirtualMachineInstance " + worker + " migrated: node-1 → node-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			c.happens(w, w.md0.Workers[0])
			verdict := verify.Passed
			if c.want != nil {
				verdict = verify.Failed
			}
			wantEvidence(t, verify.NoChurn(md0).Judge(w.Read(t)), verdict, c.want...)
		})
	}
}

func stopped(vm *unstructured.Unstructured) { ht.Set("status.printableStatus", "Stopped")(vm) }

func TestNoChurnNotices(t *testing.T) {
	t.Run("what passes by without a trace", func(t *testing.T) { // finished migrations and importers are tidied away
		w := newWorld()
		m := w.md0.Workers[0]
		old := ht.Object("VirtualMachineInstanceMigration", "t/m", ht.Set("spec.vmiName", m.VMI.GetName()))
		importer := ht.Object("Pod", "t/importer", ht.Owner(m.PVC), ht.Label("cdi.kubevirt.io", "importer"))
		w.Baseline(old, importer).Update(ht.CDI, importer, ht.Set("status.phase", "Succeeded")).Delete(ht.KubeVirt, old).Delete(ht.CDI, importer)
		wantEvidence(t, verify.NoChurn(md0).Judge(w.Read(t)), verify.Passed)
	})
	t.Run("becoming scheduled is no migration, becoming Running no stop", func(t *testing.T) {
		w := newWorld()
		p := ht.NewPool(w.cluster, "slow", "0a1b2c", 1)
		m := p.Workers[0]
		stopped(m.VM)
		ht.Set("status.nodeName", "")(m.VMI)
		w.Baseline(p.Objects()...).Update(ht.Handler, m.VMI, ht.Set("status.nodeName", "node-1")).Update(ht.KubeVirt, m.VM, ht.Set("status.printableStatus", "Running"))
		wantEvidence(t, verify.NoChurn(verify.Subject{Namespace: "t", Cluster: "prod", Pool: "slow"}).Judge(w.Read(t)), verify.Passed)
	})
	t.Run("other phases do not count when one is asked for", func(t *testing.T) {
		w := newWorld()
		w.Delete(ht.CAPK, w.md0.Workers[0].VM).Mark("day 2").Delete(ht.CAPI, w.md0.Workers[0].Machine)
		h := w.Read(t)
		wantEvidence(t, verify.NoChurn(md0, "upgrade").Judge(h), verify.Failed, "VirtualMachine "+worker+" deleted")
		wantEvidence(t, verify.NoChurn(md0, "day 2").Judge(h), verify.Failed, "Machine "+worker+" deleted")
		wantEvidence(t, verify.NoChurn(md0, "other").Judge(h), verify.Inconclusive)
	})
	t.Run("what comes later does not count when asked until then", func(t *testing.T) {
		w := newWorld()
		w.Mark("settle").Delete(ht.CAPK, w.md0.Workers[0].VM).Mark("day 2").Delete(ht.CAPI, w.md0.Workers[0].Machine).Mark("day 3")
		h := w.Read(t)
		wantEvidence(t, verify.NoChurnUntil(md0, "day 2").Judge(h), verify.Failed, "VirtualMachine "+worker+" deleted")
		wantEvidence(t, verify.NoChurnUntil(md0, "settle").Judge(h), verify.Passed)
		wantEvidence(t, verify.NoChurnUntil(md0, "other").Judge(h), verify.Inconclusive)
	})
	t.Run("a subject without workers proves nothing unless declared empty", func(t *testing.T) {
		w := newWorld()
		gone := verify.Subject{Namespace: "t", Cluster: "prod", Pool: "none"}
		r := verify.NoChurn(gone).Judge(w.Read(t))
		wantEvidence(t, r, verify.Inconclusive)
		if !strings.Contains(r.Reason, "t/prod/none has no VirtualMachine") {
			t.Errorf("reason %q", r.Reason)
		}
		gone.Empty = true
		wantEvidence(t, verify.NoChurn(gone).Judge(w.Read(t)), verify.Passed)
		w.Create(ht.CAPI, ht.Object("MachineDeployment", "t/kubernetes-prod-none", ht.Set("spec.clusterName", "kubernetes-prod")))
		wantEvidence(t, verify.NoChurn(gone).Judge(w.Read(t)), verify.Failed, "MachineDeployment t/kubernetes-prod-none appeared")
		w = newWorld()
		idle := ht.Object("MachineDeployment", "t/kubernetes-prod-none", ht.Set("spec.clusterName", "kubernetes-prod"), ht.Set("spec.replicas", int64(0)))
		w.Create(ht.Helm, idle, ht.Object("KubevirtMachineTemplate", "t/kubernetes-prod-none-0a1b2c"))
		wantEvidence(t, verify.NoChurn(gone).Judge(w.Read(t)), verify.Passed)
		w.Update(ht.Human, idle, ht.Set("spec.replicas", int64(1)))
		wantEvidence(t, verify.NoChurn(gone).Judge(w.Read(t)), verify.Failed, "MachineDeployment t/kubernetes-prod-none scaled: 0 → 1")
		wrong := md0
		wrong.Empty = true
		wantEvidence(t, verify.NoChurn(wrong).Judge(w.Read(t)), verify.Inconclusive)
	})
	t.Run("churn is a failure also in a record with a gap", func(t *testing.T) {
		w := newWorld()
		w.Delete(ht.CAPK, w.md0.Workers[0].VM).Gap(history.Gap{Reason: "lost"})
		h := w.Read(t)
		wantEvidence(t, verify.NoChurn(md0).Judge(h), verify.Failed, "VirtualMachine "+worker+" deleted")
		wantEvidence(t, verify.NoChurn(large).Judge(h), verify.Inconclusive)
	})
}

func TestEvidenceTellsWhoWhenAndWhy(t *testing.T) {
	w := newWorld()
	stored := ht.Stored{Release: "t/kubernetes-prod", Revision: 1, Objects: w.md0.Rendered()}
	w.Baseline(stored.Secret())
	w.Create(ht.Helm, ht.Stored{Release: "t/kubernetes-prod", Revision: 2, Status: "pending-upgrade"}.Secret())
	m := w.md0.Workers[0]
	w.AskDelete(ht.Helm, w.md0.Deployment).AskDelete(ht.CAPI, w.md0.Set).AskDelete(ht.CAPI, m.Machine).AskDelete(ht.CAPI, m.KubevirtMachine).AskDelete(ht.CAPK, m.VM)
	r := verify.NoChurn(md0).Judge(w.Read(t))
	var got verify.Evidence
	for _, e := range r.Evidence {
		if strings.HasPrefix(e.Object, "VirtualMachine ") {
			got = e
		}
	}
	want := verify.Evidence{
		Object: "VirtualMachine " + worker, UID: "virtualmachine:" + worker, Change: "deleted", Phase: "upgrade", OffsetSeconds: 6,
		Writer: verify.Writer{User: ht.CAPK.User, Agent: ht.CAPK.Agent},
		Chain: []string{
			"VirtualMachine " + worker + " deleted by capk-manager",
			"KubevirtMachine " + worker + " deleted by capi-manager",
			"Machine " + worker + " deleted by capi-manager",
			"MachineSet t/kubernetes-prod-md0-abcde deleted by capi-manager",
			"MachineDeployment t/kubernetes-prod-md0 deleted by helm-controller upgrading release kubernetes-prod to revision 2",
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("evidence\n%+v\nwant\n%+v", got, want)
	}
	text := fmt.Sprint(got)
	for _, part := range []string{"VirtualMachine " + worker + " deleted (phase upgrade, +6.0 s) by " + ht.CAPK.User, "\n    VirtualMachine", "\n    ← KubevirtMachine"} {
		if !strings.Contains(text, part) {
			t.Errorf("told as\n%s\nwithout %q", text, part)
		}
	}
}

func TestBaselineWorkersLive(t *testing.T) {
	check := verify.BaselineWorkersLive(md0)
	for name, c := range map[string]struct {
		happens func(w *world, m ht.Worker)
		want    []string
	}{
		"nothing": {func(*world, ht.Worker) {}, nil},
		"one more beside it": {func(w *world, m ht.Worker) {
			w.Create(ht.CAPI, ht.Object("Machine", "t/kubernetes-prod-md0-abcde-1", ht.Owner(w.md0.Set)))
		}, nil},
		"rolled out, so far without harm": {func(w *world, m ht.Worker) {
			w.Update(ht.Helm, w.md0.Deployment, ht.Set("spec.template.spec.infrastructureRef.name", "other"))
		}, nil},
		"its machine goes": {func(w *world, m ht.Worker) { w.Delete(ht.CAPI, m.VM) }, []string{"VirtualMachine " + worker + " deleted"}},
		"a neighbour's goes": {func(w *world, m ht.Worker) {
			w.Delete(ht.CAPI, w.large.Workers[0].VM)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			c.happens(w, w.md0.Workers[0])
			want := verify.Passed
			if len(c.want) > 0 {
				want = verify.Failed
			}
			wantEvidence(t, check.Judge(w.Read(t)), want, c.want...)
		})
	}
	if r := verify.BaselineWorkersLive(verify.Subject{Namespace: "elsewhere"}).Judge(newWorld().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody is there: %+v", r)
	}
}

func TestNoChurnBetween(t *testing.T) {
	check := verify.NoChurnBetween(md0, "from", "until")
	for name, c := range map[string]struct {
		at   int // how many marks come before
		want verify.Verdict
	}{"before": {0, verify.Passed}, "in between": {1, verify.Failed}, "after": {2, verify.Passed}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			for i, phase := range []string{"from", "until", ""} {
				if i == c.at {
					w.Delete(ht.CAPI, w.md0.Workers[0].VM)
				}
				if phase != "" {
					w.Mark(phase)
				}
			}
			if r := check.Judge(w.Read(t)); r.Verdict != c.want {
				t.Errorf("%s: %v", r.Verdict, r.Evidence)
			}
		})
	}
	if r := check.Judge(newWorld().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("the phases never were: %+v", r)
	}
}
