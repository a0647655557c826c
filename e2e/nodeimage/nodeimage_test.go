package nodeimage

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// content reads an image's files back: their bytes, or "-> target" for a link.
func content(t *testing.T, image v1.Image) map[string]string {
	t.Helper()
	got := map[string]string{}
	stream := mutate.Extract(image)
	defer stream.Close()
	for r := tar.NewReader(stream); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		switch h.Typeflag {
		case tar.TypeSymlink:
			got[h.Name] = "-> " + h.Linkname
		case tar.TypeReg:
			got[h.Name] = string(data)
		}
	}
}

func TestPackagesComeWithWhatTheirLinksNeed(t *testing.T) {
	rootfs := t.TempDir()
	write(t, filepath.Join(rootfs, "var/lib/dpkg/info/tool.list"), "/.\n/bin\n/bin/tool\n/usr/share/doc/tool/gone\n/usr/sbin/alias\n", 0o644)
	write(t, filepath.Join(rootfs, "var/lib/dpkg/info/tool-doc.list"), "/usr/bin/other\n", 0o644)
	write(t, filepath.Join(rootfs, "usr/bin/tool"), "#!/bin/sh\n", 0o755)
	write(t, filepath.Join(rootfs, "usr/bin/other"), "#!/bin/sh\n", 0o755)
	write(t, filepath.Join(rootfs, "usr/lib/tool/real"), "real", 0o644)
	if err := os.MkdirAll(filepath.Join(rootfs, "usr/sbin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../lib/tool/real", filepath.Join(rootfs, "usr/sbin/alias")); err != nil {
		t.Fatal(err)
	}
	tree := debianTree()
	if err := tree.packages(rootfs, "tool"); err != nil {
		t.Fatal(err)
	}
	image, err := tree.image(v1.Config{Entrypoint: []string{"/bin/tool"}})
	if err != nil {
		t.Fatal(err)
	}
	got := content(t, image)
	want := map[string]string{
		"bin": "-> usr/bin", "sbin": "-> usr/sbin", "lib": "-> usr/lib", "lib64": "-> usr/lib64",
		"usr/bin/tool": "#!/bin/sh\n", "usr/sbin/alias": "-> ../lib/tool/real", "usr/lib/tool/real": "real",
	}
	for at, text := range want {
		if got[at] != text {
			t.Errorf("%s is %q, want %q", at, got[at], text)
		}
	}
	if len(got) != len(want) {
		t.Errorf("the image holds %v", got)
	}
	if err := tree.packages(rootfs, "missing"); err == nil || err.Error() != "package missing is not in the Debian" {
		t.Errorf("a package that is not there: %v", err)
	}
}

func TestLibrariesOfAProgram(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tree := debianTree()
	// The test binary may be linked statically; a file that is no program at all must not be an error either.
	if err := tree.libraries("/", self); err != nil {
		t.Error(err)
	}
	script := filepath.Join(t.TempDir(), "script")
	write(t, script, "#", 0o755)
	if err := tree.libraries("/", script); err != nil {
		t.Errorf("a script of one character: %v", err)
	}
}

func TestHookedHasTheFilesAndTheEntrypoint(t *testing.T) {
	tree := debianTree()
	tree.data("usr/bin/bash", []byte("bash"))
	tree.data("migrations/1", []byte("old"))
	base, err := tree.image(v1.Config{Env: []string{searchPath}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "base.tar")
	if err := tarball.WriteToFile(path, name.MustParseReference("upgrade-e2e/hook:base"), base); err != nil {
		t.Fatal(err)
	}
	image, err := Hooked(path, map[string][]byte{"/migrations/1": []byte("new"), "/usr/bin/run.sh": []byte("run")}, []string{"/usr/bin/run.sh"})
	if err != nil {
		t.Fatal(err)
	}
	got := content(t, image)
	for at, want := range map[string]string{"migrations/1": "new", "usr/bin/run.sh": "run", "usr/bin/bash": "bash"} {
		if got[at] != want {
			t.Errorf("%s is %q, want %q", at, got[at], want)
		}
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/run.sh"}) || !slices.Equal(config.Config.Env, []string{searchPath}) {
		t.Errorf("config is %+v", config.Config)
	}
	var archive bytes.Buffer
	if err := WriteArchive(&archive, map[string]v1.Image{"example.org/hook:v1": image}); err != nil {
		t.Fatal(err)
	}
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil || len(manifest) != 1 || !slices.Equal(manifest[0].RepoTags, []string{"example.org/hook:v1"}) {
		t.Errorf("the archive says %+v, %v", manifest, err)
	}
}

func TestNodeIsStoppedAsSystemdWants(t *testing.T) {
	dir := t.TempDir()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "kind/version", Typeflag: tar.TypeReg, Size: 1, Mode: 0o644}), func() error {
		_, err := w.Write([]byte("1"))
		return err
	}(), w.Close()); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "layer.tar"), layer.String(), 0o644)
	archive := filepath.Join(dir, "node.tar")
	if err := writeNode(archive, "upgrade-e2e/node:x", filepath.Join(dir, "layer.tar")); err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.Config.StopSignal != "SIGRTMIN+3" || config.OS != "linux" || content(t, image)["kind/version"] != "1" {
		t.Errorf("config is %+v", config)
	}
}

func TestInstallMakesScriptsExecutable(t *testing.T) {
	to := t.TempDir()
	err := install(fstest.MapFS{"usr/local/bin/entrypoint": {Data: []byte("#!/bin/bash\n")}, "etc/crictl.yaml": {Data: []byte("a: b\n")}}, to)
	if err != nil {
		t.Fatal(err)
	}
	for at, want := range map[string]os.FileMode{"usr/local/bin/entrypoint": 0o755, "etc/crictl.yaml": 0o644} {
		if info, err := os.Stat(filepath.Join(to, at)); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want mode %o", at, info, err, want)
		}
	}
}

func TestEngineSaysWhatIsWrongInOneLine(t *testing.T) {
	for _, c := range []struct{ name, docker, want string }{
		{"none", "", "kind: no `docker` in PATH; install a Docker engine (Debian: apt-get install docker.io)"},
		{"no permission", "echo 'Got permission denied while trying to connect' >&2; exit 1",
			"kind: no permission to use the Docker engine (Got permission denied while trying to connect); run as a member of group docker or as root"},
		{"no daemon", "echo first; echo 'Cannot connect' >&2; exit 1", "kind: no Docker engine answers (Cannot connect); start it, e.g. `systemctl start docker`"},
		{"works", "echo 20.10", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if c.docker != "" {
				write(t, filepath.Join(dir, "docker"), "#!/bin/sh\n"+c.docker+"\n", 0o755)
			}
			t.Setenv("PATH", dir)
			err := Engine(t.Context())
			if c.want == "" && err != nil || c.want != "" && (err == nil || err.Error() != c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if coded, ok := errors.AsType[Error](err); err != nil && (!ok || coded.ExitCode() != 2) {
				t.Errorf("exit status of %v is not 2", err)
			}
		})
	}
}

func TestRoomSaysWhatIsWrongInOneLine(t *testing.T) {
	disk, bin := t.TempDir(), t.TempDir()
	if err := room(disk, 1, "a byte"); err != nil {
		t.Error(err)
	}
	err := room(disk, 1<<60, "a kind cluster")
	if err == nil || !strings.Contains(err.Error(), "free on the disk of "+disk+", a kind cluster takes 1152921505; make room there") {
		t.Errorf("got %v", err)
	}
	if coded, ok := errors.AsType[Error](err); !ok || coded.ExitCode() != 2 {
		t.Errorf("exit status of %v is not 2", err)
	}
	write(t, filepath.Join(bin, "docker"), "#!/bin/sh\necho /of/another/machine\n", 0o755)
	t.Setenv("PATH", bin)
	if err := Room(t.Context()); err != nil {
		t.Errorf("an engine elsewhere: %v", err)
	}
}

func TestSandboxIsContainerds(t *testing.T) {
	b := &builder{rootfs: t.TempDir()}
	write(t, filepath.Join(b.rootfs, "etc/containerd/config.toml"), "version = 2\n[plugins]\n  sandbox_image = \"registry.k8s.io/pause:3.10\"\n  restrict_oom_score_adj = false\n", 0o644)
	if got := b.sandbox(); got != "registry.k8s.io/pause:3.10" {
		t.Errorf("sandbox image %q", got)
	}
	for _, less := range []bool{false, true} {
		b.Image = &Image{less: less}
		if err := b.containerdConfig(); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(b.rootfs, "etc/containerd/config.toml"))
		if err != nil || strings.Count(string(data), "restrict_oom_score_adj = true") != map[bool]int{true: 1}[less] {
			t.Errorf("without CAP_SYS_RESOURCE %v: %s, %v", less, data, err)
		}
	}
}

func TestControllerIsTheProgramAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "built")
	write(t, path, "program", 0o755)
	image, err := controller("x-controller", path)
	if err != nil {
		t.Fatal(err)
	}
	got := content(t, image)
	if len(got) != 2 || got["x-controller"] != "program" || got["manager"] != "-> x-controller" {
		t.Errorf("the image holds %v", got)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(config.Config.Entrypoint, []string{"/x-controller"}) || config.Config.User != "65532:65532" {
		t.Errorf("config %+v", config.Config)
	}
}
