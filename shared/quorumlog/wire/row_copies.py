"""Copies of ledgers' rows as bookies keep them (rule 18b): what a row is made again from. No sockets.

A copy is the row as JSON without its secrets. The MAC key is derived from the password again; of the access key
the salt and a digest stay, by which a password can be checked; bookies have the ledger key anyway.
"""

import hashlib
from dataclasses import replace
from typing import Final

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.bodies import Body, Key, LedgerRow

SALT_BYTES: Final = 16
"""An access key begins with its salt (services/gateway/engine/keys.py)."""


class RowCopyBody(Body):
    """What a copy says."""

    row: LedgerRow
    salt: Key = b""
    access_digest: Key = b""
    """SHA-256 of the access key; empty for a ledger without a password."""


def encode(row: LedgerMetadata) -> bytes:
    """The copy of a row."""
    access = row.access_key
    public = replace(row, ledger_key=b"", mac_key=b"", access_key=b"")
    body = RowCopyBody(
        row=LedgerRow.from_core(public),
        salt=access[:SALT_BYTES],
        access_digest=hashlib.sha256(access).digest() if access else b"",
    )
    return body.model_dump_json().encode()


def decode(copy: bytes) -> RowCopyBody:
    """What a copy says. Raises: ValueError."""
    return RowCopyBody.model_validate_json(copy)
