"""Authentication by an issuer's JWTs (RFC 7519, RFC 8725), in addition to the cluster's own tokens.

The issuer's public keys are in a file (a JWKS, RFC 7517), which is read again when it changes. The
key determines the algorithm; the header of a JWT only names the key. `IssuedCallers` caches the
callers of verified JWTs. No other service is involved.
"""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from pydantic import ValidationError

from quorumlog.errors import Unauthenticated
from quorumlog.net.identity import stamp_of
from quorumlog.wire.token_bodies import GRANT, IssuedToken, TokenQuotas
from services.gateway.edge.access.quotas import Usage
from services.gateway.edge.access.scopes import Caller

log = logging.getLogger(__name__)

QUOTAS_CLAIM: Final = "quorumlog_quotas"
_ALGORITHMS: Final = frozenset(("RS256", "ES256", "EdDSA"))
"""Accepted algorithms, all with public keys. With HS256, any reader of the file could sign JWTs."""
_REQUIRED: Final = ("exp", "iss", "aud", "sub")
_MATERIAL: Final = ("crv", "e", "kty", "n", "x", "y")
"""Members of a public key from which the key's thumbprint is computed (RFC 7638)."""
_GRANT: Final = re.compile(GRANT)

_WHY: Final[tuple[tuple[type[jwt.PyJWTError], str], ...]] = (
    (jwt.ExpiredSignatureError, "the JWT has expired"),
    (jwt.ImmatureSignatureError, "the JWT is not valid yet (iat, nbf)"),
    (jwt.InvalidAudienceError, "the JWT is for another audience (aud)"),
    (jwt.InvalidIssuerError, "the JWT has another issuer (iss)"),
    (jwt.InvalidAlgorithmError, "the JWT is not signed with the algorithm of its key (alg)"),
    (jwt.InvalidSignatureError, "the JWT's signature does not match its key (kid)"),
)
"""Messages by error class; the first match is used. No message reveals the JWT or valid values."""


class KeysUnusable(ValueError):
    """The file with the issuer's keys can't be used. The message has the reason."""


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Conditions for valid JWTs, and the name of the claim with the grants."""

    keys_file: Path
    issuer: str
    audience: str
    grants_claim: str
    leeway_s: int


@dataclass(frozen=True, slots=True)
class _Key:
    jwk: jwt.PyJWK
    thumbprint: str


class Jwts:
    """Verifies JWTs by the keys in a file.

    Invariant: an unusable file does not replace the current keys.
    """

    def __init__(self, rules: JwtRules) -> None:
        """Read the keys. Raises: KeysUnusable."""
        self._rules = rules
        self._seen = stamp_of(rules.keys_file)
        self._keys = _read(rules.keys_file)
        self._thumbprints = {key.thumbprint for key in self._keys.values()}

    def look(self) -> None:
        """Load the keys again if the file has changed."""
        file = self._rules.keys_file
        if (found := stamp_of(file)) == self._seen:
            return
        self._seen = found
        try:
            self._keys = _read(file)
        except KeysUnusable as error:
            log.error("jwt-keys-unusable", extra={"why": str(error)})  # noqa: TRY400
            return
        self._thumbprints = {key.thumbprint for key in self._keys.values()}
        log.info("jwt-keys-loaded", extra={"keys": sorted(self._keys)})

    def has(self, thumbprint: str) -> bool:
        """Whether the file still has the key with this thumbprint."""
        return thumbprint in self._thumbprints

    def verified(self, text: str) -> IssuedToken:
        """Verify a JWT, and return its claims. Raises: Unauthenticated."""
        if not text.isascii():
            raise Unauthenticated("the token is not a valid JWT: send a new JWT")
        try:
            key = self._key(jwt.get_unverified_header(text).get("kid"))
            claims = jwt.decode(
                text,
                key.jwk,
                algorithms=[key.jwk.algorithm_name],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=self._rules.leeway_s,
                options={"require": [*_REQUIRED], "verify_sub": False, "verify_jti": False},
            )
        except jwt.PyJWTError as error:
            raise Unauthenticated(_why(error)) from None
        return self._said(claims, key)

    def _key(self, key_id: str | None) -> _Key:
        """Find the key that a JWT names. Raises: Unauthenticated."""
        if key_id not in self._keys:
            self.look()  # an issuer adds a new key to the file before its first use
        found = self._keys.get(key_id or "")
        if found is None:
            raise Unauthenticated("the JWT names an unknown key (kid): send a new JWT")
        return found

    def _said(self, claims: Mapping[str, Any], key: _Key) -> IssuedToken:
        """Convert verified claims to a token. Raises: Unauthenticated if a claim is malformed."""
        try:
            return IssuedToken(
                subject=claims["sub"],
                grants=_grants(claims.get(self._rules.grants_claim, "")),
                quotas=claims.get(QUOTAS_CLAIM, {}),
                ends_at=int(claims["exp"]) + self._rules.leeway_s,
                key=key.thumbprint,
            )
        except ValidationError as error:
            place = error.errors()[0]["loc"][0]
            claim = {"subject": "sub", "quotas": QUOTAS_CLAIM}.get(str(place), str(place))
            raise Unauthenticated(
                f"the JWT's claim {claim} is invalid: see docs/guides/tokens.md"
            ) from None


def is_jwt(secret: str) -> bool:
    """Whether a secret looks like a JWT: the cluster's own tokens contain no dot."""
    return secret.count(".") == 2


def _grants(claim: object) -> tuple[str, ...]:
    """Parse the grants in a claim (a list, or a string of words). Other scopes are ignored."""
    words = claim.split() if isinstance(claim, str) else claim
    if not isinstance(words, list):
        return ()
    return tuple(word for word in words if isinstance(word, str) and _GRANT.fullmatch(word))


def _why(error: jwt.PyJWTError) -> str:
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"the JWT lacks the claim {error.claim}"
    found = (why for kind, why in _WHY if isinstance(error, kind))
    return next(found, "the token is not a valid JWT: send a new JWT")


def _read(file: Path) -> dict[str, _Key]:
    """Read the keys of a file, by key id. Raises: KeysUnusable."""
    try:
        keys = list(json.loads(file.read_bytes())["keys"])
    except OSError as error:
        raise KeysUnusable(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeysUnusable(f'{file} is not a JWKS: expected {{"keys": [...]}}') from None
    found = {jwk["kid"]: key for jwk in keys if (key := _usable(jwk)) is not None}
    if not found:
        raise KeysUnusable(
            f"{file} has no usable key: add one with a kid, for an algorithm of"
            f" {', '.join(sorted(_ALGORITHMS))} (RSA keys need at least 2048 bits)"
        )
    return found


def _usable(data: object) -> _Key | None:
    """Parse a key of the file. Returns None if the key is for another use, or is too weak."""
    if not isinstance(data, dict) or not isinstance(data.get("kid"), str):
        return None
    is_for_signatures = data.get("use", "sig") == "sig"
    if not is_for_signatures or ("alg" in data and str(data["alg"]) not in _ALGORITHMS):
        return None
    try:
        jwk = jwt.PyJWK(data)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    # For a key without `alg`, the library uses the default algorithm of the key's type.
    if jwk.algorithm_name not in _ALGORITHMS or jwk.Algorithm.check_key_length(jwk.key) is not None:
        return None
    material = {name: data[name] for name in _MATERIAL if name in data}
    text = json.dumps(material, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    return _Key(jwk, base64.urlsafe_b64encode(digest).decode())


ISSUED_MAX: Final = 10_000
"""Maximum number of cached JWTs, and of subjects with counted quotas (chosen by judgement)."""


class IssuedCallers:
    """Caches callers by the hash of a JWT or by a ticket's claims, to verify each signature once.

    Invariant: a ticket's cache entry never authenticates a JWT, because a ticket allows less.
    """

    def __init__(self, jwts: Jwts, now: Callable[[], float]) -> None:
        self._jwts, self._now = jwts, now
        self._known: dict[bytes | IssuedToken, Caller] = {}
        self._usages: dict[tuple[str, TokenQuotas], Usage] = {}
        """Quota usage by subject and quota settings. All JWTs of a subject share its quotas."""

    def identify(self, digest: bytes, text: str) -> Caller:
        """Return the caller of the JWT `text`, whose hash is `digest`. Raises: Unauthenticated."""
        known = self._known.get(digest)
        return known or self._note(digest, self._jwts.verified(text))

    def identify_by_ticket(self, issued: IssuedToken) -> Caller:
        """Return the caller of a verified ticket with these claims. Raises: Unauthenticated."""
        if (known := self._known.get(issued)) is not None:
            return known
        if not self._jwts.has(issued.key):
            self._jwts.look()
        if not self._jwts.has(issued.key):
            raise Unauthenticated("the key of the ticket's JWT was removed: get a new JWT")
        return self._note(issued, issued)

    def refresh(self) -> None:
        """Load changed keys, and end callers whose JWT has expired or whose key was removed. Also
        charge each subject for the new bytes of its requests in progress.
        """
        self._jwts.look()
        now = self._now()
        for key, caller in list(self._known.items()):
            assert caller.issued is not None
            if caller.issued.ends_at <= now or not self._jwts.has(caller.issued.key):
                del self._known[key]
                caller.end()
        for usage in self._usages.values():
            usage.charge_flows()

    def _note(self, key: bytes | IssuedToken, issued: IssuedToken) -> Caller:
        who = f"the JWT of {issued.subject}"
        caller = Caller(who, issued.grants, ends_at=issued.ends_at, issued=issued)
        if issued.quotas != TokenQuotas():
            caller.usage = self._usage(who, issued)
        if len(self._known) >= ISSUED_MAX:
            # Evicted JWTs are verified again on their next use. Callers with connections stay, so
            # that `refresh` can end them when their JWT expires.
            self._known = {one: known for one, known in self._known.items() if known.connections}
        self._known[key] = caller
        return caller

    def _usage(self, who: str, issued: IssuedToken) -> Usage:
        key = (issued.subject, issued.quotas)
        if key not in self._usages:
            if len(self._usages) >= ISSUED_MAX:
                del self._usages[next(iter(self._usages))]
            self._usages[key] = Usage(who, issued.quotas)
        return self._usages[key]
