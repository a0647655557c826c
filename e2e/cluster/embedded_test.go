package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/process/processtest"
)

func TestMain(m *testing.M) {
	process.Main()
	os.Exit(m.Run())
}

// programsOrSkip finds the programs below the project's root, two folders up.
func programsOrSkip(t *testing.T) Programs {
	t.Helper()
	programs, err := FindPrograms("../..")
	if err != nil {
		t.Skip(err)
	}
	return programs
}

// openRun opens a run that ends with the test, which shows its logs when it has failed.
func openRun(t *testing.T) *process.Run {
	t.Helper()
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := run.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			showLogs(t, run.Dir())
		}
	})
	return run
}

func TestEmbedded(t *testing.T) {
	programs := programsOrSkip(t)
	run := openRun(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	e := NewEmbedded(run, programs)
	began := time.Now()
	if _, err := e.Create(ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("ready after %.1f s", time.Since(began).Seconds())
	admin := kubernetes.NewForConfigOrDie(e.KubernetesRestConfig())

	t.Run("a ServiceAccount has its own rights and no more", func(t *testing.T) {
		sa := ServiceAccount{Namespace: "tenant-x", Name: "writer"}
		cfg, err := ConfigFor(ctx, e, sa)
		if err != nil {
			t.Fatal(err)
		}
		user := kubernetes.NewForConfigOrDie(cfg)
		who, err := user.AuthenticationV1().SelfSubjectReviews().Create(ctx, selfReview(), metav1.CreateOptions{})
		if err != nil || who.Status.UserInfo.Username != "system:serviceaccount:tenant-x:writer" {
			t.Errorf("identity is %q, %v", who.Status.UserInfo.Username, err)
		}
		if _, err := user.CoreV1().Secrets("tenant-x").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("list of secrets without a role: %v", err)
		}
	})

	t.Run("controllers work and the audit log names the writer", func(t *testing.T) {
		job := sleepingJob("worker")
		if _, err := admin.BatchV1().Jobs("default").Create(ctx, job, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		var pod corev1.Pod
		processtest.WaitFor(t, time.Minute, "the job's pod", func() bool {
			pods, err := admin.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "job-name=worker"})
			if err != nil || len(pods.Items) != 1 {
				return false
			}
			pod = pods.Items[0]
			return true
		})
		var found auditEvent
		for _, event := range auditEvents(t, e.AuditLog()) {
			if event.Verb == "create" && event.ResponseObject.Metadata.UID == string(pod.UID) {
				found = event
			}
			if event.Verb == "get" || event.Verb == "list" || event.Verb == "watch" {
				t.Fatalf("a read is in the audit log: %+v", event)
			}
			if event.ObjectRef.Resource == "leases" || event.ObjectRef.Resource == "events" {
				t.Fatalf("bookkeeping is in the audit log: %+v", event)
			}
		}
		if got, want := found.User.Username, "system:serviceaccount:kube-system:job-controller"; got != want {
			t.Errorf("the pod's writer is %q, want %q", got, want)
		}
		if found.ResponseObject.Metadata.ResourceVersion == "" || found.UserAgent == "" {
			t.Errorf("no resourceVersion or agent in %+v", found)
		}
	})

	t.Run("a privileged pod is accepted", func(t *testing.T) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "privileged"}, Spec: corev1.PodSpec{
			HostNetwork: true,
			Containers:  []corev1.Container{{Name: "c", Image: "none", SecurityContext: &corev1.SecurityContext{Privileged: new(true)}}},
		}}
		if _, err := admin.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			t.Error(err)
		}
	})

	t.Run("the API server comes back as it was", func(t *testing.T) {
		before := e.KubernetesRestConfig().Host
		if err := e.RestartAPIServer(ctx); err != nil {
			t.Fatal(err)
		}
		if after := e.KubernetesRestConfig().Host; after != before {
			t.Errorf("address changed from %s to %s", before, after)
		}
		if _, err := admin.BatchV1().Jobs("default").Get(ctx, "worker", metav1.GetOptions{}); err != nil {
			t.Errorf("the job is gone: %v", err)
		}
	})

	t.Run("only the owner reads what it wrote", func(t *testing.T) {
		assertPrivate(t, run.Dir())
		logs := filepath.Join(t.TempDir(), "logs")
		if err := e.ExportLogs(ctx, logs); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"audit", "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
			if _, err := os.Stat(filepath.Join(logs, name+".log")); err != nil {
				t.Error(err)
			}
		}
	})

	t.Run("everything listens on loopback only", func(t *testing.T) {
		listeners := processtest.Listeners(t, run.Dir())
		for _, l := range listeners {
			if !l.Loopback() {
				t.Errorf("%s listens on %s", l.Program, l.Address)
			}
		}
		if len(listeners) < 5 {
			t.Errorf("listeners %v; want those of etcd (2), kube-apiserver, kube-controller-manager, kube-scheduler", listeners)
		}
	})

	saved := filepath.Join(t.TempDir(), "saved")
	if err := e.Save(ctx, saved); err != nil {
		t.Fatal(err)
	}
	after := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "after"}}
	if _, err := admin.CoreV1().ConfigMaps("default").Create(ctx, after, metav1.CreateOptions{}); err != nil {
		t.Errorf("a write after Save: %v", err) // etcd goes on
	}
	if err := e.Destroy(ctx); err != nil {
		t.Fatal(err)
	}
	if pids := processtest.Pids(t, run.Dir()); len(pids) != 0 {
		t.Errorf("processes left after Destroy: %v", pids)
	}
	if _, err := os.Stat(e.GetKubeconfig()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the administrator's kubeconfig is left: %v", err)
	}

	t.Run("a new cluster starts from what was saved", func(t *testing.T) {
		assertOwnersOnly(t, saved)
		run, err := process.Open(filepath.Join(t.TempDir(), "run"))
		if err != nil {
			t.Fatal(err)
		}
		defer run.Close()
		e := NewEmbedded(run, programs).From(saved)
		if _, err := e.Create(ctx); err != nil {
			t.Fatal(err)
		}
		admin := kubernetes.NewForConfigOrDie(e.KubernetesRestConfig())
		if _, err := admin.BatchV1().Jobs("default").Get(ctx, "worker", metav1.GetOptions{}); err != nil {
			t.Errorf("the job is not there: %v", err)
		}
		if _, err := admin.CoreV1().ConfigMaps("default").Get(ctx, "after", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("what was written after Save: %v, want not found", err)
		}
		if err := e.Save(ctx, saved); !errors.Is(err, fs.ErrExist) {
			t.Errorf("Save onto what is there: %v", err)
		}
	})
}

func assertOwnersOnly(t *testing.T, dir string) {
	t.Helper()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%s: %v, %v; want mode 700", dir, info.Mode(), err)
	}
}

func TestBeforeCreate(t *testing.T) {
	e := NewEmbedded(nil, nil)
	if e.WithName("x") != e || e.SetDefaults() != e {
		t.Error("the builders do not return the provider")
	}
	if _, err := e.CreateWithConfig(t.Context(), "file"); err == nil {
		t.Error("CreateWithConfig worked")
	}
	if _, err := e.Kubeconfig(t.Context(), ServiceAccount{}); err == nil {
		t.Error("Kubeconfig before Create worked")
	}
	if e.KubernetesRestConfig() != (*rest.Config)(nil) || e.EtcdURL() != "" {
		t.Error("an address before Create")
	}
}

// auditEvent is the part of an audit event that the tests read.
type auditEvent struct {
	Verb, UserAgent string
	User            struct{ Username string }
	ObjectRef       struct{ Resource, Name string }
	ResponseObject  struct {
		Metadata struct{ UID, ResourceVersion string }
	}
}

func auditEvents(t *testing.T, path string) []auditEvent {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var events []auditEvent
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e auditEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("audit log: %v in %s", err, lines.Text())
		}
		events = append(events, e)
	}
	if len(events) == 0 || lines.Err() != nil {
		t.Fatalf("audit log has %d events, %v", len(events), lines.Err())
	}
	return events
}

func assertPrivate(t *testing.T, dir string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		files++
		secret := strings.Contains(path, "kubeconfig") || strings.HasSuffix(path, ".key") || strings.HasSuffix(path, "audit.log")
		if mode := info.Mode().Perm(); path == dir && mode != 0o700 || secret && mode&0o077 != 0 {
			t.Errorf("%s has mode %o", path, mode)
		}
		return nil
	})
	if err != nil || files < 20 {
		t.Errorf("saw %d files, %v", files, err)
	}
}

func showLogs(t *testing.T, dir string) {
	logs, _ := filepath.Glob(filepath.Join(dir, "logs", "kube-*.log"))
	for _, log := range logs {
		out, _ := exec.Command("tail", "-n", "20", log).CombinedOutput()
		t.Logf("%s\n%s", log, out)
	}
}
