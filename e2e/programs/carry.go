package programs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Carried says what it takes to bring what Build makes to another machine.
type Carried struct {
	// Recipe stands in a few characters for everything that the files are made of. Checkouts with equal ones build the same.
	Recipe string
	// Files are their paths below bin: programs, manifests and the stamps by which Build knows them again.
	Files []string
	// Current tells whether all of them are there and up to date.
	Current bool
}

// Carry describes what Build with the same extra makes below root, made or not. Programs of KUBEBUILDER_ASSETS are nobody's to carry:
// with these set it fails.
func Carry(root string, extra ...string) (Carried, error) {
	tools, err := wanted(all(), extra)
	if err != nil {
		return Carried{}, err
	}
	return carry(root, tools)
}

func carry(root string, tools []tool) (Carried, error) {
	p, err := At(root)
	if err != nil {
		return Carried{}, err
	}
	if len(p.assets) > 0 {
		return Carried{}, &BuildError{Err: errors.New("what KUBEBUILDER_ASSETS holds can't be carried to or from another machine; unset it")}
	}
	b := &builder{root: filepath.Dir(p.Dir), programs: p}
	h := sha256.New()
	fmt.Fprintln(h, runtime.GOARCH)
	c := Carried{Current: true}
	for _, t := range tools {
		jobs, err := b.jobs(t)
		if err != nil {
			return Carried{}, err
		}
		for _, j := range jobs {
			fmt.Fprintln(h, j.item(), j.hash)
			c.Files = append(c.Files, j.file(), stampPath("", j.item()))
			c.Current = c.Current && b.current(j)
		}
	}
	c.Recipe = hex.EncodeToString(h.Sum(nil))
	return c, nil
}

// Lock keeps builds below root waiting until unlock is called, and makes a folder below bin that the next build removes should nobody
// else do. A build that is at work is waited for, with a line on out.
func Lock(ctx context.Context, root string, out io.Writer) (scratch string, unlock func(), err error) {
	p, err := At(root)
	if err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(p.Dir, 0o755); err != nil {
		return "", nil, fmt.Errorf("tools: %w", err)
	}
	b := &builder{programs: p, out: out}
	release, err := b.lock(ctx)
	if err != nil {
		return "", nil, err
	}
	if err := b.sweep(); err != nil {
		release()
		return "", nil, err
	}
	if scratch, err = os.MkdirTemp(p.Dir, stagePrefix); err != nil {
		release()
		return "", nil, fmt.Errorf("tools: %w", err)
	}
	return scratch, func() { _ = os.RemoveAll(scratch); release() }, nil
}

// Install moves the files of a Carried, which lie below from in the same order of folders, to their places below root. The caller holds
// the Lock.
func (c Carried) Install(root, from string) error {
	p, err := At(root)
	if err != nil {
		return err
	}
	for _, file := range c.Files {
		place := filepath.Join(p.Dir, file)
		if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
			return fmt.Errorf("tools: %w", err)
		}
		// As in a build, a rename leaves a program that runs right now alone.
		if err := os.Rename(filepath.Join(from, file), place); err != nil {
			return fmt.Errorf("tools: %w", err)
		}
	}
	return nil
}
