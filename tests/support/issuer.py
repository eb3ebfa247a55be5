"""An issuer of JWTs, with its keys and the file in which gateways find them."""

import base64
import json
import time
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from services.gateway.edge.access.jwts import JwtRules

NAME: Final = "https://login.example"
AUDIENCE: Final = "quorumlog"
CLAIM: Final = "scope"
LEEWAY_S: Final = 300
"""Far more than a slow machine takes for a test."""
_OF_ALGORITHM: Final[dict[str, Any]] = {
    "RS256": (lambda: rsa.generate_private_key(65537, 2048), RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), ECAlgorithm),
    "EdDSA": (ed25519.Ed25519PrivateKey.generate, OKPAlgorithm),
}


class Issuer:
    """Signs JWTs. Its file has the public keys, unless a test writes something else."""

    def __init__(self, file: Path, *algorithms: str) -> None:
        """A key for each algorithm, which is its key id too; without any: ES256."""
        self.file = file
        self.keys: dict[str, tuple[str, PrivateKeyTypes]] = {}
        for algorithm in algorithms or ("ES256",):
            self.add(algorithm, algorithm)

    @property
    def rules(self) -> JwtRules:
        """The settings of a gateway that trusts this issuer."""
        return JwtRules(self.file, NAME, AUDIENCE, CLAIM, LEEWAY_S)

    def add(self, key_id: str, algorithm: str = "ES256") -> None:
        """Begin to sign with another key."""
        self.keys[key_id] = algorithm, _OF_ALGORITHM[algorithm][0]()
        self.publish()

    def drop(self, key_id: str) -> None:
        """Withdraw a key, by a new file in the old one's place."""
        del self.keys[key_id]
        self.publish()

    def public(self, key_id: str) -> dict[str, Any]:
        """A key as the file has it."""
        algorithm, key = self.keys[key_id]
        public = key.public_key()
        found: dict[str, Any] = _OF_ALGORITHM[algorithm][1].to_jwk(public, as_dict=True)
        return found | {"kid": key_id, "use": "sig", "alg": algorithm}

    def publish(self, *more: Any) -> None:
        """Write the file."""
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps({"keys": [*map(self.public, self.keys), *more]}))
        draft.replace(self.file)

    def jwt(
        self, *grants: str, key_id: str | None = None, header: Any = None, **claims: Any
    ) -> str:
        """A JWT for ten minutes; a claim of None is left out."""
        key_id = key_id or next(iter(self.keys))
        algorithm, key = self.keys[key_id]
        said = said_by_default(grants) | claims
        headers = {"kid": key_id} | (header or {})
        payload = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(payload, key, algorithm, headers=headers)  # type: ignore[arg-type]


def said_by_default(grants: tuple[str, ...] = ()) -> dict[str, Any]:
    """The claims of a valid JWT."""
    now = int(time.time())  # noqa: TID251  (the clock is what a JWT tells of)
    return {
        "iss": NAME,
        "aud": AUDIENCE,
        "sub": "ann",
        "iat": now,
        "exp": now + 600,
        CLAIM: " ".join(grants),
    }


def handmade(header: object, claims: object, signature: bytes = b"") -> str:
    """A JWT that a library would not make."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
