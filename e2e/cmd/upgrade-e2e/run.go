package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/nodeimage"
	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/programs"
	"cozystack.io/upgrade-e2e/e2e/report"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// runFlags are what `run` and, in part, `defects` take.
type runFlags struct {
	family     string
	tags, skip []string
	provider   string
	nodes      string
	reuse      string
	auditLog   string
	old, new   string
	flux       string
	artifacts  string
	keep       bool
	seed       string
	snapshots  bool
	bundle     string
}

func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{Use: "run", Short: "Run one upgrade per family, record it and judge it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			chosen, err := choose(f.family, f.tags, f.skip)
			if err != nil {
				return err
			}
			root, artifacts, err := f.prepare(cmd.Context(), cmd.OutOrStdout())
			if err != nil {
				return err
			}
			if f.keep && len(chosen) > 1 {
				return harness.UsageError{Line: "KEEP=1 keeps one cluster: choose the tags of one family"}
			}
			dir := filepath.Join(artifacts, harness.RunID(chosen[0].Name))
			doc, err := f.runAll(cmd.Context(), root, dir, chosen, cmd.OutOrStdout())
			if err != nil {
				return err
			}
			if err := latest(artifacts, dir); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "artifacts: %s\n", dir)
			return exit(doc.Verdict)
		}}
	f.add(cmd.Flags())
	cmd.Flags().BoolVar(&f.keep, "keep", false, "leave the cluster running until Ctrl-C")
	return cmd
}

// choice declares what says which scenarios are meant, and where artifacts go.
func (f *runFlags) choice(flags *pflag.FlagSet) {
	flags.StringVar(&f.family, "family", "", "family (all)")
	flags.StringSliceVar(&f.tags, "tags", nil, "scenarios (all)")
	flags.StringSliceVar(&f.skip, "skip", nil, "scenarios to leave out")
	flags.StringVar(&f.artifacts, "artifacts", "", "folder that gets a folder per call (_artifacts)")
}

// wanted tells whether a scenario of a chosen family is meant.
func (f runFlags) wanted(tag string) bool {
	return (len(f.tags) == 0 || slices.Contains(f.tags, tag)) && !slices.Contains(f.skip, tag)
}

// add declares what says which upgrade is run.
func (f *runFlags) add(flags *pflag.FlagSet) {
	f.choice(flags)
	flags.StringVar(&f.provider, "provider", "embedded", "cluster provider: embedded, kind, or existing, which KUBECONFIG names")
	flags.StringVar(&f.nodes, "nodes", "", "nodes of a kind cluster: 1 (default), or a control plane and workers")
	flags.StringVar(&f.reuse, "reuse", "", "name of a kind cluster that stays for the next run")
	flags.StringVar(&f.auditLog, "audit-log", "", "file that the existing cluster's API server writes its audit log to")
	flags.StringVar(&f.old, "old", "", "platform to upgrade from: dir or dir@git-ref (the bundled fixture)")
	flags.StringVar(&f.new, "new", "", "platform to upgrade to: dir or dir@git-ref (the bundled fixture)")
	flags.StringVar(&f.flux, "flux", "", "helm-controller: 1.6 with Helm 4 (default), or 1.4 with Helm 3")
	flags.StringVar(&f.seed, "seed", "", "order in which the fleet is made (random); with it no snapshot is used")
	flags.BoolVar(&f.snapshots, "snapshots", true, "start from the snapshot of an equal fleet, and keep one")
	flags.StringVar(&f.bundle, "bundle", "", "archive of `upgrade-e2e bundle` to take programs and node image from, where they are not built")
}

// folders are the project's root and the folder for artifacts, which is made.
func (f runFlags) folders() (root, artifacts string, err error) {
	if root, err = harness.Root(); err != nil {
		return "", "", err
	}
	if artifacts, err = filepath.Abs(cmp.Or(f.artifacts, filepath.Join(root, "_artifacts"))); err != nil {
		return "", "", err
	}
	if err := os.MkdirAll(artifacts, 0o755); err != nil {
		return "", "", harness.UsageError{Line: fmt.Sprintf("artifacts: %v", err)}
	}
	return root, artifacts, nil
}

// prepare checks what can be checked before anything starts, and builds what is missing.
func (f runFlags) prepare(ctx context.Context, out io.Writer) (root, artifacts string, err error) {
	if root, artifacts, err = f.folders(); err != nil {
		return "", "", err
	}
	if !f.snapshots {
		if err := os.Setenv(harness.EnvSnapshots, "0"); err != nil {
			return "", "", err
		}
	}
	if err := f.setEnvironment(); err != nil {
		return "", "", err
	}
	o, err := harness.FromEnvironment("check")
	if err != nil {
		return "", "", err
	}
	if f.bundle != "" {
		if err := nodeimage.Unbundle(ctx, root, f.bundle, o.Provider == "kind", out); err != nil {
			return "", "", err
		}
	}
	if err := harness.CheckProvider(ctx, o); err != nil {
		return "", "", err
	}
	scratch, err := os.MkdirTemp("", "upgrade-e2e-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(scratch)
	for side, spec := range map[string]string{"old": o.Old, "new": o.New} {
		if _, err := platform.Load(ctx, spec, filepath.Join(scratch, side)); err != nil {
			return "", "", harness.UsageError{Line: err.Error()}
		}
	}
	return root, artifacts, build(ctx, root, f.flux, out)
}

// setEnvironment hands the flags on to the runs. These have another current folder: paths become absolute.
func (f runFlags) setEnvironment() error {
	kubeconfigs := filepath.SplitList(os.Getenv(harness.EnvKubeconfig))
	paths := []*string{&f.auditLog, &f.old, &f.new} // of dir@ref, too
	for i := range kubeconfigs {
		paths = append(paths, &kubeconfigs[i])
	}
	for _, path := range paths {
		if *path == "" {
			continue
		}
		var err error
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	for name, value := range map[string]string{harness.EnvProvider: f.provider, harness.EnvNodes: f.nodes, harness.EnvReuse: f.reuse, harness.EnvFlux: f.flux, harness.EnvSeed: f.seed,
		harness.EnvAuditLog: f.auditLog, harness.EnvOld: f.old, harness.EnvNew: f.new, harness.EnvKubeconfig: strings.Join(kubeconfigs, string(filepath.ListSeparator))} {
		if value == "" {
			continue
		}
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

// build makes the programs that a run with this Flux needs.
func build(ctx context.Context, root, flux string, out io.Writer) error {
	var extra []string
	if flux == "1.4" {
		extra = append(extra, "helm-controller-helm3")
	}
	return programs.Build(ctx, root, out, extra...)
}

// runAll runs the families one after the other. One family's artifacts are dir's; several get a folder each, and dir
// gets the joined verdict.
func (f runFlags) runAll(ctx context.Context, root, dir string, chosen []harness.Family, out io.Writer) (report.Document, error) {
	var runs []report.Run
	for _, fam := range chosen {
		to := dir
		if len(chosen) > 1 {
			to = filepath.Join(dir, fam.Name)
		}
		if err := compile(ctx, root, fam); err != nil {
			return report.Document{}, err
		}
		doc, err := f.runFamily(ctx, root, to, fam, out)
		if err != nil {
			return report.Document{}, err
		}
		runs = append(runs, doc.Runs...)
	}
	doc := report.New(runs...)
	if len(chosen) == 1 {
		return doc, nil
	}
	doc.Text(out)
	return doc, doc.Write(dir)
}

// compile builds the test binary of one family.
func compile(ctx context.Context, root string, fam harness.Family) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary(root, fam), "./scenarios/"+fam.Name)
	cmd.Dir = root
	if output, err := cmd.CombinedOutput(); err != nil {
		return harness.UsageError{Line: fmt.Sprintf("build scenarios/%s: %v: %s", fam.Name, err, lastLine(output))}
	}
	return nil
}

func binary(root string, fam harness.Family) string {
	return filepath.Join(root, "bin", fam.Name+".test")
}

// runFamily runs the test binary of one family in a run folder, with more variables in its environment, and reads its verdict.
func (f runFlags) runFamily(ctx context.Context, root, dir string, fam harness.Family, out io.Writer, env ...string) (report.Document, error) {
	args := []string{"-test.timeout=0"}
	for _, tag := range f.tags {
		if fam.Has(tag) {
			args = append(args, "--labels=tag="+tag)
		}
	}
	for _, tag := range f.skip {
		if fam.Has(tag) {
			args = append(args, "--skip-labels=tag="+tag)
		}
	}
	test := exec.Command(binary(root, fam), args...)
	test.Dir = filepath.Join(root, "scenarios", fam.Name)
	test.Env = append(os.Environ(), harness.EnvDir+"="+dir)
	test.Env = append(test.Env, env...)
	if f.keep {
		test.Env = append(test.Env, harness.EnvKeep+"=1")
	}
	test.Stdout, test.Stderr = out, out
	// An interrupt goes on to the run, which cleans up and reports; only then do we leave.
	test.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := test.Start(); err != nil {
		return report.Document{}, fmt.Errorf("run scenarios/%s: %w", fam.Name, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = test.Process.Signal(syscall.SIGINT) })
	defer stop()
	err := test.Wait()
	doc, readErr := report.Read(dir)
	var failed *exec.ExitError
	switch {
	case readErr == nil && (err == nil || errors.As(err, &failed)):
		return doc, nil
	case errors.As(err, &failed) && failed.ExitCode() == harness.ExitUsage:
		return doc, verdictError(harness.ExitUsage)
	case err != nil:
		// Killed before it could report: what was recorded is in the run folder.
		broken := report.Run{ID: filepath.Base(dir), Family: fam.Name, Provider: f.provider, Verdict: verify.Inconclusive,
			Reason: fmt.Sprintf("the run ended without a verdict: %v", err), Scenarios: []report.Scenario{}}
		doc = report.New(broken)
		return doc, errors.Join(os.MkdirAll(dir, 0o700), doc.Write(dir))
	}
	return doc, readErr
}

// latest points artifacts/latest at a run folder.
func latest(artifacts, dir string) error {
	link := filepath.Join(artifacts, "latest")
	next := fmt.Sprintf("%s.%d.%d", link, os.Getpid(), time.Now().UnixNano())
	if err := os.Symlink(filepath.Base(dir), next); err != nil {
		return fmt.Errorf("link latest: %w", err)
	}
	return os.Rename(next, link)
}

func exit(v verify.Verdict) error {
	switch v {
	case verify.Passed:
		return nil
	case verify.Failed:
		return verdictError(harness.ExitFail)
	default:
		return verdictError(harness.ExitInconclusive)
	}
}

func lastLine(output []byte) string {
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	return lines[len(lines)-1]
}
