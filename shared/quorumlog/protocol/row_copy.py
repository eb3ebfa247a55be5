"""A bookie's copy of a ledger's row, from which a lost row is made again (rule 18b)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from quorumlog.protocol.access_key import sealed_of
from quorumlog.protocol.metadata import LedgerMetadata

ATTEMPT_BYTES: Final = 16
COPIES_KEPT: Final = 8
"""Copies of one ledger's row that a bookie keeps of those that the database contains: the last one is needed, and
those before it tell from which older rows it descends (taste)."""
_NO_ATTEMPT: Final = bytes(ATTEMPT_BYTES)


class RowName(NamedTuple):
    """Which row a copy is of.

    Two lines of history may each have a row of this version. The token of the change that made the row tells
    them apart (rule 18a), so a higher version alone makes no other copy obsolete.
    """

    version: int
    attempt: bytes
    """The token, a UUID's 16 bytes; zeros where the store kept none."""

    @property
    def token(self) -> str:
        """The token as the store writes it; empty where it kept none."""
        return "" if self.attempt == _NO_ATTEMPT else token_text(self.attempt)


class RowCopy(NamedTuple):
    """A row as bookies keep it. The body is opaque to them, but for the change of a log that it tells of (rule 18c)."""

    name: RowName
    body: bytes


def token_text(attempt: bytes) -> str:
    """A token as the store writes it."""
    text = attempt.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def attempt_of(token: str) -> bytes:
    """The 16 bytes of a token; zeros of an empty one."""
    return bytes.fromhex(token.replace("-", "")) or _NO_ATTEMPT


def superseded(contained: Iterable[RowName]) -> tuple[RowName, ...]:
    """Copies that a bookie may forget, of those whose changes the database contains, all of them.

    These are of one line of history, so a higher version descends from a lower one, as it does not among copies
    whose changes the database lacks (rule 18c).
    """
    return tuple(sorted(contained)[:-COPIES_KEPT])


def public(row: LedgerMetadata) -> LedgerMetadata:
    """The row as a copy tells it: without its keys, but for the salt and digest of the access key."""
    return replace(row, ledger_key=b"", mac_key=b"", access_key=sealed_of(row.access_key))


def name_of(row: LedgerMetadata) -> RowName:
    """The name of a row's copies."""
    return RowName(row.version, attempt_of(row.attempt))
