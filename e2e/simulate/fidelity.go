package simulate

// FidelityRow says of one stand-in what it plays and how far that goes.
type FidelityRow struct {
	// Component is what is played.
	Component string
	// Why is what a reader of a verdict must know about it.
	Why string
}

// Fidelity is a row for every stand-in. On a cluster with real nodes pods of Jobs are not played.
func Fidelity(realNodes bool) []FidelityRow {
	if realNodes {
		return append([]FidelityRow{{"nodes of VMs", "two nodes beside the real one, for no guest can run there: their pods run as soon as they are " +
			"scheduled and do nothing; pods of Jobs run on the real node if it has their image, which is so for the platforms' own hooks, " +
			"else as processes of this machine; pods reach the charts and the tenants' API, processes of this machine, by the gateway of the nodes' network"}}, played()...)
	}
	return append([]FidelityRow{
		{"nodes, kubelet", "no machine has two of them with a container runtime: pods run as soon as they are scheduled and do nothing; " +
			"those of Jobs run as processes of the host under their own ServiceAccount's token, sh being bash, killed without SIGTERM"},
	}, played()...)
}

// played is what is played on every cluster.
func played() []FidelityRow {
	return []FidelityRow{
		{"virt-handler, guests", "no KVM is assumed: guests boot, migrate and shut down in no time and have no agent"},
		{"CSI driver", "volumes are PersistentVolume objects without data, cloned, restored from snapshots and expanded as objects; binding and scheduling are real; nothing is attached"},
		{"CDI", "its main module can't be built: http imports and clones of claims and snapshots are admitted and decided as CDI 1.64 does and transfer nothing; no uploads, registries, cron imports or volumes made beforehand"},
		{"Kamaji", "can't be built: control planes are ready at once, in the version asked for; certificates do not follow certSANs"},
		{"cert-manager", "not tried to build: self-signed and CA issuers, Ed25519 keys, nothing is renewed; the fixture has no certificate"},
		{"tenant API", "one kube-apiserver for all tenants, to save memory: they see each other's Nodes, which CAPI tells apart by providerID and " +
			"cluster annotation, and would share whatever add-ons are installed; no controller-manager runs in it"},
		{"tenant nodes", "Ready while the worker's guest is ready, unknown without the 40 s grace period once it is gone"},
	}
}
