package simulate_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/components"
	"cozystack.io/upgrade-e2e/e2e/process"
)

// One cluster with one pool, as Cozystack's charts render them.
const pool = `
apiVersion: v1
kind: Namespace
metadata: {name: tenant-pool}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: replicated, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: linstor.csi.linbit.com
allowVolumeExpansion: true
---
apiVersion: cluster.x-k8s.io/v1beta1
kind: Cluster
metadata: {name: kubernetes-one, namespace: tenant-pool}
spec:
  clusterNetwork: {pods: {cidrBlocks: [10.243.0.0/16]}, services: {cidrBlocks: [10.95.0.0/16]}}
  controlPlaneRef: {apiVersion: controlplane.cluster.x-k8s.io/v1alpha1, kind: KamajiControlPlane, name: kubernetes-one, namespace: tenant-pool}
  infrastructureRef: {apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1, kind: KubevirtCluster, name: kubernetes-one, namespace: tenant-pool}
---
apiVersion: controlplane.cluster.x-k8s.io/v1alpha1
kind: KamajiControlPlane
metadata: {name: kubernetes-one, namespace: tenant-pool, labels: {cluster.x-k8s.io/cluster-name: kubernetes-one}}
spec: {version: v1.33.1, replicas: 2, network: {serviceType: ClusterIP, certSANs: [kubernetes-one]}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1
kind: KubevirtCluster
metadata: {name: kubernetes-one, namespace: tenant-pool, annotations: {cluster.x-k8s.io/managed-by: kamaji}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1
kind: KubevirtMachineTemplate
metadata: {name: kubernetes-one-md0-abcdef, namespace: tenant-pool}
spec:
  template:
    spec:
      virtualMachineBootstrapCheck: {checkStrategy: none}
      virtualMachineTemplate:
        metadata: {namespace: tenant-pool}
        spec:
          runStrategy: Always
          dataVolumeTemplates:
          - metadata: {name: disk-system, annotations: {cdi.kubevirt.io/storage.usePopulator: "false"}}
            spec:
              source: {http: {url: https://factory.example.org/image/schematic/v1.10.1/openstack-amd64.raw.xz}}
              pvc: {accessModes: [ReadWriteMany], volumeMode: Block, resources: {requests: {storage: 20Gi}}}
          template:
            metadata: {annotations: {kubevirt.io/allow-pod-bridge-network-live-migration: "true"}}
            spec:
              evictionStrategy: External
              domain:
                cpu: {cores: 2}
                memory: {guest: 4Gi}
                devices: {disks: [{name: system, disk: {bus: virtio}}], interfaces: [{name: default, bridge: {}}]}
              networks: [{name: default, pod: {}}]
              volumes: [{name: system, dataVolume: {name: disk-system}}]
---
apiVersion: bootstrap.cluster.x-k8s.io/v1alpha3
kind: TalosConfigTemplate
metadata: {name: kubernetes-one-md0, namespace: tenant-pool}
spec:
  template:
    spec:
      generateType: none
      talosVersion: v1.10.1
      data: |
        version: v1alpha1
        machine: {type: worker}
        cluster: {clusterName: kubernetes-one}
---
apiVersion: cluster.x-k8s.io/v1beta1
kind: MachineDeployment
metadata: {name: kubernetes-one-md0, namespace: tenant-pool, labels: {cluster.x-k8s.io/cluster-name: kubernetes-one}}
spec:
  clusterName: kubernetes-one
  replicas: 1
  selector: {matchLabels: {cluster.x-k8s.io/cluster-name: kubernetes-one, cluster.x-k8s.io/deployment-name: kubernetes-one-md0}}
  template:
    metadata: {labels: {cluster.x-k8s.io/cluster-name: kubernetes-one, cluster.x-k8s.io/deployment-name: kubernetes-one-md0}}
    spec:
      clusterName: kubernetes-one
      version: v1.33.1
      bootstrap: {configRef: {apiVersion: bootstrap.cluster.x-k8s.io/v1alpha3, kind: TalosConfigTemplate, name: kubernetes-one-md0, namespace: tenant-pool}}
      infrastructureRef: {apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1, kind: KubevirtMachineTemplate, name: kubernetes-one-md0-abcdef, namespace: tenant-pool}
`

const poolNamespace = "tenant-pool"

// TestPool brings a worker pool to Running with every real controller, disturbs it, and takes it down again.
func TestPool(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a cluster with all components")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	built, err := cluster.FindPrograms(root)
	if err != nil {
		t.Skip(err)
	}
	dir := filepath.Join(t.ArtifactDir(), "run") // with -artifacts the logs stay
	run, err := process.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	t.Cleanup(cancel)
	c := cluster.NewEmbedded(run, built)
	if _, err := c.Create(ctx); err != nil {
		t.Fatal(err)
	}
	simCtx, stop := context.WithCancel(ctx)
	installed, err := components.Install(simCtx, c, built, components.Options{Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := installed.Simulation.Wait(); err != nil {
			t.Error(err)
		}
	})
	installed.Simulation.SetNudge(true)
	w := &poolWatch{t: t, told: map[string]bool{}}
	if w.client, err = client.New(c.KubernetesRestConfig(), client.Options{}); err != nil {
		t.Fatal(err)
	}
	if w.tenant, err = client.New(installed.Simulation.TenantConfig(), client.Options{}); err != nil {
		t.Fatal(err)
	}

	w.began = time.Now()
	for _, doc := range strings.Split(pool, "\n---\n") {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(doc), &u.Object); err != nil {
			t.Fatal(err)
		}
		if err := w.client.Create(ctx, u); err != nil {
			t.Fatalf("%s %s: %v", u.GetKind(), u.GetName(), err)
		}
	}
	first := w.running(ctx, "")
	vm := w.get(ctx, "kubevirt.io", "v1", "VirtualMachineInstance", first.GetName())
	if phase, _, _ := unstructured.NestedString(vm.Object, "status", "phase"); phase != "Running" {
		t.Errorf("VMI is %s", phase)
	}

	t.Log("the guest migrates to the other host")
	w.began = time.Now()
	before, _, _ := unstructured.NestedString(vm.Object, "status", "nodeName")
	migration := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
		"metadata": map[string]any{"namespace": poolNamespace, "name": "move"}, "spec": map[string]any{"vmiName": vm.GetName()}}}
	if err := w.client.Create(ctx, migration); err != nil {
		t.Fatal(err)
	}
	w.await(ctx, "migration Succeeded", func(ctx context.Context) error {
		m := w.get(ctx, "kubevirt.io", "v1", "VirtualMachineInstanceMigration", "move")
		phase, _, _ := unstructured.NestedString(m.Object, "status", "phase")
		w.note("migration %s", phase)
		if phase != "Succeeded" {
			return fmt.Errorf("migration is %q", phase)
		}
		return nil
	})
	moved := w.get(ctx, "kubevirt.io", "v1", "VirtualMachineInstance", vm.GetName())
	after, _, _ := unstructured.NestedString(moved.Object, "status", "nodeName")
	if moved.GetUID() != vm.GetUID() || after == before {
		t.Errorf("VMI %s on %s, was %s on %s", moved.GetUID(), after, vm.GetUID(), before)
	}

	t.Log("the machine is deleted; a replacement comes")
	w.began = time.Now()
	if err := w.client.Delete(ctx, first); err != nil {
		t.Fatal(err)
	}
	second := w.running(ctx, first.GetName())
	w.gone(ctx, first.GetName())

	t.Log("without nudging the guest powers off; its VM starts it again and the machine stays")
	installed.Simulation.SetNudge(false)
	w.began = time.Now()
	old := w.get(ctx, "kubevirt.io", "v1", "VirtualMachineInstance", second.GetName()).GetUID()
	if err := installed.Simulation.ShutdownGuest(ctx, poolNamespace, second.GetName()); err != nil {
		t.Fatal(err)
	}
	w.await(ctx, "another VMI to run", func(ctx context.Context) error {
		v := w.get(ctx, "kubevirt.io", "v1", "VirtualMachineInstance", second.GetName())
		if phase, _, _ := unstructured.NestedString(v.Object, "status", "phase"); v.GetUID() == old || phase != "Running" {
			return fmt.Errorf("VMI %s is %q", v.GetUID(), phase)
		}
		return nil
	})

	t.Log("the pool goes to 0")
	w.began = time.Now()
	md := w.get(ctx, "cluster.x-k8s.io", "v1beta1", "MachineDeployment", "kubernetes-one-md0")
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"replicas":0}}`))
	if err := w.client.Patch(ctx, md, patch); err != nil {
		t.Fatal(err)
	}
	w.gone(ctx, second.GetName())
}

// poolWatch looks at the pool from outside.
type poolWatch struct {
	t      *testing.T
	client client.Client // management cluster
	tenant client.Client // tenants' API
	began  time.Time
	told   map[string]bool
}

func (w *poolWatch) get(ctx context.Context, group, version, kind, name string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: version, Kind: kind})
	if err := w.client.Get(ctx, client.ObjectKey{Namespace: poolNamespace, Name: name}, u); err != nil && !apierrors.IsNotFound(err) {
		w.t.Fatal(err)
	}
	return u
}

func (w *poolWatch) list(ctx context.Context, group, version, kind string) []unstructured.Unstructured {
	l := &unstructured.UnstructuredList{}
	l.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: version, Kind: kind + "List"})
	if err := w.client.List(ctx, l, client.InNamespace(poolNamespace)); err != nil {
		w.t.Fatal(err)
	}
	return l.Items
}

// note logs once when something was first seen.
func (w *poolWatch) note(format string, a ...any) {
	line := fmt.Sprintf(format, a...)
	if !w.told[line] {
		w.told[line] = true
		w.t.Logf("%6.2f s  %s", time.Since(w.began).Seconds(), line)
	}
}

func (w *poolWatch) await(ctx context.Context, what string, ok func(context.Context) error) {
	w.t.Helper()
	err := errors.New("not looked yet")
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		w.survey(ctx)
		if err = ok(ctx); err == nil {
			w.note("%s", what)
			return
		}
	}
	for _, kind := range []string{"VirtualMachineInstance", "Pod"} {
		group, version := map[string]string{"VirtualMachineInstance": "kubevirt.io"}[kind], "v1"
		for _, o := range w.list(ctx, group, version, kind) {
			status, _ := yaml.Marshal(o.Object["status"])
			w.t.Logf("%s %s:\n%s", kind, o.GetName(), status)
		}
	}
	w.t.Fatalf("waited in vain for %s: %v", what, err)
}

// survey logs the steps of every object on the way to a running machine.
func (w *poolWatch) survey(ctx context.Context) {
	for _, k := range []struct{ group, version, kind, phase string }{
		{"cluster.x-k8s.io", "v1beta1", "Cluster", "phase"}, {"cluster.x-k8s.io", "v1beta1", "MachineSet", ""}, {"cluster.x-k8s.io", "v1beta1", "Machine", "phase"},
		{"infrastructure.cluster.x-k8s.io", "v1alpha1", "KubevirtCluster", "ready"}, {"infrastructure.cluster.x-k8s.io", "v1alpha1", "KubevirtMachine", "ready"},
		{"bootstrap.cluster.x-k8s.io", "v1alpha3", "TalosConfig", "ready"}, {"kubevirt.io", "v1", "VirtualMachine", "printableStatus"},
		{"kubevirt.io", "v1", "VirtualMachineInstance", "phase"}, {"cdi.kubevirt.io", "v1beta1", "DataVolume", "phase"}, {"", "v1", "Pod", "phase"},
	} {
		for _, o := range w.list(ctx, k.group, k.version, k.kind) {
			state, _, _ := unstructured.NestedFieldNoCopy(o.Object, "status", k.phase)
			w.note("%s %s %v", k.kind, o.GetName(), state)
		}
	}
}

// running waits for the one machine of the pool, another one than not, and returns it.
func (w *poolWatch) running(ctx context.Context, not string) *unstructured.Unstructured {
	w.t.Helper()
	var found *unstructured.Unstructured
	w.await(ctx, "machine Running with nodeRef", func(ctx context.Context) error {
		for _, m := range w.list(ctx, "cluster.x-k8s.io", "v1beta1", "Machine") {
			phase, _, _ := unstructured.NestedString(m.Object, "status", "phase")
			node, _, _ := unstructured.NestedString(m.Object, "status", "nodeRef", "name")
			if m.GetName() != not && phase == "Running" && node == m.GetName() {
				found = &m
				return nil
			}
		}
		return errors.New("no such machine")
	})
	return found
}

// gone waits until nothing is left of a machine.
func (w *poolWatch) gone(ctx context.Context, name string) {
	w.t.Helper()
	w.await(ctx, "machine "+name+" and all that carried it gone", func(ctx context.Context) error {
		for _, k := range []schema.GroupVersionKind{
			{Group: "cluster.x-k8s.io", Version: "v1beta1", Kind: "Machine"}, {Group: "infrastructure.cluster.x-k8s.io", Version: "v1alpha1", Kind: "KubevirtMachine"},
			{Group: "kubevirt.io", Version: "v1", Kind: "VirtualMachine"}, {Group: "kubevirt.io", Version: "v1", Kind: "VirtualMachineInstance"},
		} {
			if w.get(ctx, k.Group, k.Version, k.Kind, name).GetUID() != "" {
				return fmt.Errorf("%s is there", k.Kind)
			}
		}
		var pods corev1.PodList
		if err := w.client.List(ctx, &pods, client.InNamespace(poolNamespace)); err != nil {
			return err
		}
		for _, p := range pods.Items {
			if strings.HasPrefix(p.Name, "virt-launcher-"+name) {
				return fmt.Errorf("pod %s is there", p.Name)
			}
		}
		if dv := w.get(ctx, "cdi.kubevirt.io", "v1beta1", "DataVolume", name+"-disk-system"); dv.GetUID() != "" {
			return errors.New("its disk is there")
		}
		if err := w.tenant.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("its node is there: %v", err)
		}
		return nil
	})
}
