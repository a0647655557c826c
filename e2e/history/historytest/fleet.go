package historytest

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Worker is one machine of a pool and all that stands behind it.
type Worker struct{ Machine, KubevirtMachine, VM, VMI, Pod, DataVolume, PVC, PV *unstructured.Unstructured }

// Pool is a pool of one cluster, as the old platform runs it.
type Pool struct {
	Namespace, Cluster, Name                        string
	Template, Deployment, Set, HealthCheck, Monitor *unstructured.Unstructured
	Workers                                         []Worker
}

// Rendered are the four objects that the chart renders.
func (p *Pool) Rendered() []*unstructured.Unstructured {
	return []*unstructured.Unstructured{p.Template, p.Deployment, p.HealthCheck, p.Monitor}
}

// Objects are all of the pool's objects.
func (p *Pool) Objects() []*unstructured.Unstructured {
	out := append(p.Rendered(), p.Set)
	for _, w := range p.Workers {
		out = append(out, w.Machine, w.KubevirtMachine, w.VM, w.VMI, w.Pod, w.DataVolume, w.PVC, w.PV)
	}
	return out
}

// NewPool makes the objects of a running pool, owned by release kubernetes-<cluster>.
func NewPool(cluster *unstructured.Unstructured, pool, hash string, workers int) *Pool {
	ns, release := cluster.GetNamespace(), cluster.GetName()
	name := release + "-" + pool
	at := func(s string) string { return ns + "/" + s }
	inCluster := Label("cluster.x-k8s.io/cluster-name", release, "cluster.x-k8s.io/deployment-name", name)
	p := &Pool{Namespace: ns, Cluster: release, Name: pool}
	p.Template = Object("KubevirtMachineTemplate", at(name+"-"+hash), OwnedBy(release), Owner(cluster), Set("spec.template.spec.cores", int64(2)))
	p.Deployment = Object("MachineDeployment", at(name), OwnedBy(release), Owner(cluster), Set("spec.clusterName", release), Set("spec.replicas", int64(workers)),
		Set("spec.template.spec.infrastructureRef.name", p.Template.GetName()), Set("spec.template.spec.bootstrap.configRef.name", name),
		Set("spec.template.spec.version", "v1.34.0"), Set("status.observedGeneration", int64(1)))
	p.HealthCheck = Object("MachineHealthCheck", at(name), OwnedBy(release), Set("spec.clusterName", release))
	p.Monitor = Object("WorkloadMonitor", at(name), OwnedBy(release), Set("spec.minReplicas", int64(0)))
	p.Set = Object("MachineSet", at(name+"-abcde"), inCluster, Owner(p.Deployment), Set("spec.clusterName", release), Set("spec.replicas", int64(workers)))
	for i := range workers {
		p.Workers = append(p.Workers, NewWorker(p, fmt.Sprintf("%s-abcde-%d", name, i)))
	}
	return p
}

// NewWorker makes the objects of one running machine.
func NewWorker(p *Pool, name string) Worker {
	at := p.Namespace + "/" + name
	var w Worker
	w.Machine = Object("Machine", at, Owner(p.Set), Set("spec.clusterName", p.Cluster), Label("cluster.x-k8s.io/cluster-name", p.Cluster, "cluster.x-k8s.io/deployment-name", p.Cluster+"-"+p.Name))
	w.KubevirtMachine = Object("KubevirtMachine", at, Owner(w.Machine), Label("cluster.x-k8s.io/cluster-name", p.Cluster))
	w.VM = Object("VirtualMachine", at, Label("capk.cluster.x-k8s.io/kubevirt-machine-name", name, "capk.cluster.x-k8s.io/kubevirt-machine-namespace", p.Namespace),
		Set("spec.runStrategy", "Always"), Set("status.printableStatus", "Running"))
	w.VMI = Object("VirtualMachineInstance", at, Owner(w.VM), Set("status.phase", "Running"), Set("status.nodeName", "node-1"))
	w.Pod = Object("Pod", p.Namespace+"/virt-launcher-"+name, Owner(w.VMI), Label("kubevirt.io", "virt-launcher"), Set("status.phase", "Running"),
		Set("status.containerStatuses", []any{map[string]any{"name": "compute", "restartCount": int64(0)}}))
	w.DataVolume = Object("DataVolume", at+"-disk", Owner(w.VM), Set("status.phase", "Succeeded"))
	w.PVC = Object("PersistentVolumeClaim", at+"-disk", Owner(w.DataVolume), Set("status.phase", "Bound"), Annotate("cdi.kubevirt.io/storage.import.endpoint", "http://factory/x"))
	w.PV = Object("PersistentVolume", "pv-"+name, Set("status.phase", "Bound"),
		Set("spec.claimRef", map[string]any{"namespace": p.Namespace, "name": w.PVC.GetName(), "uid": string(w.PVC.GetUID())}))
	return w
}
