package platform

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/release"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/yaml"
)

// RerunJob is the Job of RunMigrations, in ArtifactNamespace.
const RerunJob = "cozystack-migration-rerun"

// RunMigrations runs the migrations from…Target-1 once more and returns the Job's attempts. It takes the hook of the
// platform release as Helm stored it, Job, ServiceAccount and rights, under the name RerunJob and with CURRENT_VERSION
// set to from. The rights are removed at the end, as Helm removes the hook's; the Job stays until the next call.
// Migrations that fail are in the attempts; the error is for what the run itself could not do.
func RunMigrations(ctx context.Context, e *Env, v *Version, from int) ([]Attempt, error) {
	attempts, err := runMigrations(ctx, e, from)
	if err != nil {
		return nil, fmt.Errorf("run migrations of platform %q from %d again: %w", v.Spec, from, err)
	}
	return attempts, nil
}

func runMigrations(ctx context.Context, e *Env, from int) ([]Attempt, error) {
	config, err := e.operator(ctx)
	if err != nil {
		return nil, err
	}
	helm, err := e.helm(config)
	if err != nil {
		return nil, err
	}
	objects, err := hookObjects(helm, from)
	if err != nil {
		return nil, err
	}
	a, err := newApplier(config, e.Outlived)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.hookTimeout())
	defer cancel()
	// A Job's pod template can't change, so an older one has to be gone first.
	foreground := metav1.DeletePropagationForeground
	if err := client.BatchV1().Jobs(ArtifactNamespace).Delete(ctx, RerunJob, metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	if err := waitForJob(ctx, client, func(job *batchv1.Job) bool { return job == nil }); err != nil {
		return nil, fmt.Errorf("wait for the previous Job %s to be gone: %w", RerunJob, err)
	}
	job := objects[len(objects)-1]
	rights := objects[:len(objects)-1]
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		for _, o := range slices.Backward(rights) {
			if err := a.delete(cleanup, o); err != nil {
				e.logf("%v", err)
			}
		}
	}()
	if err := a.apply(ctx, "the migration hook", rights); err != nil {
		return nil, err
	}
	if err := a.apply(ctx, "the migration hook", []*unstructured.Unstructured{job}); err != nil {
		return nil, err
	}
	if err := waitForJob(ctx, client, finished); err != nil {
		return nil, fmt.Errorf("wait for Job %s: %w", RerunJob, err)
	}
	attempts, err := e.attempts(ctx, config, RerunJob)
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, attempt := range attempts {
		lines = append(lines, attempt.Log...)
	}
	return attempts, e.keep("logs", "migration-rerun.log", []byte(strings.Join(lines, "\n")+"\n"))
}

// hookObjects returns the objects of the newest release that has a migration hook, renamed; the Job is the last one.
func hookObjects(helm *action.Configuration, from int) ([]*unstructured.Unstructured, error) {
	history := action.NewHistory(helm)
	releases, err := history.Run(Release)
	if err != nil {
		return nil, fmt.Errorf("history of release %s: %w", Release, err)
	}
	slices.SortFunc(releases, func(a, b *release.Release) int { return b.Version - a.Version })
	for _, rel := range releases {
		if !slices.ContainsFunc(rel.Hooks, func(h *release.Hook) bool { return h.Kind == "Job" && h.Name == HookJob }) {
			continue
		}
		var objects []*unstructured.Unstructured
		var job *unstructured.Unstructured
		for _, h := range rel.Hooks {
			o := new(unstructured.Unstructured)
			if err := yaml.Unmarshal([]byte(strings.ReplaceAll(h.Manifest, HookJob, RerunJob)), o); err != nil {
				return nil, fmt.Errorf("hook %s: %w", h.Path, err)
			}
			if !strings.HasPrefix(o.GetName(), RerunJob) {
				continue // some other hook of the chart
			}
			if o.GetNamespace() == "" && !strings.HasPrefix(o.GetKind(), "ClusterRole") {
				o.SetNamespace(ArtifactNamespace)
			}
			if o.GetKind() == "Job" {
				job = o
				continue
			}
			objects = append(objects, o)
		}
		if job == nil {
			return nil, fmt.Errorf("the hook of release %s revision %d holds no Job", Release, rel.Version)
		}
		return append(objects, job), setCurrentVersion(job, from)
	}
	return nil, fmt.Errorf("no revision of release %s has a hook %s: nothing was ever migrated here", Release, HookJob)
}

func setCurrentVersion(job *unstructured.Unstructured, from int) error {
	containers, _, err := unstructured.NestedSlice(job.Object, "spec", "template", "spec", "containers")
	if err != nil {
		return err
	}
	found := false
	for _, c := range containers {
		container, _ := c.(map[string]any)
		env, _ := container["env"].([]any)
		for _, v := range env {
			if v, ok := v.(map[string]any); ok && v["name"] == "CURRENT_VERSION" {
				v["value"] = strconv.Itoa(from)
				found = true
			}
		}
	}
	if !found {
		return fmt.Errorf("no variable CURRENT_VERSION in Job %s", HookJob)
	}
	return unstructured.SetNestedSlice(job.Object, containers, "spec", "template", "spec", "containers")
}

// waitForJob watches RerunJob until the condition holds; it sees nil when there is no such Job.
func waitForJob(ctx context.Context, client kubernetes.Interface, done func(*batchv1.Job) bool) error {
	jobs := client.BatchV1().Jobs(ArtifactNamespace)
	one := fields.OneTermEqualSelector("metadata.name", RerunJob).String()
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = one
			return jobs.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = one
			return jobs.Watch(ctx, o)
		},
	}
	absent := func(store cache.Store) (bool, error) { return len(store.List()) == 0 && done(nil), nil }
	_, err := watchtools.UntilWithSync(ctx, source, &batchv1.Job{}, absent, func(event watch.Event) (bool, error) {
		job, ok := event.Object.(*batchv1.Job)
		if !ok || event.Type == watch.Deleted {
			job = nil
		}
		return done(job), nil
	})
	return err
}

func finished(job *batchv1.Job) bool {
	return job != nil && slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		return (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue
	})
}

func (a *applier) delete(ctx context.Context, o *unstructured.Unstructured) error {
	mapping, err := a.mapping(o)
	if err != nil {
		return err
	}
	var resource dynamic.ResourceInterface = a.client.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		resource = a.client.Resource(mapping.Resource).Namespace(o.GetNamespace())
	}
	if err := resource.Delete(ctx, o.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}
