"""Breadth-first search over everything that can happen in a small world of the real machines.

A state is a tuple of numbers: every machine, bookie, row and message is interned by its canonical
key, so that the shipped code of `step` runs once for each (machine state, event) and the search
itself moves integers. Loss needs no choice: a message may stay in flight for ever.

Rules are judged at each transition (I1, I2, I4, I14, I16, I22; the machines' own `check` besides).
What is bounded (entries, recoverers, crashes, timeouts) is said by the scope.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.messages import (
    AppendRequested,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    Effect,
    EntriesRead,
    Event,
    Failed,
    FindBookies,
    MetadataAnswered,
    ReadMetadata,
    RecoverLedger,
    RecoverRequested,
    Repaired,
    SendAdd,
    SendFence,
    SendRead,
    StartTimer,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Codec
from quorumlog.protocol.recovery import Recovery
from quorumlog.protocol.writer import Writer
from tests.explore.bookies import Bookie
from tests.sim.world import describe, tell, unknown

LEDGER: Final = 7
WRITER: Final = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """What may happen in a search, and how often."""

    name: str
    shape: tuple[int, int, int] = (3, 3, 2)
    entries: int = 1
    window: int = 1
    """How many entries may be pending at once."""
    recoverers: int = 1
    spares: int = 0
    timeouts: int = 0
    """How many requests may be answered UNKNOWN while they are still under way."""
    timers: int = 0
    """How many timers may fire."""
    crashes: int = 0
    """How many bookies may lose all that they have."""
    closes: bool = False
    states_max: int = 3_000_000


class Global(NamedTuple):
    """A state of the world, all parts by their interned number."""

    clients: tuple[int, ...]
    bookies: tuple[int, ...]
    row: int
    flight: frozenset[int]
    acked: int
    appended: int
    started: int
    """How many recoverers have started."""
    timeouts: int
    timers: int
    crashes: int
    is_closing: bool
    end: int | None


@dataclass(frozen=True, slots=True)
class Message:
    """Something in flight: to a bookie, to the store or to a client."""

    kind: str
    client: int
    what: Any

    def __str__(self) -> str:
        who = "writer" if self.client == WRITER else f"recoverer-{self.client}"
        return f"{self.kind} {who}: {tell(self.what)}"


class Broken(Exception):
    """A rule does not hold after this step."""


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


@dataclass(slots=True)
class Result:
    """How a search ended. `story` leads to the violation."""

    scope: Scope
    states: int
    transitions: int
    depth: int
    is_complete: bool
    violation: str | None = None
    story: tuple[str, ...] = ()


class Explorer:
    """One scope's search."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.quorum = Quorum(*scope.shape)
        self.codec = Codec(DigestKind.CRC32C)
        size = scope.shape[0]
        members = tuple(f"b{n}@1" for n in range(1, size + 1))
        self.spares = tuple(f"b{n}@1" for n in range(size + 1, size + 1 + scope.spares))
        self.metadata = LedgerMetadata(
            LEDGER, self.quorum, DigestKind.CRC32C, (Fragment(0, members),), ledger_key=b"k" * 32
        )
        self.names = tuple(member_name(m) for m in (*members, *self.spares))
        self.machines = Interned()
        self.bookies = Interned()
        self.rows = Interned()
        self.messages = Interned()
        self.steps: dict[tuple[int, Any], tuple[int, tuple[Effect, ...]]] = {}
        self.answers: dict[tuple[int, int], tuple[int, Event | None]] = {}

    # --- parts -----------------------------------------------------------------------------------

    def _machine(self, machine: Any) -> int:
        return self.machines.number((type(machine).__name__, machine.key()), machine)

    def _message(self, kind: str, client: int, what: Any) -> int:
        message = Message(kind, client, what)
        return self.messages.number(message, message)

    def _row(self, row: LedgerMetadata) -> int:
        return self.rows.number(row, row)

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
            known = self.steps[machine, event] = self._machine(copy), effects
        return known

    def start(self) -> Global:
        """Nothing has happened yet."""
        writer = self._machine(Writer(self.metadata, self.codec))
        idle = self._machine(Recovery(read_entries=self.scope.entries + 1))
        bookies = tuple(
            self.bookies.number(bookie.key(), bookie) for bookie in map(Bookie.new, self.names)
        )
        return Global(
            clients=(writer, *[idle] * self.scope.recoverers),
            bookies=bookies,
            row=self._row(self.metadata),
            flight=frozenset(),
            acked=-1,
            appended=0,
            started=0,
            timeouts=0,
            timers=0,
            crashes=0,
            is_closing=False,
            end=None,
        )

    # --- transitions -------------------------------------------------------------------------------

    def next(self, state: Global) -> Iterator[tuple[str | int, Any]]:
        """(label, state or Broken) of all that can happen now. A message is its own label."""
        scope = self.scope
        if (
            state.appended < scope.entries
            and not state.is_closing
            and state.appended - 1 - state.acked < scope.window
        ):
            event = AppendRequested((b"p%d" % state.appended,))
            after = state._replace(appended=state.appended + 1)
            yield "append", self._try(after, WRITER, event)
        if scope.closes and not state.is_closing:
            yield "close", self._try(state._replace(is_closing=True), WRITER, CloseRequested())
        if state.started < scope.recoverers:
            row = self.rows.values[state.row]
            if row.state is not State.CLOSED:
                after = state._replace(started=state.started + 1)
                yield "recover", self._try(after, state.started + 1, RecoverRequested(row))
        if state.crashes < scope.crashes:
            for index in range(len(state.bookies)):
                yield f"{self.names[index]} loses all", self._lose(state, index)
        for number in state.flight:
            message: Message = self.messages.values[number]
            rest = state.flight - {number}
            match message.kind:
                case "to-bookie":
                    yield number, self._at_bookie(state._replace(flight=rest), number, message)
                    if state.timeouts < scope.timeouts:
                        late = state._replace(timeouts=state.timeouts + 1)
                        late_answer = self._try(late, message.client, unknown(message.what))
                        yield f"timeout {message}", late_answer
                case "to-store":
                    yield number, self._at_store(state._replace(flight=rest), message)
                case "timer":
                    if state.timers < scope.timers:
                        fired = state._replace(flight=rest, timers=state.timers + 1)
                        yield number, self._try(fired, message.client, message.what)
                case _:
                    yield (
                        number,
                        self._try(state._replace(flight=rest), message.client, message.what),
                    )

    def _try(self, state: Global, client: int, event: Event) -> Any:
        try:
            return self._deliver(state, client, event)
        except Broken as broken:
            return broken

    def _deliver(self, state: Global, client: int, event: Event) -> Global:
        machine, effects = self.step(state.clients[client], event)
        if machine == state.clients[client] and not effects:
            return state
        flight = set(state.flight)
        acked = state.acked
        for effect in effects:
            match effect:
                case SendAdd() | SendFence() | SendRead():
                    flight.add(self._message("to-bookie", client, effect))
                case UpdateMetadata() | ReadMetadata():
                    flight.add(self._message("to-store", client, effect))
                case FindBookies(attempt, _, exclude):
                    found = tuple(m for m in self.spares if m not in exclude)
                    flight.add(self._message("to-client", client, BookiesFound(attempt, found)))
                case StartTimer(timer, tag):
                    if self.scope.timers and timer is not Timer.HEDGE:
                        flight.add(self._message("timer", client, TimerFired(timer, tag)))
                case Confirmed(first, last):
                    if first != acked + 1:
                        raise Broken(f"I8: {first}..{last} confirmed after {acked}")
                    acked = last
                case Failed() | Closed() | Repaired() | RecoverLedger() | EntriesRead():
                    pass
        clients = (*state.clients[:client], machine, *state.clients[client + 1 :])
        after = state._replace(clients=clients, flight=frozenset(flight), acked=acked)
        if acked != state.acked:
            self._judge_acked(after)
        return after

    def _at_bookie(self, state: Global, number: int, message: Message) -> Any:
        index = self.names.index(member_name(message.what.member))
        known = self.answers.get((state.bookies[index], number))
        if known is None:
            bookie: Bookie = self.bookies.values[state.bookies[index]].copy()
            answer = bookie.answer(message.what)
            known = self.bookies.number(bookie.key(), bookie), answer
            self.answers[state.bookies[index], number] = known
        after, event = known
        bookies = (*state.bookies[:index], after, *state.bookies[index + 1 :])
        flight = state.flight
        if event is not None:
            flight |= {self._message("to-client", message.client, event)}
        return state._replace(bookies=bookies, flight=flight)

    def _at_store(self, state: Global, message: Message) -> Any:
        row: LedgerMetadata = self.rows.values[state.row]
        effect = message.what
        if isinstance(effect, ReadMetadata):
            event = MetadataAnswered(effect.attempt, CasStatus.OK, row)
        elif effect.metadata.version != row.version:
            event = MetadataAnswered(effect.attempt, CasStatus.CONFLICT, row)
        else:
            new = replace(effect.metadata, version=row.version + 1)
            event = MetadataAnswered(effect.attempt, CasStatus.OK, new)
            state = state._replace(row=self._row(new), end=new.last_entry)
            try:
                self._judge_row(state, row, new)
            except Broken as broken:
                return broken
        answer = self._message("to-client", message.client, event)
        return state._replace(flight=state.flight | {answer})

    def _lose(self, state: Global, index: int) -> Global:
        bookie: Bookie = self.bookies.values[state.bookies[index]].copy()
        bookie.lose_all()
        number = self.bookies.number(bookie.key(), bookie)
        bookies = (*state.bookies[:index], number, *state.bookies[index + 1 :])
        return state._replace(bookies=bookies, crashes=state.crashes + 1)

    # --- rules -------------------------------------------------------------------------------------

    def _judge_acked(self, state: Global) -> None:
        if state.end is not None and state.acked > state.end:
            raise Broken(f"I1: {state.acked} is acknowledged, the ledger ended at {state.end}")
        self._judge_copies(state, self.rows.values[state.row])

    def _judge_copies(self, state: Global, row: LedgerMetadata) -> None:
        for entry_id in range(state.acked + 1):
            holders = 0
            for _, member in row.members_of(entry_id):
                bookie: Bookie = self.bookies.values[
                    state.bookies[self.names.index(member_name(member))]
                ]
                holders += bookie.ever_held(entry_id)
            if holders < self.quorum.ack_quorum:
                raise Broken(f"I2: entry {entry_id} is acknowledged, {holders} members hold it")

    def _judge_row(self, state: Global, before: LedgerMetadata, after: LedgerMetadata) -> None:
        try:
            after.check()
        except AssertionError as broken:
            raise Broken(f"{broken}") from broken
        order = (State.OPEN, State.IN_RECOVERY, State.CLOSED)
        if order.index(after.state) < order.index(before.state):
            raise Broken(f"I21: {before.state} became {after.state}")
        if before.state is State.CLOSED and (before.last_entry, before.length) != (
            after.last_entry,
            after.length,
        ):
            raise Broken(f"I4: the end moved from {before.last_entry} to {after.last_entry}")
        firsts = [f.first_entry for f in before.fragments]
        kept = [f.first_entry for f in after.fragments][: len(firsts)]
        if after.state is not State.CLOSED and kept != firsts:
            raise Broken(f"I22: {describe(before)} became {describe(after)}")
        if after.last_entry is not None:
            if state.acked > after.last_entry:
                raise Broken(f"I1: {state.acked} is acknowledged, closed at {after.last_entry}")
            if after.last_entry >= state.appended:
                raise Broken(f"I9: closed at {after.last_entry}, {state.appended} appended")
        self._judge_copies(state, after)

    # --- search ------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Search to the end of the scope, or to the first violation."""
        first = self.start()
        # Only hashes are kept: at 3 million states two of them meet with a chance of 3e-7.
        seen: dict[int, tuple[int, str | int] | None] = {hash(first): None}
        frontier = [first]
        transitions = depth = 0
        while frontier:
            depth += 1
            coming = []
            for state in frontier:
                came = hash(state)
                for label, after in self.next(state):
                    transitions += 1
                    if isinstance(after, Broken):
                        story = self._story(seen, came, label, str(after))
                        return Result(
                            self.scope, len(seen), transitions, depth, False, str(after), story
                        )
                    number = hash(after)
                    if number not in seen:
                        seen[number] = (came, label)
                        coming.append(after)
            frontier = coming
            if len(seen) > self.scope.states_max:
                return Result(self.scope, len(seen), transitions, depth, False)
        return Result(self.scope, len(seen), transitions, depth, True)

    def _story(
        self,
        seen: dict[int, tuple[int, str | int] | None],
        state: int,
        label: str | int,
        end: str,
    ) -> tuple[str, ...]:
        steps: list[str | int] = [label]
        came = seen[state]
        while came is not None:
            state, label = came
            steps.append(label)
            came = seen[state]
        steps.reverse()
        lines = [s if isinstance(s, str) else str(self.messages.values[s]) for s in steps]
        return (*lines, end)
