// Command upgrade-e2e is what stands behind make: it runs families, lists them, plants defects, judges records again,
// builds the programs of a cluster, and cleans up after killed runs.
//
// Exit status: 0 pass, 1 fail, 3 inconclusive, 2 bad usage.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
)

// verdictError carries an exit status without a message of its own: the report has said everything.
type verdictError int

func (e verdictError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func main() {
	if runtime.GOOS != "linux" {
		fmt.Fprintf(os.Stderr, "upgrade-e2e runs on Linux only, this is %s\n", runtime.GOOS)
		os.Exit(harness.ExitUsage)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(status(root().ExecuteContext(ctx)))
}

func root() *cobra.Command {
	cmd := &cobra.Command{Use: "upgrade-e2e", Short: "Prove that a Cozystack upgrade hurt nobody",
		SilenceUsage: true, SilenceErrors: true}
	cmd.AddCommand(runCommand(), repeatCommand(), listCommand(), defectsCommand(), judgeCommand(), mergeCommand(), toolsCommand(), nodeImageCommand(), bundleCommand(), cleanCommand(), leaveCommand())
	return cmd
}

// status prints an error in one line and turns it into an exit status.
func status(err error) int {
	var verdict verdictError
	switch {
	case err == nil:
		return harness.ExitPass
	case errors.As(err, &verdict):
		return int(verdict)
	}
	fmt.Fprintln(os.Stderr, err)
	return harness.ExitUsage
}
