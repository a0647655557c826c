package history_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
	ht "cozystack.io/upgrade-e2e/e2e/history/historytest"
)

func TestDecodeRelease(t *testing.T) {
	md := ht.Object("MachineDeployment", "t/md", ht.Set("spec.replicas", int64(2)))
	ns := ht.Object("Namespace", "other")
	r, err := history.DecodeRelease(ht.Stored{Release: "t/kubernetes-prod", Revision: 3, Status: "superseded", Values: map[string]any{"a": "b"}, Schema: `{"type":"object"}`, Objects: []*unstructured.Unstructured{md, ns}}.Secret())
	if err != nil {
		t.Fatal(err)
	}
	if r.Name != "kubernetes-prod" || r.Namespace != "t" || r.Revision != 3 || r.Status != "superseded" || r.Chart != "chart" || r.ChartVersion != "1.2.3" || r.Values["a"] != "b" || string(r.Schema) != `{"type":"object"}` || len(r.Objects) != 2 {
		t.Errorf("decoded %+v", r)
	}
	for name, c := range map[string]struct {
		o    *unstructured.Unstructured
		want bool
	}{
		"itself":                    {md, true},
		"another name":              {ht.Object("MachineDeployment", "t/md-large"), false},
		"another namespace":         {ht.Object("MachineDeployment", "t2/md"), false},
		"another kind":              {ht.Object("MachineHealthCheck", "t/md"), false},
		"without a namespace":       {ns, true},
		"another version of it":     {ht.Object("MachineDeployment", "t/md", ht.Set("apiVersion", "cluster.x-k8s.io/v1beta2")), true},
		"the same in another group": {ht.Object("MachineDeployment", "t/md", ht.Set("apiVersion", "example.org/v1")), false},
	} {
		if got := r.Has(c.o); got != c.want {
			t.Errorf("%s: Has is %v, want %v", name, got, c.want)
		}
	}
}

func TestDeployedIsTheLastDeployedRevision(t *testing.T) {
	revision := func(n int, status string) *unstructured.Unstructured {
		return ht.Stored{Release: "t/r", Revision: n, Status: status}.Secret()
	}
	key := history.ReleaseKey{Namespace: "t", Name: "r"}
	first := revision(1, "deployed")
	b := ht.New().Baseline(revision(10, "deployed"), first, revision(11, "failed"))
	b.Update(ht.Helm, first, ht.Set("data", revision(1, "superseded").Object["data"]))
	h := b.Read(t)
	if r := h.Deployed(key); r == nil || r.Revision != 10 {
		t.Errorf("deployed is %+v, want revision 10", r)
	}
	var got []string
	for _, r := range h.Releases(key) {
		got = append(got, r.Status)
	}
	if len(got) != 3 || got[0] != "superseded" || got[1] != "deployed" || got[2] != "failed" {
		t.Errorf("statuses by revision are %v", got)
	}
	if h.Deployed(history.ReleaseKey{Namespace: "t", Name: "none"}) != nil {
		t.Error("a release that never was is deployed")
	}
}
