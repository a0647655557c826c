package process

import (
	"fmt"
	"math/rand/v2"
	"net"

	"golang.org/x/sys/unix"
)

// Below the kernel's default range for outgoing connections (32768 and up), so
// that no connection takes a port between FreePort and its server's start.
const lowestPort, highestPort = 15000, 32767

// FreePort picks a TCP port that is free on 127.0.0.1. Other processes that use
// FreePort on this machine do not get it as long as this process lives.
func FreePort() (int, error) {
	for range 1000 {
		port := lowestPort + rand.IntN(highestPort-lowestPort+1)
		if reserve(port) && listens(port) {
			return port, nil
		}
	}
	return 0, fmt.Errorf("no free port on 127.0.0.1 from %d to %d", lowestPort, highestPort)
}

// reserve binds an abstract Unix socket named after the port and keeps it; the
// kernel drops it with this process.
func reserve(port int) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	if unix.Bind(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("@upgrade-e2e/port/%d", port)}) != nil {
		_ = unix.Close(fd)
		return false
	}
	return true
}

func listens(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
