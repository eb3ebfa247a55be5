"""An access key of which only the salt and a digest are known: a rebuilt row's (rule 18d).

The password proves it: who derives a key with this salt and this digest has the ledger's key. Bookies' copies hold no
more, so that a copy gives nobody access.
"""

import hashlib
import hmac
from typing import Final

SALT_BYTES: Final = 16
"""An access key begins with its salt."""

_SEALED: Final = b"sha256"
_SEALED_BYTES: Final = len(_SEALED) + SALT_BYTES + 32
"""A known access key is shorter: a salt and 32 bytes."""


def sealed(salt: bytes, digest: bytes) -> bytes:
    """What a row keeps in an unknown access key's place."""
    return _SEALED + salt + digest


def is_sealed(access_key: bytes) -> bool:
    """Whether only salt and digest are known."""
    return len(access_key) == _SEALED_BYTES and access_key.startswith(_SEALED)


def salt_and_digest(access_key: bytes) -> tuple[bytes, bytes]:
    """Of a known or sealed access key; nothing of an empty one, whose ledger has no password."""
    if not access_key:
        return b"", b""
    if is_sealed(access_key):
        rest = access_key[len(_SEALED) :]
        return rest[:SALT_BYTES], rest[SALT_BYTES:]
    return access_key[:SALT_BYTES], hashlib.sha256(access_key).digest()


def sealed_of(access_key: bytes) -> bytes:
    """What everybody may know of an access key: its salt and digest; nothing of an empty one."""
    return access_key and sealed(*salt_and_digest(access_key))


def is_same(known: bytes, access_key: bytes) -> bool:
    """Whether `known`, derived from a password, is a row's access key, sealed or not."""
    if is_sealed(access_key):
        return hmac.compare_digest(sealed_of(known), access_key)
    return hmac.compare_digest(known, access_key)
