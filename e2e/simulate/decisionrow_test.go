package simulate

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// run plays a row and says where it came out otherwise than recorded.
func (l *lab) run(ctx context.Context, r *decisionRow) []string {
	p := &play{lab: l, row: r, src: "src-" + r.name(), dst: "dst-" + r.name(), disk: "disk"}
	if r.Given.SameNamespace {
		p.src = p.dst
	}
	steps := p.behaviour
	if r.admission() {
		steps = p.admission
	}
	if err := steps(ctx); err != nil {
		return []string{fmt.Sprintf("play the row: %v", err)}
	}
	return p.problems
}

// play is one row being played: a golden thing in one namespace, a DataVolume in another.
type play struct {
	*lab
	row      *decisionRow
	src, dst string
	disk     string // the DataVolume's name, and its claim's
	problems []string

	last struct { // what was there before the row deleted it
		volume *unstructured.Unstructured
		claim  *corev1.PersistentVolumeClaim
	}
}

func (p *play) wrong(format string, args ...any) {
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

func (p *play) namespaces(ctx context.Context, labels map[string]string) error {
	for _, name := range []string{p.src, p.dst} {
		if err := p.c.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}); client.IgnoreAlreadyExists(err) != nil {
			return err
		}
	}
	return nil
}

func (p *play) behaviour(ctx context.Context) error {
	if err := p.namespaces(ctx, map[string]string{controllerAlone: ""}); err != nil {
		return err
	}
	if err := p.golden(ctx); err != nil {
		return err
	}
	if err := p.before(ctx); err != nil {
		return err
	}
	dv, err := p.dataVolume(ctx)
	if err != nil {
		return err
	}
	if err := p.c.Create(ctx, dv); err != nil {
		return err
	}
	for _, a := range p.row.Given.Actions {
		if err := p.act(ctx, a.Action); err != nil {
			return err
		}
	}
	if err := p.settle(ctx, p.compare); err != nil {
		return err
	}
	if p.phase() == "Succeeded" && p.last.volume == nil && p.row.Given.Annotations[retainPodKey] == "" {
		return p.gone(ctx)
	}
	return nil
}

// gone waits until nothing is left of what CDI made beside the target.
func (p *play) gone(ctx context.Context) error {
	// A claim that was there is taken as it is, and what describes its download stays with the DataVolume.
	stays := func(name string) bool {
		return p.text("dataPath") == "none" && strings.HasPrefix(name, "VolumeImportSource/")
	}
	var left []string
	if err := p.until(ctx, "helpers to go", func(context.Context) (bool, error) {
		left = p.helpers(func(s *spot, name string) bool { return s.here[name] && !stays(name) })
		return len(left) == 0, nil
	}); err != nil {
		p.wrong("left behind: %q", left)
	}
	// Not of pods: an importer ends and comes back for scratch space.
	if again := p.helpers(func(s *spot, name string) bool { return s.again[name] && !strings.HasPrefix(name, "Pod:") }); len(again) > 0 {
		p.wrong("made once more: %q", again)
	}
	return nil
}

func isThere(s *spot, name string) bool { return s.here[name] }

// helpers are those that are so, each with its namespace.
func (p *play) helpers(so func(*spot, string) bool) []string {
	var list []string
	for _, namespace := range []string{p.src, p.dst} {
		p.look(namespace, func(s *spot) {
			for name := range s.here {
				if p.helper(name) && so(s, name) {
					list = append(list, namespace+"/"+name)
				}
			}
		})
	}
	return list
}

// golden makes what is cloned.
func (p *play) golden(ctx context.Context) error {
	g := p.row.Given.Source
	switch {
	case g.Kind == "pvc":
		return p.goldenClaim(ctx)
	case g.Kind == "snapshot":
		if err := p.goldenClaim(ctx); err != nil {
			return err
		}
		return p.goldenSnapshot(ctx)
	case strings.HasPrefix(g.Kind, "dv:"):
		return p.goldenVolume(ctx)
	}
	return nil // an import, or a source that comes later
}

func (p *play) goldenClaim(ctx context.Context) error {
	g := p.row.Given.Source
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.src, Name: "golden", Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &g.StorageClass.Name, VolumeMode: ptr.To(corev1.PersistentVolumeMode(g.VolumeMode)),
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}}}
	request(&claim.Spec, resource.MustParse(g.Size))
	if g.ContentType != "" && g.ContentType != "none" {
		claim.Annotations[contentTypeKey] = g.ContentType
	}
	if found := regexp.MustCompile(`source capacity \((\S+)\) larger than its request`).FindStringSubmatch(p.row.Description); found != nil {
		if err := p.c.Create(ctx, p.volumeFor(claim, found[1])); err != nil {
			return err
		}
		claim.Spec.VolumeName = "pv-" + p.src
	}
	if err := p.c.Create(ctx, claim); err != nil {
		return err
	}
	if g.Unbound {
		return nil
	}
	if g.StorageClass.BindingMode == string(storagev1.VolumeBindingWaitForFirstConsumer) {
		if err := p.c.Create(ctx, p.user(p.src, "first-consumer", "golden", false)); err != nil {
			return err
		}
	}
	if err := p.untilClaim(ctx, claim, corev1.ClaimBound); err != nil {
		return err
	}
	if err := p.c.Delete(ctx, p.user(p.src, "first-consumer", "golden", false)); client.IgnoreNotFound(err) != nil {
		return err
	}
	if g.UsedByPod == "" {
		return nil
	}
	pod := p.user(p.src, "user", "golden", g.UsedByPod == "ro")
	if err := p.c.Create(ctx, pod); err != nil {
		return err
	}
	return p.until(ctx, "golden's user to run", func(context.Context) (bool, error) {
		user, ok := p.latest(p.src, "Pod/user").(*corev1.Pod)
		return ok && user.Status.Phase == corev1.PodRunning, nil
	})
}

// latest is an object, by kind and name, as the watch saw it last; nil for one that it did not see.
func (p *play) latest(namespace, name string) (o client.Object) {
	p.look(namespace, func(s *spot) { o = s.latest[name] })
	return o
}

func (p *play) untilClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, phase corev1.PersistentVolumeClaimPhase) error {
	return p.until(ctx, fmt.Sprintf("claim %s to be %s", claim.Name, phase), func(context.Context) (bool, error) {
		seen, ok := p.latest(claim.Namespace, claimKindName+"/"+claim.Name).(*corev1.PersistentVolumeClaim)
		return ok && seen.Status.Phase == phase, nil
	})
}

// volumeFor is a volume of its own for a claim, larger than asked for.
func (p *play) volumeFor(claim *corev1.PersistentVolumeClaim, size string) *corev1.PersistentVolume {
	class := p.row.Given.Source.StorageClass
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-" + p.src}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}, AccessModes: claim.Spec.AccessModes, VolumeMode: claim.Spec.VolumeMode,
		StorageClassName: class.Name, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: class.Provisioner, VolumeHandle: "static-" + p.src}},
		ClaimRef:               &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name}}}
}

// user is a pod that has a claim mounted.
func (p *play) user(namespace, name, claim string, readOnly bool) *corev1.Pod {
	mode := corev1.PersistentVolumeFilesystem
	p.look(namespace, func(s *spot) {
		if c := s.claims[claim]; c != nil {
			mode = volumeMode(c.Spec.VolumeMode)
		}
	})
	pod := mover(namespace, name, "", claim, mode)
	pod.Labels, pod.Spec.Containers[0].Name, pod.Spec.Containers[0].Image = nil, "user", "registry.k8s.io/pause:3.10"
	pod.Spec.Volumes[0].PersistentVolumeClaim.ReadOnly = readOnly
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	return pod
}

func (p *play) goldenSnapshot(ctx context.Context) error {
	s := object(snapshotKind)
	s.SetNamespace(p.src)
	s.SetName("golden-snap")
	class := p.row.Given.Source.StorageClass.SnapshotClasses[0]
	class, _ = strings.CutSuffix(class, " (default)")
	mute := p.row.says(`without status`)
	if mute {
		class = "answered-by-nobody"
	}
	set(s, map[string]any{"volumeSnapshotClassName": class, "source": map[string]any{"persistentVolumeClaimName": "golden"}}, "spec")
	if err := p.c.Create(ctx, s); err != nil || mute {
		return err
	}
	if err := p.until(ctx, "golden snapshot", func(context.Context) (bool, error) {
		seen, ok := p.latest(p.src, snapshotName+"/golden-snap").(*unstructured.Unstructured)
		return ok && truth(seen, "status", "readyToUse"), nil
	}); err != nil || !p.row.says(`restoreSize 0`) {
		return err
	}
	return p.c.Status().Patch(ctx, s, merge(map[string]any{"status": map[string]any{"restoreSize": "0"}}))
}

func (p *play) goldenVolume(ctx context.Context) error {
	g := p.row.Given.Source
	url := strings.TrimPrefix(g.Kind, "dv:")
	lost := p.row.says(`phase Failed`) // a volume can only be lost while it is written to
	if lost {
		url = strings.Replace(url, "ok.", "hang.", 1)
	}
	form := map[string]any{"storageClassName": g.StorageClass.Name, "resources": map[string]any{"requests": map[string]any{"storage": g.Size}}}
	if !strings.Contains(g.VolumeMode, "StorageProfile") {
		form["volumeMode"], form["accessModes"] = g.VolumeMode, []any{"ReadWriteOnce"}
	}
	dv := object(dataVolumeKind)
	dv.SetNamespace(p.src)
	dv.SetName("golden")
	a := map[string]string{}
	if strings.Contains(g.Note, "bind.immediate.requested") {
		a[bindImmediateKey] = ""
	}
	if strings.Contains(g.Note, "usePopulator=false") {
		a[usePopulatorKey] = "false"
	}
	dv.SetAnnotations(a)
	set(dv, map[string]any{"source": map[string]any{"http": map[string]any{"url": url}}, "storage": form}, "spec")
	if err := p.c.Create(ctx, dv); err != nil || p.row.says(`at the same moment`) {
		return err
	}
	want := "ImportInProgress"
	if strings.Contains(url, "/ok.") {
		want = "Succeeded"
	}
	if err := p.until(ctx, "golden DataVolume", func(context.Context) (bool, error) {
		seen, ok := p.latest(p.src, dataVolumeKind.Kind+"/golden").(*unstructured.Unstructured)
		phase := ""
		if ok {
			phase = text(seen, "status", "phase")
		}
		return phase == want || phase == "Succeeded", nil
	}); err != nil || !lost {
		return err
	}
	claim := &corev1.PersistentVolumeClaim{}
	if err := p.c.Get(ctx, key(dv), claim); err != nil {
		return err
	}
	written := claim
	if claim.Status.Phase != corev1.ClaimBound {
		written = &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.src, Name: "prime-" + string(claim.UID)}}
	}
	return p.lose(ctx, written)
}

// lose takes a claim's volume away.
func (p *play) lose(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if err := p.c.Get(ctx, key(claim), claim); err != nil {
		return err
	}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: claim.Spec.VolumeName}}
	if err := p.c.Delete(ctx, pv); err != nil {
		return err
	}
	if err := p.c.Patch(ctx, pv, merge(map[string]any{"metadata": map[string]any{"finalizers": nil}})); client.IgnoreNotFound(err) != nil {
		return err
	}
	return p.untilClaim(ctx, claim, corev1.ClaimLost)
}

// before makes what is in the DataVolume's way.
func (p *play) before(ctx context.Context) error {
	if limit := regexp.MustCompile(`limited: requests.storage=(\w+)`).FindStringSubmatch(string(p.row.Expected["conditions"]) +
		string(p.row.Expected["reconcileErrors"])); limit != nil && p.row.says(`ResourceQuota`) {
		q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: p.dst, Name: "q"},
			Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourceRequestsStorage: resource.MustParse(limit[1])}}}
		if err := p.c.Create(ctx, q); err != nil {
			return err
		}
		if err := p.until(ctx, "quota to count", func(ctx context.Context) (bool, error) {
			return len(q.Status.Hard) > 0, p.c.Get(ctx, key(q), q)
		}); err != nil {
			return err
		}
	}
	if !p.row.says(`same[- ]name\b|PVC exists with`) || p.row.says(`source in the same namespace`) {
		return nil
	}
	t := p.row.Given.Target
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.dst, Name: p.disk, Annotations: map[string]string{}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &t.StorageClass.Name, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			VolumeMode: ptr.To(corev1.PersistentVolumeFilesystem)}}
	request(&claim.Spec, resource.MustParse(t.Size))
	if p.row.says(`populatedFor`) {
		claim.Annotations[populatedForKey] = p.disk
	}
	if err := p.c.Create(ctx, claim); err != nil || p.row.says(`unbound|pending`) {
		return err
	}
	if err := p.untilClaim(ctx, claim, corev1.ClaimBound); err != nil {
		return err
	}
	return p.calm(ctx, p.pace.calm/2) // so that CDI's own cache has it too
}

func (p *play) dataVolume(ctx context.Context) (*unstructured.Unstructured, error) {
	g, t := p.row.Given.Source, p.row.Given.Target
	dv := object(dataVolumeKind)
	dv.SetNamespace(p.dst)
	dv.SetName(p.disk)
	dv.SetAnnotations(maps.Clone(p.row.Given.Annotations))
	if p.row.says(`created-by label`) {
		dv.SetLabels(map[string]string{"kubevirt.io/created-by": "00000000-0000-0000-0000-000000000000"})
	}
	form := map[string]any{}
	if t.Size != "-" {
		form["resources"] = map[string]any{"requests": map[string]any{"storage": t.Size}}
	}
	if t.VolumeMode != "-" && t.VolumeMode != "" {
		form["volumeMode"] = t.VolumeMode
	}
	if len(t.AccessModes) > 0 {
		var modes []any
		for _, m := range t.AccessModes {
			modes = append(modes, m)
		}
		form["accessModes"] = modes
	}
	if t.StorageClass != nil {
		form["storageClassName"] = strings.Trim(t.StorageClass.Name, `"`)
	}
	spec := map[string]any{strings.TrimPrefix(t.API, "spec."): form}
	if t.ContentType != "" {
		spec["contentType"] = t.ContentType
	}
	if p.row.says(`preallocation=true`) {
		spec["preallocation"] = true
	}
	source, kind := map[string]any{}, ""
	switch {
	case g.Kind == "http":
		source["http"] = map[string]any{"url": g.URL}
	case g.Kind == "blank":
		source["blank"] = map[string]any{}
	case g.Kind == "snapshot":
		source["snapshot"], kind = map[string]any{"namespace": p.src, "name": "golden-snap"}, snapshotName
	default:
		source["pvc"], kind = map[string]any{"namespace": p.src, "name": "golden"}, claimKindName
	}
	if p.row.says(`spec.sourceRef to a DataSource`) {
		ds := object(dataSourceKind)
		ds.SetNamespace(p.src)
		ds.SetName("golden")
		set(ds, map[string]any{"source": source}, "spec")
		if err := p.c.Create(ctx, ds); err != nil {
			return nil, err
		}
		spec["sourceRef"] = map[string]any{"kind": "DataSource", "namespace": p.src, "name": "golden"}
	} else {
		spec["source"] = source
	}
	set(dv, spec, "spec")
	if kind == "" || p.row.Given.Token == "" || p.row.Given.Token == "none" {
		return dv, nil
	}
	token, err := p.token(kind)
	annotate(dv, cloneTokenKey, token)
	return dv, err
}

// token is a clone token with the fault that the row names.
func (p *play) token(kind string) (string, error) {
	name := map[string]string{claimKindName: "golden", snapshotName: "golden-snap"}[kind]
	t := cloneToken{Operation: "Clone", Name: name, Namespace: p.src, Resource: resourceOf(kind),
		Params: map[string]string{"targetNamespace": p.dst, "targetName": p.disk}}
	keys, issuer, lifetime := p.keys, tokenIssuer, 5*time.Minute
	switch p.row.Given.Token {
	case "valid":
	case "badname":
		t.Params["targetName"] = "another"
	case "badkey":
		foreign, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			return "", err
		}
		keys.private = foreign
	case "badissuer":
		issuer = "somebody"
	case "expired":
		lifetime = -time.Hour
	default:
		return "", fmt.Errorf("unknown token %q", p.row.Given.Token)
	}
	return keys.sign(issuer, lifetime, t)
}

// act does what happens in the course of a row, when nothing moves any more.
func (p *play) act(ctx context.Context, action string) error {
	toDefault := regexp.MustCompile(`^class (\S+) annotated as (k8s|virt) default`).FindStringSubmatch(action)
	if action == "DV deleted" {
		return p.deleteVolume(ctx)
	}
	if err := p.ripe(ctx, action); err != nil {
		return err
	}
	switch {
	case action == "consumer pod created":
		return p.c.Create(ctx, p.user(p.dst, "consumer", p.disk, false))
	case strings.HasPrefix(action, "consumer pod deleted"):
		return p.c.Delete(ctx, p.user(p.dst, "consumer", p.disk, false))
	case action == "golden PVC created":
		return p.goldenClaimAtOnce(ctx)
	case action == "pod using golden deleted":
		return p.c.Delete(ctx, p.user(p.src, "user", "golden", false))
	case action == "pod and golden deleted":
		golden := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.src, Name: "golden"}}
		if err := p.c.Delete(ctx, golden); err != nil {
			return err
		}
		// It goes at once: protected until its pod is gone it would be there and unused for a moment.
		if err := p.c.Patch(ctx, golden, merge(map[string]any{"metadata": map[string]any{"finalizers": nil}})); client.IgnoreNotFound(err) != nil {
			return err
		}
		return p.c.Delete(ctx, p.user(p.src, "user", "golden", false))
	case action == "PV of target deleted":
		return p.lose(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.dst, Name: p.disk}})
	case toDefault != nil:
		k := map[string]string{"k8s": defaultClassKey, "virt": virtDefaultClassKey}[toDefault[2]]
		return p.c.Patch(ctx, &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: toDefault[1]}},
			merge(map[string]any{"metadata": map[string]any{"annotations": map[string]any{k: "true"}}}))
	}
	return fmt.Errorf("unknown action %q", action)
}

// ripe waits until CDI waits for an action: as the row records it, and nothing moves any more.
func (p *play) ripe(ctx context.Context, action string) error {
	waits := p.conditioned
	switch phases, events := string(p.row.Expected["phaseSequence"]), string(p.row.Expected["events"]); {
	case action == "consumer pod created" && regexp.MustCompile(`PendingPopulation|WaitForFirstConsumer`).MatchString(phases):
		waits = func() bool { ph := p.phase(); return ph == "PendingPopulation" || ph == "WaitForFirstConsumer" }
	case strings.Contains(action, "deleted") && strings.Contains(events, "InUse"):
		waits = p.inUse
	case strings.HasPrefix(action, "PV of target") && strings.Contains(phases, `"Succeeded"`):
		waits = func() bool { return p.phase() == "Succeeded" }
	}
	for began := time.Now(); !waits() && time.Since(began) < p.pace.patience/4; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return p.calm(ctx, p.pace.calm/2)
}

// inUse tells whether CDI has said that something else has the claim.
func (p *play) inUse() (said bool) {
	p.look(p.dst, func(s *spot) {
		for _, list := range s.events {
			for e := range list {
				said = said || strings.HasSuffix(e, "InUse")
			}
		}
	})
	return said
}

// goldenClaimAtOnce makes the golden claim as it is made by a user, who waits for nothing.
func (p *play) goldenClaimAtOnce(ctx context.Context) error { return p.goldenClaim(ctx) }

// deleteVolume deletes the DataVolume in the phase that the row ends in, once its claim says so too, and sees everything go.
func (p *play) deleteVolume(ctx context.Context) error {
	want := p.text("finalPhase")
	bound := p.condition("Bound")
	if err := p.until(ctx, "phase "+want, func(context.Context) (bool, error) {
		return p.phase() == want && (want == "Succeeded" || p.boundSays(bound)), nil
	}); err != nil {
		return err
	}
	if want == "Succeeded" {
		if err := p.calm(ctx, p.pace.calm/2); err != nil {
			return err
		}
	}
	p.look(p.dst, func(s *spot) { p.last.volume, p.last.claim = s.volumes[p.disk], s.claims[p.disk] })
	dv := object(dataVolumeKind)
	dv.SetNamespace(p.dst)
	dv.SetName(p.disk)
	if err := p.c.Delete(ctx, dv); err != nil {
		return err
	}
	return p.until(ctx, "DataVolume, claim and helpers to go", func(context.Context) (bool, error) {
		there := false
		p.look(p.dst, func(s *spot) { there = s.here["DataVolume/"+p.disk] || s.here["PersistentVolumeClaim/"+p.disk] })
		return !there && len(p.helpers(isThere)) == 0, nil
	})
}

func (p *play) phase() (phase string) {
	p.look(p.dst, func(s *spot) {
		if v := s.volumes[p.disk]; v != nil {
			phase = text(v, "status", "phase")
		}
	})
	return phase
}

// condition is one of the DataVolume's as the row records it: status, reason, message.
func (p *play) condition(kind string) []string {
	var recorded map[string][]string
	if err := json.Unmarshal(p.row.Expected["conditions"], &recorded); err != nil {
		return nil
	}
	return recorded[kind]
}

// boundSays tells whether the DataVolume's condition Bound is as recorded.
func (p *play) boundSays(recorded []string) (so bool) {
	p.look(p.dst, func(s *spot) {
		if v := s.volumes[p.disk]; v != nil {
			c := condition(v, "Bound")
			so = c != nil && len(recorded) == 3 && fmt.Sprint(c["status"]) == recorded[0] && fmt.Sprint(c["message"]) == recorded[2]
		}
	})
	return so
}

// conditioned tells whether CDI has looked at the DataVolume.
func (p *play) conditioned() (ok bool) {
	p.look(p.dst, func(s *spot) { ok = s.volumes[p.disk] != nil && condition(s.volumes[p.disk], "Bound") != nil })
	return ok
}

// calm waits until nothing has changed for a while.
func (p *play) calm(ctx context.Context, enough time.Duration) error {
	return p.until(ctx, "the row to calm down", func(context.Context) (bool, error) {
		changed, _ := p.changed()
		return time.Since(changed) > enough, nil
	})
}

// changed is when something last happened, and when something was last seen, events included.
func (p *play) changed() (changed, noted time.Time) {
	for _, namespace := range []string{p.src, p.dst} {
		p.look(namespace, func(s *spot) {
			if s.changed.After(changed) {
				changed = s.changed
			}
			if s.noted.After(noted) {
				noted = s.noted
			}
		})
	}
	return changed, noted
}

// settle waits until what the row records is so and stays so. What never comes true the last look says.
func (p *play) settle(ctx context.Context, look func()) error {
	began := time.Now()
	for looked := began; ; {
		changed, noted := p.changed()
		if noted != looked {
			looked, p.problems = noted, nil
			look()
		}
		enough := p.pace.calm
		if p.phase() == "Succeeded" {
			enough /= 6 // nothing comes after it
		}
		switch still := time.Since(changed); {
		case len(p.problems) == 0 && still > enough, still > 40*p.pace.calm, time.Since(began) > p.pace.patience:
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// text is an expectation that is a string, "" for null.
func (p *play) text(name string) string {
	var s *string
	if err := json.Unmarshal(p.row.Expected[name], &s); err != nil {
		return ""
	}
	return ptr.Deref(s, "")
}

// helper tells whether an object, as Kind/name, was made by CDI beside the target.
func (p *play) helper(name string) bool {
	kind, name, _ := strings.Cut(name, "/")
	switch kind {
	case "DataVolume":
		return false
	case "PersistentVolumeClaim":
		return name != "golden" && name != p.disk
	case "VolumeSnapshot":
		return name != "golden-snap"
	}
	return true
}

// compare holds everything that a row records against what was seen. What is written about CDI's own log
// (reconcileErrors) nobody else can see; what a second run did differently is what may differ.
func (p *play) compare() {
	s := p.seen()
	for _, name := range slices.Sorted(maps.Keys(p.row.Expected)) {
		switch want := p.row.Expected[name]; name {
		case "reconcileErrors", "secondRun":
		case "phaseSequence":
			p.comparePhases(want, s)
		case "clonePhases":
			p.compareClonePhases(want, s)
		case "events":
			p.compareEvents(want, s)
		default:
			got, known := s[name]
			if !known {
				p.wrong("the row records %s, which nobody looks at", name)
				continue
			}
			p.either(name, want, got)
		}
	}
}

// either compares with what one of the recorded runs did.
func (p *play) either(name string, want json.RawMessage, got any) {
	var second struct {
		Differences map[string][]json.RawMessage `json:"differences"`
	}
	_ = json.Unmarshal(p.row.Expected["secondRun"], &second) // null for most
	for _, w := range append([]json.RawMessage{want}, second.Differences[name]...) {
		if p.same(name, w, got) {
			return
		}
	}
	data, _ := json.Marshal(got)
	p.wrong("%s: %s, recorded: %s", name, data, want)
}

func (p *play) same(name string, want json.RawMessage, got any) bool {
	data, err := json.Marshal(got)
	if err != nil {
		return false
	}
	var w, g any
	if json.Unmarshal(want, &w) != nil || json.Unmarshal(data, &g) != nil {
		return false
	}
	switch name {
	case "request", "capacity":
		ws, wok := w.(string)
		gs, gok := g.(string)
		if !wok || !gok {
			return w == nil && g == nil
		}
		a, aerr := resource.ParseQuantity(ws)
		b, berr := resource.ParseQuantity(gs)
		return aerr == nil && berr == nil && a.Cmp(b) == 0
	case "helperKinds":
		return p.sameHelpers(w, g)
	case "conditions":
		return p.sameConditions(w, g)
	case "finalPhase":
		// Without a claim "" and "Pending" are the same: whichever of two writes comes first.
		return w == g || p.text("pvcPhase") == "" && (w == "" || w == "Pending") && (g == "" || g == "Pending")
	}
	wd, _ := json.Marshal(w)
	gd, _ := json.Marshal(g)
	return string(wd) == string(gd)
}

// sameHelpers compares kinds. Whether growing a Block volume takes a prep pod is a race with the driver, which needs no
// node for it: rows were recorded both ways.
func (p *play) sameHelpers(w, g any) bool {
	var lists [2][]string
	for i, x := range []any{w, g} {
		all, _ := x.([]any)
		for _, e := range all {
			if s := fmt.Sprint(e); p.text("volumeMode") != "Block" || !strings.HasPrefix(s, "Pod:cdi-populator-prep@") {
				lists[i] = append(lists[i], s)
			}
		}
	}
	return slices.Equal(lists[0], lists[1])
}

// sameConditions compares conditions. Of a claim that waits, Bound tells the latest event: which of those that come
// again and again that is, is a matter of the moment. What was recorded must have been said. A DataVolume that was deleted
// in the midst of a copy had it prepared or going on: that is a matter of the moment, too.
func (p *play) sameConditions(w, g any) bool {
	want, wok := w.(map[string]any)
	got, gok := g.(map[string]any)
	if !wok || !gok {
		return false
	}
	for kind := range want {
		said := fmt.Sprint(want[kind])
		if said == fmt.Sprint(got[kind]) || p.last.volume != nil && slices.Contains(copies, said) && slices.Contains(copies, fmt.Sprint(got[kind])) {
			continue
		}
		if kind != "Bound" || !strings.HasPrefix(said, latestEvent) || !strings.HasPrefix(fmt.Sprint(got[kind]), latestEvent) || !p.wasSaid(said) {
			return false
		}
	}
	return len(want) == len(got)
}

// copies are what Running says while a populator copies.
var copies = []string{"[True Populator is running ]", "[True Pod is running ]"}

const latestEvent = "[False Pending target PVC disk Pending and "

// wasSaid tells whether an event of the target, or of the claim that is filled for it, says what a condition does.
func (p *play) wasSaid(condition string) bool {
	found, plain := false, p.plain()
	p.look(p.dst, func(s *spot) {
		for w := range s.words["PersistentVolumeClaim/"+p.disk] {
			found = found || condition == latestEvent+plain(w)+"]"
		}
	})
	return found
}

// plain puts the rows' placeholders for what is different in each run.
func (p *play) plain() func(string) string {
	names := map[string]string{p.src: "SRCNS", p.dst: "DSTNS"}
	p.look(p.dst, func(s *spot) {
		for name, uid := range s.uids {
			if name != p.disk && name != "golden" {
				names[uid] = "<uid:target:helperpvc>"
			}
		}
		names[s.uids[p.disk]] = "<pvcUID>"
	})
	p.look(p.src, func(s *spot) { names[s.uids["golden"]] = "<sourcePvcUID>" })
	delete(names, "") // of what never was
	return func(s string) string {
		for from, to := range names {
			s = strings.ReplaceAll(s, from, to)
		}
		return imageName.ReplaceAllString(s, "failed to pull image: img/importer")
	}
}

var imageName = regexp.MustCompile(`failed to pull image: \S+`)

// seen is what was seen of the row, in the row's own terms.
func (p *play) seen() map[string]any {
	proofs := map[string]bool{}
	out := map[string]any{"proofs": proofs}
	p.look(p.src, func(s *spot) { maps.Copy(proofs, s.proofs) })
	var volume *unstructured.Unstructured
	var claim *corev1.PersistentVolumeClaim
	helpers := map[string]bool{}
	p.look(p.dst, func(s *spot) {
		volume, claim = s.volumes[p.disk], s.claims[p.disk]
		maps.Copy(proofs, s.proofs)
		out["phases"], out["clones"], out["pods"] = s.phases[p.disk], s.clones[p.disk], s.pods[p.disk]
	})
	switch {
	case p.last.volume != nil:
		volume, claim = p.last.volume, p.last.claim
	case volume == nil: // the watch is behind
		volume = object(dataVolumeKind)
	}
	events := map[string]bool{}
	for _, namespace := range []string{p.src, p.dst} {
		where := map[bool]string{true: "source", false: "target"}[namespace == p.src]
		if p.src == p.dst {
			where = "same"
		}
		p.look(namespace, func(s *spot) {
			for name := range s.helpers {
				kind, _, _ := strings.Cut(name, "/")
				if p.helper(name) && !(kind == importSourceRef && where == "source") { // of the golden DataVolume
					helpers[kind+"@"+where] = true
				}
			}
			if namespace != p.dst {
				return
			}
			for _, about := range []string{"DataVolume/" + p.disk, "PersistentVolumeClaim/" + p.disk} {
				maps.Copy(events, s.events[about])
			}
			for about, list := range s.events {
				if strings.HasPrefix(about, "PersistentVolumeClaim/prime-") {
					maps.Copy(events, list)
				}
			}
		})
	}
	plain := p.plain()
	out["helperKinds"], out["events"] = slices.Sorted(maps.Keys(helpers)), slices.Sorted(maps.Keys(events))
	if len(helpers) == 0 {
		out["helperKinds"] = []string{}
	}
	conditions := map[string][]string{}
	for _, k := range []string{"Bound", "Ready", "Running"} {
		c := stateOf(volume, k)
		conditions[k] = []string{c.status, plain(c.reason), plain(c.message)}
	}
	out["conditions"], out["finalPhase"], out["progress"] = conditions, text(volume, "status", "phase"), text(volume, "status", "progress")
	out["usePopulator"] = annotation(volume, usePopulatorKey)
	for _, name := range []string{"strategy", "fallbackReason", "cloneError", "pvcPhase", "storageClass", "volumeMode", "accessModes", "request", "capacity", "dataSourceRef"} {
		out[name] = nil
	}
	if claim != nil {
		out["strategy"], out["fallbackReason"] = annotation(claim, cloneTypeKey), annotation(claim, cloneFallbackKey)
		if e := annotation(claim, cloneErrorKey); e != nil {
			out["cloneError"] = plain(*e)
		}
		size, _ := requested(&claim.Spec)
		capacity := claim.Status.Capacity[corev1.ResourceStorage]
		out["pvcPhase"], out["storageClass"], out["volumeMode"] = claim.Status.Phase, claim.Spec.StorageClassName, claim.Spec.VolumeMode
		out["accessModes"], out["request"], out["capacity"] = claim.Spec.AccessModes, size.String(), capacity.String()
		if ref := claim.Spec.DataSourceRef; ref != nil {
			out["dataSourceRef"] = map[string]any{"apiGroup": ref.APIGroup, "kind": ref.Kind, "name": strings.ReplaceAll(ref.Name, string(volume.GetUID()), "<dvUID>")}
		}
	}
	out["dataPath"], out["bytesCrossPodNetwork"] = p.path(annotation(claim, cloneTypeKey), helpers)
	return out
}

func annotation(o client.Object, k string) *string {
	if c, ok := o.(*corev1.PersistentVolumeClaim); ok && c == nil {
		return nil
	}
	if v, ok := o.GetAnnotations()[k]; ok {
		return &v
	}
	return nil
}

// path is the way that the data took, by strategy and by the pods that there were.
func (p *play) path(strategy *string, helpers map[string]bool) (string, bool) {
	pod := func(kind string) bool {
		return helpers["Pod:"+kind+"@source"] || helpers["Pod:"+kind+"@target"] || helpers["Pod:"+kind+"@same"]
	}
	switch k := p.row.Given.Source.Kind; {
	case k == "http" || k == "blank":
		if pod("importer") {
			return "import: importer pod downloads from the endpoint", true
		}
	case strategy == nil:
	case *strategy == strategySnapshot:
		return "storage layer: VolumeSnapshot + restore", false
	case *strategy == strategyCSI:
		return "storage layer: CSI volume clone", false
	case pod("cdi-clone-source"):
		return "host-assisted: source pod -> upload pod over the pod network", true
	case pod("cdi-upload-server"):
		return "host-assisted planned: upload pod created, no source pod yet", false
	}
	return "none", false
}

func (p *play) list(raw json.RawMessage) []string {
	var list []string
	if err := json.Unmarshal(raw, &list); err != nil {
		p.wrong("no list of strings: %s", raw)
	}
	return list
}

// passing are phases that a look at the latest state only may miss, and that were missed in one recorded run or the other.
var passing = map[string]bool{"": true, "(unset)": true, "Pending": true, "PVCBound": true, "CloneScheduled": true, "ImportScheduled": true, "RebindInProgress": true,
	"PrepClaimInProgress": true, "CSICloneInProgress": true, "SnapshotForSmartCloneInProgress": true, "CloneFromSnapshotSourceInProgress": true,
	"WaitForFirstConsumer": true, "PendingPopulation": true, "ImportInProgress": true, "CloneInProgress": true, "Rebind": true, "PrepClaim": true, "Error": true,
	"CSIClone": true, "Snapshot": true, "SnapshotClone": true}

// orders are the ways in which phases follow each other.
var orders = map[string][]string{
	"volume": {"", "Pending", "WaitForFirstConsumer", "CloneScheduled", "Pending", "PendingPopulation", "WaitForFirstConsumer", "CloneScheduled", "PVCBound",
		"ImportScheduled", "ImportInProgress", "ImportScheduled", "ImportInProgress", "SnapshotForSmartCloneInProgress", "CloneFromSnapshotSourceInProgress",
		"CSICloneInProgress", "PrepClaimInProgress", "CloneInProgress", "RebindInProgress", "Succeeded", "Failed"},
	"clone": {"Pending", "Snapshot", "SnapshotClone", "CSIClone", "PrepClaim", "HostClone", "Rebind", "Succeeded"},
}

// follows tells whether phases come in an order, each at most as often as there.
func follows(phases, order []string) bool {
	for _, ph := range phases {
		i := slices.Index(order, ph)
		if i < 0 {
			return false
		}
		order = order[i+1:]
	}
	return true
}

// comparePhases wants what was seen in the order that CDI goes through, without a phase of another way, and with
// every phase that was recorded and can't be missed.
func (p *play) comparePhases(raw json.RawMessage, s map[string]any) {
	want, got := p.list(raw), s["phases"].([]string)
	if !follows(got, orders["volume"]) {
		p.wrong("phaseSequence: %q is no order of CDI's", got)
	}
	var second struct {
		Phases []string `json:"phaseSequence"`
	}
	_ = json.Unmarshal(p.row.Expected["secondRun"], &second)
	for _, ph := range want {
		if ph = strings.TrimPrefix(ph, "(unset)"); slices.Contains(got, ph) || passing[ph] && (len(second.Phases) > 0 && !slices.Contains(second.Phases, ph) || mayMiss(ph)) {
			continue
		}
		if ph == "" || p.done(ph, s) {
			continue
		}
		p.wrong("phaseSequence: %q lacks %s, recorded: %q", got, ph, want)
	}
	for _, ph := range got {
		if !slices.Contains(want, ph) && !slices.Contains(second.Phases, ph) && !mayMiss(ph) && !smart(ph) {
			p.wrong("phaseSequence: %q has %s, recorded: %q", got, ph, want)
		}
	}
}

// mayMiss are the phases that CDI goes through in no time.
func mayMiss(phase string) bool {
	switch phase {
	case "", "Pending", "PVCBound", "CloneScheduled", "ImportScheduled", "RebindInProgress":
		return true
	}
	return false
}

// smart are the phases of the storage layer, which come and go with the driver's speed.
func smart(phase string) bool {
	return phase == "CSICloneInProgress" || phase == "PrepClaimInProgress"
}

// done tells whether a phase was gone through although the DataVolume did not show it: by the claim's own phases.
func (p *play) done(phase string, s map[string]any) bool {
	if s["proofs"].(map[string]bool)[phase] {
		return true
	}
	for clone, of := range phaseOfClone {
		if of == phase && slices.Contains(s["clones"].([]string), clone) {
			return true
		}
	}
	return phase == "ImportInProgress" && slices.Contains(s["pods"].([]string), "Running") ||
		phase == "PrepClaimInProgress" && p.text("volumeMode") == "Block" || phase == "CSICloneInProgress" && slices.Contains(s["clones"].([]string), "PrepClaim")
}

// compareClonePhases wants the populator's phases in their order, errors aside: a conflict between two controllers is
// one, too. The last one counts.
func (p *play) compareClonePhases(raw json.RawMessage, s map[string]any) {
	got := s["clones"].([]string)
	if string(raw) == "null" {
		if len(got) > 0 {
			p.wrong("clonePhases: %q, recorded: none", got)
		}
		return
	}
	want := p.list(raw)
	if len(got) == 0 || got[len(got)-1] != want[len(want)-1] {
		p.wrong("clonePhases: %q, recorded: %q", got, want)
		return
	}
	calm := slices.DeleteFunc(slices.Clone(got), func(ph string) bool { return ph == "Error" })
	if !follows(slices.Compact(calm), orders["clone"]) {
		p.wrong("clonePhases: %q is no order of CDI's", got)
	}
	for _, ph := range want {
		if !slices.Contains(got, ph) && !passing[ph] {
			p.wrong("clonePhases: %q lacks %s, recorded: %q", got, ph, want)
		}
	}
	for _, ph := range got {
		if !slices.Contains(want, ph) && (ph == "Snapshot" || ph == "SnapshotClone" || ph == "HostClone" || ph == "CSIClone" && slices.Contains(want, "Snapshot")) {
			p.wrong("clonePhases: %q has %s, recorded: %q", got, ph, want)
		}
	}
}

// onTheWay are events of phases and waits that come or don't come with the speed of things; repeats are dropped by
// Kubernetes itself when there are many.
var onTheWay = regexp.MustCompile(`^(DataVolume Normal (NotFound|Pending|CloneScheduled|ImportScheduled|ImportInProgress|CloneInProgress|RebindInProgress|PrepClaimInProgress|CSICloneInProgress|` +
	`SnapshotForSmartCloneInProgress|CloneFromSnapshotSourceInProgress|CloneWithoutSource|CloneValidationFailed|ImportPVCNotReady|SizeDetectionPodNotReady)` +
	`|DataVolume Warning (Completed|CloneSourceInUse|Error|Unschedulable)|PersistentVolumeClaim Normal (ImportSucceeded|CloneSucceeded|importSucceeded)|PersistentVolumeClaim Warning (importFailed|CloneSourceInUse))$`)

// unscheduled comes with a scheduler that sees a pod before its claim is bound; a pod that stays so shows in a condition.
const unscheduled = "DataVolume Warning Unschedulable"

// compareEvents wants every event that says what was decided, and none else of that kind.
func (p *play) compareEvents(raw json.RawMessage, s map[string]any) {
	want, got := p.list(raw), s["events"].([]string)
	over := p.text("finalPhase") == "Succeeded"
	dropped := slices.Contains(want, "DataVolume Normal SizeDetectionPodNotReady") // 25 are let through for an object
	// That an import fails CDI says when its reason changes on a claim that it knows to be bound: where the condition has the
	// reason and the event is not recorded, the one came before the other.
	running := p.condition("Running")
	failed := len(running) > 1 && running[1] == "Error"
	for _, e := range want {
		if !slices.Contains(got, e) && !(onTheWay.MatchString(e) && (over || strings.Contains(e, " Normal ") || strings.HasSuffix(e, "importFailed"))) {
			p.wrong("events: lack %s; seen: %q", e, got)
		}
	}
	for _, e := range got {
		if !slices.Contains(want, e) && !(onTheWay.MatchString(e) && (over || strings.Contains(e, " Normal "))) && !(dropped && strings.HasPrefix(e, "DataVolume Normal ")) &&
			!(e == "DataVolume Normal Bound" && p.text("pvcPhase") == "Bound") && e != unscheduled && !(failed && e == "DataVolume Warning Error") {
			p.wrong("events: have %s; recorded: %q", e, want)
		}
	}
}

// admission plays a row about CDI's webhooks.
func (p *play) admission(ctx context.Context) error {
	if err := p.namespaces(ctx, nil); err != nil {
		return err
	}
	g := p.row.Given
	user, err := p.as(ctx, g)
	if err != nil {
		return err
	}
	if g.Patch != nil {
		return p.admitUpdate(ctx, user)
	}
	dv := object(dataVolumeKind)
	if g.DV == nil { // described as the rows of the controller are
		g.Target.AccessModes = []string{"ReadWriteOnce"}
		p.row.Given.Target = g.Target
		p.row.Given.Source.VolumeMode = "Filesystem"
		p.row.Given.Source.ContentType = contentKubeVirt
		if err := p.golden(ctx); err != nil {
			return err
		}
		if dv, err = p.dataVolume(ctx); err != nil {
			return err
		}
	} else {
		data, err := json.Marshal(g.DV)
		if err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(strings.NewReplacer("SRCNS", p.src, "DSTNS", p.dst).Replace(string(data))), &dv.Object); err != nil {
			return err
		}
		dv.SetGroupVersionKind(dataVolumeKind)
	}
	p.disk = dv.GetName()
	if p.row.says(`PVC of that name exists`) {
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.dst, Name: p.disk, Annotations: map[string]string{}},
			Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("")}}
		request(&claim.Spec, resource.MustParse("1Gi"))
		if p.row.says(`populatedFor`) {
			claim.Annotations[populatedForKey] = p.disk
		}
		if err := p.c.Create(ctx, claim); err != nil {
			return err
		}
	}
	before := dv.GetAnnotations()
	err = user.Create(ctx, dv)
	p.answer(err)
	if err != nil {
		return nil
	}
	added := []string{}
	for k := range dv.GetAnnotations() {
		if _, ok := before[k]; !ok {
			added = append(added, k)
		}
	}
	slices.Sort(added)
	for name, want := range p.row.Expected {
		switch name {
		case "annotationsAdded", "annotationsAddedByWebhook":
			p.either(name, want, added)
		case "tokenPayload":
			p.either(name, want, p.payload(dv.GetAnnotations()[cloneTokenKey]))
		}
	}
	if _, ok := p.row.Expected["finalPhase"]; !ok {
		return nil
	}
	return p.served(ctx)
}

// answer compares what the API server said, as kubectl prints it.
func (p *play) answer(err error) {
	var may bool
	if json.Unmarshal(p.row.Expected["allowed"], &may) != nil || may != (err == nil) {
		p.wrong("allowed: %v (%v), recorded: %s", err == nil, err, p.row.Expected["allowed"])
		return
	}
	if err == nil {
		return
	}
	got := strings.NewReplacer(p.src, "SRCNS", p.dst, "DSTNS").Replace(err.Error())
	want := regexp.MustCompile(`^Error from server( \(\w+\))?: (error when (creating|patching) "STDIN": )?`).ReplaceAllString(p.text("error"), "")
	want = strings.ReplaceAll(want, `The DataVolume "`, `DataVolume.cdi.kubevirt.io "`)
	if got != want {
		p.wrong("error: %q, recorded: %q", got, want)
	}
}

func (p *play) payload(token string) any {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return token
	}
	data, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return err.Error()
	}
	var c struct {
		Exp int64 `json:"exp"`
		Iat int64 `json:"iat"`
	}
	m := map[string]any{}
	data = []byte(strings.NewReplacer(p.src, "SRCNS", p.dst, "DSTNS").Replace(string(data)))
	if json.Unmarshal(data, &c) != nil || json.Unmarshal(data, &m) != nil {
		return string(data)
	}
	delete(m, "exp")
	delete(m, "iat")
	delete(m, "nbf")
	m["lifetimeSeconds"] = c.Exp - c.Iat
	return m
}

// admitUpdate patches a DataVolume that is there.
func (p *play) admitUpdate(ctx context.Context, user client.Client) error {
	dv := object(dataVolumeKind)
	dv.SetNamespace(p.dst)
	dv.SetName(p.disk)
	set(dv, map[string]any{"source": map[string]any{"blank": map[string]any{}},
		"storage": sized("1Gi", map[string]any{"accessModes": []any{"ReadWriteOnce"}})}, "spec")
	if err := p.c.Create(ctx, dv); err != nil {
		return err
	}
	p.answer(user.Patch(ctx, dv, client.RawPatch(types.MergePatchType, p.row.Given.Patch)))
	return nil
}

// served follows a DataVolume that was let in to its end.
func (p *play) served(ctx context.Context) error {
	before := p.problems
	err := p.settle(ctx, p.compareServed)
	p.problems = append(before, p.problems...)
	return err
}

func (p *play) compareServed() {
	volume, ok := p.latest(p.dst, dataVolumeKind.Kind+"/"+p.disk).(*unstructured.Unstructured)
	if !ok {
		p.wrong("the DataVolume was not seen")
		return
	}
	s := p.seen()
	for _, name := range []string{"finalPhase", "progress", "strategy", "bytesCrossPodNetwork"} {
		if want, ok := p.row.Expected[name]; ok {
			p.either(name, want, s[name])
		}
	}
	if want, ok := p.row.Expected["polledPhases"]; ok {
		p.comparePhases(want, s)
	}
	for _, a := range p.list(p.row.Expected["annotationsAddedByController"]) {
		k, v, hasValue := strings.Cut(a, "=")
		if got := annotation(volume, k); got == nil || hasValue && *got != v {
			p.wrong("annotations of the DataVolume lack %s", a)
		}
	}
}

// as is a client that acts as the row's user, with the rights that the row gives.
func (p *play) as(ctx context.Context, g given) (client.Client, error) {
	user, groups := strings.ReplaceAll(g.User, "DSTNS", p.dst), []string{}
	for _, x := range g.Groups {
		groups = append(groups, strings.ReplaceAll(x, "DSTNS", p.dst))
	}
	if user == "cluster-admin" || user == "" {
		return p.c, nil
	}
	rights := ptr.Deref(g.Rights, p.rights[g.User])
	subject := rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}
	source := subject
	if found := regexp.MustCompile(`(\S+/source) granted to group (\S+)`).FindStringSubmatch(p.row.Description); found != nil {
		rights, source = "create "+strings.TrimPrefix(found[1], "("), rbacv1.Subject{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: found[2]}
	}
	everything := []rbacv1.PolicyRule{allow(cdiGroup, []string{"datavolumes"}, "*")}
	if err := p.grant(ctx, p.dst, "target", subject, everything); err != nil {
		return nil, err
	}
	rules, wide := rulesOf(rights)
	if wide {
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: p.dst}, Rules: rules}
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: p.dst}, Subjects: []rbacv1.Subject{source},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: p.dst}}
		for _, o := range []client.Object{role, binding} {
			if err := p.c.Create(ctx, o); err != nil {
				return nil, err
			}
		}
	} else if len(rules) > 0 {
		if err := p.grant(ctx, p.src, "source", source, rules); err != nil {
			return nil, err
		}
	}
	if err := p.inForce(ctx, p.dst, subject, everything[0]); err != nil {
		return nil, err
	}
	if len(rules) > 0 {
		if err := p.inForce(ctx, p.src, source, rules[0]); err != nil {
			return nil, err
		}
	}
	config := rest.CopyConfig(p.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	return client.New(config, client.Options{Scheme: scheme, Mapper: p.c.RESTMapper()})
}

// inForce waits until the API server knows of a right that was granted: it reads rights from a cache.
func (p *play) inForce(ctx context.Context, namespace string, to rbacv1.Subject, rule rbacv1.PolicyRule) error {
	resource, subresource, _ := strings.Cut(rule.Resources[0], "/")
	ask := authorizationv1.SubjectAccessReviewSpec{User: to.Name, ResourceAttributes: &authorizationv1.ResourceAttributes{
		Namespace: namespace, Verb: rule.Verbs[0], Group: rule.APIGroups[0], Resource: resource, Subresource: subresource}}
	if to.Kind == rbacv1.GroupKind {
		ask.User, ask.Groups = "somebody", []string{to.Name}
	}
	if len(rule.ResourceNames) > 0 {
		ask.ResourceAttributes.Name = rule.ResourceNames[0]
	}
	return p.until(ctx, fmt.Sprintf("%s %s to have the right to %s %s", to.Kind, to.Name, rule.Verbs[0], rule.Resources[0]), func(ctx context.Context) (bool, error) {
		review := &authorizationv1.SubjectAccessReview{Spec: ask}
		err := p.c.Create(ctx, review)
		return review.Status.Allowed, err
	})
}

func (p *play) grant(ctx context.Context, namespace, name string, to rbacv1.Subject, rules []rbacv1.PolicyRule) error {
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	for _, o := range []client.Object{&rbacv1.Role{ObjectMeta: meta, Rules: rules},
		&rbacv1.RoleBinding{ObjectMeta: meta, Subjects: []rbacv1.Subject{to}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}}} {
		if err := p.c.Create(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// rulesOf reads rights as the rows write them: "create pods, persistentvolumeclaims", "datavolumes *",
// "create datavolumes/source resourceNames=[golden]", "cdi.kubevirt.io * * (cluster-wide)".
func rulesOf(rights string) (rules []rbacv1.PolicyRule, clusterWide bool) {
	rights, clusterWide = strings.CutSuffix(rights, " (cluster-wide)")
	var only []string
	if found := regexp.MustCompile(` resourceNames=\[(\S+)\]`).FindStringSubmatch(rights); found != nil {
		rights, only = strings.Replace(rights, found[0], "", 1), strings.Split(found[1], ",")
	}
	group := func(resource string) string {
		if strings.HasPrefix(resource, "datavolumes") {
			return cdiGroup
		}
		return ""
	}
	switch words := strings.Fields(rights); {
	case rights == "" || rights == "none":
	case len(words) == 3 && strings.Contains(words[0], "."):
		rules = append(rules, rbacv1.PolicyRule{APIGroups: words[:1], Resources: words[1:2], Verbs: words[2:]})
	case words[0] == "create":
		for _, resource := range strings.Split(strings.TrimPrefix(rights, "create "), ", ") {
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group(resource)}, Resources: []string{strings.TrimPrefix(resource, "create ")}, Verbs: []string{"create"}, ResourceNames: only})
		}
	default:
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group(words[0])}, Resources: words[:1], Verbs: words[1:]})
	}
	return rules, clusterWide
}
