package simulate

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/programs"
)

func TestMain(m *testing.M) {
	process.Main()
	os.Exit(m.Run())
}

// embedded starts an embedded cluster, or skips the test when its programs are not built.
func embedded(t *testing.T) (context.Context, *cluster.Embedded, Options) {
	t.Helper()
	return embeddedFor(t, 5*time.Minute)
}

func embeddedFor(t *testing.T, bound time.Duration) (context.Context, *cluster.Embedded, Options) {
	t.Helper()
	dir, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	built := &programs.Programs{Dir: dir} // of the run's programs these tests need the few of a control plane
	for _, name := range append(cluster.ControlPlane(), "kubectl") {
		if _, err := os.Stat(built.Path(name)); err != nil {
			t.Skipf("%s is not built; run `make tools`", name)
		}
	}
	if testing.Short() {
		t.Skip("boots a cluster")
	}
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	t.Cleanup(cancel)
	c := cluster.NewEmbedded(run, built)
	if _, err := c.Create(ctx); err != nil {
		t.Fatal(err)
	}
	return ctx, c, Options{
		Admin: c.KubernetesRestConfig(),
		As: func(ctx context.Context, namespace, name string) (*rest.Config, error) {
			return cluster.ConfigFor(ctx, c, cluster.ServiceAccount{Namespace: namespace, Name: name})
		},
		Processes: run, Programs: built.Dir, EtcdURL: c.EtcdURL(), Expose: c.Expose, Log: testr.New(t),
	}
}

// kindsOf installs the CRDs of components, or skips the test when they are not built.
func kindsOf(t *testing.T, o Options, components ...string) {
	t.Helper()
	options := envtest.CRDInstallOptions{ErrorIfPathMissing: true, MaxTime: 2 * time.Minute}
	for _, name := range components {
		path := filepath.Join(o.Programs, "manifests", name+".yaml")
		if _, err := os.Stat(path); err != nil {
			t.Skipf("the kinds of %s are not built; run `make tools`", name)
		}
		options.Paths = append(options.Paths, path)
	}
	if _, err := envtest.InstallCRDs(o.Admin, options); err != nil {
		t.Fatal(err)
	}
}

func eventually(ctx context.Context, t *testing.T, what string, ok func(context.Context) bool) {
	t.Helper()
	began := time.Now()
	if err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) { return ok(ctx), nil }); err != nil {
		t.Fatalf("waited in vain for %s: %v", what, err)
	}
	t.Logf("%s after %.2f s", what, time.Since(began).Seconds())
}

// TestHosts runs pods, jobs and volumes on the stand-ins for node, kubelet and CSI, with the real scheduler and
// controller-manager.
func TestHosts(t *testing.T) {
	ctx, _, o := embedded(t)
	kindsOf(t, o, "external-snapshotter")
	o.Entrypoint = func(image string) (string, []string, bool) {
		return filepath.Join(o.Processes.Dir(), "entry.sh"), []string{"from-image"}, image == "known"
	}
	if err := os.WriteFile(filepath.Join(o.Processes.Dir(), "entry.sh"), []byte("#!/bin/sh\necho entry $1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LEAK", "from the harness")
	simCtx, stop := context.WithCancel(ctx)
	sim, err := start(simCtx, o, []standIn{kubeletStandIn, csiStandIn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := sim.Wait(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.New(o.Admin, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	create := func(objects ...client.Object) {
		t.Helper()
		for _, obj := range objects {
			if err := c.Create(ctx, obj); err != nil {
				t.Fatalf("%T %s: %v", obj, obj.GetName(), err)
			}
		}
	}
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "jobs", Name: name} }
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "jobs"}},
		&corev1.ServiceAccount{ObjectMeta: meta("runner")},
		&rbacv1.Role{ObjectMeta: meta("runner"), Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get"}}}},
		&rbacv1.RoleBinding{ObjectMeta: meta("runner"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "runner"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "jobs", Name: "runner"}}},
		&corev1.ConfigMap{ObjectMeta: meta("scripts"), Data: map[string]string{"lib.sh": "where=/scripts/lib.sh\n"}},
		&corev1.Secret{ObjectMeta: meta("secret"), StringData: map[string]string{"key": "s3cret"}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "late"}, Provisioner: "driver.example.org", AllowVolumeExpansion: ptr.To(true),
			VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)})

	job := func(name string, backoff int32, container corev1.Container) *batchv1.Job {
		container.Name = "main"
		return &batchv1.Job{ObjectMeta: meta(name), Spec: batchv1.JobSpec{BackoffLimit: &backoff, Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			ServiceAccountName: "runner", RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{container},
			Volumes: []corev1.Volume{{Name: "scripts", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "scripts"}}}}},
		}}}}
	}
	ended := func(name string, kind batchv1.JobConditionType) func(context.Context) bool {
		return func(ctx context.Context) bool {
			j := &batchv1.Job{ObjectMeta: meta(name)}
			if err := c.Get(ctx, key(j), j); err != nil {
				return false
			}
			for _, cond := range j.Status.Conditions {
				if cond.Type == kind && cond.Status == corev1.ConditionTrue {
					return true
				}
			}
			return false
		}
	}
	logOf := func(name string) string {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(o.Processes.Dir(), "logs", "pods", "jobs_"+name+"-*_main.log"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no log of %s: %v", name, err)
		}
		data, err := os.ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}

	t.Run("job under its own ServiceAccount", func(t *testing.T) {
		create(job("works", 0, corev1.Container{Image: "any", Command: []string{"/bin/sh", "-ec"}, Args: []string{`set -o pipefail
			. /scripts/lib.sh
			echo "lib $where"
			echo "env $PLAIN $(KEY) $NS leak=${LEAK:-none}"
			kubectl get configmap scripts -o name
			if kubectl get secret secret; then exit 7; fi
			kubectl auth whoami -o jsonpath='{.status.userInfo.username}'`},
			Env: []corev1.EnvVar{{Name: "PLAIN", Value: "p"}, {Name: "NS", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}},
				{Name: "KEY", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "secret"}, Key: "key"}}}},
			VolumeMounts: []corev1.VolumeMount{{Name: "scripts", MountPath: "/scripts"}}}))
		eventually(ctx, t, "job to complete", ended("works", batchv1.JobComplete))
		log := logOf("works")
		for _, want := range []string{"volumes/scripts/lib.sh\n", "env p s3cret jobs leak=none\n", "configmap/scripts\n", "system:serviceaccount:jobs:runner"} {
			if !strings.Contains(log, want) {
				t.Errorf("log lacks %q:\n%s", want, log)
			}
		}
	})
	t.Run("entrypoint of a known image", func(t *testing.T) {
		create(job("entry", 0, corev1.Container{Image: "known"}))
		eventually(ctx, t, "job to complete", ended("entry", batchv1.JobComplete))
		if log := logOf("entry"); !strings.Contains(log, "entry from-image\n") {
			t.Errorf("log %q", log)
		}
	})
	t.Run("a failing job is retried by the job controller and gives up", func(t *testing.T) {
		create(job("fails", 1, corev1.Container{Image: "any", Command: []string{"bash", "-c", "echo reason; exit 3"}}))
		eventually(ctx, t, "job to fail", ended("fails", batchv1.JobFailed))
		var pods corev1.PodList
		if err := c.List(ctx, &pods, client.InNamespace("jobs"), client.MatchingLabels{"job-name": "fails"}); err != nil {
			t.Fatal(err)
		}
		if len(pods.Items) != 2 {
			t.Errorf("%d pods, want 2", len(pods.Items))
		}
		for _, p := range pods.Items {
			if end := p.Status.ContainerStatuses[0].State.Terminated; end == nil || end.ExitCode != 3 || end.Message != "reason\n" {
				t.Errorf("pod %s ended with %+v", p.Name, end)
			}
		}
	})
	t.Run("an unknown image fails and says why", func(t *testing.T) {
		create(job("unknown", 0, corev1.Container{Image: "mystery"}))
		eventually(ctx, t, "job to fail", ended("unknown", batchv1.JobFailed))
		var pods corev1.PodList
		if err := c.List(ctx, &pods, client.InNamespace("jobs"), client.MatchingLabels{"job-name": "unknown"}); err != nil {
			t.Fatal(err)
		}
		if end := pods.Items[0].Status.ContainerStatuses[0].State.Terminated; end == nil || !strings.Contains(end.Message, "mystery") {
			t.Errorf("ended with %+v", end)
		}
	})
	t.Run("deleting a job kills its process", func(t *testing.T) {
		mark := filepath.Join(t.TempDir(), "pid")
		create(job("sleeps", 0, corev1.Container{Image: "any", Command: []string{"bash", "-c", "sleep 600 & echo $$ > " + mark + "; wait"}}))
		eventually(ctx, t, "process to start", func(context.Context) bool {
			data, _ := os.ReadFile(mark)
			return len(data) > 0
		})
		data, _ := os.ReadFile(mark)
		pid := strings.TrimSpace(string(data))
		if err := c.Delete(ctx, &batchv1.Job{ObjectMeta: meta("sleeps")}, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "process and pod to go", func(ctx context.Context) bool {
			_, err := os.Stat("/proc/" + pid)
			return os.IsNotExist(err) && apierrors.IsNotFound(c.Get(ctx, client.ObjectKey{Namespace: "jobs", Name: "sleeps"}, &batchv1.Job{}))
		})
	})
	t.Run("a pod runs, its volume comes with it and goes with its claim", func(t *testing.T) {
		size := func(s string) corev1.VolumeResourceRequirements {
			return corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s)}}
		}
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: meta("data"), Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To("late"),
			VolumeMode: ptr.To(corev1.PersistentVolumeBlock), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, Resources: size("1Gi")}}
		pod := &corev1.Pod{ObjectMeta: meta("user"), Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "any", VolumeDevices: []corev1.VolumeDevice{{Name: "v", DevicePath: "/dev/x"}}}},
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}}}
		create(claim, pod)
		eventually(ctx, t, "pod to be ready", func(ctx context.Context) bool {
			return c.Get(ctx, key(pod), pod) == nil && podCondition(pod, corev1.PodReady)
		})
		if err := c.Get(ctx, key(claim), claim); err != nil || claim.Status.Phase != corev1.ClaimBound {
			t.Fatalf("claim %s: %v", claim.Status.Phase, err)
		}
		old := claim.DeepCopy()
		claim.Spec.Resources = size("2Gi")
		if err := c.Patch(ctx, claim, client.MergeFrom(old)); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "claim to grow", func(ctx context.Context) bool {
			return c.Get(ctx, key(claim), claim) == nil && claim.Status.Capacity.Storage().String() == "2Gi"
		})
		if err := c.Delete(ctx, pod); err != nil {
			t.Fatal(err)
		}
		if err := c.Delete(ctx, claim); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "pod and volume to go", func(ctx context.Context) bool {
			return apierrors.IsNotFound(c.Get(ctx, key(pod), pod)) &&
				apierrors.IsNotFound(c.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, &corev1.PersistentVolume{}))
		})
	})
}
