package simulate

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func TestOnASharedClusterOnlyTheRunsPodsGoToPlayedNodes(t *testing.T) {
	shared := &Shared{Owns: func(namespace string) bool { return namespace == "ours" }}
	pod := corev1.Pod{Spec: corev1.PodSpec{NodeSelector: map[string]string{"kubevirt.io/schedulable": "true"},
		Tolerations: []corev1.Toleration{{Key: "own", Operator: corev1.TolerationOpExists}}}}
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(namespace string) *admissionv1.AdmissionResponse {
		return shared.place(&admissionv1.AdmissionRequest{Namespace: namespace, Object: runtime.RawExtension{Raw: raw}})
	}
	if answer := ask("theirs"); !answer.Allowed || answer.Patch != nil {
		t.Errorf("somebody else's pod is changed: %+v", answer)
	}
	answer := ask("ours")
	var patch []struct {
		Op, Path string
		Value    json.RawMessage
	}
	if err := json.Unmarshal(answer.Patch, &patch); err != nil || !answer.Allowed {
		t.Fatalf("answer %+v, %v", answer, err)
	}
	placed := pod
	placed.Spec.NodeSelector, placed.Spec.Tolerations = nil, nil
	for _, p := range patch {
		into := map[string]any{"/spec/nodeSelector": &placed.Spec.NodeSelector, "/spec/tolerations": &placed.Spec.Tolerations}[p.Path]
		if p.Op != "add" || into == nil {
			t.Fatalf("patch %s %s", p.Op, p.Path)
		}
		if err := json.Unmarshal(p.Value, into); err != nil {
			t.Fatal(err)
		}
	}
	node := hostNode("host-1", time.Now())
	setApart(node)
	for _, taint := range node.Spec.Taints {
		if !tolerates(placed, taint) {
			t.Errorf("the run's pod does not tolerate %v", taint)
		}
		if tolerates(pod, taint) {
			t.Errorf("everybody's pod tolerates %v", taint)
		}
	}
	if len(node.Spec.Taints) == 0 {
		t.Error("a played node lets everybody in")
	}
	for k, v := range placed.Spec.NodeSelector {
		if node.Labels[k] != v {
			t.Errorf("a played node lacks %s=%s, which the run's pods select", k, v)
		}
	}
	if len(placed.Spec.NodeSelector) != 2 || len(placed.Spec.Tolerations) != 2 {
		t.Errorf("selector %v, tolerations %v: what the pod had is gone, or nothing was added", placed.Spec.NodeSelector, placed.Spec.Tolerations)
	}
}

func TestOnASharedClusterStandInsLookAwayFromOthers(t *testing.T) {
	var asked []string
	count := reconcile.Func(func(_ context.Context, r reconcile.Request) (reconcile.Result, error) {
		asked = append(asked, r.String())
		return reconcile.Result{}, nil
	})
	shared := &Simulation{o: Options{Shared: &Shared{Owns: func(namespace string) bool { return namespace == "ours" }}}}
	for _, s := range []*Simulation{shared, {}} {
		for _, namespace := range []string{"ours", "theirs", ""} {
			if _, err := s.own(count).Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: "x"}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if want := []string{"ours/x", "/x", "ours/x", "theirs/x", "/x"}; !slices.Equal(asked, want) {
		t.Errorf("acted on %q, want %q", asked, want)
	}
	if node := hostNode("host-1", time.Now()); len(node.Status.Addresses) == 0 {
		t.Error("a played node has no address")
	} else if setApart(node); len(node.Status.Addresses) > 0 {
		t.Errorf("on a shared cluster it has %v, to which networks make routes", node.Status.Addresses)
	}
}

func TestOnASharedClusterClaimsGetThePlatformsClass(t *testing.T) {
	class := func(name, key string) *storagev1.StorageClass {
		return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{key: "true"}}}
	}
	theirs, platforms := class("theirs", defaultClassKey), class("platforms", virtDefaultClassKey)
	shared := &Simulation{o: Options{Shared: &Shared{Owns: func(namespace string) bool { return namespace == "ours" }}}}
	for name, c := range map[string]struct {
		namespace, of string
		classes       []client.Object
		want          string
	}{
		"the run's, by default":     {"ours", "theirs", []client.Object{theirs, platforms}, `[{"op":"add","path":"/spec/storageClassName","value":"platforms"}]`},
		"the run's, of a class":     {"ours", "local", []client.Object{theirs, platforms}, ""},
		"somebody else's":           {"theirs", "theirs", []client.Object{theirs, platforms}, ""},
		"the platform's is default": {"ours", "platforms", []client.Object{class("platforms", defaultClassKey)}, ""},
	} {
		a := &apart{sim: shared, client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(c.classes...).Build()}
		raw, err := json.Marshal(corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &c.of}})
		if err != nil {
			t.Fatal(err)
		}
		answer := a.provide(t.Context(), &admissionv1.AdmissionRequest{Namespace: c.namespace, Object: runtime.RawExtension{Raw: raw}})
		if !answer.Allowed || string(answer.Patch) != c.want {
			t.Errorf("%s: allowed %v, patch %s, want %q", name, answer.Allowed, answer.Patch, c.want)
		}
	}
}

func TestOnASharedClusterOthersVolumesStay(t *testing.T) {
	volume := func(name, namespace string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{provisionedByAnnotation: "csi.example.com"}},
			Spec: corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: "c"},
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.example.com"}}},
			Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased}}
	}
	c := &csi{client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(volume("a", "ours"), volume("b", "theirs")).Build(),
		sim: &Simulation{o: Options{Shared: &Shared{Owns: func(namespace string) bool { return namespace == "ours" }}}}}
	for name, gone := range map[string]bool{"a": true, "b": false} {
		if _, err := c.volume(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}); err != nil {
			t.Fatal(err)
		}
		err := c.client.Get(t.Context(), client.ObjectKey{Name: name}, &corev1.PersistentVolume{})
		if apierrors.IsNotFound(err) != gone {
			t.Errorf("released volume %s: %v", name, err)
		}
	}
}

func tolerates(pod corev1.Pod, taint corev1.Taint) bool {
	for _, toleration := range pod.Spec.Tolerations {
		if toleration.Key == taint.Key && toleration.Operator == corev1.TolerationOpExists {
			return true
		}
	}
	return false
}
