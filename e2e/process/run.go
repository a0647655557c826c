// Package process starts the processes of one run and ends them whatever
// happens to the run: a normal end, a panic, Ctrl-C, or SIGKILL.
//
// Every process of a run inherits a cookie, the environment variable
// UPGRADE_E2E_RUN with the run's folder. A small second process, the reaper,
// waits for the run's end and then kills whoever still carries the cookie.
// Should the reaper be killed as well, Sweep does its work at the next start.
package process

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Cookie is the environment variable that every process of a run carries. Its
// value is the absolute path of the run's folder.
const Cookie = "UPGRADE_E2E_RUN"

// Run is one run's folder and processes. Its methods may be called from
// several goroutines.
type Run struct {
	dir     string
	lock    *os.File
	reaper  *reaper
	outer   string // value of Cookie before Open
	mu      sync.Mutex
	started []*Process
	closers []func() error
	closed  bool
}

// Open makes dir (0700) with dir/logs and dir/state, takes its lock, puts the
// cookie into this process's environment and starts the reaper. One run can be
// open in a process at a time, and Main has to be called first in its main or
// TestMain. The caller ends the run with Close.
func Open(dir string) (*Run, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open run folder: %w", err)
	}
	if current := os.Getenv(Cookie); current != "" && current != initialCookie() {
		return nil, fmt.Errorf("open run %s: run %s is still open in this process; close it first", dir, current)
	}
	for _, sub := range []string{dir, filepath.Join(dir, "logs"), stateDir(dir)} {
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return nil, fmt.Errorf("make run folder: %w", err)
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make run folder private: %w", err)
	}
	lock, err := createLock(dir)
	if err != nil {
		return nil, err
	}
	r := &Run{dir: dir, lock: lock, outer: os.Getenv(Cookie)}
	if r.reaper, err = startReaper(dir, lock); err != nil {
		return nil, errors.Join(err, endRun(dir), lock.Close())
	}
	if err := os.Setenv(Cookie, dir); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Dir is the run's folder, an absolute path. Logs go to logs/<name>.log below
// it, secrets and data to state/, which is removed at the end of the run.
func (r *Run) Dir() string { return r.dir }

// State is a path below the run's state folder.
func (r *Run) State(elem ...string) string {
	return filepath.Join(append([]string{stateDir(r.dir)}, elem...)...)
}

// Find returns the started process of that name, nil when there is none. Of
// several with one name it is the last.
func (r *Run) Find(name string) *Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range slices.Backward(r.started) {
		if p.spec.Name == name {
			return p
		}
	}
	return nil
}

// AtClose registers what Close calls after the processes of Start have ended,
// last registered first: for processes that another library started.
func (r *Run) AtClose(f func() error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closers = append(r.closers, f)
}

// Close ends the run: its processes all at once (SIGTERM, and SIGKILL a second
// later: what they could save is thrown away), then what AtClose was given, then
// everything else that carries the cookie, then the reaper. It removes the state
// folder. A second call does nothing.
func (r *Run) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	started, closers := r.started, r.closers
	r.mu.Unlock()

	grace, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	var wg sync.WaitGroup
	for _, p := range started {
		wg.Go(func() { _ = p.Stop(grace) }) // it returns no error; the signature is that of a stop that may
	}
	wg.Wait()
	var errs []error
	for _, f := range slices.Backward(closers) {
		errs = append(errs, f())
	}
	errs = append(errs, endRun(r.dir), r.reaper.end(), r.lock.Close())
	if r.outer == "" {
		errs = append(errs, os.Unsetenv(Cookie))
	} else {
		errs = append(errs, os.Setenv(Cookie, r.outer))
	}
	return errors.Join(errs...)
}

// Sweep ends every run below parent that nobody holds any more: it kills the
// processes with the run's cookie and removes the run's state. Logs and
// verdicts stay. It returns one line for each such run, telling what was done.
// Runs that are alive, here or in another process, are left alone.
func Sweep(parent string) ([]string, error) {
	parent, err := filepath.Abs(parent)
	if err != nil {
		return nil, fmt.Errorf("sweep: %w", err)
	}
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("sweep: %w", err)
	}
	var lines []string
	var errs []error
	for _, e := range entries {
		if !e.IsDir() {
			continue // `latest` is a link to one of the others
		}
		dir := filepath.Join(parent, e.Name())
		line, err := sweepRun(dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", dir, err))
		}
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines, errors.Join(errs...)
}

func sweepRun(dir string) (string, error) {
	lock, err := os.OpenFile(lockPath(dir), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil // ended in order
	}
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return "", nil // alive, or its reaper is at work
	}
	killed, err := killCookie(dir)
	if left := endLeaves(dir); left != nil {
		// Its lock stays, so that the next sweep tries again: what is left may take a service that does not run now.
		return fmt.Sprintf("swept %s: killed %d processes%s; %v", dir, len(killed), pidList(killed), left), err
	}
	if err == nil {
		err = removeState(dir)
	}
	return fmt.Sprintf("swept %s: killed %d processes%s, removed its state",
		dir, len(killed), pidList(killed)), err
}

// Unfinished tells whether a run's folder still waits for its end: somebody holds it, or what it has left could not be ended.
func Unfinished(dir string) bool {
	_, err := os.Stat(lockPath(dir))
	return err == nil
}

// Held tells whether a run, here or in another process, holds dir.
func Held(dir string) bool {
	lock, err := os.OpenFile(lockPath(dir), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer lock.Close()
	return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil
}

func pidList(pids []int) string {
	if len(pids) == 0 {
		return ""
	}
	s := make([]string, len(pids))
	for i, pid := range pids {
		s[i] = fmt.Sprint(pid)
	}
	return " (" + strings.Join(s, ", ") + ")"
}

// endRun kills what carries dir's cookie, ends what else the run leaves and
// removes dir's state and lock. Only the holder of the lock may call it.
func endRun(dir string) error {
	_, err := killCookie(dir)
	if left := endLeaves(dir); left != nil {
		return errors.Join(err, left) // the lock stays: a sweep tries again
	}
	return errors.Join(err, removeState(dir))
}

func removeState(dir string) error {
	if err := os.RemoveAll(stateDir(dir)); err != nil {
		return fmt.Errorf("remove state of run: %w", err)
	}
	// The lock file goes last: a folder that has one is a run to sweep.
	if err := os.Remove(lockPath(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove lock of run: %w", err)
	}
	return nil
}

func stateDir(dir string) string { return filepath.Join(dir, "state") }
func lockPath(dir string) string { return filepath.Join(dir, "lock") }

// createLock makes the locked file dir/lock. It is locked before it gets its
// name, so that a Sweep never sees it free.
func createLock(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, ".lock-")
	if err != nil {
		return nil, fmt.Errorf("lock run folder: %w", err)
	}
	defer os.Remove(f.Name())
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock run folder: %w", err), f.Close())
	}
	if err := os.Link(f.Name(), lockPath(dir)); err != nil {
		return nil, errors.Join(fmt.Errorf("run folder %s belongs to another run; sweep it or choose a new folder: %w", dir, err), f.Close())
	}
	return f, nil
}
