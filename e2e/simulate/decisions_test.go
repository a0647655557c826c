package simulate

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestDecisions runs every row of what the real CDI v1.64 was seen to do, one subtest per row. The rows are read from
// the file in CDI_DECISIONS, else from testdata/decisions.json. They run against the stand-ins on an embedded cluster;
// with CDI_CLUSTER=existing against the CDI of the cluster in KUBECONFIG, with its own nodes and CSI drivers, and no
// stand-in is started; with CDI_CLUSTER=bare against its CDI, too, but nodes and drivers are played, for a cluster that
// has none. The rows take minutes, so that they run when they are asked for alone.
func TestDecisions(t *testing.T) {
	if !strings.Contains(flag.Lookup("test.run").Value.String(), "Decisions") && os.Getenv("CDI_DECISIONS") == "" {
		t.Skip("takes ten minutes: go test ./e2e/simulate -run Decisions -timeout 30m")
	}
	file := orElse(os.Getenv("CDI_DECISIONS"), filepath.Join("testdata", "decisions.json"))
	rows, err := readRows(file)
	if err != nil {
		t.Fatal(err)
	}
	rows = selected(t, rows)
	ctx, config, pace := decisionCluster(t)
	l, err := newLab(ctx, config, pace, rows)
	if err != nil {
		t.Fatal(err)
	}
	for i, world := range worlds(rows) {
		began := time.Now()
		if err := l.furnish(ctx, world); err != nil {
			t.Fatalf("world %d of %s …: %v", i, world.rows[0].ID, err)
		}
		var running sync.WaitGroup
		slots := make(chan struct{}, rowsAtOnce)
		for _, r := range world.rows {
			running.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				t.Run(r.ID, func(t *testing.T) {
					began := time.Now()
					for _, p := range l.run(ctx, r) {
						t.Errorf("%s: %s", r.Description, p)
					}
					t.Logf("in %.0f s", time.Since(began).Seconds())
				})
			})
		}
		running.Wait()
		t.Logf("world %d: %d rows in %.0f s", i, len(world.rows), time.Since(began).Seconds())
	}
	for _, r := range rows {
		if !r.played() {
			t.Run(r.ID, func(t *testing.T) { t.Skip("read from CDI's code; the row records no situation to play") })
		}
	}
}

// rowsAtOnce is how many rows run side by side: each waits most of its time.
const rowsAtOnce = 16

// selected are the rows that -run asks for: all of them share one cluster, and none is to be run in vain.
func selected(t *testing.T, rows []*decisionRow) []*decisionRow {
	_, pattern, ok := strings.Cut(flag.Lookup("test.run").Value.String(), "/")
	if !ok {
		return rows
	}
	match, err := regexp.Compile(pattern)
	if err != nil {
		t.Fatal(err)
	}
	rows = slices.DeleteFunc(slices.Clone(rows), func(r *decisionRow) bool { return !match.MatchString(r.ID) })
	if len(rows) == 0 {
		t.Fatalf("no row matches %s", pattern)
	}
	return rows
}

// pace is how long things take that rows wait for.
type pace struct {
	slow     time.Duration // a slow download
	calm     time.Duration // without a change a row has said what it has to say
	patience time.Duration
}

// decisionCluster is the cluster that the rows run in.
func decisionCluster(t *testing.T) (context.Context, *rest.Config, pace) {
	slow := pace{slow: time.Minute, calm: 15 * time.Second, patience: 5 * time.Minute}
	switch kind := os.Getenv("CDI_CLUSTER"); kind {
	case "existing", "bare":
		config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
		if err != nil {
			t.Fatalf("CDI_CLUSTER=%s: KUBECONFIG=%s: %v", kind, os.Getenv("KUBECONFIG"), err)
		}
		config.QPS = -1
		if kind == "bare" {
			o := Options{Admin: config, Log: testr.New(t), As: func(context.Context, string, string) (*rest.Config, error) { return config, nil }}
			playBeside(t, t.Context(), o, slow, kubeletStandIn, csiStandIn)
		}
		return t.Context(), config, slow
	case "":
	default:
		t.Fatalf("CDI_CLUSTER is %q, not existing or bare", kind)
	}
	t.Cleanup(func() {
		if t.Skipped() {
			t.Error("the rows were asked for and did not run")
		}
	})
	ctx, _, o := embeddedFor(t, 25*time.Minute)
	kindsOf(t, o, "containerized-data-importer", "external-snapshotter")
	p := pace{slow: time.Minute, calm: 3 * time.Second, patience: 4 * time.Minute}
	playBeside(t, ctx, o, p, kubeletStandIn, csiStandIn, cdiStandIn)
	return ctx, o.Admin, p
}

// playBeside starts the stand-ins that a cluster needs to run rows.
func playBeside(t *testing.T, ctx context.Context, o Options, p pace, list ...standIn) {
	t.Helper()
	o.NoTenants = true
	o.Transfer, o.ImageSize, o.Download = 10*time.Second, 8<<30, func(url string) Download { return downloads(url, p.slow) }
	ctx, stop := context.WithCancel(ctx)
	sim, err := start(ctx, o, list)
	if err != nil {
		stop()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := sim.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// downloads plays the images that the rows name.
func downloads(url string, slow time.Duration) Download {
	switch name, _, _ := strings.Cut(filepath.Base(url), "."); name {
	case "slow":
		return Download{Takes: slow}
	case "hang":
		return Download{Hangs: true}
	case "fail":
		return Download{Fails: "Unable to process data: expected status code 200, got 404. Status: 404 Not Found"}
	case "crashloop":
		return Download{Fails: "Unable to connect to http data source", Loops: true}
	case "podbroke":
		return Download{Fails: "boom", Ends: true}
	case "scratch":
		return Download{Scratch: true}
	case "imgpull":
		return Download{NoImage: true}
	case "unsched":
		return Download{Unschedulable: true}
	}
	return Download{}
}

// decisionRow is one situation and what CDI did.
type decisionRow struct {
	ID          string                     `json:"id"`
	Description string                     `json:"description"`
	Source      string                     `json:"source"`
	Given       given                      `json:"given"`
	Expected    map[string]json.RawMessage `json:"expected"`
}

func (r *decisionRow) says(pattern string) bool {
	return regexp.MustCompile(`(?i)` + pattern).MatchString(r.Description)
}

// admission tells whether the row is about the webhooks.
func (r *decisionRow) admission() bool { _, ok := r.Expected["allowed"]; return ok }

// given is a row's situation.
type given struct {
	Source struct {
		ContentType  string      `json:"contentTypeAnnotation"`
		Kind         string      `json:"kind"`
		Size         string      `json:"size"`
		Unbound      bool        `json:"unbound"`
		UsedByPod    string      `json:"usedByPod"`
		VolumeMode   string      `json:"volumeMode"`
		AccessModes  any         `json:"accessModes"`
		Note         string      `json:"note"`
		URL          string      `json:"url"`
		StorageClass *givenClass `json:"storageClass"`
	} `json:"source"`
	Target struct {
		AccessModes  []string    `json:"accessModes"`
		API          string      `json:"api"`
		ContentType  string      `json:"contentType"`
		Size         string      `json:"size"`
		VolumeMode   string      `json:"volumeMode"`
		StorageClass *givenClass `json:"storageClass"`
	} `json:"target"`
	Annotations   map[string]string `json:"dvAnnotations"`
	SameNamespace bool              `json:"sameNamespace"`
	Token         string            `json:"cloneToken"`
	Global        givenGlobal       `json:"global"`
	Actions       []struct {
		Action string `json:"action"`
	} `json:"actions"`

	User   string          `json:"user"`
	Groups []string        `json:"groups"`
	DV     map[string]any  `json:"dv"`
	Patch  json.RawMessage `json:"patch"`
	Rights *string         `json:"rights in source namespace"`
}

// givenClass is a StorageClass; only its name is there for one that does not exist.
type givenClass struct {
	Name            string   `json:"name"`
	Provisioner     string   `json:"provisioner"`
	BindingMode     string   `json:"bindingMode"`
	Expansion       bool     `json:"allowVolumeExpansion"`
	Driver          bool     `json:"csiDriverObjectExists"`
	SnapshotClasses []string `json:"volumeSnapshotClassesOfDriver"`
	Strategy        *string  `json:"profileCloneStrategy"`
	SnapshotClass   *string  `json:"profileSnapshotClass"`
}

type givenGlobal struct {
	FeatureGates []string `json:"featureGates"`
	Override     *string  `json:"cloneStrategyOverride"`
	Defaults     struct {
		K8s   any     `json:"k8s"`
		Virt  *string `json:"virt"`
		Later string  `json:"later"`
		Note  string  `json:"note"`
	} `json:"defaultClasses"`
	Overhead string `json:"filesystemOverhead.global"`
}

func (g givenGlobal) defaults() []string {
	switch d := g.Defaults.K8s.(type) {
	case string:
		return []string{d}
	case []any:
		var list []string
		for _, name := range d {
			list = append(list, fmt.Sprint(name))
		}
		return list
	}
	return nil
}

// world is what is the same for a set of rows: CDI's configuration, classes, drivers. Rows of one world run side by side.
type world struct {
	global  givenGlobal
	classes map[string]*givenClass
	rows    []*decisionRow
}

func worlds(rows []*decisionRow) []*world {
	var list []*world
	everywhere := map[string]*givenClass{} // what rows know of classes that others only name
	for _, r := range rows {
		for _, c := range r.classes() {
			everywhere[c.Name] = c
		}
	}
next:
	for _, r := range rows {
		if !r.played() {
			continue
		}
		need := r.classes()
		for _, name := range append(r.Given.Global.defaults(), ptr.Deref(r.Given.Global.Defaults.Virt, "")) {
			c := everywhere[name]
			if c == nil && name != "" {
				c = &givenClass{Name: name, Provisioner: "csi-a.oracle.io", BindingMode: "Immediate", Expansion: true, Driver: true,
					SnapshotClasses: []string{"snapclass-a"}, Strategy: ptr.To(strategySnapshot), SnapshotClass: ptr.To("snapclass-a")}
			}
			if c != nil {
				need = append(need, c)
			}
		}
		if c := everywhere["std-a"]; c != nil && r.Given.Global.Defaults.Later != "" || r.admission() && c != nil {
			need = append(need, c)
		}
		for _, w := range list {
			if w.fits(r, need) {
				w.add(r, need)
				continue next
			}
		}
		w := &world{global: r.Given.Global, classes: map[string]*givenClass{}}
		w.add(r, need)
		list = append(list, w)
	}
	return list
}

func (r *decisionRow) classes() []*givenClass {
	var list []*givenClass
	for _, c := range []*givenClass{r.Given.Source.StorageClass, r.Given.Target.StorageClass} {
		if c != nil && c.Provisioner != "" {
			list = append(list, c)
		}
	}
	return list
}

func (w *world) fits(r *decisionRow, need []*givenClass) bool {
	if !r.admission() && !reflect.DeepEqual(w.global, r.Given.Global) {
		return false
	}
	for _, c := range need {
		for _, has := range w.classes {
			if has.Name == c.Name && !reflect.DeepEqual(has, c) ||
				has.Provisioner == c.Provisioner && (!slices.Equal(has.SnapshotClasses, c.SnapshotClasses) || has.Driver != c.Driver) {
				return false
			}
		}
	}
	return true
}

func (w *world) add(r *decisionRow, need []*givenClass) {
	for _, c := range need {
		w.classes[c.Name] = c
	}
	w.rows = append(w.rows, r)
}

// knownSets are the claimPropertySets of classes whose profile has some that no provisioner is known for.
var knownSets = map[string][]any{"a-prof": {
	map[string]any{"accessModes": []any{"ReadWriteMany"}, "volumeMode": "Block"},
	map[string]any{"accessModes": []any{"ReadWriteOnce"}, "volumeMode": "Filesystem"},
}}

// furnish makes the cluster a world's: CDI's configuration, then classes and their profiles.
func (l *lab) furnish(ctx context.Context, w *world) error {
	spec := map[string]any{"cloneStrategyOverride": nil, "config": map[string]any{"featureGates": w.global.FeatureGates, "filesystemOverhead": nil}}
	if w.global.Override != nil {
		spec["cloneStrategyOverride"] = *w.global.Override
	}
	overhead := orElse(w.global.Overhead, defaultOverhead)
	spec["config"].(map[string]any)["filesystemOverhead"] = map[string]any{"global": overhead}
	platform := object(cdiKind)
	platform.SetName("cdi")
	if err := l.c.Patch(ctx, platform, merge(map[string]any{"spec": spec})); err != nil {
		return err
	}
	if err := l.until(ctx, "CDI's configuration", func(ctx context.Context) (bool, error) {
		config := object(cdiConfigKind)
		err := l.c.Get(ctx, client.ObjectKey{Name: "config"}, config)
		gates, _, _ := unstructured.NestedStringSlice(config.Object, "spec", "featureGates")
		return text(config, "status", "filesystemOverhead", "global") == overhead && slices.Equal(gates, w.global.FeatureGates), client.IgnoreNotFound(err)
	}); err != nil {
		return err
	}
	if err := l.clear(ctx); err != nil {
		return err
	}
	snapshotClasses := map[string]bool{}
	for _, c := range w.classes {
		for _, name := range c.SnapshotClasses {
			name, def := strings.CutSuffix(name, " (default)")
			if snapshotClasses[name] {
				continue
			}
			snapshotClasses[name] = true
			sc := object(snapshotClassKind)
			sc.SetName(name)
			sc.SetLabels(ofTest)
			if def {
				annotate(sc, defaultSnapshotClassKey, "true")
			}
			sc.Object["driver"], sc.Object["deletionPolicy"] = c.Provisioner, "Delete"
			if err := l.c.Create(ctx, sc); err != nil {
				return err
			}
		}
	}
	defaults := w.global.defaults()
	rest := slices.DeleteFunc(slices.Sorted(maps.Keys(w.classes)), func(name string) bool { return slices.Contains(defaults, name) })
	for i, name := range append(defaults, rest...) {
		if i > 0 && i < len(defaults) && !strings.Contains(w.global.Defaults.Note, "same second") {
			time.Sleep(1100 * time.Millisecond) // their order is that of their creation, in whole seconds
		}
		if err := l.makeClass(ctx, w, w.classes[name], slices.Contains(defaults, name)); err != nil {
			return err
		}
	}
	for _, c := range w.classes {
		if err := l.awaitProfile(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

var ofTest = map[string]string{"upgrade-e2e/test": "decisions"}

// clear removes the classes of the world before.
func (l *lab) clear(ctx context.Context) error {
	for _, o := range []client.Object{&storagev1.StorageClass{}, &storagev1.CSIDriver{}, object(snapshotClassKind)} {
		if err := l.c.DeleteAllOf(ctx, o, client.MatchingLabels(ofTest)); err != nil {
			return err
		}
	}
	return l.until(ctx, "profiles of the world before to go", func(ctx context.Context) (bool, error) {
		list := objectList(profileKind)
		err := l.c.List(ctx, list)
		for i := range list.Items {
			if l.made[list.Items[i].GetName()] {
				return false, err
			}
		}
		return err == nil, err
	})
}

func (l *lab) makeClass(ctx context.Context, w *world, c *givenClass, isDefault bool) error {
	sc := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: c.Name, Labels: ofTest, Annotations: map[string]string{}}, Provisioner: c.Provisioner,
		AllowVolumeExpansion: &c.Expansion, VolumeBindingMode: ptr.To(storagev1.VolumeBindingMode(c.BindingMode))}
	if isDefault {
		sc.Annotations[defaultClassKey] = "true"
	}
	if ptr.Deref(w.global.Defaults.Virt, "") == c.Name {
		sc.Annotations[virtDefaultClassKey] = "true"
	}
	for _, r := range w.rows { // what a row says of its target's class
		if found := regexp.MustCompile(`StorageClass annotation cdi.kubevirt.io/clone-strategy=(\S+)`).FindStringSubmatch(r.Description); found != nil &&
			r.Given.Target.StorageClass != nil && r.Given.Target.StorageClass.Name == c.Name {
			sc.Annotations[cloneStrategyClassKey] = found[1]
		}
	}
	if !c.Driver {
		sc.Annotations[noDriverKey] = "true"
	} else {
		driver := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: c.Provisioner, Labels: ofTest}, Spec: storagev1.CSIDriverSpec{AttachRequired: ptr.To(false)}}
		if err := l.c.Create(ctx, driver); client.IgnoreAlreadyExists(err) != nil {
			return err
		}
	}
	l.made[c.Name] = true
	return l.c.Create(ctx, sc)
}

// awaitProfile brings a class's profile to what the row was recorded with, by its spec where CDI would choose otherwise.
func (l *lab) awaitProfile(ctx context.Context, c *givenClass) error {
	profile := object(profileKind)
	if err := l.until(ctx, "profile of "+c.Name, func(ctx context.Context) (bool, error) {
		err := l.c.Get(ctx, client.ObjectKey{Name: c.Name}, profile)
		_, ok, _ := unstructured.NestedString(profile.Object, "status", "cloneStrategy")
		return ok, client.IgnoreNotFound(err)
	}); err != nil {
		return err
	}
	spec := map[string]any{}
	same := func(field string, want *string) {
		if got := text(profile, "status", field); got != ptr.Deref(want, "") && ptr.Deref(want, "") != "" {
			spec[field] = *want
		}
	}
	same("cloneStrategy", c.Strategy)
	same("snapshotClass", c.SnapshotClass)
	if sets := knownSets[c.Name]; sets != nil {
		spec["claimPropertySets"] = sets
	}
	if len(spec) > 0 {
		if err := l.c.Patch(ctx, profile, merge(map[string]any{"spec": spec})); err != nil {
			return err
		}
	}
	return l.until(ctx, "profile of "+c.Name+" as recorded", func(ctx context.Context) (bool, error) {
		err := l.c.Get(ctx, client.ObjectKey{Name: c.Name}, profile)
		sets, _, _ := unstructured.NestedSlice(profile.Object, "status", "claimPropertySets")
		return err == nil && text(profile, "status", "cloneStrategy") == ptr.Deref(c.Strategy, "") && text(profile, "status", "snapshotClass") == ptr.Deref(c.SnapshotClass, "") &&
			(knownSets[c.Name] == nil || len(sets) == len(knownSets[c.Name])), err
	})
}

// lab runs rows in a cluster and sees what becomes of them.
type lab struct {
	c      client.WithWatch
	config *rest.Config
	pace   pace
	keys   tokenKeys
	rights map[string]string // of users, as any row tells
	made   map[string]bool   // classes

	mu    sync.Mutex
	spots map[string]*spot // by namespace
}

func newLab(ctx context.Context, config *rest.Config, p pace, rows []*decisionRow) (*lab, error) {
	c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	l := &lab{c: c, config: config, pace: p, rights: map[string]string{}, made: map[string]bool{}, spots: map[string]*spot{}}
	for _, r := range rows {
		if r.Given.Rights != nil && *r.Given.Rights != "none" {
			l.rights[r.Given.User] = *r.Given.Rights
		}
	}
	platform := object(cdiKind)
	platform.SetName("cdi")
	set(platform, map[string]any{}, "spec")
	if err := c.Create(ctx, platform); client.IgnoreAlreadyExists(err) != nil {
		return nil, err
	}
	if err := l.until(ctx, "CDI's webhooks and its signing key", func(ctx context.Context) (bool, error) { return l.outside(ctx) }); err != nil {
		return nil, err
	}
	if l.keys.private, err = signingKey(ctx, c); err != nil {
		return nil, err
	}
	for _, list := range []client.ObjectList{objectList(dataVolumeKind), &corev1.PersistentVolumeClaimList{}, &corev1.PodList{}, &corev1.EventList{},
		&corev1.SecretList{}, &corev1.ServiceList{}, objectList(cloneSourceKind), objectList(importSourceKind), objectList(snapshotKind)} {
		if err := l.watch(ctx, list); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// controllerAlone labels namespaces whose DataVolumes don't pass CDI's webhooks: most rows were recorded with the
// controller alone, tokens made by the recorder.
const controllerAlone = "upgrade-e2e/controller-alone"

// outside leaves such namespaces out of the webhooks, true once both are there.
func (l *lab) outside(ctx context.Context) (bool, error) {
	selector := map[string]any{"matchExpressions": []any{map[string]any{"key": controllerAlone, "operator": "DoesNotExist"}}}
	for kind, name := range map[string]string{"Mutating": "cdi-api-datavolume-mutate", "Validating": "cdi-api-datavolume-validate"} {
		u := &unstructured.Unstructured{}
		u.SetAPIVersion("admissionregistration.k8s.io/v1")
		u.SetKind(kind + "WebhookConfiguration")
		if err := l.c.Get(ctx, client.ObjectKey{Name: name}, u); err != nil {
			return false, client.IgnoreNotFound(err)
		}
		old := u.DeepCopy()
		hooks, _, _ := unstructured.NestedSlice(u.Object, "webhooks")
		for _, h := range hooks {
			h.(map[string]any)["namespaceSelector"] = selector
		}
		set(u, hooks, "webhooks")
		if err := l.c.Patch(ctx, u, client.MergeFrom(old)); err != nil {
			return false, err
		}
	}
	return true, nil
}

func (l *lab) until(ctx context.Context, what string, ok wait.ConditionWithContextFunc) error {
	if err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 3*time.Minute, true, ok); err != nil {
		return fmt.Errorf("waited in vain for %s: %w", what, err)
	}
	return nil
}

// spot is what was seen in a namespace.
type spot struct {
	volumes map[string]*unstructured.Unstructured
	claims  map[string]*corev1.PersistentVolumeClaim // by name, as last seen
	uids    map[string]string                        // of claims that ever were, by name
	helpers map[string]bool                          // kinds and names that ever were
	here    map[string]bool                          // kinds and names that are there
	again   map[string]bool                          // kinds and names that were made once more
	latest  map[string]client.Object                 // by kind and name, as last seen
	phases  map[string][]string                      // of DataVolumes
	clones  map[string][]string                      // of claims: phases of the clone populator
	pods    map[string][]string                      // of claims: phases of the pod that works on them
	events  map[string]map[string]bool               // by object, "Kind Type Reason"
	words   map[string]map[string]bool               // by object, what its events say, whoever wrote them
	proofs  map[string]bool                          // phases that must have been, for what they make was there
	changed time.Time
	noted   time.Time // as changed, events included
}

func (l *lab) spot(namespace string) *spot {
	s := l.spots[namespace]
	if s == nil {
		s = &spot{volumes: map[string]*unstructured.Unstructured{}, claims: map[string]*corev1.PersistentVolumeClaim{}, uids: map[string]string{},
			helpers: map[string]bool{}, here: map[string]bool{}, again: map[string]bool{}, latest: map[string]client.Object{}, phases: map[string][]string{}, clones: map[string][]string{}, pods: map[string][]string{},
			events: map[string]map[string]bool{}, words: map[string]map[string]bool{}, proofs: map[string]bool{}, changed: time.Now()}
		l.spots[namespace] = s
	}
	return s
}

// look reads a namespace's spot.
func (l *lab) look(namespace string, f func(*spot)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l.spot(namespace))
}

func (l *lab) watch(ctx context.Context, list client.ObjectList) error {
	w, err := l.c.Watch(ctx, list)
	if err != nil {
		return err
	}
	go func() {
		defer w.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case e, ok := <-w.ResultChan():
				if !ok {
					return // the test ends before a watch does
				}
				if o, ok := e.Object.(client.Object); ok {
					l.note(o, string(e.Type))
				}
			}
		}
	}()
	return nil
}

func appendNew(list []string, s string) []string {
	if len(list) > 0 && list[len(list)-1] == s {
		return list
	}
	return append(list, s)
}

func (l *lab) note(o client.Object, event string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.spot(o.GetNamespace())
	s.noted = time.Now()
	kind := reflect.TypeOf(o).Elem().Name()
	switch o := o.(type) {
	case *corev1.Event:
		about := o.InvolvedObject.Kind + "/" + o.InvolvedObject.Name
		if s.events[about] == nil {
			s.events[about], s.words[about] = map[string]bool{}, map[string]bool{}
		}
		s.words[about][o.Message] = true
		if ofCDI[o.Source.Component] && !(ofOthers[o.Reason] && o.InvolvedObject.Kind == claimKindName) {
			s.events[about][o.InvolvedObject.Kind+" "+o.Type+" "+o.Reason] = true
		}
		return
	case *unstructured.Unstructured:
		kind = o.GetKind()
		if kind == snapshotName && o.GetName() != "golden-snap" {
			s.proofs["SnapshotForSmartCloneInProgress"] = true
		}
		if kind == dataVolumeKind.Kind {
			if event != "DELETED" {
				s.volumes[o.GetName()] = o
			}
			s.phases[o.GetName()] = appendNew(s.phases[o.GetName()], text(o, "status", "phase"))
		}
	case *corev1.PersistentVolumeClaim:
		if event != "DELETED" && o.DeletionTimestamp == nil {
			s.claims[o.Name] = o
		}
		s.uids[o.Name] = string(o.UID)
		if p := o.Annotations[clonePhaseKey]; p != "" {
			s.clones[o.Name] = appendNew(s.clones[o.Name], p)
		}
		if p := o.Annotations[podPhaseKey]; p != "" {
			s.pods[o.Name] = appendNew(s.pods[o.Name], p)
		}
		if ref := o.Spec.DataSourceRef; ref != nil && ref.Kind == snapshotName {
			s.proofs["CloneFromSnapshotSourceInProgress"] = true
		}
	case *corev1.Pod:
		s.latest[kind+"/"+o.Name] = o
		component := o.Labels[cdiPodLabel]
		if component == "" {
			return
		}
		kind += ":" + component
		s.proofs[phaseOfPod[component]] = o.Status.Phase == corev1.PodRunning || s.proofs[phaseOfPod[component]]
	}
	name := kind + "/" + o.GetName()
	s.again[name] = s.again[name] || event == "ADDED" && s.helpers[name]
	s.helpers[name], s.latest[name] = true, o
	s.here[name] = event != "DELETED"
	s.changed = s.noted
}

// phaseOfPod is the phase in which one of CDI's pods runs.
var phaseOfPod = map[string]string{"cdi-populator-prep": "PrepClaimInProgress", "cdi-clone-source": "CloneInProgress"}

// ofCDI are the controllers whose events count.
var ofCDI = map[string]bool{importController: true, pvcCloneController: true, snapshotCloneController: true, clonePopulator: true,
	importPopulator: true, importerController: true, uploadController: true, cloneController: true}

// ofOthers are what CDI only repeats.
var ofOthers = map[string]bool{"ProvisioningSucceeded": true, "Provisioning": true, "ExternalProvisioning": true, "WaitForFirstConsumer": true,
	"WaitForPodScheduled": true, "FailedBinding": true, "ProvisioningFailed": true, "ClaimMisbound": true, "ClaimLost": true, "ExternalExpanding": true, "Resizing": true, "FileSystemResizeRequired": true}
