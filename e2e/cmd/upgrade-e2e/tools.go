package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/programs"
)

func toolsCommand() *cobra.Command {
	var flux string
	var node bool
	cmd := &cobra.Command{Use: "tools", Short: "Build the programs that a cluster consists of into bin/", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			if node {
				return programs.Build(cmd.Context(), root, cmd.OutOrStdout(), programs.NodeImage)
			}
			return build(cmd.Context(), root, flux, cmd.OutOrStdout())
		}}
	cmd.Flags().BoolVar(&node, "node-image", false, "also those of a kind node, for node-image to be run as root")
	cmd.Flags().StringVar(&flux, "flux", "", "also the helm-controller of this version: 1.4")
	return cmd
}

// leaveCommand is what a run on an existing cluster has told its reaper to call.
func leaveCommand() *cobra.Command {
	return &cobra.Command{Use: "leave DIR", Short: "Take from an existing cluster what a run has made", Args: cobra.ExactArgs(1), Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			lines, err := cluster.Leave(cmd.Context(), args[0])
			for _, line := range lines {
				fmt.Fprintln(cmd.OutOrStdout(), line)
			}
			return err
		}}
}

func cleanCommand() *cobra.Command {
	return &cobra.Command{Use: "clean", Short: "End the processes and remove the state that killed runs left behind", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			artifacts := filepath.Join(root, "_artifacts")
			swept, err := process.Sweep(artifacts)
			clusters, kindErr := cluster.SweepKind(cmd.Context(), true)
			for _, line := range append(swept, clusters...) {
				fmt.Fprintln(cmd.OutOrStdout(), line)
			}
			if err := errors.Join(err, kindErr); err != nil {
				return err
			}
			return allEnded(artifacts)
		}}
}

// allEnded fails for a run that has not ended: what says how to end it must not go before it has.
func allEnded(artifacts string) error {
	runs, err := filepath.Glob(filepath.Join(artifacts, "*"))
	if err != nil {
		return err
	}
	for _, run := range runs {
		if info, err := os.Lstat(run); err == nil && info.IsDir() && process.Unfinished(run) {
			return harness.UsageError{Line: fmt.Sprintf("clean: %s is still running, or what it has left could not be ended (see above); end it, or remove its folder yourself", run)}
		}
	}
	return nil
}
