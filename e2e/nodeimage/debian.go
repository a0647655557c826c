package nodeimage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"cozystack.io/upgrade-e2e/kindconfig"
)

// release is Debian's, whose containerd and runc work with cgroup v1 and v2.
const release = "bookworm"

// packages are what a node has beyond a minimal Debian.
var packages = []string{
	"systemd", "containerd", "runc", "containernetworking-plugins", "libseccomp2",
	"iptables", "nftables", "conntrack", "ebtables", "ethtool", "iproute2", "kmod", "socat",
	"mount", "util-linux", "procps", "jq", "curl", "ca-certificates",
}

// debian unpacks a Debian with the packages; the archive of an earlier build is as good.
func (b *builder) debian(ctx context.Context) error {
	sum := sha256.Sum256([]byte(release + strings.Join(packages, ",")))
	archive := b.path("debian-" + hex.EncodeToString(sum[:])[:16] + ".tar")
	if _, err := os.Stat(archive); err == nil {
		if err := os.Mkdir(b.rootfs, 0o755); err != nil {
			return err
		}
		_, err := run(ctx, "tar", "--numeric-owner", "--xattrs", "-C", b.rootfs, "-xf", archive)
		return err
	}
	args := []string{"--variant=minbase", "--include=" + strings.Join(packages, ","), release, b.rootfs}
	if _, err := run(ctx, "debootstrap", args...); err != nil {
		return fmt.Errorf("%w; debootstrap's log went with %s", err, b.rootfs)
	}
	for _, dir := range []string{"var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"} {
		if err := clearDir(filepath.Join(b.rootfs, dir)); err != nil {
			return err
		}
	}
	draft := archive + ".new"
	if _, err := run(ctx, "tar", "--numeric-owner", "--xattrs", "-C", b.rootfs, "-cf", draft, "."); err != nil {
		return err
	}
	return os.Rename(draft, archive)
}

func clearDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// kindFiles makes the Debian a node of kind: the files of kind's own base image, and ours over them.
func (b *builder) kindFiles(ctx context.Context) error {
	if err := install(os.DirFS(filepath.Join(b.kind, "images", "base", "files")), b.rootfs); err != nil {
		return err
	}
	ours, err := fs.Sub(kindconfig.Node, "node")
	if err != nil {
		return err
	}
	if err := install(ours, b.rootfs); err != nil {
		return err
	}
	if err := b.containerdConfig(); err != nil {
		return err
	}
	_, err = b.chroot(ctx, `
		mkdir -p /etc/kubernetes/manifests /opt/cni /kind
		ln -sf /usr/lib/systemd/systemd /sbin/init
		for program in containerd containerd-shim-runc-v2 ctr; do ln -sf /usr/bin/$program /usr/local/bin/$program; done
		ln -sfn /usr/lib/cni /opt/cni/bin
		find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete
		rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* \
			/lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* /lib/systemd/system/basic.target.wants/*
		echo ReadKMsg=no >>/etc/systemd/journald.conf
		systemctl enable kubelet.service containerd.service undo-mount-hacks.service
		systemctl mask systemd-binfmt.service
		ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer | length] |= . + {"path": "/kind/bin/mount-product-files.sh"}
			| del(.process.rlimits)' >/etc/containerd/cri-base.json
	`)
	return err
}

var restrictOOM = regexp.MustCompile(`restrict_oom_score_adj\s*=\s*false`)

// containerdConfig lets containerd start pods where nobody may lower an OOM score.
func (b *builder) containerdConfig() error {
	if !b.less {
		return nil
	}
	path := filepath.Join(b.rootfs, "etc/containerd/config.toml")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !restrictOOM.Match(data) {
		return fmt.Errorf("containerd's config.toml of this kind has no restrict_oom_score_adj to set")
	}
	return os.WriteFile(path, restrictOOM.ReplaceAll(data, []byte("restrict_oom_score_adj = true")), 0o644)
}

// install copies files, scripts among them executable: neither a module cache nor an embedded file system keeps modes.
func install(from fs.FS, to string) error {
	return fs.WalkDir(from, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(to, filepath.FromSlash(name))
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		data, err := fs.ReadFile(from, name)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if strings.HasPrefix(string(data), "#!") {
			mode = 0o755
		}
		if err := os.WriteFile(target, data, mode); err != nil {
			return err
		}
		return os.Chmod(target, mode) // whatever the umask
	})
}
