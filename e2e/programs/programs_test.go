package programs

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// root is a folder with one tool, `hello`, whose program prints what it is told
// to; its Go module needs nothing, so that it builds anywhere.
func root(t *testing.T) (string, tool) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, "tools/hello/go.mod", "module example.org/hello\n\ngo 1.26.0\n")
	write(t, dir, "tools/hello/main.go", "package main\n\nfunc main() { println(\"hello\") }\n")
	return dir, tool{folder: "hello", module: "example.org/hello", programs: []program{{"hello", "."}}}
}

func write(t *testing.T, root, path, text string) {
	t.Helper()
	path = filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// run builds and returns the lines of progress.
func run(t *testing.T, root string, tools ...tool) ([]string, error) {
	t.Helper()
	var out bytes.Buffer
	err := build(t.Context(), root, &out, tools)
	return strings.Split(strings.TrimSpace(out.String()), "\n"), err
}

// count is how many lines match.
func count(lines []string, pattern string) int {
	n := 0
	for _, line := range lines {
		if regexp.MustCompile(pattern).MatchString(line) {
			n++
		}
	}
	return n
}

func TestBuildOnlyWhatChanged(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	dir, hello := root(t)
	const built = `^tools: hello \(devel\) built in \S+ \(1/1\)$`
	steps := []struct {
		name   string
		change func()
		builds int
	}{
		{"missing", func() {}, 1},
		{"nothing changed", func() {}, 0},
		{"touched only", func() {
			later := time.Now().Add(time.Hour)
			if err := os.Chtimes(filepath.Join(dir, "tools/hello/main.go"), later, later); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"own source changed", func() {
			write(t, dir, "tools/hello/main.go", "package main\n\nfunc main() { println(\"good day\") }\n")
		}, 1},
		{"go.sum appeared", func() { write(t, dir, "tools/hello/go.sum", "") }, 1},
		{"go.mod changed", func() {
			write(t, dir, "tools/hello/go.mod", "module example.org/hello\n\ngo 1.26.0\n\n// v2\n")
		}, 1},
		{"program removed", func() {
			if err := os.Remove(filepath.Join(dir, "bin/hello")); err != nil {
				t.Fatal(err)
			}
		}, 1},
		{"linked otherwise", func() { hello.versions = []string{"example.org/version"} }, 1},
		{"nothing changed again", func() {}, 0},
	}
	for _, s := range steps {
		s.change()
		lines, err := run(t, dir, hello)
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if n := count(lines, built); n != s.builds {
			t.Errorf("%s: built %d times, want %d:\n%s", s.name, n, s.builds, strings.Join(lines, "\n"))
		}
		if s.builds == 0 && (len(lines) != 1 || count(lines, `^tools: 1 programs and manifests up to date`) != 1) {
			t.Errorf("%s: want one line that says up to date, got:\n%s", s.name, strings.Join(lines, "\n"))
		}
	}
	p, err := find(dir, []tool{hello})
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Version("hello"); got != "(devel)" {
		t.Errorf("version %q, want (devel)", got)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "bin", stagePrefix+"*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestFailedBuildIsOneLine(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	dir, hello := root(t)
	write(t, dir, "tools/hello/main.go", "package main\n\nfunc main() { nowhere() }\n")
	for range 2 { // a failed build must leave no stamp
		_, err := run(t, dir, hello)
		var failed *BuildError
		if !errors.As(err, &failed) {
			t.Fatalf("got %v, want a BuildError", err)
		}
		want := "tools: hello failed to build: ./main.go:3:15: undefined: nowhere (log: " + filepath.Join(dir, "bin/.logs/hello.log") + ")"
		if err.Error() != want {
			t.Errorf("got  %s\nwant %s", err, want)
		}
		if failed.ExitCode() != 2 {
			t.Errorf("exit code %d, want 2", failed.ExitCode())
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "bin/hello")); !os.IsNotExist(err) {
		t.Errorf("a program came out of a failed build: %v", err)
	}
}

func TestMissingIsOneLine(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	dir, hello := root(t)
	hello.manifest = &manifest{}
	_, err := find(dir, []tool{hello})
	var missing *MissingError
	if !errors.As(err, &missing) {
		t.Fatalf("got %v, want a MissingError", err)
	}
	want := "tools: hello, manifests/hello missing in " + filepath.Join(dir, "bin") + "; run `make tools`"
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	if missing.ExitCode() != 2 {
		t.Errorf("exit code %d, want 2", missing.ExitCode())
	}
}

func TestKubebuilderAssetsAreUsedNotBuilt(t *testing.T) {
	assets := t.TempDir()
	t.Setenv("KUBEBUILDER_ASSETS", assets)
	for name, text := range map[string]string{
		"etcd":  "#!/bin/sh\n[ \"$*\" = --version ] && echo 'etcd Version: 3.5.1'\n",
		"hello": "#!/bin/sh\n", // nothing that envtest needs: stays unused
	} {
		if err := os.WriteFile(filepath.Join(assets, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, assets, "kubectl", "not executable")

	dir, hello := root(t)
	write(t, dir, "tools/etcd/go.mod", "does not build")
	etcd := tool{folder: "etcd", module: "example.org/etcd", programs: []program{{"etcd", "."}}}
	lines, err := run(t, dir, hello, etcd)
	if err != nil {
		t.Fatal(err)
	}
	if n := count(lines, `1 programs and manifests to build.*; etcd taken from KUBEBUILDER_ASSETS$`); n != 1 {
		t.Errorf("use of KUBEBUILDER_ASSETS not reported:\n%s", strings.Join(lines, "\n"))
	}
	p, err := find(dir, []tool{hello, etcd})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"etcd":    filepath.Join(assets, "etcd"),
		"hello":   filepath.Join(dir, "bin/hello"),
		"kubectl": filepath.Join(dir, "bin/kubectl"),
	} {
		if got := p.Path(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if got := p.Version("etcd"); got != "v3.5.1" {
		t.Errorf("version of etcd %q, want v3.5.1", got)
	}
}

func TestOptionalProgramsOnlyByName(t *testing.T) {
	tools := []tool{{folder: "always"}, {folder: "sometimes", optional: true}, {folder: "coredns", name: NodeImage, optional: true},
		{folder: "older", optional: true, pods: true}}
	for _, c := range []struct {
		extra []string
		want  string
	}{{nil, "always"}, {[]string{"sometimes"}, "always sometimes"}, {[]string{NodeImage}, "always node-image older"}} {
		got, err := wanted(tools, c.extra)
		if err != nil || strings.Join(folders(got), " ") != c.want {
			t.Errorf("wanted(%v) = %v, %v; want %s", c.extra, folders(got), err, c.want)
		}
	}
	_, err := wanted(tools, []string{"never"})
	if want := `tools: no program "never"; there are always, sometimes, node-image, older`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestImageIsNamedAfterTheVersion(t *testing.T) {
	p := &Programs{Dir: t.TempDir()}
	if err := os.Mkdir(filepath.Join(p.Dir, ".stamps"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := writeStamp(p.Dir, "cluster-api", stamp{hash: "0", version: "v1.10.1+incompatible"}); err != nil {
		t.Fatal(err)
	}
	if got, want := p.Image("cluster-api"), "upgrade-e2e/cluster-api:v1.10.1_incompatible"; got != want {
		t.Errorf("image %s, want %s", got, want)
	}
}

func TestTwoBuildsAtOnce(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	dir, hello := root(t)
	if _, err := run(t, dir, hello); err != nil {
		t.Fatal(err)
	}
	p, err := At(dir)
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := (&builder{programs: p, out: &bytes.Buffer{}}).lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	// The first holds the lock: a second one waits, and gives up when told.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var out bytes.Buffer
	if err := build(ctx, dir, &out, []tool{hello}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want deadline exceeded", err)
	}
	if n := count(strings.Split(out.String(), "\n"), `^tools: waiting for another build`); n != 1 {
		t.Errorf("says nothing of waiting: %q", out.String())
	}
	unlock()
	if _, err := run(t, dir, hello); err != nil {
		t.Error(err)
	}
}

const crd = "kind: CustomResourceDefinition\nmetadata:\n  name: x\n  labels: {cluster.x-k8s.io/v1beta1: v1alpha3}\n"

func TestGeneratedManifest(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	dir, hello := root(t)
	hello.programs = nil
	hello.manifest = &manifest{command: []string{"run", "."}}
	write(t, dir, "tools/hello/out.yaml", crd+"spec: ${X:=by default}\n")
	write(t, dir, "tools/hello/main.go", `package main

import (
	_ "embed"
	"fmt"
)

//go:embed out.yaml
var out string

func main() { fmt.Print(out) }
`)
	lines, err := run(t, dir, hello)
	if err != nil {
		t.Fatal(err)
	}
	if n := count(lines, `^tools: manifests/hello \(devel\) built in`); n != 1 {
		t.Errorf("reported %d times, want once:\n%s", n, strings.Join(lines, "\n"))
	}
	p, err := find(dir, []tool{hello})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(p.Manifest("hello")); err != nil || string(got) != crd+"spec: by default\n" {
		t.Errorf("manifest is %q, %v", got, err)
	}
	if got := p.Version("hello"); got != "(devel)" {
		t.Errorf("version %q, want (devel)", got)
	}

	hello.manifest = &manifest{command: hello.manifest.command, contract: "v1beta1"}
	_, err = run(t, dir, hello)
	if want := `tools: manifests/hello failed to build: CRD x: label cluster.x-k8s.io/v1beta1 is "v1alpha3", CAPI needs "v1beta1" (log: `; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s…", err, want)
	}
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		name, manifest, contract string
		want                     string // part of the error; empty: fine
	}{
		{"as it should be", "---\nkind: Namespace\n---\n" + crd, "v1alpha3", ""},
		{"no contract asked", crd, "", ""},
		{"other contract", crd, "v1beta1", `CRD x: label cluster.x-k8s.io/v1beta1 is "v1alpha3", CAPI needs "v1beta1"`},
		{"second CRD without", crd + "---\nkind: CustomResourceDefinition\nmetadata: {name: z}\n", "v1alpha3", `CRD z: label cluster.x-k8s.io/v1beta1 is ""`},
		{"no CRD", "kind: Namespace\n", "", "no CRD came out"},
		{"not YAML", "a: b: c\n", "", "document after 0 CRDs"},
	} {
		err := check([]byte(c.manifest), c.contract)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

func TestDefaults(t *testing.T) {
	for in, want := range map[string]string{
		"--address=${CAPI_ADDRESS:=:8443}":   "--address=:8443",
		"A=${A:=true},B=${B:=false}":         "A=true,B=false",
		"$(KEPT) ${KEPT}":                    "$(KEPT) ${KEPT}",
		"pattern: ^[a-z]{1,3}$ and ${X:=}//": "pattern: ^[a-z]{1,3}$ and //",
	} {
		if got := string(defaults([]byte(in))); got != want {
			t.Errorf("defaults(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestLdflags(t *testing.T) {
	for _, c := range []struct {
		version  string
		packages []string
		want     string
	}{
		{"v1.34.4", nil, "-s -w"},
		{"v1.34.4", []string{"a/version"}, "-s -w -X a/version.gitVersion=v1.34.4 -X a/version.gitMajor=1 -X a/version.gitMinor=34"},
	} {
		if got := ldflags(c.version, c.packages); got != c.want {
			t.Errorf("ldflags(%s, %v) = %q, want %q", c.version, c.packages, got, c.want)
		}
	}
}

func TestLastLine(t *testing.T) {
	for log, want := range map[string]string{
		"# x\n./a.go:1:2: undefined: y\n":                         "./a.go:1:2: undefined: y",
		"./a.go:1:2: undefined: y\n./a.go:1:2: too many errors\n": "./a.go:1:2: undefined: y",
		"go: updates to go.mod needed\n\n":                        "go: updates to go.mod needed",
		"panic: no\nexit status 2\n":                              "panic: no",
		"":                                                        "",
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(log), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := lastLine(path); got != want {
			t.Errorf("last line of %q is %q, want %q", log, got, want)
		}
	}
}

func TestEnvironmentIsClean(t *testing.T) {
	got := strings.Join(environment([]string{"PATH=/bin", "GOFLAGS=-mod=vendor", "GOOS=plan9", "GOWORK=/x", "CGO_ENABLED=1"}), " ")
	if want := "PATH=/bin CGO_ENABLED=0 GOWORK=off GOFLAGS=-mod=readonly -trimpath -buildvcs=false"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestVersionsStandInGoMod holds the list against the modules: every tool has
// its folder, and its go.mod requires the module whose version is reported.
func TestVersionsStandInGoMod(t *testing.T) {
	for _, tool := range all() {
		raw, err := os.ReadFile(filepath.Join("../../tools", tool.folder, "go.mod"))
		if err != nil {
			t.Error(err)
			continue
		}
		if n := len(regexp.MustCompile(`(?m)^(require )?\s*`+regexp.QuoteMeta(tool.module)+` v\S+$`).FindAll(raw, -1)); n != 1 {
			t.Errorf("%s/go.mod requires %s %d times, want once and directly", tool.folder, tool.module, n)
		}
	}
}
