package simulate

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestExpand(t *testing.T) {
	env := map[string]string{"A": "1", "B_2": "two"}
	for in, want := range map[string]string{
		"$(A)-$(B_2)": "1-two", "$(UNKNOWN)": "$(UNKNOWN)", "$$(A)": "$(A)", "$A ${A}": "$A ${A}", "$(kubectl get x)": "$(kubectl get x)",
	} {
		if got := expand(in, env); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestMountTable(t *testing.T) {
	table := newMountTable(map[string]string{"/scripts": "/h/s", "/scripts/lib": "/h/lib", "/tmp": "/h/tmp"})
	for in, want := range map[string]string{
		"/scripts/run.sh":                "/h/s/run.sh",
		"/scripts":                       "/h/s",
		". /scripts/lib/a.sh; X=/tmp/y":  ". /h/lib/a.sh; X=/h/tmp/y",
		"cat /scripts/a /scripts/b":      "cat /h/s/a /h/s/b",
		"PATH=/scripts:/tmp":             "PATH=/h/s:/h/tmp",
		"/myscripts/x /var/tmp /tmpfile": "/myscripts/x /var/tmp /tmpfile",
		"https://example.org/scripts/a":  "https://example.org/scripts/a",
		`"/tmp" '/tmp/x' $(cat /tmp/a)`:  `"/h/tmp" '/h/tmp/x' $(cat /h/tmp/a)`,
		"/scripts /scripts /scripts":     "/h/s /h/s /h/s",
	} {
		if got := table.replace(in); got != want {
			t.Errorf("%s\n got %s\nwant %s", in, got, want)
		}
	}
}

func TestOnHost(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"sh", "kubectl"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	script := filepath.Join(dir, "script.sh")
	if err := os.WriteFile(script, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]string{
		"/bin/sh": "sh", "sh": "sh", "/opt/image/bin/kubectl": "kubectl", script: script, "/no/such": "/no/such", "bash": "bash",
	} {
		if got := onHost(in, dir); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestWriteFiles(t *testing.T) {
	dir := t.TempDir()
	data := map[string]string{"run.sh": "x", "conf": "y"}
	if err := writeFiles(dir, data, []corev1.KeyToPath{{Key: "run.sh", Path: "bin/run"}}, ptr.To[int32](0o755)); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "bin/run"))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v %v: want a file that only its owner reads and runs", info.Mode(), err)
	}
	if _, err := os.Stat(filepath.Join(dir, "conf")); err == nil {
		t.Error("a key that is not listed was written")
	}
	if err := writeFiles(dir, data, []corev1.KeyToPath{{Key: "conf", Path: "../conf"}}, nil); err == nil {
		t.Error("a path left the volume")
	}
	if err := writeFiles(dir, data, []corev1.KeyToPath{{Key: "none", Path: "none"}}, nil); err == nil {
		t.Error("a missing key was not noticed")
	}
}

func TestUnsetKeepsValuesOutOfArguments(t *testing.T) {
	args := unset([]string{"SECRET=s3cret", "KEEP=old", "UPGRADE_E2E_RUN=/run", "X=y=z"}, map[string]string{"KEEP": "new"})
	if want := []string{"-u", "SECRET", "-u", "X"}; !slices.Equal(args, want) {
		t.Errorf("%q, want %q", args, want)
	}
	if strings.Contains(strings.Join(args, " "), "s3cret") {
		t.Error("a value is visible to every user")
	}
}

func TestTail(t *testing.T) {
	tail := &tail{limit: 5}
	for _, s := range []string{"abc", "def", "g"} {
		if _, err := tail.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	if tail.String() != "cdefg" {
		t.Errorf("%q", tail.String())
	}
}

func TestEveryStandInHasItsOwnIdentityAndAFidelityRow(t *testing.T) {
	identities := map[string]string{}
	for _, si := range standIns {
		id := si.namespace + "/" + si.serviceAccount
		if other, ok := identities[id]; ok {
			t.Errorf("%s and %s share %s", si.name, other, id)
		}
		identities[id] = si.name
		for _, r := range si.rules {
			if slices.Contains(r.Verbs, "*") || slices.Contains(r.Resources, "*") {
				t.Errorf("%s may do everything: %v", si.name, r)
			}
		}
	}
	if len(slices.Collect(maps.Keys(identities))) != 7 || len(Fidelity(false)) != 8 || len(Fidelity(true)) != 8 {
		t.Errorf("%d identities, %d rows", len(identities), len(Fidelity(false)))
	}
}
