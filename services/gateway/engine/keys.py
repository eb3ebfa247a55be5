"""Keys derived from a ledger's password (rule 30). The password itself is never stored.

- Access key: a salt and a derived key in the ledger metadata. Gateways use it to verify passwords.
- Ledger key: a hash of a random nonce and the access key (empty without a password). Bookies check
  it. If a ledger id is reused by mistake, the ledger keys differ (rule 17).
- MAC key: the key of the digest `hmac-sha256`, which only gateways get.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap, aes_key_wrap

from quorumlog.errors import WrongPassword
from quorumlog.header import LEDGER_PASSWORD
from quorumlog.net import audit
from quorumlog.net.budget import PEER
from quorumlog.protocol.access_key import SALT_BYTES, is_same, is_sealed, salt_and_digest
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata

_ACCESS_KEY: Final = b"quorumlog access key"
_MAC_KEY: Final = b"quorumlog MAC key"
_WRAPPING_KEY: Final = b"quorumlog MAC key's wrapping key"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 32
_VERIFIED_MAX: Final = 10_000
"""Maximum number of cached hashes of verified passwords (chosen by judgement)."""


@dataclass(frozen=True, slots=True)
class LedgerKeys:
    """The keys in a new ledger's metadata."""

    ledger_key: bytes
    access_key: bytes
    mac_key: bytes


def new_keys(password: str | None, digest: DigestKind) -> LedgerKeys:
    """Generates new keys for a ledger. Each call returns new keys, even for the same password."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    access_key = mac_key = b""
    if password is not None:
        salt = secrets.token_bytes(SALT_BYTES)
        access_key = salt + _derive(password, salt, _ACCESS_KEY)
        if digest is DigestKind.HMAC_SHA256:
            mac_key = _derive(password, salt, _MAC_KEY)
    ledger_key = hmac.digest(nonce, b"quorumlog ledger key" + access_key, "sha256")
    return LedgerKeys(ledger_key, access_key, mac_key)


def with_password(row: LedgerMetadata, password: str) -> LedgerMetadata:
    """Returns the metadata with another password. `row` must contain the ledger's keys. The MAC key
    is kept, so that existing entries verify, but is wrapped by a key derived from the new password.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    wrapped = b""
    if row.mac_key:
        wrapped = aes_key_wrap(_derive(password, salt, _WRAPPING_KEY), row.mac_key)
    access_key = salt + _derive(password, salt, _ACCESS_KEY)
    return replace(row, access_key=access_key, wrapped_mac_key=wrapped)


class Gatekeeper:
    """Checks passwords of ledgers."""

    def __init__(self, known: Callable[[int], LedgerMetadata | None] = lambda _: None) -> None:
        """`known(id)`: the newest known metadata of a ledger that this process writes, or None."""
        self._known = known
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    def check(self, row: LedgerMetadata, password: str | None) -> LedgerMetadata:
        """Checks the password of a ledger that has one. Returns the metadata. Rebuilt metadata
        (rule 18d) lacks the keys, so they are derived from the password. Raises: WrongPassword.
        """
        if not row.access_key:
            return row
        try:
            if password is None:
                raise WrongPassword(f"{LEDGER_PASSWORD} is required", ledger_id=row.ledger_id)
            self._verify(self._newest(row), password)
        except WrongPassword as error:
            _note(row, error.status, error.code)
            raise
        return _with_keys(row, password) if is_sealed(row.access_key) else row

    def opens(self, row: LedgerMetadata, password: str) -> bool:
        """Whether the ledger has this password. Writes nothing to the audit log."""
        salt, _ = salt_and_digest(row.access_key)
        return is_same(salt + _derive(password, salt, _ACCESS_KEY), row.access_key)

    def _newest(self, row: LedgerMetadata) -> LedgerMetadata:
        """Returns the newest metadata, to check a password against. The writer's metadata may lack
        a password that another gateway has set. Rebuilt metadata is returned unchanged: no process
        writes a rebuilt ledger, and a known higher version may be from the lost database.
        """
        known = None if is_sealed(row.access_key) else self._known(row.ledger_id)
        return row if known is None or known.version <= row.version else known

    def _verify(self, row: LedgerMetadata, password: str) -> None:
        mark = hashlib.sha256(row.access_key + password.encode(errors="surrogatepass")).digest()
        if mark in self._verified:
            return
        salt, _ = salt_and_digest(row.access_key)
        derived = salt + _derive(password, salt, _ACCESS_KEY)
        if not is_same(derived, row.access_key):
            raise WrongPassword(f"{LEDGER_PASSWORD} is wrong", ledger_id=row.ledger_id)
        self._verified[mark] = None
        if len(self._verified) > _VERIFIED_MAX:
            self._verified.popitem(last=False)
        _note(row, HTTPStatus.OK)


def _note(row: LedgerMetadata, status: int, code: str = "") -> None:
    """Audits the first use of a correct password in this process, and each use of a wrong one."""
    target = f"ledgers/{row.ledger_id}"
    audit.note("openLedger", target, status, code, who=audit.WHO.get(), remote=PEER.get())


def _with_keys(row: LedgerMetadata, password: str) -> LedgerMetadata:
    salt, _ = salt_and_digest(row.access_key)
    access_key = salt + _derive(password, salt, _ACCESS_KEY)
    mac_key = b""
    if row.wrapped_mac_key:
        mac_key = aes_key_unwrap(_derive(password, salt, _WRAPPING_KEY), row.wrapped_mac_key)
    elif row.digest is DigestKind.HMAC_SHA256:
        mac_key = _derive(password, salt, _MAC_KEY)
    return replace(row, access_key=access_key, mac_key=mac_key)


def _derive(password: str, salt: bytes, purpose: bytes) -> bytes:
    kdf = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=purpose)
    return kdf.derive(password.encode(errors="surrogatepass"))
