"""A bookie's copy of a ledger's metadata, from which lost metadata is rebuilt (rule 18b)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from quorumlog.protocol.access_key import sealed_of
from quorumlog.protocol.metadata import LedgerMetadata

ATTEMPT_BYTES: Final = 16
COPIES_KEPT: Final = 8
"""Copies of one ledger's metadata that a bookie keeps, of versions that the database contains. A
rebuild needs the last one; the earlier ones show from which versions it descends. Chosen by
judgement."""
_NO_ATTEMPT: Final = bytes(ATTEMPT_BYTES)


class RowName(NamedTuple):
    """Names the version of the metadata that a copy is of.

    Two histories may each have this version number. The token of the change that made the version
    tells them apart (rule 18a), so a higher number alone makes no other copy obsolete.
    """

    version: int
    attempt: bytes
    """The token, a UUID's 16 bytes; zeros if the store has no token."""

    @property
    def token(self) -> str:
        """The token as text, as the store writes it; empty if the store has no token."""
        return "" if self.attempt == _NO_ATTEMPT else token_text(self.attempt)


class RowCopy(NamedTuple):
    """A copy of a ledger's metadata. Bookies read only the token of its log's change (rule 18c)."""

    name: RowName
    body: bytes


def token_text(attempt: bytes) -> str:
    """A token's text, as the store writes it."""
    text = attempt.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def attempt_of(token: str) -> bytes:
    """The 16 bytes of a token; zeros for an empty token."""
    return bytes.fromhex(token.replace("-", "")) or _NO_ATTEMPT


def superseded(contained: Iterable[RowName]) -> tuple[RowName, ...]:
    """The copies of one ledger that a bookie may forget: all but the latest COPIES_KEPT of
    `contained`.

    `contained`: all copies whose changes the database contains. These copies are of one history, so
    a higher version descends from each lower one. Copies that the database lacks have no order
    (rule 18c).
    """
    return tuple(sorted(contained)[:-COPIES_KEPT])


def public(row: LedgerMetadata) -> LedgerMetadata:
    """The metadata without keys, but with the access key's salt and digest, as copies have it."""
    return replace(row, ledger_key=b"", mac_key=b"", access_key=sealed_of(row.access_key))


def name_of(row: LedgerMetadata) -> RowName:
    """The name that copies of this metadata have."""
    return RowName(row.version, attempt_of(row.attempt))
