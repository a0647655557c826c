package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const (
	reaperArg   = "upgrade-e2e-reaper" // first argument; also what `ps` shows
	reaperReady = "reaper ready"
)

// Main has to be the first call in main or TestMain of every program that opens
// a run: started as a reaper, it does the reaper's work and exits. Otherwise it
// returns at once.
func Main() {
	if len(os.Args) != 3 || os.Args[1] != reaperArg {
		return
	}
	signal.Ignore(os.Interrupt, syscall.SIGHUP, syscall.SIGTERM)
	fmt.Println(reaperReady)
	// Nobody writes: the read ends when the run's process has, however it ended.
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := endRun(os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

type reaper struct {
	cmd  *exec.Cmd
	pipe io.Closer
}

func startReaper(dir string, lock *os.File) (*reaper, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start reaper: %w", err)
	}
	log, err := openLog(dir, "reaper")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(exe, reaperArg, dir)
	cmd.Dir = "/"
	cmd.Env = withoutCookie(os.Environ()) // nobody's sweep may end it before its work is done
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{lock} // the run stays locked until the reaper is through
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start reaper: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start reaper: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start reaper: %w", err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	if strings.TrimSpace(line) != reaperReady {
		return nil, errors.Join(
			fmt.Errorf("start reaper: %s did not become one (said %q); its main or TestMain has to call process.Main first", filepath.Base(exe), line),
			in.Close(), cmd.Process.Kill(), ignoreExit(cmd.Wait()))
	}
	return &reaper{cmd: cmd, pipe: in}, nil
}

// end lets the reaper finish and waits for it. A reaper that was killed before
// is no error: its work has been done by the caller.
func (r *reaper) end() error {
	err := r.pipe.Close()
	return errors.Join(err, ignoreExit(r.cmd.Wait()))
}

// ignoreExit drops the error that only tells how a process ended.
func ignoreExit(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

func withoutCookie(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		return strings.HasPrefix(kv, Cookie+"=")
	})
}
