"""New access tokens: what their owner gets, and what is stored of it. With the standard library alone, since the command
line draws tokens too.
"""

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Final

_PREFIX: Final = "qlt_"
"""So that scanners for secrets know a token that somebody published."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token whose secret is not stored anywhere yet."""

    secret: str = field(repr=False)
    id: str
    hash: bytes
    """SHA-256 of the secret, which has 256 random bits: nobody finds the secret by trying."""


def draw_token() -> NewToken:
    """A new token."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return NewToken(secret, secrets.token_hex(8), hashlib.sha256(secret.encode()).digest())
