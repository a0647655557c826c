package cluster

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"

	"cozystack.io/upgrade-e2e/e2e/process"
)

// tenantEtcd starts an etcd for the tenants' API server beside a cluster whose own lets nobody in, and returns its URL.
func tenantEtcd(ctx context.Context, run *process.Run, programs Programs) (string, error) {
	client, err := process.FreePort()
	if err != nil {
		return "", err
	}
	peer, err := process.FreePort()
	if err != nil {
		return "", err
	}
	url := func(port int) string { return "http://" + loopback(port) }
	_, err = run.Start(ctx, process.Spec{Name: "tenant-etcd", Path: programs.Path("etcd"), Restart: true, Args: []string{
		"--data-dir=" + run.State("tenant-etcd"), "--listen-client-urls=" + url(client), "--advertise-client-urls=" + url(client),
		"--listen-peer-urls=" + url(peer), "--unsafe-no-fsync=true", "--log-level=warn",
	}})
	return url(client), err
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// expose listens on a port of host, an address of this machine, for as long as the run lasts, and relays to the same port of
// 127.0.0.1.
func expose(run *process.Run, host string, port int) error {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("expose port %d to the nodes: %w", port, err)
	}
	run.AtClose(listener.Close)
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return // closed
			}
			go relay(from, loopback(port))
		}
	}()
	return nil
}

// relay copies both ways until one side ends.
func relay(from net.Conn, address string) {
	defer from.Close()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return // who called sees a closed connection
	}
	defer to.Close()
	done := make(chan struct{}, 2)
	go func() { _, _ = io.Copy(to, from); done <- struct{}{} }()
	go func() { _, _ = io.Copy(from, to); done <- struct{}{} }()
	<-done
}
