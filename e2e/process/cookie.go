package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// killCookie kills with SIGKILL every process that carries dir's cookie, except
// itself, and returns their pids when none is left.
func killCookie(dir string) ([]int, error) {
	var killed []int
	deadline := time.Now().Add(10 * time.Second)
	// A process may fork while the list is read; only a scan that finds nobody,
	// twice in a row, is the end.
	for empty := 0; empty < 2; {
		pids, unsure, err := carriers(dir)
		if err != nil {
			return killed, err
		}
		late := time.Now().After(deadline)
		switch {
		case len(pids) > 0 && late:
			return killed, fmt.Errorf("processes%s of run %s do not end after SIGKILL", pidList(pids), dir)
		case len(pids) > 0 || unsure && !late:
			empty = 0
		default:
			empty++
			continue
		}
		for _, pid := range pids {
			ok, err := killCarrier(pid, dir)
			if err != nil {
				return killed, err
			}
			if ok && !slices.Contains(killed, pid) { // one that is still going down is found again
				killed = append(killed, pid)
			}
		}
		time.Sleep(5 * time.Millisecond) // the kernel's turn
	}
	return killed, nil
}

// killCarrier kills pid if it carries dir's cookie. The handle is taken before
// the cookie is read, so that a pid that changes hands in between is not hit.
func killCarrier(pid int, dir string) (bool, error) {
	p, err := os.FindProcess(pid)
	if err != nil {
		return false, nil // gone
	}
	defer func() { _ = p.Release() }()
	if !carries(pid, dir) {
		return false, nil
	}
	switch err := p.Kill(); {
	case errors.Is(err, os.ErrProcessDone):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("kill process %d of run %s: %w", pid, dir, err)
	}
	return true, nil
}

// carriers lists the processes with dir's cookie, but not this one. It is unsure
// when a process was just changing its program and may be one.
func carriers(dir string) (pids []int, unsure bool, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, false, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if carries(pid, dir) {
			pids = append(pids, pid)
		} else if execs(pid) {
			unsure = true
		}
	}
	return pids, unsure, nil
}

// carries tells whether the process was started with dir's cookie. Zombies and
// other users' processes have no readable environment: they do not carry it.
func carries(pid int, dir string) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if string(kv) == Cookie+"="+dir {
			return true
		}
	}
	return false
}

// execs tells whether the process is in the middle of an exec: the kernel shows
// neither environment nor arguments until the new program is laid out.
func execs(pid int) bool {
	for _, file := range []string{"environ", "cmdline"} {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file)); err != nil || len(b) > 0 {
			return false
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// After the name in parentheses: state, ppid, pgrp, session, tty, tpgid, flags.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 7 {
		return false
	}
	const kernelThread = 0x00200000 // PF_KTHREAD
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	return err == nil && flags&kernelThread == 0 && !strings.Contains("ZX", fields[0])
}

// initialCookie is the cookie that this process was started with, "" for none.
func initialCookie() string {
	env, err := os.ReadFile("/proc/self/environ")
	if err != nil {
		return ""
	}
	for kv := range strings.SplitSeq(string(env), "\x00") {
		if v, ok := strings.CutPrefix(kv, Cookie+"="); ok {
			return v
		}
	}
	return ""
}
