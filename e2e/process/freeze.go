package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Freeze stops the run's processes whose program is the file at path (SIGSTOP), calls do, and lets them go on, whatever
// do does. While do runs, what they have written is as a crash would leave it. No such process is an error.
func (r *Run) Freeze(ctx context.Context, path string, do func() error) (err error) {
	pids, err := r.running(path)
	if err != nil {
		return fmt.Errorf("freeze %s: %w", filepath.Base(path), err)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return fmt.Errorf("freeze %s, process %d: %w", filepath.Base(path), pid, err)
		}
		defer func() {
			if e := syscall.Kill(pid, syscall.SIGCONT); e != nil {
				err = errors.Join(err, fmt.Errorf("let process %d go on: %w", pid, e))
			}
		}()
		err := wait.PollUntilContextTimeout(ctx, time.Millisecond, stopGrace, true, func(context.Context) (bool, error) {
			return frozen(pid)
		})
		if err != nil {
			return fmt.Errorf("wait until process %d of %s stands still: %w", pid, filepath.Base(path), err)
		}
	}
	return do()
}

// running lists the run's processes whose program is the file at path.
func (r *Run) running(path string) ([]int, error) {
	program, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	all, _, err := carriers(r.dir)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, pid := range all {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && exe == program {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		return nil, errors.New("no process of the run has this program")
	}
	return pids, nil
}

// frozen tells whether every thread of a process has stopped.
func frozen(pid int) (bool, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	for _, path := range threads {
		stat, err := os.ReadFile(path)
		if err != nil {
			return false, nil // a thread that has just ended
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) == 0 || !bytes.Equal(fields[0], []byte("T")) {
			return false, nil
		}
	}
	return len(threads) > 0, nil
}
