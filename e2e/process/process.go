package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

const (
	stopGrace  = 10 * time.Second       // from SIGTERM to SIGKILL
	closeGrace = time.Second            // the same at the end of the run
	firstPause = 200 * time.Millisecond // before the first restart; doubles
	lastPause  = 5 * time.Second
	longLife   = 30 * time.Second // who lived that long starts again at firstPause
)

// Spec describes one process. Name names its log file, logs/<Name>.log in the
// run's folder, which gets standard output and error. Env is added to this
// process's environment.
type Spec struct {
	Name, Path string
	Args, Env  []string
	Dir        string    // working directory; the run's folder when empty
	Restart    bool      // start again, with growing pauses, when it exits by itself
	Stdout     io.Writer // gets a copy of standard output and error; may be nil
}

// Process is a started process of a run.
type Process struct {
	run  *Run
	spec Spec
	stop chan struct{} // closed by Stop
	done chan struct{} // closed when it is over for good
	once sync.Once

	mu       sync.Mutex
	cmd      *exec.Cmd
	exited   chan struct{} // closed when cmd has ended
	restarts int
	err      error
}

// Start starts a process that lives until Stop or Close, in its own process
// group, so that a terminal's Ctrl-C reaches this process alone. It outlives
// ctx, which is only asked whether to start.
func (r *Run) Start(ctx context.Context, s Spec) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Name, err)
	}
	p := &Process{run: r, spec: s, stop: make(chan struct{}), done: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("start %s: the run is closed", s.Name)
	}
	if err := p.launch(); err != nil {
		return nil, err
	}
	r.started = append(r.started, p)
	go p.supervise()
	return p, nil
}

// Exec runs a process to its end and returns its exit code. An exit code other
// than 0 is no error; a process that could not start or was ended by a signal
// or by ctx is one, with code -1. When ctx ends, its whole process group is
// killed.
func (r *Run) Exec(ctx context.Context, s Spec) (int, error) {
	cmd, log, err := r.command(s)
	if err != nil {
		return -1, err
	}
	defer log.Close()
	if err := ctx.Err(); err != nil {
		return -1, fmt.Errorf("run %s: %w", s.Name, err)
	}
	if err := cmd.Start(); err != nil {
		return -1, fmt.Errorf("run %s: %w", s.Name, err)
	}
	stop := context.AfterFunc(ctx, func() { signalGroup(cmd.Process, syscall.SIGKILL) })
	err = cmd.Wait()
	if !stop() {
		return -1, fmt.Errorf("run %s: killed: %w", s.Name, context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return -1, fmt.Errorf("run %s: %w", s.Name, err)
	}
	return 0, nil
}

// command prepares s; the caller closes the log once the process has ended.
func (r *Run) command(s Spec) (*exec.Cmd, *os.File, error) {
	log, err := openLog(r.dir, s.Name)
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(s.Path, s.Args...)
	cmd.Dir = s.Dir
	if cmd.Dir == "" {
		cmd.Dir = r.dir
	}
	cmd.Env = append(append(withoutCookie(os.Environ()), s.Env...), Cookie+"="+r.dir)
	cmd.Stdout = log
	if s.Stdout != nil {
		cmd.Stdout = io.MultiWriter(log, s.Stdout)
	}
	cmd.Stderr = cmd.Stdout
	cmd.WaitDelay = 5 * time.Second // a child that keeps our pipe open does not keep us
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, log, nil
}

func openLog(dir, name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "logs", name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", name, err)
	}
	return f, nil
}

// launch starts the process once and closes p.exited when it has ended.
func (p *Process) launch() error {
	cmd, log, err := p.run.command(p.spec)
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", p.spec.Name, err), log.Close())
	}
	exited := make(chan struct{})
	p.mu.Lock()
	p.cmd, p.exited = cmd, exited
	p.mu.Unlock()
	go func() {
		err := cmd.Wait()
		fmt.Fprintf(log, "-- %s (pid %d) ended: %s\n", p.spec.Name, cmd.Process.Pid, cmd.ProcessState)
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		_ = log.Close()
		close(exited)
	}()
	return nil
}

func (p *Process) current() (*exec.Cmd, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.exited
}

// supervise closes done when the process is over for good and restarts it
// before that if the spec says so.
func (p *Process) supervise() {
	defer close(p.done)
	pause := firstPause
	for {
		began := time.Now()
		_, exited := p.current()
		<-exited
		if !p.spec.Restart {
			return
		}
		if time.Since(began) > longLife {
			pause = firstPause
		}
		select {
		case <-p.stop:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, lastPause)
		if err := p.relaunch(); err != nil {
			return
		}
	}
}

// relaunch starts the process again unless Stop was called meanwhile.
func (p *Process) relaunch() error {
	p.run.mu.Lock() // against a Close between the question and the start
	defer p.run.mu.Unlock()
	select {
	case <-p.stop:
		return errors.New("stopped")
	default:
	}
	if err := p.launch(); err != nil {
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		return err
	}
	p.mu.Lock()
	p.restarts++
	p.mu.Unlock()
	return nil
}

// Name is the name in the process's spec.
func (p *Process) Name() string { return p.spec.Name }

// Pid is the pid of the process as last started.
func (p *Process) Pid() int {
	cmd, _ := p.current()
	return cmd.Process.Pid
}

// Done is closed when the process has ended and will not be started again.
func (p *Process) Done() <-chan struct{} { return p.done }

// Restarts counts how often the process was started again.
func (p *Process) Restarts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.restarts
}

// Err tells how the process last ended: nil for exit code 0 or while it has not
// ended yet.
func (p *Process) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Log is the path of the process's log.
func (p *Process) Log() string { return filepath.Join(p.run.dir, "logs", p.spec.Name+".log") }

// Signal sends sig to the process itself. A supervised process that it ends is
// started again.
func (p *Process) Signal(sig os.Signal) error {
	cmd, _ := p.current()
	if err := cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("signal %s: %w", p.spec.Name, err)
	}
	return nil
}

// Stop ends the process and its process group for good: SIGTERM, and SIGKILL
// after ten seconds or when ctx ends. It returns once the process has ended.
func (p *Process) Stop(ctx context.Context) error {
	p.once.Do(func() {
		// Under the run's lock no restart is half done.
		p.run.mu.Lock()
		defer p.run.mu.Unlock()
		close(p.stop)
	})
	cmd, exited := p.current()
	signalGroup(cmd.Process, syscall.SIGTERM)
	grace, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	select {
	case <-exited:
	case <-grace.Done():
		signalGroup(cmd.Process, syscall.SIGKILL)
		<-exited
	}
	<-p.done
	return nil
}

// signalGroup signals the process group that leader leads. Once the leader has
// been waited for, its pid may name another group and nobody is signalled.
func signalGroup(leader *os.Process, sig syscall.Signal) {
	if leader.Signal(syscall.Signal(0)) != nil {
		return
	}
	_ = syscall.Kill(-leader.Pid, sig)
}
