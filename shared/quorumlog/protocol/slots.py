"""The slots of an ensemble while runs are written: pending requests, failures, missed entries.

A writer and a recovery both send each run to all its holders, confirm the run at Qa, and use one
silence timer for all requests. They differ only after failures. A writer looks for another member
at once, and metadata must name that member before its first add (rule 7). A recovery continues at
Qa, and changes its ensemble in memory only (rule 12).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.messages import (
    AddAnswered,
    FindBookies,
    MissedRange,
    SendAdd,
    StartTimer,
    Status,
    Timer,
    TimerFired,
)
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import union
from quorumlog.protocol.record import Run
from quorumlog.protocol.window import Window, part_of, positions

RANGES_MAX: Final = 64
"""Maximum missed ranges of one member. Further ranges are merged: a repair checks all entries."""


def merged(ranges: Iterable[MissedRange], stride: int = 1) -> tuple[MissedRange, ...]:
    """Join missed ranges that are at most `stride` apart, and sort them by member and first entry.
    `stride`: the largest step between two entries that one member stores (1 + E - Qw).
    """
    by_member: dict[str, list[tuple[int, int]]] = {}
    for missed in ranges:
        by_member.setdefault(missed.member, []).append((missed.first, missed.last))
    out: list[MissedRange] = []
    for member, found in sorted(by_member.items()):
        joined = union(found, stride)
        if len(joined) > RANGES_MAX:
            joined = ((joined[0][0], joined[-1][1]),)
        out.extend(MissedRange(member, first, last) for first, last in joined)
    return tuple(out)


@dataclass(slots=True, eq=False, kw_only=True)
class Slots(Keyed):
    """The slots of an ensemble. A slot is a position with its current member.

    Invariants (checked by `check`, with those of Window):
      - no run waits for a slot that is down;
      - every other slot was sent its part of each unconfirmed run.
    """

    is_recovery: bool = False
    """Whether adds are recovery adds, which pass fence and limbo."""
    window: Window = field(
        default_factory=lambda: Window(Quorum(1, 1, 1), last_confirmed=NO_ENTRY, length=0)
    )
    members: tuple[str, ...] = ()
    down: int = 0
    """The slots that failed, as a bit mask. Nothing is sent to them."""
    suspects: frozenset[str] = frozenset()
    """Members that failed. They can't join a slot until this set is cleared (L6)."""
    missed: tuple[MissedRange, ...] = ()
    """Confirmed entries that members lack. The next metadata change queues their repair (rule
    8)."""
    armed: frozenset[Timer] = frozenset()
    """Timers that are running, at most one of each kind."""
    row: LedgerMetadata | None = None
    """The metadata that names these members. Each member stores a copy before it acknowledges an
    entry (rule 18b). None in a recovery, whose close names the members (rule 12)."""
    _ledger_key: bytes = b""
    _generation: int = -1
    _generations: tuple[int, ...] = ()
    """By slot, the generation in which its member joined; earlier generations don't count (rule
    7)."""
    _since: tuple[int, ...] = ()
    """For each slot, the first tick of the silence timer that covers the slot's requests."""
    _tick: int = 0

    def begin(
        self, row: LedgerMetadata, *, last_confirmed: int, length: int = 0, down: int = 0
    ) -> None:
        """Start writing to the last fragment's members. Answers to earlier requests don't count."""
        size = row.quorum.ensemble_size
        self.window = Window(row.quorum, last_confirmed=last_confirmed, length=length)
        self.members = row.last_fragment.bookies
        self.down = down
        self.suspects = frozenset()
        self.row = None if self.is_recovery else row
        self._ledger_key = row.ledger_key
        self._generation += 1
        self._generations = (self._generation,) * size
        self._since = (0,) * size

    @property
    def everyone(self) -> int:
        """All slots, as a bit mask."""
        return (1 << len(self.members)) - 1

    # --- sending -----------------------------------------------------------------------------

    def push(self, run: Run) -> list[SendAdd]:
        """Add the next run to the window, and return the adds to send."""
        usable = self.everyone & ~self.down
        pending = self.window.push(run, usable=usable, tick=self._tick + 1)
        return [self._add(position, run) for position in positions(pending.waiting)]

    def _add(self, position: int, run: Run) -> SendAdd:
        return SendAdd(
            position,
            self.members[position],
            self._generation,
            part_of(run, self.window.quorum, position),
            self._ledger_key,
            self.is_recovery,
            self.row,
        )

    def _ask(self, mask: int, *, first: int, is_anew: bool) -> list[SendAdd]:
        self._since = tuple(
            self._tick + 1 if mask & 1 << position else since
            for position, since in enumerate(self._since)
        )
        asked = self.window.ask(mask, first=first, is_anew=is_anew)
        return [self._add(position, run) for position, run in asked]

    # --- answers -----------------------------------------------------------------------------

    def is_current(self, event: AddAnswered) -> bool:
        """Whether an answer counts. Answers of a member that was replaced since the request do not
        count (rule 7, I18, X7). For unconfirmed entries, a writer also ignores answers to requests
        before an ensemble change, because the member has only the old metadata (rule 18b).
        """
        came = self._generations[event.position]
        if event.member != self.members[event.position] or event.generation < came:
            return False
        is_of_row = self.is_recovery or event.generation == self._generation
        return is_of_row or event.first <= self.window.last_confirmed

    def settle(self, event: AddAnswered) -> None:
        """Process the answer to an add, with any status."""
        pending = self.window.find(event.first)
        if pending is None:
            return
        if event.status is Status.OK:
            self.window.ack(pending, event.position)
        else:
            self.window.answered(pending, event.position)

    def fail(self, position: int) -> bool:
        """Mark a slot as down, and stop awaiting its answers. False if it was down before."""
        if self.down & 1 << position:
            return False
        self.down |= 1 << position
        self.suspects |= {self.members[position]}
        self.window.give_up(1 << position)
        self.window.sweep()
        return True

    def revive(self, position: int) -> list[SendAdd]:
        """Use a slot with the same member again. Returns the adds that the member missed."""
        self.down &= ~(1 << position)
        return self._ask(1 << position, first=0, is_anew=False)

    # --- changes of members ------------------------------------------------------------------

    def find(self, attempt: int, *, leaving: int = 0, lost: tuple[str, ...] = ()) -> FindBookies:
        """Return a request for new members that excludes members in use, suspects and the members
        in `lost`. A slot in `leaving` may get a later incarnation of its present member.
        """
        used = {p: m for p, m in enumerate(self.members) if not self.down & 1 << p}
        staying = tuple(member for position, member in used.items() if not leaving & 1 << position)
        exclude = dict.fromkeys((*used.values(), *sorted(self.suspects), *lost))
        return FindBookies(attempt, staying, tuple(exclude))

    def members_with(self, chosen: dict[int, str]) -> tuple[str, ...]:
        """The members by position, after `chosen` members have joined."""
        return tuple(chosen.get(position, member) for position, member in enumerate(self.members))

    def replace(self, mask: int, members: tuple[str, ...], *, first: int) -> list[SendAdd]:
        """Replace the members of the slots in `mask` from entry `first` on. Returns the adds to
        send to the new members, which have stored nothing yet.

        A writer also sends unconfirmed entries to the other members again, because acknowledgements
        count only with a copy of the new metadata (rule 18b). A recovery sends no copies.
        """
        self.members = members
        self.down &= ~mask
        self._generation += 1
        self._generations = tuple(
            self._generation if mask & 1 << position else generation
            for position, generation in enumerate(self._generations)
        )
        asked = self._ask(mask, first=first, is_anew=True)
        if not self.is_recovery:
            staying = self.everyone & ~mask
            self.window.forget_acks(staying)
            unconfirmed = self.window.last_confirmed + 1
            asked += self._ask(staying & ~self.down, first=unconfirmed, is_anew=False)
        return asked

    # --- missed entries (rule 8) ---------------------------------------------------------------

    def write_off(self, mask: int) -> None:
        """Record as missed, by member, the confirmed entries that the slots in `mask` lack."""
        self.window.write_off(mask)
        self.take_missed()

    def take_missed(self) -> None:
        """Move the ranges that the window recorded as missed to `missed`, with their members."""
        missed, self.window.missed = self.window.missed, []
        self.add_missed(MissedRange(self.members[at], first, last) for at, first, last in missed)

    def add_missed(self, missed: Iterable[MissedRange]) -> None:
        """Add ranges to `missed`, and join ranges that are close to each other."""
        quorum = self.window.quorum
        stride = quorum.ensemble_size - quorum.write_quorum + 1
        self.missed = merged((*self.missed, *missed), stride)

    def lacking(self, reported: Iterable[MissedRange]) -> tuple[MissedRange, ...]:
        """The ranges that members lack if no further answer arrives, joined with `reported`."""
        twin = self.copy()
        twin.add_missed(reported)
        twin.write_off(twin.everyone)
        return twin.missed

    # --- timers ------------------------------------------------------------------------------

    def arm(self, timer: Timer, tag: int = 0) -> list[StartTimer]:
        """Return the effect that starts a timer, or no effect if the timer is running."""
        if timer in self.armed:
            return []
        self.armed |= {timer}
        return [StartTimer(timer, tag)]

    def arm_silence(self) -> list[StartTimer]:
        """Start the silence timer, one for all slots, unless it is running. It covers only requests
        that were sent before its start, so silence is noticed after one to two durations.
        """
        if Timer.ADD in self.armed or not self.window.is_waiting():
            return []
        self._tick += 1
        return self.arm(Timer.ADD, self._tick)

    def fired(self, event: TimerFired) -> bool:
        """Record that a timer fired. Returns False if this timer was not running."""
        is_armed = event.timer in self.armed
        self.armed -= {event.timer}
        return is_armed

    def silent(self, tag: int) -> Iterable[int]:
        """The slots with overdue answers when the silence timer with this tag fires."""
        return positions(self.window.silent(tag, self._since))

    def check(self) -> None:
        """Assert the invariants."""
        window, usable = self.window, self.everyone & ~self.down
        window.check()
        assert not self.down & ~self.everyone
        for pending in window.runs.values():
            assert not pending.waiting & self.down, "no run may wait for a slot that is down"
            is_asked = not pending.holders & usable & ~(pending.acked | pending.waiting)
            assert is_asked or pending.run.last <= window.last_confirmed, "a slot got no request"
