package cluster

import (
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/kindconfig"
)

func TestKindConfigMountsTheAuditLog(t *testing.T) {
	var config v1alpha4.Cluster
	if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(kindconfig.One, "${AUDIT_DIR}", `"/run a/logs"`)), &config); err != nil {
		t.Fatal(err)
	}
	if len(config.Nodes) != 1 || len(config.Nodes[0].ExtraMounts) != 1 {
		t.Fatalf("nodes %+v", config.Nodes)
	}
	if mount := config.Nodes[0].ExtraMounts[0]; mount.HostPath != "/run a/logs" || mount.ContainerPath != auditMount {
		t.Errorf("mount %+v", mount)
	}
	var kubeadm struct {
		APIServer struct {
			ExtraArgs    map[string]string
			ExtraVolumes []struct{ HostPath, MountPath string }
		}
	}
	if err := yaml.Unmarshal([]byte(config.KubeadmConfigPatches[0]), &kubeadm); err != nil {
		t.Fatal(err)
	}
	if got := kubeadm.APIServer.ExtraArgs["audit-log-path"]; got != auditMount+"/audit.log" {
		t.Errorf("audit log at %q", got)
	}
	if v := kubeadm.APIServer.ExtraVolumes; len(v) != 1 || v[0].HostPath != auditMount || v[0].MountPath != auditMount {
		t.Errorf("volumes %+v", v)
	}
}

func TestExposeRelaysToLoopback(t *testing.T) {
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	defer run.Close()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "hello from "+conn.LocalAddr().(*net.TCPAddr).IP.String())
			conn.Close()
		}
	}()
	k := NewKind(run, nil, "image", 1)
	port := server.Addr().(*net.TCPAddr).Port
	if _, err := k.Expose(port); err == nil {
		t.Error("exposed before the cluster was there")
	}
	k.gateway = "127.0.0.2" // any address of this machine but the server's
	host, err := k.Expose(port)
	if err != nil || host != k.gateway {
		t.Fatalf("exposed at %q, %v", host, err)
	}
	conn, err := net.Dial("tcp", net.JoinHostPort(host, strings.Split(server.Addr().String(), ":")[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); err != nil || string(got) != "hello from 127.0.0.1" {
		t.Errorf("the server says %q, %v", got, err)
	}
}

func TestPinnedPodsRunOnTheRealNodesAlone(t *testing.T) {
	pod := corev1.PodSpec{
		NodeSelector: map[string]string{"a": "b"},
		Tolerations:  []corev1.Toleration{{Key: "node-role.kubernetes.io/master", Effect: corev1.TaintEffectNoSchedule}},
	}
	(&Kind{}).Pin(&pod)
	if want := map[string]string{"a": "b", "upgrade-e2e.cozystack.io/real": "true"}; !maps.Equal(pod.NodeSelector, want) {
		t.Errorf("node selector %v", pod.NodeSelector)
	}
	taint := corev1.Toleration{Key: "upgrade-e2e.cozystack.io/real", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	if !slices.Contains(pod.Tolerations, taint) || len(pod.Tolerations) != 2 {
		t.Errorf("tolerations %v", pod.Tolerations)
	}
}

func TestKindClusterIsNamedAfterItsRun(t *testing.T) {
	names := map[string]bool{}
	for _, dir := range []string{"a", "b"} {
		run, err := process.Open(filepath.Join(t.TempDir(), dir))
		if err != nil {
			t.Fatal(err)
		}
		name := NewKind(run, nil, "image", 1).name
		if err := run.Close(); err != nil {
			t.Fatal(err)
		}
		// Host names have 63 characters, and kind appends the node's role.
		if !strings.HasPrefix(name, kindPrefix) || len(name+"-control-plane") > 63 {
			t.Errorf("name %q", name)
		}
		names[name] = true
	}
	if len(names) != 2 {
		t.Errorf("two runs share %v", names)
	}
}

func TestWithoutDockerThereIsNothingToSweep(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if lines, err := SweepKind(t.Context(), true); err != nil || len(lines) != 0 {
		t.Errorf("swept %q, %v", lines, err)
	}
}

func TestLookedUpDropsTheTagBesideADigest(t *testing.T) {
	for reference, want := range map[string]string{
		"ghcr.io/a/b:v1":             "ghcr.io/a/b:v1",
		"ghcr.io/a/b:v1@sha256:0":    "ghcr.io/a/b@sha256:0",
		"ghcr.io/a/b@sha256:0":       "ghcr.io/a/b@sha256:0",
		"host:5000/a/b@sha256:0":     "host:5000/a/b@sha256:0",
		"host:5000/a/b:v1@sha256:0a": "host:5000/a/b@sha256:0a",
	} {
		if got := lookedUp(reference); got != want {
			t.Errorf("%s is looked up as %s, want %s", reference, got, want)
		}
	}
}

func TestAClusterThatStaysIsOneRunsAtATime(t *testing.T) {
	root := t.TempDir()
	open := func(name string) *process.Run {
		run, err := process.Open(filepath.Join(root, "runs", name))
		if err != nil {
			t.Fatal(err)
		}
		return run
	}
	first := open("first")
	one, two := NewKind(first, nil, "image", 1).Reuse(root, "mine"), NewKind(first, nil, "image", 1).Reuse(root, "mine")
	if want := filepath.Join(root, ".kind", "mine"); filepath.Dir(one.GetKubeconfig()) != want || !strings.HasPrefix(one.AuditLog(), want) {
		t.Errorf("kubeconfig %s, audit log %s: not in %s", one.GetKubeconfig(), one.AuditLog(), want)
	}
	if one.name != two.name || !stays(filepath.Join(root, ".kind", "mine")) || stays(first.Dir()) {
		t.Errorf("names %s and %s, stays %v, %v", one.name, two.name, stays(filepath.Join(root, ".kind", "mine")), stays(first.Dir()))
	}
	if err := one.claim(); err != nil {
		t.Fatal(err)
	}
	if err := two.claim(); err == nil || err.Error() != "another run uses it" {
		t.Errorf("claimed twice: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := open("second")
	defer second.Close()
	three := NewKind(second, nil, "image", 1).Reuse(root, "mine")
	// A run that was killed holds no lock of the cluster's, but its reaper is still at work there.
	if err := os.WriteFile(filepath.Join(root, ".kind", "mine", "run"), []byte(second.Dir()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := three.claim(); err == nil || !strings.HasSuffix(err.Error(), "has not left it yet") {
		t.Errorf("claimed while a reaper is at work: %v", err)
	}
}
