package main

import (
	"errors"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/harness"
)

// How many workers are cloned is asked for in the environment: what can't be is one line and status 2, and never another
// number in silence. Other families don't mind.
func TestChooseRefusesClonesThatCantBe(t *testing.T) {
	for asked, refused := range map[string]bool{"": false, "1": false, "50": false, "0": true, "-3": true, "many": true, "6.5": true} {
		t.Setenv("UPGRADE_E2E_CLONES", asked)
		_, err := choose("goldenimage", nil, nil)
		if usage := (harness.UsageError{}); errors.As(err, &usage) != refused || (err != nil) != refused {
			t.Errorf("UPGRADE_E2E_CLONES=%q: %v", asked, err)
		}
		if _, err := choose("adoption", nil, nil); err != nil {
			t.Errorf("UPGRADE_E2E_CLONES=%q: family adoption: %v", asked, err)
		}
	}
}
