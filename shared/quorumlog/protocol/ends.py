"""Decides when processes other than a ledger's writer may report the ledger's end or its LAC.

- `RowSpread` decides which bookies get copies of committed metadata, for which bookies the process
  waits, and when enough copies exist (rule 18b).
- `end_after` decides whether an end may be reported after the metadata was read again.
- `LacByCoverage` derives the LAC from bookies' answers (rules 5 and 13).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata, State


class Spreading(Enum):
    """The phase of a RowSpread, which determines the bookies that it waits for."""

    MEMBERS = auto()
    PLACING = auto()
    """Waits until the driver calls `others` with bookies that are not members."""
    OTHERS = auto()
    OVER = auto()
    """Waits no longer. `kept` has the result, and late confirmations still increase it."""


@dataclass(slots=True, eq=False)
class RowSpread(Keyed):
    """Sends copies of one version of a ledger's metadata, and counts the confirmed ones (rule 18b).

    All members get a copy, including members of earlier fragments and targets of repairs. Such a
    copy costs one message, and keeps the end if all members of an empty last fragment are gone.

    The machine waits only for members of the last fragment, until each write set has an ack quorum
    with a copy, because the copy is then as safe as an entry. It does not wait for members that are
    known to be down, and waits for no bookie longer than for an add. If too few members have a copy
    of an end, other bookies get a copy. A rebuild reads the copies of all bookies, so it finds an
    end of which any Qa bookies have a copy. Autorecovery's check sends missing copies again.
    """

    row: LedgerMetadata
    phase: Spreading = Spreading.MEMBERS
    kept: int = 0
    """The number of copies that bookies confirmed, including bookies that are not members."""
    _awaited: frozenset[str] = frozenset()
    _lacking: int = field(init=False)
    """How many more members of the last fragment must get a copy. Qw - Qa members may lack it."""

    def __post_init__(self) -> None:
        quorum = self.row.quorum
        self._lacking = quorum.ensemble_size - quorum.write_quorum + quorum.ack_quorum

    def begin(self, down: Container[str]) -> Sequence[str]:
        """Return the members to send a copy to. The machine won't wait for members in `down`."""
        members = self.row.last_fragment.bookies
        self._awaited = frozenset(member for member in members if member not in down)
        self._go_on()
        return self.row.all_members

    def answered(self, member: str, status: Status) -> None:
        """Process a bookie's answer. Only OK confirms that the bookie has a copy."""
        if status is Status.OK:
            self.kept += 1
            self._lacking -= member in self.row.last_fragment.bookies
        self._awaited -= {member}
        self._go_on()

    def overdue(self) -> None:
        """Stop waiting for bookies that have not answered, because their deadline has passed."""
        self._awaited = frozenset()
        self._go_on()

    def others(self, candidates: Sequence[str]) -> Sequence[str]:
        """Choose bookies from `candidates`, which are not members, to get a copy too."""
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
    """Whether a ledger's end may be reported after copies of its metadata were sent (rule 18b)."""

    KEPT = auto()
    """Yes, always: an ack quorum confirmed copies, and the database then still had the end."""
    UNSURE = auto()
    """Yes, once, because callers can't wait for ever: too few bookies confirmed copies. The next
    read sends copies again."""
    MOVED = auto()
    """No, because the database went back to an older state, and has another end or none."""


def end_after(reported: LedgerMetadata, copies: int, found: LedgerMetadata) -> End:
    """Decide whether an end may be reported. `reported`: the metadata with the end. `copies`: the
    number of confirmed copies. `found`: the metadata that the primary returned afterwards.
    """
    if found.last_entry != reported.last_entry:
        return End.MOVED
    return End.KEPT if copies >= found.quorum.ack_quorum else End.UNSURE


@dataclass(slots=True, eq=False)
class LacByCoverage(Keyed):
    """Finds the highest LAC that a covering set of the last fragment's bookies returns, or the
    entry before that fragment if that entry is higher. This is at least the LAC that the last
    acknowledged entry contains, because each covering set has a bookie of the entry's ack quorum.
    """

    row: LedgerMetadata
    highest: int = field(init=False)
    _answered: frozenset[int] = frozenset()
    """Positions of bookies that answered OK or NO_ENTRY."""
    _waiting: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Wait for all bookies of the last fragment. The caller sends the requests."""
        self.highest = self.row.last_fragment.first_entry - 1
        self._waiting = frozenset(range(len(self.row.last_fragment.bookies)))

    def answered(self, position: int, status: Status, lac: int) -> None:
        """Process a bookie's answer; UNKNOWN means that the bookie can't be reached."""
        self._waiting -= {position}
        if status in (Status.OK, Status.NO_ENTRY):
            self._answered |= {position}
            if status is Status.OK and lac > NO_ENTRY:
                self.highest = max(self.highest, lac)

    @property
    def is_over(self) -> bool:
        """Whether no further answer is needed or expected."""
        return self._is_covered or not self._waiting

    @property
    def confirmed(self) -> int | None:
        """The LAC; None if too few bookies answered."""
        return self.highest if self._is_covered else None

    @property
    def _is_covered(self) -> bool:
        return self.row.quorum.is_covered(self._answered)
