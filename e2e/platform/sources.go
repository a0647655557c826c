package platform

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// packageSource is the part of Cozystack's PackageSource that says which charts there are. Decoding is not strict:
// versions of the platform add fields.
type packageSource struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Variants []struct {
			Name       string      `json:"name"`
			Libraries  []library   `json:"libraries"`
			Components []component `json:"components"`
		} `json:"variants"`
	} `json:"spec"`
}

type library struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

type component struct {
	Name        string   `json:"name"`
	Path        string   `json:"path"`
	Libraries   []string `json:"libraries"`
	ValuesFiles []string `json:"valuesFiles"`
}

// Chart is one component of a PackageSource, packed.
type Chart struct {
	// Artifact is the ExternalArtifact's name: <package source>-<variant>-<component>, dots as dashes.
	Artifact string
	// Source, Variant and Component are the names in the PackageSource.
	Source, Variant, Component string
	// Path is the chart's directory, relative to the tree.
	Path string
	// Name and Version are Chart.yaml's.
	Name, Version string
	// Digest is sha256:<hex> of the packed chart; equal content has an equal digest.
	Digest string
	// Revision is the ExternalArtifact's: latest@<digest>. Flux puts its digest into the chart's version and
	// reports it as a HelmRelease's status.lastAttemptedRevisionDigest.
	Revision string

	data []byte
}

// ArtifactName joins the parts of an ExternalArtifact's name as Cozystack does.
func ArtifactName(source, variant, component string) string {
	return strings.ReplaceAll(source+"-"+variant+"-"+component, ".", "-")
}

// readCharts packs what the profile publishes of the tree's PackageSources, in the order of the files.
func readCharts(tree string, p *Profile) ([]Chart, error) {
	names, err := files(tree, p.Sources)
	if err != nil {
		return nil, err
	}
	var charts []Chart
	seen := map[string]string{}
	for _, name := range names {
		docs, err := readDocuments(name)
		if err != nil {
			return nil, err
		}
		for _, doc := range docs {
			var source packageSource
			if err := yaml.Unmarshal(doc, &source); err != nil {
				return nil, fmt.Errorf("%s: %s", name, oneLine(err.Error()))
			}
			if source.Kind != "PackageSource" {
				continue
			}
			for _, variant := range source.Spec.Variants {
				for _, c := range variant.Components {
					if c.Path == "" || !p.publishes(source.Metadata.Name, c.Name) {
						continue
					}
					what := fmt.Sprintf("%s, variant %s, component %s", source.Metadata.Name, variant.Name, c.Name)
					chart, err := pack(tree, c, variant.Libraries)
					if err != nil {
						return nil, fmt.Errorf("%s: %w", what, err)
					}
					chart.Artifact = ArtifactName(source.Metadata.Name, variant.Name, c.Name)
					chart.Source, chart.Variant, chart.Component = source.Metadata.Name, variant.Name, c.Name
					if other, dup := seen[chart.Artifact]; dup {
						return nil, fmt.Errorf("%s and %s are both artifact %s", other, what, chart.Artifact)
					}
					seen[chart.Artifact] = what
					charts = append(charts, *chart)
				}
			}
		}
	}
	if len(charts) == 0 {
		return nil, fmt.Errorf("%s has no PackageSource in %s that profile %s publishes", tree, p.Sources, p.Name)
	}
	return charts, nil
}

// readDocuments reads a YAML file and splits it; empty documents are left out.
func readDocuments(name string) ([][]byte, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var docs [][]byte
	for _, doc := range strings.Split("\n"+string(data), "\n---") {
		var content map[string]any
		if err := yaml.Unmarshal([]byte(doc), &content); err != nil {
			if strings.Contains(doc, "{{") {
				return nil, fmt.Errorf("%s has template actions: it is no plain manifest", name)
			}
			return nil, fmt.Errorf("%s: %s", name, oneLine(err.Error()))
		}
		if len(content) > 0 {
			docs = append(docs, []byte(doc))
		}
	}
	return docs, nil
}

func packagePath(tree, path string) string {
	return filepath.Join(tree, "packages", filepath.FromSlash(path))
}
