package verify

import (
	"fmt"
	"net"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"cozystack.io/upgrade-e2e/e2e/history"
)

// An Application is what Cozystack counts, bills and shows objects under.
type Application struct{ Kind, Name string } // {"Kubernetes", "prod"}, {"KubernetesNodes", "prod-md0"}

func (a Application) String() string { return a.Kind + " " + a.Name }

const applicationLabel = "apps.cozystack.io/application."

// applicationOf is the application that an object's labels name.
func applicationOf(o *unstructured.Unstructured) Application {
	labels := o.GetLabels()
	return Application{labels[applicationLabel+"kind"], labels[applicationLabel+"name"]}
}

// LabelledFor claims that in the end the objects' own labels name the application. Quota reads them on VMs' pods.
func LabelledFor(objects Objects, a Application) Check {
	return each("labelled as "+a.String(), objects, func(_ *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		if is := applicationOf(o); is != a {
			return []string{fmt.Sprintf("its labels name application %q, want %q", is, a)}
		}
		return nil
	})
}

// CountedFor claims that in the end the objects belong to the application: by the labels of the HelmRelease that they are
// annotated to, from which Cozystack's lineage webhook takes them. WorkloadsReady of an application reads the
// WorkloadMonitors that belong to it in this way.
func CountedFor(objects Objects, a Application) Check {
	return each("counted for "+a.String(), objects, func(h *history.History, _ *history.Lifetime, o *unstructured.Unstructured) []string {
		owner := ownerOf(o)
		hr := h.Final(history.Ref{Resource: helmReleases, Namespace: owner.Namespace, Name: owner.Name})
		if hr == nil {
			return []string{fmt.Sprintf("its annotations name release %q, and there is no HelmRelease of that name", owner.Name)}
		}
		if is := applicationOf(hr); is != a {
			return []string{fmt.Sprintf("its release %s is application %q, want %q", owner.Name, is, a)}
		}
		return nil
	})
}

// CertSANs claims that in the end the certificate of the cluster's API server is asked for with the address of its Service
// among the names.
func CertSANs(s Subject) Check {
	release := s.ClusterRelease()
	control := These(history.Ref{Resource: controlPlanes, Namespace: release.Namespace, Name: release.Name})
	return each("certSANs of "+s.String(), control, func(h *history.History, l *history.Lifetime, o *unstructured.Unstructured) []string {
		service := h.Final(history.Ref{Resource: services, Namespace: l.Namespace, Name: l.Name})
		if service == nil {
			return []string{fmt.Sprintf("there is no Service %s", l.Name)}
		}
		address := text(service, "spec", "clusterIP")
		sans, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "network", "certSANs")
		if net.ParseIP(address) == nil || !slices.Contains(sans, address) {
			return []string{fmt.Sprintf("its certSANs %v lack the address %q of Service %s", sans, address, l.Name)}
		}
		return nil
	})
}

// Rolling is a doubt about a row, not a claim: at the baseline each of the subject's MachineDeployments must have a
// MachineSet of another template than its own, and machines of that older one, or nothing is rolling.
func Rolling(s Subject) Check {
	return newCheck("rolling "+s.String(), never, func(h *history.History) (found []Evidence, doubt string) {
		template := func(o *unstructured.Unstructured) string {
			return text(o, "spec", "template", "spec", "infrastructureRef", "name")
		}
		doubt = s.String() + " has no MachineDeployment at the baseline"
		for _, md := range h.Lifetimes(machineDeployments) {
			if !md.AtBaseline() || !s.Selects(h, md) {
				continue
			}
			older := anyOf(h.Lifetimes(machineSets), func(l *history.Lifetime) bool {
				return l.AtBaseline() && slices.Contains(h.Ancestors(l), md) && template(l.First()) != template(md.First()) &&
					text(l.First(), "spec", "replicas") != "0"
			})
			if !older {
				return nil, md.String() + " has no MachineSet of an older template at the baseline"
			}
			doubt = ""
		}
		return nil, doubt
	})
}
