package components

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// turnWebhooks brings a restored cluster to this run's ports and keys. Everything else is as it was when it was saved.
// The leases of the controllers of then go: nobody renews them, and their successors would wait until they run out.
func (in *installer) turnWebhooks(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for _, m := range in.manifests() {
		for _, u := range m.services {
			g.Go(func() error { return client.IgnoreNotFound(in.client.Delete(gctx, u.DeepCopy())) })
		}
		for _, u := range append(append([]*unstructured.Unstructured{}, m.crds...), m.others...) {
			if patch := turned(u); patch != nil {
				g.Go(func() error { return in.turn(gctx, u, patch) })
			}
		}
		for _, ns := range m.namespaces {
			g.Go(func() error {
				return in.client.DeleteAllOf(gctx, &coordinationv1.Lease{}, client.InNamespace(ns.GetName()))
			})
		}
	}
	return g.Wait()
}

// turned is what of an object names where this run serves webhooks, as a merge patch; nil when nothing does.
func turned(u *unstructured.Unstructured) map[string]any {
	if strings.HasSuffix(u.GetKind(), "WebhookConfiguration") {
		return map[string]any{"webhooks": u.Object["webhooks"]}
	}
	if conversion, ok, _ := unstructured.NestedMap(u.Object, "spec", "conversion", "webhook", "clientConfig"); ok {
		return map[string]any{"spec": map[string]any{"conversion": map[string]any{"webhook": map[string]any{"clientConfig": conversion}}}}
	}
	return nil
}

func (in *installer) turn(ctx context.Context, u *unstructured.Unstructured, patch map[string]any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(u.GroupVersionKind())
	live.SetName(u.GetName())
	err = in.client.Patch(ctx, live, client.RawPatch(types.MergePatchType, body), client.FieldOwner(owner))
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%s %s is not on the restored cluster: it was saved with other components", u.GetKind(), u.GetName())
	}
	if err != nil {
		return fmt.Errorf("turn %s %s to this run: %w", u.GetKind(), u.GetName(), err)
	}
	return nil
}
