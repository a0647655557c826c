package simulate

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Download is how an importer fares with an image. The zero value succeeds at once.
type Download struct {
	// Takes is how long the importer runs before it ends.
	Takes time.Duration
	// Held, if any, keeps the importer from ending until it is closed.
	Held <-chan struct{}
	// Hangs never ends.
	Hangs bool
	// Fails is the message that the container fails with, once; then it is started again and runs for ever.
	Fails string
	// Loops keeps a failing container from being started again, for back-off.
	Loops bool
	// Ends fails the pod instead of its container.
	Ends bool
	// Scratch asks for scratch space the first time.
	Scratch bool
	// NoImage keeps the container from being pulled.
	NoImage bool
	// Unschedulable gives the pod no node to go to.
	Unschedulable bool
}

// networkBytesKey is the annotation of an upload pod that says how much it takes over the pod network. It is the
// stand-ins' own; CDI's pods have none.
const networkBytesKey = "upgrade-e2e/network-bytes"

// defaultImage is the virtual size of an image of which nobody says how big it is.
const defaultImage = 5 << 30

func (d Download) held() bool {
	if d.Held == nil {
		return false
	}
	select {
	case <-d.Held:
		return false
	default:
		return true
	}
}

func (s *Simulation) download(url string) Download {
	if s == nil || s.o.Download == nil {
		return Download{}
	}
	return s.o.Download(url)
}

func restricted() *corev1.SecurityContext {
	return &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](107),
		Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
}

func moverResources() corev1.ResourceRequirements {
	return corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("60M")},
		Limits:   corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("750m"), corev1.ResourceMemory: resource.MustParse("600M")}}
}

func claimVolume(name, claim string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
}

// use gives a container a volume, as a device or as a folder.
func use(c *corev1.Container, volume string, mode corev1.PersistentVolumeMode, path string) {
	if mode == corev1.PersistentVolumeBlock {
		c.VolumeDevices = append(c.VolumeDevices, corev1.VolumeDevice{Name: volume, DevicePath: "/dev/cdi-block-volume"})
		return
	}
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: path})
}

// move plays the container of one of CDI's pods: importer, size detection, prep, and the two ends of a copy.
func (k *kubelet) move(ctx context.Context, pod *corev1.Pod) (ctrl.Result, error) {
	c := pod.Spec.Containers[0]
	d, kind := Download{}, pod.Labels[cdiPodLabel]
	message := ""
	switch {
	case strings.HasPrefix(pod.Name, sizePod):
		size := k.sim.o.ImageSize
		if size == 0 {
			size = defaultImage
		}
		message = strconv.FormatInt(size, 10)
	case kind == "importer":
		d, message = k.sim.download(endpointOf(pod)), "Import Complete"
		d.Scratch = d.Scratch && len(pod.Spec.Volumes) == 1
	case kind == "cdi-upload-server":
		message = "Clone Complete"
	}
	if d.Takes == 0 {
		d.Takes = k.sim.o.Transfer
	}
	was := containerStatus(pod.Status.ContainerStatuses, c.Name)
	switch {
	case d.NoImage:
		status := runningStatus(pod, metav1.Now())
		status.Phase = corev1.PodPending
		status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off pulling image"}}
		status.ContainerStatuses[0].Started, status.ContainerStatuses[0].Ready = ptr.To(false), false
		status.Conditions = podConditions(status.Conditions, false, "ContainersNotReady", metav1.Now())
		return ctrl.Result{}, k.report(ctx, pod, status)
	case was.State.Running == nil && was.State.Terminated == nil && was.State.Waiting == nil:
		return ctrl.Result{}, k.report(ctx, pod, runningStatus(pod, metav1.Now()))
	case was.State.Terminated != nil: // failed once
		status := *pod.Status.DeepCopy()
		cs := &status.ContainerStatuses[0]
		cs.LastTerminationState, cs.State = cs.State, corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}
		cs.RestartCount, cs.Ready = cs.RestartCount+1, true
		if d.Loops {
			cs.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off restarting failed container"}}
			cs.Ready = false
		}
		return k.later(pod, was.State.Terminated.FinishedAt.Time, shown, func() error { return k.report(ctx, pod, status) })
	case d.Hangs, was.RestartCount > 0, was.State.Waiting != nil:
		return ctrl.Result{}, nil
	case kind == "cdi-upload-server":
		return ctrl.Result{}, nil // ends with the pod that sends
	case d.held():
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	return k.later(pod, was.State.Running.StartedAt.Time, d.Takes, func() error { return k.endMover(ctx, pod, d, message) })
}

// shown is how long a state stays, so that controllers that look at the latest only see each.
const shown = 2 * time.Second

// later does something when a container has been in its state for long enough. Times in a status are whole seconds.
func (k *kubelet) later(pod *corev1.Pod, since time.Time, takes time.Duration, do func() error) (ctrl.Result, error) {
	if takes > 0 {
		began, _ := k.states.LoadOrStore(fmt.Sprint(pod.UID, since.Unix(), takes), time.Now())
		if left := takes - time.Since(began.(time.Time)); left > 0 {
			return ctrl.Result{RequeueAfter: left}, nil
		}
	}
	return ctrl.Result{}, do()
}

func (k *kubelet) endMover(ctx context.Context, pod *corev1.Pod, d Download, message string) error {
	status := endedStatus(pod, corev1.PodSucceeded, metav1.Now())
	end := status.ContainerStatuses[0].State.Terminated
	end.Message = message
	switch {
	case d.Scratch:
		end.Message = `{"scratchSpaceRequired":true}`
	case d.Fails != "" && d.Ends:
		status = endedStatus(pod, corev1.PodFailed, metav1.Now())
		end = status.ContainerStatuses[0].State.Terminated
		end.Message, end.ExitCode = d.Fails, 1
	case d.Fails != "":
		status = runningStatus(pod, metav1.Now())
		status.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: 1, Reason: "Error", Message: d.Fails, StartedAt: end.StartedAt, FinishedAt: metav1.Now()}}
		status.ContainerStatuses[0].Ready = false
	}
	if err := k.report(ctx, pod, status); err != nil {
		return err
	}
	if pod.Labels[cdiPodLabel] != "cdi-clone-source" {
		return nil
	}
	for _, target := range requestFor(pod.Annotations[ownerRefKey]) { // what takes the data has it all
		return k.finishUpload(ctx, target.NamespacedName)
	}
	return nil
}

// finishUpload completes the pod that takes the data for a claim.
func (k *kubelet) finishUpload(ctx context.Context, claim client.ObjectKey) error {
	var pods corev1.PodList
	if err := k.client.List(ctx, &pods, client.InNamespace(claim.Namespace), client.MatchingLabels{cdiPodLabel: "cdi-upload-server"}); err != nil {
		return err
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if terminal(pod) || !mounts(pod, claim.Name) {
			continue
		}
		status := endedStatus(pod, corev1.PodSucceeded, metav1.Now())
		status.ContainerStatuses[0].State.Terminated.Message = "Clone Complete"
		if err := k.report(ctx, pod, status); err != nil {
			return err
		}
	}
	return nil
}

func endpointOf(pod *corev1.Pod) string {
	for _, e := range pod.Spec.Containers[0].Env {
		if e.Name == endpointEnv {
			return e.Value
		}
	}
	return ""
}
