"""Encrypts ledgers' keys at rest (docs/adr/0029-keys-at-rest.md). A key of KEY_FILE encrypts the MAC
key and the access key of each row. Thus a copy of the database or of a backup gives no access to
ledgers.

The cipher is AES-256-GCM. The associated data are the ledger's id and the field's name, so that a
key that was moved to another row can't be decrypted.
"""

import base64
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quorumlog.errors import MetadataUnavailable

SEALED: Final = ("mac_key", "access_key")
"""The encrypted fields of a row."""

_MARK: Final = "sealed:"
"""Prefix of an encrypted field. A plain field is base64, which has no colon."""
_NONCE_BYTES: Final = 12
_LINE: Final = re.compile(r"[A-Za-z0-9+/]{43}=")


class KeyFileUnusable(ValueError):
    """A key file can't be used. The error has the reason, but none of the file's content."""


class KeyRing:
    """Keys of KEY_FILE. The first key encrypts, all keys decrypt. Without keys, rows are plain."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Each of the `keys` has 32 bytes."""
        self._ciphers = {key_id(key): AESGCM(key) for key in keys}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the keys, with the id of the encrypting key first."""
        return tuple(self._ciphers)

    def sealed(self, ledger_id: int, body: str) -> str:
        """Encrypt the keys in a row's JSON, for the database."""
        if not self._ciphers:
            return body
        fields = orjson.loads(body)
        for name in SEALED:
            if fields.get(name):
                fields[name] = self._seal(ledger_id, name, fields[name])
        return orjson.dumps(fields).decode()

    def opened(self, ledger_id: int, body: str) -> str:
        """Decrypt the keys in a stored row's JSON. Raises: MetadataUnavailable on failure."""
        if '": "sealed:' not in body:
            return body
        fields = orjson.loads(body)
        for name in SEALED:
            if str(fields.get(name, "")).startswith(_MARK):
                fields[name] = self._open(ledger_id, name, fields[name])
        return orjson.dumps(fields).decode()

    def is_current(self, body: str) -> bool:
        """Whether the keys in a stored row are encrypted with the first key."""
        fields: dict[str, Any] = orjson.loads(body)
        mark = f"{_MARK}{self.ids[0]}:" if self._ciphers else ""
        return all(fields[name].startswith(mark) for name in SEALED if fields.get(name))

    def _seal(self, ledger_id: int, name: str, value: str) -> str:
        used = self.ids[0]
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[used].encrypt(nonce, value.encode(), _bound_to(ledger_id, name))
        return f"{_MARK}{used}:{base64.b64encode(nonce + sealed).decode()}"

    def _open(self, ledger_id: int, name: str, text: str) -> str:
        used, _, sealed = text.removeprefix(_MARK).partition(":")
        cipher = self._ciphers.get(used)
        if cipher is None:
            raise MetadataUnavailable(f"the metadata service's KEY_FILE lacks key {used}: add it")
        try:
            data = base64.b64decode(sealed)
            return cipher.decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound_to(ledger_id, name)
            ).decode()
        except (InvalidTag, ValueError):
            raise MetadataUnavailable(
                f"the {name} of ledger {ledger_id} can't be decrypted: the database was tampered with"
            ) from None


def key_id(key: bytes) -> str:
    """The id of a key, which reveals nothing of the key."""
    return hashlib.sha256(b"quorumlog key id" + key).hexdigest()[:16]


def read_key_file(file: Path) -> KeyRing:
    """Read a file of keys, 32 bytes as base64 per line, mode 0600. Raises: KeyFileUnusable."""
    try:
        mode, text = file.stat().st_mode, file.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise KeyFileUnusable(f"{file}: {why}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileUnusable(f"{file} is readable by other users: run chmod 600")
    lines = text.split()
    if not lines or not all(map(_LINE.fullmatch, lines)):
        raise KeyFileUnusable(
            f"{file} must have one key per line, 32 bytes as base64 (`openssl rand -base64 32`)"
        )
    return KeyRing([base64.b64decode(line) for line in lines])


def _bound_to(ledger_id: int, name: str) -> bytes:
    return f"quorumlog {name} of ledger {ledger_id}".encode()
