package harness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/nodeimage"
	"cozystack.io/upgrade-e2e/e2e/platform"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// providers are what PROVIDER may name.
var providers = []string{"embedded", "kind", "existing"}

// CheckProvider fails in one line, with status 2, when the cluster that PROVIDER names can't be used or booted here.
func CheckProvider(ctx context.Context, o Options) error {
	_, err := checkProvider(ctx, o)
	return err
}

// checkDefaultClass fails where somebody's default StorageClass stands in the way of a family that needs the platform's.
func checkDefaultClass(ctx context.Context, o Options, family Family) error {
	if o.Provider != "existing" || !family.DefaultClass {
		return nil
	}
	class, err := cluster.DefaultClass(ctx, o.Kubeconfig)
	if err != nil {
		return usagef("%v", err)
	}
	if class != "" {
		return usagef("existing: family %s needs the platform's StorageClass as the cluster's default, which is %s there; run it on a cluster without a default class", family.Name, class)
	}
	return nil
}

// checkProvider finds the image of kind's nodes as well; nil for a provider that has none.
func checkProvider(ctx context.Context, o Options) (*nodeimage.Image, error) {
	if o.leaver() != "" {
		if _, err := os.Stat(o.leaver()); err != nil {
			return nil, usagef("%v: it takes away what a run makes on a cluster that stays; run `make command`", err)
		}
	}
	switch o.Provider {
	case "existing":
		if err := cluster.CheckExisting(ctx, o.Kubeconfig, o.AuditLog); err != nil {
			return nil, usagef("%v", err)
		}
		return nil, nil
	case "kind":
		return nodeImage(ctx, o)
	}
	return nil, nil
}

// leaver is the program that takes away what a run has made on a cluster that stays; "" where the cluster ends with the run.
func (o Options) leaver() string {
	if o.Provider != "existing" && o.Reuse == "" {
		return ""
	}
	return filepath.Join(o.Root, "bin", "upgrade-e2e")
}

// nodeImage finds the image of kind's nodes.
func nodeImage(ctx context.Context, o Options) (*nodeimage.Image, error) {
	image, err := nodeimage.Find(ctx, o.Root)
	if err != nil {
		return nil, err
	}
	there, err := image.Exists(ctx)
	if err != nil {
		return nil, err
	}
	if !there {
		return nil, usagef("kind: there is no node image %s; run `make node-image`", image.Ref)
	}
	return image, nodeimage.Room(ctx)
}

// provider is the cluster that PROVIDER names, not made yet.
func (r *run) provider() cluster.Provider {
	o := r.options
	switch o.Provider {
	case "kind":
		kind := cluster.NewKind(r.processes, r.programs, r.node.Ref, o.Nodes)
		if o.Reuse != "" {
			kind.Reuse(o.Root, o.Reuse, o.leaver(), "leave")
		}
		return kind
	case "existing":
		return cluster.NewExisting(r.processes, r.programs, o.Kubeconfig, o.AuditLog, o.leaver(), "leave")
	}
	embedded := cluster.NewEmbedded(r.processes, r.programs)
	if r.restored {
		embedded.From(r.snapshot.etcd())
	}
	return embedded
}

// mortal is a cluster whose nodes can end while it is in use.
type mortal interface {
	Ended(ctx context.Context) error
}

// watchNodes breaks the run off when a node ends: everything would wait for it until the last bound.
func (r *run) watchNodes(ctx context.Context) {
	if c, ok := r.cluster.(mortal); ok {
		go func() {
			if err := c.Ended(ctx); err != nil {
				r.breakOff(err)
			}
		}()
	}
}

// others are the namespaces of other users of a cluster.
func others(c cluster.Provider) []string {
	if o, ok := c.(interface{ Others() []string }); ok {
		return o.Others()
	}
	return nil
}

// loader is a cluster with nodes that run images.
type loader interface {
	Load(ctx context.Context, archive string, as map[string]string) error
}

// loadHooks puts the images of both platforms' hooks onto the nodes. Between releases both may have one name; it is the
// upgrade's then.
func (r *run) loadHooks(ctx context.Context) error {
	nodes, ok := r.cluster.(loader)
	if !ok {
		return nil
	}
	r.env.RealPods = true
	images, as := map[string]v1.Image{}, map[string]string{}
	for _, v := range []*platform.Version{r.new, r.old} {
		files, entrypoint, err := v.MigrationFiles()
		if err != nil {
			return err
		}
		if as[v.MigrationImage] != "" || len(files) == 0 {
			continue
		}
		name := fmt.Sprintf("docker.io/upgrade-e2e/hook:%d", len(as))
		if images[name], err = nodeimage.Hooked(r.node.Hook, files, entrypoint); err != nil {
			return err
		}
		as[v.MigrationImage] = name
	}
	if len(as) == 0 {
		return nil
	}
	archive, err := os.Create(r.processes.State("hooks.tar"))
	if err != nil {
		return err
	}
	err = nodeimage.WriteArchive(archive, images)
	if closed := archive.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("write images of hooks: %w", err)
	}
	return nodes.Load(ctx, archive.Name(), as)
}

// exportNodes keeps the logs of real nodes when there is something to look for, as far as they can be had: a node that was killed
// has none.
func (r *run) exportNodes(ctx context.Context, verdict verify.Verdict) {
	if _, ok := r.cluster.(loader); !ok || verdict == verify.Passed {
		return
	}
	to := filepath.Join(r.options.Dir, "logs", "nodes")
	if err := r.cluster.ExportLogs(ctx, to); err != nil {
		r.progress.Printf("  the nodes' logs in %s are not complete", to)
	}
}
