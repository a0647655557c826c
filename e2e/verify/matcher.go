package verify

import (
	"fmt"

	"github.com/onsi/gomega/types"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Pass matches a *history.History that the check passes: Expect(h).To(verify.Pass(verify.NoChurn(pool))).
func Pass(c Check) types.GomegaMatcher { return &matcher{check: c} }

type matcher struct {
	check  Check
	result Result
}

func (m *matcher) Match(actual any) (bool, error) {
	h, ok := actual.(*history.History)
	if !ok || h == nil {
		return false, fmt.Errorf("check %q judges a *history.History, not a %T", m.check.Name, actual)
	}
	m.result = m.check.Judge(h)
	return m.result.Verdict == Passed, nil
}

func (m *matcher) FailureMessage(any) string { return Named{m.check.Name, m.result}.String() }

func (m *matcher) NegatedFailureMessage(any) string {
	return fmt.Sprintf("%s: pass, and should not", m.check.Name)
}
