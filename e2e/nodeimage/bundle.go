package nodeimage

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"cozystack.io/upgrade-e2e/e2e/programs"
)

// A bundle is a compressed tar archive of what takes long to make: the index, the programs and manifests below bin/, and, for
// kind, the archives of the node image and of the hooks' image. <file>.sha256 beside it is in the form of sha256sum.
const (
	indexFile = "bundle.json"
	binFolder = "bin/"
	hookFile  = "hook.tar"
	nodeFile  = "node.tar"
)

// index is the first file of a bundle.
type index struct {
	Recipe string `json:"recipe"` // of the programs, see programs.Carried
	Node   string `json:"node"`   // reference of the node image
}

// Bundle builds what is not built yet and saves programs and node image into file, with a line per step on out.
func Bundle(ctx context.Context, root, file string, out io.Writer) error {
	carried, err := programs.Carry(root, programs.NodeImage)
	if err != nil {
		return err
	}
	i, err := Build(ctx, root, out)
	if err != nil {
		return err
	}
	start, dir := time.Now(), filepath.Dir(file)
	if _, err := os.Stat(dir); err != nil {
		return Error{"BUNDLE=" + file, fmt.Sprintf("%v; make its folder first", err)}
	}
	scratch, unlock, err := programs.Lock(ctx, root, out)
	if err != nil {
		return err
	}
	defer unlock()
	if err := errors.Join(room(scratch, 1e9, "the node image's archive"), room(dir, 1e9, "a bundle")); err != nil {
		return err
	}
	node := filepath.Join(scratch, nodeFile)
	if _, err := run(ctx, "docker", "save", "--output", node, i.Ref); err != nil {
		return failf("save %s: %v", i.Ref, err)
	}
	members := []member{}
	for _, name := range carried.Files {
		members = append(members, member{binFolder + name, filepath.Join(i.programs.Dir, name)})
	}
	members = append(members, member{hookFile, i.Hook}, member{nodeFile, node})
	made := file + ".part"
	sum, err := writeBundle(ctx, made, index{carried.Recipe, i.Ref}, members)
	if err != nil {
		return fmt.Errorf("write bundle %s: %w", file, errors.Join(err, os.Remove(made)))
	}
	// The old sum goes first: a bundle without one is refused, one with another's never passes.
	if err := os.Remove(sumFile(file)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(made, file); err != nil {
		return err
	}
	if err := os.WriteFile(sumFile(file), []byte(sum+"  "+filepath.Base(file)+"\n"), 0o644); err != nil {
		return err
	}
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "bundle: %s with %d files of programs and %s, %d MB, written in %.0f s\n",
		file, len(carried.Files), i.Ref, info.Size()/1e6, time.Since(start).Seconds())
	return nil
}

func sumFile(bundle string) string { return bundle + ".sha256" }

// member is a file of a bundle: its name there, and its path here.
type member struct{ name, path string }

// writeBundle returns the hex SHA-256 of what it has written.
func writeBundle(ctx context.Context, path string, head index, members []member) (sum string, err error) {
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	packed, err := zstd.NewWriter(io.MultiWriter(f, h))
	if err != nil {
		return "", err
	}
	archive := tar.NewWriter(packed)
	text, err := json.Marshal(head)
	if err != nil {
		return "", err
	}
	if err := archive.WriteHeader(&tar.Header{Name: indexFile, Mode: 0o644, Size: int64(len(text))}); err != nil {
		return "", err
	}
	if _, err := archive.Write(text); err != nil {
		return "", err
	}
	for _, m := range members {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if err := addFile(archive, m); err != nil {
			return "", err
		}
	}
	if err := errors.Join(archive.Close(), packed.Close(), f.Close()); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func addFile(archive *tar.Writer, m member) error {
	f, err := os.Open(m.path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := archive.WriteHeader(&tar.Header{Name: m.name, Mode: int64(info.Mode().Perm()), Size: info.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(archive, f)
	return err
}

// Unbundle brings to their places the programs of a bundle and, when node is asked for, its images. It does nothing where all
// of that is there already. A bundle that was damaged on its way or made from other sources is refused before anything changes.
func Unbundle(ctx context.Context, root, file string, node bool, out io.Writer) error {
	refuse := func(format string, args ...any) error { return Error{"BUNDLE=" + file, fmt.Sprintf(format, args...)} }
	carried, err := programs.Carry(root, programs.NodeImage)
	if err != nil {
		return err
	}
	there := carried.Current
	var i *Image
	if node {
		if i, err = describe(ctx, root); err != nil {
			return err
		}
		loaded, err := i.Exists(ctx)
		if err != nil {
			return err
		}
		there = there && loaded
	}
	if there {
		return nil
	}
	start := time.Now()
	if err := checkSum(file); err != nil {
		return refuse("%v", err)
	}
	f, err := os.Open(file)
	if err != nil {
		return refuse("%v", err)
	}
	defer f.Close()
	packed, err := zstd.NewReader(f)
	if err != nil {
		return refuse("%v", err)
	}
	defer packed.Close()
	archive := tar.NewReader(packed)
	head, err := readIndex(archive)
	if err != nil {
		return refuse("is no bundle of this project: %v", err)
	}
	if head.Recipe != carried.Recipe {
		return refuse("its programs were made from another state of tools/; make it anew with `make e2e-bundle`")
	}
	if node && head.Node != i.Ref {
		return refuse("holds %s, and here it takes %s: it was made at another commit, or on a machine with other capabilities; make it anew with `make e2e-bundle`", head.Node, i.Ref)
	}
	scratch, unlock, err := programs.Lock(ctx, root, out)
	if err != nil {
		return err
	}
	defer unlock()
	if err := room(scratch, 2e9, "what a bundle holds"); err != nil {
		return err
	}
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return refuse("has no node image; make it anew with `make e2e-bundle`")
		}
		if err != nil {
			return refuse("%v", err)
		}
		if h.Name == hookFile {
			break // the programs are complete
		}
		name := strings.TrimPrefix(h.Name, binFolder)
		if !slices.Contains(carried.Files, name) {
			return refuse("holds %s, which is no file of ours", h.Name)
		}
		if err := extract(archive, filepath.Join(scratch, name), h.FileInfo().Mode()); err != nil {
			return refuse("%v", err)
		}
	}
	if err := carried.Install(root, scratch); err != nil {
		return err
	}
	fmt.Fprintf(out, "bundle: %d files of programs from %s in %.0f s\n", len(carried.Files), file, time.Since(start).Seconds())
	if !node {
		return nil
	}
	return i.load(ctx, archive, scratch, out)
}

// load takes the images out of a bundle's archive, which stands at the hooks' one.
func (i *Image) load(ctx context.Context, archive *tar.Reader, scratch string, out io.Writer) error {
	if err := Room(ctx); err != nil {
		return err
	}
	start, hook := time.Now(), filepath.Join(scratch, hookFile)
	if err := extract(archive, hook, 0o644); err != nil {
		return err
	}
	if h, err := archive.Next(); err != nil || h.Name != nodeFile {
		return failf("the bundle has no %s after %s (%v)", nodeFile, hookFile, err)
	}
	load := exec.CommandContext(ctx, "docker", "load", "--quiet")
	load.Stdin, load.WaitDelay = archive, 5*time.Second
	if said, err := load.CombinedOutput(); err != nil {
		return failf("load the bundle's node image: %v: %s", err, lastLine(string(said)))
	}
	if err := os.MkdirAll(i.path(""), 0o755); err != nil {
		return err
	}
	if err := os.Rename(hook, i.Hook); err != nil {
		return err
	}
	fmt.Fprintf(out, "bundle: %s loaded in %.0f s\n", i.Ref, time.Since(start).Seconds())
	return i.prune(ctx)
}

func readIndex(archive *tar.Reader) (index, error) {
	var head index
	h, err := archive.Next()
	if err != nil {
		return head, err
	}
	if h.Name != indexFile {
		return head, fmt.Errorf("it begins with %s, not with %s", h.Name, indexFile)
	}
	return head, json.NewDecoder(archive).Decode(&head)
}

// checkSum compares a bundle with what its .sha256 says.
func checkSum(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := os.ReadFile(sumFile(file))
	if err != nil {
		return fmt.Errorf("%w; `make e2e-bundle` writes it beside the bundle: bring both", err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	want, _, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("its SHA-256 is %.12s…, and %s says %.12s…; bring both anew", got, filepath.Base(sumFile(file)), want)
	}
	return nil
}

func extract(from io.Reader, path string, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, mode.Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}
