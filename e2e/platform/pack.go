package platform

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"sigs.k8s.io/yaml"
)

// file is one regular file of a chart.
type file struct {
	data       []byte
	executable bool
}

// pack makes the artifact of one component: the chart's directory, its libraries as charts/<name>, its values files
// merged into values.yaml. Everything in the directory goes in (Cozystack's artifacts have no .helmignore either), and
// nothing but names, contents and executable bits, so that the digest is a function of the content.
func pack(tree string, c component, libraries []library) (*Chart, error) {
	content, err := readDir(tree, packagePath(tree, c.Path))
	if err != nil {
		return nil, err
	}
	for _, name := range c.Libraries {
		i := slices.IndexFunc(libraries, func(l library) bool {
			return l.Name == name || l.Name == "" && path.Base(l.Path) == name
		})
		if i < 0 {
			return nil, fmt.Errorf("library %s is not declared by the variant", name)
		}
		lib, err := readDir(tree, packagePath(tree, libraries[i].Path))
		if err != nil {
			return nil, fmt.Errorf("library %s: %w", name, err)
		}
		prefix := path.Join("charts", name) + "/"
		maps.DeleteFunc(content, func(f string, _ file) bool { return strings.HasPrefix(f, prefix) })
		for f, data := range lib {
			content[prefix+f] = data
		}
	}
	if err := mergeValues(content, c.ValuesFiles); err != nil {
		return nil, err
	}
	meta, err := metadata(content)
	if err != nil {
		return nil, fmt.Errorf("packages/%s: %w", c.Path, err)
	}
	data, err := archiveChart(meta.Name, content)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	digest := "sha256:" + hex.EncodeToString(sum[:])
	return &Chart{
		Path: path.Join("packages", c.Path), Name: meta.Name, Version: meta.Version,
		Digest: digest, Revision: "latest@" + digest, data: data,
	}, nil
}

func metadata(content map[string]file) (*chart.Metadata, error) {
	raw, ok := content["Chart.yaml"]
	if !ok {
		return nil, fmt.Errorf("no Chart.yaml")
	}
	meta := new(chart.Metadata)
	if err := yaml.Unmarshal(raw.data, meta); err != nil {
		return nil, fmt.Errorf("read Chart.yaml: %s", oneLine(err.Error()))
	}
	if meta.Name == "" || meta.Version == "" {
		return nil, fmt.Errorf("no name or version in Chart.yaml")
	}
	return meta, nil
}

// mergeValues replaces values.yaml by the first values file and merges the others over it, as Cozystack's operator
// has it done for a component with valuesFiles.
func mergeValues(content map[string]file, names []string) error {
	if len(names) == 0 {
		return nil
	}
	merged := map[string]any{}
	for _, name := range names {
		raw, ok := content[path.Clean(name)]
		if !ok {
			return fmt.Errorf("values file %s does not exist", name)
		}
		values, err := chartutil.ReadValues(raw.data)
		if err != nil {
			return fmt.Errorf("values file %s: %s", name, oneLine(err.Error()))
		}
		merged = chartutil.MergeTables(values, merged)
	}
	data, err := yaml.Marshal(merged)
	if err != nil {
		return err
	}
	content["values.yaml"] = file{data: data}
	return nil
}

// readDir reads every file below dir, by slashed path relative to it, following symlinks (Cozystack's charts link
// their libraries). A link that is broken, leaves the tree or leads in a circle is an error.
func readDir(tree, dir string) (map[string]file, error) {
	if !isDir(dir) {
		return nil, fmt.Errorf("no directory %s", display(tree, dir))
	}
	return readPath(tree, dir)
}

// readPath is readDir for a directory or a single file, whose key is "".
func readPath(tree, dir string) (map[string]file, error) {
	root, err := filepath.EvalSymlinks(tree)
	if err != nil {
		return nil, err
	}
	content := map[string]file{}
	var walk func(dir, prefix string, above []string) error
	walk = func(dir, prefix string, above []string) error {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return fmt.Errorf("no %s, or it is a broken link", display(tree, dir))
		}
		if rel, err := filepath.Rel(root, real); err != nil || !filepath.IsLocal(rel) {
			return fmt.Errorf("%s leads out of the tree, to %s", display(tree, dir), real)
		}
		if slices.Contains(above, real) {
			return fmt.Errorf("%s leads in a circle", display(tree, dir))
		}
		info, err := os.Stat(real)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			if !info.Mode().IsRegular() {
				return fmt.Errorf("%s is no regular file", display(tree, dir))
			}
			data, err := os.ReadFile(real)
			content[prefix] = file{data: data, executable: info.Mode()&0o100 != 0}
			return err
		}
		entries, err := os.ReadDir(real)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := walk(filepath.Join(dir, e.Name()), path.Join(prefix, e.Name()), append(above, real)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := walk(dir, "", nil); err != nil {
		return nil, err
	}
	return content, nil
}

func display(tree, name string) string {
	if rel, err := filepath.Rel(tree, name); err == nil && filepath.IsLocal(rel) {
		return rel
	}
	return name
}

// archiveChart writes the chart as .tgz below a directory of its name: sorted, without times and owners.
func archiveChart(name string, content map[string]file) ([]byte, error) {
	var buf bytes.Buffer
	zw := gzip.NewWriter(&buf)
	tw := tar.NewWriter(zw)
	for _, f := range slices.Sorted(maps.Keys(content)) {
		mode := fs.FileMode(0o644)
		if content[f].executable {
			mode = 0o755
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: path.Join(name, f), Mode: int64(mode), Size: int64(len(content[f].data))}
		if err := tw.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := tw.Write(content[f].data); err != nil {
			return nil, err
		}
	}
	if err := tw.Close(); err != nil {
		return nil, err
	}
	if err := zw.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
