package programs

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const controllerRuntime = "sigs.k8s.io/controller-runtime"

// setDefaults is where controller-runtime's webhook server fills in what nobody has set.
const setDefaults = "func (o *Options) setDefaults() {\n"

// WebhookHost is the environment variable that names the address on which such a server listens where it is not loopback,
// as in a pod.
const WebhookHost = "UPGRADE_E2E_WEBHOOK_HOST"

// listenLocally goes in behind it. A webhook server listens on every address of the machine, and the controllers that
// use it have a flag for its port, but none for its host.
const listenLocally = setDefaults + `	if o.Host == "" {
		o.Host = "127.0.0.1"
		if host := os.Getenv("` + WebhookHost + `"); host != "" {
			o.Host = host
		}
	}
`

// loopbackSource counts among the sources of what is built with it.
//
//go:embed loopback.go
var loopbackSource string

// patches is the source of what is changed in the tool's modules, "" when nothing is.
func (t tool) patches() string {
	if t.webhooks {
		return loopbackSource
	}
	return ""
}

// loopback returns the flag that makes a build take a copy of controller-runtime, in stage, whose webhook servers listen
// on loopback alone unless WebhookHost says otherwise.
func (b *builder) loopback(ctx context.Context, t tool, stage string, log io.Writer) (flag string, err error) {
	dir, err := b.moduleDir(ctx, t, controllerRuntime, log)
	if err != nil {
		return "", err
	}
	copied := filepath.Join(stage, "controller-runtime")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		return "", fmt.Errorf("copy %s: %w", controllerRuntime, err)
	}
	if err := patch(filepath.Join(copied, "pkg", "webhook", "server.go"), setDefaults, listenLocally); err != nil {
		return "", err
	}
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(b.root, "tools", t.folder, name))
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(stage, name), data, 0o644); err != nil {
			return "", err
		}
	}
	modfile := filepath.Join(stage, "go.mod")
	edit := exec.CommandContext(ctx, "go", "mod", "edit", "-replace", controllerRuntime+"="+copied, modfile)
	edit.Stdout, edit.Stderr = log, log
	return "-modfile=" + modfile, edit.Run()
}

// patch replaces the one place in a file that holds old.
func patch(path, old, new string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if n := strings.Count(string(data), old); n != 1 {
		return fmt.Errorf("%s has %d places with %q, not one: look how this version sets the host of its webhook server", path, n, strings.TrimSpace(old))
	}
	if err := os.Chmod(path, 0o644); err != nil { // the module cache is read-only
		return err
	}
	return os.WriteFile(path, []byte(strings.Replace(string(data), old, new, 1)), 0o644)
}
