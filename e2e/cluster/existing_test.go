package cluster

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
)

// TestExistingTakesAwayWhatItMade has a run on a cluster of somebody else's, and looks at what is there before and after.
func TestExistingTakesAwayWhatItMade(t *testing.T) {
	programs := programsOrSkip(t)
	run := openRun(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	theirs := NewEmbedded(run, programs)
	kubeconfig, err := theirs.Create(ctx)
	if err != nil {
		t.Fatal(err)
	}
	owner := kubernetes.NewForConfigOrDie(theirs.KubernetesRestConfig())
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(owner.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "theirs"},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}}}, metav1.CreateOptions{}))
	must(owner.RbacV1().ClusterRoles().Create(ctx, role("theirs", nil), metav1.CreateOptions{}))
	must(owner.CoreV1().ConfigMaps("default").Create(ctx, configMap("theirs"), metav1.CreateOptions{}))

	e := NewExisting(run, programs, kubeconfig, theirs.AuditLog(), "true")
	must(e.Create(ctx))
	if host, err := e.Expose(taken(t)); host != "127.0.0.1" || err == nil {
		t.Errorf("exposed at %q, %v: the address from which a node on 127.0.0.1 is reached is 127.0.0.1, where the port is taken", host, err)
	}
	admin := kubernetes.NewForConfigOrDie(e.KubernetesRestConfig())
	cfg, err := ConfigFor(ctx, e, ServiceAccount{Namespace: "default", Name: "ours"})
	if err != nil {
		t.Fatal(err)
	}
	must(admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "ours"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "ours"}}}, metav1.CreateOptions{}))
	account := kubernetes.NewForConfigOrDie(cfg)
	must(admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ours"}}, metav1.CreateOptions{}))
	// By whom is no matter in a namespace of the run; who would take the finalizer off has ended.
	held := configMap("held")
	held.Finalizers = []string{"example.com/held"}
	must(owner.CoreV1().ConfigMaps("ours").Create(ctx, held, metav1.CreateOptions{}))
	must(account.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "ours"}}, metav1.CreateOptions{}))
	must(account.CoreV1().ConfigMaps("kube-system").Create(ctx, configMap("ours"), metav1.CreateOptions{}))
	must(owner.CoreV1().Pods("default").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "on-ours"},
		Spec: corev1.PodSpec{NodeName: "ours", Containers: []corev1.Container{{Name: "c", Image: "none"}}}}, metav1.CreateOptions{}))
	must(owner.RbacV1().ClusterRoles().Create(ctx, role("of-a-release", map[string]string{"meta.helm.sh/release-namespace": "ours"}), metav1.CreateOptions{}))
	released := configMap("of-a-release")
	released.Annotations = map[string]string{"meta.helm.sh/release-namespace": "ours"}
	must(owner.CoreV1().ConfigMaps("default").Create(ctx, released, metav1.CreateOptions{}))
	must(owner.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "of-ours", Annotations: released.Annotations}}, metav1.CreateOptions{}))
	must(owner.CoreV1().ConfigMaps("of-ours").Create(ctx, held, metav1.CreateOptions{}))
	// A namespace of the run's goes, and somebody makes one of that name.
	must(admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "replaced"}}, metav1.CreateOptions{}))
	must(nil, owner.CoreV1().Namespaces().Delete(ctx, "replaced", metav1.DeleteOptions{}))
	must(nil, wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		_, err := owner.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "replaced"}}, metav1.CreateOptions{})
		return err == nil, nil
	}))
	must(owner.CoreV1().ConfigMaps("replaced").Create(ctx, configMap("theirs"), metav1.CreateOptions{}))
	must(owner.RbacV1().ClusterRoles().Create(ctx, role("of-replaced", map[string]string{"meta.helm.sh/release-namespace": "replaced"}), metav1.CreateOptions{}))
	must(owner.RbacV1().ClusterRoles().Create(ctx, role("of-another-release", map[string]string{"meta.helm.sh/release-namespace": "default"}), metav1.CreateOptions{}))
	must(owner.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "meanwhile"}}, metav1.CreateOptions{}))
	if e.Owns("meanwhile") || e.Owns("default") || !e.Owns("ours") {
		t.Errorf("meanwhile %v, default %v, ours %v", e.Owns("meanwhile"), e.Owns("default"), e.Owns("ours"))
	}

	t.Run("what was there can't be changed", func(t *testing.T) {
		changed := role("theirs", map[string]string{"changed": "true"})
		_, err := admin.RbacV1().ClusterRoles().Update(ctx, changed, metav1.UpdateOptions{})
		if err == nil || !strings.Contains(err.Error(), "clusterroles.rbac.authorization.k8s.io theirs: it was on the cluster before the run") {
			t.Errorf("update: %v", err)
		}
		if err := account.RbacV1().ClusterRoles().Delete(ctx, "theirs", metav1.DeleteOptions{}); err == nil {
			t.Error("deleted")
		}
		if err := account.RbacV1().ClusterRoles().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err == nil || !strings.Contains(err.Error(), "a run deletes by name") {
			t.Errorf("all deleted: %v", err)
		}
		if _, err := account.CoreV1().ConfigMaps("default").Update(ctx, configMap("theirs"), metav1.UpdateOptions{}); err == nil || !strings.Contains(err.Error(), "configmaps default/theirs: it was on the cluster before the run") {
			t.Errorf("update in a namespace: %v", err)
		}
		if _, err := admin.RbacV1().ClusterRoles().Get(ctx, "theirs", metav1.GetOptions{}); err != nil {
			t.Errorf("read: %v", err)
		}
	})

	t.Run("a second run is refused where the first has a Cozystack", func(t *testing.T) {
		must(owner.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "cozy-system"}}, metav1.CreateOptions{}))
		if err := CheckExisting(ctx, kubeconfig, theirs.AuditLog()); err == nil || !strings.Contains(err.Error(), "namespace cozy-system is there") {
			t.Errorf("check: %v", err)
		}
		if err := owner.CoreV1().Namespaces().Delete(ctx, "cozy-system", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("somebody's default class is found", func(t *testing.T) {
		for _, class := range []struct{ name, isDefault, want string }{{"plain", "false", ""}, {"standard", "true", "standard"}} {
			must(owner.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{Provisioner: "example.com/none", ObjectMeta: metav1.ObjectMeta{
				Name: class.name, Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": class.isDefault}}}, metav1.CreateOptions{}))
			if got, err := DefaultClass(ctx, kubeconfig); got != class.want || err != nil {
				t.Errorf("beside %s: %q, %v", class.name, got, err)
			}
			must(nil, owner.StorageV1().StorageClasses().Delete(ctx, class.name, metav1.DeleteOptions{}))
		}
	})

	t.Run("another cluster's audit log is refused", func(t *testing.T) {
		other := filepath.Join(t.TempDir(), "audit.log")
		must(nil, os.WriteFile(other, nil, 0o600))
		err := audited(ctx, "here", owner, other, time.Second)
		if err == nil || !strings.Contains(err.Error(), "did not write a request down in "+other) || strings.Contains(err.Error(), "\n") {
			t.Errorf("said %v", err)
		}
	})

	lines, err := Leave(ctx, e.stock)
	if err != nil {
		t.Fatal(err)
	}
	lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasSuffix(line, " cozy-system") }) // it may be on its way
	if want := []string{
		"left alone, not known to be the run's: clusterroles.rbac.authorization.k8s.io of-another-release",
		"left alone, not known to be the run's: clusterroles.rbac.authorization.k8s.io of-replaced",
		"left alone, not known to be the run's: namespaces meanwhile",
		"left alone, not known to be the run's: namespaces replaced",
	}; !slices.Equal(lines, want) {
		t.Errorf("left %q, want %q", lines, want)
	}
	for what, c := range map[string]struct {
		err  error
		want bool
	}{
		"their ClusterRole":       {get(owner.RbacV1().ClusterRoles().Get(ctx, "theirs", metav1.GetOptions{})), true},
		"their node":              {get(owner.CoreV1().Nodes().Get(ctx, "theirs", metav1.GetOptions{})), true},
		"their ConfigMap":         {get(owner.CoreV1().ConfigMaps("default").Get(ctx, "theirs", metav1.GetOptions{})), true},
		"our namespace":           {get(owner.CoreV1().Namespaces().Get(ctx, "ours", metav1.GetOptions{})), false},
		"our node":                {get(owner.CoreV1().Nodes().Get(ctx, "ours", metav1.GetOptions{})), false},
		"a pod on it":             {get(owner.CoreV1().Pods("default").Get(ctx, "on-ours", metav1.GetOptions{})), false},
		"our account":             {get(owner.CoreV1().ServiceAccounts("default").Get(ctx, "ours", metav1.GetOptions{})), false},
		"our ConfigMap":           {get(owner.CoreV1().ConfigMaps("kube-system").Get(ctx, "ours", metav1.GetOptions{})), false},
		"our release's role":      {get(owner.RbacV1().ClusterRoles().Get(ctx, "of-a-release", metav1.GetOptions{})), false},
		"our release's ConfigMap": {get(owner.CoreV1().ConfigMaps("default").Get(ctx, "of-a-release", metav1.GetOptions{})), false},
		"our release's namespace": {get(owner.CoreV1().Namespaces().Get(ctx, "of-ours", metav1.GetOptions{})), false},
		"what replaced ours":      {get(owner.CoreV1().ConfigMaps("replaced").Get(ctx, "theirs", metav1.GetOptions{})), true},
		"another release's role":  {get(owner.RbacV1().ClusterRoles().Get(ctx, "of-another-release", metav1.GetOptions{})), true},
		"their kube-root-ca.crt":  {get(owner.CoreV1().ConfigMaps("default").Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})), true},
		"our ClusterRoleBinding":  {get(owner.RbacV1().ClusterRoleBindings().Get(ctx, "ours", metav1.GetOptions{})), false},
		"their default namespace": {get(owner.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{})), true},
	} {
		if c.err != nil && !apierrors.IsNotFound(c.err) {
			t.Errorf("%s: %v", what, c.err)
		} else if there := c.err == nil; there != c.want {
			t.Errorf("%s: there %v, want %v", what, there, c.want)
		}
	}
	gone := t.TempDir()
	for _, file := range []string{stockFound, stockKubeconfig, stockMade} {
		data, err := os.ReadFile(filepath.Join(e.stock, file))
		must(nil, err)
		must(nil, os.WriteFile(filepath.Join(gone, file), data, 0o600))
	}
	must(nil, os.WriteFile(filepath.Join(gone, stockCluster), []byte(filepath.Join(gone, "marker")+"\nthis one"), 0o600))
	for marker, want := range map[string]int{"another one": 0, "this one": len(lines)} {
		must(nil, os.WriteFile(filepath.Join(gone, "marker"), []byte(marker), 0o600))
		if lines, err := Leave(ctx, gone); err != nil || len(lines) != want {
			t.Errorf("leave when the cluster is %s: %q, %v", marker, lines, err)
		}
	}
	if lines, err := Leave(ctx, t.TempDir()); err != nil || len(lines) > 0 {
		t.Errorf("leave a cluster of which no stock was taken: %q, %v", lines, err)
	}
}

func get(_ any, err error) error { return err }

func role(name string, annotations map[string]string) *rbacv1.ClusterRole {
	return &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
}

func configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// taken is a port of 127.0.0.1 that somebody listens on until the test ends.
func taken(t *testing.T) int {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener.Addr().(*net.TCPAddr).Port
}

func TestTarget(t *testing.T) {
	for path, want := range map[string]string{
		"/api/v1/namespaces":                                "namespaces ",
		"/api/v1/namespaces/a":                              "namespaces a",
		"/api/v1/namespaces/a/pods":                         "pods a/",
		"/api/v1/namespaces/a/pods/b":                       "pods a/b",
		"/apis/apps/v1/namespaces/a/deployments/b":          "deployments.apps a/b",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/b": "clusterroles.rbac.authorization.k8s.io b",
		"/apis/apps/v1/namespaces/a/deployments/b/status":   "",
		"/api/v1/namespaces/a/serviceaccounts/b/token":      "",
		"/apis/apps/v1":                                     "",
		"/version":                                          "",
		"/readyz":                                           "",
	} {
		request, err := http.NewRequest(http.MethodPost, "https://cluster"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		m, ok := target(request)
		got := ""
		if ok {
			got = m.String()
		}
		if got != want {
			t.Errorf("%s is of %q, want %q", path, got, want)
		}
	}
}

func TestExistingIsRefusedInOneLine(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "kubeconfig")
	err := CheckExisting(t.Context(), missing, missing)
	if err == nil || !strings.Contains(err.Error(), missing) || strings.Contains(err.Error(), "\n") {
		t.Errorf("without a file: %v", err)
	}
}

func TestSeveralAPIServersAreRefused(t *testing.T) {
	log := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for addresses, want := range map[string]string{"10.0.0.1": "did not write a request down", "10.0.0.1 10.0.0.2": "has 2 API servers"} {
		client := fake.NewClientset(&discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
			Endpoints:  []discoveryv1.Endpoint{{Addresses: strings.Fields(addresses)}}})
		if err := audited(t.Context(), "here", client, log, time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with %s: %v, want %q", addresses, err, want)
		}
	}
}
