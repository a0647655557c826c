package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// readRows reads the rows of a file. What is wrong with it is said in one line, with the row or the place.
func readRows(file string) ([]*decisionRow, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var rows []*decisionRow
	if err := json.Unmarshal(data, &rows); err != nil {
		return nil, fmt.Errorf("%s: no list of rows: %s%w", file, place(data, err), err)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%s: no rows", file)
	}
	names := map[string]string{}
	for i, r := range rows {
		if r == nil || r.ID == "" {
			return nil, fmt.Errorf("%s: row %d has no id", file, i+1)
		}
		if other, taken := names[r.name()]; taken {
			return nil, fmt.Errorf("%s: row %d: id %q is taken by %q", file, i+1, r.ID, other)
		}
		names[r.name()] = r.ID
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("%s: row %s: %w", file, r.ID, err)
		}
	}
	return rows, nil
}

// place is where in a file JSON is broken or of another form.
func place(data []byte, err error) string {
	var syntax *json.SyntaxError
	var form *json.UnmarshalTypeError
	offset := int64(-1)
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset
	case errors.As(err, &form):
		offset = form.Offset
	}
	if offset < 0 || offset > int64(len(data)) {
		return ""
	}
	return fmt.Sprintf("line %d: ", 1+bytes.Count(data[:offset], []byte("\n")))
}

// name is the row's id as part of a namespace's name.
func (r *decisionRow) name() string {
	return strings.Trim(strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			return c
		case c >= 'A' && c <= 'Z':
			return c - 'A' + 'a'
		}
		return '-'
	}, r.ID), "-")
}

// check tells why a row can't be played.
func (r *decisionRow) check() error {
	if r.name() == "" || len(r.name()) > 50 {
		return errors.New("its id can't be part of a namespace's name")
	}
	if len(r.Expected) == 0 {
		return errors.New("nothing is expected")
	}
	if !r.played() || r.Given.DV != nil || r.Given.Patch != nil {
		return nil
	}
	g, t := r.Given.Source, r.Given.Target
	golden := g.Kind == "pvc" || g.Kind == "snapshot" || strings.HasPrefix(g.Kind, "dv:")
	switch {
	case !golden && !slices.Contains([]string{"http", "blank", "none"}, g.Kind):
		return fmt.Errorf("given.source.kind is %q, not pvc, snapshot, dv:<url>, http, blank or none", g.Kind)
	case golden && (g.StorageClass == nil || g.StorageClass.Name == ""):
		return errors.New("given.source.storageClass has no name")
	case g.Kind == "snapshot" && len(g.StorageClass.SnapshotClasses) == 0:
		return errors.New("given.source is a snapshot, but its class has no VolumeSnapshotClass")
	case t.API != "spec.pvc" && t.API != "spec.storage":
		return fmt.Errorf("given.target.api is %q, not spec.pvc or spec.storage", t.API)
	}
	for field, size := range map[string]string{"source": g.Size, "target": t.Size} {
		if size == "-" && field == "target" || size == "" && field == "source" && !golden {
			continue
		}
		if _, err := resource.ParseQuantity(size); err != nil {
			return fmt.Errorf("given.%s.size is %q: %w", field, size, err)
		}
	}
	return nil
}

// played is false for a row that was read from CDI's code and gives no situation.
func (r *decisionRow) played() bool {
	return r.Source != "code" || r.Given.Target.API != "" || r.Given.DV != nil || r.Given.Patch != nil
}

func TestReadRows(t *testing.T) {
	const row = `{"id": "N1", "given": {"source": {"kind": "http"}, "target": {"api": "spec.pvc", "size": "1Gi"}}, "expected": {"strategy": null}}`
	read := func(content string) ([]*decisionRow, error) {
		file := filepath.Join(t.TempDir(), "rows.json")
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return readRows(file)
	}
	if rows, err := read("[" + row + "]"); err != nil || len(rows) != 1 || rows[0].name() != "n1" {
		t.Fatalf("%v, %v", rows, err)
	}
	for content, want := range map[string]string{
		"[\n" + row + ",\n]":                   "line 3: invalid character",
		`{"rows": []}`:                         "no list of rows: line 1",
		`[]`:                                   "no rows",
		`[{"given": {}}]`:                      "row 1 has no id",
		`[null]`:                               "row 1 has no id",
		"[" + row + "," + row + "]":            `row 2: id "N1" is taken by "N1"`,
		`[{"id": "///", "expected": {"a":1}}]`: "namespace's name",
		`[{"id": "A"}]`:                        "row A: nothing is expected",
		strings.Replace("["+row+"]", "http", "ftp", 1):      `row N1: given.source.kind is "ftp"`,
		strings.Replace("["+row+"]", "http", "pvc", 1):      "row N1: given.source.storageClass has no name",
		strings.Replace("["+row+"]", "spec.pvc", "spec", 1): `row N1: given.target.api is "spec"`,
		strings.Replace("["+row+"]", "1Gi", "much", 1):      `row N1: given.target.size is "much"`,
	} {
		_, err := read(content)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line with %q", content, err, want)
		}
	}
	if _, err := readRows("no such file"); err == nil {
		t.Error("a missing file was read")
	}
}
