package simulate

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// TestTenant makes a control plane and a worker's Node with nobody but the stand-ins, the test playing CAPI, CAPK and
// KubeVirt.
func TestTenant(t *testing.T) {
	ctx, _, o := embedded(t)
	var paths []string
	for _, name := range []string{"cluster-api", "cluster-api-provider-kubevirt"} {
		path, err := filepath.Abs("../../bin/manifests/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); err != nil {
			t.Skipf("the CRDs of %s are not built; run `make tools`", name)
		}
		paths = append(paths, path)
	}
	guests := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "virtualmachineinstances.kubevirt.io"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{Group: vmiKind.Group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "virtualmachineinstances", Kind: vmiKind.Kind},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: vmiKind.Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: ptr.To(true)}}}}}}
	if _, err := envtest.InstallCRDs(o.Admin, envtest.CRDInstallOptions{Paths: paths, CRDs: []*apiextensionsv1.CustomResourceDefinition{guests}}); err != nil {
		t.Fatal(err)
	}
	o.NudgeCAPK = true
	simCtx, stop := context.WithCancel(ctx)
	sim, err := start(simCtx, o, []standIn{kamajiStandIn, tenantNodeStandIn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := sim.Wait(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.New(o.Admin, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	create := func(o client.Object) {
		t.Helper()
		if err := c.Create(ctx, o); err != nil {
			t.Fatalf("%T %s: %v", o, o.GetName(), err)
		}
	}
	const namespace, name = "tenant-a", "kubernetes-one"
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	cluster, plane, infra := object(clusterKind), object(controlPlaneKind), object(kubevirtCluster)
	for _, u := range []*unstructured.Unstructured{cluster, plane, infra} {
		u.SetNamespace(namespace)
		u.SetName(name)
	}
	reference := func(u *unstructured.Unstructured) map[string]any {
		return map[string]any{"apiVersion": u.GetAPIVersion(), "kind": u.GetKind(), "name": name, "namespace": namespace}
	}
	set(cluster, map[string]any{"controlPlaneRef": reference(plane), "infrastructureRef": reference(infra)}, "spec")
	set(plane, map[string]any{"version": "v1.33.1", "replicas": int64(2), "network": map[string]any{"certSANs": []any{"one"}}}, "spec")
	infra.SetAnnotations(map[string]string{managedByKey: "kamaji"})
	create(infra)
	create(plane)
	create(cluster)
	eventually(ctx, t, "control plane and infrastructure to be ready", func(ctx context.Context) bool {
		return c.Get(ctx, key(plane), plane) == nil && truth(plane, "status", "ready") && truth(plane, "status", "initialized") &&
			c.Get(ctx, key(infra), infra) == nil && truth(infra, "status", "ready")
	})
	if v := text(plane, "status", "version"); v != "v1.33.1" {
		t.Errorf("version %s", v)
	}
	svc, secret := &corev1.Service{}, &corev1.Secret{}
	if err := c.Get(ctx, key(plane), svc); err != nil || svc.Spec.ClusterIP == "" || svc.Spec.ClusterIP != text(infra, "spec", "controlPlaneEndpoint", "host") {
		t.Errorf("service %s, endpoint %s, %v", svc.Spec.ClusterIP, text(infra, "spec", "controlPlaneEndpoint", "host"), err)
	}
	for secretName, field := range map[string]string{name + "-kubeconfig": "value", name + "-admin-kubeconfig": "super-admin.svc", name + "-ca": "tls.crt"} {
		if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: secretName}, secret); err != nil || len(secret.Data[field]) == 0 {
			t.Errorf("secret %s lacks %s: %v", secretName, field, err)
		}
		if secretName != name+"-kubeconfig" {
			continue
		}
		config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data["value"])
		if err != nil {
			t.Fatal(err)
		}
		tenant, err := client.New(config, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := tenant.Get(ctx, client.ObjectKey{Name: "kube-system"}, &corev1.Namespace{}); err != nil {
			t.Errorf("the tenant's API: %v", err)
		}
	}

	if err := c.Get(ctx, key(plane), plane); err != nil {
		t.Fatal(err)
	}
	old := plane.DeepCopy()
	set(plane, []any{"one", svc.Spec.ClusterIP}, "spec", "network", "certSANs")
	if err := c.Patch(ctx, plane, client.MergeFrom(old)); err != nil {
		t.Fatal(err)
	}
	tcp := object(tenantPlaneKind)
	eventually(ctx, t, "certSANs to be passed on", func(ctx context.Context) bool {
		if err := c.Get(ctx, key(plane), tcp); err != nil {
			return false
		}
		list, _, _ := unstructured.NestedStringSlice(tcp.Object, "spec", "networkProfile", "certSANs")
		return len(list) == 2 && list[1] == svc.Spec.ClusterIP
	})

	t.Run("worker", func(t *testing.T) {
		machine, infraMachine, guest := object(machineKind), object(kubevirtMachine), object(vmiKind)
		for _, u := range []*unstructured.Unstructured{machine, infraMachine, guest} {
			u.SetNamespace(namespace)
			u.SetName("worker-1")
		}
		set(machine, map[string]any{"clusterName": name, "version": "v1.33.1", "bootstrap": map[string]any{"dataSecretName": "x"}, "infrastructureRef": reference(infraMachine)}, "spec")
		create(machine)
		infraMachine.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(machine, machineKind)})
		set(infraMachine, map[string]any{"virtualMachineTemplate": map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"domain": map[string]any{"devices": map[string]any{}}}}}}}, "spec")
		create(infraMachine)
		guest.SetLabels(map[string]string{machineNameLabel: "worker-1", machineNamespace: namespace})
		create(guest)
		tenant, err := client.New(sim.TenantConfig(), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ready := func(status string) {
			t.Helper()
			old := guest.DeepCopy()
			set(guest, map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": status}}}, "status")
			if err := c.Patch(ctx, guest, client.MergeFrom(old)); err != nil {
				t.Fatal(err)
			}
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1"}}
		is := func(want bool) func(context.Context) bool {
			return func(ctx context.Context) bool {
				return tenant.Get(ctx, key(node), node) == nil && len(node.Status.Conditions) > 0 && readyNode(node.Status.Conditions) == want
			}
		}
		ready("True")
		eventually(ctx, t, "node to be Ready", is(true))
		if node.Status.NodeInfo.KubeletVersion != "v1.33.1" {
			t.Errorf("kubelet %s", node.Status.NodeInfo.KubeletVersion)
		}
		eventually(ctx, t, "nudge", func(ctx context.Context) bool {
			return c.Get(ctx, key(infraMachine), infraMachine) == nil && infraMachine.GetAnnotations()[nudgeKey] == string(guest.GetUID())
		})
		ready("False")
		eventually(ctx, t, "node to be unknown", is(false))
		ready("True")
		eventually(ctx, t, "node to be Ready again", is(true))
		if err := c.Delete(ctx, infraMachine); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "node to go", func(ctx context.Context) bool { return apierrors.IsNotFound(tenant.Get(ctx, key(node), node)) })
	})
}
