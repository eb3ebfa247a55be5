"""Hashed (`sealed`) access keys, which contain a key's salt and digest, not the key (rule 18d).

An access key is derived from a password and a salt; comparing digests verifies the password.
Bookies' copies of metadata hold only hashed keys, so that a copy gives no access.
"""

import hashlib
import hmac
from typing import Final

SALT_BYTES: Final = 16
"""Length of the salt at the beginning of an access key."""

_SEALED: Final = b"sha256"
_SEALED_BYTES: Final = len(_SEALED) + SALT_BYTES + 32
"""The size of a hashed access key. A plain access key is shorter: a salt and 32 bytes."""


def sealed(salt: bytes, digest: bytes) -> bytes:
    """Make a hashed access key, for metadata that was rebuilt without the access key itself."""
    return _SEALED + salt + digest


def is_sealed(access_key: bytes) -> bool:
    """Whether an access key is hashed: it has the salt and a digest instead of the key."""
    return len(access_key) == _SEALED_BYTES and access_key.startswith(_SEALED)


def salt_and_digest(access_key: bytes) -> tuple[bytes, bytes]:
    """Return the salt and digest of a plain or hashed access key; both empty for an empty key."""
    if not access_key:
        return b"", b""
    if is_sealed(access_key):
        rest = access_key[len(_SEALED) :]
        return rest[:SALT_BYTES], rest[SALT_BYTES:]
    return access_key[:SALT_BYTES], hashlib.sha256(access_key).digest()


def sealed_of(access_key: bytes) -> bytes:
    """Return the hashed form of an access key, which is not secret; empty for an empty key."""
    return access_key and sealed(*salt_and_digest(access_key))


def is_same(known: bytes, access_key: bytes) -> bool:
    """Whether the plain key `known` of a password matches a plain or hashed access key."""
    if is_sealed(access_key):
        return hmac.compare_digest(sealed_of(known), access_key)
    return hmac.compare_digest(known, access_key)
