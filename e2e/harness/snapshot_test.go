package harness

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// savedAs is a cluster whose objects are one file.
type savedAs string

func (s savedAs) Save(_ context.Context, dir string) error {
	if s == "" {
		return errors.New("etcd is gone")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "db"), []byte(s), 0o600)
}

func TestSnapshot(t *testing.T) {
	all := filepath.Join(t.TempDir(), ".snapshots")
	take := func(key string, seed int64) *snapshot { return &snapshot{dir: filepath.Join(all, key), Seed: seed} }

	if found, err := take("a", 1).read(); found || err != nil {
		t.Errorf("before the first save: %v, %v", found, err)
	}
	if err := take("a", 7).save(t.Context(), savedAs("")); err == nil || !strings.Contains(err.Error(), "etcd is gone") {
		t.Errorf("save of a cluster that fails: %v", err)
	}
	if left, _ := os.ReadDir(all); len(left) != 0 {
		t.Errorf("a failed save leaves %v", left)
	}
	if err := take("a", 7).save(t.Context(), savedAs("objects")); err != nil {
		t.Fatal(err)
	}
	s := take("a", 1)
	if found, err := s.read(); !found || err != nil || s.Seed != 7 {
		t.Errorf("after a save: %v, %v, seed %d; want 7", found, err, s.Seed)
	}
	if body, _ := os.ReadFile(filepath.Join(s.etcd(), "db")); string(body) != "objects" {
		t.Errorf("saved %q", body)
	}

	old := time.Now().Add(-snapshotAge - time.Minute)
	if err := os.Chtimes(s.meta(), old, old); err != nil {
		t.Fatal(err)
	}
	if found, err := s.read(); found || err != nil {
		t.Errorf("one whose certificates have run out: %v, %v", found, err)
	}
	if err := take("a", 8).save(t.Context(), savedAs("newer")); err != nil {
		t.Fatal(err)
	}
	if found, _ := s.read(); !found || s.Seed != 8 {
		t.Errorf("an old one is not replaced: %v, seed %d", found, s.Seed)
	}

	for i, key := range []string{"b", "c", "d", "e", "f", "g"} {
		if err := take(key, 1).save(t.Context(), savedAs("x")); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(time.Duration(i) * time.Second)
		if err := os.Chtimes(filepath.Join(all, key), at, at); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(all); len(left) != snapshotsKept {
		t.Errorf("%d are kept, want %d", len(left), snapshotsKept)
	}
	if found, _ := take("a", 1).read(); found {
		t.Error("the oldest was kept")
	}
}
