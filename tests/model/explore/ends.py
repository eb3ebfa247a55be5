"""Breadth-first search over the copies of one row, and over one question for the LAC (`protocol/ends.py`).

A world is the machine that ships and what bookies have and answer. Bookies answer in any order; each answer may be one that
confirms, or one that does not; those who stay silent are bounded by the machine's deadline only.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from quorumlog.protocol import ends
from quorumlog.protocol.ends import End, LacByCoverage, RowSpread, Spreading
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from tests.model.explore.parts import LEDGER, Broken
from tests.model.explore.scope import EndScope
from tests.model.explore.search import FOREVER, Result, Space, search

Transition = tuple[str, Callable[[], tuple[str, Any]]]
"""What happens, and what comes of it. Raises: Broken."""


class Copies(NamedTuple):
    """A row on its way to bookies."""

    machine: RowSpread
    asked: frozenset[str] = frozenset()
    """Who was sent a copy and has not answered."""
    keeping: frozenset[str] = frozenset()
    """Who has a copy, be it that the confirmation never came."""
    down: frozenset[str] = frozenset()
    """Who was known to be down when the copies were sent."""
    deadlines: int = 0
    """How many timers have fired."""
    sent: frozenset[str] = frozenset()
    """Who was sent a copy."""


class Confirming(NamedTuple):
    """A question for the LAC while a writer goes on."""

    machine: LacByCoverage
    held: tuple[frozenset[int], ...]
    """By entry: the positions that have it."""
    answered: frozenset[int] = frozenset()
    least: int = NO_ENTRY
    """What was confirmed to the writer's readers before the question began."""


class EndExplorer:
    """One scope's search."""

    def __init__(self, scope: EndScope) -> None:
        self.scope = scope
        size = scope.shape[0]
        self.members = tuple(f"b{number}@1" for number in range(size))
        self.earlier = tuple(f"e{number}@1" for number in range(scope.earlier))
        self.others = tuple(f"o{number}@1" for number in range(scope.others))
        self.quorum = Quorum(*scope.shape)
        fragments: tuple[Fragment, ...] = (Fragment(0, self.members),)
        if scope.earlier:
            first = (*self.earlier, *self.members)[:size]
            fragments = (Fragment(0, first), Fragment(1, self.members))
        row = LedgerMetadata(
            LEDGER, self.quorum, DigestKind.CRC32C, fragments, ledger_key=b"k" * 32
        )
        self.row = row if scope.is_open or scope.entries else row.closed(last_entry=1, length=2)

    def run(self, until_s: float = FOREVER) -> Result:
        """Search to the end."""
        if self.scope.entries:
            begun = Confirming(LacByCoverage(self.row), (frozenset(),) * self.scope.entries)
            space = Space(("not asked", begun), partial(_following, self.confirming), _number)
        else:
            begun_copies = Copies(RowSpread(self.row))
            space = Space(("not sent", begun_copies), partial(_following, self.copies), _number)
        return search(self.scope, space, until_s)

    # --- copies of a row -----------------------------------------------------------------------------

    def copies(self, phase: str, world: Copies) -> Iterator[Transition]:
        """What can happen next."""
        if phase == "not sent":
            for down in _subsets(self.members):
                yield f"begins, down: {sorted(down)}", partial(self._begun, world, down)
            return
        for member in world.asked:
            yield (
                f"{member} keeps it and answers",
                partial(self._reported, world, member, Status.OK),
            )
            if member not in world.keeping:
                kept = world._replace(keeping=world.keeping | {member})
                yield f"{member} keeps it", partial(self._judged, kept)
            yield f"{member} fails", partial(self._reported, world, member, Status.UNKNOWN)
        if world.deadlines < 1 + (world.machine.phase is Spreading.OTHERS):
            machine = world.machine.copy()
            machine.overdue()
            after = world._replace(machine=machine, deadlines=world.deadlines + 1)
            yield "the deadline", partial(self._judged, after)

    def _begun(self, world: Copies, down: frozenset[str]) -> tuple[str, Copies]:
        machine = world.machine.copy()
        asked = frozenset(machine.begin(down))
        if asked != frozenset(self.row.all_members):
            raise Broken("18b: a member is sent no copy")
        return self._judged(world._replace(machine=machine, asked=asked, down=down, sent=asked))

    def _reported(self, world: Copies, member: str, status: Status) -> tuple[str, Copies]:
        machine = world.machine.copy()
        machine.answered(member, status)
        keeping = world.keeping | {member} if status is Status.OK else world.keeping
        after = world._replace(machine=machine, asked=world.asked - {member}, keeping=keeping)
        return self._judged(after)

    def _judged(self, world: Copies) -> tuple[str, Copies]:
        """Others are asked at once where they are needed; then the rules."""
        if world.machine.phase is Spreading.PLACING:
            machine = world.machine.copy()
            asked = frozenset(machine.others(self.others))
            wanted = min(self.quorum.ack_quorum - machine.kept, len(self.others))
            if len(asked) < wanted:
                raise Broken(f"18b: {len(asked)} others are sent a copy, {wanted} could keep one")
            world = world._replace(
                machine=machine, asked=world.asked | asked, sent=world.sent | asked
            )
        machine = world.machine
        if machine.kept > len(world.keeping):
            raise Broken(f"18b: {machine.kept} copies are counted, {len(world.keeping)} are kept")
        if machine.phase is Spreading.OVER:
            self._judge_end(world)
        elif world.deadlines == 2 or not world.asked:
            raise Broken("L1: nobody is left who could answer, and it goes on")
        return "sent", world

    def _judge_end(self, world: Copies) -> None:
        """The copies are told as they are: a rebuild that hears all bookies but an ack quorum less one finds a kept end, and
        nobody gives up who could have more.
        """
        machine = world.machine
        end = ends.end_after(self.row, machine.kept, self.row)
        if end is End.KEPT and len(world.keeping) < self.quorum.ack_quorum:
            raise Broken(f"18b: an end with {len(world.keeping)} copies is told as kept")
        if end is not End.KEPT and machine.kept >= self.quorum.ack_quorum:
            raise Broken("18b: an end with enough copies is not told as kept")
        moved = replace(self.row, last_entry=0) if self.row.last_entry else self.row
        if moved != self.row and ends.end_after(self.row, machine.kept, moved) is not End.MOVED:
            raise Broken("18b: an end is told that the database no longer has")
        if world.deadlines:
            return
        lacking = [
            write_set
            for write_set in map(self.quorum.write_set, range(self.quorum.ensemble_size))
            if sum(self.members[position] in world.keeping for position in write_set)
            < self.quorum.ack_quorum
        ]
        silent = (world.asked & frozenset(self.members)) - world.down
        if lacking and silent and not frozenset(self.others) & world.sent:
            raise Broken(f"18b: given up while {sorted(silent)} could keep a copy")

    # --- the LAC ----------------------------------------------------------------------------------------

    def confirming(self, phase: str, world: Confirming) -> Iterator[Transition]:
        """What can happen next."""
        for entry_id, held in enumerate(world.held):
            if entry_id and not self._is_acked(world.held[entry_id - 1]):
                break  # it carries a LAC that is not yet confirmed: the writer has a window of one
            for position in self.quorum.write_set(entry_id):
                if position not in held:
                    stored = list(world.held)
                    stored[entry_id] = held | {position}
                    after = world._replace(held=tuple(stored))
                    yield f"{entry_id} reaches {position}", partial(_as_it_is, phase, after)
        if phase == "not asked":
            asked = world._replace(least=self._told_before(world))
            yield "is asked", partial(_as_it_is, "asked", asked)
            return
        for position in frozenset(range(self.quorum.ensemble_size)) - world.answered:
            lac = self._lac_at(world, position)
            has_any = any(position in held for held in world.held)
            known = Status.OK if has_any else Status.NO_ENTRY
            yield f"{position} tells {lac}", partial(self._heard, world, position, known, lac)
            silent = partial(self._heard, world, position, Status.UNKNOWN, NO_ENTRY)
            yield f"{position} tells nothing", silent

    def _is_acked(self, held: frozenset[int]) -> bool:
        return len(held) >= self.quorum.ack_quorum

    def _lac_at(self, world: Confirming, position: int) -> int:
        """Each entry carries the id of the one before it."""
        return max(
            (e - 1 for e, held in enumerate(world.held) if position in held), default=NO_ENTRY
        )

    def _told_before(self, world: Confirming) -> int:
        """The LAC that came with the last acknowledged entry: a reader may know it."""
        return max(
            (e - 1 for e, held in enumerate(world.held) if self._is_acked(held)), default=NO_ENTRY
        )

    def _heard(
        self, world: Confirming, position: int, status: Status, lac: int
    ) -> tuple[str, Confirming]:
        machine = world.machine.copy()
        was_over = machine.is_over
        machine.answered(position, status, lac)
        after = world._replace(machine=machine, answered=world.answered | {position})
        if machine.is_over and not was_over:
            self._judge_lac(after)
        if len(after.answered) == self.quorum.ensemble_size and not machine.is_over:
            raise Broken("L1: all have answered, and it goes on")
        return "asked", after

    def _judge_lac(self, world: Confirming) -> None:
        found = world.machine.confirmed
        if found is None:
            return
        if found > NO_ENTRY and not self._is_acked(world.held[found]):
            raise Broken(f"5: {found} is told as confirmed, and no ack quorum has it")
        if found < world.least:
            raise Broken(f"13: {found} is told as confirmed after {world.least} was")


def _as_it_is(phase: str, world: Any) -> tuple[str, Any]:
    return phase, world


def _following(
    ask: Callable[[str, Any], Iterator[Transition]], state: tuple[str, Any]
) -> Iterator[tuple[str, Any]]:
    """As `Space.following` wants it: what is broken is a value."""
    for label, make in ask(*state):
        try:
            yield label, make()
        except Broken as broken:
            yield label, broken


def _number(state: tuple[str, Any]) -> int:
    phase, (machine, *rest) = state
    return hash((phase, machine.key(), *rest))


def _subsets(members: tuple[str, ...]) -> Iterator[frozenset[str]]:
    for mask in range(1 << len(members)):
        yield frozenset(member for n, member in enumerate(members) if mask >> n & 1)
