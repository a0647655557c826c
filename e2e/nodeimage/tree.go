package nodeimage

import (
	"archive/tar"
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// tree is the content of a small image: what lies at which path.
type tree struct {
	entries map[string]entry
}

// entry is a file of the host, a file of these bytes, or a link.
type entry struct {
	path string
	data []byte
	link string
}

func newTree() *tree { return &tree{entries: map[string]entry{}} }

// debianTree is a tree with the links that Debian's programs expect.
func debianTree() *tree {
	t := newTree()
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		t.link(dir, "usr/"+dir)
	}
	return t
}

// file, data and link put something at a path, in place of what is there; paths have no leading slash.
func (t *tree) file(at, path string)     { t.entries[at] = entry{path: path} }
func (t *tree) data(at string, d []byte) { t.entries[at] = entry{data: d} }
func (t *tree) link(at, target string)   { t.entries[at] = entry{link: target} }

// packages adds the files of installed packages of rootfs, and the libraries that their programs need.
func (t *tree) packages(rootfs string, names ...string) error {
	for _, name := range names {
		lists, err := filepath.Glob(filepath.Join(rootfs, "var/lib/dpkg/info", name+"*.list"))
		if err != nil {
			return err
		}
		// name.list, or name:arch.list of a library.
		i := slices.IndexFunc(lists, func(l string) bool {
			base, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(l), ".list"), ":")
			return base == name
		})
		if i < 0 {
			return fmt.Errorf("package %s is not in the Debian", name)
		}
		list, err := os.Open(lists[i])
		if err != nil {
			return err
		}
		defer list.Close()
		for lines := bufio.NewScanner(list); lines.Scan(); {
			if err := t.add(rootfs, lines.Text()); err != nil {
				return fmt.Errorf("package %s: %w", name, err)
			}
		}
	}
	return nil
}

// add takes a file or link of rootfs over, with the libraries that it needs. Folders come by themselves.
func (t *tree) add(rootfs, at string) error {
	// The file system is merged: /bin is /usr/bin.
	at = strings.TrimPrefix(path.Clean(at), "/")
	for _, dir := range []string{"bin/", "sbin/", "lib/", "lib64/"} {
		if strings.HasPrefix(at, dir) {
			at = "usr/" + at
		}
	}
	if _, ok := t.entries[at]; ok {
		return nil
	}
	host := filepath.Join(rootfs, at)
	info, err := os.Lstat(host)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && info.IsDir():
		return nil // documentation that was taken out, or a folder
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(host)
		if err != nil {
			return err
		}
		t.link(at, target)
		if !path.IsAbs(target) {
			target = path.Join("/", path.Dir(at), target)
		}
		return t.add(rootfs, target)
	case !info.Mode().IsRegular():
		return nil
	}
	t.file(at, host)
	return t.libraries(rootfs, host)
}

// libraries adds the interpreter and libraries of a program.
func (t *tree) libraries(rootfs, program string) error {
	f, err := elf.Open(program)
	if _, ok := errors.AsType[*elf.FormatError](err); ok || errors.Is(err, io.EOF) {
		return nil // a script
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		interpreter, err := io.ReadAll(p.Open())
		if err != nil {
			return err
		}
		if err := t.add(rootfs, string(bytes.TrimRight(interpreter, "\x00"))); err != nil {
			return err
		}
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	for _, library := range needed {
		found, err := filepath.Glob(filepath.Join(rootfs, "usr/lib/*-linux-gnu", library))
		if err != nil {
			return err
		}
		for _, host := range found {
			at, err := filepath.Rel(rootfs, host)
			if err != nil {
				return err
			}
			if err := t.add(rootfs, at); err != nil {
				return err
			}
		}
	}
	return nil
}

// image is an image with the tree as its one layer.
func (t *tree) image(config v1.Config) (v1.Image, error) {
	layer, err := t.layer()
	if err != nil {
		return nil, err
	}
	return imageOf(layer, config)
}

// layer is the tree as a layer, kept in memory and compressed.
func (t *tree) layer() (v1.Layer, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}); err != nil {
		return nil, err
	}
	for _, at := range slices.Sorted(maps.Keys(t.entries)) {
		if err := t.entries[at].write(w, at); err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil },
		tarball.WithCompressionLevel(1), tarball.WithCompressedCaching)
}

func (e entry) write(w *tar.Writer, at string) error {
	if e.link != "" {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: at, Linkname: e.link, Mode: 0o777})
	}
	data := e.data
	if e.path != "" {
		var err error
		if data, err = os.ReadFile(e.path); err != nil {
			return err
		}
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: at, Size: int64(len(data)), Mode: 0o755}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}
