package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// leaveGrace is how long a command that ends what a run leaves may take: a cluster with many objects takes minutes.
const leaveGrace = 6 * time.Minute

// Leaves tells how to end what the run makes that is no process of it, such as a container: by a command that whoever ends
// the run runs, be it Close, the reaper or a later Sweep. It has to be called before the thing is made, and the command must
// succeed when there is nothing to end. What it prints is kept in logs/<name>.log.
func (r *Run) Leaves(name string, command ...string) error {
	dir := leavesDir(r.dir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("note how to end %s: %w", name, err)
	}
	body, err := json.Marshal(command)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name), body, 0o600); err != nil {
		return fmt.Errorf("note how to end %s: %w", name, err)
	}
	return nil
}

func leavesDir(dir string) string { return filepath.Join(dir, "leaves") }

// endLeaves runs the commands that Leaves was given; one that succeeds is forgotten.
func endLeaves(dir string) error {
	entries, err := os.ReadDir(leavesDir(dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		note := filepath.Join(leavesDir(dir), e.Name())
		if err := endLeave(dir, note); err != nil {
			errs = append(errs, fmt.Errorf("end %s of run %s: %w", e.Name(), dir, err))
			continue
		}
		errs = append(errs, os.Remove(note))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.Remove(leavesDir(dir))
}

func endLeave(dir, note string) error {
	body, err := os.ReadFile(note)
	if err != nil {
		return err
	}
	var command []string
	if err := json.Unmarshal(body, &command); err != nil || len(command) == 0 {
		return fmt.Errorf("%s holds no command: %s", note, body)
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveGrace)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = withoutCookie(os.Environ())
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(string(out)))
	}
	if len(out) == 0 {
		return nil
	}
	log, err := openLog(dir, filepath.Base(note))
	if err != nil {
		return err
	}
	_, err = log.Write(out)
	return errors.Join(err, log.Close())
}
