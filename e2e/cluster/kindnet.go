package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/kind/pkg/cluster/nodes"
)

// bridgeConfig is where the node image has its pods' network, with a subnet that is right for one node.
const bridgeConfig = "/etc/cni/net.d/10-bridge.conflist"

// podNetwork is a node's part of the pods' network.
type podNetwork struct {
	node    nodes.Node
	address netip.Addr   // of the node
	pods    netip.Prefix // addresses of its pods
}

// joinPodNetworks makes one network of the nodes' bridges: each node gets the subnet that the cluster gave it, and routes to
// the others'. A single node has no need of it.
func (k *Kind) joinPodNetworks(ctx context.Context) error {
	if len(k.nodes) == 1 || !k.fresh {
		return nil
	}
	var networks []podNetwork
	for _, node := range k.nodes {
		network, err := k.podNetwork(ctx, node)
		if err != nil {
			return fmt.Errorf("network of the pods on node %s: %w", node, err)
		}
		networks = append(networks, network)
	}
	for _, network := range networks {
		if err := network.join(ctx, networks); err != nil {
			return fmt.Errorf("network of the pods on node %s: %w", network.node, err)
		}
	}
	// Those that have an address already got it before.
	pods, err := k.client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, pod := range pods.Items {
		if pod.Spec.HostNetwork {
			continue
		}
		if err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
			return fmt.Errorf("start pod %s anew: %w", pod.Name, err)
		}
	}
	return nil
}

// podNetwork waits until the cluster has given the node a subnet.
func (k *Kind) podNetwork(ctx context.Context, node nodes.Node) (podNetwork, error) {
	network := podNetwork{node: node}
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, startTimeout, true, func(ctx context.Context) (bool, error) {
		got, err := k.client.CoreV1().Nodes().Get(ctx, node.String(), metav1.GetOptions{})
		if err != nil || got.Spec.PodCIDR == "" {
			return false, err
		}
		for _, a := range got.Status.Addresses {
			if a.Type == corev1.NodeInternalIP && !network.address.IsValid() {
				network.address, err = netip.ParseAddr(a.Address)
			}
		}
		if err == nil {
			network.pods, err = netip.ParsePrefix(got.Spec.PodCIDR)
		}
		return network.address.IsValid(), err
	})
	return network, err
}

// join gives the node its subnet and routes to the others'.
func (n podNetwork) join(ctx context.Context, all []podNetwork) error {
	script := []string{
		fmt.Sprintf(`sed -i 's|"subnet": "[^"]*"|"subnet": "%s"|' %s`, n.pods, bridgeConfig),
		"if ip link show cni0 >/dev/null 2>&1; then ip link delete cni0; fi", // it has an address of the old subnet
	}
	for _, other := range all {
		if other.node.String() != n.node.String() {
			script = append(script, fmt.Sprintf("ip route replace %s via %s", other.pods, other.address))
		}
	}
	var said bytes.Buffer
	if err := n.node.CommandContext(ctx, "sh", "-ec", strings.Join(script, "\n")).SetStderr(&said).Run(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
	}
	return nil
}
