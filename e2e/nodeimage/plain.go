package nodeimage

import (
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// plainLayer is a layer that is a tar archive on disk as it stands: tarball's layers are compressed, several times over
// while an archive is written, and a Docker engine on this machine only has to undo it.
type plainLayer struct {
	path string
	hash v1.Hash
	size int64
}

func newPlainLayer(path string) (*plainLayer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	l := &plainLayer{path: path}
	l.hash, l.size, err = v1.SHA256(f)
	return l, err
}

func (l *plainLayer) Digest() (v1.Hash, error)             { return l.hash, nil }
func (l *plainLayer) DiffID() (v1.Hash, error)             { return l.hash, nil }
func (l *plainLayer) Size() (int64, error)                 { return l.size, nil }
func (l *plainLayer) MediaType() (types.MediaType, error)  { return types.DockerUncompressedLayer, nil }
func (l *plainLayer) Compressed() (io.ReadCloser, error)   { return os.Open(l.path) }
func (l *plainLayer) Uncompressed() (io.ReadCloser, error) { return os.Open(l.path) }
