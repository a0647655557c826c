package simulate

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/url"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// cdiServer plays CDI's API server: it authorises clones and refuses what is no DataVolume.
type cdiServer struct {
	cdi    *cdi
	config *rest.Config
}

const (
	mutatePath, validatePath = "/datavolume-mutate", "/datavolume-validate"
	signingSecret            = "cdi-api-signing-key"
)

// Start implements manager.Runnable.
func (s *cdiServer) Start(ctx context.Context) error {
	c, err := client.New(s.config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	if s.cdi.keys.private, err = signingKey(ctx, c); err != nil {
		return err
	}
	if err := s.cdi.configure(ctx); err != nil {
		return err
	}
	handle := http.NewServeMux()
	handle.HandleFunc(mutatePath, review(func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse { return s.mutate(ctx, r) }))
	handle.HandleFunc(validatePath, review(func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse { return s.validate(ctx, r) }))
	return s.cdi.sim.serveWebhooks(ctx, "cdi-apiserver", handle, func(address string, ca []byte) error { return register(ctx, c, address, ca) })
}

// signingKey reads the key that clone tokens are signed with, or makes it.
func signingKey(ctx context.Context, c client.Client) (*rsa.PrivateKey, error) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: cdiStandIn.namespace, Name: signingSecret}}
	err := c.Get(ctx, key(secret), secret)
	if apierrors.IsNotFound(err) {
		made, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			return nil, err
		}
		secret.Data = map[string][]byte{"id_rsa": pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(made)})}
		return made, c.Create(ctx, secret)
	}
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(secret.Data["id_rsa"])
	if block == nil {
		return nil, fmt.Errorf("secret %s holds no key", key(secret))
	}
	return x509.ParsePKCS1PrivateKey(block.Bytes)
}

// register tells the API server where the webhooks are.
func register(ctx context.Context, c client.Client, address string, ca []byte) error {
	at := func(path string) admissionregistrationv1.WebhookClientConfig { return webhookAt(address, path, ca) }
	rules := []admissionregistrationv1.RuleWithOperations{{
		Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create, admissionregistrationv1.Update},
		Rule:       admissionregistrationv1.Rule{APIGroups: []string{cdiGroup}, APIVersions: []string{"v1beta1"}, Resources: []string{"datavolumes"}}}}
	none, fail := ptr.To(admissionregistrationv1.SideEffectClassNone), ptr.To(admissionregistrationv1.Fail)
	kind := func(k string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: admissionregistrationv1.SchemeGroupVersion.String(), Kind: k}
	}
	for _, o := range []client.Object{
		&admissionregistrationv1.MutatingWebhookConfiguration{TypeMeta: kind("MutatingWebhookConfiguration"),
			ObjectMeta: metav1.ObjectMeta{Name: "cdi-api-datavolume-mutate"},
			Webhooks: []admissionregistrationv1.MutatingWebhook{{Name: "datavolume-mutate.cdi.kubevirt.io", ClientConfig: at(mutatePath), Rules: rules,
				SideEffects: none, FailurePolicy: fail, AdmissionReviewVersions: []string{"v1"}}}},
		&admissionregistrationv1.ValidatingWebhookConfiguration{TypeMeta: kind("ValidatingWebhookConfiguration"),
			ObjectMeta: metav1.ObjectMeta{Name: "cdi-api-datavolume-validate"},
			Webhooks: []admissionregistrationv1.ValidatingWebhook{{Name: "datavolume-validate.cdi.kubevirt.io", ClientConfig: at(validatePath), Rules: rules,
				SideEffects: none, FailurePolicy: fail, AdmissionReviewVersions: []string{"v1"}}}},
	} {
		if err := apply(ctx, c, o); err != nil {
			return err
		}
	}
	return nil
}

func allowed() *admissionv1.AdmissionResponse { return &admissionv1.AdmissionResponse{Allowed: true} }

// denied is a refusal. CDI joins the causes of one, each after a blank.
func denied(words string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{Status: metav1.StatusFailure, Message: words, Code: http.StatusUnprocessableEntity}}
}

func failure(err error) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{Status: metav1.StatusFailure, Message: err.Error(), Code: http.StatusBadRequest}}
}

// mutate authorises a clone and hands out the token for it.
func (s *cdiServer) mutate(ctx context.Context, r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	dv := object(dataVolumeKind)
	if err := json.Unmarshal(r.Object.Raw, &dv.Object); err != nil {
		return failure(err)
	}
	if dv.GetDeletionTimestamp() != nil {
		return allowed()
	}
	noToken := has(dv, prePopulatedKey) || has(dv, staticVolumeKey)
	source, err := s.source(ctx, dv, r.Namespace)
	switch {
	case apierrors.IsNotFound(err) && noToken:
		return allowed()
	case err != nil:
		return failure(err)
	case source.kind == "":
		return allowed()
	}
	if err := s.cdi.reader.Get(ctx, keyOf("", source.Namespace), &corev1.Namespace{}); err != nil {
		if apierrors.IsNotFound(err) && noToken {
			return allowed()
		}
		return failure(err)
	}
	may := source.Namespace == r.Namespace
	if !may {
		if may, err = s.mayClone(ctx, r, source); err != nil {
			return failure(err)
		}
	}
	switch {
	case !may && noToken:
		return allowed()
	case !may:
		return denied(fmt.Sprintf(" User %s has insufficient permissions in clone source namespace %s", r.UserInfo.Username, source.Namespace))
	case r.Operation != admissionv1.Create:
		return allowed()
	}
	token, err := s.cdi.keys.sign(tokenIssuer, 5*time.Minute, cloneToken{Operation: "Clone", Name: source.Name, Namespace: source.Namespace,
		Resource: resourceOf(source.kind), Params: map[string]string{"targetNamespace": r.Namespace, "targetName": orElse(dv.GetName(), r.Name)}})
	if err != nil {
		return failure(err)
	}
	all := dv.GetAnnotations()
	if all == nil {
		all = map[string]string{}
	}
	all[cloneTokenKey] = token
	patch, err := json.Marshal([]map[string]any{{"op": "add", "path": "/metadata/annotations", "value": all}})
	if err != nil {
		return failure(err)
	}
	return &admissionv1.AdmissionResponse{Allowed: true, Patch: patch, PatchType: ptr.To(admissionv1.PatchTypeJSONPatch)}
}

// source is what a DataVolume clones, of kind "" when nothing.
func (s *cdiServer) source(ctx context.Context, dv *unstructured.Unstructured, namespace string) (cloneSource, error) {
	var spec volumeSpec
	fields, _, _ := unstructured.NestedMap(dv.Object, "spec")
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(fields, &spec); err != nil {
		return cloneSource{}, err
	}
	source := spec.Source
	if ref := spec.SourceRef; ref != nil && ref.Kind == dataSourceKind.Kind {
		var err error
		if source, err = s.cdi.dataSource(ctx, s.cdi.reader, keyOf(orElse(ptr.Deref(ref.Namespace, ""), namespace), ref.Name)); err != nil {
			return cloneSource{}, err
		}
	}
	switch {
	case source != nil && source.PVC != nil:
		return cloneSource{keyOf(orElse(source.PVC.Namespace, namespace), source.PVC.Name), claimKindName}, nil
	case source != nil && source.Snapshot != nil:
		return cloneSource{keyOf(orElse(source.Snapshot.Namespace, namespace), source.Snapshot.Name), snapshotName}, nil
	}
	return cloneSource{}, nil
}

// mayClone asks whether a user may read a source: by the right to clone, or by rights that amount to it.
func (s *cdiServer) mayClone(ctx context.Context, r *admissionv1.AdmissionRequest, source cloneSource) (bool, error) {
	ask := func(a authorizationv1.ResourceAttributes) (bool, error) {
		a.Namespace, a.Verb = source.Namespace, "create"
		extra := map[string]authorizationv1.ExtraValue{}
		for k, v := range r.UserInfo.Extra {
			extra[k] = authorizationv1.ExtraValue(v)
		}
		sar := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: r.UserInfo.Username, Groups: r.UserInfo.Groups, Extra: extra, ResourceAttributes: &a}}
		err := s.cdi.client.Create(ctx, sar)
		return sar.Status.Allowed, err
	}
	if ok, err := ask(authorizationv1.ResourceAttributes{Group: cdiGroup, Version: "v1beta1", Resource: "datavolumes", Subresource: "source", Name: source.Name}); ok || err != nil {
		return ok, err
	}
	if ok, err := ask(authorizationv1.ResourceAttributes{Resource: "pods", Name: source.Name}); !ok || err != nil || source.kind == claimKindName {
		return ok, err
	}
	return ask(authorizationv1.ResourceAttributes{Resource: "pvcs", Name: source.Name}) // sic: a right on persistentvolumeclaims does not count
}

// validate refuses what is no DataVolume, and every change of a spec.
func (s *cdiServer) validate(ctx context.Context, r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	dv, old := object(dataVolumeKind), object(dataVolumeKind)
	if err := json.Unmarshal(r.Object.Raw, &dv.Object); err != nil {
		return failure(err)
	}
	var spec volumeSpec
	fields, _, _ := unstructured.NestedMap(dv.Object, "spec")
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(fields, &spec); err != nil {
		return failure(err)
	}
	if r.Operation == admissionv1.Update {
		if err := json.Unmarshal(r.OldObject.Raw, &old.Object); err != nil {
			return failure(err)
		}
		if !equality.Semantic.DeepEqual(dv.Object["spec"], old.Object["spec"]) {
			return denied(" Cannot update DataVolume Spec")
		}
	}
	if r.Operation == admissionv1.Create {
		claim := &corev1.PersistentVolumeClaim{}
		if ok, err := s.cdi.get(ctx, keyOf(r.Namespace, dv.GetName()), claim); err != nil {
			return failure(err)
		} else if ok {
			adopt := &volumeSync{cdi: s.cdi, v: &volume{Unstructured: dv}, claim: claim}
			work, err := adopt.requiresWork(ctx)
			if err != nil {
				return failure(err)
			}
			if owner := metav1.GetControllerOf(claim); work && (owner == nil || owner.Kind != dataVolumeKind.Kind) {
				return denied(fmt.Sprintf(" Destination PVC %s already exists", key(claim)))
			}
		}
	}
	if words := wrong(dv, spec); words != "" {
		return denied(" " + words)
	}
	return allowed()
}

// wrong is what is wrong with a spec, "" for nothing.
func wrong(dv *unstructured.Unstructured, spec volumeSpec) string {
	form, name := spec.Storage, "Storage"
	if spec.PVC != nil {
		form, name = spec.PVC, "PVC"
	}
	source, _, _ := unstructured.NestedMap(dv.Object, "spec", "source")
	clone := spec.SourceRef != nil || source["pvc"] != nil || source["snapshot"] != nil
	switch {
	case form == nil:
		return "Missing Data volume PVC"
	case spec.PVC != nil && spec.Storage != nil:
		return "Duplicate storage definition, both target storage and target pvc defined"
	}
	size, ok := requested(form)
	switch {
	case ok && size.Sign() <= 0:
		return name + " size can't be equal or less than zero"
	case ok && size.Value() < mebibyte:
		return name + " size should be at least 1MiB"
	case !ok && (spec.Storage == nil || !clone):
		return name + " size is missing"
	case spec.PVC != nil && len(form.AccessModes) == 0:
		return "Required value: at least 1 access mode is required"
	case spec.PVC != nil && len(form.AccessModes) > 1:
		return "PVC multiple accessModes"
	}
	for _, m := range form.AccessModes {
		switch m {
		case corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod:
		default:
			return fmt.Sprintf(`Unsupported value: %q: supported values: "ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"`, form.AccessModes[0])
		}
	}
	if form.DataSource != nil || form.DataSourceRef != nil {
		if spec.Source != nil || spec.SourceRef != nil {
			return "External population is incompatible with Source and SourceRef"
		}
		return ""
	}
	if (spec.Source == nil) == (spec.SourceRef == nil) {
		return "Data volume should have either Source or SourceRef, or be externally populated"
	}
	if ref := spec.SourceRef; ref != nil {
		switch {
		case ref.Kind == "":
			return "Missing sourceRef kind"
		case ref.Kind != dataSourceKind.Kind:
			return fmt.Sprintf("Unsupported sourceRef kind %s, currently only DataSource is supported", ref.Kind)
		case ref.Name == "":
			return "Missing sourceRef name"
		}
		return ""
	}
	return wrongSource(source, spec)
}

func wrongSource(source map[string]any, spec volumeSpec) string {
	switch {
	case len(source) == 0:
		return "Missing Data volume source"
	case len(source) > 1:
		return "Multiple Data volume sources"
	case spec.ContentType != "" && spec.ContentType != contentKubeVirt && spec.ContentType != contentArchive:
		return "ContentType not one of: kubevirt, archive"
	}
	if http := spec.Source.HTTP; http != nil {
		if http.URL == "" {
			return "spec.source source URL is empty"
		}
		if u, err := url.ParseRequestURI(http.URL); err != nil {
			return "spec.source Invalid source URL: " + http.URL
		} else if u.Scheme != "http" && u.Scheme != "https" {
			return "spec.source Invalid source URL scheme: " + http.URL
		}
	}
	if spec.Source.Blank != nil && spec.ContentType == contentArchive {
		return "SourceType cannot be blank and the contentType be archive"
	}
	if p := spec.Source.PVC; p != nil && (p.Namespace == "" || p.Name == "") {
		return "spec.source.PVC source PVC is not valid"
	}
	if p := spec.Source.Snapshot; p != nil && (p.Namespace == "" || p.Name == "") {
		return "spec.source.Snapshot source snapshot is not valid"
	}
	return ""
}
