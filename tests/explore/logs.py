"""Breadth-first search over everything that can happen to one log in a small world: `make explore`.

The machines are those that ship (`protocol/log`): takeovers and owners of two gateways. A ledger
here is what the ledger's own machines promise, which other scopes search: ids in order, an
acknowledged entry stays, a recovery keeps all that was acknowledged and any prefix of what was in
flight. What is asked and answered waits in flight for as long as it likes; requests are done at once
when they arrive, but rows are changed before the answer comes.

Judged at each transition: rules 22 to 28 and I32 to I34 (`_check_log`), the machines' own `check`, and the
legality of each row (`protocol/changes.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from quorumlog.errors import (
    LedgerFenced,
    QuorumLogError,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.changes import check_log, published_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    BatchesRead,
    Begin,
    CloseLedger,
    Commit,
    Committed,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    EntriesDurable,
    Event,
    LedgerEnd,
    LogAppended,
    MeasureLedger,
    Publish,
    PublishAsked,
    ReadBatches,
    ReadLedger,
    ReadLog,
    ReadTransaction,
    RecoverLedger,
    Resolve,
    RollAsked,
    RowChanged,
    Settled,
    Submit,
    SubmitFailed,
    SwapLog,
    TakeoverDone,
)
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.log.takeover import Takeover
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State
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
ROLL, PUBLISH = "roll", "publish"
PUBLISHED: Final = 1
"""The ledger of the transaction: it holds one record, "t". Those that are made are numbered on."""


_CHANGES: Final = (SwapLog, Commit, RecoverLedger, CloseLedger, DeleteLedger)
"""Questions that change something: these arrive though nobody waits for the answer any more."""


class Ledger(NamedTuple):
    """A ledger as its machines promise it. `owner` is the gateway that writes it."""

    owner: int
    is_closed: bool = False
    entries: tuple[bytes, ...] = ()
    in_flight: tuple[bytes, ...] = ()


class Hand(NamedTuple):
    """One gateway: its machine by number (-1: none), and what it must append again."""

    machine: int = -1
    again: tuple[tuple[Any, Append], ...] = ()
    takeovers: int = 0


class World(NamedTuple):
    """A state of the search. Its parts are numbers of values that the explorer keeps."""

    hands: tuple[Hand, ...]
    ledgers: tuple[int, ...]
    """By id, from 1 on; -1: deleted."""
    row: int
    is_committed: bool
    flight: frozenset[int]
    """Messages (gateway, its tenure, Ask or event): asked, or answered and not heard yet."""
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
            (Hand(),) * GATEWAYS,
            (self.ledgers.number(Ledger(-1, is_closed=True, entries=(record,))),),
            self.rows.number(row),
            is_committed=False,
            flight=frozenset(),
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
            except (Broken, AssertionError, QuorumLogError) as broken:
                yield label, Broken(str(broken))
            else:
                yield label, after

    def _possible(self, world: World) -> Iterator[tuple[str, Any]]:
        for index, hand in enumerate(world.hands):
            machine = None if hand.machine < 0 else self.machines.values[hand.machine]
            if machine is None and hand.takeovers < self.scope.takeovers:
                yield f"g{index} takes over", lambda i=index: self._take_over(world, i)
            if isinstance(machine, Owner) and not machine.is_ended:
                for name in self._sendable(world):
                    event: Event = AppendsAsked(((name, call_of(name)),))
                    yield (
                        f"{name} to g{index}",
                        lambda i=index, n=name, e=event: self._hear(_sent(world, n), i, e),
                    )
                if _count(world, ROLL) < self.scope.rolls:
                    yield (
                        f"g{index} rolls",
                        lambda i=index: self._hear(_sent(world, ROLL), i, RollAsked(ROLL)),
                    )
                if _count(world, PUBLISH) < self.scope.publishes:
                    call = Publish("t", (Sealed(PUBLISHED),))
                    asked = PublishAsked(PUBLISH, call, ((PUBLISHED, 1, 1),))
                    yield (
                        f"g{index} publishes",
                        lambda i=index, e=asked: self._hear(_sent(world, PUBLISH), i, e),
                    )
            if machine is not None and world.kills < self.scope.kills:
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
        index, tenure, what = self.messages.values[message]
        if not isinstance(what, Ask):
            for event in (what, *self._late(world, what)):
                yield (
                    f"g{index} hears {_short(event)}",
                    lambda e=event: self._hear(_without(world, message), index, e, tenure),
                )
            return
        kept = 0
        if isinstance(what.question, RecoverLedger):
            kept = len(self._ledger(world, what.question.ledger_id).in_flight)
        for count in range(kept + 1):
            label = f"g{index} asks {_short(what.question)}" + (f", {count} kept" if kept else "")
            yield (
                label,
                lambda n=count: self._done(_without(world, message), index, tenure, what, n),
            )

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

    def _take_over(self, world: World, index: int) -> World:
        hand = world.hands[index]
        machine = Takeover(self._row(world), creates=True, finish=_as_it_is)
        hand = hand._replace(machine=self._number(machine), takeovers=hand.takeovers + 1)
        return self._hear(_with_hand(world, index, hand), index, Begin())

    def _hear(self, world: World, index: int, event: Event, tenure: int = -1) -> World:
        """A gateway's machine takes a step."""
        hand = world.hands[index]
        if hand.machine < 0 or (tenure >= 0 and tenure != hand.takeovers):
            return world  # what was asked in an earlier tenure: nobody is there who hears it
        after, effects = self._step(hand.machine, event)
        world = _with_hand(world, index, hand._replace(machine=after))
        for effect in effects:
            world = self._perform(world, index, effect)
        return world

    def _step(self, machine: int, event: Event) -> tuple[int, tuple[Any, ...]]:
        """The real step, once for each machine state and event."""
        known = self._steps.get((machine, event))
        if known is None:
            copy = clone(self.machines.values[machine])
            effects = tuple(copy.step(event, NOW))
            if isinstance(copy, Owner):
                copy.check()
            made = [
                self._number(Owner(effect.log, clone(copy.producers), NOW, settle_s=1.0))
                for effect in effects
                if isinstance(effect, TakeoverDone) and isinstance(effect.log, LogMetadata)
            ]
            known = self._steps[machine, event] = (made or [self._number(copy)])[0], effects
        return known

    def _number(self, machine: Any) -> int:
        return self.machines.number(machine, snapshot(machine))

    def _gone(self, world: World, index: int, hand: Hand) -> World:
        """A gateway without its machine: what it has changed may still arrive, and nothing else matters."""
        kept = frozenset(
            number
            for number in world.flight
            if (message := self.messages.values[number])[0] != index
            or (isinstance(message[2], Ask) and isinstance(message[2].question, _CHANGES))
        )
        return _with_hand(world, index, hand)._replace(flight=kept)

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

    def _with_message(self, world: World, index: int, what: Any) -> World:
        if world.hands[index].machine < 0:
            return world  # nobody is there who hears it
        message = self.messages.number((index, world.hands[index].takeovers, what))
        return world._replace(flight=world.flight | {message})

    def _perform(self, world: World, index: int, effect: Any) -> World:
        hand = world.hands[index]
        match effect:
            case Ask():
                return self._with_message(world, index, effect)
            case Submit(ledger_id, first, payloads):
                return self._submit(world, index, ledger_id, first, payloads)
            case Resolve(request, answer):
                return self._resolve(world, request, answer)
            case Settled(again):
                hand = hand._replace(machine=-1, again=again)
                if hand.takeovers >= self.scope.takeovers:
                    world = _refused(world, again)
                    hand = hand._replace(again=())
                return self._gone(world, index, hand)
            case TakeoverDone(log):
                if not isinstance(log, LogMetadata):
                    world = _refused(world, hand.again)
                    return self._gone(world, index, hand._replace(machine=-1, again=()))
                world = _with_hand(world, index, hand._replace(again=()))
                if hand.again:
                    world = self._hear(world, index, AppendsAsked(hand.again, are_again=True))
                return world
            case _:
                return world

    def _resolve(self, world: World, request: str, answer: Any) -> World:
        if isinstance(answer, LogAppended):
            return world._replace(
                acked=world.acked | {(request, replace(answer, is_duplicate=False))}
            )
        if request == PUBLISH and isinstance(answer, Transaction) and not world.is_committed:
            raise Broken("rule 28: a commit is acknowledged that was not done")
        if answer is NOT_OWNER:
            # Whoever asked asks again, whoever owns the log by then.
            return world._replace(sent=tuple((n, c - (n == request)) for n, c in world.sent))
        return world

    # --- ledgers ---------------------------------------------------------------------------------

    def _submit(
        self, world: World, index: int, ledger_id: int, first: int, payloads: tuple[bytes, ...]
    ) -> World:
        ledger = self._ledger(world, ledger_id)
        if ledger.is_closed:
            return self._with_message(world, index, SubmitFailed(ledger_id, FENCED))
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

    def _done(self, world: World, index: int, tenure: int, ask: Ask, kept: int) -> World:
        """A question arrives and is done; its answer is on its way, or is there at once where nothing
        that happens meanwhile could change what it means.
        """
        world, value = self._answer(world, index, ask.question, kept)
        event = Answered(ask.number, value)
        if isinstance(ask.question, ReadLog | SwapLog | Commit | RecoverLedger | CloseLedger):
            message = self.messages.number((index, tenure, event))
            return world._replace(flight=world.flight | {message})
        return self._hear(world, index, event, tenure)

    def _answer(self, world: World, index: int, question: Any, kept: int) -> tuple[World, Any]:
        match question:
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
                world = self._with_ledger(world, number, Ledger(index))
                return world, _row_of(number, Ledger(index))
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
        hand = world.hands[index]._replace(machine=-1, again=())
        return self._gone(world, index, hand)._replace(kills=world.kills + 1)

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


def _as_it_is(row: LogMetadata) -> LogMetadata:
    return row


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


def _refused(world: World, again: tuple[tuple[Any, Append], ...]) -> World:
    """Who waited is told that certainly nothing was done."""
    plain = {name for name, call in again if call.producer is None}
    return world._replace(refused=world.refused | plain)


def _without(world: World, message: int) -> World:
    return world._replace(flight=world.flight - {message})


def _with_hand(world: World, index: int, hand: Hand) -> World:
    return world._replace(hands=(*world.hands[:index], hand, *world.hands[index + 1 :]))


def _row_of(ledger_id: int, ledger: Ledger) -> LedgerMetadata:
    row = LedgerMetadata(ledger_id, QUORUM, DigestKind.CRC32C, (Fragment(0, ("b1@1",)),), log="log")
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
