package report

import (
	"fmt"
	"io"
	"text/tabwriter"

	"cozystack.io/upgrade-e2e/e2e/verify"
)

// shown is how much evidence a check prints on the screen; verdict.json has all of it.
const shown = 5

// Text writes the document for a reader at a terminal: what failed and why, then one line a scenario and the verdict.
func (d Document) Text(w io.Writer) {
	for _, run := range d.Runs {
		run.text(w)
	}
	fmt.Fprintf(w, "\nverdict: %s\n", d.Verdict)
}

func (r Run) text(w io.Writer) {
	fmt.Fprintf(w, "\n%s on %s: %s → %s (run %s, seed %d)\n", r.Family, r.Provider, r.Old, r.New, r.ID, r.Seed)
	if r.Reason != "" {
		fmt.Fprintf(w, "  %s: %s\n", verify.Inconclusive, r.Reason)
	}
	for _, s := range r.Scenarios {
		for _, c := range s.Checks {
			if c.Verdict == verify.Passed {
				continue
			}
			fmt.Fprintf(w, "\n  %s, %s: %s", s.Tag, c.Name, c.Verdict)
			if c.Reason != "" {
				fmt.Fprintf(w, ": %s", c.Reason)
			}
			fmt.Fprintln(w)
			for i, e := range c.Evidence {
				if i == shown {
					fmt.Fprintf(w, "    … and %d more in verdict.json\n", len(c.Evidence)-shown)
					break
				}
				fmt.Fprintf(w, "    %s\n", e)
			}
		}
	}
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	for _, s := range r.Scenarios {
		fmt.Fprintf(table, "  %s\t%s\t%d checks\n", s.Verdict, s.Tag, len(s.Checks))
	}
	_ = table.Flush()
	t := r.Seconds
	fmt.Fprintf(w, "  boot %.0f s, install %.0f s, populate %.0f s, upgrade %.0f s, settle %.0f s, judge %.1f s, total %.0f s\n",
		t.Boot, t.Install, t.Populate, t.Upgrade, t.Settle, t.Judge, t.Total)
}

// Table writes the fidelity table.
func Table(w io.Writer, rows []Fidelity) {
	table := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(table, "  component\tversion\tplayed by\twhy")
	for _, f := range rows {
		who := "real"
		if !f.Real {
			who = "stand-in"
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s\n", f.Component, f.Version, who, f.Why)
	}
	_ = table.Flush()
}
