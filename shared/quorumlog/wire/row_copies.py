"""Copies of ledgers' rows as bookies keep them (rule 18b): what a row is made again from. No sockets.

A copy is the row as JSON without its secrets. The MAC key is derived from the password again; of the access key
the salt and a digest stay, by which a password can be checked; bookies have the ledger key anyway.
"""

import re

import orjson

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.row_copy import public
from quorumlog.protocol.values import ATTEMPT
from quorumlog.wire.bodies import json_of, received


def encode(row: LedgerMetadata) -> bytes:
    """The copy of a row."""
    return json_of(public(row))


def decode(copy: bytes | str) -> LedgerMetadata:
    """The row, as far as a copy tells it: without the ledger key, and the access key only to be proven by the password.

    Raises: ValueError.
    """
    return received(LedgerMetadata, copy)


def placed_by(copy: bytes) -> str:
    """The token of the log's change that gave the row its place, or ""; also of bytes that are no copy."""
    try:
        found = orjson.loads(copy)["lineage"]["placed_by"]
    except (ValueError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) and re.fullmatch(ATTEMPT, found) else ""
