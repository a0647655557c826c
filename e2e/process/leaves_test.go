package process

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLeavesAreEndedByClose(t *testing.T) {
	run, err := Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	ended := filepath.Join(t.TempDir(), "ended")
	if err := run.Leaves("thing", "sh", "-c", `echo "cookie: $`+Cookie+`" >"$0"`, ended); err != nil {
		t.Fatal(err)
	}
	if err := run.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(ended); err != nil || string(got) != "cookie: \n" {
		t.Errorf("the command wrote %q, %v", got, err)
	}
	for _, gone := range []string{leavesDir(run.Dir()), lockPath(run.Dir())} {
		if _, err := os.Stat(gone); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", gone, err)
		}
	}
}

func TestSweepTriesLeavesAgain(t *testing.T) {
	parent := t.TempDir()
	run, err := Open(filepath.Join(parent, "run"))
	if err != nil {
		t.Fatal(err)
	}
	service := filepath.Join(t.TempDir(), "service")
	if err := run.Leaves("thing", "ls", service); err != nil {
		t.Fatal(err)
	}
	if !Held(run.Dir()) {
		t.Error("an open run is not held")
	}
	if err := run.Close(); err == nil || !strings.Contains(err.Error(), "end thing of run "+run.Dir()) {
		t.Errorf("Close says %v", err)
	}
	if Held(run.Dir()) || !Unfinished(run.Dir()) {
		t.Errorf("a closed run that could not end what it leaves: held %v, unfinished %v", Held(run.Dir()), Unfinished(run.Dir()))
	}
	lines, err := Sweep(parent)
	if err != nil || len(lines) != 1 || !strings.Contains(lines[0], "end thing") {
		t.Errorf("Sweep without the service: %q, %v", lines, err)
	}
	if err := os.WriteFile(service, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if lines, err = Sweep(parent); err != nil || len(lines) != 1 || !strings.HasSuffix(lines[0], "removed its state") {
		t.Errorf("Sweep with the service: %q, %v", lines, err)
	}
	if Unfinished(run.Dir()) {
		t.Error("a swept run is unfinished")
	}
	if lines, err = Sweep(parent); err != nil || len(lines) != 0 {
		t.Errorf("a third Sweep: %q, %v", lines, err)
	}
}
