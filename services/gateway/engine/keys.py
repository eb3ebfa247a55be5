"""The keys that a ledger's password gives (rule 30); the password itself is stored nowhere.

The access key in the row is salt and key; it says whether a password is right. The ledger key is
what bookies check: the access key (nothing, where there is no password) bound to a nonce of this
very ledger, so that an id that is used again by mistake has another key (rule 17). The MAC key
goes to gateways only, for the digest `hmac-sha256`.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from quorumlog.errors import WrongPassword
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata

_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 32
_REMEMBERED: Final = 10_000
"""Right passwords are remembered as hashes, so that an append does not derive keys (taste)."""


@dataclass(frozen=True, slots=True)
class LedgerKeys:
    """What a new ledger's row keeps."""

    ledger_key: bytes
    access_key: bytes
    mac_key: bytes


def new_keys(password: str | None, digest: DigestKind) -> LedgerKeys:
    """Keys for a new ledger: other ones each time, for the same password too."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    access_key = mac_key = b""
    if password is not None:
        salt = secrets.token_bytes(_SALT_BYTES)
        access_key = salt + _derive(password, salt, b"quorumlog access key")
        if digest is DigestKind.HMAC_SHA256:
            mac_key = _derive(password, salt, b"quorumlog MAC key")
    ledger_key = hmac.digest(nonce, b"quorumlog ledger key" + access_key, "sha256")
    return LedgerKeys(ledger_key, access_key, mac_key)


class Gatekeeper:
    """Says whether a password opens a ledger."""

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        self._right: OrderedDict[bytes, None] = OrderedDict()

    def check(self, row: LedgerMetadata, password: str | None) -> None:
        """Raise WrongPassword unless `password` is the ledger's. One too many is no fault."""
        if not row.access_key:
            return
        if password is None:
            raise WrongPassword("the ledger has a password", ledger_id=row.ledger_id)
        mark = hashlib.sha256(row.access_key + password.encode(errors="surrogatepass")).digest()
        if mark in self._right:
            return
        salt = row.access_key[:_SALT_BYTES]
        derived = salt + _derive(password, salt, b"quorumlog access key")
        if not hmac.compare_digest(derived, row.access_key):
            raise WrongPassword("the password is another one", ledger_id=row.ledger_id)
        self._right[mark] = None
        if len(self._right) > _REMEMBERED:
            self._right.popitem(last=False)


def _derive(password: str, salt: bytes, purpose: bytes) -> bytes:
    kdf = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=purpose)
    return kdf.derive(password.encode(errors="surrogatepass"))
