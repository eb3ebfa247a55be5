"""The format of the copies of ledger metadata that bookies store for a rebuild (rule 18b).

A copy is the metadata as JSON, without secrets. It contains the salt and a digest of the access
key, which suffice to check a password. The MAC key can be derived from the password again. The
ledger key need not be in the copy, because bookies store it anyway.
"""

import re

import orjson

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.row_copy import public
from quorumlog.protocol.values import ATTEMPT
from quorumlog.wire.bodies import json_of, received


def encode(row: LedgerMetadata) -> bytes:
    """Encode ledger metadata as a copy."""
    return json_of(public(row))


def decode(copy: bytes | str) -> LedgerMetadata:
    """The metadata in a copy, without the ledger key and with only a digest of the access key.

    Raises: ValueError.
    """
    return received(LedgerMetadata, copy)


def placed_by(copy: bytes) -> str:
    """The token of the change that gave the ledger its place in the log; "" if the copy has none."""
    try:
        found = orjson.loads(copy)["lineage"]["placed_by"]
    except (ValueError, LookupError, TypeError):
        return ""
    return found if isinstance(found, str) and re.fullmatch(ATTEMPT, found) else ""
