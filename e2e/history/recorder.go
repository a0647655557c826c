package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// RecorderOptions say what to record and where to.
type RecorderOptions struct {
	Config   *rest.Config
	Kinds    []schema.GroupVersionResource // nil: DefaultKinds
	AuditLog string                        // path of the API server's audit log; "" records no writers, and no verdict can pass
	Out      string                        // file to create
	Others   []string                      // namespaces of other users, whose Secrets are not recorded
	Header   Header                        // RunID, Family, Provider, Seed, Old, New; Start fills in the rest
}

// DefaultKinds are what a verdict about worker pools needs. Of Pods only KubeVirt's and CDI's are recorded, of Secrets
// only Helm's releases, of ConfigMaps only those of cozy-system.
func DefaultKinds() []schema.GroupVersionResource {
	var out []schema.GroupVersionResource
	for _, g := range []struct {
		group, version string
		resources      []string
	}{
		{"", "v1", []string{"namespaces", "pods", "persistentvolumeclaims", "persistentvolumes", "secrets", "configmaps", "services", "events"}},
		{"kubevirt.io", "v1", []string{"virtualmachines", "virtualmachineinstances", "virtualmachineinstancemigrations"}},
		{"cdi.kubevirt.io", "v1beta1", []string{"datavolumes"}},
		{"snapshot.storage.k8s.io", "v1", []string{"volumesnapshots"}},
		{"infrastructure.cluster.x-k8s.io", "v1alpha1", []string{"kubevirtmachines", "kubevirtmachinetemplates", "kubevirtclusters"}},
		{"cluster.x-k8s.io", "v1beta1", []string{"clusters", "machines", "machinesets", "machinedeployments", "machinehealthchecks"}},
		{"bootstrap.cluster.x-k8s.io", "v1alpha3", []string{"talosconfigtemplates"}},
		{"controlplane.cluster.x-k8s.io", "v1alpha1", []string{"kamajicontrolplanes"}},
		{"helm.toolkit.fluxcd.io", "v2", []string{"helmreleases"}},
		{"source.toolkit.fluxcd.io", "v1", []string{"externalartifacts"}},
		{"cozystack.io", "v1alpha1", []string{"workloadmonitors"}},
	} {
		for _, r := range g.resources {
			out = append(out, schema.GroupVersionResource{Group: g.group, Version: g.version, Resource: r})
		}
	}
	return out
}

// What scopes the recorded ConfigMaps and Secrets.
const (
	platformNamespace = "cozy-system"
	releaseSecret     = "sh.helm.release.v1." // prefix of the names of Helm's Secrets
)

// Recorder writes down what happens on a cluster until it is stopped.
type Recorder struct {
	file    *file
	kinds   []*kind
	watches errgroup.Group
	tail    errgroup.Group
	endWatch,
	endTail context.CancelFunc
	stop sync.Once
	err  error // of Stop

	mu    sync.Mutex
	phase string
	last  map[Ref]time.Time // last write to an object, Events left out
}

// kind is one recorded resource.
type kind struct {
	gvr    schema.GroupVersionResource
	client dynamic.ResourceInterface
	fields string
	keep   func(*unstructured.Unstructured) bool

	mu      sync.Mutex
	version string                                // resource version that the watch has come to
	seen    time.Time                             // when it came there
	alive   map[string]*unstructured.Unstructured // by UID; those that keep refuses are in, too
}

func (k *kind) name() string { return k.gvr.GroupResource().String() }

// Start lists every kind (the baseline), and watches each from there on. The recorder runs until Stop or until ctx ends.
// Kinds that the API server does not serve are skipped and named in the header.
func Start(ctx context.Context, o RecorderOptions) (*Recorder, error) {
	config := rest.CopyConfig(o.Config)
	config.QPS, config.Burst = -1, 0 // a recorder that waits for itself loses nothing, but baselines late
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("recorder: %w", err)
	}
	disco, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("recorder: %w", err)
	}
	return start(ctx, o, client, func(gv string) (*metav1.APIResourceList, error) { return disco.ServerResourcesForGroupVersion(gv) })
}

func start(ctx context.Context, o RecorderOptions, client dynamic.Interface, serves func(groupVersion string) (*metav1.APIResourceList, error)) (*Recorder, error) {
	if o.Kinds == nil {
		o.Kinds = DefaultKinds()
	}
	served, unserved, err := split(o.Kinds, serves)
	if err != nil {
		return nil, fmt.Errorf("recorder: %w", err)
	}
	h := o.Header
	h.Schema, h.Started, h.Audit, h.Unserved = Schema, time.Now(), o.AuditLog != "", unserved
	r := &Recorder{last: map[Ref]time.Time{}}
	for _, gvr := range served {
		h.Kinds = append(h.Kinds, gvr.GroupResource().String())
		r.kinds = append(r.kinds, newKind(gvr, client, o.Others))
	}
	if r.file, err = create(ctx, o.Out, h); err != nil {
		return nil, err
	}
	tailCtx, endTail := context.WithCancel(ctx)
	r.endTail = endTail
	if o.AuditLog != "" {
		t, err := newTail(o.AuditLog, r.file.add) // before the lists: no write after them may be missed
		if err != nil {
			endTail()
			return nil, errors.Join(err, r.file.close())
		}
		r.tail.Go(func() error { t.follow(tailCtx); return nil })
	}
	lists, listCtx := errgroup.WithContext(ctx)
	lists.SetLimit(4)
	for _, k := range r.kinds {
		lists.Go(func() error { return r.baseline(listCtx, k) })
	}
	if err := lists.Wait(); err != nil {
		endTail()
		_ = r.tail.Wait()
		return nil, errors.Join(fmt.Errorf("record the baseline: %w", err), r.file.close())
	}
	watchCtx, endWatch := context.WithCancel(ctx)
	r.endWatch = endWatch
	for _, k := range r.kinds {
		r.watches.Go(func() error { r.watch(watchCtx, k); return nil })
	}
	return r, r.file.sync()
}

func split(kinds []schema.GroupVersionResource, serves func(string) (*metav1.APIResourceList, error)) (served []schema.GroupVersionResource, unserved []string, err error) {
	lists := map[string]map[string]bool{}
	for _, gvr := range kinds {
		gv := gvr.GroupVersion().String()
		if lists[gv] == nil {
			lists[gv] = map[string]bool{}
			list, err := serves(gv)
			if err != nil && !apierrors.IsNotFound(err) {
				return nil, nil, fmt.Errorf("ask what the API server serves in %s: %w", gv, err)
			}
			if err == nil {
				for _, r := range list.APIResources {
					lists[gv][r.Name] = true
				}
			}
		}
		if lists[gv][gvr.Resource] {
			served = append(served, gvr)
		} else {
			unserved = append(unserved, gvr.GroupResource().String())
		}
	}
	return served, unserved, nil
}

func newKind(gvr schema.GroupVersionResource, client dynamic.Interface, others []string) *kind {
	k := &kind{gvr: gvr, client: client.Resource(gvr), keep: func(*unstructured.Unstructured) bool { return true }, alive: map[string]*unstructured.Unstructured{}}
	switch k.name() {
	case "secrets":
		k.fields = "type=helm.sh/release.v1"
		k.keep = func(o *unstructured.Unstructured) bool {
			return o.Object["type"] == "helm.sh/release.v1" && !slices.Contains(others, o.GetNamespace())
		}
	case "configmaps":
		k.client = client.Resource(gvr).Namespace(platformNamespace)
	case "pods":
		k.keep = func(o *unstructured.Unstructured) bool {
			return o.GetLabels()["kubevirt.io"] != "" || o.GetLabels()["cdi.kubevirt.io"] != ""
		}
	}
	return k
}

// list reads a resource completely, in pages of one resource version.
func (k *kind) list(ctx context.Context) (*unstructured.UnstructuredList, error) {
	all, token := &unstructured.UnstructuredList{}, ""
	for {
		page, err := k.client.List(ctx, metav1.ListOptions{Limit: 500, Continue: token, FieldSelector: k.fields})
		if apierrors.IsResourceExpired(err) && token != "" { // the pages took too long: all at once, then
			page, err = k.client.List(ctx, metav1.ListOptions{FieldSelector: k.fields})
			all.Items = nil
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", k.name(), err)
		}
		all.Items = append(all.Items, page.Items...)
		all.SetResourceVersion(page.GetResourceVersion())
		if token = page.GetContinue(); token == "" {
			return all, nil
		}
	}
}

func (r *Recorder) baseline(ctx context.Context, k *kind) error {
	list, err := k.list(ctx)
	if err != nil {
		return err
	}
	for i := range list.Items {
		r.event(k, Baseline, &list.Items[i], false)
	}
	r.listed(k, list)
	return nil
}

func (r *Recorder) listed(k *kind, list *unstructured.UnstructuredList) {
	r.file.add(line{List: &List{Time: time.Now(), Resource: k.name(), ResourceVersion: list.GetResourceVersion(), Count: len(list.Items)}})
	k.reached(list.GetResourceVersion())
}

// reached notes that everything up to a resource version has been recorded.
func (k *kind) reached(version string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.version, k.seen = version, time.Now()
}

// event records an object's change. The line is sent before the watch counts as having come this far.
func (r *Recorder) event(k *kind, change Change, o *unstructured.Unstructured, relisted bool) {
	o.SetManagedFields(nil)
	now := time.Now()
	if k.keep(o) {
		r.file.add(line{Event: &Event{Time: now, Type: change, Resource: k.name(), Relisted: relisted, Object: o}})
		if change != Baseline && k.name() != "events" {
			r.mu.Lock()
			r.last[RefOf(k.name(), o)] = now
			r.mu.Unlock()
		}
	}
	k.mu.Lock()
	if change == Deleted {
		delete(k.alive, string(o.GetUID()))
	} else {
		k.alive[string(o.GetUID())] = o
	}
	k.mu.Unlock()
	if change != Baseline && !relisted {
		k.reached(o.GetResourceVersion())
	}
}

// watch follows one resource until ctx ends. A watch that ends is taken up again from its last resource version, which
// loses nothing; only when the API server has forgotten that version is there a gap, and a new list.
func (r *Recorder) watch(ctx context.Context, k *kind) {
	fresh := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Steps: 6, Cap: 2 * time.Second}
	backoff := fresh
	for ctx.Err() == nil {
		progress, err := r.follow(ctx, k)
		if ctx.Err() != nil {
			return
		}
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			err = r.relist(ctx, k)
		}
		if progress && err == nil {
			backoff = fresh
		}
		timer := time.NewTimer(backoff.Step())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// follow reads one watch to its end. It says whether anything came.
func (r *Recorder) follow(ctx context.Context, k *kind) (progress bool, err error) {
	k.mu.Lock()
	version := k.version
	k.mu.Unlock()
	// The server ends it after the timeout; taking it up again proves that a silent watch has not lost anything.
	timeout := int64(240)
	w, err := k.client.Watch(ctx, metav1.ListOptions{ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &timeout, FieldSelector: k.fields})
	if err != nil {
		return false, err
	}
	defer w.Stop()
	for {
		var e watch.Event
		open := false
		select {
		case e, open = <-w.ResultChan():
		case <-ctx.Done():
		}
		o, isObject := e.Object.(*unstructured.Unstructured)
		switch {
		case !open:
			return progress, nil
		case e.Type == watch.Error:
			return progress, apierrors.FromObject(e.Object)
		case !isObject:
			return progress, fmt.Errorf("watch %s: unexpected %T", k.name(), e.Object)
		case e.Type == watch.Bookmark:
			r.file.add(line{Bookmark: &Bookmark{Time: time.Now(), Resource: k.name(), ResourceVersion: o.GetResourceVersion()}})
			k.reached(o.GetResourceVersion())
		default:
			r.event(k, Change(e.Type), o, false)
		}
		progress = true
	}
}

// relist closes the hole that an expired watch left as well as it can, and writes the hole down.
func (r *Recorder) relist(ctx context.Context, k *kind) error {
	k.mu.Lock()
	from, since := k.version, k.seen
	before := make(map[string]*unstructured.Unstructured, len(k.alive))
	for uid, o := range k.alive {
		before[uid] = o
	}
	k.mu.Unlock()
	list, err := k.list(ctx)
	if err != nil {
		return err
	}
	reason := fmt.Sprintf("the watch expired: events between resource versions %s and %s may be missing", from, list.GetResourceVersion())
	r.file.add(line{Gap: &Gap{Time: time.Now(), Resource: k.name(), Since: &since, Reason: reason}})
	for i := range list.Items {
		o := &list.Items[i]
		known := before[string(o.GetUID())]
		delete(before, string(o.GetUID()))
		switch {
		case known == nil:
			r.event(k, Added, o, true)
		case known.GetResourceVersion() != o.GetResourceVersion():
			r.event(k, Modified, o, true)
		}
	}
	for _, gone := range before {
		r.event(k, Deleted, gone.DeepCopy(), true)
	}
	r.listed(k, list)
	return nil
}

// Mark begins a phase and ends the one before. What was recorded so far is on disk when it returns.
func (r *Recorder) Mark(phase string) error {
	now := time.Now()
	r.mu.Lock()
	if r.phase != "" {
		r.file.add(line{Mark: &Mark{Time: now, Phase: r.phase, At: "end"}})
	}
	r.phase = phase
	r.file.add(line{Mark: &Mark{Time: now, Phase: phase, At: "begin"}})
	r.mu.Unlock()
	return r.file.sync()
}

// Log records a line that source printed, for example "migration".
func (r *Recorder) Log(source, text string) {
	r.file.add(line{Log: &Log{Time: time.Now(), Source: source, Line: text}})
}

// LastWrite is the last change of a recorded object that does not match ignore (nil: none does), Events left out; the
// zero time when there was none.
func (r *Recorder) LastWrite(ignore func(Ref) bool) (Ref, time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ref Ref
	var at time.Time
	for candidate, t := range r.last {
		if t.After(at) && (ignore == nil || !ignore(candidate)) {
			ref, at = candidate, t
		}
	}
	return ref, at
}

// drainBound is how long Stop waits for the watches when its context has no deadline.
const drainBound = 30 * time.Second

// Stop waits until every watch has delivered what a fresh list shows, reads the audit log to its end and closes the
// file. What could not be seen to be complete is written down as a gap. A second call returns the first one's error.
func (r *Recorder) Stop(ctx context.Context) error {
	r.stop.Do(func() {
		bounded, cancel := context.WithTimeout(ctx, drainBound)
		defer cancel()
		var drains errgroup.Group
		for _, k := range r.kinds {
			drains.Go(func() error {
				if err := k.drain(bounded); err != nil {
					r.file.add(line{Gap: &Gap{Time: time.Now(), Resource: k.name(), Reason: fmt.Sprintf("the watch was not seen to be complete: %v", err)}})
				}
				return nil
			})
		}
		_ = drains.Wait()
		r.endWatch()
		_ = r.watches.Wait()
		r.endTail()
		_ = r.tail.Wait()
		now := time.Now()
		if r.phase != "" {
			r.file.add(line{Mark: &Mark{Time: now, Phase: r.phase, At: "end"}})
		}
		r.file.add(line{End: &End{Time: now}})
		r.err = r.file.close()
	})
	return r.err
}

// drain waits until the watch is as far as a fresh list.
func (k *kind) drain(ctx context.Context) error {
	list, err := k.list(ctx)
	if err != nil {
		return err
	}
	var behind string
	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(context.Context) (bool, error) {
		behind = k.behind(list)
		return behind == "", nil
	})
	if err != nil {
		return fmt.Errorf("still missing %s: %w", behind, err)
	}
	return nil
}

// behind names the first object in which the watch is older than the list; "" when there is none.
func (k *kind) behind(list *unstructured.UnstructuredList) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if older(list.GetResourceVersion(), k.version) || list.GetResourceVersion() == k.version {
		return ""
	}
	listed := map[string]bool{}
	for i := range list.Items {
		o := &list.Items[i]
		listed[string(o.GetUID())] = true
		known := k.alive[string(o.GetUID())]
		if known == nil || older(known.GetResourceVersion(), o.GetResourceVersion()) {
			return "the state of " + o.GetNamespace() + "/" + o.GetName()
		}
	}
	for uid, o := range k.alive {
		if !listed[uid] && !older(list.GetResourceVersion(), o.GetResourceVersion()) {
			return "the deletion of " + o.GetNamespace() + "/" + o.GetName()
		}
	}
	return ""
}

func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}
