package harness

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	// Certificates of a run are valid for a day.
	snapshotAge = 12 * time.Hour
	// snapshotsKept bounds the disk they take, some 100 MB each.
	snapshotsKept = 6
)

// A snapshot is the cluster of an earlier run at the moment before its baseline: old platform, and a fleet that runs.
// Whoever would build the same starts from a copy.
type snapshot struct {
	dir  string // <root>/.snapshots/<key>
	Seed int64  `json:"seed"` // that the fleet was made with
}

// snapshotOf is the snapshot that this run would make: its key stands for all that goes into the fleet. The test binary
// is the harness, the stand-ins and what the scenarios are given.
func (r *run) snapshotOf() (*snapshot, error) {
	h := sha256.New()
	programs, err := r.programs.Fingerprint()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	binary, err := os.Open(self)
	if err != nil {
		return nil, err
	}
	defer binary.Close()
	if _, err := io.Copy(h, binary); err != nil {
		return nil, err
	}
	fmt.Fprintln(h, programs, r.old.Digest, r.old.Spec, r.options.Flux, r.options.Provider)
	for _, s := range r.scenarios {
		fmt.Fprintln(h, s.Tag)
	}
	key := r.family.Name + "-" + hex.EncodeToString(h.Sum(nil))[:16]
	return &snapshot{dir: filepath.Join(r.options.Root, ".snapshots", key), Seed: r.options.Seed}, nil
}

func (s *snapshot) etcd() string { return filepath.Join(s.dir, "etcd") }
func (s *snapshot) meta() string { return filepath.Join(s.dir, "snapshot.json") }

// read tells whether the snapshot is there and fresh, and reads with which seed it was made.
func (s *snapshot) read() (bool, error) {
	info, err := os.Stat(s.meta())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if time.Since(info.ModTime()) > snapshotAge {
		return false, nil
	}
	body, err := os.ReadFile(s.meta())
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(body, s); err != nil {
		return false, fmt.Errorf("%s: %w", s.meta(), err)
	}
	return true, nil
}

// saver is a cluster that can be copied and started from a copy.
type saver interface {
	Save(ctx context.Context, dir string) error
}

// save puts the cluster into the snapshot at once or not at all: two runs may save the same.
func (s *snapshot) save(ctx context.Context, c saver) error {
	all := filepath.Dir(s.dir)
	if err := os.MkdirAll(all, 0o700); err != nil {
		return err
	}
	making, err := os.MkdirTemp(all, ".making-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(making)
	draft := &snapshot{dir: making, Seed: s.Seed}
	if err := c.Save(ctx, draft.etcd()); err != nil {
		return err
	}
	body, err := json.Marshal(draft)
	if err != nil {
		return err
	}
	if err := os.WriteFile(draft.meta(), body, 0o600); err != nil {
		return err
	}
	if err := os.RemoveAll(s.dir); err != nil { // one that is too old
		return err
	}
	if err := os.Rename(making, s.dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return pruneSnapshots(all)
}

// pruneSnapshots removes all but the newest, and drafts that a killed run has left.
func pruneSnapshots(all string) error {
	entries, err := os.ReadDir(all)
	if err != nil {
		return err
	}
	type aged struct {
		path string
		at   time.Time
	}
	var found []aged
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			found = append(found, aged{filepath.Join(all, e.Name()), info.ModTime()})
		}
	}
	slices.SortFunc(found, func(a, b aged) int { return cmp.Compare(b.at.UnixNano(), a.at.UnixNano()) })
	var errs []error
	for _, f := range found[min(snapshotsKept, len(found)):] {
		errs = append(errs, os.RemoveAll(f.path))
	}
	return errors.Join(errs...)
}

// restore looks for a snapshot of what this run would build. One that was asked for with a seed is built.
func (r *run) restore(context.Context) error {
	if !r.options.Snapshots {
		return nil
	}
	var err error
	if r.snapshot, err = r.snapshotOf(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	found, err := r.snapshot.read()
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	if r.restored = found && !r.options.SeedGiven; r.restored {
		r.options.Seed = r.snapshot.Seed
		r.progress.Printf("  starts from %s, a fleet of the same make (SNAPSHOTS=0 builds it anew)", r.snapshot.dir)
	}
	return nil
}

// keepSnapshot saves a fleet that was just built. A failure costs the next run its time and this run nothing.
func (r *run) keepSnapshot(ctx context.Context) error {
	c, ok := r.cluster.(saver)
	if !ok || r.restored || !r.options.Snapshots || r.options.SeedGiven {
		return nil
	}
	if err := r.snapshot.save(ctx, c); err != nil {
		r.progress.Printf("  no snapshot: %v", err)
	}
	return nil
}
