"""A bookie's copy of a ledger's row, from which a lost row is made again (rule 18b)."""

from typing import Final, NamedTuple

from quorumlog.protocol.metadata import LedgerMetadata

ATTEMPT_BYTES: Final = 16
_NO_ATTEMPT: Final = bytes(ATTEMPT_BYTES)


class RowName(NamedTuple):
    """Which row a copy is of.

    Two lines of history may each have a row of this version. The token of the change that made the row tells
    them apart (rule 18a), so a higher version alone makes no other copy obsolete.
    """

    version: int
    attempt: bytes
    """The token, a UUID's 16 bytes; zeros where the store kept none."""


class RowCopy(NamedTuple):
    """A row as bookies keep it. The body is opaque to them."""

    name: RowName
    body: bytes


def name_of(row: LedgerMetadata) -> RowName:
    """The name of a row's copies."""
    attempt = row.attempt
    return RowName(row.version, bytes.fromhex(attempt.replace("-", "")) or _NO_ATTEMPT)
