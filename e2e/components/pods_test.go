package components

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/programs"
)

// testNodes has every image, pins to a node of a name, and reaches nobody.
type testNodes struct{}

func (testNodes) Image(program string) string { return "images/" + program }
func (testNodes) Pin(pod *corev1.PodSpec) {
	pod.NodeSelector = map[string]string{"real": ""}
	pod.Tolerations = append(pod.Tolerations, corev1.Toleration{Key: "real"})
}
func (testNodes) Reach(_ context.Context, host string, _ int) error {
	return errors.New("nobody at " + host)
}

// testPods has the manifest of components_test.go as that of x, and the objects in its cluster.
func testPods(t *testing.T, objects ...runtime.Object) pods {
	t.Helper()
	ca, err := cluster.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "manifests"), 0o755); err != nil {
		t.Fatal(err)
	}
	in := &installer{programs: &programs.Programs{Dir: dir}, ca: ca}
	for name, text := range map[string]string{"x": testManifest, "operated": "kind: Namespace\nmetadata: {name: operated}"} {
		if err := os.WriteFile(in.programs.Manifest(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return pods{in, testNodes{}, fake.NewClientset(objects...)}
}

func flagsOf(s settings) []string {
	return []string{"--leader-elect=false", "--certs=" + s.certs, "--health=" + s.at(s.health)}
}

func testController() controller {
	return controller{name: "x", installs: "x", serves: true, flags: flagsOf, inPod: ports{webhook: 9443, health: 9440}, ready: onHealth("/readyz")}
}

func prepared(t *testing.T, h pods, c controller) *started {
	t.Helper()
	s, err := h.prepare(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDeploymentIsTheShippedOneOnTheRealNode(t *testing.T) {
	h := testPods(t)
	s := prepared(t, h, testController())
	got := h.deployment(s)
	want := s.manifest.deployment.DeepCopy()
	want.APIVersion, want.Kind = "apps/v1", "Deployment"
	want.Spec.Replicas = new(int32(1))
	pod := &want.Spec.Template.Spec
	pod.NodeSelector = map[string]string{"real": ""}
	pod.Tolerations = []corev1.Toleration{{Key: "master"}, {Key: "real"}}
	c := &pod.Containers[0]
	c.Image, c.ImagePullPolicy = "images/x", corev1.PullNever
	c.Args = []string{"--leader-elect", "--feature-gates=A=true", "--leader-elect=false", "--certs=/certs", "--health=0.0.0.0:9440"}
	c.Env = append(c.Env, corev1.EnvVar{Name: programs.WebhookHost, Value: "0.0.0.0"})
	c.StartupProbe = &corev1.Probe{ProbeHandler: c.ReadinessProbe.ProbeHandler, TimeoutSeconds: probeTimeout, PeriodSeconds: 1, FailureThreshold: int32(startBound.Seconds())}
	c.ReadinessProbe.TimeoutSeconds = probeTimeout
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if s.manifest.deployment.Spec.Template.Spec.Containers[0].Image != "shipped" {
		t.Error("what the manifest says was changed")
	}
	if account := s.identity().String(); account != "system:serviceaccount:x-system:x-manager" {
		t.Errorf("identity %s", account)
	}
	var services []string
	for _, u := range s.services() {
		services = append(services, u.GetName())
	}
	if !slices.Equal(services, []string{"webhook"}) {
		t.Errorf("services %q", services)
	}
}

func TestDeploymentOfWhatAnOperatorDeploys(t *testing.T) {
	h := testPods(t)
	c := controller{name: "y", installs: "operated", serves: true, account: cluster.ServiceAccount{Namespace: "operated", Name: "y-account"},
		flags: flagsOf, inPod: ports{webhook: 8443}, ready: onWebhook("/healthz")}
	d := h.deployment(prepared(t, h, c))
	pod := d.Spec.Template.Spec
	if d.Namespace != "operated" || d.Name != "y" || pod.ServiceAccountName != "y-account" || pod.NodeSelector == nil {
		t.Errorf("Deployment %+v", d)
	}
	if labels := map[string]string{"operated.io": "y"}; !cmp.Equal(d.Spec.Selector.MatchLabels, labels) || !cmp.Equal(d.Spec.Template.Labels, labels) {
		t.Errorf("selector %v, labels %v", d.Spec.Selector, d.Spec.Template.Labels)
	}
	container := pod.Containers[0]
	if secret, mounted := certificate(d); secret != "y-certs" || !slices.Contains(container.Args, "--certs="+mounted) {
		t.Errorf("certificate in Secret %s at %s, args %q", secret, mounted, container.Args)
	}
	probe := container.ReadinessProbe.HTTPGet
	if probe.Scheme != corev1.URISchemeHTTPS || probe.Port.IntValue() != 8443 || probe.Path != "/healthz" {
		t.Errorf("probe %+v", probe)
	}
}

func TestServesWithoutACertificate(t *testing.T) {
	h := testPods(t)
	text := strings.ReplaceAll(testManifest, "secretName", "unknown")
	if err := os.WriteFile(h.programs.Manifest("x"), []byte(strings.ReplaceAll(text, "secret:", "emptyDir:")), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := h.prepare(testController())
	if want := "manifest x: Deployment manager serves webhooks and mounts no Secret"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestPodsServeOnceTheirServicesAreReached(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "x-system", Name: "manager"}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "x-system", Name: "webhook"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.9", Ports: []corev1.ServicePort{{Port: 443}}}}
	for _, c := range []struct {
		objects []runtime.Object
		want    string
	}{
		{nil, `get Deployment x-system/manager: deployments.apps "manager" not found`},
		{[]runtime.Object{&appsv1.Deployment{ObjectMeta: meta}}, "no replica of Deployment x-system/manager is available"},
		{[]runtime.Object{&appsv1.Deployment{ObjectMeta: meta, Status: appsv1.DeploymentStatus{AvailableReplicas: 1}}, service},
			"way to Service x-system/webhook: nobody at 10.96.0.9"},
	} {
		h := testPods(t, c.objects...)
		if err := h.serving(t.Context(), prepared(t, h, testController())); err == nil || err.Error() != c.want {
			t.Errorf("error %v, want %s", err, c.want)
		}
	}
}

func TestConditionNamesThePodAndItsState(t *testing.T) {
	h := testPods(t)
	var err error
	if h.run, err = process.Open(filepath.Join(t.TempDir(), "run")); err != nil {
		t.Fatal(err)
	}
	defer h.run.Close()
	s := prepared(t, h, testController())
	if got, want := h.condition(t.Context(), s), "no pod of Deployment x-system/manager is there"; got != want {
		t.Errorf("condition %q, want %q", got, want)
	}
	h.api = fake.NewClientset(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "x-system", Name: "manager-1", Labels: map[string]string{"app": "x"}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "manager", RestartCount: 2,
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off 10s"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Error", ExitCode: 2}},
		}}},
	})
	want := `pod x-system/manager-1 is Pending, container manager restarted 2 times, waits: CrashLoopBackOff back-off 10s, ` +
		`ended before: Error with exit code 2; its log ends with "fake logs"; see ` + filepath.Join(h.run.Dir(), "logs", "x.log")
	if got := h.condition(t.Context(), s); got != want {
		t.Errorf("condition %q, want %q", got, want)
	}
}

func TestEveryControllerHasAnImage(t *testing.T) {
	images := programs.Controllers()
	for _, helm := range []string{"helm-controller", "helm-controller-helm3"} {
		for _, c := range controllers(Options{HelmController: helm}) {
			if !slices.Contains(images, c.name) {
				t.Errorf("node images have no image of %s, but of %q", c.name, images)
			}
		}
	}
}

func TestTheLogOfAContainerThatDiedIsRead(t *testing.T) {
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	dead := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ContainerID: "dead"}}
	waiting := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	for name, c := range map[string]struct {
		status corev1.ContainerStatus
		id     string
		ended  bool
	}{
		"not started": {corev1.ContainerStatus{State: waiting}, "", false},
		"runs":        {corev1.ContainerStatus{State: running, ContainerID: "new", LastTerminationState: dead}, "new", false},
		"has ended":   {corev1.ContainerStatus{State: dead}, "dead", true},
		"waits":       {corev1.ContainerStatus{State: waiting, LastTerminationState: dead}, "dead", true},
	} {
		if id, ended := container(c.status); id != c.id || ended != c.ended {
			t.Errorf("%s: %q, ended %v", name, id, ended)
		}
	}
}
