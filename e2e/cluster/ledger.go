package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// made is one object that a run has created.
type made struct {
	schema.GroupVersionResource
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
}

func (m made) String() string {
	name := m.Name
	if m.Namespace != "" {
		name = m.Namespace + "/" + name
	}
	return m.GroupResource().String() + " " + name
}

// ledger writes down what clients create, as they see it created: a line of JSON each, so that whoever cleans up after a
// killed run knows. It keeps them from changing what was there before.
type ledger struct {
	found *found

	mu         sync.Mutex
	file       *os.File
	namespaces map[string]bool // that were made
}

// openLedger makes the file at path, which must not exist.
func openLedger(path string, before *found) (*ledger, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the ledger of what is made: %w", err)
	}
	return &ledger{file: f, namespaces: map[string]bool{}, found: before}, nil
}

// track has clients of cfg write down what they create. They speak JSON from then on, which the ledger reads, and take whatever they are
// given where it is not the API server that answers, such as a pod behind it.
func (l *ledger) track(cfg *rest.Config) {
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON+", */*"
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return ledgerTransport{l, next} })
}

type ledgerTransport struct {
	ledger *ledger
	next   http.RoundTripper
}

// RoundTrip implements http.RoundTripper. What can't be written down is an error: it would be left behind.
func (t ledgerTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	m, ok := target(request)
	if !ok || m.Namespace != "" && !t.ledger.found.namespace(m.Namespace) {
		return t.next.RoundTrip(request) // what is in the run's own namespaces goes with them
	}
	if request.Method == http.MethodDelete && m.Name == "" {
		return nil, fmt.Errorf("DELETE %s: what is there may be others'; a run deletes by name", request.URL.Path)
	}
	if request.Method != http.MethodGet && t.ledger.found.Names.Has(m.String()) {
		return nil, fmt.Errorf("%s %s: it was on the cluster before the run, which must leave it as it is", request.Method, m)
	}
	response, err := t.next.RoundTrip(request)
	if err != nil || response.StatusCode != http.StatusCreated {
		return response, err
	}
	body, err := io.ReadAll(response.Body)
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	var o metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &o); err != nil {
		return nil, fmt.Errorf("read what %s %s has made: %w", request.Method, request.URL.Path, err)
	}
	m.Name, m.UID = o.Name, o.UID
	return response, t.ledger.add(m)
}

func (l *ledger) add(m made) error {
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.file.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write down that %s was made: %w", m, err)
	}
	if m.GroupResource() == (schema.GroupResource{Resource: "namespaces"}) {
		l.namespaces[m.Name] = true
	}
	return nil
}

// made tells whether a namespace was made.
func (l *ledger) made(namespace string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.namespaces[namespace]
}

// target is what a request writes or reads, without a name where it goes to a collection; false for subresources, which create
// and delete nothing.
// Paths: https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-uris
func target(request *http.Request) (m made, ok bool) {
	parts := strings.Split(strings.Trim(request.URL.Path, "/"), "/")
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		m.Version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		m.Group, m.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return m, false
	}
	if parts[0] == "namespaces" && len(parts) >= 3 {
		m.Namespace, parts = parts[1], parts[2:]
	}
	m.Resource = parts[0]
	if len(parts) > 1 {
		m.Name = parts[1]
	}
	return m, len(parts) <= 2
}

// readLedger reads what a run has made. A last line that was cut off is no error: what it was to tell of may not have been
// made.
func readLedger(path string) ([]made, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the ledger of what was made: %w", err)
	}
	defer f.Close()
	var list []made
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the ledger of what was made: %w", err)
		}
		var m made
		if err := json.Unmarshal(line, &m); err != nil {
			return nil, fmt.Errorf("read the ledger of what was made: %s: %w", line, err)
		}
		list = append(list, m)
	}
}
