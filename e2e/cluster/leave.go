package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// leaveBound is how long what a run has made may take to be gone.
const leaveBound = 5 * time.Minute

// found is what a cluster held before a run.
type found struct {
	Namespaces []string `json:"namespaces"` // sorted
	// UIDs and Names (resource.group name, or resource.group namespace/name) are those of all objects but events.
	UIDs  sets.Set[types.UID] `json:"uids"`
	Names sets.Set[string]    `json:"names"`
}

func (f *found) namespace(name string) bool {
	_, ok := slices.BinarySearch(f.Namespaces, name)
	return ok
}

// look takes stock of a cluster.
func look(ctx context.Context, cfg *rest.Config) (*found, error) {
	l, err := newLeaving(cfg)
	if err != nil {
		return nil, err
	}
	objects, err := l.unscoped(ctx)
	if err != nil {
		return nil, fmt.Errorf("take stock of the cluster: %w", err)
	}
	scoped, err := l.scoped(ctx)
	if err != nil {
		return nil, fmt.Errorf("take stock of the cluster: %w", err)
	}
	objects = append(objects, scoped...)
	f := &found{UIDs: sets.New[types.UID](), Names: sets.New[string]()}
	for _, o := range objects {
		f.UIDs.Insert(o.UID)
		f.Names.Insert(o.String())
		if o.is("", "namespaces") {
			f.Namespaces = append(f.Namespaces, o.Name)
		}
	}
	slices.Sort(f.Namespaces)
	return f, nil
}

// Leave takes from an existing cluster what a run has made there, whose stock was taken into dir, and waits until it is gone. What
// is new there and not known to be the run's is left, and the lines say what, of objects without a namespace. Of a run that made
// nothing yet, and of a cluster that has gone, it takes nothing.
//
// The run's are: what its own clients have created, what releases of Helm in its namespaces have (annotation
// meta.helm.sh/release-namespace), what belongs to these, and everything in a namespace or of a kind that is the run's. It is known by
// its UID: a namespace that somebody made since under the same name is theirs.
func Leave(ctx context.Context, dir string) ([]string, error) {
	lines, err := leave(ctx, dir)
	if err != nil {
		return lines, fmt.Errorf("leave the existing cluster: %w", err)
	}
	return lines, nil
}

func leave(ctx context.Context, dir string) ([]string, error) {
	body, err := os.ReadFile(filepath.Join(dir, stockFound))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	before := &found{}
	if err := json.Unmarshal(body, before); err != nil {
		return nil, fmt.Errorf("read %s: %w", stockFound, err)
	}
	list, err := readLedger(filepath.Join(dir, stockMade))
	if err != nil {
		return nil, err
	}
	if gone, err := outlived(dir); err != nil || gone {
		return nil, err
	}
	_, cfg, err := load(filepath.Join(dir, stockKubeconfig))
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1
	l, err := newLeaving(cfg)
	if err != nil {
		return nil, err
	}
	l.before = before
	ctx, cancel := context.WithTimeout(ctx, leaveBound)
	defer cancel()
	if err := l.know(ctx, list); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{l.admission, l.inside, l.beside, l.rest, l.onNodes, l.gone} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return l.left(ctx)
}

// object is one object without a namespace, or one of a namespace.
type object struct {
	metav1.PartialObjectMetadata
	resource schema.GroupVersionResource
}

func (o object) is(group, resource string) bool {
	return o.resource.Group == group && o.resource.Resource == resource
}

func (o object) String() string {
	return made{GroupVersionResource: o.resource, Namespace: o.Namespace, Name: o.Name}.String()
}

// leaving is one call of Leave.
type leaving struct {
	disco  *discovery.DiscoveryClient
	client metadata.Interface
	before *found
	made   map[types.UID]made
	// namespaces and nodes are names of the run's that are there; released has those too of its namespaces that are gone.
	namespaces, released, nodes sets.Set[string]
}

// know finds out what of the run's is there.
func (l *leaving) know(ctx context.Context, list []made) error {
	l.made, l.namespaces, l.released, l.nodes = map[types.UID]made{}, sets.New[string](), sets.New[string](), sets.New[string]()
	for _, m := range list {
		l.made[m.UID] = m
		if m.GroupResource() == (schema.GroupResource{Resource: "namespaces"}) {
			l.released.Insert(m.Name)
		}
	}
	objects, err := l.unscoped(ctx)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if _, ok := l.made[o.UID]; o.is("", "namespaces") && !ok {
			l.released.Delete(o.Name) // somebody else's by now
		}
	}
	// Releases may bring namespaces, and these have releases.
	for known := -1; known < l.namespaces.Len(); {
		known = l.namespaces.Len()
		for _, o := range objects {
			switch {
			case l.before.UIDs.Has(o.UID) || !l.mine(o):
			case o.is("", "namespaces"):
				l.namespaces.Insert(o.Name)
				l.released.Insert(o.Name)
			case o.is("", "nodes"):
				l.nodes.Insert(o.Name)
			}
		}
	}
	return nil
}

// outlived tells whether the cluster that a stock was taken of has gone.
func outlived(dir string) (bool, error) {
	noted, err := os.ReadFile(filepath.Join(dir, stockCluster))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	marker, id, _ := strings.Cut(string(noted), "\n")
	now, err := os.ReadFile(marker)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return string(now) != id, nil
}

func newLeaving(cfg *rest.Config) (*leaving, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.UserAgent, cfg.WarningHandler = "upgrade-e2e-leave", rest.NoWarnings{} // of pods that outlive their Job: they go by themselves
	disco, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, err
	}
	client, err := metadata.NewForConfig(cfg)
	return &leaving{disco: disco, client: client}, err
}

// resources are those that can be listed and deleted, with or without namespaces. An aggregated API whose server has ended is left out.
func (l *leaving) resources(namespaced bool) ([]schema.GroupVersionResource, error) {
	lists, err := l.disco.ServerPreferredResources()
	if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
		return nil, err
	}
	lists = discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "delete"}}, lists)
	var out []schema.GroupVersionResource
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if r.Namespaced == namespaced {
				out = append(out, gv.WithResource(r.Name))
			}
		}
	}
	return out, nil
}

// list lists objects of resources, in all namespaces.
func (l *leaving) list(ctx context.Context, resources []schema.GroupVersionResource, options metav1.ListOptions) ([]object, error) {
	lists := make([][]object, len(resources))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i, resource := range resources {
		g.Go(func() error {
			got, err := l.client.Resource(resource).List(gctx, options)
			if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) || apierrors.IsServiceUnavailable(err) {
				return nil // a kind that is going, or whose server has gone
			}
			if err != nil {
				return fmt.Errorf("list %s: %w", resource.GroupResource(), err)
			}
			for _, item := range got.Items {
				lists[i] = append(lists[i], object{item, resource})
			}
			return nil
		})
	}
	err := g.Wait()
	return slices.Concat(lists...), err
}

func (l *leaving) unscoped(ctx context.Context) ([]object, error) {
	resources, err := l.resources(false)
	if err != nil {
		return nil, err
	}
	return l.list(ctx, resources, metav1.ListOptions{})
}

// scoped are the objects in namespaces, but for events, which go with those.
func (l *leaving) scoped(ctx context.Context) ([]object, error) {
	resources, err := l.resources(true)
	if err != nil {
		return nil, err
	}
	return l.list(ctx, slices.DeleteFunc(resources, func(r schema.GroupVersionResource) bool { return r.Resource == "events" }), metav1.ListOptions{})
}

// ours are the objects without a namespace that the run has made, others those that are new and not known to be.
func (l *leaving) ours(ctx context.Context) (ours, others []object, err error) {
	all, err := l.unscoped(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, o := range all {
		switch {
		case l.before.UIDs.Has(o.UID):
		case l.mine(o):
			ours = append(ours, o)
		default:
			others = append(others, o)
		}
	}
	return ours, others, nil
}

func (l *leaving) mine(o object) bool {
	if _, ok := l.made[o.UID]; ok {
		return true
	}
	if ns := o.Annotations["meta.helm.sh/release-namespace"]; ns != "" {
		return l.released.Has(ns)
	}
	return slices.ContainsFunc(o.OwnerReferences, func(owner metav1.OwnerReference) bool {
		_, ok := l.made[owner.UID]
		return ok
	})
}

// remove deletes objects, without asking their finalizers: who would act on them has ended.
func (l *leaving) remove(ctx context.Context, objects []object) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for _, o := range objects {
		g.Go(func() error {
			c := l.client.Resource(o.resource).Namespace(o.Namespace)
			// A namespace's contents go first, which the namespace controller sees to; a CRD's, by the API server.
			if len(o.Finalizers) > 0 && !o.is("", "namespaces") && !o.is("apiextensions.k8s.io", "customresourcedefinitions") {
				_, err := c.Patch(gctx, o.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
				if err != nil && !apierrors.IsNotFound(err) {
					return fmt.Errorf("take the finalizers from %s: %w", o, err)
				}
			}
			options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.UID}}
			if o.is("", "pods") {
				options.GracePeriodSeconds = new(int64)
			}
			err := c.Delete(gctx, o.Name, options)
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				return fmt.Errorf("delete %s: %w", o, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// admission takes away what would be asked about every other step, and whose servers have ended.
func (l *leaving) admission(ctx context.Context) error {
	ours, _, err := l.ours(ctx)
	if err != nil {
		return err
	}
	return l.remove(ctx, slices.DeleteFunc(ours, func(o object) bool {
		return o.resource.Group != "admissionregistration.k8s.io" && !o.is("apiregistration.k8s.io", "apiservices")
	}))
}

// inside empties the run's namespaces and deletes them, and what its releases have put into others.
func (l *leaving) inside(ctx context.Context) error {
	all, err := l.scoped(ctx)
	if err != nil {
		return err
	}
	err = l.remove(ctx, slices.DeleteFunc(all, func(o object) bool {
		return !l.namespaces.Has(o.Namespace) && (l.before.UIDs.Has(o.UID) || !l.mine(o))
	}))
	if err != nil {
		return err
	}
	ours, _, err := l.ours(ctx)
	if err != nil {
		return err
	}
	return l.remove(ctx, slices.DeleteFunc(ours, func(o object) bool { return !o.is("", "namespaces") }))
}

// beside deletes what the run has put into namespaces that were there before.
func (l *leaving) beside(ctx context.Context) error {
	var list []object
	for _, m := range l.made {
		if m.Namespace == "" {
			continue
		}
		got, err := l.client.Resource(m.GroupVersionResource).Namespace(m.Namespace).Get(ctx, m.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for %s: %w", m, err)
		}
		if got.UID == m.UID {
			list = append(list, object{*got, m.GroupVersionResource})
		}
	}
	return l.remove(ctx, list)
}

// rest deletes the run's objects without a namespace. Kinds come last: their objects go with them.
func (l *leaving) rest(ctx context.Context) error {
	ours, _, err := l.ours(ctx)
	if err != nil {
		return err
	}
	var kinds, others []object
	for _, o := range ours {
		if o.is("apiextensions.k8s.io", "customresourcedefinitions") {
			kinds = append(kinds, o)
		} else {
			others = append(others, o)
		}
	}
	if err := l.remove(ctx, others); err != nil {
		return err
	}
	return l.remove(ctx, kinds)
}

// onNodes deletes what the cluster itself has put onto the run's nodes, such as pods of DaemonSets, and its events on them.
func (l *leaving) onNodes(ctx context.Context) error {
	for node := range l.nodes {
		pods, err := l.list(ctx, []schema.GroupVersionResource{{Version: "v1", Resource: "pods"}}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
		if err != nil {
			return err
		}
		events, err := l.list(ctx, []schema.GroupVersionResource{{Version: "v1", Resource: "events"}}, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + node})
		if err != nil {
			return err
		}
		if err := l.remove(ctx, append(pods, events...)); err != nil {
			return err
		}
	}
	return nil
}

// gone waits until all of it is.
func (l *leaving) gone(ctx context.Context) error {
	var last []object
	err := wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var err error
		last, _, err = l.ours(ctx)
		return len(last) == 0, err
	})
	if err != nil && len(last) > 0 {
		return fmt.Errorf("%d objects are still there, for example %s: %w", len(last), last[0], err)
	}
	return err
}

// left tells of what is new and is left alone.
func (l *leaving) left(ctx context.Context) ([]string, error) {
	_, others, err := l.ours(ctx)
	var lines []string
	for _, o := range others {
		lines = append(lines, fmt.Sprintf("left alone, not known to be the run's: %s", o))
	}
	slices.Sort(lines)
	return lines, err
}
