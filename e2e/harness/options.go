package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Environment variables that choose what is run. `make e2e-upgrade` sets them; a plain `go test` may too.
const (
	EnvOld        = "UPGRADE_E2E_OLD"       // platform tree, dir or dir@git-ref
	EnvNew        = "UPGRADE_E2E_NEW"       // the same, to upgrade to
	EnvProvider   = "UPGRADE_E2E_PROVIDER"  // embedded, kind or existing
	EnvAuditLog   = "UPGRADE_E2E_AUDIT_LOG" // of the existing cluster's API server, a file
	EnvFlux       = "UPGRADE_E2E_FLUX"      // helm-controller: 1.6 (Helm 4) or 1.4 (Helm 3)
	EnvKeep       = "UPGRADE_E2E_KEEP"      // 1: leave the cluster running until interrupted
	EnvDir        = "UPGRADE_E2E_DIR"       // run folder; made when it is not there
	EnvSeed       = "UPGRADE_E2E_SEED"      // order in which the fleet is made
	EnvNodes      = "UPGRADE_E2E_NODES"     // of a kind cluster: 1, or the control plane and so many workers less
	EnvReuse      = "UPGRADE_E2E_REUSE"     // name of a kind cluster that stays for the next run
	EnvKubeconfig = "KUBECONFIG"            // of the existing cluster
	EnvSnapshots  = "UPGRADE_E2E_SNAPSHOTS" // 0: neither start from a snapshot nor keep one

	// Unified diffs that are applied to a copy of the trees, several as in PATH: how a defect is planted.
	EnvOldOverlay = "UPGRADE_E2E_OLD_OVERLAY"
	EnvNewOverlay = "UPGRADE_E2E_NEW_OVERLAY"
	// 1: publish the new charts before the migration has run, a mistake of whoever upgrades.
	EnvPublishFirst = "UPGRADE_E2E_PUBLISH_FIRST"
)

// Options says what is run; FromEnvironment reads it.
type Options struct {
	Root     string // of this project: bin, fixtures and _artifacts are below it
	Dir      string // run folder
	Old, New string
	// OldOverlay and NewOverlay are diffs for copies of the trees, in their order.
	OldOverlay, NewOverlay []string
	PublishFirst           bool
	Provider               string
	Nodes                  int    // of provider kind
	Reuse                  string // of provider kind; "" for a cluster that ends with the run
	Kubeconfig, AuditLog   string // of provider existing
	Flux                   string
	Keep                   bool
	Seed                   int64
	SeedGiven              bool // asked for, so that the fleet is made in this order
	Snapshots              bool // start from a snapshot where there is one, and keep one
}

// UsageError is bad input: one line, exit status 2.
type UsageError struct{ Line string }

func (e UsageError) Error() string { return e.Line }

func usagef(format string, args ...any) error { return UsageError{fmt.Sprintf(format, args...)} }

// FromEnvironment reads the options of a run of family, with the bundled platform as default.
func FromEnvironment(family string) (Options, error) {
	root, err := Root()
	if err != nil {
		return Options{}, err
	}
	o := Options{
		Root:         root,
		Old:          or(os.Getenv(EnvOld), filepath.Join(root, "fixtures", "platform", "old")),
		New:          or(os.Getenv(EnvNew), filepath.Join(root, "fixtures", "platform", "new")),
		OldOverlay:   filepath.SplitList(os.Getenv(EnvOldOverlay)),
		NewOverlay:   filepath.SplitList(os.Getenv(EnvNewOverlay)),
		PublishFirst: os.Getenv(EnvPublishFirst) == "1",
		Provider:     or(os.Getenv(EnvProvider), "embedded"),
		Flux:         or(os.Getenv(EnvFlux), "1.6"),
		Keep:         os.Getenv(EnvKeep) == "1",
		Snapshots:    os.Getenv(EnvSnapshots) != "0",
		Seed:         time.Now().UnixNano() % 1e6,
	}
	if s := os.Getenv(EnvSeed); s != "" {
		o.SeedGiven = true
		if o.Seed, err = strconv.ParseInt(s, 10, 64); err != nil {
			return Options{}, usagef("SEED=%s is not a whole number", s)
		}
	}
	if !slices.Contains(providers, o.Provider) {
		return Options{}, usagef("PROVIDER=%s is not known; there are %s", o.Provider, strings.Join(providers, ", "))
	}
	if o.Nodes, err = strconv.Atoi(or(os.Getenv(EnvNodes), "1")); err != nil || o.Nodes < 1 || o.Nodes > 9 {
		return Options{}, usagef("NODES=%s is not a number from 1 to 9", os.Getenv(EnvNodes))
	}
	o.Reuse = os.Getenv(EnvReuse)
	if !regexp.MustCompile(`^([a-z0-9][a-z0-9-]{0,19})?$`).MatchString(o.Reuse) {
		return Options{}, usagef("REUSE=%s is no name; take up to 20 of a-z, 0-9 and -", o.Reuse)
	}
	if o.Provider != "kind" && (o.Nodes != 1 || o.Reuse != "") {
		return Options{}, usagef("NODES= and REUSE= are for PROVIDER=kind, not for %s", o.Provider)
	}
	if o.Provider == "existing" {
		o.Kubeconfig, o.AuditLog = os.Getenv(EnvKubeconfig), os.Getenv(EnvAuditLog)
		if o.Kubeconfig == "" || o.AuditLog == "" {
			return Options{}, usagef("PROVIDER=existing needs KUBECONFIG= of the cluster and AUDIT_LOG=, the file that its API server writes with our policy: without it nobody's writes are known, and nothing can be judged")
		}
	}
	if _, ok := engines[o.Flux]; !ok {
		return Options{}, usagef("FLUX=%s is not known; FLUX=1.6 (Helm 4) or FLUX=1.4 (Helm 3)", o.Flux)
	}
	o.Dir = or(os.Getenv(EnvDir), filepath.Join(root, "_artifacts", RunID(family)))
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return Options{}, fmt.Errorf("run folder: %w", err)
	}
	return o, nil
}

// engines maps FLUX to the program that is the helm-controller of that version.
var engines = map[string]string{"1.6": "helm-controller", "1.4": "helm-controller-helm3"}

// RunID names a run so that runs sort by time and two at once differ.
func RunID(family string) string {
	return fmt.Sprintf("%s-%s-%d", time.Now().UTC().Format("20060102-150405"), family, os.Getpid())
}

// Root finds the project's root, the folder with its go.mod, from the current folder upwards.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the project's root: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "fixtures", "platform")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", usagef("no fixtures/platform above the current folder; run it inside the project")
		}
		dir = up
	}
}

func or(value, otherwise string) string {
	if value != "" {
		return value
	}
	return otherwise
}
