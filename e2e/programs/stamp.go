package programs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// stamp says what a file in bin/ was built from. Contents count, not times: a
// checkout or a copied tree must not cost a build of 20 minutes.
type stamp struct {
	hash    string // over the tool's folder and the way of building
	version string // of the Go module
}

func stampPath(bin, item string) string { return filepath.Join(bin, ".stamps", item) }

func readStamp(bin, item string) (stamp, error) {
	raw, err := os.ReadFile(stampPath(bin, item))
	if err != nil {
		return stamp{}, err
	}
	f := strings.Fields(string(raw))
	if len(f) != 2 {
		return stamp{}, fmt.Errorf("stamp of %s: %q is not hash and version", item, raw)
	}
	return stamp{hash: f[0], version: f[1]}, nil
}

func writeStamp(bin, item string, s stamp) error {
	return os.WriteFile(stampPath(bin, item), []byte(s.hash+" "+s.version+"\n"), 0o644)
}

// Fingerprint says in a few characters what the programs and manifests were built from, or for those of
// KUBEBUILDER_ASSETS which file they are and how old.
func (p *Programs) Fingerprint() (string, error) {
	built, err := fingerprint(filepath.Join(p.Dir, ".stamps"), "")
	if err != nil {
		return "", err
	}
	h := sha256.New()
	io.WriteString(h, built)
	for _, name := range slices.Sorted(maps.Keys(p.assets)) {
		info, err := os.Stat(p.assets[name])
		if err != nil {
			return "", fmt.Errorf("tools: %w", err)
		}
		fmt.Fprintln(h, name, p.assets[name], info.Size(), info.ModTime())
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// fingerprint hashes every file of a folder and the recipe, a text that changes
// when the way of building does.
func fingerprint(folder, recipe string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%d %s", len(recipe), recipe)
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%d %s %d ", len(rel), rel, len(raw))
		h.Write(raw)
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("tools: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
