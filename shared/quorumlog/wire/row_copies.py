"""Copies of ledgers' rows as bookies keep them (rule 18b): what a row is made again from. No sockets.

A copy is the row as JSON without its secrets. The MAC key is derived from the password again; of the access key
the salt and a digest stay, by which a password can be checked; bookies have the ledger key anyway.
"""

import re
from dataclasses import replace

import orjson

from quorumlog.protocol.access_key import salt_and_digest, sealed
from quorumlog.protocol.metadata import Deletion, LedgerMetadata
from quorumlog.wire.bodies import ATTEMPT, Body, Key, LedgerRow, received


class RowCopyBody(Body):
    """What a copy says."""

    row: LedgerRow
    salt: Key = b""
    access_digest: Key = b""
    """SHA-256 of the access key; empty for a ledger without a password."""
    deleted: Deletion | None = None
    """What was deleted: the ledger, of which `row` was the last row, or its log alone."""


def encode(row: LedgerMetadata) -> bytes:
    """The copy of a row."""
    salt, digest = salt_and_digest(row.access_key)
    public = replace(row, ledger_key=b"", mac_key=b"", access_key=b"")
    body = RowCopyBody(
        row=LedgerRow.from_core(public), salt=salt, access_digest=digest, deleted=row.deletion
    )
    return body.model_dump_json().encode()


def decode(copy: bytes | str) -> RowCopyBody:
    """What a copy says. Raises: ValueError."""
    return received(RowCopyBody, copy)


def placed_by(copy: bytes) -> str:
    """The token of the log's change that gave the row its place, or ""; also of bytes that are no copy."""
    try:
        found = orjson.loads(copy)["row"]["lineage"]["placed_by"]
    except (ValueError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) and re.fullmatch(ATTEMPT, found) else ""


def row_of(copy: RowCopyBody) -> LedgerMetadata:
    """The row, as far as a copy tells it: without the ledger key, and the access key only to be proven by the password."""
    row = replace(copy.row.to_core(), deletion=copy.deleted)
    if not copy.access_digest:
        return row
    return replace(row, access_key=sealed(copy.salt, copy.access_digest))
