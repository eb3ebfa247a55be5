"""The slots of an ensemble that runs are written to: who is sent what, who failed, who missed what.

The writer and a recovery write alike: each run to all holders, confirmed at Qa, one silence timer for all
that is asked. They differ in what a failure means: a writer seeks another member at once, and metadata
names that member before it is written to (rule 7); a recovery goes on at Qa, and changes its ensemble in
memory (rule 12).
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
"""Ranges kept a member (taste). Beyond it they become one: repair looks before it copies."""


def merged(ranges: Iterable[MissedRange], stride: int = 1) -> tuple[MissedRange, ...]:
    """The same entries in ranges that lie apart, by member and first entry.

    `stride` is the greatest step between two entries that one member stores (1 + E - Qw): what
    lies closer together is one range.
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
    """A slot is a position of the ensemble and the member that has it now.

    Invariants (checked by `check`, with those of Window):
      - nobody waits for a slot that is down;
      - every other slot was asked for every unconfirmed run that it holds some of.
    """

    is_recovery: bool = False
    """What is sent are recovery adds, which pass fence and limbo."""
    window: Window = field(
        default_factory=lambda: Window(Quorum(1, 1, 1), last_confirmed=NO_ENTRY, length=0)
    )
    members: tuple[str, ...] = ()
    down: int = 0
    """Slots that failed: nothing is sent to them."""
    suspects: frozenset[str] = frozenset()
    """Members that failed lately: they are not asked for a slot again (L6)."""
    missed: tuple[MissedRange, ...] = ()
    """What members lack of what is confirmed, until a change of the row tells it (rule 8)."""
    armed: frozenset[Timer] = frozenset()
    """Timers that have not fired: there is one of each kind."""
    row: LedgerMetadata | None = None
    """The row that names these members, which each of them keeps a copy of before it acknowledges an entry
    (rule 18b). None in a recovery: metadata names its members with the close only (rule 12)."""
    _ledger_key: bytes = b""
    _generation: int = -1
    _generations: tuple[int, ...] = ()
    """In which generation each slot's member came: older answers do not count (rule 7)."""
    _since: tuple[int, ...] = ()
    """The tick from which on each slot's silence counts."""
    _tick: int = 0

    def begin(
        self, row: LedgerMetadata, *, last_confirmed: int, length: int = 0, down: int = 0
    ) -> None:
        """Write to the last fragment's members. Answers to what was sent before do not count."""
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
        """All slots."""
        return (1 << len(self.members)) - 1

    # --- sending -----------------------------------------------------------------------------

    def push(self, run: Run) -> list[SendAdd]:
        """Send a run that follows on."""
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
        """Rule 7, I18, X7: an answer of a replaced member, or of an earlier stay, does not count. Nor does a writer
        count an answer from before a change for what is not confirmed: the member keeps the row of before (rule 18b).
        """
        came = self._generations[event.position]
        if event.member != self.members[event.position] or event.generation < came:
            return False
        is_of_row = self.is_recovery or event.generation == self._generation
        return is_of_row or event.first <= self.window.last_confirmed

    def settle(self, event: AddAnswered) -> None:
        """A request came to an end, well or not."""
        pending = self.window.find(event.first)
        if pending is None:
            return
        if event.status is Status.OK:
            self.window.ack(pending, event.position)
        else:
            self.window.answered(pending, event.position)

    def fail(self, position: int) -> bool:
        """Use a slot no more; False where that was so before."""
        if self.down & 1 << position:
            return False
        self.down |= 1 << position
        self.suspects |= {self.members[position]}
        self.window.give_up(1 << position)
        self.window.sweep()
        return True

    def revive(self, position: int) -> list[SendAdd]:
        """Use a slot again whose member never left; what the member was not asked for is sent."""
        self.down &= ~(1 << position)
        return self._ask(1 << position, first=0, is_anew=False)

    # --- other members -----------------------------------------------------------------------

    def find(self, attempt: int, *, leaving: int = 0, lost: tuple[str, ...] = ()) -> FindBookies:
        """Ask for members: not for those in use, nor for suspects or `lost` ones. Members in slots
        that are `leaving` do not stay: their own next incarnation may take the place.
        """
        used = {p: m for p, m in enumerate(self.members) if not self.down & 1 << p}
        staying = tuple(member for position, member in used.items() if not leaving & 1 << position)
        exclude = dict.fromkeys((*used.values(), *sorted(self.suspects), *lost))
        return FindBookies(attempt, staying, tuple(exclude))

    def members_with(self, chosen: dict[int, str]) -> tuple[str, ...]:
        """The members once those chosen, by position, have their slots."""
        return tuple(chosen.get(position, member) for position, member in enumerate(self.members))

    def replace(self, mask: int, members: tuple[str, ...], *, first: int) -> list[SendAdd]:
        """Other members have the slots of a mask from entry `first` on, and know nothing yet.

        A writer asks the members that stay again too: what is not confirmed counts only with a copy of the new row
        (rule 18b). A recovery's members keep no copy.
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

    # --- what members lack (rule 8) ------------------------------------------------------------

    def write_off(self, mask: int) -> None:
        """Note what slots lack of what is confirmed."""
        self.window.write_off(mask)
        self.take_missed()

    def take_missed(self) -> None:
        """Note what the window let go of before all had it."""
        missed, self.window.missed = self.window.missed, []
        self.add_missed(MissedRange(self.members[at], first, last) for at, first, last in missed)

    def add_missed(self, missed: Iterable[MissedRange]) -> None:
        """Note what members lack."""
        quorum = self.window.quorum
        stride = quorum.ensemble_size - quorum.write_quorum + 1
        self.missed = merged((*self.missed, *missed), stride)

    def lacking(self, told: Iterable[MissedRange]) -> tuple[MissedRange, ...]:
        """What members would lack if no answer was awaited any more, with what a change of the row tells."""
        twin = self.copy()
        twin.add_missed(told)
        twin.write_off(twin.everyone)
        return twin.missed

    # --- timers ------------------------------------------------------------------------------

    def arm(self, timer: Timer, tag: int = 0) -> list[StartTimer]:
        """Start a timer, unless one of its kind runs."""
        if timer in self.armed:
            return []
        self.armed |= {timer}
        return [StartTimer(timer, tag)]

    def arm_silence(self) -> list[StartTimer]:
        """One timer for all slots, not one a run: what it covers is as old as the timer, so that
        silence is noticed after between one and two of its times.
        """
        if Timer.ADD in self.armed or not self.window.is_waiting():
            return []
        self._tick += 1
        return self.arm(Timer.ADD, self._tick)

    def fired(self, event: TimerFired) -> bool:
        """Whether a timer that fires was armed; it no longer is."""
        is_armed = event.timer in self.armed
        self.armed -= {event.timer}
        return is_armed

    def silent(self, tag: int) -> Iterable[int]:
        """The slots that a silence timer found silent."""
        return positions(self.window.silent(tag, self._since))

    def check(self) -> None:
        """Assert the invariants."""
        window, usable = self.window, self.everyone & ~self.down
        window.check()
        assert not self.down & ~self.everyone
        for pending in window.runs.values():
            assert not pending.waiting & self.down, "nobody waits for a slot that is down"
            is_asked = not pending.holders & usable & ~(pending.acked | pending.waiting)
            assert is_asked or pending.run.last <= window.last_confirmed, "every slot was asked"
