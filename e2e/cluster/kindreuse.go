package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// reuseFolder is the folder below the project's root whose folders belong to clusters that stay.
const reuseFolder = ".kind"

// visitorFile is the file in such a folder that names the folder of the last run that used it.
const visitorFile = "run"

// Reuse has the cluster stay after the run, by name, for the next one to use: root/.kind/<name> keeps its kubeconfig and audit
// log. A run takes away what it made there. leave is a command that calls Leave with the folder that is appended to it.
func (k *Kind) Reuse(root, name string, leave ...string) *Kind {
	k.reuse, k.leave = filepath.Join(root, reuseFolder, name), leave
	// Another checkout's clusters are others, whatever their names.
	k.name = kindPrefix + "reuse-" + name + "-" + shortSum(root)[:4]
	return k
}

// marker is a file whose content says which cluster it is that stays; it is there once that is complete.
func (k *Kind) marker() string { return filepath.Join(k.reuse, "made") }

// stays tells whether a folder is that of a cluster that stays.
func stays(dir string) bool { return filepath.Base(filepath.Dir(dir)) == reuseFolder }

// claim keeps other runs off the cluster that stays until this one has left it.
func (k *Kind) claim() error {
	if err := os.MkdirAll(k.reuse, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(k.reuse, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	k.run.AtClose(lock.Close)
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return errors.New("another run uses it")
	}
	visitor := filepath.Join(k.reuse, visitorFile)
	if last, err := os.ReadFile(visitor); err == nil {
		if process.Held(string(last)) {
			return fmt.Errorf("run %s has not left it yet", last)
		}
		// A folder that is kept elsewhere was not swept when this run began.
		if _, err := process.Sweep(filepath.Dir(string(last))); err != nil {
			return err
		}
		k.soiled = process.Unfinished(string(last))
	}
	return os.WriteFile(visitor, []byte(k.run.Dir()), 0o600)
}

// there tells whether the cluster that stays is there as it would be made, without what an earlier run could not take away. One that is
// not is removed.
func (k *Kind) there(ctx context.Context) (bool, error) {
	nodes, err := k.provider.ListNodes(k.name)
	if err != nil {
		return false, fmt.Errorf("look for its nodes: %w", err)
	}
	if len(nodes) == 0 {
		return false, nil
	}
	var said strings.Builder
	code, err := k.run.Exec(ctx, process.Spec{Name: "kind-look", Path: "/bin/sh", Stdout: &said, Args: []string{"-c",
		`docker ps --filter "label=$0=$1" --format '{{.Image}}'`, kindLabel, k.name}})
	if err != nil || code != 0 {
		return false, fmt.Errorf("look for its nodes: exit status %d, %w", code, err)
	}
	_, err = os.Stat(k.marker())
	running := strings.Fields(said.String())
	if err == nil && !k.soiled && len(running) == k.count && !slices.ContainsFunc(running, func(image string) bool { return image != k.image }) {
		return true, nil
	}
	// First, so that nobody takes what is half there for whole.
	for _, file := range []string{k.marker(), k.GetKubeconfig()} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	return false, k.provider.Delete(k.name, "")
}

// complete says of a cluster that stays that nothing is left to make of it.
func (k *Kind) complete(context.Context) error {
	if k.reuse == "" || !k.fresh {
		return nil
	}
	return os.WriteFile(k.marker(), []byte(rand.String(20)), 0o600)
}

// visitCluster takes stock of the cluster that stays, before the run makes anything.
func (k *Kind) visitCluster(ctx context.Context) error {
	if k.reuse == "" {
		return nil
	}
	raw, err := clientcmd.LoadFromFile(k.GetKubeconfig())
	if err != nil {
		return err
	}
	if err := clientcmdapi.FlattenConfig(raw); err != nil {
		return err
	}
	if err := k.begin(ctx, k.run, *raw, k.admin, k.leave, k.marker()); err != nil {
		return err
	}
	k.client, err = kubernetes.NewForConfig(k.admin)
	return err
}
