"""The parts of an explored world: machines, bookies, rows and messages, each a number.

Values are interned by their canonical key, so that the shipped code of `step` runs once for each
(machine state, event), and a search moves integers.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.messages import Effect, Event
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Codec
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.writer import LedgerWriter
from tests.model.explore.bookies import ModelBookie
from tests.model.explore.scope import Scope
from tests.model.sim.world import notify

LEDGER: Final = 7
WRITER: Final = 0

DELETION: Final = -1
"""In place of a message: the bookie dropped the ledger."""

AT_CLIENT, AT_STORE, AT_TIMER = -1, -2, -3
AT: Final = {"to-client": AT_CLIENT, "to-store": AT_STORE, "timer": AT_TIMER}


class Broken(Exception):
    """A rule does not hold after this step."""


@dataclass(frozen=True, slots=True)
class Message:
    """Something in flight: to a bookie, to the store or to a client."""

    kind: str
    client: int
    what: Any

    def __str__(self) -> str:
        who = "writer" if self.client == WRITER else f"recoverer-{self.client}"
        return f"{self.kind} {who}: {notify(self.what)}"


class Interned:
    """Numbers for values, by key; the first value of a key is kept."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, key: Hashable, value: Any) -> int:
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.values)
            self.values.append(value)
        return found


class LedgerParts:
    """The machines that ship, and the steps that they took."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.quorum = Quorum(*scope.shape)
        size = scope.shape[0]
        members = tuple(f"b{n}@1" for n in range(1, size + 1))
        self.spares = tuple(f"b{n}@1" for n in range(size + 1, size + 1 + scope.spares))
        self.metadata = LedgerMetadata(
            LEDGER, self.quorum, DigestKind.CRC32C, (Fragment(0, members),), ledger_key=b"k" * 32
        )
        self.names = tuple(member_name(m) for m in (*members, *self.spares))
        self.index_of = {
            f"{name}@{incarnation}": index
            for index, name in enumerate(self.names)
            for incarnation in range(1, scope.crashes + 2)
        }
        self.machines = Interned()
        self.bookies = Interned()
        self.rows = Interned()
        self.messages = Interned()
        self.ends_of: list[tuple[int, int]] = []
        """By message: its client, and the index of its bookie or AT_CLIENT, AT_STORE, AT_TIMER."""
        self.mine = [0] * (scope.recoverers + 1)
        """By client: the mask of its messages, but those to the store."""
        self.timers = 0
        """The mask of timers."""
        self.steps: dict[tuple[int, Event], tuple[int, tuple[Effect, ...]]] = {}
        self.answers: dict[tuple[int, int], tuple[int, Event]] = {}
        self.losses: dict[int, int] = {}
        self.deletions: dict[int, int] = {}
        self.made_by: dict[int, tuple[int, Event]] = {}
        """How a machine's state came to be: from which one, by what event."""
        self.bookie_made_by: dict[int, tuple[int, int | None]] = {}
        """The same of a bookie's: by which message, by DELETION, or by a loss."""
        self.writer = self._machine(LedgerWriter(self.metadata, Codec(DigestKind.CRC32C)))
        self.idle = self._machine(Recovery(read_entries=scope.entries + 1))
        self.fresh = tuple(
            self.bookies.number(bookie.key(), bookie) for bookie in map(ModelBookie.new, self.names)
        )

    def _machine(self, machine: Any) -> int:
        return self.machines.number((type(machine).__name__, machine.key()), machine)

    def row(self, row: LedgerMetadata) -> int:
        return self.rows.number(row, row)

    def message(self, kind: str, client: int, what: Any) -> int:
        message = Message(kind, client, what)
        number = self.messages.number(message, message)
        if number == len(self.ends_of):
            index = AT[kind] if kind in AT else self.index_of[what.member]
            self.ends_of.append((client, index))
            if index != AT_STORE:
                self.mine[client] |= 1 << number
            if index == AT_TIMER:
                self.timers |= 1 << number
        return number

    def step(self, machine: int, event: Event) -> tuple[int, tuple[Effect, ...]]:
        """The real step, once for each machine state and event."""
        known = self.steps.get((machine, event))
        if known is None:
            copy = self.machines.values[machine].copy()
            try:
                effects = tuple(copy.step(event))
                copy.check()
            except AssertionError as broken:
                raise Broken(f"check: {broken}") from broken
            count = len(self.machines.values)
            after = self._machine(copy)
            if after == count:
                self.made_by[after] = machine, event
            known = self.steps[machine, event] = after, effects
        return known

    def answer(self, bookie: int, number: int) -> tuple[int, Event]:
        """The real verdict of a bookie, once for each of its states and requests."""
        known = self.answers.get((bookie, number))
        if known is None:
            copy: ModelBookie = self.bookies.values[bookie].copy()
            event = copy.answer(self.messages.values[number].what)
            count = len(self.bookies.values)
            after = self.bookies.number(copy.key(), copy)
            if after == count:
                self.bookie_made_by[after] = bookie, number
            known = self.answers[bookie, number] = after, event
        return known

    def lost(self, bookie: int) -> int:
        """The bookie with a new disk."""
        known = self.losses.get(bookie)
        if known is None:
            copy: ModelBookie = self.bookies.values[bookie].copy()
            copy.lose_all()
            count = len(self.bookies.values)
            known = self.losses[bookie] = self.bookies.number(copy.key(), copy)
            if known == count:
                self.bookie_made_by[known] = bookie, None
        return known

    def holds(self, bookie: int) -> bool:
        """Whether the bookie knows the ledger, so that a collector may drop it."""
        replica = self.bookies.values[bookie].replica
        return replica.ledger_key is not None and not replica.is_deleted

    def deleted(self, bookie: int) -> int:
        """The bookie after it dropped the ledger, which has a tombstone."""
        known = self.deletions.get(bookie)
        if known is None:
            copy: ModelBookie = self.bookies.values[bookie].copy()
            copy.delete()
            count = len(self.bookies.values)
            known = self.deletions[bookie] = self.bookies.number(copy.key(), copy)
            if known == count:
                self.bookie_made_by[known] = bookie, DELETION
        return known
