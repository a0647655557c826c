package platform

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

var crds = apiextensionsv1.SchemeGroupVersion.WithResource("customresourcedefinitions")

// applier applies objects server-side; an object that is there already as wanted is not written.
type applier struct {
	client dynamic.Interface
	getter *getter
	// outlived is Env's.
	outlived bool
}

func newApplier(config *rest.Config, outlived bool) (*applier, error) {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	g, err := newGetter(config, ArtifactNamespace)
	if err != nil {
		return nil, err
	}
	return &applier{client, g, outlived}, nil
}

// apply applies the objects side by side; `from` says where they come from.
func (a *applier) apply(ctx context.Context, from string, objects []*unstructured.Unstructured) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, o := range objects {
		group.Go(func() error {
			what := fmt.Sprintf("%s %s", o.GetKind(), strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/"))
			mapping, err := a.mapping(o)
			if err != nil {
				return fmt.Errorf("apply %s of %s: no kind %s on the cluster: its CRD is missing in the profile", what, from, o.GroupVersionKind().GroupKind())
			}
			var resource dynamic.ResourceInterface = a.client.Resource(mapping.Resource)
			if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
				if o.GetNamespace() == "" {
					return fmt.Errorf("apply %s of %s: it names no namespace", what, from)
				}
				resource = a.client.Resource(mapping.Resource).Namespace(o.GetNamespace())
			}
			if a.outlived {
				var theirs bool
				if o, theirs, err = a.beside(ctx, resource, o); err != nil {
					return fmt.Errorf("apply %s of %s: %w", what, from, err)
				}
				if theirs {
					return nil
				}
			}
			if _, err = resource.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: FieldManager, Force: true}); err != nil {
				return fmt.Errorf("apply %s of %s: %w", what, from, err)
			}
			return nil
		})
	}
	return group.Wait()
}

const (
	// defaultClass is the annotation of the StorageClass for claims that name none; of several it is the newest.
	defaultClass = "storageclass.kubernetes.io/is-default-class"
	// virtDefaultClass is CDI's, for disks of virtual machines; it comes before the other.
	virtDefaultClass = "storageclass.kubevirt.io/is-default-virt-class"
)

// beside is an object as it is to be applied on a cluster that others use; theirs tells that they have it already.
func (a *applier) beside(ctx context.Context, resource dynamic.ResourceInterface, o *unstructured.Unstructured) (_ *unstructured.Unstructured, theirs bool, err error) {
	live, err := resource.Get(ctx, o.GetName(), metav1.GetOptions{})
	if err == nil {
		theirs = !managed(live)
	} else if !apierrors.IsNotFound(err) {
		return nil, false, err
	}
	if o.GetKind() != "StorageClass" || o.GetAnnotations()[defaultClass] != "true" {
		return o, theirs, nil
	}
	classes, err := resource.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, false, err
	}
	for _, class := range classes.Items {
		if class.GetAnnotations()[defaultClass] == "true" && !managed(&class) {
			o = o.DeepCopy()
			annotations := o.GetAnnotations()
			delete(annotations, defaultClass)
			annotations[virtDefaultClass] = "true"
			o.SetAnnotations(annotations)
			break
		}
	}
	return o, theirs, nil
}

// mapping looks a kind up; the mapper itself reads discovery again when it does not know one.
func (a *applier) mapping(o *unstructured.Unstructured) (*meta.RESTMapping, error) {
	gvk := o.GroupVersionKind()
	return a.getter.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
}

// applyFiles applies the tree's files that the patterns mean, one pattern after the other.
func (a *applier) applyFiles(ctx context.Context, tree string, patterns []string) error {
	for _, pattern := range patterns {
		objects, err := readObjects(tree, pattern)
		if err != nil {
			return err
		}
		if err := a.apply(ctx, pattern, objects); err != nil {
			return err
		}
	}
	return nil
}

// readObjects decodes the objects of a profile path.
func readObjects(tree, pattern string) ([]*unstructured.Unstructured, error) {
	names, err := files(tree, pattern)
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	for _, name := range names {
		docs, err := readDocuments(name)
		if err != nil {
			return nil, err
		}
		for _, doc := range docs {
			o := new(unstructured.Unstructured)
			if err := yaml.Unmarshal(doc, o); err != nil {
				return nil, fmt.Errorf("%s: %s", display(tree, name), oneLine(err.Error()))
			}
			objects = append(objects, o)
		}
	}
	return objects, nil
}

// applyCRDs installs the profile's CRDs and waits until the API server serves them.
func (a *applier) applyCRDs(ctx context.Context, v *Version) error {
	var objects []*unstructured.Unstructured
	for _, pattern := range v.Profile.CRDs.Files {
		found, err := readObjects(v.Tree, pattern)
		if err != nil {
			return err
		}
		for _, o := range found {
			if o.GetKind() != "CustomResourceDefinition" {
				return fmt.Errorf("%s holds %s %s, but crds.files are for CustomResourceDefinitions", pattern, o.GetKind(), o.GetName())
			}
		}
		objects = append(objects, found...)
	}
	for _, c := range v.Profile.CRDs.Permissive {
		o, err := c.object()
		if err != nil {
			return err
		}
		live, err := a.client.Resource(crds).Get(ctx, o.GetName(), metav1.GetOptions{})
		if err == nil && !managed(live) {
			continue // a component of the run brought the real one
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("get CustomResourceDefinition %s: %w", o.GetName(), err)
		}
		objects = append(objects, o)
	}
	if err := a.apply(ctx, "profile "+v.Profile.Name, objects); err != nil {
		return err
	}
	return a.waitEstablished(ctx, objects)
}

// waitEstablished waits until the API server serves the CRDs.
func (a *applier) waitEstablished(ctx context.Context, pending []*unstructured.Unstructured) error {
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		for len(pending) > 0 {
			live, err := a.client.Resource(crds).Get(ctx, pending[0].GetName(), metav1.GetOptions{})
			if err != nil || !established(live) {
				return false, err
			}
			pending = pending[1:]
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("wait for CustomResourceDefinition %s to be established: %w", pending[0].GetName(), err)
	}
	a.getter.discovery.Invalidate()
	return nil
}

func managed(o *unstructured.Unstructured) bool {
	for _, f := range o.GetManagedFields() {
		if f.Manager == FieldManager {
			return true
		}
	}
	return false
}

func established(o *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok && c["type"] == "Established" && c["status"] == "True" {
			return true
		}
	}
	return false
}

// object is the CRD of a permissive kind.
func (p PermissiveCRD) object() (*unstructured.Unstructured, error) {
	keep := true
	crd := &apiextensionsv1.CustomResourceDefinition{
		TypeMeta:   metav1.TypeMeta{APIVersion: apiextensionsv1.SchemeGroupVersion.String(), Kind: "CustomResourceDefinition"},
		ObjectMeta: metav1.ObjectMeta{Name: p.Plural + "." + p.Group, Labels: p.Labels},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: p.Group,
			Scope: apiextensionsv1.ResourceScope(p.Scope),
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Kind: p.Kind, ListKind: p.Kind + "List", Plural: p.Plural, Singular: strings.ToLower(p.Kind),
			},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: p.Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: &keep,
				}},
			}},
		},
	}
	if p.Status {
		crd.Spec.Versions[0].Subresources = &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}}
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(crd)
	if err != nil {
		return nil, err
	}
	delete(content, "status")
	return &unstructured.Unstructured{Object: content}, nil
}
