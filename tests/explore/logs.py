"""Breadth-first search over everything that can happen to one log in a small world: `make explore`.

The machines are those that ship (`protocol/log/route.py` and what it steps), of two gateways. A ledger
here is what the ledger's own machines promise, which other scopes search: ids in order, an
acknowledged entry stays, a recovery keeps all that was acknowledged and any prefix of what was in
flight. What is asked and answered waits in flight for as long as it likes; requests are done at once
when they arrive, but rows are changed before the answer comes. A gateway that dies starts again, as
another process.

Judged at each transition: rules 22 to 28 and I32 to I34 (`_check_log`), the machines' own `check`, and the
legality of each row (`protocol/changes.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from quorumlog.errors import (
    NOT_DONE,
    LedgerFenced,
    QuorumLogError,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.changes import check_log, published_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.handover import same
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    BatchesRead,
    CloseLedger,
    Commit,
    Committed,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    EntriesDurable,
    Event,
    ForceAsked,
    Forward,
    IsAlive,
    LedgerEnd,
    LogAppended,
    MeasureLedger,
    OwnerLost,
    Publish,
    PublishAsked,
    ReadBatches,
    ReadLedger,
    ReadLog,
    ReadTransaction,
    RecoverLedger,
    Relay,
    Resolve,
    RollAsked,
    RowChanged,
    Submit,
    SubmitFailed,
    SwapLog,
    TakeoverDone,
    Wait,
)
from quorumlog.protocol.log.route import Route
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import (
    Sealed,
    Transaction,
    TransactionLedger,
    TransactionState,
)
from tests.explore.explorer import Result
from tests.explore.fields import clone, snapshot
from tests.explore.parts import Broken
from tests.explore.scope import LogScope

NOW: Final = Now(0, 0)
QUORUM: Final = Quorum(1, 1, 1)
FENCED: Final = LedgerFenced()
GATEWAYS: Final = 2
ROLL, PUBLISH, FORCE, FORWARDED = "roll", "publish", "force", "forwarded"
PUBLISHED: Final = 1
"""The ledger of the transaction: it holds one record, "t". Those that are made are numbered on."""


_CHANGES: Final = (SwapLog, Commit, RecoverLedger, CloseLedger, DeleteLedger)
"""Questions that change something: these arrive though nobody waits for the answer any more."""


Life = tuple[int, int]
"""A process: its gateway, and how many of that died before."""


class Ledger(NamedTuple):
    """A ledger as its machines promise it. `owner` is the process that writes it."""

    owner: Life
    is_closed: bool = False
    entries: tuple[bytes, ...] = ()
    in_flight: tuple[bytes, ...] = ()


class Hand(NamedTuple):
    """One gateway: its machine by number, and how often it was made to take the log over."""

    machine: int
    life: int = 0
    forces: int = 0


class World(NamedTuple):
    """A state of the search. Its parts are numbers of values that the explorer keeps."""

    hands: tuple[Hand, ...]
    ledgers: tuple[int, ...]
    """By id, from 1 on; -1: deleted."""
    row: int
    is_committed: bool
    flight: frozenset[int]
    """Messages (process, Ask or event): asked, or answered and not heard yet."""
    forwards: frozenset[tuple[Life, int, Life]]
    """Requests that a process has let another one do: who asked, under which number, and whom."""
    sent: tuple[tuple[str, int], ...]
    """How often each request was sent."""
    acked: frozenset[tuple[str, LogAppended]]
    refused: frozenset[str]
    """Records without a producer that certainly were not appended."""
    kills: int = 0


class Values:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any, key: Any = None) -> int:
        number = self._numbers.setdefault(value if key is None else key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def call_of(name: str) -> Append:
    """A client's request by its name."""
    record = (Record(name.encode()),)
    if name.startswith("p"):
        return Append(record, ProducerSeq("p", 0, int(name[1:])))
    return Append(record)


class LogExplorer:
    """One scope's search."""

    def __init__(self, scope: LogScope) -> None:
        self.scope = scope
        self.machines, self.rows, self.ledgers, self.messages = (Values() for _ in range(4))
        self._found: dict[tuple[int, tuple[int, ...]], dict[int, tuple[str, int, int]]] = {}
        self._steps: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}
        self._values: dict[bytes, str] = {}

    def start(self) -> World:
        """Nothing has happened yet: the log was just created."""
        record = batch.encode((Record(b"t"),), append_time_ms=0, records_before=0)
        row = LogMetadata("log", LogSettings(QUORUM, roll_bytes=0), next_offset=0)
        return World(
            tuple(Hand(self._number(_route((index, 0)))) for index in range(GATEWAYS)),
            (self.ledgers.number(Ledger((-1, 0), is_closed=True, entries=(record,))),),
            self.rows.number(row),
            is_committed=False,
            flight=frozenset(),
            forwards=frozenset(),
            sent=(),
            acked=frozenset(),
            refused=frozenset(),
        )

    # --- transitions -----------------------------------------------------------------------------

    def next(self, world: World) -> Iterator[tuple[str, World | Broken]]:
        """(label, what follows) of all that can happen now."""
        for label, step in self._possible(world):
            try:
                after = step()
                self._check_log(world, after)
                self._check_answered(after)
            except (Broken, AssertionError, QuorumLogError) as broken:
                yield label, Broken(str(broken))
            else:
                yield label, after

    def _check_answered(self, world: World) -> None:
        """Where nothing is under way any more, everybody was answered."""
        if world.flight or any(
            number >= 0 and self.ledgers.values[number].in_flight for number in world.ledgers
        ):
            return
        for hand in world.hands:
            if not self.machines.values[hand.machine].is_idle:
                raise Broken("liveness: a request is never answered")

    def _possible(self, world: World) -> Iterator[tuple[str, Any]]:
        for index in range(GATEWAYS):
            if sum(one.forces for one in world.hands) < self.scope.forces:
                yield f"g{index} takes over", lambda i=index: self._force(world, i)
            for name in self._sendable(world):
                event: Event = AppendsAsked(((name, call_of(name)),))
                yield (
                    f"{name} to g{index}",
                    lambda i=index, n=name, e=event: self._hear(_sent(world, n), i, e),
                )
            if (count := _count(world, ROLL)) < self.scope.rolls:
                yield (
                    f"g{index} rolls",
                    lambda i=index, n=count: self._hear(
                        _sent(world, ROLL), i, RollAsked(f"{ROLL}{n}")
                    ),
                )
            if (count := _count(world, PUBLISH)) < self.scope.publishes:
                call = Publish("t", (Sealed(PUBLISHED),))
                asked = PublishAsked(f"{PUBLISH}{count}", call, ((PUBLISHED, 1, 1),))
                yield (
                    f"g{index} publishes",
                    lambda i=index, e=asked: self._hear(_sent(world, PUBLISH), i, e),
                )
            if world.kills < self.scope.kills:
                yield f"g{index} dies", lambda i=index: self._kill(world, i)
        for message in world.flight:
            yield from self._arrivals(world, message)
        for ledger_id, number in enumerate(world.ledgers, 1):
            ledger = self.ledgers.values[number]
            if number >= 0 and ledger.in_flight and not ledger.is_closed:
                yield (
                    f"ledger {ledger_id} has entry {len(ledger.entries)}",
                    lambda n=ledger_id: self._confirm(world, n),
                )

    def _sendable(self, world: World) -> Iterator[str]:
        acked = {name for name, _ in world.acked}
        for name in self.scope.requests:
            is_producer = name.startswith("p")
            times = 1 + (self.scope.repeats if is_producer else 0)
            if _count(world, name) < times and (name != "p1" or "p0" in acked):
                yield name

    def _arrivals(self, world: World, message: int) -> Iterator[tuple[str, Any]]:
        life, what = self.messages.values[message]
        if not isinstance(what, Ask):
            for event in (what, *self._late(world, what)):
                yield (
                    f"g{life[0]} hears {_short(event)}",
                    lambda e=event: self._tell(_without(world, message), life, e),
                )
            return
        kept = 0
        if isinstance(what.question, CreateLedger) and len(world.ledgers) > self.scope.ledgers:
            return
        if isinstance(what.question, RecoverLedger):
            kept = len(self._ledger(world, what.question.ledger_id).in_flight)
        for count in range(kept + 1):
            label = f"g{life[0]} asks {_short(what.question)}" + (f", {count} kept" if kept else "")
            yield label, lambda n=count: self._done(_without(world, message), life, what, n)

    def _late(self, world: World, what: Any) -> Iterator[Event]:
        """A request that was repeated is answered with the row as it is by then."""
        row = self._row(world)
        if not isinstance(what, Answered):
            return
        if isinstance(what.value, LogMetadata) and what.value.version < row.version:
            yield replace(what, value=row)
        if isinstance(what.value, Committed) and what.value.log not in (None, row):
            yield replace(what, value=replace(what.value, log=row))

    # --- gateways --------------------------------------------------------------------------------

    def _force(self, world: World, index: int) -> World:
        hand = world.hands[index]
        world = _with_hand(world, index, hand._replace(forces=hand.forces + 1))
        event = ForceAsked((FORCE, index, hand.forces), creates=True, finish=same)
        return self._hear(world, index, event)

    def _tell(self, world: World, life: Life, event: Event) -> World:
        """A process hears of something, unless it died."""
        index, number = life
        return self._hear(world, index, event) if world.hands[index].life == number else world

    def _hear(self, world: World, index: int, event: Event) -> World:
        """A gateway's machine takes a step."""
        hand = world.hands[index]
        after, effects = self._step(hand.machine, event)
        world = _with_hand(world, index, hand._replace(machine=after))
        for effect in effects:
            world = self._perform(world, (index, hand.life), effect)
        return world

    def _step(self, machine: int, event: Event) -> tuple[int, tuple[Any, ...]]:
        """The real step, once for each machine state and event."""
        known = self._steps.get((machine, event))
        if known is None:
            copy = clone(self.machines.values[machine])
            effects = tuple(copy.step(event, NOW))
            copy.check()
            known = self._steps[machine, event] = self._number(copy), effects
        return known

    def _number(self, machine: Any) -> int:
        return self.machines.number(machine, snapshot(machine))

    def _row(self, world: World) -> LogMetadata:
        row: LogMetadata = self.rows.values[world.row]
        return row

    def _ledger(self, world: World, ledger_id: int) -> Ledger:
        ledger: Ledger = self.ledgers.values[world.ledgers[ledger_id - 1]]
        return ledger

    def _with_ledger(self, world: World, ledger_id: int, ledger: Ledger) -> World:
        numbers = list(world.ledgers)
        if ledger_id > len(numbers):
            numbers.append(-1)
        numbers[ledger_id - 1] = self.ledgers.number(ledger)
        return world._replace(ledgers=tuple(numbers))

    def _with_message(self, world: World, life: Life, what: Any) -> World:
        if world.hands[life[0]].life != life[1]:
            return world  # nobody is there who hears it
        return world._replace(flight=world.flight | {self.messages.number((life, what))})

    def _perform(self, world: World, life: Life, effect: Any) -> World:
        match effect:
            case Ask():
                return self._with_message(world, life, effect)
            case Submit(ledger_id, first, payloads):
                return self._submit(world, life, ledger_id, first, payloads)
            case Resolve(request, answer) | Relay(request, answer):
                return self._resolve(world, life, request, answer)
            case TakeoverDone(QuorumLogError() as error):
                raise Broken(f"nothing fails here, and a takeover did: {error!r}")
            case _:
                return world

    def _resolve(self, world: World, life: Life, request: Any, answer: Any) -> World:
        if isinstance(request, tuple) and request[0] == FORWARDED:
            asker, number = request[1:]
            world = world._replace(forwards=world.forwards - {(asker, number, life)})
            return self._with_message(world, asker, Answered(number, answer))
        if isinstance(answer, LogAppended):
            return world._replace(
                acked=world.acked | {(request, replace(answer, is_duplicate=False))}
            )
        if isinstance(answer, Transaction) and not world.is_committed:
            raise Broken("rule 28: a commit is acknowledged that was not done")
        if answer is NOT_OWNER:
            raise Broken("a client is told what only machines tell each other")
        if isinstance(answer, QuorumLogError) and answer.outcome == NOT_DONE:
            return _refused(world, request)
        return world

    # --- ledgers ---------------------------------------------------------------------------------

    def _submit(
        self, world: World, life: Life, ledger_id: int, first: int, payloads: tuple[bytes, ...]
    ) -> World:
        ledger = self._ledger(world, ledger_id)
        if ledger.is_closed:
            return self._with_message(world, life, SubmitFailed(ledger_id, FENCED))
        row = self._row(world)
        item = row.item_of(ledger_id)
        if item is None or item.first_offset is None:
            raise Broken(
                f"rule 23: ledger {ledger_id} is written before the row says where it begins"
            )
        if first != len(ledger.entries) + len(ledger.in_flight):
            raise Broken(f"rule 25: entry {first} of ledger {ledger_id} is given twice, or skipped")
        for other in row.items[: row.items.index(item)]:
            if not self._ledger(world, other.ledger_id).is_closed:
                raise Broken(f"rule 23: {ledger_id} is written, and {other.ledger_id} is open")
        return self._with_ledger(
            world, ledger_id, ledger._replace(in_flight=ledger.in_flight + payloads)
        )

    def _confirm(self, world: World, ledger_id: int) -> World:
        """The next entry is on its ack quorum; its writer will hear of it."""
        ledger = self._ledger(world, ledger_id)
        entry = len(ledger.entries)
        world = self._with_ledger(
            world,
            ledger_id,
            ledger._replace(
                entries=(*ledger.entries, ledger.in_flight[0]), in_flight=ledger.in_flight[1:]
            ),
        )
        return self._with_message(world, ledger.owner, EntriesDurable(ledger_id, entry))

    def _end(self, world: World, ledger_id: int, kept: int) -> World:
        """A ledger is CLOSED with some of what was in flight; its writer hears that it is fenced."""
        ledger = self._ledger(world, ledger_id)
        closed = Ledger(
            ledger.owner, is_closed=True, entries=ledger.entries + ledger.in_flight[:kept]
        )
        if ledger.in_flight:
            world = self._with_message(world, ledger.owner, SubmitFailed(ledger_id, FENCED))
        return self._with_ledger(world, ledger_id, closed)

    # --- what is asked ---------------------------------------------------------------------------

    def _done(self, world: World, life: Life, ask: Ask, kept: int) -> World:
        """A question arrives and is done; its answer is on its way, or is there at once where nothing
        that happens meanwhile could change what it means.
        """
        if isinstance(ask.question, Forward):
            return self._forward(world, life, ask.number, ask.question)
        world, value = self._answer(world, life, ask.question, kept)
        event = Answered(ask.number, value)
        if isinstance(ask.question, ReadLog | SwapLog | Commit | RecoverLedger | CloseLedger):
            return self._with_message(world, life, event)
        return self._tell(world, life, event)

    def _forward(self, world: World, life: Life, number: Any, asked: Forward) -> World:
        """A request reaches the process that it is for, or nobody."""
        target = _life(asked.owner)
        if world.hands[target[0]].life != target[1]:
            return self._tell(world, life, Answered(number, OwnerLost("it died", sent=False)))
        if world.hands[life[0]].life == life[1]:
            world = world._replace(forwards=world.forwards | {(life, number, target)})
        request = (FORWARDED, life, number)
        event: Event
        if asked.call is None:
            event = RollAsked(request, is_forwarded=True)
        elif isinstance(asked.call, Publish):
            event = PublishAsked(request, asked.call, ((PUBLISHED, 1, 1),), is_forwarded=True)
        else:
            event = AppendsAsked(((request, asked.call),), is_forwarded=True)
        return self._hear(world, target[0], event)

    def _answer(self, world: World, life: Life, question: Any, kept: int) -> tuple[World, Any]:
        match question:
            case IsAlive(writer):
                index, number = _life(writer)
                return world, world.hands[index].life == number
            case Wait():
                return world, None
            case ReadLog():
                return world, self._row(world)
            case SwapLog(row):
                return self._swap(world, row)
            case ReadTransaction():
                return world, self._transaction(world)
            case Commit(_, ledgers, row):
                return self._commit(world, ledgers, row)
            case CreateLedger():
                number = len(world.ledgers) + 1
                world = self._with_ledger(world, number, Ledger(life))
                return world, _row_of(number, Ledger(life))
            case DeleteLedger(ledger_id):
                return self._deleted(world, ledger_id), None
            case ReadLedger(ledger_id):
                return world, _row_of(ledger_id, self._ledger(world, ledger_id))
            case RecoverLedger(ledger_id):
                if not self._ledger(world, ledger_id).is_closed:
                    world = self._end(world, ledger_id, kept)
                return world, _row_of(ledger_id, self._ledger(world, ledger_id))
            case CloseLedger(ledger_id):
                ledger = self._ledger(world, ledger_id)
                if ledger.is_closed:
                    return world, FENCED
                if ledger.in_flight:
                    raise Broken("rule 23: a ledger is closed while entries of it are in flight")
                world = self._end(world, ledger_id, 0)
                return world, _row_of(ledger_id, self._ledger(world, ledger_id))
            case MeasureLedger(row):
                return world, _end_of(row.ledger_id, self._ledger(world, row.ledger_id))
            case ReadBatches(ledger_id, first, last):
                entries = self._ledger(world, ledger_id).entries[first : last + 1]
                found = tuple(enumerate(entries, first))
                return world, BatchesRead(found, last + 1)
            case CountBookies():
                return world, QUORUM.ensemble_size
            case _:
                raise Broken(f"nobody answers {question}")

    def _deleted(self, world: World, ledger_id: int) -> World:
        if self._row(world).item_of(ledger_id) is not None:
            return world  # refused (rule 22)
        ledgers = (*world.ledgers[: ledger_id - 1], -1, *world.ledgers[ledger_id:])
        return world._replace(ledgers=ledgers)

    def _kill(self, world: World, index: int) -> World:
        """What a process has changed may still arrive; whom it was to answer learns that it is gone."""
        hand = world.hands[index]
        life = (index, hand.life)
        kept = frozenset(number for number in world.flight if self._outlives(number, life))
        world = world._replace(flight=kept, kills=world.kills + 1)
        machine = self._number(_route((index, hand.life + 1)))
        world = _with_hand(world, index, hand._replace(machine=machine, life=hand.life + 1))
        lost = [forward for forward in world.forwards if forward[2] == life]
        mine = {forward for forward in world.forwards if forward[0] == life}
        world = world._replace(forwards=world.forwards - mine - set(lost))
        for asker, number, _ in sorted(lost):
            world = self._with_message(
                world, asker, Answered(number, OwnerLost("it died", sent=True))
            )
        return world

    def _outlives(self, number: int, life: Life) -> bool:
        whose, what = self.messages.values[number]
        return whose != life or (isinstance(what, Ask) and isinstance(what.question, _CHANGES))

    def _swap(self, world: World, row: LogMetadata) -> tuple[World, Any]:
        current = self._row(world)
        if row.version != current.version:
            return world, RowChanged(current)
        world = self._changed(world, row)
        return world, self._row(world)

    def _changed(self, world: World, row: LogMetadata) -> World:
        row = replace(row, version=row.version + 1)
        row.check()
        check_log(self._row(world), row)
        if any(world.ledgers[item.ledger_id - 1] < 0 for item in row.items):
            raise Broken("rule 22: the row names a ledger that is deleted")
        return world._replace(row=self.rows.number(row))

    def _commit(
        self, world: World, ledgers: tuple[Sealed, ...], row: LogMetadata | None
    ) -> tuple[World, Any]:
        if world.is_committed or row is None:
            return world, Committed(self._transaction(world), None)
        current = self._row(world)
        if row.version != current.version:
            return world, RowChanged(current)
        published_by(current, row, ledgers)
        world = self._changed(world, row)._replace(is_committed=True)
        return world, Committed(self._transaction(world), self._row(world))

    def _transaction(self, world: World) -> Transaction:
        state = TransactionState.COMMITTED if world.is_committed else TransactionState.OPEN
        return Transaction("t", "log", state=state, ledgers=(TransactionLedger(PUBLISHED),))

    # --- rules -----------------------------------------------------------------------------------

    def _check_log(self, before: World, after: World) -> None:
        """Rules 24, 26 and 28, I32, I33: the log as a reader finds it, now or ever after."""
        if (before.row, before.ledgers, before.acked, before.refused) == (
            after.row,
            after.ledgers,
            after.acked,
            after.refused,
        ):
            return
        found = self._contents(after)
        for name, answer in after.acked:
            if found.get(answer.first_offset) != (name, answer.ledger_id, answer.entry_id):
                raise Broken(f"I32, I33: {name} was acknowledged at {answer}, there is {found}")
        names = [name for name, _, _ in found.values()]
        for name in names:
            if names.count(name) > 1:
                raise Broken(f"rules 24 and 26: {name} is in the log twice: {found}")
            if name in after.refused:
                raise Broken(f"rule 24: {name} is in the log, and was refused: {found}")
        if after.is_committed and "t" not in names:
            raise Broken("rule 28: what was committed is not on the log")

    def _contents(self, world: World) -> dict[int, tuple[str, int, int]]:
        """Rules 23 and 25, I33: offsets are dense, each of one record. (Record, ledger, entry) by offset."""
        known = self._found.get((world.row, world.ledgers))
        if known is not None:
            return known
        found: dict[int, tuple[str, int, int]] = {}
        for item in self._row(world).items:
            ledger = self._ledger(world, item.ledger_id)
            self._check_item(item, ledger)
            for entry, data in enumerate(ledger.entries):
                if item.first_offset is None:
                    raise Broken(f"rule 23: ledger {item.ledger_id} has entries, and no start")
                name = self._values.setdefault(data, batch.decode(data)[1][0].value.decode())
                at = item.first_offset + batch.decode_head(data).records_before
                if at in found:
                    raise Broken(f"I33: offset {at} is given twice: {found[at]}, {name}")
                found[at] = (name, item.ledger_id, entry)
        if sorted(found) != list(range(len(found))):
            raise Broken(f"rule 25: offsets are not dense: {sorted(found)}")
        self._found[world.row, world.ledgers] = found
        return found

    def _check_item(self, item: LogItem, ledger: Ledger) -> None:
        if item.last_offset is None:
            return
        if not ledger.is_closed:
            raise Broken(f"rules 23 and 28: ledger {item.ledger_id} is open, and has an end")
        if item.last_offset - (item.first_offset or 0) + 1 != len(ledger.entries):
            raise Broken(f"I33: the row says that ledger {item.ledger_id} ends elsewhere")

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> Result:
        """Search the scope to its end."""
        first = self.start()
        # Only hashes are kept: at 14 million states two of them meet with a chance of 1e-5.
        seen = {hash(first): hash(first)}
        frontier = [first]
        transitions = depth = 0
        while frontier and len(seen) <= self.scope.states_max:
            depth += 1
            coming = []
            for world in frontier:
                came = hash(world)
                for label, after in self.next(world):
                    transitions += 1
                    if isinstance(after, Broken):
                        story = (*self._story(seen, came), label, str(after))
                        return Result(
                            self.scope, len(seen), transitions, depth, False, str(after), story
                        )
                    number = hash(after)
                    if number not in seen:
                        seen[number] = came
                        coming.append(after)
            frontier = coming
        return Result(self.scope, len(seen), transitions, depth, not frontier)

    def _story(self, seen: dict[int, int], end: int) -> list[str]:
        """What led to a state: done again from the start."""
        way = [end]
        while seen[way[-1]] != way[-1]:
            way.append(seen[way[-1]])
        lines, now = [], self.start()
        for wanted in reversed(way[:-1]):
            for label, after in self.next(now):
                if not isinstance(after, Broken) and hash(after) == wanted:
                    lines.append(label)
                    now = after
                    break
        return lines


def _route(life: Life) -> Route:
    return Route("log", _writer(life).id, settle_s=1.0)


def _writer(life: Life) -> Writer:
    return Writer(f"{life[0]}.{life[1]}", "")


def _life(writer: Writer) -> Life:
    index, number = writer.id.split(".")
    return int(index), int(number)


def _short(what: Any) -> str:
    if isinstance(what, Answered):
        return f"the answer {what.number}: {type(what.value).__name__}"
    return f"{type(what).__name__}({getattr(what, 'ledger_id', '')})"


def _count(world: World, name: str) -> int:
    return dict(world.sent).get(name, 0)


def _sent(world: World, name: str) -> World:
    counts = dict(world.sent)
    counts[name] = counts.get(name, 0) + 1
    return world._replace(sent=tuple(sorted(counts.items())))


def _refused(world: World, request: Any) -> World:
    """Who asked is told that certainly nothing was done."""
    is_plain = isinstance(request, str) and call_of(request).producer is None
    return world._replace(refused=world.refused | {request}) if is_plain else world


def _without(world: World, message: int) -> World:
    return world._replace(flight=world.flight - {message})


def _with_hand(world: World, index: int, hand: Hand) -> World:
    return world._replace(hands=(*world.hands[:index], hand, *world.hands[index + 1 :]))


def _row_of(ledger_id: int, ledger: Ledger) -> LedgerMetadata:
    row = LedgerMetadata(
        ledger_id,
        QUORUM,
        DigestKind.CRC32C,
        (Fragment(0, ("b1@1",)),),
        writer=_writer(ledger.owner),
        log="log",
    )
    if not ledger.is_closed:
        return row
    return replace(row, state=State.CLOSED, last_entry=len(ledger.entries) - 1, length=1)


def _end_of(ledger_id: int, ledger: Ledger) -> LedgerEnd:
    del ledger_id
    if not ledger.entries:
        return LedgerEnd(0, 0, -1, has_producers=False)
    head = batch.decode_head(ledger.entries[-1])
    has_producers = head.producer is not None or head.after_producer
    return LedgerEnd(head.records_after, 1, len(ledger.entries) - 1, has_producers)
