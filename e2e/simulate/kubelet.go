package simulate

import (
	"context"
	"fmt"
	"sync"

	"github.com/go-logr/logr"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
)

var kubeletStandIn = standIn{
	name: "kubelet", namespace: "kube-system", serviceAccount: "upgrade-e2e-kubelet",
	rules: []rbacv1.PolicyRule{
		allow("", []string{"nodes"}, "get", "create", "patch"),
		allow("", []string{"nodes/status", "pods/status"}, "patch"),
		allow("coordination.k8s.io", []string{"leases"}, "create", "patch"),
		allow("", []string{"pods"}, "get", "list", "watch", "delete"),
		// What a node needs to run a pod: its ConfigMaps and Secrets, and tokens for its ServiceAccount.
		allow("", []string{"configmaps", "secrets"}, "get"),
		allow("", []string{"serviceaccounts/token"}, "create"),
		// To send pods to the played nodes of a shared cluster, and claims to the platform's class.
		allow("admissionregistration.k8s.io", []string{"mutatingwebhookconfigurations"}, "create", "patch"),
		allow("storage.k8s.io", []string{"storageclasses"}, "list"),
	},
	setup: setupKubelet,
}

// kubelet plays the kubelets of all hosts. Pods of Jobs are executed on the host; every other pod runs as soon as it
// is bound to a node and does nothing. Deletion is honoured at once.
type kubelet struct {
	client client.Client
	direct client.Client // reads from the API server what a cache may not have yet
	log    logr.Logger
	sim    *Simulation

	mu   sync.Mutex
	over bool                  // nothing is started any more
	runs map[types.UID]*podRun // Job pods that were started, until they are deleted

	states sync.Map // since when a mover's container has been in its state
}

func setupKubelet(s *Simulation, mgr manager.Manager) error {
	direct, err := client.New(mgr.GetConfig(), client.Options{Scheme: scheme, Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return err
	}
	k := &kubelet{client: mgr.GetClient(), direct: direct, log: mgr.GetLogger(), sim: s, runs: map[types.UID]*podRun{}}
	s.kubelet = k
	if err := mgr.Add(&nodes{client: direct, log: mgr.GetLogger(), apart: s.o.Shared != nil}); err != nil {
		return err
	}
	if s.o.Shared != nil {
		if err := mgr.Add(&apart{sim: s, client: direct}); err != nil {
			return err
		}
	}
	if err := mgr.Add(k); err != nil {
		return err
	}
	bound := predicate.NewPredicateFuncs(func(o client.Object) bool { return ours(o.(*corev1.Pod).Spec.NodeName) })
	return ctrl.NewControllerManagedBy(mgr).Named("kubelet").For(&corev1.Pod{}).WithEventFilter(bound).Complete(s.own(k))
}

// Start implements manager.Runnable: at the end of the simulation the processes of pods end before it does.
func (k *kubelet) Start(ctx context.Context) error {
	<-ctx.Done()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.over = true
	for _, r := range k.runs {
		r.kill()
	}
	return nil
}

// Reconcile implements reconcile.Reconciler for pods bound to our nodes.
func (k *kubelet) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod := &corev1.Pod{}
	if err := k.client.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	switch {
	case pod.DeletionTimestamp != nil:
		return ctrl.Result{}, k.remove(ctx, pod)
	case terminal(pod):
		return ctrl.Result{}, nil
	case ofJob(pod):
		return ctrl.Result{}, k.execute(ctx, pod)
	case endsByItself(pod):
		return k.move(ctx, pod)
	default:
		return ctrl.Result{}, k.report(ctx, pod, runningStatus(pod, metav1.Now()))
	}
}

// report writes a status unless it is what the pod has.
func (k *kubelet) report(ctx context.Context, pod *corev1.Pod, status corev1.PodStatus) error {
	if equality.Semantic.DeepEqual(pod.Status, status) {
		return nil
	}
	updated := pod.DeepCopy()
	updated.Status = status
	// A strategic merge keeps the conditions of others, such as KubeVirt's readiness gate.
	if err := k.client.Status().Patch(ctx, updated, client.StrategicMergeFrom(pod)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("report status of pod %s: %w", key(pod), err)
	}
	return nil
}

// remove ends a deleted pod: its processes are killed, its containers reported as terminated, the object goes.
func (k *kubelet) remove(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	run := k.runs[pod.UID]
	k.mu.Unlock()
	if run != nil {
		run.kill()
	}
	if !terminal(pod) {
		phase := corev1.PodSucceeded
		if run != nil {
			phase = corev1.PodFailed
		}
		if err := k.report(ctx, pod, endedStatus(pod, phase, metav1.Now())); err != nil {
			return err
		}
	}
	err := k.client.Delete(ctx, pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &pod.UID})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete pod %s: %w", key(pod), err)
	}
	if run != nil {
		k.mu.Lock()
		delete(k.runs, pod.UID)
		k.mu.Unlock()
		return run.cleanUp()
	}
	return nil
}

// execute starts a Job's pod, once.
func (k *kubelet) execute(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over || k.runs[pod.UID] != nil {
		return nil
	}
	if pod.Status.Phase == corev1.PodRunning {
		// Its processes ended with the simulation that started them.
		return k.report(ctx, pod, endedStatus(pod, corev1.PodFailed, metav1.Now()))
	}
	k.runs[pod.UID] = k.startRun(pod)
	return nil
}

// finish completes the running pods of a namespace that match, as when their process ends with exit code 0.
func (k *kubelet) finish(ctx context.Context, namespace string, match func(*corev1.Pod) bool) error {
	var pods corev1.PodList
	if err := k.client.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return err
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if terminal(pod) || !ours(pod.Spec.NodeName) || !match(pod) {
			continue
		}
		if err := k.report(ctx, pod, endedStatus(pod, corev1.PodSucceeded, metav1.Now())); err != nil {
			return err
		}
	}
	return nil
}

func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func ofJob(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "Job" && owner.APIVersion == batchv1.SchemeGroupVersion.String()
}

// endsByItself is true for CDI's pods (importer, upload, clone source, prep), which move data and complete.
func endsByItself(pod *corev1.Pod) bool { return pod.Labels[cdiPodLabel] != "" }

// runningStatus is the status of a pod whose containers all run.
func runningStatus(pod *corev1.Pod, now metav1.Time) corev1.PodStatus {
	status := begun(pod, now)
	status.Phase = corev1.PodRunning
	status.InitContainerStatuses = initStatuses(pod, now)
	status.ContainerStatuses = nil
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, runningContainer(pod, pod.Status.ContainerStatuses, c, now))
	}
	ready := true
	for _, gate := range pod.Spec.ReadinessGates {
		ready = ready && podCondition(pod, gate.ConditionType)
	}
	status.Conditions = podConditions(status.Conditions, ready, "", now)
	return status
}

// endedStatus is the status of a pod whose containers have all ended, with exit code 0 or, for phase Failed, as killed.
func endedStatus(pod *corev1.Pod, phase corev1.PodPhase, now metav1.Time) corev1.PodStatus {
	status := begun(pod, now)
	status.Phase = phase
	status.InitContainerStatuses = initStatuses(pod, now)
	ended := corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: *status.StartTime, FinishedAt: now}
	if phase == corev1.PodFailed {
		ended.ExitCode, ended.Reason = 137, "Error"
	}
	status.ContainerStatuses = nil
	for _, c := range pod.Spec.Containers {
		old := containerStatus(pod.Status.ContainerStatuses, c.Name)
		cs := corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, ContainerID: old.ContainerID,
			RestartCount: old.RestartCount, Started: ptr.To(false), State: corev1.ContainerState{Terminated: ended.DeepCopy()}}
		if old.State.Terminated != nil {
			cs.State = old.State
		} else if old.State.Running != nil {
			cs.State.Terminated.StartedAt = old.State.Running.StartedAt
		}
		status.ContainerStatuses = append(status.ContainerStatuses, cs)
	}
	reason := "PodCompleted"
	if phase == corev1.PodFailed {
		reason = "PodFailed"
	}
	status.Conditions = podConditions(status.Conditions, false, reason, now)
	return status
}

// begun is the pod's status with what every started pod has.
func begun(pod *corev1.Pod, now metav1.Time) corev1.PodStatus {
	status := *pod.Status.DeepCopy()
	if status.StartTime == nil {
		status.StartTime = &now
	}
	status.HostIP = hosts[pod.Spec.NodeName].String()
	status.HostIPs = []corev1.HostIP{{IP: status.HostIP}}
	status.PodIP = podIP(pod.UID)
	if pod.Spec.HostNetwork {
		status.PodIP = status.HostIP
	}
	status.PodIPs = []corev1.PodIP{{IP: status.PodIP}}
	return status
}

func initStatuses(pod *corev1.Pod, now metav1.Time) []corev1.ContainerStatus {
	var list []corev1.ContainerStatus
	for _, c := range pod.Spec.InitContainers {
		if ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways { // a sidecar
			list = append(list, runningContainer(pod, pod.Status.InitContainerStatuses, c, now))
			continue
		}
		cs := containerStatus(pod.Status.InitContainerStatuses, c.Name)
		if cs.State.Terminated == nil {
			cs = corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, ContainerID: containerID(pod, c.Name), Ready: true,
				State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: now, FinishedAt: now}}}
		}
		list = append(list, cs)
	}
	return list
}

func runningContainer(pod *corev1.Pod, old []corev1.ContainerStatus, c corev1.Container, now metav1.Time) corev1.ContainerStatus {
	cs := containerStatus(old, c.Name)
	if cs.State.Running != nil {
		return cs
	}
	return corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, ContainerID: containerID(pod, c.Name),
		Ready: true, Started: ptr.To(true), RestartCount: cs.RestartCount,
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}
}

func containerStatus(list []corev1.ContainerStatus, name string) corev1.ContainerStatus {
	for _, cs := range list {
		if cs.Name == name {
			return cs
		}
	}
	return corev1.ContainerStatus{Name: name}
}

func containerID(pod *corev1.Pod, name string) string {
	return fmt.Sprintf("stand-in://%s/%s", pod.UID, name)
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// podConditions brings the kubelet's conditions up to date and keeps those of others.
func podConditions(old []corev1.PodCondition, ready bool, ended string, now metav1.Time) []corev1.PodCondition {
	list := append([]corev1.PodCondition(nil), old...)
	put := func(kind corev1.PodConditionType, ok bool, reason string) {
		c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, LastTransitionTime: now}
		if ok {
			c.Status, c.Reason = corev1.ConditionTrue, ""
		}
		for i := range list {
			if list[i].Type == kind {
				if list[i].Status == c.Status {
					c.LastTransitionTime = list[i].LastTransitionTime
				}
				list[i] = c
				return
			}
		}
		list = append(list, c)
	}
	notReady := ended
	if notReady == "" {
		notReady = "ReadinessGatesNotReady"
	}
	put(corev1.PodReadyToStartContainers, ended == "", ended)
	put(corev1.PodInitialized, true, "")
	put(corev1.ContainersReady, ended == "", ended)
	put(corev1.PodReady, ready, notReady)
	return list
}
