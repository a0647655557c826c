// Package platform is one version of the platform: it reads a tree in Cozystack's layout, packs and publishes its
// charts, and installs or upgrades the platform chart with its migrations. The bundled fixture and a real checkout go
// through the same code; what differs between them is a Profile.
package platform

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// Options change how a tree is loaded.
type Options struct {
	// Profile is a profile file; empty chooses among the bundled ones by the tree.
	Profile string
	// Overlay lists unified diffs (-p1, relative to the tree) that are applied to a copy of the tree, in order.
	Overlay []string
}

// Version is one loaded version of the platform. Everything but CRDs and manifests is read by Load: a checkout that
// changes later does not change it. It is read-only.
type Version struct {
	// Spec is what was asked for, "dir" or "dir@ref"; Commit is the ref's commit, else "".
	Spec, Commit string
	// Tree is the absolute path of the tree that is read.
	Tree string
	// Profile is the one that the tree was read with.
	Profile *Profile
	// Target is values.migrations.targetVersion of the platform chart.
	Target int
	// MigrationImage is values.migrations.image, "" when the chart has none.
	MigrationImage string
	// GoldenImages is how this version offers golden images, nil when it does not.
	GoldenImages *GoldenImages
	// Charts are what is published, in the order of the PackageSource files.
	Charts []Chart
	// Digest is sha256:<hex> of everything that the version puts on a cluster; a key for snapshots.
	Digest string

	chart  *chart.Chart // the platform chart
	staged map[string]*stage
}

// Env is what Install and Upgrade act on.
type Env struct {
	// Config reaches the API server as an administrator; it is used to make the operator's identity, nothing else.
	Config *rest.Config
	// Programs is the directory of kubectl and the like, searched before PATH.
	Programs string
	// Processes is the run; its folder holds the pods' logs.
	Processes *process.Run
	// Charts serves the artifacts.
	Charts *ArtifactServer
	// Log tells progress; nil is silent.
	Log func(format string, args ...any)
	// ArtifactsDir gets charts/ (packed charts, the platform chart's rendered manifest) and logs/; "" keeps nothing.
	ArtifactsDir string
	// Migrated is told when the platform chart's hook has ended, however it went, and before the new charts come; may be nil.
	Migrated func() error
	// PublishFirst publishes the new charts before the hook instead of after it: the mistake of defect 39.
	PublishFirst bool
	// RealPods says that pods of Jobs run on a node that is no stand-in, which has their logs.
	RealPods bool
	// Outlived says that the cluster stays when the run ends: objects that were there before are left as they are, and what users make
	// meanwhile does not get our default StorageClass where they have one.
	Outlived bool
	// HookTimeout bounds the platform chart's hooks; 0 means 10 minutes.
	HookTimeout time.Duration
}

// Load reads the platform version of a spec: "dir", a tree in Cozystack's layout, or "dir@ref", that tree at a git ref.
// scratch is a directory of the run for what has to be unpacked or staged; it must outlive the version. The user's
// checkout is only read. Every error is one line that names the spec.
func Load(ctx context.Context, spec, scratch string, options ...Options) (*Version, error) {
	var o Options
	if len(options) > 0 {
		o = options[0]
	}
	scratch, err := filepath.Abs(scratch)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, err
	}
	tree, commit, err := checkout(ctx, spec, scratch, o.Overlay)
	if err != nil {
		return nil, err
	}
	v := &Version{Spec: spec, Commit: commit, Tree: tree}
	if err := v.read(scratch, o.Profile); err != nil {
		return nil, fmt.Errorf("platform %q: %w", spec, err)
	}
	return v, nil
}

func (v *Version) read(scratch, profileFile string) error {
	if !isDir(filepath.Join(v.Tree, "packages", "core", "platform")) {
		return fmt.Errorf("no packages/core/platform in it, so it is no platform tree")
	}
	var err error
	if v.Profile, err = selectProfile(v.Tree, profileFile); err != nil {
		return err
	}
	v.GoldenImages = v.Profile.golden(v.Tree)
	content, err := readDir(v.Tree, filepath.Join(v.Tree, filepath.FromSlash(v.Profile.PlatformChart)))
	if err != nil {
		return err
	}
	data, err := archiveChart("platform", content)
	if err != nil {
		return err
	}
	if v.chart, err = loader.LoadArchive(bytes.NewReader(data)); err != nil {
		return fmt.Errorf("%s: %s", v.Profile.PlatformChart, oneLine(err.Error()))
	}
	values, err := chartutil.CoalesceValues(v.chart, v.Profile.PlatformValues)
	if err != nil {
		return fmt.Errorf("%s: %s", v.Profile.PlatformChart, oneLine(err.Error()))
	}
	if v.Target, v.MigrationImage, err = migrationValues(values); err != nil {
		return fmt.Errorf("%s: %w", v.Profile.PlatformChart, err)
	}
	if v.Charts, err = readCharts(v.Tree, v.Profile); err != nil {
		return err
	}
	if v.staged, err = stageImages(v.Tree, scratch, v.Profile); err != nil {
		return err
	}
	return v.digest(data)
}

// digest hashes what the version puts on a cluster: the platform chart (migrations included, they lie in it), the
// published charts, the profile, CRDs and manifests.
func (v *Version) digest(platformChart []byte) error {
	h := sha256.New()
	h.Write(platformChart)
	for _, c := range v.Charts {
		fmt.Fprintln(h, c.Artifact, c.Digest)
	}
	profile, err := yaml.Marshal(v.Profile)
	if err != nil {
		return err
	}
	h.Write(profile)
	for _, pattern := range append(append([]string{}, v.Profile.CRDs.Files...), v.Profile.Manifests...) {
		names, err := files(v.Tree, pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			h.Write(data)
		}
	}
	v.Digest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	return nil
}

// Revision is the identity of one published chart.
type Revision struct {
	Revision string // ExternalArtifact's status.artifact.revision
	Digest   string // sha256:<hex> of the chart's archive
}

// ChartRevisions returns the revision of each ExternalArtifact by name: what every HelmRelease must have reached once
// the version has converged.
func (v *Version) ChartRevisions() map[string]Revision {
	out := make(map[string]Revision, len(v.Charts))
	for _, c := range v.Charts {
		out[c.Artifact] = Revision{Revision: c.Revision, Digest: c.Digest}
	}
	return out
}

func (e *Env) logf(format string, args ...any) {
	if e.Log != nil {
		e.Log(format, args...)
	}
}

func (e *Env) hookTimeout() time.Duration {
	if e.HookTimeout > 0 {
		return e.HookTimeout
	}
	return 10 * time.Minute
}
