package nodeimage

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"cozystack.io/upgrade-e2e/e2e/programs"
)

const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// installPrograms puts onto the node what runs there without a container.
func (b *builder) installPrograms(context.Context) error {
	for _, program := range []string{"kubelet", "kubeadm", "kubectl"} {
		if err := copyFile(b.programs.Path(program), filepath.Join(b.rootfs, "usr/bin", program), 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(b.rootfs, "kind/version"), []byte(b.programs.Version("kubelet")+"\n"), 0o644)
}

// componentImages puts into the node's containerd an image for each that kubeadm asks for, for the sandboxes of pods, and
// for each controller.
func (b *builder) componentImages(ctx context.Context) error {
	out, err := run(ctx, b.programs.Path("kubeadm"), "config", "images", "list", "--kubernetes-version", b.programs.Version("kubeadm"))
	if err != nil {
		return err
	}
	refs := strings.Fields(out)
	if b.sandbox() != "" {
		refs = append(refs, b.sandbox())
	}
	images := map[name.Reference]v1.Image{}
	for _, text := range refs {
		ref, err := name.ParseReference(text)
		if err != nil {
			return fmt.Errorf("kubeadm says %q: %w", text, err)
		}
		if images[ref], err = b.component(path.Base(ref.Context().RepositoryStr())); err != nil {
			return fmt.Errorf("image %s: %w", ref, err)
		}
	}
	for _, program := range programs.Controllers() {
		ref, err := name.NewTag(b.programs.Image(program))
		if err != nil {
			return fmt.Errorf("image of %s: %w", program, err)
		}
		if images[ref], err = controller(program, b.programs.Path(program)); err != nil {
			return fmt.Errorf("image %s: %w", ref, err)
		}
	}
	const archive = "/kind/images.tar"
	if err := tarball.MultiRefWriteToFile(filepath.Join(b.rootfs, archive), images); err != nil {
		return err
	}
	// Unpacked when a pod first needs them: that takes a mount, and would double what is copied for each new cluster.
	_, err = b.chroot(ctx, `
		containerd --log-level=error --address=/run/build.sock --state=/run/build >/run/build.log 2>&1 &
		for i in $(seq 100); do ctr --address=/run/build.sock version >/dev/null 2>&1 && break; sleep 0.2; done
		ctr --address=/run/build.sock --namespace=k8s.io images import --no-unpack `+archive+` >/dev/null || { tail -n 3 /run/build.log >&2; exit 1; }
		kill $! && wait $! || true
		rm -rf `+archive+` /run/build*`)
	return err
}

// sandbox is the image that containerd starts pods with.
func (b *builder) sandbox() string {
	data, _ := os.ReadFile(filepath.Join(b.rootfs, "etc/containerd/config.toml"))
	for line := range strings.SplitSeq(string(data), "\n") {
		if key, value, ok := strings.Cut(line, "="); ok && strings.TrimSpace(key) == "sandbox_image" {
			return strings.Trim(strings.TrimSpace(value), `"`)
		}
	}
	return ""
}

// component is the image of one program.
func (b *builder) component(program string) (v1.Image, error) {
	t := debianTree()
	entrypoint := []string(nil) // kubeadm's manifests name the command
	switch program {
	case "pause", "coredns":
		entrypoint = []string{"/usr/local/bin/" + program}
	case "kube-proxy":
		if err := t.packages(b.rootfs, "iptables", "conntrack", "kmod"); err != nil {
			return nil, err
		}
		// Not by way of /etc/alternatives.
		for _, applet := range []string{"iptables", "iptables-save", "iptables-restore"} {
			t.link("usr/sbin/"+applet, "xtables-nft-multi")
			t.link("usr/sbin/ip6"+strings.TrimPrefix(applet, "ip"), "xtables-nft-multi")
		}
	}
	t.file("usr/local/bin/"+program, b.programs.Path(program))
	return t.image(v1.Config{Env: []string{searchPath}, Entrypoint: entrypoint})
}

// controller is the image of a program that runs as a pod: the program and nothing else, under its own name and the one by
// which Cluster API's Deployments call it. Like the images that those name, it is not root's.
func controller(program, path string) (v1.Image, error) {
	t := newTree()
	t.file(program, path)
	t.link("manager", program)
	return t.image(v1.Config{Entrypoint: []string{"/" + program}, User: "65532:65532"})
}

// hookImage writes what the images of platforms' hooks are built on: a shell with what scripts use, kubectl and jq.
func (b *builder) hookImage(context.Context) error {
	t := debianTree()
	if err := t.packages(b.rootfs, "bash", "coreutils", "grep", "sed", "mawk", "findutils", "jq", "curl", "ca-certificates", "openssl"); err != nil {
		return err
	}
	t.link("usr/bin/sh", "bash") // the image's sh is one that knows pipefail
	t.link("usr/bin/awk", "mawk")
	t.file("usr/bin/kubectl", b.programs.Path("kubectl"))
	image, err := t.image(v1.Config{Env: []string{searchPath, "HOME=/tmp"}, WorkingDir: "/"})
	if err != nil {
		return err
	}
	ref, err := name.NewTag("upgrade-e2e/hook:base")
	if err != nil {
		return err
	}
	draft := b.Hook + ".new"
	if err := tarball.WriteToFile(draft, ref, image); err != nil {
		return err
	}
	return os.Rename(draft, b.Hook)
}

// writeNode writes the archive of the node's image, whose one layer is the tar archive at layer.
func writeNode(archive, reference, layer string) error {
	plain, err := newPlainLayer(layer)
	if err != nil {
		return err
	}
	image, err := imageOf(plain, v1.Config{
		Env: []string{"container=docker", searchPath}, Entrypoint: []string{"/usr/local/bin/entrypoint", "/sbin/init"},
		StopSignal: "SIGRTMIN+3", // systemd's
	})
	if err != nil {
		return err
	}
	ref, err := name.NewTag(reference)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(archive, ref, image)
}

func imageOf(layer v1.Layer, config v1.Config) (v1.Image, error) {
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: "amd64", OS: "linux", Config: config})
	if err != nil {
		return nil, err
	}
	return mutate.AppendLayers(image, layer)
}

// Hooked is the image of a platform's hook: the one at base, with files at their absolute paths in it, and an entrypoint.
func Hooked(base string, files map[string][]byte, entrypoint []string) (v1.Image, error) {
	image, err := tarball.ImageFromPath(base, nil)
	if err != nil {
		return nil, fmt.Errorf("image of hooks: %w", err)
	}
	t := newTree()
	for at, data := range files {
		t.data(strings.TrimPrefix(path.Clean(at), "/"), data)
	}
	layer, err := t.layer()
	if err != nil {
		return nil, err
	}
	if image, err = mutate.AppendLayers(image, layer); err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Config.Entrypoint = entrypoint
	return mutate.ConfigFile(image, config)
}

// WriteArchive writes images under their references, as `docker save` would.
func WriteArchive(w io.Writer, images map[string]v1.Image) error {
	refs := map[name.Reference]v1.Image{}
	for text, image := range images {
		ref, err := name.ParseReference(text)
		if err != nil {
			return fmt.Errorf("image %q: %w", text, err)
		}
		refs[ref] = image
	}
	return tarball.MultiRefWrite(refs, w)
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
