package nodeimage

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/programs"
)

// bundled makes a checkout with this project's tools and nothing built, and a bundle of files that stand in for the programs.
func bundled(t *testing.T, change func(*index, []member) []member) (root, file string) {
	t.Helper()
	t.Setenv("KUBEBUILDER_ASSETS", "")
	root = t.TempDir()
	if err := os.CopyFS(filepath.Join(root, "tools"), os.DirFS("../../tools")); err != nil {
		t.Fatal(err)
	}
	carried, err := programs.Carry(root, programs.NodeImage)
	if err != nil {
		t.Fatal(err)
	}
	from, head := t.TempDir(), index{carried.Recipe, "upgrade-e2e/node:x"}
	var members []member
	for _, name := range carried.Files {
		write(t, filepath.Join(from, name), "this is "+name, 0o755)
		members = append(members, member{binFolder + name, filepath.Join(from, name)})
	}
	for _, name := range []string{hookFile, nodeFile} {
		write(t, filepath.Join(from, name), name, 0o644)
		members = append(members, member{name, filepath.Join(from, name)})
	}
	if change != nil {
		members = change(&head, members)
	}
	file = filepath.Join(t.TempDir(), "x.bundle")
	sum, err := writeBundle(t.Context(), file, head, members)
	if err != nil {
		t.Fatal(err)
	}
	write(t, sumFile(file), sum+"  x.bundle\n", 0o644)
	return root, file
}

func TestABundleBringsThePrograms(t *testing.T) {
	root, file := bundled(t, nil)
	var out strings.Builder
	if err := Unbundle(t.Context(), root, file, false, &out); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kube-apiserver", "kubelet", "helm-controller-helm3", "manifests/cluster-api.yaml", ".stamps/etcd"} {
		path := filepath.Join(root, "bin", name)
		data, err := os.ReadFile(path)
		if err != nil || string(data) != "this is "+name {
			t.Errorf("%s holds %q, %v", name, data, err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(root, "bin", ".stage-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if !strings.Contains(out.String(), "files of programs from "+file) {
		t.Errorf("said %q", out.String())
	}
}

func TestABundleThatIsNotOursIsRefusedInOneLine(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*index, []member) []member
		damage func(file string) error
		says   string
	}{
		"another byte": {nil, func(file string) error {
			f, err := os.OpenFile(file, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("?"), 20)
			return errors.Join(err, f.Close())
		}, "its SHA-256 is "},
		"cut short":         {nil, func(file string) error { return os.Truncate(file, 100) }, "its SHA-256 is "},
		"without a sum":     {nil, func(file string) error { return os.Remove(sumFile(file)) }, "no such file"},
		"gone":              {nil, os.Remove, "no such file"},
		"of other sources":  {func(head *index, m []member) []member { head.Recipe = "x"; return m }, nil, "another state of tools/"},
		"without the nodes": {func(_ *index, m []member) []member { return m[:len(m)-2] }, nil, "has no node image"},
		"with a file more": {func(_ *index, m []member) []member {
			return append([]member{{binFolder + "../../x", m[0].path}}, m...)
		}, nil, "holds bin/../../x, which is no file of ours"},
		"of other things": {nil, func(file string) error {
			const empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
			return errors.Join(os.Truncate(file, 0), os.WriteFile(sumFile(file), []byte(empty), 0o644))
		}, "is no bundle of this project"},
	} {
		t.Run(name, func(t *testing.T) {
			root, file := bundled(t, c.change)
			if c.damage != nil {
				if err := c.damage(file); err != nil {
					t.Fatal(err)
				}
			}
			err := Unbundle(t.Context(), root, file, false, io.Discard)
			var refused Error
			if !errors.As(err, &refused) || refused.ExitCode() != 2 || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("says %v, want one line with %q", err, c.says)
			}
			if _, err := os.Stat(filepath.Join(root, "bin", "kube-apiserver")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a program of it was installed: %v", err)
			}
		})
	}
}
