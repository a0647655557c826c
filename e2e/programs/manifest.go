package programs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"

	"k8s.io/apimachinery/pkg/util/yaml"
)

// generate writes the tool's manifest to the file made, by way of the empty
// folder stage.
func (b *builder) generate(ctx context.Context, t tool, stage, made string, log io.Writer) error {
	cmd := b.command(ctx, t, log, "go", t.manifest.command...)
	if len(t.manifest.command) == 0 {
		folder, err := b.overlay(ctx, t, stage, log)
		if err != nil {
			return err
		}
		cmd = b.command(ctx, t, log, b.programs.Path("kubectl"), "kustomize", folder)
	}
	raw, err := output(cmd)
	if err != nil {
		return err
	}
	raw = defaults(raw)
	if err := check(raw, t.manifest.contract); err != nil {
		return err
	}
	return os.WriteFile(made, raw, 0o644)
}

// overlay lays the tool's YAML files and a link `module` to its Go module side
// by side: kustomize takes only relative paths, and the module cache is
// elsewhere on every machine.
func (b *builder) overlay(ctx context.Context, t tool, stage string, log io.Writer) (string, error) {
	module, err := b.moduleDir(ctx, t, t.module, log)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(stage, "overlay")
	if err := os.Mkdir(folder, 0o755); err != nil {
		return "", err
	}
	if err := os.Symlink(module, filepath.Join(folder, "module")); err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(b.root, "tools", t.folder, "*.yaml"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(folder, filepath.Base(file)), raw, 0o644); err != nil {
			return "", err
		}
	}
	return folder, nil
}

// moduleDir is where one of the tool's Go modules lies, downloaded if need be.
func (b *builder) moduleDir(ctx context.Context, t tool, module string, log io.Writer) (string, error) {
	cmd := b.command(ctx, t, log, "go", "mod", "download", "-json", module)
	raw, err := output(cmd)
	var info struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(raw, &info); jsonErr != nil && err == nil {
		err = jsonErr
	}
	if info.Error != "" {
		err = errors.New(info.Error)
	}
	if err != nil {
		return "", fmt.Errorf("download %s: %w", module, err)
	}
	return info.Dir, nil
}

// output runs cmd and returns its stdout; stderr stays where it goes.
func output(cmd *exec.Cmd) ([]byte, error) {
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	return out.Bytes(), err
}

// variable is what clusterctl fills in when it installs a provider.
var variable = regexp.MustCompile(`\$\{\w+:?=([^}]*)\}`)

// defaults puts in the default of every variable that carries one.
func defaults(manifest []byte) []byte { return variable.ReplaceAll(manifest, []byte("$1")) }

// check reads the manifest as a client would and wants at least one CRD, each
// under the contract, if one is given.
func check(manifest []byte, contract string) error {
	const label = "cluster.x-k8s.io/v1beta1"
	crds := 0
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifest), 4096)
	for {
		var o struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Name   string            `json:"name"`
				Labels map[string]string `json:"labels"`
			} `json:"metadata"`
		}
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("document after %d CRDs: %w", crds, err)
		}
		if o.Kind != "CustomResourceDefinition" {
			continue
		}
		crds++
		if contract != "" && o.Metadata.Labels[label] != contract {
			return fmt.Errorf("CRD %s: label %s is %q, CAPI needs %q", o.Metadata.Name, label, o.Metadata.Labels[label], contract)
		}
	}
	if crds == 0 {
		return errors.New("no CRD came out")
	}
	return nil
}
