package simulate

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Shared says that the cluster has other users: their pods must not land on nodes that are played, nor the run's on theirs.
type Shared struct {
	// Others are namespaces of other users.
	Others []string
	// Owns tells whether a namespace is the run's.
	Owns func(namespace string) bool
}

// owns tells whether stand-ins may act on what is in a namespace.
func (s *Simulation) owns(namespace string) bool {
	return s.o.Shared == nil || s.o.Shared.Owns(namespace)
}

// own has a stand-in look away from other users' namespaces. Of objects without a namespace it has to see itself whose they are.
func (s *Simulation) own(r reconcile.Reconciler) reconcile.Reconciler {
	if s.o.Shared == nil {
		return r
	}
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		if request.Namespace != "" && !s.owns(request.Namespace) {
			return reconcile.Result{}, nil
		}
		return r.Reconcile(ctx, request)
	})
}

// playedKey is the label of a played node on a shared cluster, and its taint.
const playedKey = "upgrade-e2e.cozystack.io/played"

// apart sends the run's pods to the played nodes, which let nobody else's in, and gives the run's claims the platform's default class
// where others have one.
type apart struct {
	sim    *Simulation
	client client.Client
}

// Start implements manager.Runnable.
func (a *apart) Start(ctx context.Context) error {
	const pods, claims = "/pods", "/persistentvolumeclaims"
	handle := http.NewServeMux()
	handle.HandleFunc(pods, review(a.sim.o.Shared.place))
	handle.HandleFunc(claims, review(func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse { return a.provide(ctx, r) }))
	return a.sim.serveWebhooks(ctx, "played-nodes", handle, func(address string, ca []byte) error {
		var hooks []admissionregistrationv1.MutatingWebhook
		for _, path := range []string{pods, claims} {
			hooks = append(hooks, a.hook(address, path, ca))
		}
		return apply(ctx, a.client, &admissionregistrationv1.MutatingWebhookConfiguration{
			TypeMeta:   metav1.TypeMeta{APIVersion: admissionregistrationv1.SchemeGroupVersion.String(), Kind: "MutatingWebhookConfiguration"},
			ObjectMeta: metav1.ObjectMeta{Name: "upgrade-e2e-played-nodes"},
			Webhooks:   hooks,
		})
	})
}

// hook asks about what is created of the resource that path names, in namespaces that were not there before.
func (a *apart) hook(address, path string, ca []byte) admissionregistrationv1.MutatingWebhook {
	resource := strings.TrimPrefix(path, "/")
	return admissionregistrationv1.MutatingWebhook{
		Name: resource + ".upgrade-e2e.cozystack.io", ClientConfig: webhookAt(address, path, ca), SideEffects: ptr.To(admissionregistrationv1.SideEffectClassNone),
		AdmissionReviewVersions: []string{"v1"},
		Rules: []admissionregistrationv1.RuleWithOperations{{
			Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
			Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{resource}}}},
		NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: a.sim.o.Shared.Others}}},
		// As long as somebody may be kept waiting when this run has ended without taking the webhook away. In 2 s a busy machine had not
		// answered for some of the run's own.
		TimeoutSeconds: ptr.To[int32](10),
		FailurePolicy:  ptr.To(admissionregistrationv1.Ignore),
	}
}

// provide answers for a claim: one of the run's that was given others' default class, by the API server, gets the platform's instead,
// which is CDI's default where it can't be Kubernetes'.
func (a *apart) provide(ctx context.Context, r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	if !a.sim.owns(r.Namespace) {
		return allowed()
	}
	var claim corev1.PersistentVolumeClaim
	if err := json.Unmarshal(r.Object.Raw, &claim); err != nil {
		return failure(err)
	}
	var classes storagev1.StorageClassList
	if err := a.client.List(ctx, &classes); err != nil {
		return failure(err)
	}
	theirs, platforms := newest(classes.Items, defaultClassKey), newest(classes.Items, virtDefaultClassKey)
	if theirs == nil || platforms == nil || ptr.Deref(claim.Spec.StorageClassName, "") != theirs.Name {
		return allowed()
	}
	return patched(map[string]any{"op": "add", "path": "/spec/storageClassName", "value": platforms.Name})
}

// place answers for a pod: one of the run's gets what the played nodes ask for.
func (s *Shared) place(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	if !s.Owns(r.Namespace) {
		return allowed()
	}
	var pod corev1.Pod
	if err := json.Unmarshal(r.Object.Raw, &pod); err != nil {
		return failure(err)
	}
	selector := map[string]string{playedKey: "true"}
	for k, v := range pod.Spec.NodeSelector {
		selector[k] = v
	}
	tolerations := append(pod.Spec.Tolerations, corev1.Toleration{Key: playedKey, Operator: corev1.TolerationOpExists})
	return patched(map[string]any{"op": "add", "path": "/spec/nodeSelector", "value": selector},
		map[string]any{"op": "add", "path": "/spec/tolerations", "value": tolerations})
}

func patched(operations ...map[string]any) *admissionv1.AdmissionResponse {
	patch, err := json.Marshal(operations)
	if err != nil {
		return failure(err)
	}
	return &admissionv1.AdmissionResponse{Allowed: true, Patch: patch, PatchType: ptr.To(admissionv1.PatchTypeJSONPatch)}
}

// setApart marks a played node of a shared cluster, and takes its addresses: networks would make routes to it.
func setApart(node *corev1.Node) {
	node.Status.Addresses = nil
	node.Labels[playedKey] = "true"
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: playedKey, Value: "true", Effect: corev1.TaintEffectNoSchedule})
}
