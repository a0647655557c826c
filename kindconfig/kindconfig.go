// Package kindconfig carries what a kind cluster of ours is made from: kind's own configuration, the files of a node and
// what is applied to a new cluster.
package kindconfig

import "embed"

// One is the configuration of a cluster with one node; ${AUDIT_DIR} in it is a folder of the host.
//
//go:embed one.yaml
var One string

// RealPods is applied to a new cluster: it sends pods whose image is at hand to the real node.
//
//go:embed real-pods.yaml
var RealPods string

// Node holds the files of a node, below node/ at their places.
//
//go:embed all:node
var Node embed.FS
