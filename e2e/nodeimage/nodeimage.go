// Package nodeimage makes the image of a kind node where no container registry is at hand: from Debian packages, the files
// of kind's own module and the programs that package programs builds. It needs root, debootstrap and a Docker engine.
package nodeimage

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cozystack.io/upgrade-e2e/e2e/programs"
	"cozystack.io/upgrade-e2e/kindconfig"
)

// Repository is the name of our node images in the Docker engine; their tag is the key of what went into them.
const Repository = "upgrade-e2e/node"

// Error is what keeps a node image or a bundle from being made or used: one line, exit status 2.
type Error struct{ Of, Line string }

func (e Error) Error() string { return e.Of + ": " + e.Line }

// ExitCode is the exit status that a command should end with.
func (e Error) ExitCode() int { return 2 }

func failf(format string, args ...any) error { return Error{"kind", fmt.Sprintf(format, args...)} }

// sources are this package's own: how an image is made counts among what it is made of.
//
//go:embed *.go
var sources embed.FS

// Image is one node image, built or not.
type Image struct {
	// Ref is its name in the Docker engine.
	Ref string
	// Hook is the archive of the image that the hooks of platforms are built on.
	Hook string

	root     string
	key      string
	programs *programs.Programs
	kind     string // folder of kind's module
	less     bool   // this machine lacks CAP_SYS_RESOURCE
}

// Find tells which image the programs below root make. It need not exist.
func Find(ctx context.Context, root string) (*Image, error) {
	_, err := programs.Find(root, programs.NodeImage)
	if missing := (*programs.MissingError)(nil); errors.As(err, &missing) {
		return nil, failf("%s not built; run `make node-image`", strings.Join(missing.Names, ", "))
	}
	if err != nil {
		return nil, err
	}
	return describe(ctx, root)
}

// describe is Find before the programs are there.
func describe(ctx context.Context, root string) (*Image, error) {
	at, err := programs.At(root)
	if err != nil {
		return nil, err
	}
	list := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kind")
	list.Dir = root
	out, err := list.Output()
	kind := strings.TrimSpace(string(out))
	if err != nil || kind == "" {
		return nil, failf("the Go module of kind is not there (%v); run `go mod download sigs.k8s.io/kind`", err)
	}
	less, err := lacksSysResource()
	if err != nil {
		return nil, err
	}
	i := &Image{root: root, programs: at, kind: kind, less: less}
	if i.key, err = i.hash(); err != nil {
		return nil, err
	}
	i.Ref = Repository + ":" + i.key
	i.Hook = i.path("hook-" + i.key + ".tar")
	return i, nil
}

// path is a file beside the programs.
func (i *Image) path(name string) string { return filepath.Join(i.programs.Dir, "node-image", name) }

// recipe stands for the programs: by what they are made of, or, for some of KUBEBUILDER_ASSETS, by their files.
func (i *Image) recipe() (string, error) {
	if os.Getenv("KUBEBUILDER_ASSETS") != "" {
		return i.programs.Fingerprint()
	}
	carried, err := programs.Carry(i.root, programs.NodeImage)
	return carried.Recipe, err
}

// hash is the key of what the image is made of.
func (i *Image) hash() (string, error) {
	h := sha256.New()
	recipe, err := i.recipe()
	if err != nil {
		return "", err
	}
	fmt.Fprintln(h, recipe, filepath.Base(i.kind), i.less)
	for _, files := range []fs.FS{sources, kindconfig.Node} {
		err := fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := fs.ReadFile(files, name)
			fmt.Fprintf(h, "%s %d %s", name, len(data), data)
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// Exists tells whether the image is in the Docker engine, and what hooks are built on at its place. The error says what is
// wrong with the engine.
func (i *Image) Exists(ctx context.Context) (bool, error) {
	if err := Engine(ctx); err != nil {
		return false, err
	}
	_, err := os.Stat(i.Hook)
	return err == nil && exec.CommandContext(ctx, "docker", "image", "inspect", i.Ref).Run() == nil, nil
}

// Engine fails in one line when no Docker engine can be used.
func Engine(ctx context.Context) error {
	if _, err := exec.LookPath("docker"); err != nil {
		return failf("no `docker` in PATH; install a Docker engine (Debian: apt-get install docker.io)")
	}
	out, err := exec.CommandContext(ctx, "docker", "version", "--format", "{{.Server.Version}}").CombinedOutput()
	switch said := lastLine(string(out)); {
	case err == nil:
		return nil
	case strings.Contains(said, "permission denied"):
		return failf("no permission to use the Docker engine (%s); run as a member of group docker or as root", said)
	default:
		return failf("no Docker engine answers (%s); start it, e.g. `systemctl start docker`", said)
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// lacksSysResource tells whether even root has no CAP_SYS_RESOURCE here, as in some sandboxes.
func lacksSysResource() (bool, error) {
	got, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0)
	if err != nil {
		return false, fmt.Errorf("read the capability bounding set: %w", err)
	}
	return got == 0, nil
}

// Build makes the programs and the image, unless they are there, with a line per step on out.
func Build(ctx context.Context, root string, out io.Writer) (*Image, error) {
	if err := programs.Build(ctx, root, out, programs.NodeImage); err != nil {
		return nil, err
	}
	i, err := Find(ctx, root)
	if err != nil {
		return nil, err
	}
	there, err := i.Exists(ctx)
	if err != nil {
		return nil, err
	}
	if there {
		fmt.Fprintf(out, "node image: %s is up to date\n", i.Ref)
		return i, nil
	}
	if err := i.possible(); err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp(i.programs.Dir, ".node-image-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	b := &builder{Image: i, scratch: scratch, rootfs: filepath.Join(scratch, "rootfs")}
	began := time.Now()
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"Debian packages", b.debian},
		{"kind's files", b.kindFiles},
		{"programs", b.installPrograms},
		{"component images", b.componentImages},
		{"image of hooks", b.hookImage},
		{"load into Docker", b.loadRootfs},
	} {
		start := time.Now()
		if err := step.do(ctx); err != nil {
			if ctx.Err() != nil {
				return nil, fmt.Errorf("node image: %s: %w", step.name, context.Cause(ctx))
			}
			return nil, failf("%s: %v", step.name, err)
		}
		fmt.Fprintf(out, "node image: %s: %.0f s\n", step.name, time.Since(start).Seconds())
	}
	fmt.Fprintf(out, "node image: %s built in %.0f s\n", i.Ref, time.Since(began).Seconds())
	return i, nil
}

// possible looks for what a build needs, before it starts.
func (i *Image) possible() error {
	if os.Geteuid() != 0 {
		return failf("building needs root, for debootstrap and chroot; run `sudo make node-image` once")
	}
	var missing []string
	for _, program := range []string{"debootstrap", "chroot", "unshare", "tar"} {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, program)
		}
	}
	if len(missing) > 0 {
		return failf("no %s in PATH; apt-get install debootstrap coreutils util-linux tar", strings.Join(missing, ", "))
	}
	if err := os.MkdirAll(i.path(""), 0o755); err != nil {
		return err
	}
	return room(i.path(""), 4e9, "a node image") // rootfs, archive and Docker's copy
}

// room fails when the disk of a folder has fewer than need bytes left for what.
func room(dir string, need uint64, what string) error {
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	if free := disk.Bavail * uint64(disk.Bsize); free < need {
		return failf("%.1f GB free on the disk of %s, %s takes %.0f; make room there", float64(free)/1e9, dir, what, float64(need)/1e9)
	}
	return nil
}

// Room fails in one line when the Docker engine's disk has no room for the nodes of a cluster. An engine elsewhere is not asked.
func Room(ctx context.Context) error {
	dir, err := run(ctx, "docker", "info", "--format", "{{.DockerRootDir}}")
	if err != nil {
		return failf("ask the Docker engine for its folder: %v", err)
	}
	dir = strings.TrimSpace(dir)
	if _, err := os.Stat(dir); err != nil {
		return nil
	}
	return room(dir, 3e9, "a kind cluster")
}

// builder is one call of Build.
type builder struct {
	*Image
	scratch string // a folder that goes with the call
	rootfs  string // of the node, in scratch
}

// run runs a program; its error has the last line that it said.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", filepath.Base(name), err, lastLine(string(out)))
	}
	return string(out), nil
}

// chroot runs a shell script in the rootfs, in mount and process namespaces of its own: nothing it starts or mounts stays.
func (b *builder) chroot(ctx context.Context, script string) (string, error) {
	return run(ctx, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private", "sh", "-ec",
		`mount -t proc proc "$0/proc"; exec chroot "$0" sh -ec "$1"`, b.rootfs, script)
}

// loadRootfs hands the rootfs to the Docker engine as an image of one layer, and forgets images of ours that are older.
func (b *builder) loadRootfs(ctx context.Context) error {
	layer := filepath.Join(b.scratch, "layer.tar")
	if _, err := run(ctx, "tar", "--numeric-owner", "--xattrs", "-C", b.rootfs, "-cf", layer, "."); err != nil {
		return err
	}
	archive := filepath.Join(b.scratch, "node.tar")
	if err := writeNode(archive, b.Ref, layer); err != nil {
		return err
	}
	if _, err := run(ctx, "docker", "load", "--quiet", "--input", archive); err != nil {
		return err
	}
	return b.prune(ctx)
}

// prune removes our images of other keys that no container uses.
func (i *Image) prune(ctx context.Context) error {
	out, err := run(ctx, "docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", Repository)
	if err != nil {
		return err
	}
	for _, ref := range strings.Fields(out) {
		if ref != i.Ref {
			_, _ = run(ctx, "docker", "image", "rm", ref) // one that is in use stays
		}
	}
	hooks, err := filepath.Glob(i.path("hook-*.tar"))
	if err != nil {
		return err
	}
	for _, hook := range slices.DeleteFunc(hooks, func(path string) bool { return path == i.Hook }) {
		if err := os.Remove(hook); err != nil {
			return err
		}
	}
	return nil
}
