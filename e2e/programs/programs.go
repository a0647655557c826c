// Package programs builds the programs of a run from source, together with the
// manifests that belong to them, and finds them again.
//
// Every program has a Go module of its own below tools/; the version that is
// built stands in that module's go.mod and nowhere else. Programs go to bin/,
// manifests to bin/manifests/<name>.yaml.
package programs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// tool is one folder below tools: a Go module with the programs that are built
// from it and the manifest that is generated from it.
type tool struct {
	folder   string
	name     string // what it is asked for by, where that is not the folder
	module   string // path of the Go module whose version counts
	programs []program
	// versions are packages whose gitVersion the linker sets. Unset, CAPI
	// takes kube-apiserver for too old and user agents carry no version.
	versions []string
	optional bool // built only when its name is asked for
	webhooks bool // serves webhooks by controller-runtime, which must listen on loopback
	pods     bool // its programs run as pods where a cluster has nodes: a node image has an image of each
	manifest *manifest
}

// program is a main package; its file in bin/ has its name.
type program struct {
	name string
	pkg  string
}

// manifest says how bin/manifests/<folder>.yaml comes about.
type manifest struct {
	// command are arguments of go, run in the tool's folder; the manifest is
	// what it writes to stdout. Empty: `kubectl kustomize` over the folder's
	// kustomization.yaml, in which `module` is the Go module's folder.
	command []string
	// contract, when set, is the version that each CRD must offer under the
	// label cluster.x-k8s.io/v1beta1; CAPI finds its providers' kinds by it.
	contract string
}

// all lists the tools, those that take longest first.
func all() []tool {
	const k8s, kubevirt = "k8s.io/kubernetes/cmd/", "kubevirt.io/kubevirt/cmd/"
	return []tool{
		{
			folder: "kubernetes", module: "k8s.io/kubernetes",
			programs: []program{
				{"kube-apiserver", k8s + "kube-apiserver"},
				{"kube-controller-manager", k8s + "kube-controller-manager"},
				{"kube-scheduler", k8s + "kube-scheduler"},
				{"kubectl", k8s + "kubectl"},
			},
			versions: []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"},
		},
		{
			folder: "kubevirt", pods: true, module: "kubevirt.io/kubevirt",
			programs: []program{
				{"virt-api", kubevirt + "virt-api"},
				{"virt-controller", kubevirt + "virt-controller"},
			},
			versions: []string{"kubevirt.io/client-go/version"},
			manifest: &manifest{command: []string{"run", "./manifests"}},
		},
		{
			folder: "cluster-api", pods: true, webhooks: true, module: "sigs.k8s.io/cluster-api",
			programs: []program{{"cluster-api", "sigs.k8s.io/cluster-api"}},
			versions: []string{"sigs.k8s.io/cluster-api/version"},
			manifest: &manifest{contract: "v1beta1"},
		},
		{
			folder: "helm-controller", pods: true, module: "github.com/fluxcd/helm-controller",
			programs: []program{{"helm-controller", "github.com/fluxcd/helm-controller"}},
			manifest: &manifest{},
		},
		{
			// The last release with Helm 3 inside; its API is the same.
			folder: "helm-controller-helm3", pods: true, module: "github.com/fluxcd/helm-controller",
			programs: []program{{"helm-controller-helm3", "github.com/fluxcd/helm-controller"}},
			optional: true,
		},
		{
			folder: "cluster-api-provider-kubevirt", pods: true, webhooks: true, module: "sigs.k8s.io/cluster-api-provider-kubevirt",
			programs: []program{{"cluster-api-provider-kubevirt", "sigs.k8s.io/cluster-api-provider-kubevirt"}},
			manifest: &manifest{contract: "v1alpha1"},
		},
		{
			folder: "cluster-api-bootstrap-provider-talos", pods: true, webhooks: true, module: "github.com/siderolabs/cluster-api-bootstrap-provider-talos",
			programs: []program{{"cluster-api-bootstrap-provider-talos", "github.com/siderolabs/cluster-api-bootstrap-provider-talos"}},
			manifest: &manifest{contract: "v1alpha3"},
		},
		{
			folder: "etcd", module: "go.etcd.io/etcd/server/v3",
			programs: []program{{"etcd", "."}},
		},
		{
			// What a node runs beside the control plane.
			folder: "kubernetes", name: NodeImage, module: "k8s.io/kubernetes", optional: true,
			programs: []program{
				{"kubelet", k8s + "kubelet"},
				{"kubeadm", k8s + "kubeadm"},
				{"kube-proxy", k8s + "kube-proxy"},
				{"pause", "./pause"},
			},
			versions: []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"},
		},
		{
			folder: "coredns", name: NodeImage, module: "github.com/coredns/coredns", optional: true,
			programs: []program{{"coredns", "."}},
		},
		{
			folder: "source-controller", module: "github.com/fluxcd/source-controller",
			manifest: &manifest{},
		},
		{
			folder: "containerized-data-importer", module: "kubevirt.io/containerized-data-importer-api",
			manifest: &manifest{command: []string{"tool", "controller-gen", "crd",
				"paths=kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1", "output:stdout"}},
		},
		{
			folder: "external-snapshotter", module: "github.com/kubernetes-csi/external-snapshotter/client/v8",
			manifest: &manifest{},
		},
	}
}

// NodeImage asks Build and Find for the programs that only a node image needs.
const NodeImage = "node-image"

// called is what the tool is asked for by.
func (t tool) called() string {
	if t.name != "" {
		return t.name
	}
	return t.folder
}

// wanted are the tools to build or find: all but the optional ones that extra
// doesn't name.
func wanted(tools []tool, extra []string) ([]tool, error) {
	for _, name := range extra {
		if !slices.ContainsFunc(tools, func(t tool) bool { return t.called() == name }) {
			return nil, &BuildError{Err: fmt.Errorf("no program %q; there are %s", name, strings.Join(folders(tools), ", "))}
		}
	}
	return slices.DeleteFunc(slices.Clone(tools), func(t tool) bool {
		return t.optional && !slices.Contains(extra, t.called()) && !(t.pods && slices.Contains(extra, NodeImage))
	}), nil
}

// Controllers are the programs that run as pods where a cluster has nodes. A node image holds an image of each.
func Controllers() []string {
	var names []string
	for _, t := range all() {
		for _, p := range t.programs {
			if t.pods {
				names = append(names, p.name)
			}
		}
	}
	return names
}

// Image is the reference by which a node knows the image of a controller.
func (p *Programs) Image(name string) string {
	return "upgrade-e2e/" + name + ":" + strings.ReplaceAll(p.Version(name), "+", "_") // no tag holds a plus
}

func folders(tools []tool) []string {
	var names []string
	for _, t := range tools {
		names = append(names, t.called())
	}
	return slices.Compact(names)
}

// Programs are the built programs and manifests below one root.
type Programs struct {
	// Dir is the absolute path of <root>/bin.
	Dir string
	// assets maps a program's name to its file in KUBEBUILDER_ASSETS.
	assets map[string]string
}

// Find returns the programs and manifests that Build has made below root, those
// named in extra (see Build) among them. When some are missing, the error is a
// *MissingError.
func Find(root string, extra ...string) (*Programs, error) {
	tools, err := wanted(all(), extra)
	if err != nil {
		return nil, err
	}
	return find(root, tools)
}

func find(root string, tools []tool) (*Programs, error) {
	p, err := At(root)
	if err != nil {
		return nil, err
	}
	missing := &MissingError{Dir: p.Dir}
	for _, t := range tools {
		for _, prog := range t.programs {
			if !executable(p.Path(prog.name)) {
				missing.Names = append(missing.Names, prog.name)
			}
		}
		if t.manifest != nil && !exists(p.Manifest(t.folder)) {
			missing.Names = append(missing.Names, "manifests/"+t.folder)
		}
	}
	if len(missing.Names) > 0 {
		return nil, missing
	}
	return p, nil
}

// At is where programs below root are, whether they exist or not.
func At(root string) (*Programs, error) {
	abs, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	p := &Programs{Dir: filepath.Join(abs, "bin"), assets: map[string]string{}}
	dir := os.Getenv("KUBEBUILDER_ASSETS")
	if dir == "" {
		return p, nil
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, fmt.Errorf("tools: KUBEBUILDER_ASSETS: %w", err)
	}
	// What envtest puts there, and nothing else: its other files aren't ours.
	for _, name := range []string{"kube-apiserver", "etcd", "kubectl"} {
		if path := filepath.Join(dir, name); executable(path) {
			p.assets[name] = path
		}
	}
	return p, nil
}

// Path is the absolute path of a program, in KUBEBUILDER_ASSETS or in Dir.
func (p *Programs) Path(name string) string {
	if path, ok := p.assets[name]; ok {
		return path
	}
	return filepath.Join(p.Dir, name)
}

// Manifest is the absolute path of a tool's manifest: YAML documents with
// namespace, CRDs, RBAC, webhooks and workloads, as far as the tool has them.
func (p *Programs) Manifest(name string) string {
	return filepath.Join(p.Dir, "manifests", name+".yaml")
}

// Version is what was built, e.g. "v1.34.4", of a program or of a manifest
// that has no program. A program of KUBEBUILDER_ASSETS is asked itself. Empty
// when it can't be told.
func (p *Programs) Version(name string) string {
	if path, ok := p.assets[name]; ok {
		return reportedVersion(path)
	}
	for _, item := range []string{name, "manifests-" + name} {
		if s, err := readStamp(p.Dir, item); err == nil {
			return s.version
		}
	}
	return ""
}

var versionPattern = regexp.MustCompile(`v?(\d+\.\d+\.\d+\S*)`)

func reportedVersion(path string) string {
	args := []string{"--version"}
	if filepath.Base(path) == "kubectl" {
		args = []string{"version", "--client"}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return ""
	}
	if m := versionPattern.FindSubmatch(out); m != nil {
		return "v" + string(m[1])
	}
	return ""
}

// MissingError names what has not been built yet.
type MissingError struct {
	Names []string
	Dir   string
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("tools: %s missing in %s; run `make tools`", strings.Join(e.Names, ", "), e.Dir)
}

// ExitCode is the exit status that a command should end with.
func (e *MissingError) ExitCode() int { return 2 }

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
