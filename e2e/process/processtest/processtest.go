// Package processtest looks at the processes of a run from outside, for tests.
package processtest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// Pids lists the living processes that carry the cookie of the run in dir.
func Pids(t *testing.T, dir string) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, file := range files {
		env, err := os.ReadFile(file)
		if err != nil || !slices.Contains(strings.Split(string(env), "\x00"), process.Cookie+"="+dir) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// Listener is a TCP socket that a process of a run listens on. Address is the
// kernel's notation: hexadecimal, little-endian.
type Listener struct {
	Program, Address string
}

// Loopback tells whether only this machine reaches the listener.
func (l Listener) Loopback() bool {
	return strings.HasPrefix(l.Address, "0100007F:") ||
		strings.HasPrefix(l.Address, "00000000000000000000000001000000:") ||
		strings.HasPrefix(l.Address, "0000000000000000FFFF00000100007F:")
}

// Listeners lists what the run's processes listen on.
func Listeners(t *testing.T, dir string) []Listener {
	t.Helper()
	program := map[string]string{} // by inode of the socket
	for _, pid := range Pids(t, dir) {
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			to, err := os.Readlink(fd)
			if inode, ok := strings.CutPrefix(to, "socket:["); err == nil && ok {
				program[strings.TrimSuffix(inode, "]")] = Program(pid)
			}
		}
	}
	var all []Listener
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		lines, err := os.ReadFile(table)
		if err != nil {
			continue // no IPv6
		}
		for line := range strings.Lines(string(lines)) {
			f := strings.Fields(line) // number, local, remote, state, …, inode is the tenth
			const listen = "0A"
			if len(f) >= 10 && f[3] == listen && program[f[9]] != "" {
				all = append(all, Listener{Program: program[f[9]], Address: f[1]})
			}
		}
	}
	return all
}

// Program is the file name of a process's program, "" when it is gone.
func Program(pid int) string {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return ""
	}
	return filepath.Base(exe)
}

// Usage is what a process has used.
type Usage struct {
	Program  string
	CPU      time.Duration // user and system
	Resident int           // bytes, now
}

// Usages lists what each of the run's processes has used.
func Usages(t *testing.T, dir string) []Usage {
	t.Helper()
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	var all []Usage
	for _, pid := range Pids(t, dir) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		// From the state on, which follows the name in parentheses.
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(f) < 22 {
			continue
		}
		number := func(i int) int { n, _ := strconv.Atoi(f[i]); return n }
		all = append(all, Usage{
			Program:  Program(pid),
			CPU:      time.Duration(number(11)+number(12)) * tick,
			Resident: number(21) * os.Getpagesize(),
		})
	}
	return all
}

// WaitFor polls ok and fails the test when it does not come true in time.
func WaitFor(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s in vain for %s", within, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
