"""The metadata service as the machines' driver sees it: one row, compare-and-swap, attempts.

An attempt that was applied is remembered with its token in the same step, so that a driver that
lost the answer can ask again and learn what happened (rule 6). Each state that the store was in is
kept: it may go back to any of them, or to none (tests/sim/restores.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.row_copy import RowName, name_of


class Snapshot(NamedTuple):
    """A state of the store; `row` is None in an empty one."""

    row: LedgerMetadata | None
    applied: frozenset[str]
    missed: int
    """How many of the missed ranges it has."""


EMPTY: Final = Snapshot(None, frozenset(), 0)


@dataclass(slots=True)
class Store:
    """One ledger's row. `applied` is the append-only table of attempt tokens."""

    row: LedgerMetadata
    """While `behind` says what the store has: the row of the history that is lost."""
    applied: set[str] = field(default_factory=set)
    history: list[Snapshot] = field(default_factory=list)
    """The states before the present one."""
    missed: list[MissedRange] = field(default_factory=list)
    forgotten: list[MissedRange] = field(default_factory=list)
    """What was in `missed` before the store went back."""
    rows: dict[RowName, LedgerMetadata] = field(default_factory=dict)
    """Each row that ever was, of all lines of history: what bookies' copies are of."""
    is_away: bool = False
    behind: Snapshot | None = None
    """The earlier state that the store has gone back to: it answers nothing before rows are rebuilt."""

    def __post_init__(self) -> None:
        """The ledger was just created."""
        self.applied.add(self.row.attempt)
        self.rows[name_of(self.row)] = self.row

    @property
    def is_down(self) -> bool:
        """Whether the store answers nothing."""
        return self.is_away or self.behind is not None

    def cas(
        self, token: str, wanted: LedgerMetadata, missed: tuple[MissedRange, ...]
    ) -> tuple[CasStatus, LedgerMetadata]:
        """Apply or refuse; a token that was applied before is answered as it was then."""
        if token in self.applied:
            return CasStatus.OK, self.row
        if not self._is_present(wanted):
            return CasStatus.CONFLICT, self.row
        self.history.append(self._snapshot())
        self._put(replace(wanted, version=wanted.version + 1, attempt=token))
        self.missed.extend(missed)
        return CasStatus.OK, self.row

    def _is_present(self, base: LedgerMetadata) -> bool:
        """Versions of two lines of history may be equal: the token tells them apart."""
        return (base.version, base.attempt) == (self.row.version, self.row.attempt)

    def _put(self, row: LedgerMetadata) -> None:
        self.row = row
        self.applied.add(row.attempt)
        self.rows[name_of(row)] = row

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.row, frozenset(self.applied), len(self.missed))

    # --- a store that goes back -----------------------------------------------------------------

    def go_back(self, states: int) -> None:
        """Lose the last changes, so many of them; all and the creation if there are not so many."""
        if not states:
            self.behind = self._snapshot()
        elif states > len(self.history):
            self.behind = EMPTY
            self.history.clear()
        else:
            self.behind = self.history[-states]
            del self.history[-states:]

    def is_lost(self, row: LedgerMetadata) -> bool:
        """Whether the store lacks the change that made a row."""
        return row.attempt not in (self.applied if self.behind is None else self.behind.applied)

    def come_back(self, row: LedgerMetadata, contained: Iterable[str]) -> None:
        """Go on with this row. The store contains these changes too now: copies tell of them."""
        assert self.behind is not None
        behind, self.behind = self.behind, None
        if behind.row != row:
            self.history.append(behind)
        self.applied = {*behind.applied, *contained}
        self.forgotten += self.missed[behind.missed :]
        del self.missed[behind.missed :]
        self._put(row)
