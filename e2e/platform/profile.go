package platform

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/fixtures/profiles"
)

// Profile says what of a platform tree is put on the cluster and what must surround it for the charts to run. The
// bundled fixture and a real checkout differ in their profile alone. Every path is relative to the tree's root and
// uses forward slashes; one that ends in "/" means every *.yaml file directly below it, "*" is a glob.
type Profile struct {
	// Name is what the report calls the profile.
	Name string `json:"name"`
	// Marker lists paths of which a tree must have all to be this profile's. The profile without a marker takes the
	// trees that no other one claims.
	Marker []string `json:"marker,omitempty"`
	// Namespaces are made before anything else; tenants make their own.
	Namespaces []string `json:"namespaces,omitempty"`
	// CRDs are installed before manifests, objects and the platform chart.
	CRDs CRDs `json:"crds,omitempty"`
	// Manifests are plain YAML files of the tree (no template actions), applied in this order.
	Manifests []string `json:"manifests,omitempty"`
	// Objects are applied after the manifests: what the platform looks up and the cluster does not have.
	Objects []map[string]any `json:"objects,omitempty"`
	// PlatformChart is the directory of the platform chart.
	PlatformChart string `json:"platformChart"`
	// PlatformValues are the values that the platform chart is installed and upgraded with.
	PlatformValues map[string]any `json:"platformValues,omitempty"`
	// Sources are the PackageSource files.
	Sources string `json:"sources"`
	// Publish picks what becomes an ExternalArtifact: "<package source>" for all its components or
	// "<package source>/<component>" for one; globs are allowed; empty means everything. An entry that matches nothing
	// in a tree is skipped, because old and new share a profile.
	Publish []string `json:"publish,omitempty"`
	// Values is the Secret that HelmReleases name in valuesFrom.
	Values Values `json:"values,omitempty"`
	// Images say how a container image runs on the host, first match wins.
	Images []Image `json:"images,omitempty"`
	// MayBeNotReady are globs over "namespace/name" of HelmReleases that need not become Ready.
	MayBeNotReady []string `json:"mayBeNotReady,omitempty"`
	// GoldenImages says how versions offer golden images; the first one whose When is in a tree is the tree's.
	GoldenImages []GoldenImages `json:"goldenImages,omitempty"`
}

// GoldenImages says how a platform version offers images that workers' disks are cloned from, and how a pool asks for one.
type GoldenImages struct {
	// When is a path that a tree with this way has.
	When string `json:"when"`
	// Release is the name of the catalog's HelmRelease, Chart that of its ExternalArtifact.
	Release string `json:"release"`
	Chart   string `json:"chart"`
	// Value is the pool's value that asks for an image.
	Value string `json:"value"`
	// InCluster says that pools have no release of their own: a pool's values are nodeGroups.<pool> of its cluster's.
	InCluster bool `json:"inCluster,omitempty"`
}

// CRDs are the CustomResourceDefinitions that no component of the run installs.
type CRDs struct {
	// Files of the tree that hold nothing but CustomResourceDefinitions.
	Files []string `json:"files,omitempty"`
	// Permissive kinds are stored and read while their rules do not matter: their CRD keeps unknown fields. One that
	// the cluster already has from elsewhere is left alone.
	Permissive []PermissiveCRD `json:"permissive,omitempty"`
}

// PermissiveCRD describes one kind without a schema.
type PermissiveCRD struct {
	Group   string `json:"group"`
	Version string `json:"version"`
	Kind    string `json:"kind"`
	Plural  string `json:"plural"`
	// Scope is Namespaced or Cluster.
	Scope string `json:"scope"`
	// Status turns on the status subresource.
	Status bool `json:"status,omitempty"`
	// Labels of the CRD object, such as CAPI's contract labels.
	Labels map[string]string `json:"labels,omitempty"`
}

// Values describes the platform's values Secret; its key values.yaml holds {_cluster, _namespace}.
type Values struct {
	Secret  string         `json:"secret,omitempty"`
	Cluster map[string]any `json:"cluster,omitempty"`
	// Namespace may use ${tenant} in strings: the namespace's name.
	Namespace map[string]any `json:"namespace,omitempty"`
	// In lists the namespaces that Install puts the Secret into; tenants get theirs from whoever makes them.
	In []string `json:"in,omitempty"`
}

// Image says how containers of an image run as host processes.
type Image struct {
	// Image is a glob over the image reference; "*" also matches "/".
	Image string `json:"image"`
	// Files is what the tree puts into the image. It is copied to a directory of the run that plays the image's root,
	// and every path of At is rewritten in the copies. An entry without Files says that the image's programs are on the host
	// and that containers bring their own command.
	Files []ImageFile `json:"files,omitempty"`
	// Entrypoint is the image's; its first word is one of the copied files.
	Entrypoint []string `json:"entrypoint,omitempty"`
	// Shell is the host program that plays the image's /bin/sh; empty means the host's own sh.
	Shell string `json:"shell,omitempty"`
	// Programs that the image brings and a scan of its scripts does not find.
	Programs []string `json:"programs,omitempty"`
}

// ImageFile is one file or directory of an image.
type ImageFile struct {
	// From is its path in the tree.
	From string `json:"from"`
	// At is its absolute path in the image.
	At string `json:"at"`
}

// ReadProfile decodes and validates one profile. Unknown fields are errors. `name` is the file's name for messages.
func ReadProfile(name string, data []byte) (*Profile, error) {
	p := new(Profile)
	if err := yaml.UnmarshalStrict(data, p); err != nil {
		return nil, fmt.Errorf("profile %s: %s", name, oneLine(err.Error()))
	}
	if err := p.validate(); err != nil {
		return nil, fmt.Errorf("profile %s: %w", name, err)
	}
	return p, nil
}

// golden is the tree's way with golden images, nil when it has none.
func (p *Profile) golden(tree string) *GoldenImages {
	for i, g := range p.GoldenImages {
		if _, err := os.Stat(filepath.Join(tree, filepath.FromSlash(g.When))); err == nil {
			return &p.GoldenImages[i]
		}
	}
	return nil
}

// selectProfile reads the profile file when one is named, else finds the bundled profile whose marker the tree has.
func selectProfile(tree, file string) (*Profile, error) {
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("profile %s: %w", file, errors.Unwrap(err))
		}
		return ReadProfile(file, data)
	}
	names, err := fs.Glob(profiles.Files, "*.yaml")
	if err != nil {
		return nil, err
	}
	var fallback *Profile
	for _, name := range names {
		data, err := profiles.Files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		p, err := ReadProfile(name, data)
		if err != nil {
			return nil, err
		}
		if len(p.Marker) == 0 {
			fallback = p
			continue
		}
		if !slices.ContainsFunc(p.Marker, func(m string) bool { return !exists(filepath.Join(tree, m)) }) {
			return p, nil
		}
	}
	if fallback == nil {
		return nil, fmt.Errorf("%s matches no profile (%s): name one with the profile option", tree, strings.Join(names, ", "))
	}
	return fallback, nil
}

func (p *Profile) validate() error {
	if !profileName.MatchString(p.Name) {
		return fmt.Errorf("name %q must be lower-case letters, digits and dashes", p.Name)
	}
	if p.PlatformChart == "" || p.Sources == "" {
		return errors.New("platformChart and sources must be set")
	}
	paths := slices.Concat(p.Marker, p.CRDs.Files, p.Manifests, []string{p.PlatformChart, p.Sources})
	for _, img := range p.Images {
		for _, f := range img.Files {
			paths = append(paths, f.From)
		}
	}
	for _, g := range p.GoldenImages {
		if g.When == "" || g.Release == "" || g.Chart == "" || g.Value == "" {
			return errors.New("goldenImages: when, release, chart and value must be set")
		}
		paths = append(paths, g.When)
	}
	for _, s := range paths {
		if !filepath.IsLocal(filepath.FromSlash(s)) {
			return fmt.Errorf("path %q must be relative and stay inside the tree", s)
		}
	}
	for _, c := range p.CRDs.Permissive {
		if c.Group == "" || c.Version == "" || c.Kind == "" || c.Plural == "" {
			return fmt.Errorf("crds.permissive %s: group, version, kind and plural must be set", c.Kind)
		}
		if c.Scope != "Namespaced" && c.Scope != "Cluster" {
			return fmt.Errorf("crds.permissive %s: scope %q must be Namespaced or Cluster", c.Kind, c.Scope)
		}
	}
	for i, o := range p.Objects {
		if o["apiVersion"] == nil || o["kind"] == nil {
			return fmt.Errorf("objects[%d]: apiVersion and kind must be set", i)
		}
	}
	for _, img := range p.Images {
		switch {
		case img.Image == "":
			return errors.New("images: image must be set")
		case len(img.Files) == 0 && len(img.Entrypoint) > 0:
			return fmt.Errorf("images %s: entrypoint needs files", img.Image)
		case len(img.Files) > 0 && len(img.Entrypoint) == 0:
			return fmt.Errorf("images %s: files need an entrypoint", img.Image)
		}
		for _, f := range img.Files {
			if f.From == "" || !path.IsAbs(f.At) || path.Clean(f.At) == "/" {
				return fmt.Errorf("images %s: file %q needs a path in the tree and an absolute one in the image, not %q", img.Image, f.From, f.At)
			}
		}
	}
	for _, g := range p.Publish {
		if strings.Count(g, "/") > 1 {
			return fmt.Errorf("publish %q must be <package source> or <package source>/<component>", g)
		}
	}
	if p.Values.Secret == "" && (len(p.Values.In) > 0 || len(p.Values.Cluster) > 0) {
		return errors.New("values.secret must be set")
	}
	return nil
}

var profileName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// publishes reports whether the component of the package source is to become an artifact.
func (p *Profile) publishes(source, component string) bool {
	if len(p.Publish) == 0 {
		return true
	}
	return slices.ContainsFunc(p.Publish, func(pattern string) bool {
		want, part, one := strings.Cut(pattern, "/")
		return glob(want, source) && (!one || glob(part, component))
	})
}

// TenantValues returns the content of the values Secret for a namespace: {_cluster, _namespace} with ${tenant} replaced.
func (p *Profile) TenantValues(namespace string) map[string]any {
	return map[string]any{
		"_cluster":   expand(p.Values.Cluster, namespace),
		"_namespace": expand(p.Values.Namespace, namespace),
	}
}

func expand(v any, tenant string) any {
	switch v := v.(type) {
	case string:
		return strings.ReplaceAll(v, "${tenant}", tenant)
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = expand(v[i], tenant)
		}
		return out
	case map[string]any:
		out := make(map[string]any, len(v))
		for k := range v {
			out[k] = expand(v[k], tenant)
		}
		return out
	}
	return v
}

// NotReadyAllowed reports whether the HelmRelease namespace/name need not become Ready.
func (p *Profile) NotReadyAllowed(namespace, name string) bool {
	return slices.ContainsFunc(p.MayBeNotReady, func(g string) bool { return glob(g, namespace+"/"+name) })
}

// files lists the tree's files that a profile path means, sorted; nothing found is an error, for a typing error would
// otherwise look like a platform without that CRD.
func files(tree, pattern string) ([]string, error) {
	want := pattern
	if strings.HasSuffix(want, "/") {
		want += "*.yaml"
	}
	found, err := filepath.Glob(filepath.Join(globEscape(tree), filepath.FromSlash(want)))
	if err != nil {
		return nil, fmt.Errorf("path %q: %w", pattern, err)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s has nothing at %s, which its profile names", tree, pattern)
	}
	slices.Sort(found)
	return found, nil
}

func globEscape(s string) string {
	var b bytes.Buffer
	for _, r := range s {
		if strings.ContainsRune(`*?[\`, r) {
			b.WriteByte('\\')
		}
		b.WriteRune(r)
	}
	return b.String()
}

// glob matches the whole of s; "*" stands for any text, slashes included, as image references and names need it.
func glob(pattern, s string) bool {
	parts := strings.Split(pattern, "*")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(s)
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
