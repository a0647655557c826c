package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// roleEnv turns the test binary into the parent of a run, for tests that end
// such a parent in various ways.
const roleEnv = "PROCESS_TEST_ROLE"

func TestMain(m *testing.M) {
	Main()
	if role := os.Getenv(roleEnv); role != "" {
		parent(role, os.Args[1])
	}
	os.Exit(m.Run())
}

// parent opens a run, starts two processes, one of which forks a grandchild
// into a session of its own, and prints the pids of all three.
func parent(role, dir string) {
	fail := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(9)
		}
	}
	run, err := Open(dir)
	fail(err)
	fail(os.WriteFile(run.State("secret"), []byte("key"), 0o600))
	grandchild := filepath.Join(dir, "grandchild")
	ctx := context.Background()
	a, err := run.Start(ctx, Spec{Name: "child", Path: "sleep", Args: []string{"1000"}})
	fail(err)
	b, err := run.Start(ctx, Spec{Name: "forks", Path: "/bin/sh",
		Args: []string{"-c", `setsid sh -c 'echo $$ >"$1.tmp"; mv "$1.tmp" "$1"; exec sleep 1000' sh "$0" & exec sleep 1000`, grandchild}})
	fail(err)
	var c int
	// In the middle of an exec a process shows nobody's environment. The parent
	// waits for the last exec itself: some end as soon as they have spoken.
	for !sleeps(a.Pid(), dir) || !sleeps(b.Pid(), dir) || !sleeps(c, dir) {
		time.Sleep(time.Millisecond)
		if pid, err := os.ReadFile(grandchild); err == nil {
			c, err = strconv.Atoi(strings.TrimSpace(string(pid)))
			fail(err)
		}
	}
	fmt.Println(a.Pid(), b.Pid(), c)
	switch role {
	case "panics":
		panic("on purpose")
	case "returns":
		os.Exit(0) // without Close
	case "closes":
		fail(run.Close())
		os.Exit(0)
	case "waits":
		signal.Reset()
		select {}
	}
}

// sleeps tells whether pid is the program sleep, laid out, of the run in dir.
func sleeps(pid int, dir string) bool {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && string(comm) == "sleep\n" && carries(pid, dir)
}

type testParent struct {
	dir  string
	pids []int
	cmd  *exec.Cmd
}

func startParent(t *testing.T, role, dir string) testParent {
	t.Helper()
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_, _ = killCookie(dir)
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("parent said %q: %v", line, err)
	}
	p := testParent{dir: dir, cmd: cmd}
	for f := range strings.FieldsSeq(line) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			t.Fatalf("parent said %q", line)
		}
		p.pids = append(p.pids, pid)
	}
	if len(p.pids) != 3 {
		t.Fatalf("parent said %q, want three pids", line)
	}
	return p
}

func (p testParent) alive() int {
	n := 0
	for _, pid := range p.pids {
		if carries(pid, p.dir) {
			n++
		}
	}
	return n
}

func (p testParent) reaperPid(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		cmdline, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && strings.Contains(string(cmdline), reaperArg+"\x00"+p.dir+"\x00") {
			pid, _ := strconv.Atoi(e.Name())
			return pid
		}
	}
	return 0
}

// assertEnded waits until nothing of the run is left but its logs.
func (p testParent) assertEnded(t *testing.T) {
	t.Helper()
	waitFor(t, "the run's processes, state, lock and reaper to go", func() bool {
		left, unsure, err := carriers(p.dir)
		return err == nil && len(left) == 0 && !unsure && p.alive() == 0 &&
			!exists(stateDir(p.dir)) && !exists(lockPath(p.dir)) && p.reaperPid(t) == 0
	})
	if !exists(filepath.Join(p.dir, "logs", "child.log")) {
		t.Error("the logs are gone too")
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain for " + what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func openRun(t *testing.T) *Run {
	t.Helper()
	r, err := Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestRunEndsHoweverItsProcessDoes(t *testing.T) {
	for _, tc := range []struct {
		name, role string
		signal     syscall.Signal
	}{
		{"SIGKILL", "waits", syscall.SIGKILL},
		{"SIGINT", "waits", syscall.SIGINT},
		{"SIGTERM", "waits", syscall.SIGTERM},
		{"panic", "panics", 0},
		{"exit without Close", "returns", 0},
		{"Close", "closes", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := startParent(t, tc.role, filepath.Join(t.TempDir(), "run"))
			if tc.signal != 0 {
				if err := p.cmd.Process.Signal(tc.signal); err != nil {
					t.Fatal(err)
				}
			}
			p.assertEnded(t)
		})
	}
}

func TestRunsSideBySideDoNotMeet(t *testing.T) {
	parentDir := t.TempDir()
	// One folder's path is a prefix of the other's.
	dies := startParent(t, "waits", filepath.Join(parentDir, "run"))
	lives := startParent(t, "waits", filepath.Join(parentDir, "run-2"))
	if err := dies.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	dies.assertEnded(t)
	lines, err := Sweep(parentDir)
	if err != nil || len(lines) != 0 {
		t.Errorf("Sweep = %q, %v; want nothing to do", lines, err)
	}
	if got := lives.alive(); got != 3 {
		t.Errorf("%d of the other run's 3 processes alive", got)
	}
	if !exists(filepath.Join(stateDir(lives.dir), "secret")) {
		t.Error("the other run's state is gone")
	}
}

func TestSweepEndsRunWhoseReaperWasKilled(t *testing.T) {
	parentDir := t.TempDir()
	p := startParent(t, "waits", filepath.Join(parentDir, "run"))
	reaper := p.reaperPid(t)
	if reaper == 0 {
		t.Fatal("no reaper")
	}
	if err := syscall.Kill(reaper, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()
	if got := p.alive(); got != 3 { // or the test proves nothing
		t.Fatalf("%d of 3 processes outlived parent and reaper", got)
	}
	var lines []string
	waitFor(t, "the kernel to drop the lock of the killed", func() bool {
		var err error
		if lines, err = Sweep(parentDir); err != nil {
			t.Fatal(err)
		}
		return len(lines) > 0
	})
	if len(lines) != 1 || !strings.Contains(lines[0], "killed 3 processes") || !strings.Contains(lines[0], strconv.Itoa(p.pids[2])) {
		t.Errorf("Sweep told %q, want one line with 3 processes", lines)
	}
	p.assertEnded(t)
	if lines, err := Sweep(parentDir); err != nil || len(lines) != 0 {
		t.Errorf("second Sweep = %q, %v; want nothing to do", lines, err)
	}
}

func TestSweepOfNoFolder(t *testing.T) {
	if lines, err := Sweep(filepath.Join(t.TempDir(), "none")); err != nil || len(lines) != 0 {
		t.Errorf("Sweep = %q, %v", lines, err)
	}
}

// A pid that was read as a run's process may be another process by the time it
// is killed.
func TestReusedPidIsNotKilled(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("sleep", "1000")
	cmd.Env = []string{Cookie + "=" + dir + "-other", "X=" + Cookie + "=" + dir}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	waitFor(t, "the program to be laid out", func() bool { return !execs(cmd.Process.Pid) })
	if killed, err := killCarrier(cmd.Process.Pid, dir); killed || err != nil {
		t.Errorf("killCarrier = %v, %v for a process of another run", killed, err)
	}
	if !carries(cmd.Process.Pid, dir+"-other") {
		t.Error("the other run's process is gone")
	}
	if killed, err := killCarrier(cmd.Process.Pid, dir+"-other"); !killed || err != nil {
		t.Errorf("killCarrier = %v, %v for the run's own process", killed, err)
	}
}

func TestFoldersArePrivateAndTakenOnce(t *testing.T) {
	r := openRun(t)
	for _, dir := range []string{r.Dir(), r.State()} {
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != 0o700 {
			t.Errorf("%s has mode %o", dir, got)
		}
	}
	if got := os.Getenv(Cookie); got != r.Dir() {
		t.Errorf("cookie is %q, want %q", got, r.Dir())
	}
	if _, err := Open(r.Dir() + "-2"); err == nil || !strings.Contains(err.Error(), "still open") {
		t.Errorf("second Open in one process: %v", err)
	}
	t.Setenv(Cookie, initialCookie())
	if _, err := Open(r.Dir()); err == nil || !strings.Contains(err.Error(), "belongs to another run") {
		t.Errorf("Open of a folder in use: %v", err)
	}
	if !exists(lockPath(r.Dir())) || !exists(r.State()) {
		t.Error("the refused Open took the run's lock or state away")
	}
}

func TestExec(t *testing.T) {
	r := openRun(t)
	var copied bytes.Buffer
	code, err := r.Exec(t.Context(), Spec{Name: "hook", Path: "/bin/sh", Stdout: &copied,
		Env:  []string{"GREETING=hello", Cookie + "=stolen"},
		Args: []string{"-c", `echo $GREETING; echo $` + Cookie + ` >&2; exit 7`}})
	if code != 7 || err != nil {
		t.Errorf("Exec = %d, %v", code, err)
	}
	want := "hello\n" + r.Dir() + "\n"
	if copied.String() != want {
		t.Errorf("copy of output = %q, want %q", copied.String(), want)
	}
	log, err := os.ReadFile(filepath.Join(r.Dir(), "logs", "hook.log"))
	if err != nil || string(log) != want {
		t.Errorf("log = %q, %v", log, err)
	}
	if code, err := r.Exec(t.Context(), Spec{Name: "none", Path: "/does/not/exist"}); code != -1 || err == nil {
		t.Errorf("Exec of no program = %d, %v", code, err)
	}
	if code, err := r.Exec(t.Context(), Spec{Name: "dies", Path: "/bin/sh", Args: []string{"-c", "kill -9 $$"}}); code != -1 || err == nil {
		t.Errorf("Exec of a killed program = %d, %v", code, err)
	}
}

func TestExecKillsTheWholeGroupWhenContextEnds(t *testing.T) {
	r := openRun(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("after the third write")
	pipe, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = bufio.NewReader(pipe).ReadString('\n')
		cancel(reason)
	}()
	code, err := r.Exec(ctx, Spec{Name: "tree", Path: "/bin/sh", Args: []string{"-c", "sleep 1000 & echo started; wait"}, Stdout: w})
	if code != -1 || !errors.Is(err, reason) {
		t.Errorf("Exec = %d, %v", code, err)
	}
	waitFor(t, "the shell's child to end", func() bool {
		left, unsure, err := carriers(r.Dir())
		return err == nil && len(left) == 0 && !unsure
	})
}

func TestSupervisedProcessIsStartedAgain(t *testing.T) {
	r := openRun(t)
	p, err := r.Start(t.Context(), Spec{Name: "server", Path: "sleep", Args: []string{"1000"}, Restart: true})
	if err != nil {
		t.Fatal(err)
	}
	if r.Find("server") != p || r.Find("other") != nil {
		t.Error("Find does not find by name")
	}
	first := p.Pid()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the restart", func() bool { return p.Restarts() == 1 && carries(p.Pid(), r.Dir()) })
	if p.Pid() == first {
		t.Errorf("pid is still %d", first)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if p.Restarts() != 1 || carries(p.Pid(), r.Dir()) {
		t.Errorf("after Stop: %d restarts, alive %v", p.Restarts(), carries(p.Pid(), r.Dir()))
	}
	log, err := os.ReadFile(p.Log())
	if err != nil || !strings.Contains(string(log), fmt.Sprintf("(pid %d) ended: signal: killed", first)) {
		t.Errorf("log does not tell the end of the first: %q, %v", log, err)
	}
}

func TestStopDuringTheRestartPause(t *testing.T) {
	r := openRun(t)
	p, err := r.Start(t.Context(), Spec{Name: "exits", Path: "false", Restart: true})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first end", func() bool { return p.Err() != nil })
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	default:
		t.Error("not done after Stop")
	}
}

func TestStopKillsWhoIgnoresSIGTERM(t *testing.T) {
	r := openRun(t)
	ready := filepath.Join(r.Dir(), "ready")
	p, err := r.Start(t.Context(), Spec{Name: "stubborn", Path: "/bin/sh",
		Args: []string{"-c", `trap '' TERM; : >"$0"; while :; do sleep 1; done`, ready}})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the trap", func() bool { return exists(ready) })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if carries(p.Pid(), r.Dir()) {
		t.Error("still alive")
	}
}

func TestProcessOutlivesTheContextOfItsStart(t *testing.T) {
	r := openRun(t)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := r.Start(ctx, Spec{Name: "lives", Path: "sleep", Args: []string{"1000"}})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-p.Done():
		t.Error("ended with the context of its start")
	case <-time.After(50 * time.Millisecond):
	}
	if _, err := r.Start(ctx, Spec{Name: "late", Path: "sleep"}); !errors.Is(err, context.Canceled) {
		t.Errorf("Start with an ended context: %v", err)
	}
}

func TestClose(t *testing.T) {
	r, err := Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	said := filepath.Join(r.Dir(), "said")
	for _, p := range []struct{ name, onTerm string }{
		{"polite", `echo bye >>"$0"; exit`},
		{"stubborn", ":"},
	} {
		ready := filepath.Join(r.Dir(), p.name)
		if _, err := r.Start(t.Context(), Spec{Name: p.name, Path: "/bin/sh",
			Args: []string{"-c", "trap '" + p.onTerm + `' TERM; : >"$1"; while :; do sleep 0.01; done`, said, ready}}); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the trap", func() bool { return exists(ready) })
	}
	var order []string
	for _, name := range []string{"first", "second"} {
		r.AtClose(func() error {
			if left, _, err := carriers(r.Dir()); err != nil || len(left) != 0 {
				t.Errorf("at close: processes %v, %v", left, err)
			}
			order = append(order, name)
			return nil
		})
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(said); string(got) != "bye\n" {
		t.Errorf("the polite one said %q, %v", got, err)
	}
	if !slices.Equal(order, []string{"second", "first"}) {
		t.Errorf("order of what AtClose was given: %v", order)
	}
	if err := r.Close(); err != nil || len(order) != 2 {
		t.Errorf("second Close: %v, %v", err, order)
	}
	if _, err := r.Start(t.Context(), Spec{Name: "late", Path: "sleep"}); err == nil {
		t.Error("Start after Close worked")
	}
	if exists(stateDir(r.Dir())) || os.Getenv(Cookie) != initialCookie() {
		t.Error("state or cookie left after Close")
	}
}

func TestFreePortsAreDistinctAndFree(t *testing.T) {
	seen := map[int]bool{}
	for range 200 {
		port, err := FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Fatalf("port %d twice", port)
		}
		if port < lowestPort || port > highestPort {
			t.Fatalf("port %d out of range", port)
		}
		seen[port] = true
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
}

func TestFreeze(t *testing.T) {
	run, err := Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	defer run.Close()
	// A program of its own, so that no other process of the run is meant.
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	if shell, err = filepath.EvalSymlinks(shell); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "writer")
	content, err := os.ReadFile(shell)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o700); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	if _, err := run.Start(t.Context(), Spec{Name: "writer", Path: program, Args: []string{"-c", `while :; do echo x >>"$0"; done`, out}}); err != nil {
		t.Fatal(err)
	}
	size := func() int64 {
		info, err := os.Stat(out)
		if err != nil {
			return 0
		}
		return info.Size()
	}
	grows := func() bool {
		from, deadline := size(), time.Now().Add(200*time.Millisecond)
		for time.Now().Before(deadline) {
			if size() > from {
				return true
			}
		}
		return false
	}
	for size() == 0 {
		time.Sleep(time.Millisecond)
	}
	failure := errors.New("on purpose")
	err = run.Freeze(t.Context(), program, func() error {
		if grows() {
			t.Error("it wrote while it was frozen")
		}
		return failure
	})
	if !errors.Is(err, failure) {
		t.Errorf("error %v, want that of the function", err)
	}
	if !grows() {
		t.Error("it did not go on")
	}
	if err := run.Freeze(t.Context(), "/bin/true", func() error { t.Error("called"); return nil }); err == nil {
		t.Error("no process of that program, and no error")
	}
}
