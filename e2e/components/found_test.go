package components

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/sets"
)

func TestAComponentIsFoundWholeOrNotAtAll(t *testing.T) {
	m := &manifest{}
	for _, name := range []string{"a.example.com", "b.example.com"} {
		crd := &unstructured.Unstructured{}
		crd.SetName(name)
		m.crds = append(m.crds, crd)
	}
	for name, c := range map[string]struct {
		there []string
		want  bool
		line  string
	}{
		"none": {[]string{"c.example.com"}, false, ""},
		"all":  {[]string{"a.example.com", "b.example.com", "c.example.com"}, true, ""},
		"part": {[]string{"b.example.com"}, false, "CustomResourceDefinition b.example.com is there and a.example.com is not"},
	} {
		got, err := m.within(sets.New(c.there...))
		if got != c.want || (err == nil) != (c.line == "") || err != nil && !strings.Contains(err.Error(), c.line) {
			t.Errorf("%s: %v, %v; want %v, %q", name, got, err, c.want, c.line)
		}
	}
	if has, err := (&manifest{}).within(sets.New("a.example.com")); has || err != nil {
		t.Errorf("without kinds: %v, %v", has, err)
	}
}
