package components

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"cozystack.io/upgrade-e2e/e2e/cluster"
	"cozystack.io/upgrade-e2e/e2e/process"
	"cozystack.io/upgrade-e2e/e2e/process/processtest"
)

const (
	badMachineDeployment = `
apiVersion: cluster.x-k8s.io/v1beta1
kind: MachineDeployment
metadata: {name: bad, namespace: default}
spec:
  clusterName: c
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {other: label}}
    spec:
      clusterName: c
      bootstrap: {dataSecretName: s}
      infrastructureRef: {apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1, kind: KubevirtMachineTemplate, name: t}
`
	badVM = `
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: bad, namespace: default}
spec:
  runStrategy: Halted
  template:
    spec:
      domain: {devices: {disks: [{name: system, disk: {bus: virtio}}]}}
`
	badTalosConfig = `
apiVersion: bootstrap.cluster.x-k8s.io/v1alpha3
kind: TalosConfig
metadata: {name: bad, namespace: default}
spec: {generateType: none, hostname: {source: nowhere}}
`
	machineTemplate = `
apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1
kind: KubevirtMachineTemplate
metadata: {name: template, namespace: default}
spec:
  template:
    spec:
      virtualMachineTemplate:
        spec:
          runStrategy: Always
          template: {spec: {domain: {devices: {}, memory: {guest: 64Mi}}}}
`
	goodVM = `
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: good, namespace: default}
spec:
  runStrategy: Always
  template:
    spec:
      domain: {devices: {}, memory: {guest: 64Mi}}
`
)

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

func TestEmbedded(t *testing.T) {
	programs, err := cluster.FindPrograms("../..")
	if err != nil {
		t.Skip(err)
	}
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, run.Dir())
		}
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	began := time.Now()
	c := cluster.NewEmbedded(run, programs)
	if _, err := c.Create(ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("cluster ready after %.1f s", time.Since(began).Seconds())
	installed, err := Install(ctx, c, programs, Options{Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("components ready after %.1f s", time.Since(began).Seconds())
	admin, err := client.New(c.KubernetesRestConfig(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}

	t.Run("kinds are served", func(t *testing.T) {
		disco := discovery.NewDiscoveryClientForConfigOrDie(c.KubernetesRestConfig())
		for gv, kind := range map[string]string{
			"helm.toolkit.fluxcd.io/v2":                "HelmRelease",
			"source.toolkit.fluxcd.io/v1":              "ExternalArtifact",
			"cluster.x-k8s.io/v1beta1":                 "MachineDeployment",
			"infrastructure.cluster.x-k8s.io/v1alpha1": "KubevirtMachineTemplate",
			"bootstrap.cluster.x-k8s.io/v1alpha3":      "TalosConfigTemplate",
			"kubevirt.io/v1":                           "VirtualMachine",
			"cdi.kubevirt.io/v1beta1":                  "DataVolume",
			"snapshot.storage.k8s.io/v1":               "VolumeSnapshot",
			"instancetype.kubevirt.io/v1beta1":         "VirtualMachineClusterInstancetype",
			"subresources.kubevirt.io/v1":              "", // aggregated
		} {
			var list *metav1.APIResourceList
			// The API server drops an aggregated API for a moment when a busy machine lets one of its probes time out.
			processtest.WaitFor(t, time.Minute, gv, func() bool {
				var err error
				list, err = disco.ServerResourcesForGroupVersion(gv)
				return err == nil
			})
			found := kind == ""
			for _, r := range list.APIResources {
				found = found || r.Kind == kind
			}
			if !found {
				t.Errorf("%s has no %s", gv, kind)
			}
		}
	})

	t.Run("real webhooks refuse what is wrong", func(t *testing.T) { assertRefusals(ctx, t, admin) })

	t.Run("virt-controller acts under its own name", func(t *testing.T) {
		if err := admin.Create(ctx, object(t, goodVM)); err != nil {
			t.Fatal(err)
		}
		vmi := &unstructured.Unstructured{}
		vmi.SetAPIVersion("kubevirt.io/v1")
		vmi.SetKind("VirtualMachineInstance")
		processtest.WaitFor(t, 2*time.Minute, "the VM's instance", func() bool {
			return admin.Get(ctx, client.ObjectKey{Namespace: "default", Name: "good"}, vmi) == nil
		})
		log, err := os.ReadFile(c.AuditLog())
		if err != nil {
			t.Fatal(err)
		}
		writer := ""
		for line := range bytes.Lines(log) {
			var event struct {
				Verb           string
				User           struct{ Username string }
				ResponseObject struct{ Metadata struct{ UID string } }
			}
			if err := yaml.Unmarshal(line, &event); err != nil {
				t.Fatal(err)
			}
			if event.Verb == "create" && event.ResponseObject.Metadata.UID == string(vmi.GetUID()) {
				writer = event.User.Username
			}
		}
		if want := "system:serviceaccount:kubevirt:kubevirt-controller"; writer != want {
			t.Errorf("the instance was made by %q, want %q", writer, want)
		}
		if err := admin.Delete(ctx, object(t, goodVM)); err != nil {
			t.Fatal(err)
		}
		processtest.WaitFor(t, 2*time.Minute, "the VM to go", func() bool {
			vm := object(t, goodVM)
			return apierrors.IsNotFound(admin.Get(ctx, client.ObjectKeyFromObject(vm), vm))
		})
	})

	t.Run("all come to rest", func(t *testing.T) {
		var busy []string
		processtest.WaitFor(t, 2*time.Minute, "idle controllers", func() bool {
			var err error
			busy, err = installed.Busy(ctx)
			return err == nil && len(busy) == 0
		})
		t.Log(busy)
	})

	t.Run("the fidelity table names every controller and its version", func(t *testing.T) {
		stand := 0
		for _, row := range installed.Fidelity {
			if row.Real && !strings.HasPrefix(row.Version, "v") {
				t.Errorf("%+v has no version", row)
			}
			if !row.Real {
				stand++
				if row.Why == "" {
					t.Errorf("%+v does not say why", row)
				}
			}
		}
		if len(installed.Fidelity)-stand != 10 || stand < 5 {
			t.Errorf("%d rows, %d of them stand-ins: %+v", len(installed.Fidelity), stand, installed.Fidelity)
		}
	})

	t.Run("no controller had to be restarted", func(t *testing.T) {
		for _, ctl := range controllers(Options{HelmController: "helm-controller"}) {
			p := run.Find(ctl.name)
			if p == nil || p.Restarts() != 0 {
				t.Errorf("%s: %+v", ctl.name, p)
			}
		}
	})

	t.Run("a killed controller comes back", func(t *testing.T) {
		p := run.Find("virt-api")
		if err := p.Signal(os.Kill); err != nil {
			t.Fatal(err)
		}
		processtest.WaitFor(t, 2*time.Minute, "virt-api's webhooks", func() bool {
			err := admin.Create(ctx, object(t, badVM))
			return p.Restarts() == 1 && err != nil && strings.Contains(err.Error(), "denied the request")
		})
	})

	t.Run("all listen on loopback only", func(t *testing.T) {

		listeners := processtest.Listeners(t, run.Dir())
		for _, l := range listeners {
			if !l.Loopback() {
				t.Errorf("%s listens on %s", l.Program, l.Address)
			}
		}
		if len(listeners) < 15 {
			t.Errorf("saw only %v", listeners)
		}
	})

	var cpu time.Duration
	resident := 0
	for _, u := range processtest.Usages(t, run.Dir()) {
		t.Logf("%-40s %6.1f s CPU %5d MiB", u.Program, u.CPU.Seconds(), u.Resident>>20)
		cpu += u.CPU
		resident += u.Resident
	}
	t.Logf("%-40s %6.1f s CPU %5d MiB", "all", cpu.Seconds(), resident>>20)

	saved := filepath.Join(t.TempDir(), "saved")
	if err := c.Save(ctx, saved); err != nil {
		t.Fatal(err)
	}
	closing := time.Now()
	if err := run.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("closed in %.1f s", time.Since(closing).Seconds())
	if left := processtest.Pids(t, run.Dir()); len(left) != 0 {
		t.Errorf("processes left after Close: %v", left)
	}
	t.Run("a cluster that was saved works at its new addresses", func(t *testing.T) { testRestored(ctx, t, programs, saved) })
}

func testRestored(ctx context.Context, t *testing.T, programs cluster.Programs, saved string) {
	run, err := process.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	defer run.Close()
	c := cluster.NewEmbedded(run, programs).From(saved)
	if _, err := c.Create(ctx); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(ctx)
	installed, err := Install(ctx, c, programs, Options{Restored: true, Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		end()
		if err := installed.Simulation.Wait(); err != nil {
			t.Error(err)
		}
	}()
	admin, err := client.New(c.KubernetesRestConfig(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	assertRefusals(ctx, t, admin)
	// CAPI reads its own kinds through a conversion webhook, and virt-controller must lead at once.
	if err := admin.Create(ctx, object(t, goodVM)); err != nil {
		t.Fatal(err)
	}
	vmi := &unstructured.Unstructured{}
	vmi.SetAPIVersion("kubevirt.io/v1")
	vmi.SetKind("VirtualMachineInstance")
	processtest.WaitFor(t, time.Minute, "the VM's instance", func() bool {
		return admin.Get(ctx, client.ObjectKey{Namespace: "default", Name: "good"}, vmi) == nil
	})
}

func showLogs(t *testing.T, dir string) {
	logs, _ := filepath.Glob(filepath.Join(dir, "logs", "*.log"))
	for _, path := range logs {
		if filepath.Base(path) == "audit.log" {
			continue
		}
		log, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		t.Logf("%s\n%s", path, log[max(0, len(log)-2000):])
	}
}

func assertRefusals(ctx context.Context, t *testing.T, admin client.Client) {
	t.Helper()
	for name, tc := range map[string]struct{ object, webhook, reason string }{
		"CAPI":     {badMachineDeployment, "validation.machinedeployment.cluster.x-k8s.io", "must match spec.selector"},
		"KubeVirt": {badVM, "virtualmachine-validator.kubevirt.io", "system"},
		"Talos":    {badTalosConfig, "talosconfig", "valid values are"},
	} {
		err := admin.Create(ctx, object(t, tc.object))
		if err == nil || !strings.Contains(err.Error(), tc.webhook) || !strings.Contains(err.Error(), tc.reason) {
			t.Errorf("%s: %v; want a refusal by %s because of %q", name, err, tc.webhook, tc.reason)
		}
	}
	template := object(t, machineTemplate)
	if err := client.IgnoreAlreadyExists(admin.Create(ctx, template)); err != nil { // a restored cluster has it
		t.Fatal(err)
	}
	change := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"template":{"spec":{"virtualMachineTemplate":{"spec":{"runStrategy":"Halted"}}}}}}`))
	if err := admin.Patch(ctx, template, change); err == nil || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("CAPK: %v; want a refusal of a changed template", err)
	}
}
