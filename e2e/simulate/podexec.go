package simulate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cozystack.io/upgrade-e2e/e2e/process"
)

const (
	firstRestartPause = time.Second     // kubelet's is 10 s
	lastRestartPause  = 5 * time.Minute // kubelet's
	messageBytes      = 2048            // kubelet's limit for a message taken from the log
)

// podRun is one executed pod: its containers are processes of the host that see the pod's environment, volumes and
// ServiceAccount token below a folder of their own.
type podRun struct {
	k    *kubelet
	pod  *corev1.Pod
	dir  string // 0700, below the run's state
	stop context.CancelFunc
	done chan struct{}
}

// errUnsupported marks what a stand-in can't run at all; the pod fails with the text.
var errUnsupported = errors.New("the stand-in for kubelet can't run this pod")

// startRun starts a pod's processes in the background.
func (k *kubelet) startRun(pod *corev1.Pod) *podRun {
	ctx, stop := context.WithCancel(context.Background())
	r := &podRun{k: k, pod: pod.DeepCopy(), dir: k.sim.o.Processes.State("pods", string(pod.UID)), stop: stop, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		if err := r.run(ctx); err != nil && ctx.Err() == nil {
			k.log.Error(err, "pod not executed", "pod", key(pod))
		}
	}()
	return r
}

// kill ends the pod's processes and returns when they have ended.
func (r *podRun) kill() {
	r.stop()
	<-r.done
}

func (r *podRun) cleanUp() error { return os.RemoveAll(r.dir) }

// run prepares the pod, runs its init containers one after another and its containers side by side, and reports.
func (r *podRun) run(ctx context.Context) error {
	now := metav1.Now()
	status := begun(r.pod, now)
	status.Phase = corev1.PodPending
	box, err := r.prepare(ctx)
	if err != nil {
		return r.fail(ctx, status, err)
	}
	for _, c := range r.pod.Spec.InitContainers {
		if ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways {
			return r.fail(ctx, status, fmt.Errorf("%w: container %s is a sidecar", errUnsupported, c.Name))
		}
	}
	report := &statusReport{r: r, status: status}
	for _, c := range r.pod.Spec.InitContainers {
		if code, err := r.container(ctx, box, c, report); err != nil || code != 0 {
			return errors.Join(err, report.finish(ctx, corev1.PodFailed))
		}
	}
	report.start()
	var codes sync.Map
	var all errgroup.Group
	for _, c := range r.pod.Spec.Containers {
		all.Go(func() error {
			code, err := r.container(ctx, box, c, report)
			codes.Store(c.Name, code)
			return err
		})
	}
	err = all.Wait()
	phase := corev1.PodSucceeded
	codes.Range(func(_, code any) bool {
		if code != 0 {
			phase = corev1.PodFailed
		}
		return true
	})
	if ctx.Err() != nil {
		return ctx.Err() // deleted or over: who killed it reports
	}
	return errors.Join(err, report.finish(ctx, phase))
}

// fail reports a pod that could not be started.
func (r *podRun) fail(ctx context.Context, status corev1.PodStatus, err error) error {
	status.Message = err.Error()
	report := &statusReport{r: r, status: status}
	return errors.Join(err, report.finish(ctx, corev1.PodFailed))
}

// container runs one container to its end, restarting it as the pod's restart policy says, and returns the exit code.
func (r *podRun) container(ctx context.Context, box *sandbox, c corev1.Container, report *statusReport) (int, error) {
	for restarts, pause := int32(0), firstRestartPause; ; restarts++ {
		spec, err := r.spec(ctx, box, c)
		if err != nil {
			report.set(ctx, c, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 128, Reason: "ContainerCannotRun",
				Message: err.Error(), StartedAt: metav1.Now(), FinishedAt: metav1.Now()}}, restarts)
			return 128, err
		}
		tail := &tail{limit: messageBytes}
		spec.Stdout = tail
		started := metav1.Now()
		report.set(ctx, c, corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: started}}, restarts)
		code, err := r.k.sim.o.Processes.Exec(ctx, spec)
		if ctx.Err() != nil {
			return -1, ctx.Err()
		}
		ended := corev1.ContainerStateTerminated{ExitCode: int32(code), Reason: "Completed", StartedAt: started, FinishedAt: metav1.Now()}
		if err != nil {
			ended.ExitCode, code = 128, 128
			ended.Reason, ended.Message = "ContainerCannotRun", err.Error()
		} else if code != 0 {
			ended.Reason, ended.Message = "Error", tail.String()
		}
		report.set(ctx, c, corev1.ContainerState{Terminated: &ended}, restarts)
		if code == 0 || r.pod.Spec.RestartPolicy != corev1.RestartPolicyOnFailure {
			return code, err
		}
		select {
		case <-ctx.Done():
			return -1, ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, lastRestartPause)
	}
}

// spec is the host process of a container.
func (r *podRun) spec(ctx context.Context, box *sandbox, c corev1.Container) (process.Spec, error) {
	env, err := r.environment(ctx, c)
	if err != nil {
		return process.Spec{}, err
	}
	mounts, err := box.mounts(c)
	if err != nil {
		return process.Spec{}, err
	}
	argv, dir, err := r.command(c, env)
	if err != nil {
		return process.Spec{}, err
	}
	for i := range argv {
		argv[i] = mounts.replace(argv[i])
	}
	for name, value := range env {
		env[name] = mounts.replace(value)
	}
	if c.WorkingDir != "" {
		dir = mounts.replace(c.WorkingDir)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		dir = box.home
	}
	argv[0] = onHost(argv[0], box.path)
	maps.Copy(env, map[string]string{"PATH": box.path, "HOME": box.home, "TMPDIR": box.tmp})
	if box.kubeconfig != "" {
		env["KUBECONFIG"] = box.kubeconfig
	}
	logs := "pods"
	if err := os.MkdirAll(filepath.Join(r.k.sim.o.Processes.Dir(), "logs", logs), 0o700); err != nil {
		return process.Spec{}, err
	}
	return process.Spec{
		Name: path.Join(logs, fmt.Sprintf("%s_%s_%s", r.pod.Namespace, r.pod.Name, c.Name)),
		Path: "env", Args: append(unset(os.Environ(), env), argv...), Env: assignments(env), Dir: dir,
	}, nil
}

// command is what a container runs, from its own command or from what is known about its image.
func (r *podRun) command(c corev1.Container, env map[string]string) (argv []string, dir string, err error) {
	args := expandAll(c.Args, env)
	if len(c.Command) > 0 {
		return append(expandAll(c.Command, env), args...), "", nil
	}
	entrypoint := r.k.sim.entrypoint.Load()
	if entrypoint == nil || *entrypoint == nil {
		return nil, "", fmt.Errorf("%w: container %s names no command and nothing is known about images", errUnsupported, c.Name)
	}
	program, own, ok := (*entrypoint)(c.Image)
	if !ok {
		return nil, "", fmt.Errorf("%w: container %s names no command and image %s is unknown; name it in the platform's profile", errUnsupported, c.Name, c.Image)
	}
	if len(args) == 0 {
		args = slices.Clone(own)
	}
	return append([]string{program}, args...), filepath.Dir(program), nil
}

// onHost finds a container's program on the host: as it is, or by its name in the path when the image has it elsewhere.
// sh and ash mean bash: in the images that jobs use /bin/sh is busybox, which knows pipefail, and the host's sh may be
// dash, which does not. The path's folder of shims has bash under both names.
func onHost(program, searchPath string) string {
	base := path.Base(program)
	if !path.IsAbs(program) {
		return program
	}
	if _, err := os.Stat(program); err == nil && base != "sh" && base != "ash" {
		return program
	}
	for _, dir := range filepath.SplitList(searchPath) {
		if info, err := os.Stat(filepath.Join(dir, base)); err == nil && !info.IsDir() {
			return base
		}
	}
	return program
}

// environment is the container's: envFrom, then env, each able to refer to earlier ones.
func (r *podRun) environment(ctx context.Context, c corev1.Container) (map[string]string, error) {
	host, port, err := hostPort(r.k.sim.o.Admin.Host)
	if err != nil {
		return nil, err
	}
	env := map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "HOSTNAME": r.pod.Name}
	for _, from := range c.EnvFrom {
		data, err := r.envFrom(ctx, from)
		if err != nil {
			return nil, fmt.Errorf("envFrom of container %s: %w", c.Name, err)
		}
		for k, v := range data {
			env[from.Prefix+k] = v
		}
	}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			env[e.Name] = expand(e.Value, env)
			continue
		}
		value, found, err := r.valueFrom(ctx, e.ValueFrom)
		if err != nil {
			return nil, fmt.Errorf("variable %s of container %s: %w", e.Name, c.Name, err)
		}
		if found {
			env[e.Name] = value
		}
	}
	return env, nil
}

func (r *podRun) envFrom(ctx context.Context, from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		return r.configMap(ctx, from.ConfigMapRef.Name, ptr.Deref(from.ConfigMapRef.Optional, false))
	case from.SecretRef != nil:
		return r.secret(ctx, from.SecretRef.Name, ptr.Deref(from.SecretRef.Optional, false))
	}
	return nil, nil
}

func (r *podRun) valueFrom(ctx context.Context, from *corev1.EnvVarSource) (value string, found bool, err error) {
	var data map[string]string
	var field string
	var optional bool
	switch {
	case from.FieldRef != nil:
		value, err := r.field(from.FieldRef.FieldPath)
		return value, true, err
	case from.ConfigMapKeyRef != nil:
		field, optional = from.ConfigMapKeyRef.Key, ptr.Deref(from.ConfigMapKeyRef.Optional, false)
		data, err = r.configMap(ctx, from.ConfigMapKeyRef.Name, optional)
	case from.SecretKeyRef != nil:
		field, optional = from.SecretKeyRef.Key, ptr.Deref(from.SecretKeyRef.Optional, false)
		data, err = r.secret(ctx, from.SecretKeyRef.Name, optional)
	default:
		return "", false, fmt.Errorf("%w: only fieldRef, configMapKeyRef and secretKeyRef are known", errUnsupported)
	}
	if err != nil {
		return "", false, err
	}
	value, found = data[field]
	if !found && !optional {
		return "", false, fmt.Errorf("key %s is missing", field)
	}
	return value, found, nil
}

var mapField = regexp.MustCompile(`^metadata\.(labels|annotations)\['(.+)'\]$`)

// field is a field of the pod, as the downward API names it.
func (r *podRun) field(name string) (string, error) {
	if m := mapField.FindStringSubmatch(name); m != nil {
		if m[1] == "labels" {
			return r.pod.Labels[m[2]], nil
		}
		return r.pod.Annotations[m[2]], nil
	}
	value, ok := map[string]string{
		"metadata.name": r.pod.Name, "metadata.namespace": r.pod.Namespace, "metadata.uid": string(r.pod.UID),
		"spec.nodeName": r.pod.Spec.NodeName, "spec.serviceAccountName": r.pod.Spec.ServiceAccountName,
		"status.podIP": podIP(r.pod.UID), "status.hostIP": hosts[r.pod.Spec.NodeName].String(),
	}[name]
	if !ok {
		return "", fmt.Errorf("%w: field %s is not known", errUnsupported, name)
	}
	return value, nil
}

// configMap reads a ConfigMap of the pod's namespace; a missing one is waited for, as kubelet does.
func (r *podRun) configMap(ctx context.Context, name string, optional bool) (map[string]string, error) {
	cm := &corev1.ConfigMap{}
	if err := r.await(ctx, name, cm, optional); err != nil {
		return nil, err
	}
	data := maps.Clone(cm.Data)
	if data == nil {
		data = map[string]string{}
	}
	for k, v := range cm.BinaryData {
		data[k] = string(v)
	}
	return data, nil
}

func (r *podRun) secret(ctx context.Context, name string, optional bool) (map[string]string, error) {
	s := &corev1.Secret{}
	if err := r.await(ctx, name, s, optional); err != nil {
		return nil, err
	}
	data := map[string]string{}
	for k, v := range s.Data {
		data[k] = string(v)
	}
	return data, nil
}

// await reads an object and, unless it is optional, tries again every second until it is there.
func (r *podRun) await(ctx context.Context, name string, o client.Object, optional bool) error {
	for told := false; ; told = true {
		err := r.k.direct.Get(ctx, client.ObjectKey{Namespace: r.pod.Namespace, Name: name}, o)
		if err == nil || optional && apierrors.IsNotFound(err) {
			return nil
		}
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("read %T %s/%s: %w", o, r.pod.Namespace, name, err)
		}
		if !told {
			r.k.log.Info("pod waits for what it refers to", "pod", key(r.pod), "kind", fmt.Sprintf("%T", o), "name", name)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// token asks for a token of the pod's own ServiceAccount, bound to the pod as kubelet's are.
func (r *podRun) token(ctx context.Context, audience string, seconds int64) (string, error) {
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: r.pod.Namespace, Name: r.serviceAccount()}}
	req := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: r.pod.Name, UID: r.pod.UID},
	}}
	if audience != "" {
		req.Spec.Audiences = []string{audience}
	}
	if err := r.k.direct.SubResource("token").Create(ctx, sa, req); err != nil {
		return "", fmt.Errorf("token of ServiceAccount %s: %w", key(sa), err)
	}
	return req.Status.Token, nil
}

func (r *podRun) serviceAccount() string {
	if r.pod.Spec.ServiceAccountName == "" {
		return "default"
	}
	return r.pod.Spec.ServiceAccountName
}

// sandbox is what a pod's containers share on the host.
type sandbox struct {
	pod                         *corev1.Pod
	home, tmp, path, kubeconfig string
	volumes                     map[string]string // name of a volume → its folder
}

// prepare makes the pod's folders, volumes, token and kubeconfig.
func (r *podRun) prepare(ctx context.Context) (*sandbox, error) {
	box := &sandbox{pod: r.pod, home: filepath.Join(r.dir, "home"), tmp: filepath.Join(r.dir, "tmp"), volumes: map[string]string{}}
	for _, dir := range []string{box.home, box.tmp} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	shims, err := r.k.shims()
	if err != nil {
		return nil, err
	}
	box.path = strings.Join([]string{r.k.sim.o.Programs, shims, os.Getenv("PATH")}, string(filepath.ListSeparator))
	if ptr.Deref(r.pod.Spec.AutomountServiceAccountToken, true) {
		token, err := r.token(ctx, "", 3600)
		if err != nil {
			return nil, err
		}
		box.kubeconfig = filepath.Join(r.dir, "kubeconfig")
		if err := r.writeKubeconfig(box.kubeconfig, token); err != nil {
			return nil, err
		}
	}
	for _, v := range r.pod.Spec.Volumes {
		dir := filepath.Join(r.dir, "volumes", v.Name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		if err := r.fill(ctx, dir, v); err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		box.volumes[v.Name] = dir
	}
	return box, box.rewrite()
}

// shims makes the folder in which bash is found as sh and ash, see onHost.
func (k *kubelet) shims() (string, error) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		return "", fmt.Errorf("%w: bash, which stands for the images' sh, is not installed", errUnsupported)
	}
	dir := k.sim.o.Processes.State("pods", "bin")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	for _, name := range []string{"sh", "ash"} {
		if err := os.Symlink(bash, filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
	return dir, nil
}

func (r *podRun) writeKubeconfig(name, token string) error {
	admin := r.k.sim.o.Admin
	config := clientcmdapi.NewConfig()
	cluster := clientcmdapi.NewCluster()
	cluster.Server, cluster.CertificateAuthorityData, cluster.CertificateAuthority = admin.Host, admin.CAData, admin.CAFile
	config.Clusters["run"] = cluster
	config.AuthInfos["pod"] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts["pod"] = &clientcmdapi.Context{Cluster: "run", AuthInfo: "pod", Namespace: r.pod.Namespace}
	config.CurrentContext = "pod"
	return clientcmd.WriteToFile(*config, name) // 0600
}

// fill puts a volume's files into dir.
func (r *podRun) fill(ctx context.Context, dir string, v corev1.Volume) error {
	switch {
	case v.EmptyDir != nil:
		return nil
	case v.ConfigMap != nil:
		data, err := r.configMap(ctx, v.ConfigMap.Name, ptr.Deref(v.ConfigMap.Optional, false))
		return errors.Join(err, writeFiles(dir, data, v.ConfigMap.Items, v.ConfigMap.DefaultMode))
	case v.Secret != nil:
		data, err := r.secret(ctx, v.Secret.SecretName, ptr.Deref(v.Secret.Optional, false))
		return errors.Join(err, writeFiles(dir, data, v.Secret.Items, v.Secret.DefaultMode))
	case v.Projected != nil:
		for _, s := range v.Projected.Sources {
			if err := r.project(ctx, dir, s); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("%w: only emptyDir, configMap, secret and projected volumes are known", errUnsupported)
}

func (r *podRun) project(ctx context.Context, dir string, s corev1.VolumeProjection) error {
	switch {
	case s.ServiceAccountToken != nil:
		token, err := r.token(ctx, s.ServiceAccountToken.Audience, max(600, ptr.Deref(s.ServiceAccountToken.ExpirationSeconds, 3600)))
		return errors.Join(err, writeFiles(dir, map[string]string{s.ServiceAccountToken.Path: token}, nil, nil))
	case s.ConfigMap != nil:
		data, err := r.configMap(ctx, s.ConfigMap.Name, ptr.Deref(s.ConfigMap.Optional, false))
		return errors.Join(err, writeFiles(dir, data, s.ConfigMap.Items, nil))
	case s.Secret != nil:
		data, err := r.secret(ctx, s.Secret.Name, ptr.Deref(s.Secret.Optional, false))
		return errors.Join(err, writeFiles(dir, data, s.Secret.Items, nil))
	case s.DownwardAPI != nil:
		data := map[string]string{}
		for _, f := range s.DownwardAPI.Items {
			if f.FieldRef == nil {
				return fmt.Errorf("%w: resourceFieldRef is not known", errUnsupported)
			}
			value, err := r.field(f.FieldRef.FieldPath)
			if err != nil {
				return err
			}
			data[f.Path] = value
		}
		return writeFiles(dir, data, nil, nil)
	}
	return fmt.Errorf("%w: unknown source of a projected volume", errUnsupported)
}

// writeFiles writes data below dir: all keys under their names or the listed ones under their paths.
func writeFiles(dir string, data map[string]string, list []corev1.KeyToPath, mode *int32) error {
	if len(list) == 0 {
		for _, k := range slices.Sorted(maps.Keys(data)) {
			list = append(list, corev1.KeyToPath{Key: k, Path: k})
		}
	}
	for _, f := range list {
		if !filepath.IsLocal(f.Path) {
			return fmt.Errorf("path %s leaves its volume", f.Path)
		}
		value, ok := data[f.Key]
		if !ok {
			return fmt.Errorf("key %s is missing", f.Key)
		}
		name := filepath.Join(dir, f.Path)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			return err
		}
		// Whoever may read it is the run's user; what a mode says about others is dropped, about executing it is kept.
		perm := fs.FileMode(ptr.Deref(f.Mode, ptr.Deref(mode, 0o644)))&0o100 | 0o600
		if err := os.WriteFile(name, []byte(value), perm); err != nil {
			return err
		}
	}
	return nil
}

// mountTable maps mount paths of a container to paths of the host. A container's paths are absolute and the host's
// root is not ours, so paths are replaced wherever they appear as text: in commands, variables and ConfigMap files.
type mountTable []mount

type mount struct {
	pattern *regexp.Regexp
	host    string
}

func newMountTable(paths map[string]string) mountTable {
	var t mountTable
	// Longest first: /etc/app/conf before /etc/app.
	for _, p := range slices.SortedFunc(maps.Keys(paths), func(a, b string) int { return len(b) - len(a) }) {
		t = append(t, mount{regexp.MustCompile(`(^|[^\w./-])` + regexp.QuoteMeta(path.Clean(p)) + `($|[^\w.-])`), paths[p]})
	}
	return t
}

func (t mountTable) replace(s string) string {
	for _, m := range t {
		// Twice, for matches that share the character between them.
		for range 2 {
			s = m.pattern.ReplaceAllStringFunc(s, func(found string) string {
				g := m.pattern.FindStringSubmatch(found)
				return g[1] + m.host + g[2]
			})
		}
	}
	return s
}

// mounts is the table of one container.
func (b *sandbox) mounts(c corev1.Container) (mountTable, error) {
	paths := map[string]string{}
	for _, m := range c.VolumeMounts {
		dir, ok := b.volumes[m.Name]
		if !ok {
			return nil, fmt.Errorf("%w: container %s mounts unknown volume %s", errUnsupported, c.Name, m.Name)
		}
		if m.SubPathExpr != "" || !filepath.IsLocal(filepath.Join(".", m.SubPath)) {
			return nil, fmt.Errorf("%w: container %s mounts a computed path of volume %s", errUnsupported, c.Name, m.Name)
		}
		paths[m.MountPath] = filepath.Join(dir, m.SubPath)
	}
	if len(c.VolumeDevices) > 0 {
		return nil, fmt.Errorf("%w: container %s uses a block device", errUnsupported, c.Name)
	}
	return newMountTable(paths), nil
}

// rewrite replaces mount paths in the files of ConfigMaps, which hold the scripts that jobs run. Containers that mount
// one volume at different places can't be told apart there.
func (b *sandbox) rewrite() error {
	paths := map[string]string{}
	for _, c := range slices.Concat(b.pod.Spec.InitContainers, b.pod.Spec.Containers) {
		for _, m := range c.VolumeMounts {
			host := filepath.Join(b.volumes[m.Name], m.SubPath)
			if other, ok := paths[m.MountPath]; ok && other != host {
				return fmt.Errorf("%w: its containers mount different volumes at %s", errUnsupported, m.MountPath)
			}
			paths[m.MountPath] = host
		}
	}
	table := newMountTable(paths)
	for _, v := range b.pod.Spec.Volumes {
		if v.ConfigMap == nil {
			continue
		}
		err := filepath.WalkDir(b.volumes[v.Name], func(name string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			return os.WriteFile(name, []byte(table.replace(string(data))), info.Mode().Perm())
		})
		if err != nil {
			return err
		}
	}
	return nil
}

var reference = regexp.MustCompile(`\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)`)

// expand replaces $(NAME) as Kubernetes does: unknown names stay, $$ is one dollar.
func expand(s string, env map[string]string) string {
	return reference.ReplaceAllStringFunc(s, func(found string) string {
		if found == "$$" {
			return "$"
		}
		if value, ok := env[found[2:len(found)-1]]; ok {
			return value
		}
		return found
	})
}

func expandAll(list []string, env map[string]string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = expand(s, env)
	}
	return out
}

// unset is the arguments of env that take away what the run's own environment would leak into a container. Values never
// appear in arguments, which every user of the machine can read.
func unset(environ []string, keep map[string]string) []string {
	var args []string
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if _, ok := keep[name]; !ok && name != process.Cookie && name != "" {
			args = append(args, "-u", name)
		}
	}
	return args
}

func assignments(env map[string]string) []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// tail keeps the last bytes written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	data  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - t.limit; over > 0 {
		t.data = slices.Clone(t.data[over:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.ToValidUTF8(string(t.data), "?")
}

// statusReport is the status of an executed pod as it grows; containers report side by side.
type statusReport struct {
	r      *podRun
	mu     sync.Mutex
	status corev1.PodStatus
}

// start turns the pod from its init containers to its containers.
func (s *statusReport) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Phase = corev1.PodRunning
	s.status.Conditions = podConditions(s.status.Conditions, true, "", metav1.Now())
}

// set reports the state of a container. A report that does not get through is followed by the next one.
func (s *statusReport) set(ctx context.Context, c corev1.Container, state corev1.ContainerState, restarts int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := &s.status.ContainerStatuses
	if slices.ContainsFunc(s.r.pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name }) {
		list = &s.status.InitContainerStatuses
	}
	running := state.Running != nil
	cs := corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, ContainerID: containerID(s.r.pod, c.Name),
		Ready: running, Started: &running, RestartCount: restarts, State: state}
	if i := slices.IndexFunc(*list, func(o corev1.ContainerStatus) bool { return o.Name == c.Name }); i >= 0 {
		if restarts > (*list)[i].RestartCount {
			cs.LastTerminationState = (*list)[i].State
		}
		(*list)[i] = cs
	} else {
		*list = append(*list, cs)
	}
	if err := s.write(ctx); err != nil && ctx.Err() == nil {
		s.r.k.log.Error(err, "status of a container not reported", "pod", key(s.r.pod), "container", c.Name)
	}
}

// finish reports the pod's end; it tries until it gets through, for a Job waits for nothing else.
func (s *statusReport) finish(ctx context.Context, phase corev1.PodPhase) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Phase = phase
	reason := "PodCompleted"
	if phase == corev1.PodFailed {
		reason = "PodFailed"
	}
	s.status.Conditions = podConditions(s.status.Conditions, false, reason, metav1.Now())
	for {
		err := s.write(ctx)
		if err == nil || apierrors.IsNotFound(err) || ctx.Err() != nil {
			return client.IgnoreNotFound(err)
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(time.Second):
		}
	}
}

func (s *statusReport) write(ctx context.Context) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.r.pod.Namespace, Name: s.r.pod.Name, UID: s.r.pod.UID}}
	base := pod.DeepCopy()
	pod.Status = *s.status.DeepCopy()
	if err := s.r.k.direct.Status().Patch(ctx, pod, client.StrategicMergeFrom(base)); err != nil {
		return fmt.Errorf("report status of pod %s: %w", key(pod), err)
	}
	return nil
}
