package components

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// played lists manifests of components that stand-ins complete. A real one on the cluster would do its work twice.
func played() []string { return []string{"kubevirt", "containerized-data-importer"} }

// keepFound leaves out the components that a shared cluster has already: who has their kinds runs them.
func (in *installer) keepFound(ctx context.Context) error {
	crds := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinitionList"}}
	if err := in.client.List(ctx, crds); err != nil {
		return fmt.Errorf("look which components the cluster has: %w", err)
	}
	there := sets.New[string]()
	for _, crd := range crds.Items {
		there.Insert(crd.Name)
	}
	found := func(name string, m *manifest) (bool, error) {
		has, err := m.within(there)
		switch {
		case err != nil:
			return false, fmt.Errorf("%s is on the cluster in part, of another version perhaps: %w", name, err)
		case has && slices.Contains(played(), name):
			return false, fmt.Errorf("%s is on the cluster; a run plays what belongs to it, and can't use a real one", name)
		case has && !slices.Contains(in.found, name):
			in.found = append(in.found, name)
		}
		return has, nil
	}
	var controllers []*started
	for _, c := range in.controllers {
		has, err := found(c.installs, c.manifest)
		if err != nil {
			return err
		}
		if !has {
			controllers = append(controllers, c)
		}
	}
	var kinds []*manifest
	for i, m := range in.kinds {
		has, err := found(kindsOnly()[i], m)
		if err != nil {
			return err
		}
		if !has {
			kinds = append(kinds, m)
		}
	}
	in.controllers, in.kinds = controllers, kinds
	return nil
}

// within tells whether the manifest's kinds are there: all, none, or, an error, some.
func (m *manifest) within(there sets.Set[string]) (bool, error) {
	var has, misses string
	for _, crd := range m.crds {
		if there.Has(crd.GetName()) {
			has = crd.GetName()
		} else {
			misses = crd.GetName()
		}
	}
	if has != "" && misses != "" {
		return false, fmt.Errorf("CustomResourceDefinition %s is there and %s is not", has, misses)
	}
	return has != "", nil
}
