// Command manifests writes, as YAML on stdout, what virt-operator installs for
// virt-api, virt-controller and virt-handler: CRDs, accounts and their rights,
// webhooks, the aggregated API and its Service. The module holds no such
// manifests; this asks the code that virt-operator generates them with.
//
// Left out: the workloads (the programs run as processes), webhooks of
// virt-operator and of a feature that is off, what needs OpenShift or
// Prometheus, and the node restriction policy. That one wants a token bound to
// the node that is written, while one stand-in plays virt-handler on all nodes.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	virtv1 "kubevirt.io/api/core/v1"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/install"
	operatorutil "kubevirt.io/kubevirt/pkg/virt-operator/util"
)

const namespace = "kubevirt"

func main() {
	out := bufio.NewWriter(os.Stdout)
	err := write(out)
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}

func write(out io.Writer) error {
	objects, err := generate()
	if err != nil {
		return err
	}
	for _, o := range objects {
		doc, err := document(o)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "---\n%s", doc); err != nil {
			return err
		}
	}
	return nil
}

func generate() ([]any, error) {
	config := operatorutil.GetTargetConfigFromKV(&virtv1.KubeVirt{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}})
	installed, err := install.GenerateCurrentInstallStrategy(config, "", namespace)
	if err != nil {
		return nil, fmt.Errorf("generate what virt-operator installs: %w", err)
	}
	// virt-operator's own CRD comes with the operator, not from it.
	kubevirt, err := components.NewKubeVirtCrd()
	if err != nil {
		return nil, fmt.Errorf("generate the KubeVirt CRD: %w", err)
	}

	objects := []any{
		&corev1.Namespace{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{
				"kubevirt.io":                        "",
				"pod-security.kubernetes.io/enforce": "privileged",
			}},
		},
		kubevirt,
	}
	objects = add(objects, installed.CRDs())
	objects = add(objects, installed.ServiceAccounts())
	objects = add(objects, installed.ClusterRoles())
	objects = add(objects, installed.ClusterRoleBindings())
	objects = add(objects, installed.Roles())
	objects = add(objects, installed.RoleBindings())
	return append(add(objects, installed.APIServices()),
		components.NewApiServerService(namespace),
		components.NewVirtAPIValidatingWebhookConfiguration(namespace),
		components.NewVirtAPIMutatingWebhookConfiguration(namespace),
	), nil
}

func add[T any](objects []any, more []T) []any {
	for _, o := range more {
		objects = append(objects, o)
	}
	return objects
}

// document is the object as YAML, without what only a server may say.
func document(o any) ([]byte, error) {
	raw, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	var u unstructured.Unstructured
	if err := json.Unmarshal(raw, &u.Object); err != nil {
		return nil, err
	}
	if u.GetAPIVersion() == "" || u.GetKind() == "" {
		return nil, fmt.Errorf("%T %s carries no apiVersion or kind", o, u.GetName())
	}
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	unstructured.RemoveNestedField(u.Object, "status")
	return yaml.Marshal(u.Object)
}
