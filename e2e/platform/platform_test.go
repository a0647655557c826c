package platform

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/fixtures/profiles"
)

var update = flag.Bool("update", false, "write golden files")

const testProfile = "testdata/profile.yaml"

// testTree copies testdata/tree and links the library into the kubernetes chart, as Cozystack's checkouts do.
func testTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	if err := os.CopyFS(dir, os.DirFS("testdata/tree")); err != nil {
		t.Fatal(err)
	}
	charts := filepath.Join(dir, "packages/apps/kubernetes/charts")
	if err := os.MkdirAll(charts, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../../library/cozy-lib", filepath.Join(charts, "cozy-lib")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func load(t *testing.T, spec string) *Version {
	t.Helper()
	v, err := Load(t.Context(), spec, filepath.Join(t.TempDir(), "scratch"), Options{Profile: testProfile})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func replaceIn(t *testing.T, name, old, new string) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(data), old) {
		t.Fatalf("%s lacks %q", name, old)
	}
	write(t, name, strings.ReplaceAll(string(data), old, new))
}

func runGit(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=t", "-c", "user.email=t@example.org"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// testRepository is a repository whose tree lies in a subdirectory; the second commit raises the target to 4.
func testRepository(t *testing.T) (repository, tree string) {
	t.Helper()
	repository = t.TempDir()
	tree = filepath.Join(repository, "a@b", "platform")
	if err := os.CopyFS(tree, os.DirFS(testTree(t))); err != nil {
		t.Fatal(err)
	}
	runGit(t, repository, "init", "--quiet", "--initial-branch=main")
	runGit(t, repository, "add", "--all")
	runGit(t, repository, "commit", "--quiet", "--message=one")
	runGit(t, repository, "tag", "v3")
	replaceIn(t, filepath.Join(tree, "packages/core/platform/values.yaml"), "targetVersion: 3", "targetVersion: 4")
	runGit(t, repository, "commit", "--quiet", "--all", "--message=two")
	return repository, tree
}

// fingerprint hashes names, modes, times and contents below dir.
func fingerprint(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(h, name, info.Mode(), info.ModTime())
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			h.Write(data)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func TestRefIsReadWithoutTouchingTheCheckout(t *testing.T) {
	repository, tree := testRepository(t)
	write(t, filepath.Join(tree, "packages/core/platform/values.yaml"), "migrations: {targetVersion: 99}\n") // an edit in progress
	before := fingerprint(t, repository)

	for spec, want := range map[string]int{tree: 99, tree + "@v3": 3, tree + "@main": 4, tree + "@main~1": 3} {
		v := load(t, spec)
		if v.Target != want {
			t.Errorf("%s: target %d, want %d", spec, v.Target, want)
		}
		if (v.Commit != "") != (spec != tree) {
			t.Errorf("%s: commit %q", spec, v.Commit)
		}
		if v.Charts[0].Digest != load(t, testTree(t)).Charts[0].Digest {
			t.Errorf("%s: the chart differs from the directory's", spec)
		}
	}
	if after := fingerprint(t, repository); after != before {
		t.Error("the checkout was changed")
	}
}

func TestBadInputIsOneLine(t *testing.T) {
	repository, tree := testRepository(t)
	plain := testTree(t)
	file := filepath.Join(plain, "packages/core/platform/values.yaml")
	broken := func(change func(dir string)) string {
		dir := testTree(t)
		change(dir)
		return dir
	}
	overlay := filepath.Join(t.TempDir(), "misfit.diff")
	write(t, overlay, "--- a/packages/core/platform/values.yaml\n+++ b/packages/core/platform/values.yaml\n@@ -1,1 +1,1 @@\n-nothing: of the kind\n+x: y\n")

	for name, c := range map[string]struct {
		spec    string
		options Options
		want    string
	}{
		"missing directory": {spec: "/no/such", want: "no such directory /no/such"},
		"missing with ref":  {spec: "/no/such@main", want: "no such directory /no/such"},
		"a file":            {spec: file, want: "is not a directory"},
		"empty ref":         {spec: tree + "@", want: "no ref after the @"},
		"bad ref":           {spec: tree + "@nope", want: `has no commit "nope"`},
		"ref like a flag":   {spec: tree + "@--help", want: `has no commit "--help"`},
		"no repository":     {spec: plain + "@main", want: plain + " is not in a git repository"},
		"no platform":       {spec: filepath.Join(plain, "packages"), want: "no packages/core/platform in it"},
		"no platform, ref":  {spec: repository + "@main", want: "no packages/core/platform in it"},
		"misfit overlay":    {spec: plain, options: Options{Overlay: []string{overlay}}, want: "patch failed"},
		"missing overlay":   {spec: plain, options: Options{Overlay: []string{"/no.diff"}}, want: "overlay /no.diff: no such file"},
		"missing profile":   {spec: plain, options: Options{Profile: "/no.yaml"}, want: "profile /no.yaml: no such file"},
		"no target": {spec: broken(func(dir string) {
			write(t, filepath.Join(dir, "packages/core/platform/values.yaml"), "migrations: {}\n")
		}), want: "values.migrations.targetVersion is missing"},
		"missing chart": {spec: broken(func(dir string) {
			if err := os.RemoveAll(filepath.Join(dir, "packages/system/web")); err != nil {
				t.Fatal(err)
			}
		}), want: "cozystack.web, variant default, component web: no directory packages/system/web"},
		"undeclared library": {spec: broken(func(dir string) {
			replaceIn(t, filepath.Join(dir, "packages/core/platform/sources/kubernetes.yaml"), "{name: cozy-lib, path", "{name: other, path")
		}), want: "library cozy-lib is not declared by the variant"},
		"broken link": {spec: broken(func(dir string) {
			link(t, "nowhere", filepath.Join(dir, "packages/system/web/link"))
		}), want: "no packages/system/web/link, or it is a broken link"},
		"link out of the tree": {spec: broken(func(dir string) {
			link(t, "/etc", filepath.Join(dir, "packages/system/web/link"))
		}), want: "packages/system/web/link leads out of the tree, to /etc"},
		"circular link": {spec: broken(func(dir string) {
			link(t, "..", filepath.Join(dir, "packages/system/web/templates/link"))
		}), want: "leads in a circle"},
		"missing CRD": {spec: broken(func(dir string) {
			if err := os.RemoveAll(filepath.Join(dir, "packages/system/crds")); err != nil {
				t.Fatal(err)
			}
		}), want: "has nothing at packages/system/crds/, which its profile names"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.options.Profile == "" {
				c.options.Profile = testProfile
			}
			_, err := Load(t.Context(), c.spec, t.TempDir(), c.options)
			if err == nil {
				t.Fatal("loaded")
			}
			if !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q, want one line with %q", err, c.want)
			}
		})
	}
}

func TestManifestsArePlain(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "text.yaml"), "---\n# nothing\n---\nkind: A\nmetadata: {name: a}\ntext: \"see {{ .name }}\"\n---\nkind: B\nmetadata: {name: b}\n")
	objects, err := readObjects(dir, "text.yaml")
	if err != nil || len(objects) != 2 || objects[0].GetName() != "a" || objects[1].GetKind() != "B" {
		t.Errorf("two documents: %v, %v", objects, err)
	}
	write(t, filepath.Join(dir, "template.yaml"), "kind: A\n{{- if .Values.x }}\nx: y\n{{- end }}\n")
	if _, err := readObjects(dir, "template.yaml"); err == nil || !strings.HasSuffix(err.Error(), "template.yaml has template actions: it is no plain manifest") {
		t.Errorf("a template: %v", err)
	}
}

func link(t *testing.T, to, name string) {
	t.Helper()
	if err := os.Symlink(to, name); err != nil {
		t.Fatal(err)
	}
}

func TestOverlayIsAppliedToACopy(t *testing.T) {
	repository, tree := testRepository(t)
	diff := "--- a/packages/core/platform/values.yaml\n+++ b/packages/core/platform/values.yaml\n" +
		"@@ -1,3 +1,3 @@\n migrations:\n   image: registry.example/platform-migrations:v3\n-  targetVersion: 4\n+  targetVersion: 7\n"
	overlay := filepath.Join(t.TempDir(), "defect.diff")
	write(t, overlay, diff)
	before := fingerprint(t, repository)
	// The scratch directory lies in the repository itself, as a run's folder does.
	scratch := filepath.Join(t.TempDir(), "run")
	runGit(t, t.TempDir(), "init", "--quiet", filepath.Dir(scratch))
	for _, spec := range []string{tree, tree + "@main"} {
		v, err := Load(t.Context(), spec, scratch, Options{Profile: testProfile, Overlay: []string{overlay}})
		if err != nil {
			t.Fatal(err)
		}
		if v.Target != 7 {
			t.Errorf("%s: target %d, want the overlay's 7", spec, v.Target)
		}
	}
	if fingerprint(t, repository) != before {
		t.Error("the checkout was changed")
	}
}

func TestArtifactNames(t *testing.T) {
	var got strings.Builder
	for _, c := range load(t, testTree(t)).Charts {
		fmt.Fprintln(&got, c.Artifact, c.Path, c.Name)
	}
	const golden = "testdata/artifacts.golden"
	if *update {
		write(t, golden, got.String())
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("artifacts:\n%swant:\n%s", got.String(), want)
	}
}

func unpack(t *testing.T, data []byte) map[string]string {
	t.Helper()
	zr, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for tr := tar.NewReader(zr); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		out[h.Name] = string(content)
	}
}

func chartOf(t *testing.T, v *Version, artifact string) Chart {
	t.Helper()
	i := slices.IndexFunc(v.Charts, func(c Chart) bool { return c.Artifact == artifact })
	if i < 0 {
		t.Fatalf("no artifact %s", artifact)
	}
	return v.Charts[i]
}

func TestPackedChart(t *testing.T) {
	dir := testTree(t)
	v := load(t, dir)
	for _, artifact := range []string{"cozystack-kubernetes-application-kubevirt-kubernetes", "cozystack-kubernetes-application-kubevirt-pools-v2"} {
		c := chartOf(t, v, artifact)
		got := slices.Sorted(maps.Keys(unpack(t, c.data)))
		want := []string{c.Name + "/Chart.yaml", c.Name + "/charts/cozy-lib/Chart.yaml", c.Name + "/charts/cozy-lib/templates/_name.tpl", c.Name + "/templates/configmap.yaml"}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s holds %v, want %v", artifact, got, want)
		}
	}
	big := unpack(t, chartOf(t, v, "cozystack-web-big-web").data)["web/values.yaml"]
	if want := "replicas: 1\nresources:\n  cpu: 8\n  memory: 1Gi\n"; big != want {
		t.Errorf("values of valuesFiles: %q, want %q", big, want)
	}
}

func TestDigestIsAFunctionOfTheContent(t *testing.T) {
	a, b := testTree(t), testTree(t)
	long := time.Now().Add(-1000 * time.Hour)
	if err := os.Chtimes(filepath.Join(b, "packages/apps/kubernetes/Chart.yaml"), long, long); err != nil {
		t.Fatal(err)
	}
	va, vb := load(t, a), load(t, b)
	if !reflect.DeepEqual(va.ChartRevisions(), vb.ChartRevisions()) || va.Digest != vb.Digest {
		t.Error("equal trees have different digests")
	}
	replaceIn(t, filepath.Join(b, "packages/library/cozy-lib/templates/_name.tpl"), ".Release.Name", ".Chart.Name")
	vc := load(t, b)
	for artifact, revision := range va.ChartRevisions() {
		changed := strings.HasPrefix(artifact, "cozystack-kubernetes-application-")
		if (vc.ChartRevisions()[artifact] != revision) != changed {
			t.Errorf("%s: after a change of the library its revision changed: %v, want %v", artifact, !changed, changed)
		}
		if revision.Revision != "latest@"+revision.Digest {
			t.Errorf("%s: revision %s of digest %s", artifact, revision.Revision, revision.Digest)
		}
	}
	if vc.Digest == va.Digest {
		t.Error("the version's digest does not cover the charts")
	}
}

func TestBundledProfilesAreValid(t *testing.T) {
	names, err := fs.Glob(profiles.Files, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	fallbacks := 0
	for _, name := range names {
		data, err := profiles.Files.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		p, err := ReadProfile(name, data)
		if err != nil {
			t.Error(err)
			continue
		}
		if p.Name+".yaml" != name {
			t.Errorf("%s calls itself %s", name, p.Name)
		}
		if len(p.Marker) == 0 {
			fallbacks++
		}
	}
	if fallbacks != 1 {
		t.Errorf("%d profiles without a marker, want 1", fallbacks)
	}
}

func TestProfileIsChosenByTheTree(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "packages/core/installer/Chart.yaml"), "")
	if p, err := selectProfile(dir, ""); err != nil || p.Name != "fixture" {
		t.Errorf("with half a marker: %v, %v, want fixture", p, err)
	}
	write(t, filepath.Join(dir, "internal/crdinstall/manifests/x.yaml"), "")
	if p, err := selectProfile(dir, ""); err != nil || p.Name != "cozystack" {
		t.Errorf("with the marker: %v, %v, want cozystack", p, err)
	}
	p, err := selectProfile(t.TempDir(), "")
	if err != nil || p.Name != "fixture" {
		t.Errorf("profile of another tree: %v, %v, want fixture", p, err)
	}
}

func TestGoldenImagesAreOfferedAsTheTreeDoes(t *testing.T) {
	dir := t.TempDir()
	p := &Profile{GoldenImages: []GoldenImages{{When: "packages/system/first", Value: "first"}, {When: "packages/system/second", Value: "second"}}}
	if got := p.golden(dir); got != nil {
		t.Errorf("a tree without a catalog offers %v", got)
	}
	write(t, filepath.Join(dir, "packages/system/second/Chart.yaml"), "")
	if got := p.golden(dir); got == nil || got.Value != "second" {
		t.Errorf("the second way: %v", got)
	}
	write(t, filepath.Join(dir, "packages/system/first/Chart.yaml"), "")
	if got := p.golden(dir); got == nil || got.Value != "first" {
		t.Errorf("the first of two ways: %v", got)
	}
}

func TestProfileRefusesMistakes(t *testing.T) {
	const head = "name: p\nplatformChart: a\nsources: b/\n"
	for name, c := range map[string]struct{ yaml, want string }{
		"unknown field":       {head + "manifest: []\n", `unknown field "manifest"`},
		"wrong type":          {head + "namespaces: one\n", "namespaces"},
		"name":                {"name: My Profile\nplatformChart: a\nsources: b\n", `name "My Profile"`},
		"no chart":            {"name: p\n", "platformChart and sources must be set"},
		"absolute path":       {head + "manifests: [/etc/passwd]\n", `path "/etc/passwd" must be relative`},
		"path out":            {head + "crds: {files: [../../x]}\n", `path "../../x" must be relative`},
		"scope":               {head + "crds: {permissive: [{group: g, version: v1, kind: K, plural: ks, scope: Namespace}]}\n", `scope "Namespace"`},
		"half a kind":         {head + "crds: {permissive: [{group: g, kind: K, scope: Cluster}]}\n", "group, version, kind and plural"},
		"object without kind": {head + "objects: [{apiVersion: v1}]\n", "objects[0]"},
		"relative at":         {head + "images: [{image: i, files: [{from: x, at: m}], entrypoint: [m]}]\n", "absolute one in the image"},
		"root at":             {head + "images: [{image: i, files: [{from: x, at: /}], entrypoint: [m]}]\n", "absolute one in the image"},
		"no entrypoint":       {head + "images: [{image: i, files: [{from: x, at: /m}]}]\n", "need an entrypoint"},
		"no files":            {head + "images: [{image: i, entrypoint: [/m]}]\n", "entrypoint needs files"},
		"publish":             {head + "publish: [a/b/c]\n", `publish "a/b/c"`},
		"values":              {head + "values: {in: [x]}\n", "values.secret"},
		"half a way":          {head + "goldenImages: [{when: x, release: r, chart: c}]\n", "when, release, chart and value"},
		"a way out":           {head + "goldenImages: [{when: ../x, release: r, chart: c, value: v}]\n", `path "../x" must be relative`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadProfile("p.yaml", []byte(c.yaml))
			if err == nil || !strings.HasPrefix(err.Error(), "profile p.yaml: ") || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want one line with %q", err, c.want)
			}
		})
	}
}

func TestProfileAnswers(t *testing.T) {
	v := load(t, testTree(t))
	p := *v.Profile
	got := p.TenantValues("tenant-a")["_namespace"]
	if want := (map[string]any{"host": "tenant-a.example.org", "etcd": "tenant-root"}); !reflect.DeepEqual(got, want) {
		t.Errorf("values of tenant-a: %v, want %v", got, want)
	}
	for release, want := range map[[2]string]bool{
		{"tenant-a", "kubernetes-prod-cilium"}: true,
		{"tenant-a", "kubernetes-prod"}:        false,
		{"cozy-system", "x-cilium"}:            false,
	} {
		if p.NotReadyAllowed(release[0], release[1]) != want {
			t.Errorf("%v may be not ready: want %v", release, want)
		}
	}
	p.Publish = []string{"cozystack.web", "cozystack.kubernetes-*/kubernetes"}
	for _, c := range []struct {
		source, component string
		want              bool
	}{
		{"cozystack.web", "anything", true},
		{"cozystack.kubernetes-application", "kubernetes", true},
		{"cozystack.kubernetes-application", "kubernetes-cilium", false},
		{"cozystack.webx", "kubernetes", false},
	} {
		if p.publishes(c.source, c.component) != c.want {
			t.Errorf("publishes %s/%s: want %v", c.source, c.component, c.want)
		}
	}
}

func TestScriptsRunOutsideTheirImage(t *testing.T) {
	s := &stage{dir: "/run/i", image: Image{Shell: "bash", Files: []ImageFile{{At: "/migrations"}, {At: "/usr/bin/run.sh"}}}}
	for in, want := range map[string]string{
		"#!/bin/sh -e\n. /migrations/lib/x.sh\n":         "#!/usr/bin/env bash -e\n. /run/i/migrations/lib/x.sh\n",
		`"/migrations/$i" || cat '/migrations'`:          `"/run/i/migrations/$i" || cat '/run/i/migrations'`,
		"x=/migrations;y=/usr/bin/run.sh":                "x=/run/i/migrations;y=/run/i/usr/bin/run.sh",
		"images/migrations/1 ${DIR}/migrations/1 a/b":    "images/migrations/1 ${DIR}/migrations/1 a/b",
		"/migrations-old /usr/bin/run.sh.bak":            "/migrations-old /usr/bin/run.sh.bak",
		"echo\n#!/bin/sh is only a shebang on line one":  "echo\n#!/bin/sh is only a shebang on line one",
		"#!/bin/shellinabox\nkubectl get x 2>/dev/null ": "#!/bin/shellinabox\nkubectl get x 2>/dev/null ",
	} {
		if got := string(s.relocate([]byte(in))); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}

func TestEntrypoint(t *testing.T) {
	dir := testTree(t)
	v := load(t, dir)
	if _, _, ok := v.Entrypoint("registry.example/something:v1"); ok {
		t.Error("an unknown image has an entrypoint")
	}
	if _, _, ok := v.Entrypoint("registry.example/platform-migrations:v9"); ok {
		t.Error("another version's migration image runs this tree's migrations")
	}
	if _, _, ok := v.Entrypoint("docker.io/any/kubectl:v1"); ok {
		t.Error("an image without files has an entrypoint")
	}
	other := load(t, dir)
	path, args, ok := Entrypoints(other, v)("registry.example/platform-migrations:v3")
	if !ok || filepath.Base(path) != "bash" || len(args) != 1 || !strings.HasPrefix(args[0], other.staged["*/platform-migrations:*"].dir) {
		t.Fatalf("migration image: %q %q %v, want bash and the first version's copy", path, args, ok)
	}
	fake := t.TempDir()
	for _, program := range []string{"kubectl", "jq"} {
		write(t, filepath.Join(fake, program), "#!/bin/sh\necho $0 called >&2\n")
		if err := os.Chmod(filepath.Join(fake, program), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "PATH="+fake+":"+os.Getenv("PATH"), "NAMESPACE=x", "CURRENT_VERSION=2", "TARGET_VERSION=3")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "run-migrations.sh: migration 2\n") || strings.Count(string(out), "kubectl called") != 2 {
		t.Errorf("migrations ended with %v: %s", err, out)
	}
}

func TestProgramsOfTheNeededMigrations(t *testing.T) {
	dir := testTree(t)
	v := load(t, dir)
	if got, want := v.Programs(2), []string{"bash", "jq", "kubectl"}; !reflect.DeepEqual(got, want) {
		t.Errorf("programs of migration 2: %v, want %v", got, want)
	}
	if got := v.Programs(1); !slices.Contains(got, "etcd-migrate") {
		t.Errorf("programs of migration 1: %v, want etcd-migrate too", got)
	}
	script := "# helm is great\necho 'run | helm now' \"and (yq)\"\n  if ! out=$(velero get); then\n" +
		"x=1 curl -s; a && openssl x\nprintf '%s' \"$v\" | mc \\\n  ls\ncat <<EOF\nflux: none\nEOF\n"
	if got, want := commands(script), []string{"velero", "curl", "openssl", "mc"}; !reflect.DeepEqual(got, want) {
		t.Errorf("commands %v, want %v", got, want)
	}
}

func TestCheckUpgrade(t *testing.T) {
	dir := testTree(t)
	values := filepath.Join(dir, "packages/core/platform/values.yaml")
	at := func(target string) *Version {
		replaceIn(t, values, "targetVersion: 3", "targetVersion: "+target)
		defer replaceIn(t, values, "targetVersion: "+target, "targetVersion: 3")
		return load(t, dir)
	}
	one, two, three := at("1"), at("2"), load(t, dir)
	programs := t.TempDir()
	write(t, filepath.Join(programs, "kubectl"), "")
	if err := os.Chmod(filepath.Join(programs, "kubectl"), 0o755); err != nil {
		t.Fatal(err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash in PATH")
	}
	path := t.TempDir() // no jq here
	link(t, bash, filepath.Join(path, "bash"))
	t.Setenv("PATH", path)
	for name, c := range map[string]struct {
		old, new *Version
		want     string
	}{
		"lacks a program": {two, three, "migrations 2 to 2 call jq, which this machine lacks"},
		"lacks two":       {one, three, "migrations 1 to 2 call etcd-migrate, jq, which"},
		"backwards":       {three, two, "this is no upgrade"},
		"same":            {three, three, ""},
	} {
		err := CheckUpgrade(c.old, c.new, programs)
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestArtifactsAreExposed(t *testing.T) {
	exposed := 0
	s, err := ServeArtifacts(t.Context(), func(port int) (string, error) { exposed = port; return "192.0.2.1", nil })
	if err != nil {
		t.Fatal(err)
	}
	_, url := s.add(load(t, testTree(t)).Charts[0])
	if want := fmt.Sprintf("http://192.0.2.1:%d/", exposed); exposed == 0 || !strings.HasPrefix(url, want) {
		t.Errorf("URL %s, want %s…", url, want)
	}
	_, err = ServeArtifacts(t.Context(), func(int) (string, error) { return "", errors.New("no way") })
	if want := "artifact server: no way"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestArtifactServer(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s, err := ServeArtifacts(ctx, new(cluster.Embedded).Expose)
	if err != nil {
		t.Fatal(err)
	}
	c := load(t, testTree(t)).Charts[0]
	_, url := s.add(c)
	if !strings.HasPrefix(url, "http://127.0.0.1:") {
		t.Errorf("listens at %s, not on loopback", url)
	}
	get := func(url string) (int, []byte) {
		response, err := http.Get(url)
		if err != nil {
			return 0, nil
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, body
	}
	status, body := get(url)
	sum := sha256.Sum256(body)
	if status != 200 || "sha256:"+hex.EncodeToString(sum[:]) != c.Digest {
		t.Errorf("status %d, digest %x, want %s", status, sum, c.Digest)
	}
	if status, _ := get(url + "x"); status != 404 {
		t.Errorf("an unknown path answers %d", status)
	}
	cancel()
	deadline := time.Now().Add(10 * time.Second)
	for status != 0 {
		if time.Now().After(deadline) {
			t.Fatal("serves on after its context ended")
		}
		status, _ = get(url)
	}
}
