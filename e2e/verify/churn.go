package verify

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Resources that the checks name.
const (
	virtualMachines     = "virtualmachines.kubevirt.io"
	instances           = "virtualmachineinstances.kubevirt.io"
	migrations          = "virtualmachineinstancemigrations.kubevirt.io"
	pods                = "pods"
	kubevirtMachines    = "kubevirtmachines.infrastructure.cluster.x-k8s.io"
	machineTemplates    = "kubevirtmachinetemplates.infrastructure.cluster.x-k8s.io"
	machines            = "machines.cluster.x-k8s.io"
	machineSets         = "machinesets.cluster.x-k8s.io"
	machineDeployments  = "machinedeployments.cluster.x-k8s.io"
	machineHealthChecks = "machinehealthchecks.cluster.x-k8s.io"
	talosTemplates      = "talosconfigtemplates.bootstrap.cluster.x-k8s.io"
	dataVolumes         = "datavolumes.cdi.kubevirt.io"
	volumeClaims        = "persistentvolumeclaims"
	volumes             = "persistentvolumes"
	workloadMonitors    = "workloadmonitors.cozystack.io"
	helmReleases        = "helmreleases.helm.toolkit.fluxcd.io"
	externalArtifacts   = "externalartifacts.source.toolkit.fluxcd.io"
	controlPlanes       = "kamajicontrolplanes.controlplane.cluster.x-k8s.io"
	configMaps          = "configmaps"
	services            = "services"
	namespaces          = "namespaces"
)

// NoChurn claims that nothing that carries the subject's workload was deleted, recreated, restarted, migrated,
// re-imaged, rolled out or scaled, and nothing of that kind appeared. With phases, only what happened in them counts.
func NoChurn(s Subject, phases ...string) Check {
	return noChurn(s, phases, func(h *history.History, e *history.Event) bool {
		return len(phases) == 0 || slices.Contains(phases, h.Phase(e.When()))
	})
}

// NoChurnUntil claims it for the time before a phase begins, in which the subject's workers are meant to change.
func NoChurnUntil(s Subject, phase string) Check {
	return noChurn(s, []string{phase}, func(h *history.History, e *history.Event) bool { return before(h, phase, e) })
}

// NoChurnBetween claims it for the time from the beginning of one phase to the beginning of another.
func NoChurnBetween(s Subject, from, until string) Check {
	return noChurn(s, []string{from, until}, func(h *history.History, e *history.Event) bool { return !before(h, from, e) && before(h, until, e) })
}

// before says whether something happened before the beginning of a phase that was.
func before(h *history.History, phase string, e *history.Event) bool {
	return anyOf(h.Marks, func(m history.Mark) bool { return m.Phase == phase && m.At == "begin" && e.When().Before(m.Time) })
}

// BaselineWorkersLive claims that the workers that the subject had at the baseline lived on undisturbed, whatever else
// appeared beside them.
func BaselineWorkersLive(s Subject) Check {
	return newCheck("workers of the baseline live on of "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		workers := 0
		for _, l := range h.Lifetimes(virtualMachines, instances, pods, kubevirtMachines, machines, dataVolumes, volumeClaims, volumes) {
			if !s.Selects(h, l) || !l.AtBaseline() {
				continue
			}
			if l.Resource == virtualMachines {
				workers++
			}
			for _, c := range churn(h, l) {
				found = append(found, of(h, c.event, c.what))
			}
		}
		if workers == 0 {
			doubt = s.String() + " has no VirtualMachine at the baseline: there is nothing that could live on"
		}
		return found, doubt
	})
}

// noChurn counts what happened at the events that counts tells; phases must have been.
func noChurn(s Subject, phases []string, counts func(*history.History, *history.Event) bool) Check {
	return newCheck("no churn of "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		workers := 0
		for _, l := range h.Lifetimes(virtualMachines, instances, migrations, pods, kubevirtMachines, machineTemplates, machines,
			machineSets, machineDeployments, talosTemplates, dataVolumes, volumeClaims, volumes) {
			if !s.Selects(h, l) {
				continue
			}
			if l.Resource == virtualMachines && l.AtBaseline() {
				workers++
			}
			for _, c := range churn(h, l) {
				if s.Empty && c.event == l.Events[0] && idle(l) {
					continue
				}
				if counts(h, c.event) {
					found = append(found, of(h, c.event, c.what))
				}
			}
		}
		switch {
		case unknownPhase(h, phases) != "":
			return found, unknownPhase(h, phases)
		case workers == 0 && !s.Empty:
			return found, fmt.Sprintf("%s has no VirtualMachine at the baseline: there is nothing that could churn", s)
		case workers > 0 && s.Empty:
			return found, fmt.Sprintf("%s has %d VirtualMachines at the baseline and was declared empty", s, workers)
		}
		return found, ""
	})
}

// idle says whether an object asks for no machine as it appears. A subject without workers may get it and stay without.
func idle(l *history.Lifetime) bool {
	switch l.Resource {
	case machineTemplates, talosTemplates:
		return true
	case machineDeployments, machineSets:
		return text(l.First(), "spec", "replicas") == "0"
	}
	return false
}

type change struct {
	event *history.Event
	what  string
}

// churn lists what happened to one object, each kind of change once.
func churn(h *history.History, l *history.Lifetime) []change {
	var out []change
	seen := map[string]bool{}
	add := func(e *history.Event, kind, format string, args ...any) {
		if !seen[kind] {
			seen[kind] = true
			out = append(out, change{e, fmt.Sprintf(format, args...)})
		}
	}
	launcher := l.First().GetLabels()["kubevirt.io"] == "virt-launcher"
	passing := l.Resource == migrations || l.Resource == pods && !launcher // comes and goes by itself
	if d := l.Deletion(); d != nil && !passing {
		add(d, "deleted", "deleted")
	}
	if first := l.Events[0]; !l.AtBaseline() {
		named := h.Named(l.Ref)
		switch {
		case l.Resource == migrations:
			add(first, "appeared", "appeared: a migration")
		case passing:
			add(first, "appeared", "appeared: a disk is re-imaged")
		case named[0] != l:
			add(first, "appeared", "recreated (was uid %s)", named[slices.Index(named, l)-1].UID)
		default:
			add(first, "appeared", "appeared")
		}
	}
	for _, e := range l.Events {
		if e.Before != nil && !passing {
			compare(e, add)
		}
	}
	return out
}

// compare finds changes of a living object that disturb the workload.
func compare(e *history.Event, add func(e *history.Event, kind, format string, args ...any)) {
	moved := func(kind, what string, path ...string) {
		if was, is := text(e.Before, path...), text(e.Object, path...); was != is {
			add(e, kind, "%s: %s → %s", what, quoted(was), quoted(is))
		}
	}
	left := func(state, kind, what string, path ...string) {
		if text(e.Before, path...) == state {
			moved(kind, what, path...)
		}
	}
	switch e.Life.Resource {
	case virtualMachines:
		left("Running", "stopped", "no longer running", "status", "printableStatus")
		moved("strategy", "run strategy changed", "spec", "runStrategy")
		moved("strategy", "run strategy changed", "spec", "running")
	case instances:
		left("Running", "stopped", "no longer running", "status", "phase")
		if text(e.Before, "status", "nodeName") != "" {
			moved("migrated", "migrated", "status", "nodeName")
		}
		moved("migrated", "migrated", "status", "migrationState", "migrationUid")
	case pods:
		left("Running", "stopped", "no longer running", "status", "phase")
		if was, is := restarts(e.Before), restarts(e.Object); is > was {
			add(e, "restarted", "restarted: %d container restarts → %d", was, is)
		}
	case machineDeployments:
		moved("scaled", "scaled", "spec", "replicas")
		for _, field := range [][]string{{"infrastructureRef", "name"}, {"bootstrap", "configRef", "name"}, {"bootstrap", "dataSecretName"}, {"version"}, {"failureDomain"}} {
			path := append([]string{"spec", "template", "spec"}, field...)
			moved("rolled", "rolls its machines: "+strings.Join(field, "."), path...)
		}
	case dataVolumes:
		left("Succeeded", "re-imaged", "re-imaged", "status", "phase")
	case volumeClaims:
		left("Bound", "lost", "disk lost", "status", "phase")
		for _, key := range []string{"cdi.kubevirt.io/cloneType", "cdi.kubevirt.io/storage.import.endpoint", "cdi.kubevirt.io/storage.import.source", "k8s.io/CloneRequest"} {
			moved("re-imaged", "re-imaged: "+key, "metadata", "annotations", key)
		}
	case volumes:
		left("Bound", "lost", "disk lost", "status", "phase")
	}
}

// text is a field as text; "" when it is not there.
func text(o *unstructured.Unstructured, path ...string) string {
	v, found, _ := unstructured.NestedFieldNoCopy(o.Object, path...)
	if !found || v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

func quoted(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

// restarts sums up the restarts of a pod's containers.
func restarts(pod *unstructured.Unstructured) int64 {
	var n int64
	for _, field := range []string{"initContainerStatuses", "containerStatuses"} {
		statuses, _, _ := unstructured.NestedSlice(pod.Object, "status", field)
		for _, s := range statuses {
			if m, ok := s.(map[string]any); ok {
				count, _ := m["restartCount"].(int64)
				n += count
			}
		}
	}
	return n
}
