package simulate

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	cloneTokenKey    = "cdi.kubevirt.io/storage.clone.token"
	extendedTokenKey = "cdi.kubevirt.io/storage.extended.clone.token"

	tokenIssuer    = "cdi-apiserver"  // of the webhook: for five minutes
	extendedIssuer = "cdi-deployment" // of the controllers: for good
)

// tokenKeys signs and checks clone tokens: what the webhook allowed is what the controllers may do.
type tokenKeys struct{ private *rsa.PrivateKey }

// cloneToken is the payload of a token, a JWT signed with PS256.
type cloneToken struct {
	Operation string            `json:"operation,omitempty"`
	Name      string            `json:"name,omitempty"`
	Namespace string            `json:"namespace,omitempty"`
	Resource  tokenResource     `json:"resource"`
	Params    map[string]string `json:"params,omitempty"`
}

type tokenResource struct {
	Group    string `json:"group"`
	Version  string `json:"version"`
	Resource string `json:"resource"`
}

type tokenClaims struct {
	cloneToken
	Issuer    string `json:"iss"`
	IssuedAt  int64  `json:"iat"`
	NotBefore int64  `json:"nbf"`
	Expiry    int64  `json:"exp"`
}

func resourceOf(kind string) tokenResource {
	if kind == snapshotName {
		return tokenResource{snapshotKind.Group, "v1", "volumesnapshots"}
	}
	return tokenResource{"", "v1", "persistentvolumeclaims"}
}

func (k tokenKeys) sign(issuer string, lifetime time.Duration, t cloneToken) (string, error) {
	now := time.Now()
	payload, err := json.Marshal(tokenClaims{t, issuer, now.Unix(), now.Unix(), now.Add(lifetime).Unix()})
	if err != nil {
		return "", err
	}
	signed := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"PS256"}`)) + "." + base64.RawURLEncoding.EncodeToString(payload)
	sum := sha256.Sum256([]byte(signed))
	signature, err := rsa.SignPSS(rand.Reader, k.private, crypto.SHA256, sum[:], &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash})
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature), err
}

func (k tokenKeys) check(issuer, token string) (cloneToken, error) {
	var claims tokenClaims
	head, rest, _ := strings.Cut(token, ".")
	body, signature, ok := strings.Cut(rest, ".")
	if !ok {
		return claims.cloneToken, errors.New("compact JWS format must have three parts")
	}
	raw, err := base64.RawURLEncoding.DecodeString(signature)
	if err != nil {
		return claims.cloneToken, err
	}
	sum := sha256.Sum256([]byte(head + "." + body))
	if err := rsa.VerifyPSS(&k.private.PublicKey, crypto.SHA256, sum[:], raw, nil); err != nil {
		return claims.cloneToken, errors.New("error in cryptographic primitive")
	}
	payload, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		return claims.cloneToken, err
	}
	if err := json.Unmarshal(payload, &claims); err != nil {
		return claims.cloneToken, err
	}
	const leeway = 10 // seconds
	switch now := time.Now().Unix(); {
	case claims.Issuer != issuer:
		return claims.cloneToken, errors.New("validation failed, invalid issuer claim (iss)")
	case now > claims.Expiry+leeway:
		return claims.cloneToken, errors.New("validation failed, token is expired (exp)")
	case now < claims.NotBefore-leeway:
		return claims.cloneToken, errors.New("validation failed, token not valid yet (nbf)")
	}
	return claims.cloneToken, nil
}

// extendToken replaces the webhook's token of a clone across namespaces by one that lasts, bound to the DataVolume.
func (s *volumeSync) extendToken() (bool, error) {
	if !s.v.acrossNamespaces() || has(s.v, extendedTokenKey) {
		return false, nil
	}
	short, ok := s.v.GetAnnotations()[cloneTokenKey]
	if !ok {
		return false, errors.New("token missing")
	}
	t, err := s.keys.check(tokenIssuer, short)
	if err != nil {
		return false, err
	}
	long, err := s.keys.extend(t, uidOf(s.v))
	annotate(s.v, extendedTokenKey, long)
	return err == nil, err
}

// extendClaimToken hands the right on to the claim.
func (s *volumeSync) extendClaimToken(ctx context.Context) error {
	if !s.v.acrossNamespaces() || has(s.claim, extendedTokenKey) {
		return nil
	}
	t, err := s.keys.check(extendedIssuer, s.v.GetAnnotations()[extendedTokenKey])
	if err != nil {
		return err
	}
	if t.Params["uid"] != uidOf(s.v) {
		return errors.New("token uid mismatch")
	}
	long, err := s.keys.extend(t, uidOf(s.claim))
	if err != nil {
		return err
	}
	old := s.claim.DeepCopy()
	annotate(s.claim, extendedTokenKey, long)
	return s.patch(ctx, old, s.claim)
}

func (k tokenKeys) extend(t cloneToken, uid string) (string, error) {
	t.Params = maps.Clone(t.Params)
	if t.Params == nil {
		t.Params = map[string]string{}
	}
	t.Params["uid"] = uid
	return k.sign(extendedIssuer, 10*365*24*time.Hour, t)
}

// checkToken refuses to read a source in another namespace without a token for exactly this clone. A temporary claim
// beside the source needs none.
func (c *cdi) checkToken(target *corev1.PersistentVolumeClaim, source cloneSource) error {
	if target.Namespace == source.Namespace {
		return nil
	}
	token, issuer := target.Annotations[extendedTokenKey], extendedIssuer
	if token == "" {
		token, issuer = target.Annotations[cloneTokenKey], tokenIssuer
	}
	t, err := c.keys.check(issuer, token)
	if err != nil {
		return fmt.Errorf("error verifying token: %w", err)
	}
	uid := t.Params["uid"]
	if t.Operation != "Clone" || t.Name != source.Name || t.Namespace != source.Namespace || t.Resource.Resource != resourceOf(source.kind).Resource ||
		t.Params["targetNamespace"] != target.Namespace || t.Params["targetName"] != target.Name || uid != "" && uid != uidOf(target) {
		return errors.New("invalid token")
	}
	return nil
}
