"""The metadata service as the machines' driver sees it: one row, compare-and-swap, attempts.

An attempt that was applied is remembered with its token in the same step, so that a driver that
lost the answer can ask again and learn what happened (rule 6). Rows of the history are kept: the
checker judges each change.
"""

from dataclasses import dataclass, field, replace

from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata


@dataclass(slots=True)
class Store:
    """One ledger's row. `applied` is the append-only table of attempt tokens."""

    row: LedgerMetadata
    applied: set[tuple[str, int]] = field(default_factory=set)
    history: list[LedgerMetadata] = field(default_factory=list)
    missed: list[MissedRange] = field(default_factory=list)
    is_down: bool = False

    def cas(
        self, token: tuple[str, int], wanted: LedgerMetadata, missed: tuple[MissedRange, ...]
    ) -> tuple[CasStatus, LedgerMetadata]:
        """Apply or refuse; a token that was applied before is answered as it was then."""
        if token in self.applied:
            return CasStatus.OK, self.row
        if wanted.version != self.row.version:
            return CasStatus.CONFLICT, self.row
        self.applied.add(token)
        self.history.append(self.row)
        self.row = replace(wanted, version=wanted.version + 1)
        self.missed.extend(missed)
        return CasStatus.OK, self.row
