package simulate

import (
	"encoding/json"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

func tolerates(pod corev1.Pod, taint corev1.Taint) bool {
	for _, toleration := range pod.Spec.Tolerations {
		if toleration.Key == taint.Key && toleration.Operator == corev1.TolerationOpExists {
			return true
		}
	}
	return false
}
