package cluster

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cozystack.io/upgrade-e2e/e2e/process"
)

const leaves = "existing-cluster"

// ExistingLog is the file in the run's logs that tells what was left alone on a cluster that outlives the run, if anything was.
const ExistingLog = leaves + ".log"

// The files of a stock.
const (
	stockFound      = "found.json"
	stockMade       = "made.jsonl"
	stockKubeconfig = "admin.kubeconfig"
	stockCluster    = "cluster" // path and content of the file that says which cluster it is, where one does
)

// visit is a run's stay on a cluster that outlives it.
type visit struct {
	stock  string // folder that tells what was there and what was made
	found  *found
	ledger *ledger
}

// begin writes down what is there and how to leave, before anything is made, and has admin's clients write down what they make.
// leave is a command that calls Leave with the folder that is appended to it. marker, unless it is "", is a file that has this content for
// as long as the cluster is there.
func (v *visit) begin(ctx context.Context, run *process.Run, kubeconfig clientcmdapi.Config, admin *rest.Config, leave []string, marker string) error {
	v.stock = run.State("visit")
	if err := os.Mkdir(v.stock, 0o700); err != nil {
		return err
	}
	if marker != "" {
		id, err := os.ReadFile(marker)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(v.stock, stockCluster), []byte(marker+"\n"+string(id)), 0o600); err != nil {
			return err
		}
	}
	if err := clientcmd.WriteToFile(kubeconfig, filepath.Join(v.stock, stockKubeconfig)); err != nil { // 0600
		return err
	}
	before, err := look(ctx, admin)
	if err != nil {
		return err
	}
	body, err := json.Marshal(before)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(v.stock, stockFound), body, 0o600); err != nil {
		return err
	}
	if v.ledger, err = openLedger(filepath.Join(v.stock, stockMade), before); err != nil {
		return err
	}
	v.found = before
	run.AtClose(v.ledger.file.Close)
	v.Track(admin)
	return run.Leaves(leaves, append(slices.Clone(leave), v.stock)...)
}

// Owns tells whether a namespace was made by the run.
func (v *visit) Owns(namespace string) bool { return v.ledger != nil && v.ledger.made(namespace) }

// Track has clients of cfg write down what they create, for Leave, and keeps them from changing what was there before.
func (v *visit) Track(cfg *rest.Config) {
	if v.ledger != nil {
		v.ledger.track(cfg)
	}
}
