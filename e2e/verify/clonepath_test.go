package verify_test

import (
	"regexp"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

func TestClonePath(t *testing.T) {
	golden := history.Ref{Resource: "datavolumes.cdi.kubevirt.io", Namespace: "cozy-public", Name: "talos"}
	pod := func(at, kind, claim string, change ...func(*unstructured.Unstructured)) *unstructured.Unstructured {
		return ht.Object("Pod", at, append(change, ht.Label("cdi.kubevirt.io", kind), ht.Set("spec.volumes",
			[]any{map[string]any{"name": "data", "persistentVolumeClaim": map[string]any{"claimName": claim}}}))...)
	}
	type fleet struct {
		*world
		disk, image *unstructured.Unstructured
	}
	// cloned is a fleet whose first worker's disk is a clone of the golden image.
	cloned := func(strategy, fallback string) fleet {
		w := fleet{world: newWorld(), image: ht.Object("PersistentVolumeClaim", "cozy-public/talos")}
		old := w.md0.Workers[0]
		dv := ht.Object("DataVolume", "t/new-disk", ht.Owner(old.VM), ht.Set("spec.source.pvc", map[string]any{"namespace": "cozy-public", "name": "talos"}))
		w.disk = ht.Object("PersistentVolumeClaim", "t/new-disk", ht.Owner(dv), ht.Annotate("cdi.kubevirt.io/cloneType", strategy))
		if fallback != "" {
			ht.Annotate("cdi.kubevirt.io/cloneFallbackReason", fallback)(w.disk)
		}
		importer := pod("cozy-public/importer", "importer", "prime-"+string(w.image.GetUID()))
		w.Create(ht.CDI, w.image, importer).Delete(ht.CDI, importer)
		w.Create(ht.KubeVirt, dv).Create(ht.CDI, w.disk).Update(ht.CDI, w.disk, ht.Set("status.phase", "Bound"))
		return w
	}
	check := verify.ClonePath(md0, golden, 1)

	for _, strategy := range []string{"snapshot", "csi-clone"} {
		wantEvidence(t, check.Judge(cloned(strategy, "").Read(t)), verify.Passed)
	}
	wantEvidence(t, verify.ClonePath(md0, golden, 2).Judge(cloned("csi-clone", "").Read(t)), verify.Failed,
		"disks of t/prod/md0 1 are clones of cozy-public/talos, want 2")
	wantEvidence(t, check.Judge(cloned("copy", "").Read(t)), verify.Failed, `PersistentVolumeClaim t/new-disk was cloned by "copy"`)
	wantEvidence(t, check.Judge(cloned("copy", "No volume expansion is possible").Read(t)), verify.Failed,
		`PersistentVolumeClaim t/new-disk was cloned by "copy": No volume expansion is possible`)

	// A pod that copied is found although it is gone, and although the annotations of the end say nothing of it.
	for name, copier := range map[string]func(w fleet) *unstructured.Unstructured{
		"source pod of the target": func(w fleet) *unstructured.Unstructured {
			return pod("cozy-public/copier", "cdi-clone-source", "talos", ht.Annotate("cdi.kubevirt.io/storage.ownerRef", "t/new-disk"))
		},
		"source pod of the temporary claim": func(w fleet) *unstructured.Unstructured {
			return pod("cozy-public/copier", "cdi-clone-source", "talos", ht.Annotate("cdi.kubevirt.io/storage.ownerRef", "cozy-public/tmp-pvc-"+string(w.disk.GetUID())))
		},
		"upload pod": func(w fleet) *unstructured.Unstructured {
			return pod("cozy-public/copier", "cdi-upload-server", "tmp-pvc-"+string(w.disk.GetUID()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := cloned("csi-clone", "")
			p := copier(w)
			ht.Annotate("upgrade-e2e/network-bytes", "6Gi")(p)
			w.Create(ht.CDI, p).Delete(ht.CDI, p)
			wantEvidence(t, check.Judge(w.Read(t)), verify.Failed,
				"Pod cozy-public/copier copies the data of PersistentVolumeClaim t/new-disk: 6442450944 bytes over the pod network")
		})
	}
	other := cloned("csi-clone", "")
	other.Create(ht.CDI, pod("t/copier", "cdi-upload-server", "somebody-elses"))
	wantEvidence(t, check.Judge(other.Read(t)), verify.Passed)

	twice := cloned("csi-clone", "")
	twice.Create(ht.CDI, pod("cozy-public/importer-again", "importer", "prime-"+string(twice.image.GetUID())))
	wantEvidence(t, check.Judge(twice.Read(t)), verify.Failed, "golden image cozy-public/talos was imported 2 times, want once")

	if r := check.Judge(ht.New().Unsettled().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody waited for the cluster to settle: %+v", r)
	}
}

func TestDisksOn(t *testing.T) {
	w := newWorld()
	on := func(class string) verify.Result { return verify.DisksOn(md0, class).Judge(w.Read(t)) }
	disk := w.md0.Workers[0].PVC
	w.Update(ht.CDI, disk, ht.Set("spec.storageClassName", "replicated"))
	wantEvidence(t, on("replicated"), verify.Passed)
	wantEvidence(t, on("local"), verify.Failed, "PersistentVolumeClaim t/"+disk.GetName()+` is of StorageClass "replicated"`)
	if r := verify.DisksOn(verify.Subject{Namespace: "elsewhere"}, "local").Judge(w.Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody is there: %+v", r)
	}
}

func TestCloneWaits(t *testing.T) {
	golden := history.Ref{Resource: "datavolumes.cdi.kubevirt.io", Namespace: "cozy-public", Name: "talos"}
	check := verify.CloneWaits(md0, golden, regexp.MustCompile("size info missing"))
	clone := func(w *world) *unstructured.Unstructured {
		return ht.Object("DataVolume", "t/new-disk", ht.Owner(w.md0.Workers[0].VM), ht.Set("spec.source.pvc", map[string]any{"namespace": "cozy-public", "name": "talos"}))
	}
	status := func(phase, message string) func(*unstructured.Unstructured) {
		return ht.Set("status", map[string]any{"phase": phase, "conditions": []any{
			map[string]any{"type": "Running", "status": "False", "reason": "Error", "message": message}}})
	}
	for name, c := range map[string]struct {
		status func(*unstructured.Unstructured)
		want   string
	}{
		"waits, and says why":     {status("CloneScheduled", "source/target size info missing"), ""},
		"waits for another cause": {status("CloneScheduled", "quota"), "waits and says Running=False Error quota"},
		"does not wait":           {status("Succeeded", "source/target size info missing"), "does not wait, it is Succeeded"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			dv := clone(w)
			w.Create(ht.KubeVirt, dv).Update(ht.CDI, dv, c.status)
			if c.want == "" {
				wantEvidence(t, check.Judge(w.Read(t)), verify.Passed)
			} else {
				wantEvidence(t, check.Judge(w.Read(t)), verify.Failed, "DataVolume t/new-disk "+c.want)
			}
		})
	}
	wantEvidence(t, check.Judge(newWorld().Read(t)), verify.Failed, "disks of t/prod/md0 no DataVolume asks for cozy-public/talos")
}

func TestAskedWhileImporting(t *testing.T) {
	golden := ht.Object("DataVolume", "cozy-public/talos", ht.Set("status.phase", "ImportInProgress"))
	check := verify.AskedWhileImporting(md0, history.Ref{Resource: "datavolumes.cdi.kubevirt.io", Namespace: "cozy-public", Name: "talos"})
	for name, c := range map[string]struct {
		early bool
		want  verify.Verdict
	}{"while it is imported": {true, verify.Passed}, "afterwards": {false, verify.Inconclusive}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			dv := ht.Object("DataVolume", "t/new-disk", ht.Owner(w.md0.Workers[0].VM), ht.Set("spec.source.pvc", map[string]any{"namespace": "cozy-public", "name": "talos"}))
			golden := golden.DeepCopy()
			w.Create(ht.CDI, golden)
			if c.early {
				w.Create(ht.KubeVirt, dv)
			}
			w.Update(ht.CDI, golden, ht.Set("status.phase", "Succeeded"))
			if !c.early {
				w.Create(ht.KubeVirt, dv)
			}
			if r := check.Judge(w.Read(t)); r.Verdict != c.want {
				t.Errorf("%s: %s", r.Verdict, r.Reason)
			}
		})
	}
	if r := check.Judge(newWorld().Read(t)); r.Verdict != verify.Inconclusive {
		t.Errorf("nobody asked: %+v", r)
	}
}
