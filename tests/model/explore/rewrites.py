"""Search of everything that can happen to a log while its sealed ledgers are rewritten: rules 27c to 27f.

One gateway owns the log: it appends, rolls, truncates and deletes. Rewriters and the sweep run the code that ships
(`rewrite_work.py`), at other processes: each may stall at any step while others go on, or die. A change that a rewriter asks
for may come late, or its answer may be lost. A fork may be made, and deleted.

A process hears an answer at once, except to a change of the row: it does nothing in between. What never changes is read as
soon as it is needed. `rewrite_judge.py` judges each transition.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple
from unittest import mock

from quorumlog.errors import (
    EntryUnavailable,
    InvalidRequest,
    MetadataUnavailable,
    OwnedByLog,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from quorumlog.protocol.changes import rewritten_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, compaction, ledgers_of
from quorumlog.protocol.log.messages import (
    Append,
    AppendsAsked,
    BatchesRead,
    CloseLedger,
    CreateLedger,
    ReadBatches,
    ReadLedger,
    ReadLog,
    RowTaken,
    SwapLog,
    WriteBatches,
)
from quorumlog.protocol.metadata import LedgerMetadata
from tests.model.explore.log_parts import FENCED, GONE, NO_LOG, LogParts, new_row
from tests.model.explore.log_world import GATEWAYS, QUORUM, Hand, Ledger, World, ledger_row
from tests.model.explore.logs import TRUNCATE, LogExplorer, Transition
from tests.model.explore.parts import Broken, Interned
from tests.model.explore.rewrite_judge import KEPT_S, RewriteJudge
from tests.model.explore.rewrite_work import EARLY_MS, FIXED, SWEEP, Process, Start
from tests.model.explore.scope import RewriteScope
from tests.model.explore.search import FOREVER, Result, Space, search

IDLE: Final = -1
OVER: Final = -2
"""In place of a process: it has not begun, or has ended."""

UNKNOWN: Final = MetadataUnavailable()
REFUSED: Final = InvalidRequest()
NAMED: Final = OwnedByLog()
UNKEPT: Final = EntryUnavailable()


class More(NamedTuple):
    """What a world has for rewrites, by numbers of interned values."""

    processes: tuple[int, ...]
    places: int
    """What the database says of ledgers with a place: (id, first offset, lineage) each."""
    history: int
    fork: int = IDLE
    placed: frozenset[int] = frozenset()
    """Ledgers that have replaced others, and whose places members keep."""
    told: frozenset[int] = frozenset()
    """Ledgers whose members know that they are deleted."""
    late: bool = False
    asked: frozenset[int] = frozenset()
    """Rewriters whose change is done, and which have not heard that."""
    flying: frozenset[int] = frozenset()
    """Rows that were asked for, and whose askers no longer wait."""
    lost: int = 0
    deaths: int = 0


def record_of(name: str) -> Record:
    """A record by its name: "a1" has the key a, ".1" none; "a-" is a tombstone; "a1~" has a time to live."""
    key = None if name[0] == "." else name[:1].encode()
    gone = "-" in name
    value = b"" if gone else name.encode()
    return Record(value, key, ttl_s=KEPT_S * ("~" in name), is_tombstone=gone)


class RewriteParts(LogParts):
    """What serves the machines and the processes."""

    scope: RewriteScope
    judge: RewriteJudge

    def __init__(self, scope: RewriteScope) -> None:
        super().__init__(scope)
        self.judge = RewriteJudge(scope, self.rows, self.ledgers)
        self.processes = Interned()
        self._after: dict[tuple[int, Any, bool], int] = {}

    def start(self) -> World:
        """The log has sealed ledgers, and no owner."""
        ledgers, items, at = [-1], [], 0
        for ledger_id, batches in enumerate(self.scope.sealed, 2):
            entries, before = [], 0
            for names in batches:
                data = batch.encode([record_of(name) for name in names])
                entries.append(batch.placed(data, append_time_ms=5_000, records_before=before))
                before += len(names)
            ledger = Ledger((0, 0), is_closed=True, entries=tuple(entries))
            ledgers.append(self.ledgers.number(ledger, ledger))
            time_ms = 7_000 if ledger_id == self.scope.published else 0
            item = LogItem(ledger_id, at, at + before - 1, bytes=10, sealed_ms=1)
            clean_ms = EARLY_MS * (ledger_id < 2 + self.scope.clean)
            items.append(replace(item, published_ms=time_ms, compacted_ms=clean_ms))
            at += before
        policy = "compact" if self.scope.compacts else "delete"
        settings = LogSettings(
            QUORUM, roll_bytes=0, cleanup_policy=policy, delete_retention_s=KEPT_S
        )
        row = replace(new_row(1, "0"), settings=settings, items=tuple(items), next_offset=None)
        places = tuple((n, row.items[n - 2].first_offset, one) for n, one in self._lineages(row))
        more = More(
            (IDLE,) * (len(self.scope.work) + 1),
            self.judge.places.number(places, places),
            self.judge.histories.number((), {}),
        )
        hands = tuple(Hand(self.new_machine((index, 0))) for index in range(GATEWAYS))
        return World(hands, tuple(ledgers), self.rows.number(row, row), more=more)

    def _lineages(self, row: LogMetadata) -> Any:
        return sorted(row.lineages({item.ledger_id for item in row.items}).items())

    def noted(self, world: World) -> World:
        """The world with the records that are in the log for the first time."""
        if world.is_deleted:
            return world
        known = self.judge.history(world)
        new = {
            (world.generation, at): record
            for at, (record, _) in self.judge.found(world, self.row(world)).items()
            if (world.generation, at) not in known
        }
        end = max((at for g, at in known if g == world.generation), default=-1)
        if any(at < end for _, at in new):
            raise Broken(f"rule 27d: {new} come back, or offsets are given twice")
        if not new:
            return world
        history = {**known, **new}
        number = self.judge.histories.number(tuple(history.items()), history)
        return world._replace(more=world.more._replace(history=number))

    # --- rows ----------------------------------------------------------------------------------------

    def named(self, world: World) -> set[int]:
        """The ledgers that the log or its fork names."""
        return {n for row in self.judge.named(world) for n in ledgers_of(row.items)}

    def places(self, world: World) -> dict[int, tuple[int, Any]]:
        """First offsets and lineages that the database has, by ledger."""
        return {n: (first, it) for n, first, it in self.judge.places.values[world.more.places]}

    def _swap(self, world: World, row: LogMetadata, check: Any) -> tuple[World, Any]:
        """Compare-and-swap by anybody; ledgers get their places."""
        current = self.row(world)
        after, value = super()._swap(world, row, check)
        if not isinstance(value, LogMetadata):
            return after, value
        places = self.places(world)
        own = {i.ledger_id: i.first_offset for i in value.own if i.first_offset is not None}
        new = {n: first for n, first in own.items() if n not in places}
        replaced = {
            by: tuple(
                each
                for item in items
                for each in (
                    *places[item.ledger_id][1].replaced,
                    (item.ledger_id, item.first_offset),
                )
            )
            for by, items in rewritten_by(current, value).items()
        }
        lineages = value.lineages(new, replaced)
        places |= {n: (first, lineages[n]) for n, first in new.items()}
        key = tuple((n, *place) for n, place in sorted(places.items()))
        number = self.judge.places.number(key, key)
        return after._replace(more=after.more._replace(places=number)), value

    def _with_stored(self, world: World, items: Any) -> World:
        del items  # the history has them
        return world

    def swap(self, world: World, row: LogMetadata) -> tuple[World, Any]:
        """A rewriter's compare-and-swap. The database refuses to name ledgers that are deleted or open."""
        if world.is_deleted:
            return world, NO_LOG
        current = self.row(world)
        for ledger_id in ledgers_of(row.items) - ledgers_of(current.items):
            if row.version != current.version:
                break
            if world.ledgers[ledger_id - 1] < 0 or not self.ledger(world, ledger_id).is_closed:
                return world, REFUSED
        return self._swap(world, row, lambda _row: None)

    def _delete(self, world: World, ledger_id: int) -> World:
        """Rules 22 and 27a: a ledger is deleted unless the log or its fork names it."""
        if ledger_id in self.named(world):
            return world
        ledgers = (*world.ledgers[: ledger_id - 1], -1, *world.ledgers[ledger_id:])
        return world._replace(ledgers=ledgers)

    def _delete_log(self, world: World, row: LogMetadata) -> tuple[World, Any]:
        """What others have replaced goes with the log, too."""
        world, value = super()._delete_log(world, row)
        if value is None:
            for ledger_id in self.places(world):
                if world.ledgers[ledger_id - 1] >= 0 and self.ledger(world, ledger_id).is_closed:
                    world = self._delete(world, ledger_id)
        return world, value

    def orphans(self, world: World) -> list[int]:
        """What the sweep finds: ledgers that nobody names. Those of owners that never had a place are not searched here."""
        named, places = self.named(world), self.places(world)
        return [
            ledger_id
            for ledger_id, number in enumerate(world.ledgers, 1)
            if number >= 0 and ledger_id not in named
            if ledger_id in places or self.ledger(world, ledger_id).owner[0] < 0
        ]

    # --- processes -----------------------------------------------------------------------------------

    def begun(self, start: Start) -> int:
        """A process that has just begun."""
        process = Process.begun(start)
        return self.processes.number((start, ()), process)

    def after(self, process: int, answer: Any, *, late: bool) -> int:
        """A process after an answer, run once for each."""
        known = self._after.get((process, answer, late))
        if known is None:
            before: Process = self.processes.values[process]
            found = before.after(answer, late=late)
            known = self.processes.number((found.start, found.answers), found)
            self._after[process, answer, late] = known
        return known

    def row_of(self, world: World, ledger_id: int) -> LedgerMetadata:
        """A ledger's metadata, with its place."""
        first, lineage = self.places(world).get(ledger_id, (None, None))
        row = ledger_row(ledger_id, self.ledger(world, ledger_id))
        return replace(row, first_offset=first, lineage=lineage)

    def served(self, world: World, slot: int, question: Any) -> tuple[World, Any]:
        """What a process is answered."""
        match question:
            case ReadLog():
                return world, NO_LOG if world.is_deleted else self.row(world)
            case CreateLedger():
                number, ledger = len(world.ledgers) + 1, Ledger((IDLE - slot, 0))
                return self._with_ledger(world, number, ledger), ledger_row(number, ledger)
            case ("existing", ids):
                found = [self.row_of(world, n) for n in ids if world.ledgers[n - 1] >= 0]
                return world, tuple(found)
            case ("get", _):
                # The version means nothing to who only deletes ledgers.
                return world, NO_LOG if world.is_deleted else replace(self.row(world), version=1)
            case ("shared_among", ids):
                fork = [row for row in self.judge.named(world) if row.forked_at]
                return world, frozenset(ids) & ledgers_of(i for row in fork for i in row.items)
            case ("notify_deleted", rows, *_):
                told = world.more.told | {row.ledger_id for row in rows}
                return world._replace(more=world.more._replace(told=told)), None
            case (str(), int(ledger_id)) if world.ledgers[ledger_id - 1] < 0:
                return world, GONE
            case ("recover", ledger_id):
                closed = self.ledger(world, ledger_id)._replace(is_closed=True)
                world = self._with_ledger(world, ledger_id, closed)
                return world, self.row_of(world, ledger_id)
            case ("keep_place", ledger_id):
                if ledger_id not in self.places(world):
                    return world, UNKEPT
                placed = world.more.placed | {ledger_id}
                return world._replace(more=world.more._replace(placed=placed)), None
            case ("delete_unnamed", ledger_id):
                if ledger_id in self.named(world):
                    return world, NAMED
                return self._delete(world, ledger_id), None
            case _:
                return self._of_ledger(world, question)

    def _of_ledger(self, world: World, question: Any) -> tuple[World, Any]:
        if world.ledgers[question.ledger_id - 1] < 0:
            return world, GONE
        ledger = self.ledger(world, question.ledger_id)
        match question:
            case ReadLedger():
                return world, self.row_of(world, question.ledger_id)
            case ReadBatches(_, first, last):
                found = tuple(enumerate(ledger.entries[first : last + 1], first))
                return world, BatchesRead(found, first + len(found))
            case WriteBatches() | CloseLedger() if ledger.is_closed:
                return world, FENCED
            case WriteBatches(_, first, payloads):
                if first != len(ledger.entries):
                    raise Broken(f"rule 27c: entry {first} is written behind {len(ledger.entries)}")
                ledger = ledger._replace(entries=ledger.entries + payloads)
                return self._with_ledger(world, question.ledger_id, ledger), None
            case CloseLedger():
                ledger = ledger._replace(is_closed=True)
                world = self._with_ledger(world, question.ledger_id, ledger)
                return world, ledger_row(question.ledger_id, ledger)
            case _:
                raise Broken(f"nobody answers {question}")


class RewriteExplorer(LogExplorer):
    """One scope's search."""

    scope: RewriteScope
    _parts: RewriteParts
    _judge: RewriteJudge

    def __init__(self, scope: RewriteScope) -> None:
        super().__init__(scope)
        self._parts = RewriteParts(scope)
        self._judge = self._parts.judge
        self._swept: set[Any] = set()

    def run(self, until_s: float = FOREVER) -> Result:
        """Search the scope to its end, to the first violation, or until a time (`search`)."""
        limits: dict[str, Any] = {
            "KEYS_MAX": self.scope.keys_max,
            "GROUP_BYTES_MAX": self.scope.group_bytes,
        }
        with mock.patch.multiple(compaction, **limits):
            return search(self.scope, Space(self._owned(), self.next), until_s)

    def _owned(self) -> World:
        """The first gateway has taken the log over, and appended to it."""
        world = self._at_rest(self._force(self._parts.start(), 0))
        for name in self.scope.appended:
            world = self._at_rest(self._send(world, 0, name))._replace(sent=(), acked=frozenset())
        return world.with_hand(0, world.hands[0]._replace(forces=0))

    def _at_rest(self, world: World) -> World:
        """The world once the owner's work is done, in the first order that there is."""
        quiet = RewriteScope("")
        self.scope, scope = quiet, self.scope
        while (following := next(super()._possible(world), None)) is not None:
            world = following[1]()
        self.scope = scope
        return self._parts.noted(world)

    # --- transitions -------------------------------------------------------------------------------

    def _possible(self, world: World) -> Iterator[Transition]:
        for label, step in self._all(world):
            yield label, partial(self._noted, step)

    def _noted(self, step: Any) -> World:
        return self._parts.noted(step())

    def _all(self, world: World) -> Iterator[Transition]:
        more: More = world.more
        for label, step in super()._possible(world):
            if more.fork < 0 or label != "the log is created again":
                yield label, step
        yield from self._forks(world)
        for slot, number in enumerate(more.processes):
            if number == IDLE:
                yield from self._beginnings(world, slot)
            elif number != OVER:
                yield from self._moves(world, slot, number)
        for number in more.flying:
            late = _with(world, flying=more.flying - {number})
            row = self._parts.rows.values[number]
            yield "a change comes late", partial(self._late_swap, late, row)
        if self.scope.ages and not more.late:
            yield "time passes", partial(_with, world, late=True)

    def _late_swap(self, world: World, row: LogMetadata) -> World:
        return self._parts.swap(world, row)[0]

    def _requests(self, world: World, index: int) -> Iterator[Transition]:
        if index == 0:  # the other gateway only takes the log over
            yield from super()._requests(world, index)

    def _send(self, world: World, index: int, name: str) -> World:
        if world.is_deleted:
            world = world._replace(absent=world.absent | {name})
        asked = AppendsAsked(((name, Append.of((record_of(name),))),))
        return self._hear(world.counted(name), index, asked)

    def _truncations(self, world: World, index: int) -> Iterator[Transition]:
        """The log releases its first ledger."""
        del index
        if world.is_deleted:
            return
        row = self._parts.row(world)
        end = row.items[0].last_offset if row.items else None
        if end is None or row.truncated(end + 1) == row:
            return
        yield "the first ledger is released", partial(self._truncate, world, row.truncated(end + 1))

    def _truncate(self, world: World, row: LogMetadata) -> World:
        world, now = self._parts.swap(world.counted(TRUNCATE), row)
        return self._parts.with_message(world, (0, world.hands[0].life), RowTaken(now))

    def _forks(self, world: World) -> Iterator[Transition]:
        at, more = self.scope.fork_at, world.more
        if more.fork >= 0:
            yield "the fork is deleted", partial(_with, world, fork=OVER)
        if not at or more.fork != IDLE or world.is_deleted:
            return
        row = self._parts.row(world)
        if row.first_offset <= at and row.is_sealed_below(at):
            wanted = LogMetadata("fork", row.settings, next_offset=0, created_at="fork")
            fork = row.forked(wanted, at)
            fork.check()
            yield "a fork is made", partial(_with, world, fork=self._parts.rows.number(fork, fork))

    def _beginnings(self, world: World, slot: int) -> Iterator[Transition]:
        """A rewriter reads the row, and begins; or the sweep takes a ledger."""
        parts, late = self._parts, world.more.late
        if slot == len(self.scope.work):
            if world.count(SWEEP) < self.scope.sweeps:
                for found in parts.orphans(world):
                    start = parts.begun(Start(SWEEP, None, ids=(found,)))
                    swept = partial(self._goes_on, world.counted(SWEEP), slot, start)
                    yield f"the sweep takes {found}", swept
        elif not world.is_deleted:
            kind, *ids = self.scope.work[slot]
            number = parts.begun(Start(kind, parts.row(world), late, tuple(ids)))
            if parts.processes.values[number].question is not None:
                yield f"r{slot} begins to {kind}", partial(self._goes_on, world, slot, number)

    def _moves(self, world: World, slot: int, number: int) -> Iterator[Transition]:
        """What a process does next, and what befalls it."""
        parts, more = self._parts, world.more
        question = parts.processes.values[number].question
        who = f"r{slot}" if slot < len(self.scope.work) else "the sweep"
        less = _with(world, lost=more.lost + 1)
        may_lose = more.lost < self.scope.lost
        if isinstance(question, SwapLog):
            flying = more.flying | {parts.rows.number(question.log, question.log)}
            if slot in more.asked:
                yield f"{who} hears of its change", partial(self._heard, world, slot, number)
                if may_lose:
                    lost = partial(self._answered, less, slot, number, UNKNOWN)
                    yield f"{who} hears nothing of its change", lost
            else:
                yield f"{who} asks for a change", partial(self._asks, world, slot, number)
                if may_lose:
                    lost = partial(
                        self._answered, _with(less, flying=flying), slot, number, UNKNOWN
                    )
                    yield f"{who} hears nothing, and its change is under way", lost
        else:
            flying = more.flying
            served = partial(self._served, world, slot, number, question)
            yield f"{who} asks {_short(question)}", served
            if may_lose and who != "the sweep":
                failed = partial(self._answered, less, slot, number, UNKNOWN)
                yield f"{who} fails at {_short(question)}", failed
        if more.deaths < self.scope.deaths and who != "the sweep":
            is_done = slot in more.asked
            dead = _with(
                world,
                deaths=more.deaths + 1,
                flying=more.flying if is_done else flying,
                asked=more.asked - {slot},
            )
            yield f"{who} dies", partial(_at, dead, slot, OVER)

    def _asks(self, world: World, slot: int, number: int) -> World:
        """A rewriter's change arrives. If it is done, the answer takes its time."""
        question = self._parts.processes.values[number].question
        after, answer = self._parts.swap(world, question.log)
        if isinstance(answer, LogMetadata):
            return _with(after, asked=world.more.asked | {slot})
        return self._answered(after, slot, number, answer)

    def _heard(self, world: World, slot: int, number: int) -> World:
        """A rewriter hears that its change was done, with the row as it is by then. So does its gateway's owner."""
        row = NO_LOG if world.is_deleted else self._parts.row(world)
        if slot == 0 and isinstance(row, LogMetadata):
            world = self._parts.with_message(world, (0, world.hands[0].life), RowTaken(row))
        return self._answered(world, slot, number, row)

    def _served(self, world: World, slot: int, number: int, question: Any) -> World:
        after, answer = self._parts.served(world, slot, question)
        return self._answered(after, slot, number, answer)

    def _answered(self, world: World, slot: int, number: int, answer: Any) -> World:
        world = _with(world, asked=world.more.asked - {slot})
        after = self._parts.after(number, answer, late=world.more.late)
        return self._goes_on(world, slot, after)

    def _goes_on(self, world: World, slot: int, number: int) -> World:
        """What never changes is read at once."""
        while True:
            process: Process = self._parts.processes.values[number]
            if not isinstance(process.question, FIXED):
                break
            _, answer = self._parts.served(world, slot, process.question)
            number = self._parts.after(number, answer, late=world.more.late)
        ended = IDLE if slot == len(self.scope.work) else OVER
        return _at(world, slot, ended if process.question is None else number)

    # --- at rest -----------------------------------------------------------------------------------

    def _check_answered(self, world: World) -> None:
        """Rule 22: where nothing is under way any more, the sweep finds what nobody names, and deletes it."""
        super()._check_answered(world)
        more: More = world.more
        if world.flight or more.flying or any(number >= 0 for number in more.processes):
            return
        key = world.row, world.ledgers, more.fork, more.placed, more.told, world.is_deleted
        if key in self._swept:
            return
        for ledger_id in self._parts.orphans(world):
            world = self._sweep(world, ledger_id)
        if left := self._parts.orphans(world):
            raise Broken(f"rule 22: the sweep does not delete {left}, which nobody names")
        self._swept.add(key)

    def _sweep(self, world: World, ledger_id: int) -> World:
        slot = len(self.scope.work)
        swept = self._goes_on(world, slot, self._parts.begun(Start(SWEEP, None, ids=(ledger_id,))))
        while (number := swept.more.processes[slot]) >= 0:
            question = self._parts.processes.values[number].question
            swept = self._served(swept, slot, number, question)
        return swept


def _with(world: World, **changes: Any) -> World:
    return world._replace(more=world.more._replace(**changes))


def _at(world: World, slot: int, number: int) -> World:
    processes = world.more.processes
    return _with(world, processes=(*processes[:slot], number, *processes[slot + 1 :]))


def _short(question: Any) -> str:
    if isinstance(question, tuple):
        return f"{question[0]} {question[1] if isinstance(question[1], int) else ''}"
    return f"{type(question).__name__}({getattr(question, 'ledger_id', '')})"
