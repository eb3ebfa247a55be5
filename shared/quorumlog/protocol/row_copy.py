"""A bookie's copy of a ledger's metadata. Rebuilds restore lost metadata from it (rule 18b)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from quorumlog.protocol.access_key import sealed_of
from quorumlog.protocol.metadata import LedgerMetadata

ATTEMPT_BYTES: Final = 16
COPIES_KEPT: Final = 8
"""Maximum copies of one ledger's metadata that a bookie keeps if the database contains their
versions. A rebuild needs the latest copy. Earlier copies show from which versions the latest copy
descends. Chosen by judgement."""
_NO_ATTEMPT: Final = bytes(ATTEMPT_BYTES)


class RowName(NamedTuple):
    """The name of a copy, which identifies one version of the metadata.

    Versions of two histories may have equal numbers, but differ in the token of the change that
    made them (rule 18a). So a copy with a higher number doesn't make another copy obsolete.
    """

    version: int
    attempt: bytes
    """The token as the 16 bytes of a UUID; zeros if the store has no token."""

    @property
    def token(self) -> str:
        """The token as the store writes it; empty if the store has no token."""
        return "" if self.attempt == _NO_ATTEMPT else token_text(self.attempt)


class RowCopy(NamedTuple):
    """A copy of a ledger's metadata. Bookies read only `placed_by` from `body` (rule 18c)."""

    name: RowName
    body: bytes


def token_text(attempt: bytes) -> str:
    """Convert a token's 16 bytes to text, as the store writes it."""
    text = attempt.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def attempt_of(token: str) -> bytes:
    """Convert a token to its 16 bytes; zeros for an empty token."""
    return bytes.fromhex(token.replace("-", "")) or _NO_ATTEMPT


def superseded(contained: Iterable[RowName]) -> tuple[RowName, ...]:
    """Return the names of copies of one ledger's metadata that a bookie may forget.

    `contained`: the names of all copies whose changes the database contains. The latest COPIES_KEPT
    copies must stay. Earlier copies may be forgotten, because in one history a higher version
    descends from each lower version. Copies that the database lacks have no such order (rule 18c).
    """
    return tuple(sorted(contained)[:-COPIES_KEPT])


def public(row: LedgerMetadata) -> LedgerMetadata:
    """Replace the access key in metadata by its salt and digest, and remove the other keys."""
    return replace(row, ledger_key=b"", mac_key=b"", access_key=sealed_of(row.access_key))


def name_of(row: LedgerMetadata) -> RowName:
    """The name of a copy of this metadata."""
    return RowName(row.version, attempt_of(row.attempt))
