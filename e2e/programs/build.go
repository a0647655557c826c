package programs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// parallel is how many builds run at once. One go build keeps all cores busy
// most of the time; a second one fills the gaps of loading and linking.
const parallel = 2

// BuildError tells which program or manifest could not be built, or why nothing
// can be built here at all.
type BuildError struct {
	Name string // e.g. "kube-apiserver" or "manifests/cluster-api"; empty: all
	Log  string // path of the build's whole output; empty when it didn't start
	Line string // last line of it that says something, if it says anything
	Err  error
}

func (e *BuildError) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("tools: %v", e.Err)
	}
	line := e.Line
	if line == "" {
		line = e.Err.Error()
	}
	return fmt.Sprintf("tools: %s failed to build: %s (log: %s)", e.Name, line, e.Log)
}

func (e *BuildError) Unwrap() error { return e.Err }

// ExitCode is the exit status that a command should end with.
func (e *BuildError) ExitCode() int { return 2 }

// Build makes the programs and manifests below root that are missing or whose
// sources have changed since, writing progress to out, a line for each. extra
// names optional ones to build too, such as helm-controller-helm3. What
// KUBEBUILDER_ASSETS holds is not built. A failed build is a *BuildError. A
// second call at the same time waits for the first.
func Build(ctx context.Context, root string, out io.Writer, extra ...string) error {
	tools, err := wanted(all(), extra)
	if err != nil {
		return err
	}
	return build(ctx, root, out, tools)
}

func build(ctx context.Context, root string, out io.Writer, tools []tool) error {
	if runtime.GOOS != "linux" {
		return &BuildError{Err: fmt.Errorf("this runs on Linux, not on %s", runtime.GOOS)}
	}
	if _, err := exec.LookPath("go"); err != nil {
		return &BuildError{Err: errors.New("no `go` in PATH; install Go (the version is in go.mod)")}
	}
	p, err := At(root)
	if err != nil {
		return err
	}
	b := &builder{root: filepath.Dir(p.Dir), programs: p, out: out}
	for _, dir := range []string{".stamps", ".logs", "manifests"} {
		if err := os.MkdirAll(filepath.Join(p.Dir, dir), 0o755); err != nil {
			return fmt.Errorf("tools: %w", err)
		}
	}
	unlock, err := b.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := b.sweep(); err != nil {
		return err
	}
	return b.run(ctx, tools)
}

// builder is one call of Build.
type builder struct {
	root     string
	programs *Programs

	mu    sync.Mutex // guards what follows
	out   io.Writer
	done  int
	total int
}

func (b *builder) printf(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintf(b.out, "tools: "+format+"\n", args...)
}

// lock holds bin/.lock until unlock is called or the process ends.
func (b *builder) lock(ctx context.Context) (unlock func(), err error) {
	path := filepath.Join(b.programs.Dir, ".lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
		return func() { f.Close() }, nil
	}
	b.printf("waiting for another build (it holds %s)", path)
	got := make(chan error)
	go func() {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		select {
		case got <- err:
		case <-ctx.Done(): // nobody wants the lock any more
			f.Close()
		}
	}()
	select {
	case err := <-got:
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("tools: lock %s: %w", path, err)
		}
		return func() { f.Close() }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("tools: waiting for another build: %w", ctx.Err())
	}
}

// sweep removes what a killed build has left; the lock says that none runs.
func (b *builder) sweep() error {
	stages, err := filepath.Glob(filepath.Join(b.programs.Dir, stagePrefix+"*"))
	if err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	for _, stage := range stages {
		if err := os.RemoveAll(stage); err != nil {
			return fmt.Errorf("tools: %w", err)
		}
	}
	return nil
}

const stagePrefix = ".stage-"

// job is one program or manifest that has to be made.
type job struct {
	tool    tool
	program *program // nil: the manifest
	hash    string
}

// name of the job in messages; item is its name among stamps and logs.
func (j job) name() string {
	if j.program == nil {
		return "manifests/" + j.tool.folder
	}
	return j.program.name
}

func (j job) item() string { return strings.ReplaceAll(j.name(), "/", "-") }

// file is where the outcome lies below bin.
func (j job) file() string {
	if j.program == nil {
		return j.name() + ".yaml"
	}
	return j.name()
}

func (b *builder) run(ctx context.Context, tools []tool) error {
	programs, manifests, upToDate, err := b.plan(tools)
	if err != nil {
		return err
	}
	for _, jobs := range programs {
		b.total += len(jobs)
	}
	b.total += len(manifests)
	if b.total == 0 {
		b.printf("%d programs and manifests up to date in %s%s", upToDate, b.programs.Dir, b.assets())
		return nil
	}
	b.printf("%d programs and manifests to build, %d up to date%s", b.total, upToDate, b.assets())
	start := time.Now()

	// Programs of one module share most of their packages, and two builds at
	// once would compile them twice: one after the other within a module.
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, jobs := range programs {
		group.Go(func() error {
			for _, j := range jobs {
				if err := b.make(gctx, j); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	// Only now: kustomize comes with kubectl.
	group, gctx = errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for _, j := range manifests {
		group.Go(func() error { return b.make(gctx, j) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	b.printf("%d programs and manifests built in %s", b.total, since(start))
	return nil
}

// plan finds what has to be made: programs, those of one module together, and
// manifests.
func (b *builder) plan(tools []tool) (programs [][]job, manifests []job, upToDate int, err error) {
	for _, t := range tools {
		all, err := b.jobs(t)
		if err != nil {
			return nil, nil, 0, err
		}
		var jobs []job
		for _, j := range all {
			switch {
			case b.current(j):
				upToDate++
			case j.program == nil:
				manifests = append(manifests, j)
			default:
				jobs = append(jobs, j)
			}
		}
		if len(jobs) > 0 {
			programs = append(programs, jobs)
		}
	}
	return programs, manifests, upToDate, nil
}

// current tells whether what a job makes is there, made of what it would be
// made of now.
func (b *builder) current(j job) bool {
	s, err := readStamp(b.programs.Dir, j.item())
	made := filepath.Join(b.programs.Dir, j.file())
	return err == nil && s.hash == j.hash && (j.program == nil && exists(made) || executable(made))
}

// jobs are a tool's programs, without those of KUBEBUILDER_ASSETS, and its
// manifest, made or not.
func (b *builder) jobs(t tool) ([]job, error) {
	folder := filepath.Join(b.root, "tools", t.folder)
	var jobs []job
	for _, prog := range t.programs {
		if _, ok := b.programs.assets[prog.name]; ok {
			continue
		}
		hash, err := fingerprint(folder, fmt.Sprint(buildFlags, t.module, prog, t.versions, t.patches()))
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, job{tool: t, program: &prog, hash: hash})
	}
	if t.manifest == nil {
		return jobs, nil
	}
	hash, err := fingerprint(folder, fmt.Sprint(manifestSource, t.module, *t.manifest))
	return append(jobs, job{tool: t, hash: hash}), err
}

// manifestSource is how manifests are generated; it counts among their sources.
//
//go:embed manifest.go
var manifestSource string

func (b *builder) assets() string {
	if len(b.programs.assets) == 0 {
		return ""
	}
	var names []string
	for _, name := range []string{"kube-apiserver", "etcd", "kubectl"} {
		if _, ok := b.programs.assets[name]; ok {
			names = append(names, name)
		}
	}
	return fmt.Sprintf("; %s taken from KUBEBUILDER_ASSETS", strings.Join(names, ", "))
}

// make builds one program or manifest, moves it to its place and stamps it.
func (b *builder) make(ctx context.Context, j job) error {
	start := time.Now()
	log, err := os.Create(filepath.Join(b.programs.Dir, ".logs", j.item()+".log"))
	if err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	defer log.Close()
	fail := func(err error) error {
		if ctx.Err() != nil {
			return fmt.Errorf("tools: %s not built: %w", j.name(), context.Cause(ctx))
		}
		failed := &BuildError{Name: j.name(), Log: log.Name(), Err: err}
		// Only a command that ran and failed has said why in the log.
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			failed.Line = lastLine(log.Name())
		}
		return failed
	}

	version, err := b.version(ctx, j.tool, log)
	if err != nil {
		return fail(err)
	}
	b.printf("%s %s: building", j.name(), version)
	stage, err := os.MkdirTemp(b.programs.Dir, stagePrefix)
	if err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	defer os.RemoveAll(stage)

	made, place := filepath.Join(stage, "out"), b.programs.Manifest(j.tool.folder)
	if j.program != nil {
		place = b.programs.Path(j.program.name)
		err = b.compile(ctx, j, version, stage, made, log)
	} else {
		err = b.generate(ctx, j.tool, stage, made, log)
	}
	if err != nil {
		return fail(err)
	}
	// A rename leaves the file of a program that runs right now alone.
	if err := os.Rename(made, place); err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	if err := writeStamp(b.programs.Dir, j.item(), stamp{hash: j.hash, version: version}); err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done++
	fmt.Fprintf(b.out, "tools: %s %s built in %s (%d/%d)\n", j.name(), version, since(start), b.done, b.total)
	return nil
}

// buildFlags hold for every go command, so that generators share the compiled
// packages of programs. They decide what comes out and count among the sources.
const buildFlags = "-mod=readonly -trimpath -buildvcs=false"

func (b *builder) compile(ctx context.Context, j job, version, stage, made string, log io.Writer) error {
	args := []string{"build", "-ldflags", ldflags(version, j.tool.versions), "-o", made}
	if j.tool.webhooks {
		flag, err := b.loopback(ctx, j.tool, stage, log)
		if err != nil {
			return err
		}
		args = append(args, flag)
	}
	return b.command(ctx, j.tool, log, "go", append(args, j.program.pkg)...).Run()
}

func ldflags(version string, packages []string) string {
	flags := []string{"-s", "-w"}
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	for _, pkg := range packages {
		flags = append(flags, "-X", pkg+".gitVersion="+version)
		if len(parts) == 3 {
			flags = append(flags, "-X", pkg+".gitMajor="+parts[0], "-X", pkg+".gitMinor="+parts[1])
		}
	}
	return strings.Join(flags, " ")
}

// version is the one in the tool's go.mod.
func (b *builder) version(ctx context.Context, t tool, log io.Writer) (string, error) {
	raw, err := output(b.command(ctx, t, log, "go", "list", "-m", "-f", "{{.Version}}", t.module))
	if err != nil {
		return "", err
	}
	version := strings.TrimSpace(string(raw))
	if version == "" {
		version = "(devel)" // the tool's own module
	}
	return version, nil
}

// command runs in the tool's folder, with the settings of the caller's
// environment that would change the outcome taken out. Its output goes to log.
func (b *builder) command(ctx context.Context, t tool, log io.Writer, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = filepath.Join(b.root, "tools", t.folder)
	cmd.Env = environment(os.Environ())
	cmd.Stdout, cmd.Stderr = log, log
	// Its own process group, so that ending it ends the compilers too.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func environment(env []string) []string {
	var kept []string
	for _, kv := range env {
		switch name, _, _ := strings.Cut(kv, "="); name {
		case "GOFLAGS", "GOWORK", "GOOS", "GOARCH", "GOEXPERIMENT", "GO111MODULE", "CGO_ENABLED":
		default:
			kept = append(kept, kv)
		}
	}
	return append(kept, "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS="+buildFlags)
}

// lastLine of a build's output that says what went wrong.
func lastLine(path string) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(string(raw), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		line := strings.TrimSpace(lines[i])
		switch {
		case line == "", line == "too many errors", strings.HasSuffix(line, ": too many errors"),
			strings.HasPrefix(line, "note: "), strings.HasPrefix(line, "exit status "):
		default:
			return line
		}
	}
	return ""
}

func since(start time.Time) time.Duration {
	d := time.Since(start)
	if d < 10*time.Second {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Second)
}
