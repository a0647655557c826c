package platform

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// splitSpec splits "dir" or "dir@ref". A directory's own name may contain "@", and so may a ref, hence the shortest
// prefix that is a directory wins, and a spec that is a directory as a whole has no ref.
func splitSpec(spec string) (dir, ref string, err error) {
	if isDir(spec) {
		return spec, "", nil
	}
	for i, c := range spec {
		if c == '@' && isDir(spec[:i]) {
			if spec[i+1:] == "" {
				return "", "", fmt.Errorf("platform %q: no ref after the @", spec)
			}
			return spec[:i], spec[i+1:], nil
		}
	}
	name, _, _ := strings.Cut(spec, "@")
	if exists(name) {
		return "", "", fmt.Errorf("platform %q: %s is not a directory", spec, name)
	}
	return "", "", fmt.Errorf("platform %q: no such directory %s", spec, name)
}

func isDir(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// checkout makes the tree of a spec readable and returns its root and, for a ref, the commit. A directory without
// overlays is read where it stands; everything else goes to scratch/tree, so that the user's checkout is only read.
func checkout(ctx context.Context, spec, scratch string, overlays []string) (tree, commit string, err error) {
	dir, ref, err := splitSpec(spec)
	if err != nil {
		return "", "", err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", "", err
	}
	if ref == "" && len(overlays) == 0 {
		return dir, "", nil
	}
	tree = filepath.Join(scratch, "tree")
	if err := os.RemoveAll(tree); err != nil {
		return "", "", err
	}
	if err := os.MkdirAll(tree, 0o700); err != nil {
		return "", "", err
	}
	if ref != "" {
		if commit, err = resolve(ctx, spec, dir, ref); err != nil {
			return "", "", err
		}
		if err := archive(ctx, dir, commit, tree); err != nil {
			return "", "", fmt.Errorf("platform %q: git archive %s: %w", spec, commit, err)
		}
	} else if err := copyTree(dir, tree); err != nil {
		return "", "", fmt.Errorf("platform %q: copy: %w", spec, err)
	}
	for _, overlay := range overlays {
		if err := applyOverlay(ctx, tree, overlay); err != nil {
			return "", "", fmt.Errorf("platform %q: overlay %s: %w", spec, overlay, err)
		}
	}
	return tree, commit, nil
}

func resolve(ctx context.Context, spec, dir, ref string) (string, error) {
	if _, err := git(ctx, dir, nil, "rev-parse", "--git-dir"); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return "", fmt.Errorf("platform %q: reading a ref needs git, which is not in PATH", spec)
		}
		if strings.Contains(err.Error(), "not a git repository") {
			return "", fmt.Errorf("platform %q: %s is not in a git repository", spec, dir)
		}
		return "", fmt.Errorf("platform %q: %w", spec, err)
	}
	commit, err := git(ctx, dir, nil, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}")
	if err != nil {
		return "", fmt.Errorf("platform %q: %s has no commit %q (fetch it first?)", spec, dir, ref)
	}
	return strings.TrimSpace(commit), nil
}

// archive unpacks the commit's tree, seen from dir, into tree. git archive reads objects only: unlike a worktree it
// leaves no metadata in the repository. Within a subdirectory it gives that subdirectory, which is what dir@ref means.
func archive(ctx context.Context, dir, commit, tree string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := gitCommand(ctx, dir, "archive", "--format=tar", commit)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := untar(out, tree); err != nil {
		cancel()
		return errors.Join(err, ignoreExit(cmd.Wait()))
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, oneLine(stderr.String()))
	}
	return nil
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}

func untar(r io.Reader, dir string) error {
	root, err := os.OpenRoot(dir) // no entry of the archive can leave dir, not even through a symlink
	if err != nil {
		return err
	}
	defer root.Close()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, 0o755)
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, name)
		case tar.TypeReg:
			var f *os.File
			if f, err = root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fs.FileMode(h.Mode)&0o755|0o600); err == nil {
				_, err = io.Copy(f, tr)
				err = errors.Join(err, f.Close())
			}
		}
		if err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
	}
}

// copyTree copies a checkout without its .git; symlinks stay symlinks.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.Name() == ".git" && rel != ".":
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return os.MkdirAll(target, 0o755)
		case d.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(name)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		case d.Type().IsRegular():
			info, err := d.Info()
			if err != nil {
				return err
			}
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			return os.WriteFile(target, data, info.Mode().Perm()&0o755|0o600)
		}
		return nil // sockets and the like are no part of a platform
	})
}

// applyOverlay applies a unified diff (-p1) to the tree.
func applyOverlay(ctx context.Context, tree, overlay string) error {
	diff, err := os.ReadFile(overlay)
	if err != nil {
		return errors.Unwrap(err)
	}
	if _, err := git(ctx, tree, diff, "apply", "--whitespace=nowarn", "-"); err != nil {
		return err
	}
	return nil
}

// git runs git in dir and returns its standard output; the error holds the first line of its standard error.
func git(ctx context.Context, dir string, stdin []byte, args ...string) (string, error) {
	cmd := gitCommand(ctx, dir, args...)
	if args[0] == "apply" {
		// Inside somebody's repository `git apply` would silently skip what is outside of its index's folder; a tree
		// in scratch is to be seen as no repository at all.
		cmd.Env = append(cmd.Env, "GIT_CEILING_DIRECTORIES="+parents(dir))
	}
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		line, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, line)
	}
	return stdout.String(), nil
}

func gitCommand(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "GIT_") { // a calling git hook sets GIT_DIR and the like
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, "GIT_OPTIONAL_LOCKS=0", "LC_ALL=C")
	return cmd
}

// parents lists every directory above dir, symlinks resolved too, as git compares both forms.
func parents(dir string) string {
	list := []string{filepath.Dir(dir)}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		list = append(list, filepath.Dir(real))
	}
	return strings.Join(list, string(os.PathListSeparator))
}
