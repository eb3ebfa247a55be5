"""What others than the writer may say of a ledger: its end, once bookies keep it, and its LAC.

`RowSpread` decides who gets a copy of a committed row, who is waited for, and when the copies are enough (rule 18b).
`end_after` decides what a reread of the row makes of an end. `LacByCoverage` decides when bookies' answers make a LAC
(rules 5 and 13).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata, State


class Spreading(Enum):
    """Who is waited for."""

    MEMBERS = auto()
    PLACING = auto()
    """Nobody; `others` is to be called with bookies that are no members."""
    OTHERS = auto()
    OVER = auto()
    """Nobody any more: `kept` is the result, though later answers still count."""


@dataclass(slots=True, eq=False)
class RowSpread(Keyed):
    """The copies of one row on their way.

    Every member gets one, those of earlier fragments and targets of repairs too: it costs one message, and tells
    the end of a ledger whose last fragment is empty where that fragment's members are gone.

    Only members of the last fragment are waited for, and only until each write set has an ack quorum with a copy:
    the copy is then as safe as an entry, and a slow bookie delays no close where it delays no append. Members that
    are known to be down are not waited for, and nobody longer than for an add. What a member did not get,
    autorecovery's check sends again. Where too few members have a copy of an end by then, other bookies get one, since
    a rebuild asks all: an ack quorum of copies anywhere keeps an end.
    """

    row: LedgerMetadata
    phase: Spreading = Spreading.MEMBERS
    kept: int = 0
    """Copies at any bookie."""
    _awaited: frozenset[str] = frozenset()
    _lacking: int = field(init=False)
    """Copies that members of the last fragment need yet: `write_quorum` - `ack_quorum` may be without one."""

    def __post_init__(self) -> None:
        """Nothing is sent yet."""
        quorum = self.row.quorum
        self._lacking = quorum.ensemble_size - quorum.write_quorum + quorum.ack_quorum

    def begin(self, down: Container[str]) -> Sequence[str]:
        """Who is sent a copy. `down`: bookies that are not waited for."""
        members = self.row.last_fragment.bookies
        self._awaited = frozenset(member for member in members if member not in down)
        self._go_on()
        return self.row.all_members

    def answered(self, member: str, status: Status) -> None:
        """A bookie has confirmed a copy, or has not."""
        if status is Status.OK:
            self.kept += 1
            self._lacking -= member in self.row.last_fragment.bookies
        self._awaited -= {member}
        self._go_on()

    def overdue(self) -> None:
        """Those who are waited for have had their time."""
        self._awaited = frozenset()
        self._go_on()

    def others(self, candidates: Sequence[str]) -> Sequence[str]:
        """Who is sent a copy in the members' place, out of bookies that are no members."""
        self.phase = Spreading.OTHERS
        some = sorted(candidates[: max(self.row.quorum.ack_quorum - self.kept, 0)])
        self._awaited = frozenset(some)
        self._go_on()
        return some

    def _go_on(self) -> None:
        quorum, is_waiting = self.row.quorum, bool(self._awaited)
        if self.phase is Spreading.OVER or self.phase is Spreading.PLACING:
            return
        if self._lacking <= 0:
            self.phase = Spreading.OVER
        elif self.phase is Spreading.MEMBERS and not is_waiting:
            is_open = self.row.state is State.OPEN
            self.phase = Spreading.OVER if is_open else Spreading.PLACING
        elif self.phase is Spreading.OTHERS and (not is_waiting or self.kept >= quorum.ack_quorum):
            self.phase = Spreading.OVER


class End(Enum):
    """What is known of an end that the database told, after copies of it were sent (rule 18b)."""

    KEPT = auto()
    """The database had it after an ack quorum of bookies confirmed copies: it can be told from now on."""
    UNSURE = auto()
    """It can be told once, since nobody can wait for bookies for ever; the next reader has copies sent again."""
    MOVED = auto()
    """The database went back and the ledger ended elsewhere: nothing can be told."""


def end_after(told: LedgerMetadata, copies: int, found: LedgerMetadata) -> End:
    """What an end is, by the row that told it, the copies that bookies confirmed of that row, and the row that the primary
    had after them.
    """
    if found.last_entry != told.last_entry:
        return End.MOVED
    return End.KEPT if copies >= found.quorum.ack_quorum else End.UNSURE


@dataclass(slots=True, eq=False)
class LacByCoverage(Keyed):
    """The highest LAC that a covering set of the last fragment's bookies knows. Entries below that fragment are confirmed.

    A LAC that was told to a reader before came with an entry that an ack quorum has, and each covering set has one of them.
    """

    row: LedgerMetadata
    highest: int = field(init=False)
    _answered: frozenset[int] = frozenset()
    """Positions that answered for certain."""
    _waiting: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Everybody is to be asked."""
        self.highest = self.row.last_fragment.first_entry - 1
        self._waiting = frozenset(range(len(self.row.last_fragment.bookies)))

    def answered(self, position: int, status: Status, lac: int) -> None:
        """The bookie at a position has answered, or can't be asked."""
        self._waiting -= {position}
        if status in (Status.OK, Status.NO_ENTRY):
            self._answered |= {position}
            if status is Status.OK and lac > NO_ENTRY:
                self.highest = max(self.highest, lac)

    @property
    def is_over(self) -> bool:
        """Whether no further answer is needed, or none can come."""
        return self._is_covered or not self._waiting

    @property
    def confirmed(self) -> int | None:
        """The LAC; None if too few answered."""
        return self.highest if self._is_covered else None

    @property
    def _is_covered(self) -> bool:
        return self.row.quorum.is_covered(self._answered)
