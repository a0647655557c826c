package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// SweepKind removes our kind clusters whose run nobody holds any more, wherever its folder is or was, and says which; with all,
// those too that stay between runs, unless one is on it. It does nothing where no Docker engine answers.
func SweepKind(ctx context.Context, all bool) ([]string, error) {
	out, err := exec.CommandContext(ctx, "docker", "ps", "--all", "--filter", "label="+kindLabel, "--format",
		`{{.ID}} {{.Label "`+kindLabel+`"}}`).Output()
	if err != nil {
		return nil, nil
	}
	clusters := map[string][]string{} // containers
	for line := range strings.Lines(string(out)) {
		if id, name, _ := strings.Cut(strings.TrimSpace(line), " "); strings.HasPrefix(name, kindPrefix) {
			clusters[name] = append(clusters[name], id)
		}
	}
	var lines []string
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(clusters)) {
		dir, err := runOf(ctx, clusters[name])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if dir == "" || process.Held(dir) || stays(dir) && !all || inUse(dir) {
			continue
		}
		remove := append([]string{"rm", "--force", "--volumes"}, clusters[name]...)
		if out, err := exec.CommandContext(ctx, "docker", remove...).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove the containers of kind cluster %s: %w: %s", name, err, strings.TrimSpace(string(out))))
			continue
		}
		if stays(dir) {
			errs = append(errs, os.RemoveAll(dir))
		}
		lines = append(lines, fmt.Sprintf("swept kind cluster %s of %s", name, dir))
	}
	return lines, errors.Join(errs...)
}

// inUse tells of the folder of a cluster that stays whether a run is on it.
func inUse(dir string) bool {
	last, err := os.ReadFile(filepath.Join(dir, visitorFile))
	return err == nil && process.Held(string(last))
}

// runOf is the folder of the run that nodes belong to, by the folder that the control plane's mounts; "" for what is not ours, or is
// without a control plane yet.
func runOf(ctx context.Context, containers []string) (string, error) {
	format := fmt.Sprintf(`{{range .Mounts}}{{if eq .Destination %q}}{{.Source}}{{end}}{{end}}`, auditMount)
	out, err := exec.CommandContext(ctx, "docker", append([]string{"inspect", "--format", format}, containers...)...).Output()
	if err != nil {
		return "", fmt.Errorf("inspect containers %s: %w", strings.Join(containers, ", "), err)
	}
	source := strings.TrimSpace(string(out))
	if source == "" {
		return "", nil
	}
	return filepath.Dir(filepath.Dir(source)), nil // logs/kind
}
