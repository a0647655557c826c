package goldenimage

import (
	"os"
	"testing"

	"cozystack.io/upgrade-e2e/e2e/harness"
)

var suite = harness.New(Family())

func TestMain(m *testing.M) { os.Exit(suite.Main(m)) }

func TestGoldenImage(t *testing.T) { suite.Test(t) }
