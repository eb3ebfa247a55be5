"""The metadata service as the machines' driver sees it: one row, compare-and-swap, attempts.

An attempt that was applied is remembered with its token in the same step, so that a driver that
lost the answer can ask again and learn what happened (rule 6). Each state that the store was in is
kept: it may go back to any of them, or to none (tests/model/sim/restores.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quorumlog.errors import IncarnationUsed, StaleMember
from quorumlog.protocol import changes
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.messages import CasStatus, MissedRange
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import Registered
from quorumlog.protocol.row_copy import RowName, name_of


class Snapshot(NamedTuple):
    """A state of the store; `row` is None in an empty one."""

    row: LedgerMetadata | None
    applied: frozenset[str]
    missed: int
    """How many of the missed ranges it has."""
    cookies: Mapping[str, Registered]


EMPTY: Final = Snapshot(None, frozenset(), 0, {})


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
    cookies: dict[str, Registered] = field(default_factory=dict)
    """By the bookie's name (rule 15b). As old as the row that the store has gone back to."""
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
        try:
            added = changes.added_members(self.row, wanted)
            changes.check_members(sorted(added), self.registered)
        except StaleMember as stale:
            is_final = stale.members["is_final"]
            return CasStatus.CONFLICT if is_final else CasStatus.UNKNOWN, self.row
        self.history.append(self._snapshot())
        self._put(wanted.changed_by(token, self.row))
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
        applied = frozenset(self.applied)
        return Snapshot(self.row, applied, len(self.missed), dict(self.cookies))

    # --- cookies --------------------------------------------------------------------------------

    @property
    def registered(self) -> dict[str, int]:
        """The registered incarnations by name."""
        return {name: cookie.incarnation for name, cookie in self.cookies.items()}

    def register(self, name: str, known: int, now: int) -> int:
        """A bookie whose directory, which may be a new one, knows of incarnation `known` starts as the next one."""
        row = self.row if self.behind is None else self.behind.row
        members = () if row is None else row.all_members
        named = [member_incarnation(m) for m in members if member_name(m) == name]
        incarnation = max(known, self.registered.get(name, 0)) + 1
        try:
            changes.check_new_incarnation(name, incarnation, max(named, default=-1))
        except IncarnationUsed as used:
            incarnation = int(used.members["named"]) + 1
        known_as = self.cookies.get(name)
        born_at = known_as.born_at if known and known_as is not None else f"{now:020}"
        self.cookies[name] = Registered(incarnation, born_at)
        return incarnation

    def put_cookie(self, name: str, incarnation: int) -> None:
        """A directory that was registered before, or a rebuild writes a cookie."""
        known = self.cookies.get(name)
        if known is None or known.incarnation < incarnation:
            self.cookies[name] = Registered(incarnation)

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
        self.cookies = dict(self.behind.cookies)

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
