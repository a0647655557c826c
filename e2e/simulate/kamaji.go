package simulate

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	managedByKey = "cluster.x-k8s.io/managed-by"
	nudgeKey     = "upgrade-e2e/nudge" // annotation: what was waited for is there
	apiPort      = 6443

	// Where Cluster API looks for a cluster's kubeconfig.
	kubeconfigSuffix = "-kubeconfig"
	clusterSecret    = "cluster.x-k8s.io/secret"
)

var kamajiStandIn = standIn{
	name: "kamaji", namespace: "kamaji-system", serviceAccount: "kamaji",
	rules: []rbacv1.PolicyRule{
		allow("controlplane.cluster.x-k8s.io", []string{"kamajicontrolplanes"}, "get", "list", "watch"),
		allow("controlplane.cluster.x-k8s.io", []string{"kamajicontrolplanes/status"}, "patch"),
		allow("kamaji.clastix.io", []string{"tenantcontrolplanes"}, "get", "list", "watch", "create", "patch"),
		allow("kamaji.clastix.io", []string{"tenantcontrolplanes/status"}, "patch"),
		allow("cluster.x-k8s.io", []string{"clusters"}, "get", "list", "watch"),
		allow("cluster.x-k8s.io", []string{"machinesets"}, "get", "list", "watch", "patch"), // nudge
		allow("infrastructure.cluster.x-k8s.io", []string{"kubevirtclusters"}, "get", "list", "watch", "patch"),
		allow("infrastructure.cluster.x-k8s.io", []string{"kubevirtclusters/status"}, "patch"),
		allow("", []string{"services"}, "get", "list", "watch", "create"),
		allow("", []string{"secrets"}, "get", "create", "patch"),
	},
	setup: setupKamaji,
}

// kamaji plays Kamaji and its Cluster API provider: a KamajiControlPlane becomes ready as soon as its Cluster is there,
// with the tenants' shared API behind it. No control plane is deployed, no certificate follows certSANs; they are only
// copied to the TenantControlPlane as the provider does.
type kamaji struct {
	client client.Client
	direct client.Client // Secrets are not worth a cache of every Secret in the cluster
	sim    *Simulation
}

func setupKamaji(s *Simulation, mgr manager.Manager) error {
	direct, err := client.New(mgr.GetConfig(), client.Options{Scheme: scheme, Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return err
	}
	k := &kamaji{client: mgr.GetClient(), direct: direct, sim: s}
	return ctrl.NewControllerManagedBy(mgr).Named("kamaji").For(object(controlPlaneKind)).
		Watches(object(clusterKind), handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return controlPlaneOf(o.(*unstructured.Unstructured))
		})).
		Watches(object(kubevirtCluster), handler.EnqueueRequestsFromMapFunc(k.infraToControlPlane)).
		Watches(&corev1.Service{}, handler.EnqueueRequestForOwner(scheme, mgr.GetRESTMapper(), object(controlPlaneKind))).
		Watches(object(tenantPlaneKind), handler.EnqueueRequestForOwner(scheme, mgr.GetRESTMapper(), object(controlPlaneKind))).
		Watches(object(machineSetKind), handler.EnqueueRequestsFromMapFunc(nobody)).
		Complete(s.own(k))
}

// controlPlaneOf is the control plane that a Cluster refers to.
func controlPlaneOf(cluster *unstructured.Unstructured) []reconcile.Request {
	name := text(cluster, "spec", "controlPlaneRef", "name")
	if name == "" || text(cluster, "spec", "controlPlaneRef", "kind") != controlPlaneKind.Kind {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: cluster.GetNamespace(), Name: name}}}
}

func (k *kamaji) infraToControlPlane(ctx context.Context, infra client.Object) []reconcile.Request {
	list := objectList(clusterKind)
	if err := k.client.List(ctx, list, client.InNamespace(infra.GetNamespace())); err != nil {
		return nil // the cache ends with the run
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if text(&list.Items[i], "spec", "infrastructureRef", "name") == infra.GetName() {
			requests = append(requests, controlPlaneOf(&list.Items[i])...)
		}
	}
	return requests
}

// Reconcile implements reconcile.Reconciler for KamajiControlPlanes.
func (k *kamaji) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	kcp := object(controlPlaneKind)
	if err := k.client.Get(ctx, req.NamespacedName, kcp); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if kcp.GetDeletionTimestamp() != nil {
		return ctrl.Result{}, nil // what it owns is collected
	}
	cluster, err := k.clusterOf(ctx, kcp)
	if err != nil || cluster == nil {
		return ctrl.Result{}, err
	}
	// The order matters: CAPI connects as soon as the infrastructure is ready, and tries again only after 30 s.
	address, err := k.service(ctx, kcp)
	if err != nil || address == "" {
		return ctrl.Result{}, err // the Service's own event comes back
	}
	for _, ensure := range []func() error{
		func() error { return k.secrets(ctx, kcp, cluster) },
		func() error { return k.tenantPlane(ctx, kcp, address) },
		func() error { return k.status(ctx, kcp) },
		func() error { return k.infrastructure(ctx, cluster, address) },
		func() error { return k.nudge(ctx, cluster) },
	} {
		if err := ensure(); err != nil {
			return ctrl.Result{}, err
		}
	}
	return ctrl.Result{}, nil
}

// clusterOf finds the Cluster that refers to a control plane, nil while there is none.
func (k *kamaji) clusterOf(ctx context.Context, kcp *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	list := objectList(clusterKind)
	if err := k.client.List(ctx, list, client.InNamespace(kcp.GetNamespace())); err != nil {
		return nil, err
	}
	for i := range list.Items {
		for _, r := range controlPlaneOf(&list.Items[i]) {
			if r.Name == kcp.GetName() {
				return &list.Items[i], nil
			}
		}
	}
	return nil, nil
}

// service ensures the Service of the tenant's API, which leads nowhere, and returns its address.
func (k *kamaji) service(ctx context.Context, kcp *unstructured.Unstructured) (string, error) {
	svc := &corev1.Service{}
	err := k.client.Get(ctx, key(kcp), svc)
	if apierrors.IsNotFound(err) {
		svc = &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: kcp.GetNamespace(), Name: kcp.GetName(), OwnerReferences: ownedBy(kcp),
				Labels: map[string]string{"kamaji.clastix.io/name": kcp.GetName()}},
			Spec: corev1.ServiceSpec{
				Selector: map[string]string{"kamaji.clastix.io/name": kcp.GetName()},
				Ports: []corev1.ServicePort{
					{Name: "kube-apiserver", Port: apiPort, TargetPort: intstr.FromInt32(apiPort)},
					{Name: "konnectivity-server", Port: 8132, TargetPort: intstr.FromInt32(8132)},
				},
			},
		}
		if err = k.client.Create(ctx, svc); apierrors.IsAlreadyExists(err) {
			return "", nil
		}
	}
	if err != nil {
		return "", fmt.Errorf("service of control plane %s: %w", key(kcp), err)
	}
	return svc.Spec.ClusterIP, nil
}

// secrets ensures the tenant's certificate authority and kubeconfigs. After a restore they lead to the API server of
// another run, so their content is compared.
func (k *kamaji) secrets(ctx context.Context, kcp, cluster *unstructured.Unstructured) error {
	config := k.sim.tenant.kubeconfig
	labels := map[string]string{clusterNameLabel: cluster.GetName()}
	for _, s := range []corev1.Secret{
		{ObjectMeta: metav1.ObjectMeta{Name: kcp.GetName() + "-ca"}, Type: corev1.SecretTypeOpaque,
			// Kamaji's keys, and those that Cluster API's own tools look for.
			Data: map[string][]byte{"ca.crt": k.sim.tenant.ca.certPEM, "ca.key": k.sim.tenant.ca.keyPEM,
				"tls.crt": k.sim.tenant.ca.certPEM, "tls.key": k.sim.tenant.ca.keyPEM}},
		{ObjectMeta: metav1.ObjectMeta{Name: kcp.GetName() + "-admin-kubeconfig"}, Type: corev1.SecretTypeOpaque,
			Data: map[string][]byte{"admin.conf": config, "admin.svc": config, "super-admin.conf": config, "super-admin.svc": config}},
		{ObjectMeta: metav1.ObjectMeta{Name: cluster.GetName() + kubeconfigSuffix, Labels: labels}, Type: clusterSecret,
			Data: map[string][]byte{"value": config}},
	} {
		s.Namespace, s.OwnerReferences = kcp.GetNamespace(), ownedBy(kcp)
		live := &corev1.Secret{}
		err := k.direct.Get(ctx, key(&s), live)
		switch {
		case apierrors.IsNotFound(err):
			err = k.direct.Create(ctx, &s)
		case err == nil && !equality.Semantic.DeepEqual(live.Data, s.Data):
			old := live.DeepCopy()
			maps.Copy(live.Data, s.Data)
			err = k.direct.Patch(ctx, live, client.MergeFrom(old))
		}
		if err != nil {
			return fmt.Errorf("secret %s of control plane %s: %w", s.Name, key(kcp), err)
		}
	}
	return nil
}

// TenantsMoved returns when every tenant's kubeconfig leads to this run's API: at once on a new cluster, and on a restored
// one when all of them were written anew.
func (s *Simulation) TenantsMoved(ctx context.Context) error {
	c, err := client.New(s.o.Admin, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	var elsewhere []string
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		list := &corev1.SecretList{}
		if err := c.List(ctx, list, client.HasLabels{clusterNameLabel}); err != nil {
			return false, err
		}
		elsewhere = nil
		for _, secret := range list.Items {
			if config, ok := secret.Data["value"]; ok && secret.Type == clusterSecret && strings.HasSuffix(secret.Name, kubeconfigSuffix) &&
				!bytes.Equal(config, s.tenant.kubeconfig) {
				elsewhere = append(elsewhere, secret.Namespace+"/"+secret.Name)
			}
		}
		return len(elsewhere) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("wait until the tenants' kubeconfigs lead to this run's API (%d do not, %v): %w", len(elsewhere), elsewhere, err)
	}
	return nil
}

// tenantPlane ensures the TenantControlPlane that the provider makes out of a KamajiControlPlane.
func (k *kamaji) tenantPlane(ctx context.Context, kcp *unstructured.Unstructured, address string) error {
	spec := map[string]any{
		"kubernetes":     map[string]any{"version": text(kcp, "spec", "version")},
		"controlPlane":   map[string]any{"deployment": map[string]any{"replicas": replicas(kcp)}},
		"networkProfile": map[string]any{"port": int64(apiPort), "certSANs": sans(kcp)},
	}
	tcp := object(tenantPlaneKind)
	err := k.client.Get(ctx, key(kcp), tcp)
	if apierrors.IsNotFound(err) {
		tcp.SetNamespace(kcp.GetNamespace())
		tcp.SetName(kcp.GetName())
		tcp.SetOwnerReferences(ownedBy(kcp))
		set(tcp, spec, "spec")
		err = client.IgnoreAlreadyExists(k.client.Create(ctx, tcp))
	}
	if err != nil {
		return fmt.Errorf("TenantControlPlane of %s: %w", key(kcp), err)
	}
	old := tcp.DeepCopy()
	set(tcp, spec, "spec")
	if err := patchIfChanged(ctx, k.client, old, tcp); err != nil {
		return fmt.Errorf("update TenantControlPlane %s: %w", key(kcp), err)
	}
	old = tcp.DeepCopy()
	set(tcp, fmt.Sprintf("%s:%d", address, apiPort), "status", "controlPlaneEndpoint")
	set(tcp, map[string]any{"status": "Ready", "version": text(kcp, "spec", "version")}, "status", "kubernetesResources", "version")
	if err := patchIfChanged(ctx, k.client.Status(), old, tcp); err != nil {
		return fmt.Errorf("update status of TenantControlPlane %s: %w", key(kcp), err)
	}
	return nil
}

// status reports the control plane ready, in the version that it asks for.
func (k *kamaji) status(ctx context.Context, kcp *unstructured.Unstructured) error {
	old := kcp.DeepCopy()
	n := replicas(kcp)
	for field, value := range map[string]any{
		"initialized": true, "ready": true, "externalManagedControlPlane": true, "version": text(kcp, "spec", "version"),
		"replicas": n, "readyReplicas": n, "updatedReplicas": n, "unavailableReplicas": int64(0),
		"selector": "kamaji.clastix.io/name=" + kcp.GetName(), "observedGeneration": kcp.GetGeneration(),
	} {
		set(kcp, value, "status", field)
	}
	conditions, _, _ := unstructured.NestedSlice(kcp.Object, "status", "conditions")
	set(kcp, setCondition(conditions, map[string]any{"type": "Ready", "status": "True"}, time.Now()), "status", "conditions")
	if err := patchIfChanged(ctx, k.client.Status(), old, kcp); err != nil {
		return fmt.Errorf("report control plane %s ready: %w", key(kcp), err)
	}
	return nil
}

// infrastructure gives the KubevirtCluster the endpoint of the tenant's API and reports it ready. The annotation keeps
// CAPK from doing so itself; Cozystack's chart brings it.
func (k *kamaji) infrastructure(ctx context.Context, cluster *unstructured.Unstructured, address string) error {
	infra := object(kubevirtCluster)
	name := client.ObjectKey{Namespace: cluster.GetNamespace(), Name: text(cluster, "spec", "infrastructureRef", "name")}
	if err := k.client.Get(ctx, name, infra); err != nil {
		return client.IgnoreNotFound(err) // its event comes back
	}
	if infra.GetDeletionTimestamp() != nil {
		return nil
	}
	old := infra.DeepCopy()
	annotations := infra.GetAnnotations()
	if _, ok := annotations[managedByKey]; !ok {
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[managedByKey] = "kamaji"
		infra.SetAnnotations(annotations)
	}
	if text(infra, "spec", "controlPlaneEndpoint", "host") == "" {
		set(infra, map[string]any{"host": address, "port": int64(apiPort)}, "spec", "controlPlaneEndpoint")
	}
	if err := patchIfChanged(ctx, k.client, old, infra); err != nil {
		return fmt.Errorf("set endpoint of KubevirtCluster %s: %w", name, err)
	}
	old = infra.DeepCopy()
	set(infra, true, "status", "ready")
	if err := patchIfChanged(ctx, k.client.Status(), old, infra); err != nil {
		return fmt.Errorf("report KubevirtCluster %s ready: %w", name, err)
	}
	return nil
}

// nudge wakes MachineSets that looked before the control plane was ready: CAPI lets them wait for 15 s.
func (k *kamaji) nudge(ctx context.Context, cluster *unstructured.Unstructured) error {
	if !k.sim.nudge.Load() {
		return nil
	}
	list := objectList(machineSetKind)
	if err := k.client.List(ctx, list, client.InNamespace(cluster.GetNamespace()), client.MatchingLabels{clusterNameLabel: cluster.GetName()}); err != nil {
		return err
	}
	for i := range list.Items {
		ms := &list.Items[i]
		want, _, _ := unstructured.NestedInt64(ms.Object, "spec", "replicas")
		have, _, _ := unstructured.NestedInt64(ms.Object, "status", "replicas")
		if have >= want || ms.GetAnnotations()[nudgeKey] != "" {
			continue
		}
		if err := k.client.Patch(ctx, ms, merge(map[string]any{"metadata": map[string]any{"annotations": map[string]any{nudgeKey: "control-plane"}}})); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("nudge MachineSet %s: %w", key(ms), err)
		}
	}
	return nil
}

func replicas(kcp *unstructured.Unstructured) int64 {
	if n, ok, _ := unstructured.NestedInt64(kcp.Object, "spec", "replicas"); ok {
		return n
	}
	return 1
}

func sans(kcp *unstructured.Unstructured) []any {
	list, _, _ := unstructured.NestedSlice(kcp.Object, "spec", "network", "certSANs")
	return list
}

func ownedBy(kcp *unstructured.Unstructured) []metav1.OwnerReference {
	return []metav1.OwnerReference{*metav1.NewControllerRef(kcp, controlPlaneKind)}
}

// patcher is a client or its status writer.
type patcher[O any] interface {
	Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...O) error
}

// patchIfChanged writes the difference between old and updated, if there is one.
func patchIfChanged[O any](ctx context.Context, p patcher[O], old, updated *unstructured.Unstructured) error {
	if equality.Semantic.DeepEqual(old.Object, updated.Object) {
		return nil
	}
	return p.Patch(ctx, updated, client.MergeFrom(old))
}
