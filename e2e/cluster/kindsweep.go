package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	var lines []string
	var errs []error
	for line := range strings.Lines(string(out)) {
		id, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if !strings.HasPrefix(name, kindPrefix) {
			continue
		}
		dir, err := runOf(ctx, id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if dir == "" || process.Held(dir) || stays(dir) && !all {
			continue
		}
		if out, err := exec.CommandContext(ctx, "docker", "rm", "--force", "--volumes", id).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove container %s of kind cluster %s: %w: %s", id, name, err, strings.TrimSpace(string(out))))
			continue
		}
		if stays(dir) {
			errs = append(errs, os.RemoveAll(dir))
		}
		lines = append(lines, fmt.Sprintf("swept kind cluster %s of %s", name, dir))
	}
	return lines, errors.Join(errs...)
}

// runOf is the folder of the run that a node belongs to, by the folder that it mounts; "" for what is not ours.
func runOf(ctx context.Context, container string) (string, error) {
	format := fmt.Sprintf(`{{range .Mounts}}{{if eq .Destination %q}}{{.Source}}{{end}}{{end}}`, auditMount)
	out, err := exec.CommandContext(ctx, "docker", "inspect", "--format", format, container).Output()
	if err != nil {
		return "", fmt.Errorf("inspect container %s: %w", container, err)
	}
	source := strings.TrimSpace(string(out))
	if source == "" {
		return "", nil
	}
	return filepath.Dir(filepath.Dir(source)), nil // logs/kind
}
