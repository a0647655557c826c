package main

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/scenarios/adoption"
	"cozystack.io/upgrade-e2e/scenarios/computeplane"
	"cozystack.io/upgrade-e2e/scenarios/goldenimage"
)

// families are all there are, in the order of the catalogue.
func families() []harness.Family {
	return []harness.Family{adoption.Family(), computeplane.Family(), goldenimage.Family()}
}

// choose returns the families, or the one that is named, that hold one of tags after skip is taken away; unknown names and
// tags are an error.
func choose(name string, tags, skip []string) ([]harness.Family, error) {
	wanted := runFlags{tags: tags, skip: skip}.wanted
	candidates := families()
	if name != "" {
		one, err := family(name)
		if err != nil {
			return nil, err
		}
		candidates = []harness.Family{one}
	}
	var known []string
	for _, f := range candidates {
		known = append(known, f.Tags()...)
	}
	for _, tag := range append(slices.Clone(tags), skip...) {
		if !slices.Contains(known, tag) {
			return nil, harness.UsageError{Line: fmt.Sprintf("unknown tag %q; make e2e-list shows all", tag)}
		}
	}
	var out []harness.Family
	for _, f := range candidates {
		if slices.ContainsFunc(f.Tags(), wanted) {
			if f.Invalid != nil {
				return nil, f.Invalid
			}
			out = append(out, f)
		}
	}
	if len(out) == 0 {
		return nil, harness.UsageError{Line: fmt.Sprintf("no scenario is left of tags %s without %s",
			strings.Join(tags, ","), strings.Join(skip, ","))}
	}
	return out, nil
}

func family(name string) (harness.Family, error) {
	for _, f := range families() {
		if f.Name == name {
			return f, nil
		}
	}
	return harness.Family{}, harness.UsageError{Line: fmt.Sprintf("unknown family %q; make e2e-list shows all", name)}
}

func listCommand() *cobra.Command {
	return &cobra.Command{Use: "list", Short: "Print families and scenarios, one scenario a line", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 2, 0, 2, ' ', 0)
			for _, f := range families() {
				for _, s := range f.Scenarios {
					fmt.Fprintf(table, "%s\t%s\t%s\n", f.Name, s.Tag, s.Line)
				}
			}
			return table.Flush()
		}}
}
