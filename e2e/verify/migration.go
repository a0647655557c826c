package verify

import (
	"fmt"
	"strings"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// Before judges the record as if it had ended when the phase began, so that what was healed later does not count: Flux,
// for example, takes over any object that it finds in a chart.
func Before(phase string, c Check) Check {
	return Check{fmt.Sprintf("%s, before phase %s", c.Name, phase), func(h *history.History) Result {
		if then := h.Before(phase); then != nil {
			return c.Judge(then)
		}
		return Result{Verdict: Inconclusive, Reason: strings.Join(append(unsound(h), unknownPhase(h, []string{phase})), "; ")}
	}}
}

// AdoptedFirst claims that the objects named the release, by annotations and label, when its HelmRelease was made.
func AdoptedFirst(objects Objects, release history.ReleaseKey) Check {
	return newCheck("adopted before "+release.Name+" was made", never, func(h *history.History) (found []Evidence, doubt string) {
		lives := h.Named(history.Ref{Resource: helmReleases, Namespace: release.Namespace, Name: release.Name})
		switch {
		case len(lives) == 0:
			return nil, fmt.Sprintf("HelmRelease %s/%s was never made", release.Namespace, release.Name)
		case lives[0].AtBaseline():
			return nil, lives[0].String() + " was there at the baseline"
		}
		refs, made := objects(h), lives[0].Events[0]
		for _, ref := range refs {
			e := h.At(ref, made.When())
			if e == nil || e.Type == history.Deleted {
				found = append(found, of(h, made, fmt.Sprintf("made while there was no %s %s/%s", ref.Resource, ref.Namespace, ref.Name)))
				continue
			}
			for _, why := range notAnnotated(e.Object, release) {
				found = append(found, of(h, made, fmt.Sprintf("made too early for %s: %s", e.Life, why)))
			}
		}
		if len(refs) == 0 {
			return nil, "no object was selected"
		}
		return found, ""
	})
}

// ChartsAfterMigration claims that no chart was published, changed or withdrawn before the migration hook had ended, and
// one was since.
func ChartsAfterMigration() Check {
	return newCheck("published after the migration", never, func(h *history.History) (found []Evidence, doubt string) {
		begin, began := h.Begin(history.PhaseMigrated)
		if !began {
			return nil, unknownPhase(h, []string{history.PhaseMigrated})
		}
		doubt = "no chart was published at all"
		for _, l := range h.Lifetimes(externalArtifacts) {
			for _, e := range l.Events {
				switch {
				case e.Type == history.Baseline:
				case e.When().After(begin):
					doubt = ""
				default:
					found = append(found, of(h, e, e.Word()+" too early"))
				}
			}
		}
		return found, doubt
	})
}

// Inert claims that the subject's MachineDeployments never asked for a machine, and that none was ever there, nor a VM.
func Inert(s Subject) Check {
	return newCheck("inert "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		doubt = s.String() + " has no MachineDeployment: there is nothing that could ask for a machine"
		for _, l := range h.Lifetimes(machineDeployments, machines, kubevirtMachines, virtualMachines, instances) {
			if !s.Selects(h, l) {
				continue
			}
			if l.Resource != machineDeployments {
				found = append(found, of(h, l.Events[0], "is there"))
				continue
			}
			doubt = ""
			for _, e := range l.Events {
				if n := text(e.Object, "spec", "replicas"); n != "0" {
					found = append(found, of(h, e, "wants "+quoted(n)+" as replicas, not 0"))
					break
				}
			}
		}
		return found, doubt
	})
}
