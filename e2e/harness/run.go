package harness

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	"sigs.k8s.io/e2e-framework/pkg/env"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
	"sigs.k8s.io/e2e-framework/pkg/types"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/components"
	"cozystack.io/upgrade-e2e/e2e/history"
	"cozystack.io/upgrade-e2e/e2e/nodeimage"
	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/simulate"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Exit statuses of a run and of the command behind make.
const (
	ExitPass         = 0
	ExitFail         = 1
	ExitUsage        = 2
	ExitInconclusive = 3
)

// A Suite is a family about to run; its package's TestMain and Test function share it.
type Suite struct {
	family Family
	env    env.Environment
	run    *run
}

// New prepares a family; nothing starts before Main.
func New(f Family) *Suite { return &Suite{family: f} }

// Main is the package's TestMain: it runs the upgrade, lets Test judge it, and returns the exit status.
func (s *Suite) Main(m *testing.M) int {
	process.Main()
	cfg, err := envconf.NewFromFlags()
	if err != nil {
		return usage(err)
	}
	selected, err := s.family.selected(cfg)
	if err != nil {
		return usage(err)
	}
	o, err := FromEnvironment(s.family.Name)
	if err != nil {
		return usage(err)
	}
	programs, err := cluster.FindPrograms(o.Root)
	if err != nil {
		fmt.Printf("skipped: %v\n", err)
		return ExitPass
	}
	if cfg.DryRunMode() {
		s.env = env.NewWithConfig(cfg)
		return m.Run()
	}
	node, err := checkProvider(context.Background(), o)
	if err != nil {
		return usage(err)
	}
	if err := checkDefaultClass(context.Background(), o, s.family); err != nil {
		return usage(err)
	}
	signalled, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, breakOff := context.WithCancelCause(signalled)
	defer breakOff(nil)
	if s.env, err = env.NewWithContext(ctx, cfg); err != nil {
		return usage(err)
	}
	s.run = &run{options: o, family: s.family, scenarios: selected, programs: programs, node: node, breakOff: breakOff,
		progress: newProgress(os.Stdout), judged: map[string]report.Scenario{}}
	r := s.run
	s.env.Setup(
		r.step("run folder", &r.seconds.Boot, r.open),
		r.step("platform versions", &r.seconds.Boot, r.load),
		r.step("snapshot", &r.seconds.Boot, r.restore),
		r.step("cluster", &r.seconds.Boot, r.boot),
		r.step("components", &r.seconds.Boot, r.install),
		r.step("old platform", &r.seconds.Install, r.oldPlatform),
		r.step("tenants", &r.seconds.Populate, r.populate),
		r.step("keep a snapshot", &r.seconds.Populate, r.keepSnapshot),
		r.step("baseline", &r.seconds.Populate, r.baseline),
		r.step("upgrade", &r.seconds.Upgrade, r.upgrade),
		r.step("settle", &r.seconds.Settle, r.settle),
		r.step("acts", &r.seconds.Settle, r.acts),
		r.step("close the record", &r.seconds.Judge, r.close),
	)
	s.env.Finish(r.finish)
	code := s.env.Run(m)
	return r.exit(code)
}

// Test judges each selected scenario over the closed record.
func (s *Suite) Test(t *testing.T) {
	var all []types.Feature
	for _, sc := range s.family.Scenarios {
		f := features.New(sc.Tag)
		for key, values := range sc.Labels(s.family.Name) {
			for _, value := range values {
				f.WithLabel(key, value)
			}
		}
		var target int
		var tolerated []string
		if s.run != nil { // a dry run has no platform
			target, tolerated = s.run.new.Target, s.run.new.Profile.MayBeNotReady
		}
		for _, check := range s.family.Checks(sc, target, tolerated) {
			f.Assess(check.Name, func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
				if message := s.run.judge(sc, check); message != "" {
					t.Error(message)
				}
				return ctx
			})
		}
		all = append(all, f.Feature())
	}
	s.env.Test(t, all...)
}

// run is the state of one run; each step fills in what the next ones need.
type run struct {
	options   Options
	family    Family
	scenarios []Scenario
	programs  cluster.Programs
	node      *nodeimage.Image // nil: the provider has no nodes
	progress  *progress
	begun     time.Time
	seconds   report.Seconds
	broken    string // phase and error that ended the run before it could be judged
	breakOff  context.CancelCauseFunc
	snapshot  *snapshot // nil: none is used or made
	restored  bool      // the cluster starts from snapshot

	processes *process.Run
	old, new  *platform.Version
	cluster   cluster.Provider
	installed *components.Installed
	env       *platform.Env
	recorder  *history.Recorder
	history   *history.History
	judged    map[string]report.Scenario // by tag
}

// step wraps one step of the run: a line before and after, its seconds on the phase's account, its error as the reason
// why the run can't be judged.
func (r *run) step(name string, seconds *float64, do func(context.Context) error) env.Func {
	return func(ctx context.Context, _ *envconf.Config) (context.Context, error) {
		if r.begun.IsZero() {
			r.begun = time.Now()
		}
		begin := time.Now()
		r.progress.Printf("%s …", name)
		err := do(ctx)
		*seconds += time.Since(begin).Seconds()
		if err != nil {
			if cause := context.Cause(ctx); cause == context.Canceled {
				err = errors.New("interrupted")
			} else if cause != nil {
				err = cause
			}
			r.broken = fmt.Sprintf("%s: %v", name, err)
			return ctx, err
		}
		r.progress.Printf("%s done in %.1f s", name, time.Since(begin).Seconds())
		return ctx, nil
	}
}

// open takes the run folder and ends what killed runs beside it have left.
func (r *run) open(ctx context.Context) error {
	swept, err := process.Sweep(filepath.Dir(r.options.Dir))
	if err != nil {
		return err
	}
	if r.node != nil {
		clusters, err := cluster.SweepKind(ctx, false)
		if err != nil {
			return err
		}
		swept = append(swept, clusters...)
	}
	for _, line := range swept {
		r.progress.Printf("  %s", line)
	}
	if err := spendMemory(); err != nil {
		return err
	}
	if r.processes, err = process.Open(r.options.Dir); err != nil {
		return err
	}
	return r.ownLog()
}

// ownLog turns what client-go says in this process, the recorder's and the stand-ins' clients among it, from the screen to a log.
func (r *run) ownLog() error {
	log, err := os.OpenFile(filepath.Join(r.options.Dir, "logs", "client-go.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	r.processes.AtClose(func() error {
		klog.Flush()
		klog.SetOutput(io.Discard)
		return log.Close()
	})
	klog.LogToStderr(false)
	klog.SetOutput(log)
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	return flags.Set("stderrthreshold", "FATAL") // else errors go to the screen as well
}

// spendMemory lets the programs of the run collect garbage less often, unless somebody has tuned them: on two cores the
// API server spent a quarter of its time on that. The limit is above what it takes in a run of the largest family: at its limit a
// program does nothing but collect.
func spendMemory() error {
	for name, value := range map[string]string{"GOGC": "300", "GOMEMLIMIT": "3GiB"} {
		if os.Getenv(name) != "" {
			continue
		}
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) load(ctx context.Context) error {
	var err error
	if r.old, err = r.version(ctx, "old", r.options.Old, r.options.OldOverlay); err != nil {
		return err
	}
	if r.new, err = r.version(ctx, "new", r.options.New, r.options.NewOverlay); err != nil {
		return err
	}
	return platform.CheckUpgrade(r.old, r.new, r.programs.Dir)
}

func (r *run) version(ctx context.Context, name, spec string, overlay []string) (*platform.Version, error) {
	return platform.Load(ctx, spec, filepath.Join(r.options.Dir, "state", name), platform.Options{Overlay: overlay})
}

func (r *run) boot(ctx context.Context) error {
	r.cluster = r.provider()
	if _, err := r.cluster.SetDefaults().Create(ctx); err != nil {
		return err
	}
	r.watchNodes(ctx)
	charts, err := platform.ServeArtifacts(ctx, r.cluster.Expose)
	if err != nil {
		return err
	}
	r.env = &platform.Env{
		Config: r.cluster.KubernetesRestConfig(), Programs: r.programs.Dir, Processes: r.processes, Charts: charts,
		Outlived: r.options.leaver() != "", PublishFirst: r.options.PublishFirst, Migrated: func() error { return r.recorder.Mark(history.PhaseMigrated) },
		ArtifactsDir: r.options.Dir, Log: func(format string, a ...any) { r.progress.Printf("  "+format, a...) },
	}
	if r.restored {
		// Before helm-controller starts: it would try for minutes to fetch from the address of the run before.
		return platform.Publish(ctx, r.env, r.old)
	}
	return r.loadHooks(ctx)
}

func (r *run) install(ctx context.Context) error {
	var err error
	r.installed, err = components.Install(ctx, r.cluster, r.programs, components.Options{
		HelmController: engines[r.options.Flux],
		Entrypoint:     platform.Entrypoints(r.new, r.old),
		Restored:       r.restored,
		Download:       func(url string) simulate.Download { return download(r.scenarios, url) },
		Progress:       func(format string, a ...any) { r.progress.Printf("  "+format, a...) },
	})
	if err != nil {
		return err
	}
	report.Table(os.Stdout, r.fidelity())
	// Without its stand-ins a cluster waits for ever.
	go func() {
		if err := r.installed.Simulation.Wait(); err != nil && ctx.Err() == nil {
			r.breakOff(fmt.Errorf("the stand-ins ended: %w", err))
		}
	}()
	return nil
}

func (r *run) fidelity() []report.Fidelity {
	if r.installed == nil {
		return nil
	}
	var out []report.Fidelity
	for _, f := range r.installed.Fidelity {
		out = append(out, report.Fidelity(f))
	}
	return out
}

func (r *run) oldPlatform(ctx context.Context) error {
	if r.restored {
		return nil
	}
	return platform.Install(ctx, r.env, r.old)
}

// baseline starts the record: from here on every change and every write is in it.
func (r *run) baseline(ctx context.Context) error {
	var err error
	r.recorder, err = history.Start(ctx, history.RecorderOptions{
		Config: r.cluster.KubernetesRestConfig(), AuditLog: r.cluster.AuditLog(),
		Out: filepath.Join(r.options.Dir, "history.jsonl"), Others: others(r.cluster),
		Header: history.Header{RunID: filepath.Base(r.options.Dir), Family: r.family.Name, Provider: r.options.Provider,
			Seed: r.options.Seed, Old: r.options.Old, New: r.options.New, Target: r.new.Target,
			Tolerated: r.new.Profile.MayBeNotReady},
	})
	return err
}

// upgrade runs the platform's own upgrade. One that is refused is a finding, not a broken run: the checks tell what it
// did to the fleet.
func (r *run) upgrade(ctx context.Context) error {
	r.recorder.Mark(history.PhaseUpgrade)
	outcome, err := platform.Upgrade(ctx, r.env, r.new)
	if err != nil {
		return err
	}
	r.log("migration", outcome.HookLog()...)
	if outcome.Failure != "" {
		r.log("platform", outcome.Failure)
		r.progress.Printf("  the platform's upgrade failed: %s", outcome.Failure)
	}
	return nil
}

func (r *run) log(source string, lines ...string) {
	for _, line := range lines {
		r.recorder.Log(source, line)
	}
}

// quiet is longer than the shortest requeue of the controllers: CAPK and helm-controller look again after 5 s when they
// miss something.
const (
	quiet       = 6 * time.Second
	settleBound = 8 * time.Minute // a fleet of real charts on a busy machine takes minutes
)

func (r *run) settle(ctx context.Context) error {
	r.recorder.Mark("settle")
	return r.comeToRest(ctx)
}

// rest is what "at rest" means here.
func (r *run) rest(quiet time.Duration) (history.SettleOptions, error) {
	client, err := r.dynamic()
	if err != nil {
		return history.SettleOptions{}, err
	}
	rest := history.NewRest(client, r.mayFail())
	said := time.Duration(0)
	return history.SettleOptions{
		Recorder: r.recorder, Converged: rest.Waiting, Busy: r.installed.Busy,
		Ignore: rest.Ignore, Quiet: quiet, Bound: settleBound,
		Progress: func(waited time.Duration, waiting []string) {
			if len(waiting) > 0 && waited-said >= every {
				said = waited
				r.progress.Printf("  waiting %.0f s for rest: %s", waited.Seconds(), summary(waiting, nil))
			}
		},
	}, nil
}

func (r *run) comeToRest(ctx context.Context) error {
	options, err := r.rest(quiet)
	if err != nil {
		return err
	}
	settled, err := history.Settle(ctx, options)
	if err == nil && !settled.OK {
		r.progress.Printf("  not settled after %.0f s: %s", settled.Seconds, summary(settled.Waiting, nil))
	}
	return err
}

// mayFail joins what the profile and the selected scenarios excuse.
func (r *run) mayFail() history.MayFail {
	var failures []Failure
	for _, s := range r.scenarios {
		failures = append(failures, s.MayFail...)
	}
	return tolerating(r.new.Profile.MayBeNotReady, mayFail(failures))
}

// acts does what the selected scenarios ask for after the upgrade, each act once: everybody's first acts, then everybody's
// second ones, and so on. Those of one scenario build on one another, so that the cluster settles between the rounds; those
// of different ones are different tenants' matters, and are waited for together: each settling costs at least the quiet window.
func (r *run) acts(ctx context.Context) error {
	for _, acts := range rounds(r.scenarios) {
		var brings []*tenant.Pool
		for _, act := range acts {
			r.progress.Printf("  %s", act.Name)
			r.recorder.Mark(act.Name)
			if err := act.Do(ctx, r.upgraded()); err != nil {
				return fmt.Errorf("%s: %w", act.Name, err)
			}
			brings = append(brings, act.Brings...)
		}
		if err := r.done(ctx, acts); err != nil {
			return err
		}
		if err := r.brought(ctx, brings); err != nil {
			return err
		}
		if err := r.comeToRest(ctx); err != nil {
			return err
		}
	}
	return nil
}

// done waits for what acts bring about, all at once: each has a bound of its own, and a bad upgrade reaches them all.
func (r *run) done(ctx context.Context, acts []Act) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, act := range acts {
		if act.Until == nil {
			continue
		}
		g.Go(func() error {
			if err := act.Until(gctx, r.upgraded()); err != nil {
				return fmt.Errorf("%s: %w", act.Name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (r *run) upgraded() Upgraded { return Upgraded{Env: r.env, Old: r.old, New: r.new, Log: r.log} }

// rounds are the acts of scenarios, each act once, by its place in its scenario; then the last ones, likewise.
func rounds(scenarios []Scenario) [][]Act {
	var out [][]Act
	done := map[string]bool{}
	for _, last := range []bool{false, true} {
		first := len(out)
		for _, s := range scenarios {
			at := first
			for _, act := range s.Acts {
				if act.Last != last {
					continue
				}
				if !done[act.Name] {
					done[act.Name] = true
					for len(out) <= at {
						out = append(out, nil)
					}
					out[at] = append(out[at], act)
				}
				at++
			}
		}
	}
	return slices.DeleteFunc(out, func(acts []Act) bool { return len(acts) == 0 })
}

// actBound is how long machines that an act makes may take: no controller is hurried any more, and CAPK looks every 20 s.
// Where nothing has moved for longer than that, none will come.
const (
	actBound = 3 * time.Minute
	inVain   = 30 * time.Second
)

// brought waits for the machines that an act makes. Without it the cluster would look at rest between two looks of CAPK.
func (r *run) brought(ctx context.Context, pools []*tenant.Pool) error {
	client, err := r.dynamic()
	if err != nil {
		return err
	}
	options, err := r.rest(inVain)
	if err != nil {
		return err
	}
	begun := time.Now()
	err = r.progress.until(ctx, "the new machines to run", actBound, func(ctx context.Context) ([]string, error) {
		missing, err := notRunning(ctx, client, pools)
		if _, at := r.recorder.LastWrite(options.Ignore); err == nil && len(missing) > 0 && time.Since(at) > inVain && len(options.Moving(ctx, begun)) == 0 {
			err = hopeless{fmt.Sprintf("at rest for %s without the new machines: %s", inVain, summary(missing, nil))}
		}
		return missing, err
	})
	if err != nil && ctx.Err() == nil {
		r.progress.Printf("  %v", err)
		return nil
	}
	return err
}

// close ends the record and reads it back: what is judged is what the file holds.
func (r *run) close(ctx context.Context) error {
	if err := r.recorder.Stop(ctx); err != nil {
		return err
	}
	var err error
	r.history, err = history.Read(filepath.Join(r.options.Dir, "history.jsonl"))
	return err
}

// judge runs one check and notes its finding; the text is empty when it passed.
func (r *run) judge(s Scenario, check verify.Check) string {
	begin := time.Now()
	finding := judge(check, r.history)
	r.seconds.Judge += time.Since(begin).Seconds()
	noted := r.judged[s.Tag]
	noted.Family, noted.Tag = r.family.Name, s.Tag
	noted.Checks = append(noted.Checks, finding)
	r.judged[s.Tag] = noted
	if finding.Verdict == verify.Passed {
		return ""
	}
	return fmt.Sprintf("%s (run %s, seed %d)", finding, filepath.Base(r.options.Dir), r.options.Seed)
}

// Judge runs all checks of a scenario over a record.
func (f Family) Judge(s Scenario, h *history.History) report.Scenario {
	out := report.Scenario{Family: f.Name, Tag: s.Tag}
	for _, check := range f.Checks(s, h.Header.Target, h.Header.Tolerated) {
		out.Checks = append(out.Checks, judge(check, h))
	}
	return out
}

func judge(check verify.Check, h *history.History) report.Check {
	result := check.Judge(h)
	return report.Check{Name: check.Name, Verdict: result.Verdict, Reason: result.Reason,
		Evidence: append([]verify.Evidence{}, result.Evidence...)}
}

// finish writes the report and ends the cluster, whatever happened before.
func (r *run) finish(ctx context.Context, _ *envconf.Config) (context.Context, error) {
	result := r.result()
	err := os.MkdirAll(r.options.Dir, 0o700)
	if err == nil {
		err = report.New(result).Write(r.options.Dir)
	}
	report.New(result).Text(os.Stdout)
	if r.options.Keep && r.cluster != nil && ctx.Err() == nil {
		fmt.Printf("\nkept: export KUBECONFIG=%s\nCtrl-C ends the cluster\n", r.cluster.GetKubeconfig())
		<-ctx.Done()
	}
	// The interrupt that brought us here must not keep us from cleaning up.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if r.recorder != nil && r.history == nil {
		err = errors.Join(err, r.recorder.Stop(end))
	}
	// The stand-ins go before their API server, or they fill the screen with its absence.
	r.breakOff(nil)
	if r.installed != nil {
		err = errors.Join(err, r.installed.Simulation.Wait())
	}
	if r.cluster != nil {
		r.exportNodes(end, result.Verdict)
		err = errors.Join(err, r.cluster.Destroy(end))
	}
	if r.processes != nil {
		err = errors.Join(err, r.processes.Close())
	}
	if left, readErr := os.ReadFile(filepath.Join(r.options.Dir, "logs", cluster.ExistingLog)); readErr == nil {
		fmt.Printf("%s", left)
	}
	if err != nil {
		fmt.Printf("clean-up: %v\n", err)
	}
	return ctx, err
}

func (r *run) result() report.Run {
	r.seconds.Total = time.Since(r.begun).Seconds()
	out := report.Run{ID: filepath.Base(r.options.Dir), Family: r.family.Name, Provider: r.options.Provider,
		Seed: r.options.Seed, Restored: r.restored, Old: r.options.Old, New: r.options.New, Reason: r.broken, Seconds: r.seconds,
		Fidelity: r.fidelity(), Scenarios: []report.Scenario{}}
	for _, s := range r.scenarios {
		if judged, ok := r.judged[s.Tag]; ok {
			out.Scenarios = append(out.Scenarios, judged)
		}
	}
	out.Judge()
	return out
}

// exit turns the verdict into an exit status; code is what the test binary would return.
func (r *run) exit(code int) int {
	verdict := r.result().Verdict
	if code != 0 || verdict != verify.Passed {
		switch verdict {
		case verify.Failed:
			return ExitFail
		case verify.Inconclusive:
			return ExitInconclusive
		}
		return ExitFail // a panic or a framework failure after every check passed
	}
	return ExitPass
}

func usage(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return ExitUsage
}
