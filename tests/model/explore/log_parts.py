"""The parts of an explored log: its machines, and the ledgers and rows that these ask for.

What is asked is done at once when it arrives; a row is changed before the answer comes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from quorumlog.errors import (
    LedgerFenced,
    NoSuchLedger,
    NoSuchLog,
    Overloaded,
    TransactionAborted,
    UnexpectedEntryId,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from quorumlog.protocol.changes import check_log, published_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    BatchesRead,
    CloseLedger,
    Commit,
    Committed,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    DeleteLog,
    EntriesDurable,
    Event,
    IsAlive,
    MeasureLedger,
    ReadBatches,
    ReadLedger,
    ReadLog,
    ReadTransaction,
    RecoverLedger,
    RowChanged,
    Submit,
    SubmitFailed,
    SubmitRefused,
    SwapLog,
    Wait,
)
from quorumlog.protocol.log.route import LogRoute
from quorumlog.protocol.transaction import (
    Sealed,
    Transaction,
    TransactionLedger,
    TransactionState,
)
from tests.model.explore.fields import clone, snapshot
from tests.model.explore.log_judge import LogJudge, check_none_is_forgotten
from tests.model.explore.log_world import (
    GATEWAYS,
    PUBLISHED,
    QUORUM,
    Hand,
    Ledger,
    Life,
    World,
    end_of,
    ledger_row,
    life_of,
    writer_of,
)
from tests.model.explore.parts import Broken, Interned
from tests.model.explore.scope import LogScope

NOW: Final = Now(0, 0)
FENCED: Final = LedgerFenced()
FULL: Final = Overloaded()
BEHIND: Final = UnexpectedEntryId()
GONE: Final = NoSuchLedger()
NO_LOG: Final = NoSuchLog()
ABORTED: Final = TransactionAborted()


class LogParts:
    """The machines of the gateways, by number, and what serves them."""

    def __init__(self, scope: LogScope) -> None:
        self.scope = scope
        self.machines, self.rows, self.ledgers, self.messages = (Interned() for _ in range(4))
        self.judge = LogJudge(scope, self.rows, self.ledgers)
        self._steps: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}

    def start(self) -> World:
        """Nothing has happened yet: the log was just created."""
        record = batch.encode((Record(b"t"),))
        published = Ledger((-1, 0), is_closed=True, entries=(record,))
        return World(
            tuple(Hand(self.new_machine((index, 0))) for index in range(GATEWAYS)),
            (self.ledgers.number(published, published),),
            self._number(new_row(version=1)),
        )

    # --- machines ----------------------------------------------------------------------------------

    def new_machine(self, life: Life) -> int:
        """The machine of a process that has just begun."""
        return self._machine(LogRoute("log", writer_of(life).id, settle_s=1.0))

    def _machine(self, machine: LogRoute) -> int:
        return self.machines.number(snapshot(machine), machine)

    def step(self, machine: int, event: Event) -> tuple[int, tuple[Any, ...]]:
        """The real step, once for each machine state and event."""
        known = self._steps.get((machine, event))
        if known is None:
            copy = clone(self.machines.values[machine])
            effects = tuple(copy.step(event, NOW))
            copy.check()
            check_none_is_forgotten(self.machines.values[machine], copy, event, effects)
            known = self._steps[machine, event] = self._machine(copy), effects
        return known

    def with_message(self, world: World, life: Life, what: Any) -> World:
        """The world with a message on its way, unless nobody is there who hears it."""
        if not world.lives(life):
            return world
        number = self.messages.number((life, what), (life, what))
        return world._replace(flight=world.flight | {number})

    # --- ledgers -----------------------------------------------------------------------------------

    def ledger(self, world: World, ledger_id: int) -> Ledger:
        """A ledger that is not deleted."""
        ledger: Ledger = self.ledgers.values[world.ledgers[ledger_id - 1]]
        return ledger

    def _with_ledger(self, world: World, ledger_id: int, ledger: Ledger) -> World:
        number = self.ledgers.number(ledger, ledger)
        ledgers = (*world.ledgers[: ledger_id - 1], number, *world.ledgers[ledger_id:])
        return world._replace(ledgers=ledgers)

    def submit(
        self, world: World, asked: Submit, *, is_behind: bool
    ) -> tuple[World, SubmitRefused | None]:
        """Rules 23 and 25: a writer begins to append entries; and what its ledger refuses. `is_behind`: it refused
        earlier entries, and the writer has not heard of that.
        """
        ledger_id, first, payloads = asked.ledger_id, asked.first_entry, asked.payloads
        if world.ledgers[ledger_id - 1] < 0 or self.ledger(world, ledger_id).is_closed:
            return world, SubmitRefused(ledger_id, first, len(payloads), FENCED, asked.number)
        self._check_writable(world, ledger_id)
        ledger = self.ledger(world, ledger_id)
        next_entry = len(ledger.entries) + len(ledger.in_flight)
        if first > next_entry and is_behind:
            return world, SubmitRefused(ledger_id, first, len(payloads), BEHIND, asked.number)
        if first != next_entry:
            raise Broken(f"rule 25: entry {first} of ledger {ledger_id} is given twice, or skipped")
        for group in [(one,) for one in payloads] if asked.one_by_one else [payloads]:
            count, room = len(group), world.room
            if room is not None and room < count:
                world = world._replace(room=None if count == 1 else room)
                return world, SubmitRefused(ledger_id, first, count, FULL, asked.number)
            ledger = ledger._replace(in_flight=ledger.in_flight + group)
            world = self._with_ledger(world, ledger_id, ledger)
            world = world._replace(room=None if room is None else room - count)
            first += count
        return world, None

    def _check_writable(self, world: World, ledger_id: int) -> None:
        row = self.row(world)
        item = None if world.is_deleted else row.item_of(ledger_id)
        if item is None and self.scope.losses:
            return  # the writer does not know that the database went back
        if item is None or item.first_offset is None:
            raise Broken(
                f"rule 23: ledger {ledger_id} is written before the row says where it begins"
            )
        for other in row.items[: row.items.index(item)]:
            if not self.ledger(world, other.ledger_id).is_closed:
                raise Broken(f"rule 23: {ledger_id} is written, and {other.ledger_id} is open")

    def confirm(self, world: World, ledger_id: int) -> World:
        """The next entry is on its ack quorum; its writer will hear of it."""
        ledger = self.ledger(world, ledger_id)
        durable = EntriesDurable(ledger_id, len(ledger.entries))
        entries = (*ledger.entries, ledger.in_flight[0])
        confirmed = ledger._replace(entries=entries, in_flight=ledger.in_flight[1:])
        world = self._with_ledger(world, ledger_id, confirmed)
        return self.with_message(world, ledger.owner, durable)

    def _end(self, world: World, ledger_id: int, kept: int) -> World:
        """Close a ledger with some of what was in flight; its writer hears that it is fenced."""
        ledger = self.ledger(world, ledger_id)
        entries = ledger.entries + ledger.in_flight[:kept]
        if ledger.in_flight:
            world = self.with_message(world, ledger.owner, SubmitFailed(ledger_id, FENCED))
        closed = Ledger(ledger.owner, is_closed=True, entries=entries)
        return self._with_ledger(world, ledger_id, closed)

    def _delete(self, world: World, ledger_id: int) -> World:
        """Rule 22: a ledger is deleted unless the log names it."""
        if not world.is_deleted and self.row(world).item_of(ledger_id) is not None:
            return world
        ledgers = (*world.ledgers[: ledger_id - 1], -1, *world.ledgers[ledger_id:])
        return world._replace(ledgers=ledgers)

    # --- questions ---------------------------------------------------------------------------------

    def answer(self, world: World, life: Life, question: Any, kept: int) -> tuple[World, Any]:
        """What a process is answered; `kept` is how much of what was in flight a recovery finds."""
        match question:
            case ReadLog() | SwapLog() | DeleteLog() | Commit() | ReadTransaction():
                return self._row_answer(world, question)
            case CreateLedger():
                ledger = Ledger(life)
                number = len(world.ledgers) + 1
                return self._with_ledger(world, number, ledger), ledger_row(number, ledger)
            case IsAlive(writer):
                return world, world.lives(life_of(writer))
            case CountBookies():
                return world, QUORUM.ensemble_size
            case Wait():
                return world, None
            case MeasureLedger(row):
                return self._ledger_answer(world, row.ledger_id, question, kept)
            case _:
                return self._ledger_answer(world, question.ledger_id, question, kept)

    def _ledger_answer(
        self, world: World, ledger_id: int, question: Any, kept: int
    ) -> tuple[World, Any]:
        if world.ledgers[ledger_id - 1] < 0:
            return world, GONE
        ledger = self.ledger(world, ledger_id)
        match question:
            case DeleteLedger():
                return self._delete(world, ledger_id), None
            case MeasureLedger():
                return world, end_of(ledger)
            case ReadBatches(_, first, last):
                found = tuple(enumerate(ledger.entries[first : last + 1], first))
                return world, BatchesRead(found, last + 1)
            case CloseLedger() if ledger.is_closed:
                return world, FENCED
            case CloseLedger():
                if ledger.in_flight:
                    raise Broken("rule 23: a ledger is closed while entries of it are in flight")
                world = self._end(world, ledger_id, 0)
            case RecoverLedger() if not ledger.is_closed:
                world = self._end(world, ledger_id, kept)
            case RecoverLedger() | ReadLedger():
                pass
            case _:
                raise Broken(f"nobody answers {question}")
        return world, ledger_row(ledger_id, self.ledger(world, ledger_id))

    # --- the row -----------------------------------------------------------------------------------

    def row(self, world: World) -> LogMetadata:
        """The log's row; the last one of a log that is deleted."""
        row: LogMetadata = self.rows.values[world.row]
        return row

    def _number(self, row: LogMetadata) -> int:
        return self.rows.number(row, row)

    def _row_answer(self, world: World, question: Any) -> tuple[World, Any]:
        match question:
            case ReadTransaction():
                return world, self._transaction(world)
            case Commit(_, ledgers, row):
                return self._commit(world, ledgers, row)
            case _ if world.is_deleted:
                return world, NO_LOG
            case SwapLog(row):
                return self._swap(world, row, lambda _row: None)
            case DeleteLog(row):
                return self._delete_log(world, row)
            case _:
                return world, self.row(world)

    def _swap(
        self, world: World, row: LogMetadata, check: Callable[[LogMetadata], object]
    ) -> tuple[World, Any]:
        """Compare-and-swap, if `check` lets the change of the current row pass."""
        current = self.row(world)
        if row.version != current.version:
            return world, RowChanged(current)
        check(current)
        row = replace(row, version=row.version + 1)
        row.check()
        check_log(current, row)
        if any(world.ledgers[item.ledger_id - 1] < 0 for item in row.items):
            raise Broken("rule 22: the row names a ledger that is deleted")
        dropped = [item for item in current.items if row.item_of(item.ledger_id) is None]
        world = self._with_stored(world, dropped)._replace(row=self._number(row))
        return world, row

    def _with_stored(self, world: World, items: Sequence[LogItem]) -> World:
        """Remember what the log held in ledgers that it stops naming."""
        stored = world.stored.union(*(self.judge.records_of(world, item) for item in items))
        return world._replace(stored=stored)

    def _delete_log(self, world: World, row: LogMetadata) -> tuple[World, Any]:
        """Rule 27: the name is free, and the log's ledgers are deleted, once its writer has ended."""
        current = self.row(world)
        if row.version != current.version:
            return world, RowChanged(current)
        if not all(self.ledger(world, item.ledger_id).is_closed for item in current.items):
            raise Broken("rule 27: the name is free, and a ledger of the log is open")
        sent = frozenset(name for name, _ in world.sent)
        world = self._with_stored(world, current.items)._replace(is_deleted=True, absent=sent)
        for item in current.items:
            world = self._delete(world, item.ledger_id)
        return world, None

    def may_lose(self, world: World) -> bool:
        """Whether the database may go back behind the log's last ledger. Once it has an entry, copies tell its place, and
        a rebuild names it again (rule 18f).
        """
        item = None if world.is_deleted else self.row(world).last_item
        if item is None or item.first_offset is None or item.last_offset is not None:
            return False
        return not self.ledger(world, item.ledger_id).entries

    def lost(self, world: World) -> World:
        """The log no longer names its last ledger."""
        row = self.row(world)
        row = replace(row, items=row.items[:-1], version=row.version + 1)
        return world._replace(row=self._number(row))

    def created(self, world: World) -> World:
        """The name is given again; versions go on."""
        row = new_row(version=self.row(world).version + 2, created_at="again")
        return world._replace(
            row=self._number(row), is_deleted=False, generation=world.generation + 1
        )

    def _commit(
        self, world: World, ledgers: tuple[Sealed, ...], row: LogMetadata | None
    ) -> tuple[World, Any]:
        transaction = self._transaction(world)
        if transaction.state is TransactionState.ABORTED:
            return world, ABORTED
        if world.is_committed or row is None:
            return world, Committed(transaction, None)
        world, value = self._swap(world, row, lambda now: published_by(now, row, ledgers))
        if isinstance(value, RowChanged):
            return world, value
        world = world._replace(is_committed=True)
        return world, Committed(self._transaction(world), value)

    def _transaction(self, world: World) -> Transaction:
        state = TransactionState.COMMITTED if world.is_committed else TransactionState.OPEN
        if not world.is_committed and (world.is_deleted or world.generation):
            state = TransactionState.ABORTED  # with the log that it was begun for
        return Transaction("t", "log", state=state, ledgers=(TransactionLedger(PUBLISHED),))


def new_row(version: int, created_at: str = "") -> LogMetadata:
    """The row of a log that was just created."""
    settings = LogSettings(QUORUM, roll_bytes=0)
    return LogMetadata("log", settings, version=version, next_offset=0, created_at=created_at)
