"""Breadth-first search over everything that can happen in a small world of the real machines.

A state is a tuple of numbers (tests/model/explore/parts.py) and a mask of what is in flight, under its
least naming (tests/model/explore/symmetry.py). Loss needs no choice: a message may stay in flight for
ever. Rules are judged at each transition (tests/model/explore/judge.py, and the machines' own `check`).
The scope bounds entries, recoverers, crashes and timeouts.

A message that would change nothing is taken out of flight, since each one doubles the states. That
is a guess about the future, and is proven after the search: it must change nothing in any state
that follows (`_refuted`). A message for which that is wrong is kept, and the search runs again.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from quorumlog.protocol.messages import (
    AppendRequested,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    EntriesRead,
    Event,
    Failed,
    FindBookies,
    MetadataAnswered,
    ReadMetadata,
    RecoverRequested,
    RecoveryNeeded,
    Repaired,
    SendAdd,
    SendFence,
    SendRead,
    SendRow,
    StartTimer,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.recovery import Phase
from quorumlog.protocol.writer import WriterState
from tests.model.explore.judge import Judge, broken_if
from tests.model.explore.parts import AT_STORE, AT_TIMER, WRITER, Broken, LedgerParts, Message
from tests.model.explore.scope import Scope
from tests.model.explore.search import FOREVER, Result, Space, search
from tests.model.explore.symmetry import Symmetry
from tests.model.sim.world import unknown
from tests.support import invariants

OVER: Final = (WriterState.CLOSED, WriterState.ENDED)

_MASK_BYTES: Final = 128
"""Room for 1024 messages."""


class Counts(NamedTuple):
    """What is counted in a world."""

    acked: int = -1
    appended: int = 0
    started: int = 0
    """How many recoverers have started."""
    timeouts: int = 0
    timers: int = 0
    crashes: int = 0
    is_closing: bool = False
    is_deleted: bool = False
    end: int | None = None


World = tuple[tuple[int, ...], tuple[int, ...], int, int, Counts]
"""Clients, bookies, row, flight and counts."""

Label = str | int
"""What happened: a message is its own label."""


class Explorer:
    """One scope's search."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._begin(is_symmetric=not scope.is_striped)

    def _begin(self, *, is_symmetric: bool) -> None:
        self.parts = parts = LedgerParts(self.scope)
        self.symmetry = Symmetry(parts, is_trivial=not is_symmetric)
        self.judge = Judge(parts)
        self.kept: set[int] = set()
        """Messages that stay in flight: to take them out was refuted."""
        self.counts: dict[Counts, Counts] = {}
        self._forget()

    def _forget(self) -> None:
        """Verdicts on messages depend on what is kept."""
        self.dead: dict[tuple[int, int, tuple[int, ...]], tuple[int, int]] = {}
        """By client, its state and the bookies: messages looked at, and those that change nothing."""
        self.verdicts: dict[tuple[int, int, int], bool] = {}
        """Whether (message, state of its client, of its bookie or -1) is taken out of flight."""
        self.moves: dict[tuple[int, int], tuple[int, int, int] | Broken] = {}
        """By client's state and message: its next state, what it sends, what it confirms."""
        self.idle_at: dict[int, bool] = {}

    def start(self) -> World:
        """Nothing has happened yet."""
        parts = self.parts
        clients = (parts.writer, *[parts.idle] * self.scope.recoverers)
        return self._least(clients, parts.fresh, parts.row(parts.metadata), 0, Counts())

    # --- transitions -------------------------------------------------------------------------------

    def next(self, state: World) -> Iterator[tuple[Label, Any]]:
        """(label, state or Broken) of all that can happen now, under the names of `state`."""
        clients, bookies, row, flight, counts = state
        scope, parts = self.scope, self.parts
        if self._is_over(state):
            return
        if (
            counts.appended < scope.entries
            and not counts.is_closing
            and counts.appended - 1 - counts.acked < scope.window
        ):
            append = AppendRequested((b"p%d" % counts.appended,))
            yield (
                "append",
                self._asked(state, WRITER, append, counts._replace(appended=counts.appended + 1)),
            )
        if scope.closes and not counts.is_closing:
            closing = counts._replace(is_closing=True)
            yield "close", self._asked(state, WRITER, CloseRequested(), closing)
        if counts.started < scope.recoverers and parts.rows.values[row].state is not State.CLOSED:
            recover = RecoverRequested(parts.rows.values[row])
            started = counts._replace(started=counts.started + 1)
            client = clients.index(parts.idle)
            yield f"recoverer-{client} begins", self._asked(state, client, recover, started)
        if counts.crashes < scope.crashes:
            crashed = counts._replace(crashes=counts.crashes + 1)
            for index, bookie in enumerate(bookies):
                after = (*bookies[:index], parts.lost(bookie), *bookies[index + 1 :])
                yield (
                    f"{parts.names[index]} loses all",
                    self._alive(clients, after, row, flight, crashed),
                )
        if scope.deletes and counts.end is not None:
            yield from self._deletions(state)
        ends_of = parts.ends_of
        rest = flight
        while rest:
            low = rest & -rest
            rest ^= low
            number = low.bit_length() - 1
            client, index = ends_of[number]
            if index >= 0:
                after_bookie, event = parts.answer(bookies[index], number)
                answered = 1 << parts.message("to-client", client, event)
                after = (*bookies[:index], after_bookie, *bookies[index + 1 :])
                yield number, self._alive(clients, after, row, flight ^ low | answered, counts)
                if counts.timeouts < scope.timeouts:
                    message: Message = parts.messages.values[number]
                    late = counts._replace(timeouts=counts.timeouts + 1)
                    event = unknown(message.what)
                    yield f"timeout {message}", self._asked(state, client, event, late)
            elif index == AT_STORE:
                yield number, self._at_store(state, number)
            elif index == AT_TIMER:
                if counts.timers < scope.timers:
                    fired = counts._replace(timers=counts.timers + 1)
                    yield number, self._reported(state, client, number, fired)
            else:
                yield number, self._reported(state, client, number, counts)

    def _deletions(self, state: World) -> Iterator[tuple[Label, Any]]:
        """The ledger gets its tombstone; then each bookie that holds something drops it."""
        clients, bookies, row, flight, counts = state
        parts = self.parts
        if not counts.is_deleted:
            gone = counts._replace(is_deleted=True)
            yield "the ledger is deleted", self._alive(clients, bookies, row, flight, gone)
            return
        for index, bookie in enumerate(bookies):
            if parts.holds(bookie):
                after = (*bookies[:index], parts.deleted(bookie), *bookies[index + 1 :])
                dropped = self._alive(clients, after, row, flight, counts)
                yield f"{parts.names[index]} drops the deleted ledger", dropped

    def _is_over(self, state: World) -> bool:
        """Whether no rule can break any more: the ledger is closed, and no client could acknowledge or close."""
        clients, _, _, flight, counts = state
        if counts.end is None:
            return False
        idle = self.idle_at
        for client in clients:
            if client not in idle:
                machine = self.parts.machines.values[client]
                idle[client] = (
                    machine.state in OVER
                    if hasattr(machine, "state")
                    else machine.phase in (Phase.IDLE, Phase.DONE)
                )
            if not idle[client]:
                return False
        while flight:
            low = flight & -flight
            flight ^= low
            if self.parts.ends_of[low.bit_length() - 1][1] == AT_STORE:
                return False
        return True

    def _reported(self, state: World, client: int, number: int, counts: Counts) -> Any:
        """A client hears a message that was in flight."""
        clients, bookies, row, flight, _ = state
        move = self.moves.get((clients[client], number))
        if move is None:
            event = self.parts.messages.values[number].what
            move = self.moves[clients[client], number] = self._move(clients[client], client, event)
        return self._moved(move, clients, bookies, row, flight & ~(1 << number), counts, client)

    def _asked(self, state: World, client: int, event: Event, counts: Counts) -> Any:
        """A client hears of something that was not in flight."""
        clients, bookies, row, flight, _ = state
        move = self._move(clients[client], client, event)
        return self._moved(move, clients, bookies, row, flight, counts, client)

    def _moved(
        self,
        move: tuple[int, int, int] | Broken,
        clients: tuple[int, ...],
        bookies: tuple[int, ...],
        row: int,
        flight: int,
        counts: Counts,
        client: int,
    ) -> Any:
        if isinstance(move, Broken):
            return move
        after, sends, confirms = move
        if confirms >= 0:
            first, last = divmod(confirms, 1000)
            try:
                broken_if(invariants.in_order(first, last, counts.acked))
                counts = counts._replace(acked=last)
                self.judge.acked(last, counts.end, bookies, row)
            except Broken as broken:
                return broken
        clients = (*clients[:client], after, *clients[client + 1 :])
        return self._alive(clients, bookies, row, flight | sends, counts)

    def _move(self, machine: int, client: int, event: Event) -> tuple[int, int, int] | Broken:
        """What a client does about an event: its next state, what it sends, what it confirms."""
        try:
            after, effects = self.parts.step(machine, event)
        except Broken as broken:
            return broken
        sends, confirms = 0, -1
        message = self.parts.message
        for effect in effects:
            match effect:
                case SendAdd() | SendFence() | SendRead() | SendRow():
                    sends |= 1 << message("to-bookie", client, effect)
                case UpdateMetadata() | ReadMetadata():
                    sends |= 1 << message("to-store", client, effect)
                case FindBookies(attempt, _, exclude):
                    found = tuple(m for m in self.parts.spares if m not in exclude)
                    sends |= 1 << message("to-client", client, BookiesFound(attempt, found))
                case StartTimer(timer, tag):
                    if self.scope.timers and timer is not Timer.HEDGE:
                        sends |= 1 << message("timer", client, TimerFired(timer, tag))
                case Confirmed(first, last):
                    confirms = first * 1000 + last
                case Failed() | Closed() | Repaired() | RecoveryNeeded() | EntriesRead():
                    pass
        return after, sends, confirms

    def _at_store(self, state: World, number: int) -> Any:
        clients, bookies, row, flight, counts = state
        message: Message = self.parts.messages.values[number]
        before: LedgerMetadata = self.parts.rows.values[row]
        effect = message.what
        if counts.is_deleted:
            event = MetadataAnswered(effect.attempt, CasStatus.MISSING)
        elif isinstance(effect, ReadMetadata):
            event = MetadataAnswered(effect.attempt, CasStatus.OK, before)
        elif effect.metadata.version != before.version:
            event = MetadataAnswered(effect.attempt, CasStatus.CONFLICT, before)
        else:
            new = replace(effect.metadata, version=before.version + 1)
            event = MetadataAnswered(effect.attempt, CasStatus.OK, new)
            row = self.parts.row(new)
            counts = counts._replace(end=new.last_entry)
            try:
                self.judge.row(before, new, counts.acked, counts.appended)
                self.judge.copies(counts.acked, bookies, row)
            except Broken as broken:
                return broken
        answer = 1 << self.parts.message("to-client", message.client, event)
        flight = flight & ~(1 << number) | answer
        return self._alive(clients, bookies, row, flight, counts)

    # --- messages that change nothing --------------------------------------------------------------

    def _alive(
        self,
        clients: tuple[int, ...],
        bookies: tuple[int, ...],
        row: int,
        flight: int,
        counts: Counts,
    ) -> World:
        """The state without messages that change nothing now."""
        counts = self.counts.setdefault(counts, counts)
        if counts.timers >= self.scope.timers:
            flight &= ~self.parts.timers
        known, mine = self.dead, self.parts.mine
        for client, machine in enumerate(clients):
            place = client, machine, bookies
            looked, dead = known.get(place, (0, 0))
            fresh = flight & mine[client] & ~looked
            if fresh:
                dead |= self._dead(machine, bookies, fresh)
                known[place] = looked | fresh, dead
            flight &= ~dead
        return clients, bookies, row, flight, counts

    def _dead(self, machine: int, bookies: tuple[int, ...], flight: int) -> int:
        """Which of these messages of a client change nothing at this state of it and bookies."""
        dead = 0
        while flight:
            low = flight & -flight
            flight ^= low
            number = low.bit_length() - 1
            index = self.parts.ends_of[number][1]
            place = number, machine, bookies[index] if index >= 0 else -1
            is_dead = self.verdicts.get(place)
            if is_dead is None:
                is_dead = number not in self.kept and self._is_dead(*place)
                self.verdicts[place] = is_dead
            if is_dead:
                dead |= low
        return dead

    def _is_dead(self, number: int, machine: int, bookie: int) -> bool:
        message: Message = self.parts.messages.values[number]
        if bookie < 0:
            return self._is_ignored(machine, message.what)
        after, event = self.parts.answer(bookie, number)
        return (
            after == bookie
            and self._is_ignored(machine, event)
            and (not self.scope.timeouts or self._is_ignored(machine, unknown(message.what)))
        )

    def _is_ignored(self, machine: int, event: Event) -> bool:
        try:
            after, effects = self.parts.step(machine, event)
        except Broken:
            return False
        return after == machine and not effects

    def _refuted(self) -> set[int]:
        """Messages that were taken out of flight and would have changed something later."""
        parts, namings = self.parts, self.symmetry.namings
        machines: dict[int, set[int]] = {}
        for (machine, _), (after, _) in list(parts.steps.items()):
            for naming in namings:
                machines.setdefault(naming.machine(machine), set()).add(naming.machine(after))
        bookies: dict[int, set[int]] = {}
        changes = [(bookie, after) for (bookie, _), (after, _) in parts.answers.items()]
        changes += [*parts.losses.items(), *parts.deletions.items()]
        for bookie, after_bookie in changes:
            for naming in namings:
                bookies.setdefault(naming.bookie(bookie), set()).add(naming.bookie(after_bookie))
        dead_at: dict[int, set[tuple[int, int]]] = {}
        for (number, machine, bookie), is_dead in self.verdicts.items():
            if is_dead:
                dead_at.setdefault(number, set()).add((machine, bookie))
        wrong: set[int] = set()
        for number, places in dead_at.items():
            later = _closure({machine for machine, _ in places}, machines)
            at = _closure({bookie for _, bookie in places}, bookies)
            if not all(self._is_dead(number, m, b) for m in sorted(later) for b in sorted(at)):
                wrong.update(naming.message(number) for naming in namings)
        return wrong

    # --- search ------------------------------------------------------------------------------------

    def run(self, until_s: float = FOREVER) -> Result:
        """Search to the end of the scope, to the first violation, or until a time (`search`)."""
        while True:
            result = self._search(until_s)
            result.namings = len(self.symmetry.namings)
            if result.violation is not None and not result.story:
                self._begin(is_symmetric=False)  # it was found under a naming that is none
                continue
            if result.violation is not None:
                return result  # a story is a story, whatever else could have happened
            if self.symmetry.counterexample() is not None:
                self._begin(is_symmetric=False)
                continue
            wrong = self._refuted()
            if not wrong:
                return result
            self.kept |= wrong
            self._forget()

    def _least(
        self,
        clients: tuple[int, ...],
        bookies: tuple[int, ...],
        row: int,
        flight: int,
        counts: Counts,
    ) -> World:
        return *self.symmetry.least(clients, bookies, row, flight), counts

    def _search(self, until_s: float) -> Result:
        is_plain = len(self.symmetry.namings) == 1
        canonical = None if is_plain else lambda state: self._least(*state)
        space = Space(self.start(), self.next, _hash, canonical, self._notify)
        return search(self.scope, space, until_s)

    def _notify(self, label: Label) -> str:
        return label if isinstance(label, str) else str(self.parts.messages.values[label])


def _hash(state: World) -> int:
    """Equal for equal states. A mask is hashed as bytes: as a number, bits 61 apart are alike."""
    clients, bookies, row, flight, counts = state
    return hash((clients, bookies, row, flight.to_bytes(_MASK_BYTES, "little"), counts))


def _closure(start: set[int], edges: dict[int, set[int]]) -> set[int]:
    """All that can be reached."""
    found, todo = set(start), sorted(start)
    while todo:
        for after in edges.get(todo.pop(), ()):
            if after not in found:
                found.add(after)
                todo.append(after)
    return found
