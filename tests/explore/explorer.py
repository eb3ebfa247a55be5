"""Breadth-first search over everything that can happen in a small world of the real machines.

A state is a tuple of numbers: every machine, bookie, row and message is interned by its canonical
key, so that the shipped code of `step` runs once for each (machine state, event) and the search
itself moves integers. Loss needs no choice: a message may stay in flight for ever.

Rules are judged at each transition (I1, I2, I4, I8, I21, I22; the machines' own `check` besides).
What is bounded (entries, recoverers, crashes, timeouts) is said by the scope.

A message that would change nothing is taken out of flight, since each one doubles the states. That
is a guess about the future, and is proven after the search: it must change nothing in any state
that follows (`_refuted`). A message for which that is wrong is kept, and the search runs again.
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
from quorumlog.protocol.recovery import Phase, Recovery
from quorumlog.protocol.writer import Writer, WriterState
from tests.explore.bookies import Bookie
from tests.sim.world import describe, tell, unknown

LEDGER: Final = 7
WRITER: Final = 0

OVER: Final = (WriterState.CLOSED, WriterState.ENDED)

AT_CLIENT, AT_STORE, AT_TIMER = -1, -2, -3
AT: Final = {"to-client": AT_CLIENT, "to-store": AT_STORE, "timer": AT_TIMER}


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
        self.index_of = {
            f"{name}@{incarnation}": index
            for index, name in enumerate(self.names)
            for incarnation in (1, 2, 3)
        }
        self.machines = Interned()
        self.bookies = Interned()
        self.rows = Interned()
        self.messages = Interned()
        self.steps: dict[tuple[int, Any], tuple[int, tuple[Effect, ...]]] = {}
        self.answers: dict[tuple[int, int], tuple[int, Event]] = {}
        self.losses: dict[int, int] = {}
        self.kept: set[int] = set()
        """Messages that are never taken out of flight: to do so was wrong."""
        self.verdicts: dict[tuple[int, int, int], bool] = {}
        """Whether (message, state of its client, of its bookie or -1) is taken out of flight."""
        self.ends_of: list[tuple[int, int]] = []
        """By message: its client, and the index of its bookie or AT_CLIENT, AT_STORE, AT_TIMER."""

    # --- parts -----------------------------------------------------------------------------------

    def _machine(self, machine: Any) -> int:
        return self.machines.number((type(machine).__name__, machine.key()), machine)

    def _message(self, kind: str, client: int, what: Any) -> int:
        message = Message(kind, client, what)
        number = self.messages.number(message, message)
        if number == len(self.ends_of):
            index = AT[kind] if kind in AT else self.index_of[what.member]
            self.ends_of.append((client, index))
        return number

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
        if self._is_over(state):
            return
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

    def _is_over(self, state: Global) -> bool:
        """Closed, and nobody is left who could acknowledge or close: no rule can break any more."""
        if state.end is None or any(self.ends_of[n][1] == AT_STORE for n in state.flight):
            return False
        writer, *recoverers = (self.machines.values[number] for number in state.clients)
        return writer.state in OVER and all(
            recoverer.phase in (Phase.IDLE, Phase.DONE) for recoverer in recoverers
        )

    def _try(self, state: Global, client: int, event: Event) -> Any:
        try:
            return self._deliver(state, client, event)
        except Broken as broken:
            return broken

    def _deliver(self, state: Global, client: int, event: Event) -> Global:
        machine, effects = self.step(state.clients[client], event)
        if machine == state.clients[client] and not effects:
            return state._replace(flight=self._alive(state, client=client))
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
        after = after._replace(flight=self._alive(after, client=client))
        if acked != state.acked:
            self._judge_acked(after)
        return after

    def _at_bookie(self, state: Global, number: int, message: Message) -> Any:
        index = self.index_of[message.what.member]
        after, event = self._answer(state.bookies[index], number)
        answer = self._message("to-client", message.client, event)
        new = state._replace(
            bookies=(*state.bookies[:index], after, *state.bookies[index + 1 :]),
            flight=state.flight | {answer},
        )
        return new._replace(flight=self._alive(new, client=message.client, bookie=index))

    def _answer(self, bookie: int, number: int) -> tuple[int, Event]:
        """The real judgement of a bookie, once for each of its states and request."""
        known = self.answers.get((bookie, number))
        if known is None:
            copy: Bookie = self.bookies.values[bookie].copy()
            event = copy.answer(self.messages.values[number].what)
            known = self.answers[bookie, number] = self.bookies.number(copy.key(), copy), event
        return known

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
        number = self._lost(state.bookies[index])
        bookies = (*state.bookies[:index], number, *state.bookies[index + 1 :])
        return state._replace(bookies=bookies, crashes=state.crashes + 1)

    def _lost(self, bookie: int) -> int:
        known = self.losses.get(bookie)
        if known is None:
            copy: Bookie = self.bookies.values[bookie].copy()
            copy.lose_all()
            known = self.losses[bookie] = self.bookies.number(copy.key(), copy)
        return known

    # --- messages that change nothing --------------------------------------------------------------

    def _alive(self, state: Global, *, client: int, bookie: int = -1) -> frozenset[int]:
        """What is in flight, without messages that change nothing now: those of a client or a
        bookie whose state has just changed.
        """
        dead = []
        are_timers_over = state.timers >= self.scope.timers
        for number in state.flight:
            owner, index = self.ends_of[number]
            if owner != client and (index != bookie or bookie < 0):
                continue
            if index == AT_TIMER and are_timers_over:
                dead.append(number)
                continue
            place = number, state.clients[owner], state.bookies[index] if index >= 0 else -1
            is_dead = self.verdicts.get(place)
            if is_dead is None:
                is_dead = index != AT_STORE and number not in self.kept and self._is_dead(*place)
                self.verdicts[place] = is_dead
            if is_dead:
                dead.append(number)
        return state.flight.difference(dead) if dead else state.flight

    def _is_dead(self, number: int, machine: int, bookie: int) -> bool:
        message: Message = self.messages.values[number]
        if bookie < 0:
            return self._is_ignored(machine, message.what)
        after, event = self._answer(bookie, number)
        return (
            after == bookie
            and self._is_ignored(machine, event)
            and (not self.scope.timeouts or self._is_ignored(machine, unknown(message.what)))
        )

    def _is_ignored(self, machine: int, event: Event) -> bool:
        try:
            after, effects = self.step(machine, event)
        except Broken:
            return False
        return after == machine and not effects

    def _refuted(self) -> set[int]:
        """Messages that were taken out of flight and would have changed something later."""
        machines: dict[int, set[int]] = {}
        for (machine, _), (after, _) in self.steps.items():
            machines.setdefault(machine, set()).add(after)
        bookies: dict[int, set[int]] = {}
        for (bookie, _), (after, _) in self.answers.items():
            bookies.setdefault(bookie, set()).add(after)
        if self.scope.crashes:
            for bookie, after in self.losses.items():
                bookies.setdefault(bookie, set()).add(after)
        wrong = set()
        dead_at: dict[int, set[tuple[int, int]]] = {}
        for (number, machine, bookie), is_dead in self.verdicts.items():
            if is_dead:
                dead_at.setdefault(number, set()).add((machine, bookie))
        for number, places in dead_at.items():
            later = _closure({machine for machine, _ in places}, machines)
            at = _closure({bookie for _, bookie in places}, bookies)
            if not all(self._is_dead(number, m, b) for m in sorted(later) for b in sorted(at)):
                wrong.add(number)
        return wrong

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
        while True:
            result = self._search()
            if result.violation is not None:
                return result  # a story is a story, whatever else could have happened
            wrong = self._refuted()
            if not wrong:
                return result
            self.kept |= wrong
            self.verdicts.clear()

    def _search(self) -> Result:
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


def _closure(start: set[int], edges: dict[int, set[int]]) -> set[int]:
    """All that can be reached."""
    found, todo = set(start), sorted(start)
    while todo:
        for after in edges.get(todo.pop(), ()):
            if after not in found:
                found.add(after)
                todo.append(after)
    return found
