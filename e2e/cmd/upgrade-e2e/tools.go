package main

import (
	"fmt"

	"path/filepath"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/process"
)

func toolsCommand() *cobra.Command {
	var flux string
	cmd := &cobra.Command{Use: "tools", Short: "Build the programs that a cluster consists of into bin/", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			return build(cmd.Context(), root, flux, cmd.OutOrStdout())
		}}
	cmd.Flags().StringVar(&flux, "flux", "", "also the helm-controller of this version: 1.4")
	return cmd
}

func cleanCommand() *cobra.Command {
	return &cobra.Command{Use: "clean", Short: "End the processes and remove the state that killed runs left behind", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			swept, err := process.Sweep(filepath.Join(root, "_artifacts"))
			for _, line := range swept {
				fmt.Fprintln(cmd.OutOrStdout(), line)
			}
			return err
		}}
}
