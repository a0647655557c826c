package programs

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestWhatIsCarriedIsNotBuiltAgain(t *testing.T) {
	t.Setenv("KUBEBUILDER_ASSETS", "")
	here, hello := root(t)
	there, _ := root(t)
	before, err := carry(here, []tool{hello})
	if err != nil || before.Current || !slices.Equal(before.Files, []string{"hello", ".stamps/hello"}) {
		t.Fatalf("before the build: %+v, %v", before, err)
	}
	if lines, err := run(t, here, hello); err != nil {
		t.Fatalf("%v: %q", err, lines)
	}
	built, err := carry(here, []tool{hello})
	if err != nil || !built.Current || built.Recipe != before.Recipe {
		t.Fatalf("after the build: %+v, %v", built, err)
	}
	other, err := carry(there, []tool{hello})
	if err != nil || other.Recipe != built.Recipe {
		t.Fatalf("a checkout with the same sources: %+v, want recipe %s, %v", other, built.Recipe, err)
	}
	var out bytes.Buffer
	scratch, unlock, err := Lock(t.Context(), there, &out)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Install(there, filepath.Join(here, "bin")); err != nil {
		t.Fatal(err)
	}
	unlock()
	if _, err := os.Stat(scratch); err == nil || filepath.Dir(scratch) != filepath.Join(there, "bin") {
		t.Errorf("folder %s, which is to be below bin, is still there", scratch)
	}
	if lines, err := run(t, there, hello); err != nil || count(lines, `built in`) != 0 {
		t.Errorf("the other checkout builds again: %q, %v", lines, err)
	}
	write(t, there, "tools/hello/main.go", "package main\n")
	if changed, err := carry(there, []tool{hello}); err != nil || changed.Recipe == built.Recipe || changed.Current {
		t.Errorf("with another source: %+v, %v", changed, err)
	}
	t.Setenv("KUBEBUILDER_ASSETS", assets(t))
	if _, err := carry(here, []tool{hello}); err == nil {
		t.Error("programs of KUBEBUILDER_ASSETS are carried")
	}
}

// assets is a folder with one program, as KUBEBUILDER_ASSETS may name it.
func assets(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "etcd"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
