package main

import (
	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/nodeimage"
)

func nodeImageCommand() *cobra.Command {
	return &cobra.Command{Use: "node-image", Short: "Build the image of a kind node from Debian packages and Go modules", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			_, err = nodeimage.Build(cmd.Context(), root, cmd.OutOrStdout())
			return err
		}}
}

func bundleCommand() *cobra.Command {
	return &cobra.Command{Use: "bundle FILE", Short: "Save programs and node image into one archive, for --bundle", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root, err := harness.Root()
			if err != nil {
				return err
			}
			return nodeimage.Bundle(cmd.Context(), root, args[0], cmd.OutOrStdout())
		}}
}
