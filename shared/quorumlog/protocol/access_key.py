"""Sealed access keys: only the salt and a digest of a key, as rebuilt metadata has them (rule 18d).

A password is right if the key that it gives with this salt has this digest. Bookies' copies of
metadata hold only sealed keys, so that a copy gives no access.
"""

import hashlib
import hmac
from typing import Final

SALT_BYTES: Final = 16
"""An access key begins with its salt."""

_SEALED: Final = b"sha256"
_SEALED_BYTES: Final = len(_SEALED) + SALT_BYTES + 32
"""A plain access key is shorter: a salt and 32 bytes."""


def sealed(salt: bytes, digest: bytes) -> bytes:
    """Make a sealed access key, which metadata has if the access key itself is unknown."""
    return _SEALED + salt + digest


def is_sealed(access_key: bytes) -> bool:
    """Whether an access key is sealed, so that only its salt and digest are known."""
    return len(access_key) == _SEALED_BYTES and access_key.startswith(_SEALED)


def salt_and_digest(access_key: bytes) -> tuple[bytes, bytes]:
    """The salt and digest of an access key, plain or sealed; both empty without a password."""
    if not access_key:
        return b"", b""
    if is_sealed(access_key):
        rest = access_key[len(_SEALED) :]
        return rest[:SALT_BYTES], rest[SALT_BYTES:]
    return access_key[:SALT_BYTES], hashlib.sha256(access_key).digest()


def sealed_of(access_key: bytes) -> bytes:
    """The sealed form of an access key, which is not secret; empty without a password."""
    return access_key and sealed(*salt_and_digest(access_key))


def is_same(known: bytes, access_key: bytes) -> bool:
    """Whether `known`, derived from a password, matches a plain or sealed access key."""
    if is_sealed(access_key):
        return hmac.compare_digest(sealed_of(known), access_key)
    return hmac.compare_digest(known, access_key)
