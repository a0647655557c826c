package platform

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// realPodLog reads what a pod's containers have written from their node, and keeps it where the kubelet stand-in would.
func (e *Env) realPodLog(ctx context.Context, client kubernetes.Interface, pod corev1.Pod) ([]string, error) {
	var lines []string
	for _, c := range pod.Spec.Containers {
		raw, err := client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: c.Name}).DoRaw(ctx)
		if err != nil {
			return nil, fmt.Errorf("read the log of pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		if err := e.keep("logs/pods", fmt.Sprintf("%s_%s_%s.log", pod.Namespace, pod.Name, c.Name), raw); err != nil {
			return nil, err
		}
		if text := strings.TrimRight(string(raw), "\n"); text != "" {
			lines = append(lines, strings.Split(text, "\n")...)
		}
	}
	return lines, nil
}
