package components

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"cozystack.io/upgrade-e2e/e2e/programs"
)

// nodes is a provider whose nodes run pods, and have an image of each controller.
type nodes interface {
	Image(program string) (reference string)
	Pin(pod *corev1.PodSpec)
	Reach(ctx context.Context, host string, port int) error
}

// pods runs controllers by the Deployments that they ship with, reached by their Services.
type pods struct {
	*installer
	nodes nodes
	api   kubernetes.Interface
}

// probeTimeout is how long a probe waits for its answer. Kubernetes' own second would restart controllers, or take their
// webhooks away, whenever the machine is busy.
const probeTimeout = 10

// webhookPort is the port of Services that webhooks and aggregated APIs mean when they name none.
const webhookPort = 443

func (pods) as() string { return "a pod" }

// pause is longer than for processes: each look is a request to an API server that has enough to do, or runs a program on
// the node.
func (pods) pause() time.Duration { return 500 * time.Millisecond }

// prepare reads what the controller ships with: its Deployment tells where the certificate is looked for.
func (h pods) prepare(c controller) (*started, error) {
	s := &started{controller: c}
	s.ports, s.listen, s.version = c.inPod, "0.0.0.0", h.programs.Version(c.name)
	var err error
	if s.manifest, err = readManifest(h.programs.Manifest(c.installs), byService{ca: h.ca.PEM()}); err != nil {
		return nil, err
	}
	if s.manifest.deployment == nil {
		s.manifest.deployment = s.operated()
	}
	_, s.certs = certificate(s.manifest.deployment)
	if s.serves && s.certs == "" {
		return nil, fmt.Errorf("manifest %s: Deployment %s serves webhooks and mounts no Secret", c.installs, s.manifest.deployment.Name)
	}
	return s, nil
}

// certificate is the first Secret that a Deployment mounts, and where; "" when there is none.
func certificate(d *appsv1.Deployment) (secret, mounted string) {
	pod := d.Spec.Template.Spec
	for _, v := range pod.Volumes {
		if v.Secret == nil {
			continue
		}
		for _, m := range pod.Containers[0].VolumeMounts {
			if m.Name == v.Name {
				return v.Secret.SecretName, m.MountPath
			}
		}
	}
	return "", ""
}

// operated is the least of a Deployment, for what an operator would deploy: KubeVirt's.
func (s *started) operated() *appsv1.Deployment {
	labels := map[string]string{s.installs + ".io": s.name} // by which virt-api's Service selects
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: s.account.Namespace, Name: s.name, Labels: labels}}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels = labels
	e := s.ready(s.settings)
	ready := &corev1.HTTPGetAction{Scheme: corev1.URIScheme(strings.ToUpper(e.scheme)), Port: intstr.FromInt(e.port), Path: e.path}
	certs := corev1.Volume{Name: "certs"}
	certs.Secret = &corev1.SecretVolumeSource{SecretName: s.name + "-certs"}
	d.Spec.Template.Spec = corev1.PodSpec{
		ServiceAccountName: s.account.Name,
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot:   ptr.To(true),
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Containers: []corev1.Container{{
			Name:           s.name,
			ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: ready}},
			VolumeMounts:   []corev1.VolumeMount{{Name: certs.Name, MountPath: "/etc/" + s.name + "/certificates", ReadOnly: true}},
		}},
		Volumes: []corev1.Volume{certs},
	}
	return d
}

// deployment is the Deployment that the controller ships with, with our image, flags and node.
func (h pods) deployment(s *started) *appsv1.Deployment {
	d := s.manifest.deployment.DeepCopy()
	d.APIVersion, d.Kind = "apps/v1", "Deployment"
	d.Spec.Replicas = ptr.To[int32](1)
	pod := &d.Spec.Template.Spec
	h.nodes.Pin(pod)
	c := &pod.Containers[0]
	c.Image, c.ImagePullPolicy = h.nodes.Image(s.name), corev1.PullNever
	c.Args = append(c.Args, s.flags(s.settings)...) // the last of a flag wins
	c.Env = append(c.Env, corev1.EnvVar{Name: programs.WebhookHost, Value: s.listen})
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
		if probe != nil {
			probe.TimeoutSeconds = probeTimeout
		}
	}
	if ready := c.ReadinessProbe; ready != nil {
		// Asked every second until it is ready the first time; its own probe would be ten seconds late.
		c.StartupProbe = &corev1.Probe{ProbeHandler: ready.ProbeHandler, TimeoutSeconds: probeTimeout,
			PeriodSeconds: 1, FailureThreshold: int32(startBound.Seconds())}
	}
	return d
}

func (h pods) start(ctx context.Context, s *started) error {
	d := h.deployment(s)
	if secret, _ := certificate(d); secret != "" {
		if err := h.certify(ctx, s, secret); err != nil {
			return err
		}
	}
	u := &unstructured.Unstructured{}
	var err error
	if u.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(d); err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	if err := h.apply(ctx, u); err != nil {
		return err
	}
	return h.keepLog(s)
}

// certify makes the Secret that cert-manager, or KubeVirt's operator, would make: for the names of the controller's Services.
func (h pods) certify(ctx context.Context, s *started, secret string) error {
	var names []string
	for _, u := range s.services() {
		names = append(names, u.GetName()+"."+u.GetNamespace()+".svc")
	}
	cert, key, err := h.ca.Serving(names...)
	if err != nil {
		return err
	}
	return h.apply(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": string(corev1.SecretTypeTLS),
		"metadata":   map[string]any{"namespace": s.manifest.deployment.Namespace, "name": secret},
		"stringData": map[string]any{corev1.TLSCertKey: string(cert), corev1.TLSPrivateKeyKey: string(key)},
	}})
}

// services are those that the controller's manifest has.
func (s *started) services() []*unstructured.Unstructured {
	return slices.DeleteFunc(slices.Clone(s.manifest.others), func(u *unstructured.Unstructured) bool {
		return u.GroupVersionKind().GroupKind() != corev1.SchemeGroupVersion.WithKind("Service").GroupKind()
	})
}

// serving waits for the Deployment's own word, then for the rules that lead the API server to its Services.
func (h pods) serving(ctx context.Context, s *started) error {
	of := s.manifest.deployment
	d, err := h.api.AppsV1().Deployments(of.Namespace).Get(ctx, of.Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get Deployment %s/%s: %w", of.Namespace, of.Name, err)
	}
	if d.Status.ObservedGeneration < d.Generation || d.Status.AvailableReplicas == 0 {
		return fmt.Errorf("no replica of Deployment %s/%s is available", of.Namespace, of.Name)
	}
	if !s.serves {
		return nil
	}
	for _, u := range s.services() {
		service, err := h.api.CoreV1().Services(u.GetNamespace()).Get(ctx, u.GetName(), metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get Service %s/%s: %w", u.GetNamespace(), u.GetName(), err)
		}
		for _, port := range service.Spec.Ports {
			if port.Port != webhookPort {
				continue
			}
			if err := h.nodes.Reach(ctx, service.Spec.ClusterIP, webhookPort); err != nil {
				return fmt.Errorf("way to Service %s/%s: %w", service.Namespace, service.Name, err)
			}
		}
	}
	return nil
}

// get asks by way of the API server: nothing else on this machine reaches a pod.
func (h pods) get(ctx context.Context, s *started, e endpoint) ([]byte, error) {
	pod, err := h.pod(ctx, s)
	if err != nil {
		return nil, err
	}
	body, err := h.api.CoreV1().Pods(pod.Namespace).ProxyGet(e.scheme, pod.Name, strconv.Itoa(e.port), e.path, nil).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("get %s of pod %s/%s, port %d: %w", e.path, pod.Namespace, pod.Name, e.port, err)
	}
	return body, nil
}

// pod is the newest pod of the controller's Deployment.
func (h pods) pod(ctx context.Context, s *started) (*corev1.Pod, error) {
	d := s.manifest.deployment
	list, err := h.api.CoreV1().Pods(d.Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(d.Spec.Selector)})
	if err != nil {
		return nil, fmt.Errorf("list the pods of Deployment %s/%s: %w", d.Namespace, d.Name, err)
	}
	if len(list.Items) == 0 {
		return nil, fmt.Errorf("no pod of Deployment %s/%s is there", d.Namespace, d.Name)
	}
	newest := slices.MaxFunc(list.Items, func(a, b corev1.Pod) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	return &newest, nil
}

func (h pods) condition(ctx context.Context, s *started) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	pod, err := h.pod(ctx, s)
	if err != nil {
		return err.Error()
	}
	said := fmt.Sprintf("pod %s/%s is %s", pod.Namespace, pod.Name, podState(pod))
	raw, err := h.api.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{TailLines: ptr.To[int64](3)}).DoRaw(ctx)
	if err != nil {
		return said + fmt.Sprintf("; its log can't be read: %v", err)
	}
	return said + fmt.Sprintf("; its log ends with %q; see %s", strings.TrimSpace(string(raw)), h.logOf(s))
}

// podState is the phase of a pod, and why its container does not run.
func podState(pod *corev1.Pod) string {
	state := string(pod.Status.Phase)
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			state += ", not scheduled: " + c.Message
		}
	}
	for _, c := range pod.Status.ContainerStatuses {
		state += fmt.Sprintf(", container %s restarted %d times", c.Name, c.RestartCount)
		if w := c.State.Waiting; w != nil {
			state += fmt.Sprintf(", waits: %s %s", w.Reason, w.Message)
		}
		if t := c.LastTerminationState.Terminated; t != nil {
			state += fmt.Sprintf(", ended before: %s with exit code %d", t.Reason, t.ExitCode)
		}
	}
	return state
}

func (h pods) logOf(s *started) string {
	return filepath.Join(h.run.Dir(), "logs", s.name+".log")
}

// keepLog copies what the controller writes to the log that a process would have, until the run ends.
func (h pods) keepLog(s *started) error {
	log, err := os.OpenFile(h.logOf(s), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", s.name, err)
	}
	ctx, end := context.WithCancel(context.Background()) // not start's, which ends with the start
	ended := make(chan struct{})
	h.run.AtClose(func() error {
		end()
		<-ended
		return log.Close()
	})
	go func() {
		defer close(ended)
		f := follower{pods: h, of: s}
		_ = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
			if err := f.copy(ctx, log); err != nil && ctx.Err() == nil {
				fmt.Fprintf(log, "-- the log of %s: %v\n", s.name, err)
			}
			return false, nil
		})
	}()
	return nil
}

// follower reads the log of a controller over its restarts.
type follower struct {
	pods
	of        *started
	container string // that was read last …
	since     *metav1.Time
	ended     string // the last one that was read to its end
}

// container is the last that was started in a pod, and whether it has ended: one that dies at once is hardly ever seen running.
func container(status corev1.ContainerStatus) (id string, ended bool) {
	for _, state := range []corev1.ContainerState{status.State, status.LastTerminationState} {
		if state.Running != nil {
			return status.ContainerID, false
		}
		if state.Terminated != nil {
			return state.Terminated.ContainerID, true
		}
	}
	return "", false
}

// copy reads on until the container ends or the connection does. Where none has run yet there is nothing to read.
func (f *follower) copy(ctx context.Context, to io.Writer) error {
	pod, err := f.pod(ctx, f.of)
	if err != nil {
		return nil // not made yet
	}
	statuses := pod.Status.ContainerStatuses
	if len(statuses) == 0 {
		return nil
	}
	id, ended := container(statuses[0])
	if id == "" || id == f.ended {
		return nil
	}
	if id != f.container {
		f.container, f.since = id, nil
	}
	if ended {
		f.ended = id
	}
	log, err := f.api.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Follow: true, SinceTime: f.since}).Stream(ctx)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, log)
	f.since = ptr.To(metav1.Now())
	return errors.Join(err, log.Close())
}
