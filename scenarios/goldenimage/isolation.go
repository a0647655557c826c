package goldenimage

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"cozystack.io/upgrade-e2e/e2e/harness"
	"cozystack.io/upgrade-e2e/e2e/tenant"
	"cozystack.io/upgrade-e2e/e2e/verify"
)

// Isolation tries with a tenant's own credentials what it may do with the images, and what it may not.
func Isolation() harness.Scenario {
	const name = "isolation"
	t := tenant.New(name)
	p := t.Cluster("prod").Pool("md0")
	s := subject(p)
	own := rights(t.Namespace())
	because := regexp.MustCompile(`schematicID`)
	climb := askFor(p, "a path for a schematic", map[string]any{"builtin": map[string]any{"schematicID": "../tenant-neighbour/disk"}})
	return harness.Scenario{
		Tag:   "isolation",
		Line:  "a tenant's own credentials: may clone the image, may not create, change or delete beside it, nor clone a neighbour's disk, nor name a path",
		Given: []*tenant.Tenant{t},
		Acts: []harness.Act{catalog(),
			{Name: "rights of its own", Do: harness.Make(own...)},
			{Name: name, Do: func(ctx context.Context, on harness.Upgraded) error { return try(ctx, on, name, t.Namespace()) }},
			{Name: "a path for a schematic", Do: climb}},
		MayFail: mayFail(p, because),
		Checks: []verify.Check{
			verify.About("may clone", s, verify.LogLine(name, regexp.MustCompile(`^clone the image: allowed$`), 1)),
			verify.About("may not write", s, verify.LogLine(name, regexp.MustCompile(`^(create|change|delete) .* in cozy-public: forbidden$`), 6)),
			verify.About("may not clone a neighbour", s, verify.LogLine(name, regexp.MustCompile(`^clone a neighbour's disk: forbidden$`), 1)),
			verify.About("refused", s, verify.PoolRefused(s, because)),
		},
	}
}

// rights are a tenant's own: everything with disks in its own namespace.
func rights(namespace string) []*unstructured.Unstructured {
	object := func(kind string, more map[string]any) *unstructured.Unstructured {
		more["apiVersion"], more["kind"] = "rbac.authorization.k8s.io/v1", kind
		more["metadata"] = map[string]any{"namespace": namespace, "name": "disks"}
		return &unstructured.Unstructured{Object: more}
	}
	return []*unstructured.Unstructured{
		object("Role", map[string]any{"rules": []any{
			map[string]any{"apiGroups": []any{"cdi.kubevirt.io"}, "resources": []any{"datavolumes"}, "verbs": []any{"*"}},
			map[string]any{"apiGroups": []any{""}, "resources": []any{"persistentvolumeclaims"}, "verbs": []any{"*"}}}}),
		object("RoleBinding", map[string]any{
			"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "disks"},
			"subjects": []any{map[string]any{"kind": "ServiceAccount", "namespace": namespace, "name": "default"}}}),
	}
}

// try logs what a tenant's ServiceAccount may do. Nothing is kept of it: every request is a dry run, which is authorized and
// admitted like any other.
func try(ctx context.Context, on harness.Upgraded, source, namespace string) error {
	config := rest.CopyConfig(on.Env.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + namespace + ":default",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	said := func(what string, err error) {
		verdict := "allowed"
		if apierrors.IsForbidden(err) || err != nil && regexp.MustCompile(`insufficient permissions|not authorized|has no permission`).MatchString(err.Error()) {
			verdict = "forbidden"
		} else if err != nil {
			verdict = err.Error()
		}
		on.Log(source, what+": "+verdict)
	}
	dry := []string{metav1.DryRunAll}
	create := func(in string, from map[string]any) error {
		_, err := client.Resource(dataVolumes).Namespace(in).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": map[string]any{"namespace": in, "name": "tried"},
			"spec": map[string]any{"source": from, "pvc": map[string]any{"accessModes": []any{"ReadWriteMany"}, "volumeMode": "Block",
				"resources": map[string]any{"requests": map[string]any{"storage": "20Gi"}}}}}}, metav1.CreateOptions{DryRun: dry})
		return err
	}
	image := golden(version).Name
	said("clone the image", create(namespace, map[string]any{"pvc": map[string]any{"namespace": public, "name": image}}))
	neighbours, err := neighboursDisk(ctx, on)
	if err != nil {
		return err
	}
	said("clone a neighbour's disk", create(namespace, map[string]any{"pvc": neighbours}))
	said("create a DataVolume in "+public, create(public, map[string]any{"blank": map[string]any{}}))
	for _, kind := range []schema.GroupVersionResource{dataVolumes, {Version: "v1", Resource: "persistentvolumeclaims"}} {
		objects := client.Resource(kind).Namespace(public)
		_, err := objects.Patch(ctx, image, types.MergePatchType, []byte(`{"metadata":{"labels":{"tried":""}}}`), metav1.PatchOptions{DryRun: dry})
		said(fmt.Sprintf("change one of %s in %s", kind.Resource, public), err)
		said(fmt.Sprintf("delete one of %s in %s", kind.Resource, public), objects.Delete(ctx, image, metav1.DeleteOptions{DryRun: dry}))
	}
	_, err = client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}).Namespace(public).Create(ctx,
		&unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": map[string]any{"name": "tried"},
			"spec": map[string]any{"accessModes": []any{"ReadWriteMany"}, "resources": map[string]any{"requests": map[string]any{"storage": "1Gi"}}}}},
		metav1.CreateOptions{DryRun: dry})
	said("create a claim in "+public, err)
	return nil
}

// neighboursDisk is a source that every run has and that is nobody else's business.
func neighboursDisk(ctx context.Context, on harness.Upgraded) (map[string]any, error) {
	client, err := dynamic.NewForConfig(on.Env.Config)
	if err != nil {
		return nil, err
	}
	list, err := client.Resource(dataVolumes).Namespace("tenant-neighbour").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	if len(list.Items) == 0 {
		return nil, errors.New("the neighbour has no disk")
	}
	return map[string]any{"namespace": "tenant-neighbour", "name": list.Items[0].GetName()}, nil
}
