package platform

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/storage/driver"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

const (
	// Release is the platform chart's Helm release, in ArtifactNamespace.
	Release = "cozystack-platform"
	// HookJob is the migration hook's Job, in ArtifactNamespace.
	HookJob = "cozystack-migration-hook"
)

// Outcome is what an upgrade did to the platform release. It holds facts; whether they are right is for checks.
type Outcome struct {
	// Failure is "" when the platform release reached the new version and its charts were published; else one line.
	Failure string
	// Attempts are the hook's pods in the order of their start; none when there was nothing to migrate.
	Attempts []Attempt
	// Started is before the Helm upgrade, HookDone after it (the hook's end, nothing else in it takes time), Published
	// after the new ExternalArtifacts; a time that was not reached is zero.
	Started, HookDone, Published time.Time
}

// Attempt is one pod of the migration hook.
type Attempt struct {
	Pod string
	// Exit is the container's exit code, -1 while it has none.
	Exit int
	// Log are its lines, standard output and error as they came.
	Log []string
}

// HookLog returns the lines of all attempts.
func (o *Outcome) HookLog() []string {
	var lines []string
	for _, a := range o.Attempts {
		lines = append(lines, a.Log...)
	}
	return lines
}

// Exit returns the exit code of the hook's last attempt, 0 when no hook ran.
func (o *Outcome) Exit() int {
	if len(o.Attempts) == 0 {
		return 0
	}
	return o.Attempts[len(o.Attempts)-1].Exit
}

// Install puts the platform on a cluster that has none: namespaces, CRDs, manifests, objects and values of the
// profile, then the platform chart, then the charts. The cluster must have Flux's CRDs.
func Install(ctx context.Context, e *Env, v *Version) error {
	config, err := e.operator(ctx)
	if err != nil {
		return fmt.Errorf("install platform %q: %w", v.Spec, err)
	}
	if err := surround(ctx, config, v, true, e.Outlived); err != nil {
		return fmt.Errorf("install platform %q: %w", v.Spec, err)
	}
	helm, err := e.helm(config)
	if err != nil {
		return err
	}
	install := action.NewInstall(helm)
	install.ReleaseName, install.Namespace = Release, ArtifactNamespace
	install.Timeout = e.hookTimeout()
	rel, err := install.RunWithContext(ctx, v.chart, v.Profile.PlatformValues)
	if err != nil {
		return fmt.Errorf("install platform %q: release %s: %s", v.Spec, Release, oneLine(err.Error()))
	}
	if err := e.keepRelease(v, rel); err != nil {
		return err
	}
	e.logf("installed release %s, platform version %d", Release, v.Target)
	return Publish(ctx, e, v)
}

// Upgrade takes the platform to a new version in the platform's own order: the platform chart with its pre-upgrade
// hook first; only when that has succeeded, the new tree's CRDs and manifests and the new charts. A platform that
// refuses or whose hook fails is an Outcome with a Failure; the error is for what the run itself could not do.
func Upgrade(ctx context.Context, e *Env, v *Version) (*Outcome, error) {
	out := &Outcome{Started: time.Now()}
	config, err := e.operator(ctx)
	if err != nil {
		return nil, fmt.Errorf("upgrade to platform %q: %w", v.Spec, err)
	}
	helm, err := e.helm(config)
	if err != nil {
		return nil, err
	}
	if e.PublishFirst {
		if err := Publish(ctx, e, v); err != nil {
			return nil, err
		}
	}
	upgrade := action.NewUpgrade(helm)
	upgrade.Namespace = ArtifactNamespace
	upgrade.Timeout = e.hookTimeout()
	upgrade.ResetValues = true
	rel, helmErr := upgrade.RunWithContext(ctx, Release, v.chart, v.Profile.PlatformValues)
	out.HookDone = time.Now()
	if e.Migrated != nil {
		if err := e.Migrated(); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("upgrade to platform %q: %w", v.Spec, context.Cause(ctx))
	}
	if errors.Is(helmErr, driver.ErrNoDeployedReleases) || errors.Is(helmErr, driver.ErrReleaseNotFound) {
		return nil, fmt.Errorf("upgrade to platform %q: there is no release %s to upgrade", v.Spec, Release)
	}
	if ran(rel, out.Started) {
		if out.Attempts, err = e.attempts(ctx, config, HookJob); err != nil {
			return nil, err
		}
		if err := e.keep("logs", "migration-hook.log", []byte(strings.Join(out.HookLog(), "\n")+"\n")); err != nil {
			return nil, err
		}
	}
	if helmErr != nil {
		out.Failure = failure(helmErr, out.Attempts)
		e.logf("upgrade of release %s failed: %s", Release, out.Failure)
		return out, nil
	}
	if err := e.keepRelease(v, rel); err != nil {
		return nil, err
	}
	e.logf("upgraded release %s to platform version %d in %s", Release, v.Target, out.HookDone.Sub(out.Started).Round(time.Millisecond))
	if err := surround(ctx, config, v, false, e.Outlived); err != nil {
		return nil, fmt.Errorf("upgrade to platform %q: %w", v.Spec, err)
	}
	if err := Publish(ctx, e, v); err != nil {
		return nil, err
	}
	out.Published = time.Now()
	return out, nil
}

// failure is one line: Helm's reason and, when the hook ran, its last exit code and last lines.
func failure(err error, attempts []Attempt) string {
	line := oneLine(err.Error())
	if len(attempts) == 0 {
		return line
	}
	last := attempts[len(attempts)-1]
	tail := last.Log[max(0, len(last.Log)-3):]
	return fmt.Sprintf("%s; %s ended with exit code %d in attempt %d: %s", line, HookJob, last.Exit, len(attempts), strings.Join(tail, " | "))
}

// ran reports whether the release's own migration hook was started.
func ran(rel *release.Release, since time.Time) bool {
	return rel != nil && slices.ContainsFunc(rel.Hooks, func(h *release.Hook) bool {
		return h.Kind == "Job" && h.Name == HookJob && !h.LastRun.StartedAt.Time.Before(since)
	})
}

// surround brings what of the profile surrounds the charts. Unless the cluster is a fresh one, that is only what the
// tree itself carries; the profile's own objects do not change with the version.
func surround(ctx context.Context, config *rest.Config, v *Version, fresh, outlived bool) error {
	a, err := newApplier(config, outlived)
	if err != nil {
		return err
	}
	if fresh {
		var namespaces []*unstructured.Unstructured
		for _, name := range v.Profile.Namespaces {
			namespaces = append(namespaces, object("v1", "Namespace", "", name))
		}
		if err := a.apply(ctx, "profile "+v.Profile.Name, namespaces); err != nil {
			return err
		}
	}
	if err := a.applyCRDs(ctx, v); err != nil {
		return err
	}
	if err := a.applyFiles(ctx, v.Tree, v.Profile.Manifests); err != nil {
		return err
	}
	if !fresh {
		return nil
	}
	var objects []*unstructured.Unstructured
	for _, o := range v.Profile.Objects {
		objects = append(objects, (&unstructured.Unstructured{Object: o}).DeepCopy())
	}
	for _, namespace := range v.Profile.Values.In {
		values, err := yaml.Marshal(v.Profile.TenantValues(namespace))
		if err != nil {
			return err
		}
		secret := object("v1", "Secret", namespace, v.Profile.Values.Secret)
		secret.Object["stringData"] = map[string]any{"values.yaml": string(values)}
		objects = append(objects, secret)
	}
	return a.apply(ctx, "profile "+v.Profile.Name, objects)
}

func object(apiVersion, kind, namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": apiVersion, "kind": kind}}
	o.SetName(name)
	if namespace != "" {
		o.SetNamespace(namespace)
	}
	return o
}

// helm returns a Helm configuration for the platform's release, whose records are Secrets as Flux's are.
func (e *Env) helm(config *rest.Config) (*action.Configuration, error) {
	g, err := newGetter(config, ArtifactNamespace)
	if err != nil {
		return nil, err
	}
	c := new(action.Configuration)
	if err := c.Init(g, ArtifactNamespace, "secret", func(string, ...any) {}); err != nil {
		return nil, fmt.Errorf("helm: %w", err)
	}
	return c, nil
}

// keepRelease saves what the platform chart rendered, hooks included.
func (e *Env) keepRelease(v *Version, rel *release.Release) error {
	var b bytes.Buffer
	for _, h := range rel.Hooks {
		fmt.Fprintf(&b, "---\n# hook: %s\n%s\n", h.Path, h.Manifest)
	}
	b.WriteString(rel.Manifest)
	return e.keep("charts", fmt.Sprintf("%s-%d.yaml", Release, v.Target), b.Bytes())
}

// attempts reads the pods of a Job: their exit codes from the API server, their logs from the run's folder.
func (e *Env) attempts(ctx context.Context, config *rest.Config, job string) ([]Attempt, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	pods, err := client.CoreV1().Pods(ArtifactNamespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job})
	if err != nil {
		return nil, fmt.Errorf("list pods of Job %s: %w", job, err)
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	var attempts []Attempt
	for _, pod := range pods.Items {
		attempt := Attempt{Pod: pod.Name, Exit: -1}
		for _, c := range pod.Status.ContainerStatuses {
			if c.State.Terminated != nil {
				attempt.Exit = int(c.State.Terminated.ExitCode)
			}
		}
		if e.RealPods {
			attempt.Log, err = e.realPodLog(ctx, client, pod)
		} else {
			attempt.Log, err = e.podLog(pod)
		}
		if err != nil {
			return nil, err
		}
		attempts = append(attempts, attempt)
	}
	return attempts, nil
}

// podLog reads what the kubelet stand-in wrote of a pod's containers: logs/pods/<namespace>_<pod>_<container>.log.
func (e *Env) podLog(pod corev1.Pod) ([]string, error) {
	var lines []string
	for _, c := range pod.Spec.Containers {
		name := filepath.Join(e.Processes.Dir(), "logs", "pods", fmt.Sprintf("%s_%s_%s.log", pod.Namespace, pod.Name, c.Name))
		f, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // the pod was never started
		}
		if err != nil {
			return nil, err
		}
		scanner := bufio.NewScanner(f)
		scanner.Buffer(nil, 1<<20)
		for scanner.Scan() {
			lines = append(lines, scanner.Text())
		}
		if err := errors.Join(scanner.Err(), f.Close()); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
	}
	return lines, nil
}
