package report

import (
	"fmt"
	"os"
	"strings"

	"github.com/jstemmer/go-junit-report/v2/junit"

	"cozystack.io/upgrade-e2e/e2e/verify"
)

// writeJUnit writes one suite a run and one case a check. Inconclusive is an error and fail is a failure, as JUnit's
// readers count them apart.
func (d Document) writeJUnit(path string) error {
	all := junit.Testsuites{Name: "upgrade-e2e"}
	for i, run := range d.Runs {
		suite := junit.Testsuite{Name: run.Family, ID: i, Time: fmt.Sprintf("%.3f", run.Seconds.Total)}
		for name, value := range map[string]string{"id": run.ID, "provider": run.Provider, "old": run.Old, "new": run.New} {
			suite.AddProperty(name, value)
		}
		if run.Reason != "" {
			suite.AddTestcase(junit.Testcase{Name: "run", Classname: run.Family, Time: "0",
				Error: &junit.Result{Message: run.Reason, Type: string(verify.Inconclusive)}})
		}
		for _, s := range run.Scenarios {
			for _, c := range s.Checks {
				suite.AddTestcase(testcase(run.Family+"."+s.Tag, c))
			}
		}
		all.AddSuite(suite)
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write junit: %w", err)
	}
	if err := all.WriteXML(f); err != nil {
		_ = f.Close()
		return fmt.Errorf("write junit %s: %w", path, err)
	}
	return f.Close()
}

func testcase(class string, c Check) junit.Testcase {
	tc := junit.Testcase{Name: c.Name, Classname: class, Time: "0"}
	var lines []string
	for _, e := range c.Evidence {
		lines = append(lines, e.String())
	}
	result := &junit.Result{Message: c.Reason, Type: string(c.Verdict), Data: strings.Join(lines, "\n")}
	switch c.Verdict {
	case verify.Passed:
	case verify.Failed:
		tc.Failure = result
	default:
		tc.Error = result
	}
	return tc
}
