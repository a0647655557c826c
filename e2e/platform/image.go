package platform

import (
	"fmt"
	"path"
	"path/filepath"
)

// MigrationFiles are the files that the tree puts into the image of its migrations, by their absolute paths there, and the
// image's entrypoint; none when the version has no such image.
func (v *Version) MigrationFiles() (files map[string][]byte, entrypoint []string, err error) {
	for _, image := range v.Profile.Images {
		if v.staged[image.Image] == nil || !glob(image.Image, v.MigrationImage) {
			continue
		}
		files = map[string][]byte{}
		for _, f := range image.Files {
			content, err := readPath(v.Tree, filepath.Join(v.Tree, filepath.FromSlash(f.From)))
			if err != nil {
				return nil, nil, fmt.Errorf("image %s: %w", v.MigrationImage, err)
			}
			for name, c := range content {
				files[path.Join(f.At, name)] = c.data
			}
		}
		return files, image.Entrypoint, nil
	}
	return nil, nil, nil
}
