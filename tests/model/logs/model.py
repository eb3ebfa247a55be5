"""Gateways on a model of ledgers: what may happen to a log in any order, without sockets.

A model ledger is what the protocol promises: ids in order, an acknowledged entry stays, a fence ends
its writer, and a recovery keeps all that was acknowledged and any prefix of what was in flight.
Delays are short and drawn from the seed; on a virtual loop (`simulation.py`) so is all time.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol, TypeVar, cast

import orjson

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    EntryLost,
    EntryUnavailable,
    InvalidRequest,
    LedgerClosed,
    LedgerFenced,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchLog,
    Outcome,
    OwnedByLog,
    QuorumLogError,
    TransactionAborted,
    TransactionCommitted,
    WriterLost,
)
from quorumlog.net.gateway_clients import TransactionClient
from quorumlog.protocol.changes import check_log, check_unprotected, published_by
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import Expiry, LogItem, LogMetadata, ledgers_of
from quorumlog.protocol.log.messages import (
    Append,
    Committed,
    Consult,
    OwnerLost,
    Publish,
    RecordsAppended,
    RowChanged,
)
from quorumlog.protocol.metadata import (
    Deletion,
    DigestKind,
    Fragment,
    LedgerMetadata,
    State,
    Writer,
)
from quorumlog.protocol.once import Once
from quorumlog.protocol.record import Codec, Run, make
from quorumlog.protocol.transaction import (
    Sealed,
    Transaction,
    TransactionLedger,
    TransactionState,
)
from quorumlog.wire.bodies import BookieInfo, BookieList
from services.gateway.interface import (
    EntriesAppended,
    LacSource,
    LedgerOptions,
    LedgerView,
    ReadResult,
)
from services.gateway.logs.accesses import Verdict
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ownership import LogTimes
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.sweep import Sweep
from services.gateway.logs.transactions import Transactions
from services.gateway.logs.values import ReadRecord
from tests.support.waiting import turns

T = TypeVar("T")

ASK_S: Final = 0.5
"""How long a writer that stands still is asked for its LAC before the bookies are."""
ALIVE_S: Final = 0.1
"""How long it is asked whether it lives."""

EPOCH_MS: Final = 1_800_000_000_000
"""What the database's clock shows when virtual time begins."""
METADATA_S: Final = 0.5
"""How long a gateway that is cut off from metadata tries a request (3 s in the one that ships)."""
VERIFY_S: Final = 2.0
"""How long a writer that was told of a fence asks for the row before its appends end (10 s there)."""

TIMES = LogTimes(append_s=20.0, settle_s=5.0, probe_every_s=0.05, jitter_s=0.01, drain_s=5.0)


class Logs(dict[str, LogMetadata]):
    """The database's logs, which announce each change."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        super().__init__()
        self._announce = announce

    def __setitem__(self, name: str, row: LogMetadata) -> None:
        super().__setitem__(name, row)
        self._announce(name)

    def free(self, name: str) -> LogMetadata:
        row = self.pop(name)
        self._announce(name)
        return row


@dataclass(slots=True)
class Ledger:
    row: LedgerMetadata
    entries: list[bytes] = field(default_factory=list)
    """Acknowledged; once CLOSED, all there is."""
    in_flight: list[tuple[bytes, asyncio.Future[EntriesAppended]]] = field(default_factory=list)
    since_s: float = 0.0
    """When it was made, or its log let go of it; long ago where its transaction was ended."""
    told_offset: int | None = None
    """Where the ledger begins in its log, as far as its writer was told: bookies' copies say so (rule 18f)."""
    drops_at: float = float("inf")
    """When the bookies have given up what they know of it: a grace after its deletion."""


class Watch(Protocol):
    """Judges what happens in a cluster."""

    def submitted(self, ledger: Ledger) -> None:
        """A gateway begins to append to an open ledger."""
        ...

    def replaced(self, before: LogMetadata, now: LogMetadata) -> None:
        """A log's row was changed."""
        ...

    def violated(self, what: str) -> None:
        """Something happened that must never happen."""
        ...


class Cluster:
    """Bookies and metadata, and the gateways that share them."""

    forgets_deleted = False
    """Whether a bookie's memory of a deleted ledger, key and fence, goes with its entries: the next add
    defines the ledger anew and is acknowledged. So it was before rule 16a.
    """

    def __init__(self, seed: int, *, hitches: float = 0.0, lost_answers: float = 0.0) -> None:
        """`hitches`: how often a step takes seconds; `lost_answers`: how often the answer to a
        change comes late, by when others may have changed the row again.
        """
        self.random = random.Random(seed)
        self.hitches, self.lost_answers = hitches, lost_answers
        self.ahead_ms = 0
        """How far the database's clock has been put on."""
        self.watch: Watch | None = None
        self.ledgers: dict[int, Ledger] = {}
        self.deleted: dict[int, Ledger] = {}
        """With their ends, which stay what they were for ever."""
        self.collect_s = 0.0
        """The time until bookies drop a deleted ledger."""
        self.logs = Logs(self.announce)
        self.freed: dict[str, int] = {}
        """Names of logs that were deleted, with the version that the row has since."""
        self.places: dict[int, int] = {}
        """First offsets that rows of logs gave to ledgers."""
        self.let_go: dict[str, list[tuple[int, int]]] = {}
        """By log: the ledgers with records that truncations let go of, and their last offsets there."""
        self.shared_at: dict[int, float] = {}
        """When a gateway last found that a fork names a ledger which a log has let go of."""
        self.deleted_with: dict[str, set[int]] = {}
        """The ledgers that were deleted together with the last log of a name."""
        self.replaced_by: dict[int, int] = {}
        """By ledger, the one that a rewrite put in its place."""
        self.kept_places: set[int] = set()
        """Ledgers that have replaced others, where bookies hold copies of their places (rule 27c)."""
        self.told_deleted: set[int] = set()
        """Ledgers of whose deletion members hold copies (rule 18e)."""
        self.told_of_log: set[int] = set()
        """Ledgers whose members know that their log is deleted, and not they."""
        self.done: dict[str, str] = {}
        """The requests of clients that were carried out, by name, with what each asked for (rule 6a)."""
        self.wrong_tombstones: set[int] = set()
        """Ledgers that a log or an open transaction named when members were told of their deletion."""
        self.on_freed: Callable[[str, Gateway], None] = lambda _name, _gateway: None
        """Hears of a deletion before the one who asked for it."""
        self.on_let_go: Callable[[Gateway], None] = lambda _gateway: None
        """Hears of a truncation before the one who asked for it."""
        self.transactions: dict[str, Transaction] = {}
        self.app_versions: dict[str, int] = {}
        self.gateways: dict[str, Gateway] = {}
        self.names = itertools.count(1)
        self.numbers = itertools.count(1)

    def gateway(self) -> "Gateway":
        gateway = Gateway(self, f"g{next(self.names)}")
        self.gateways[gateway.writer.id] = gateway
        return gateway

    def announce(self, name: str) -> None:
        """Gateways that hear of changes hear that this log has changed."""
        for gateway in self.gateways.values():
            if gateway.unheard_until <= self.now():
                gateway.logs.rows.heard(name)
                gateway.logs.subscriptions.heard(name)

    async def delay(self) -> None:
        await turns(self.random.choice((0, 0, 1, 2, 5)))
        if self.random.random() < 0.1:
            await asyncio.sleep(self.random.random() * 0.002)
        if self.hitches and self.random.random() < self.hitches:
            await asyncio.sleep(self.random.random() * 3)

    def ledger(self, ledger_id: int) -> Ledger:
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(ledger_id=ledger_id)
        return self.ledgers[ledger_id]

    def is_late(self, once: Once | None) -> bool:
        """Whether a copy of a client's request was carried out before."""
        if once is None or once.token not in self.done:
            return False
        if self.done[once.token] != once.content:
            raise InvalidRequest("the name is another request's")
        return True

    def note_done(self, once: Once | None) -> None:
        """A client's request is carried out, in the transaction of its change."""
        if once is not None:
            self.done[once.token] = once.content

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger, which leaves a tombstone. A writer whose stream of changes is cut hears nothing."""
        self._check_replaced(ledger_id)
        ledger = self.deleted[ledger_id] = self.ledgers.pop(ledger_id)
        ledger.drops_at = self.now() + self.collect_s
        writer = ledger.row.writer
        if writer is not None and writer.id in self.gateways:
            self.gateways[writer.id].missed(ledger_id)

    def _check_replaced(self, ledger_id: int) -> None:
        """A ledger goes only once bookies know which one has its records, lest a rebuild miss that."""
        log = self.logs.get(self.ledgers[ledger_id].row.log or "")
        place = self.places.get(ledger_id)
        item = None if log is None or place is None else log.item_at(place)
        if item is None or ledger_id not in self.replaced_by or self.watch is None:
            return
        following = ledger_id
        while following in self.replaced_by:
            following = self.replaced_by[following]
            if following in self.deleted or following in self.kept_places:
                return
        self.watch.violated(
            f"rule 27c: ledger {ledger_id} is deleted, and nobody knows {item.ledger_id}"
        )

    def is_named(self, ledger_id: int) -> bool:
        """Whether a log names a ledger, or a transaction that may yet publish it."""
        named = (item for log in self.logs.values() for item in log.items)
        return any(ledger_id in {item.ledger_id, item.index} for item in named) or any(
            transaction.is_open and ledger_id in _ids(transaction)
            for transaction in self.transactions.values()
        )

    def abort(self, transaction_id: str) -> Transaction:
        found = self.transactions[transaction_id]
        if found.state is TransactionState.COMMITTED:
            raise TransactionCommitted
        if found.is_open:
            self.end(replace(found, state=TransactionState.ABORTED, ledgers=()), found)
        return self.transactions[transaction_id]

    def end(self, ended: Transaction, before: Transaction) -> None:
        self.transactions[ended.id] = ended
        for ledger_id in _ids(before) - _ids(ended):
            if ledger_id in self.ledgers:
                self.ledgers[ledger_id].since_s = float("-inf")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def database_ms(self) -> int:
        """The database's clock."""
        return EPOCH_MS + self.ahead_ms + int(self.now() * 1000)

    async def late_answer(self) -> None:
        """Delay the answer to a change now and then, by when others may have changed the row again."""
        if self.lost_answers and self.random.random() < self.lost_answers:
            await asyncio.sleep(self.random.random() * 2)

    def kept_of(self, in_flight: int) -> int:
        """How many of the entries in flight a recovery finds."""
        return self.random.randint(0, in_flight)

    def knows_end(self) -> bool:
        """Whether a writer has heard that its ledger was ended by another one."""
        return self.random.random() < 0.5

    def lac_of(self, lac: int) -> int:
        """The LAC that bookies know when the writer is gone."""
        return self.random.randint(-1, lac)

    def begin(self, log: str, app: str | None = None, version: int | None = None) -> str:
        name = f"t{next(self.names)}"
        self.transactions[name] = Transaction(name, log, app, version)
        return name


class Goes(asyncio.Event):
    """Set while a process goes on."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._awake_s = 0.0
        self._since_s: float | None = None
        """From when on it goes; None: it stands still."""
        self.set()

    def set(self) -> None:
        super().set()
        if self._since_s is None:
            self._since_s = self._now()

    def clear(self) -> None:
        super().clear()
        self._awake_s, self._since_s = self.awake_s(), None

    def awake_s(self) -> float:
        """The process's clock of its time awake (ADR 16)."""
        going_s = 0.0 if self._since_s is None else self._now() - self._since_s
        return self._awake_s + going_s


class Gateway:
    """A log manager whose engine, store and peers are the model; `kill` ends it as kill -9 does."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.writer = Writer(name, f"http://{name}")
        self.is_dead = False
        self.died = asyncio.Event()
        self.goes = Goes(cluster.now)
        self.pumps: set[asyncio.Task[Any]] = set()
        self.skew_ms = 0
        """How far its clock is ahead of the database's."""
        self.unasked_until = self.unheard_until = 0.0
        """Until then requests do not reach metadata; until then answers and changes do not come."""
        self.cached: dict[int, LedgerMetadata] = {}
        """Metadata of closed ledgers, however old: nothing is heard of their deletion."""
        self.unheard_of: set[int] = set()
        """Ledgers of its own whose deletion it has not heard of."""
        self.reads = self
        self.handles = SimpleNamespace(get=self._handle, place_in_log=self.place_in_log)
        self.directory = SimpleNamespace(refresh=self.bookies)
        self.logs = LogManager(
            engine=cast(Any, self),
            store=Store(self),
            peers=Net(self),
            times=TIMES,
            wall_ms=lambda: cluster.database_ms() + self.skew_ms,
            awake_s=self.goes.awake_s,
        )
        self.transactions = Transactions(
            engine=cast(Any, self),
            logs=self.logs,
            store=Store(self),
            client=ModelTransactions(self),
        )

    def kill(self) -> None:
        self.is_dead = True
        self.died.set()
        self.goes.set()

    async def take_over(self, name: str) -> LogMetadata:
        """Own a log from now on."""
        return await self.logs.ownership.handle(name).force(creates=True, finish=lambda row: row)

    async def while_it_lives(self, work: Awaitable[T], timeout_s: float | None = None) -> T:
        """What comes of work of this process. Raises: ConnectionResetError if it dies, or takes longer."""
        task = asyncio.ensure_future(work)
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((task, died), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionResetError
        finally:
            for waiting in (task, died):
                waiting.cancel()
            await asyncio.gather(task, died, return_exceptions=True)

    async def contents(self, name: str) -> list[ReadRecord]:
        """Every record that a log has now, through this gateway."""
        found: list[ReadRecord] = []
        at: int | Literal["earliest"] = "earliest"
        while (page := await self.logs.reader.read(name, at, limit=50)).records:
            found += page.records
            at = page.next
        return found

    @property
    def is_silent(self) -> bool:
        """Whether the process answers nobody now: it is dead, or stands still."""
        return self.is_dead or not self.goes.is_set()

    async def step(self) -> None:
        """Pass the time of one call. A dead process never gets an answer."""
        await self.goes.wait()
        await self.cluster.delay()
        await self.goes.wait()
        if self.is_dead:
            await asyncio.Event().wait()

    def cut_off(self, for_s: float, *, asks: bool, hears: bool) -> None:
        """Cut this process off from metadata, one way or both. Bookies, peers and clients stay reachable."""
        until = self.cluster.now() + for_s
        self.unasked_until = self.unasked_until if asks else until
        self.unheard_until = self.unheard_until if hears else until
        if not hears:
            self._in_background(self._hear_again(until))

    async def _hear_again(self, at: float) -> None:
        """The stream of changes begins anew, with a gap: rows are read again (rule 16a)."""
        await asyncio.sleep(at - self.cluster.now())
        if self.unheard_until > at:
            return  # cut off once more
        self._in_background(self._reread())
        missed = set(self.unheard_of)
        with contextlib.suppress(MetadataUnavailable):
            await self.ask()
            await self.hear()
            self.unheard_of -= missed

    async def _reread(self) -> None:
        """A sweep reads all logs soon after a gap."""
        while True:
            with contextlib.suppress(QuorumLogError):
                await Sweep(self.logs, Store(self)).sweep_logs()
                self.logs.rows.gap()  # for a sweep that a test runs
                return
            await asyncio.sleep(0.5)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self.pumps.add(task)
        task.add_done_callback(self.pumps.discard)

    def missed(self, ledger_id: int) -> None:
        """A ledger of this writer was deleted: unless it is cut off, it hears of that."""
        if self.unheard_until > self.cluster.now():
            self.unheard_of.add(ledger_id)

    async def ask(self) -> None:
        """Send a request to metadata. Raises: MetadataUnavailable."""
        await self.step()
        left_s = self.unasked_until - self.cluster.now()
        if left_s > 0:
            await asyncio.sleep(min(left_s, METADATA_S))
            await self.step()
            if left_s > METADATA_S:
                raise MetadataUnavailable(outcome=NOT_DONE)

    async def hear(self, outcome: Outcome | None = NOT_DONE) -> None:
        """Wait for the answer of metadata. Raises: MetadataUnavailable; where `outcome` is None, the request
        is repeated until it is answered.
        """
        await self.step()
        left_s = self.unheard_until - self.cluster.now()
        if left_s > 0:
            await asyncio.sleep(left_s if outcome is None else min(left_s, METADATA_S))
            await self.step()
            if outcome is not None and left_s > METADATA_S:
                raise MetadataUnavailable(outcome=outcome)

    async def end(self) -> None:
        tasks = [*self.pumps, *self.logs.ownership._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the engine ---

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        await self.ask()
        ledger_id = next(self.cluster.numbers)
        quorum = options.quorum
        bookies = tuple(f"b{n}@1" for n in range(quorum.ensemble_size))
        row = LedgerMetadata(
            ledger_id,
            quorum,
            DigestKind.CRC32C,
            (Fragment(0, bookies),),
            writer=self.writer,
            log=options.log,
            extra=options.tags,
        )
        self.cluster.ledgers[ledger_id] = Ledger(row, since_s=self.cluster.now())
        await self.hear(UNKNOWN)
        return row

    async def get(self, ledger_id: int) -> LedgerMetadata:
        await self.ask()
        row = self.cluster.ledger(ledger_id).row
        await self._heard()
        return row

    async def _heard(self) -> None:
        if self.unheard_until > self.cluster.now():
            await self.hear()

    def _handle(self, ledger_id: int) -> SimpleNamespace:
        return SimpleNamespace(
            append=lambda payloads, expect: self.submit(ledger_id, payloads, expect=expect)
        )

    def submit(
        self, ledger_id: int, payloads: Sequence[bytes], *, expect: int | None = None
    ) -> asyncio.Future[EntriesAppended]:
        if ledger_id in self.unheard_of:
            return self._submit_to_deleted(ledger_id, expect)
        ledger = self.cluster.ledger(ledger_id)
        assert ledger.row.writer == self.writer
        if ledger.row.state is not State.OPEN:
            return self._refused(LedgerFenced(ledger_id=ledger_id, outcome="not-done"))
        assert expect == len(ledger.entries) + len(ledger.in_flight)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[EntriesAppended] = loop.create_future()
        for payload in payloads:
            if self.cluster.watch is not None:
                self.cluster.watch.submitted(ledger)
            future = loop.create_future()
            ledger.in_flight.append((payload, future))
            self._in_background(self._pump(ledger))
        # They are confirmed in order: the last one's answer is that of all.
        return self._pumped(_from(future, expect))

    def place_in_log(self, ledger_id: int, first_offset: int, _lineage: object = None) -> None:
        ledger = self.cluster.ledgers.get(ledger_id)
        if ledger is not None and ledger.row.writer == self.writer:
            ledger.told_offset = first_offset

    async def copy_rows(self, _ledger_ids: Sequence[int]) -> None:
        await self.step()

    async def keep_place(self, ledger_id: int) -> None:
        await self.get(ledger_id)
        if self.cluster.random.random() < self.cluster.lost_answers:
            raise EntryUnavailable(ledger_id=ledger_id)
        self.cluster.kept_places.add(ledger_id)

    async def existing(self, ledger_ids: Sequence[int]) -> Sequence[LedgerMetadata]:
        await self.ask()
        ledgers = self.cluster.ledgers
        found = [
            replace(ledgers[ledger_id].row, first_offset=self.cluster.places.get(ledger_id))
            for ledger_id in ledger_ids
            if ledger_id in ledgers
        ]
        await self.hear()
        return found

    async def notify_deleted(
        self, rows: Sequence[LedgerMetadata], deletion: Deletion = Deletion.ALONE
    ) -> None:
        await self.step()
        if deletion is Deletion.OF_LOG:
            self.cluster.told_of_log |= {row.ledger_id for row in rows}
            return
        for row in rows:
            if self.cluster.is_named(row.ledger_id):
                self.cluster.wrong_tombstones.add(row.ledger_id)
        self.cluster.told_deleted |= {row.ledger_id for row in rows}

    def _submit_to_deleted(
        self, ledger_id: int, expect: int | None
    ) -> asyncio.Future[EntriesAppended]:
        """This process takes the ledger for its own, and bookies decide (rule 16a)."""
        ledger = self.cluster.deleted[ledger_id]
        is_known = not self.cluster.forgets_deleted or self.cluster.now() < ledger.drops_at
        if is_known:
            return self._refused(LedgerFenced(ledger_id=ledger_id), is_verified=True)

        async def defined_anew() -> EntriesAppended:
            assert expect is not None
            await self.step()
            await self.step()
            return EntriesAppended(expect, expect, expect)

        return self._pumped(defined_anew())

    def _refused(
        self, error: LedgerFenced, *, is_verified: bool = False
    ) -> asyncio.Future[EntriesAppended]:
        """Its handle may know already that it is over, or hear of it from bookies; `is_verified`:
        it believes that once it has read the row (rule 9).
        """
        if not is_verified and self.cluster.knows_end():
            raise error

        async def reported() -> EntriesAppended:
            await self.step()
            if is_verified:
                until = max(self.unasked_until, self.unheard_until)
                await asyncio.sleep(min(max(until - self.cluster.now(), 0.0), VERIFY_S))
            raise error.with_outcome(UNKNOWN)

        return self._pumped(reported())

    def _pumped(
        self, work: Coroutine[Any, Any, EntriesAppended]
    ) -> asyncio.Future[EntriesAppended]:
        task = asyncio.create_task(work)
        self.pumps.add(task)
        task.add_done_callback(self.pumps.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _pump(self, ledger: Ledger) -> None:
        await self.step()
        if ledger.in_flight and ledger.row.state is State.OPEN:
            payload, future = ledger.in_flight.pop(0)
            ledger.entries.append(payload)
            last = len(ledger.entries) - 1
            await self.step()
            if not future.done():
                future.set_result(EntriesAppended(last, last, last))

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        view: LedgerView | None = None,
    ) -> ReadResult:
        await self.step()
        # Bookies serve a deleted ledger to who names it, until they have collected it.
        kept = None if view is None else self.cluster.deleted.get(ledger_id)
        ledger = kept or self.cluster.ledger(ledger_id)
        end = len(ledger.entries) if last is None else min(last + 1, len(ledger.entries))
        end = end if view is None else min(end, view.last_add_confirmed + 1)
        lost = ledger.row.lost_at(first)
        if lost is not None:
            raise EntryLost(ledger_id=ledger_id, entry_id=first, next=lost[1] + 1)
        end = next((high + 1 for _, high in ledger.row.kept(first, end - 1)), end)
        chosen = ledger.entries[first : min(end, first + limit)]
        while len(chosen) > 1 and sum(map(len, chosen)) > max_bytes:
            chosen.pop()
        runs: tuple[Run, ...] = ()
        if chosen:
            run = make(
                ledger_id=ledger_id,
                first_entry=first,
                last_add_confirmed=first - 1,
                length_before=sum(map(len, ledger.entries[:first])),
                payloads=chosen,
                codec=Codec(DigestKind.CRC32C),
            )
            runs = (run,)
        closed = ledger.row.state is State.CLOSED
        lac = len(ledger.entries) - 1
        return ReadResult(runs, first + len(chosen), lac, closed, "writer", ledger.row.last_entry)

    async def last_add_confirmed(
        self,
        ledger_id: int,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
        view: LedgerView | None = None,
    ) -> LedgerView:
        del view
        await self.step()
        ledger = self.cluster.ledger(ledger_id)
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            closed = ledger.row.state is State.CLOSED
            lac = len(ledger.entries) - 1
            writer = ledger.row.writer
            assert writer is not None
            asked = self.cluster.gateways[writer.id]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await asked.goes.wait()
            lost = asked.is_silent
            waits = after is not None and lac <= after and not closed and not lost
            if not waits or asyncio.get_running_loop().time() >= end:
                break
            await asyncio.sleep(0.01)
        if closed:
            return LedgerView(ledger.row, lac, closed=True, lac_source="metadata")
        if lost:
            lac = self.cluster.lac_of(lac)
        source: LacSource = "bookies" if lost else "writer"
        return LedgerView(ledger.row, lac, closed=False, lac_source=source)

    async def ended(self, ledger_id: int, *, is_fresh: bool) -> LedgerView:
        row = None if is_fresh else self.cached.get(ledger_id)
        if row is None:
            row = await self.get(ledger_id)
        if row.state is State.CLOSED:
            self.cached[ledger_id] = row
        last = -1 if row.last_entry is None else row.last_entry
        return LedgerView(row, last, closed=True, lac_source="metadata")

    async def close_for_log(self, ledger_id: int) -> LedgerMetadata:
        await self.ask()
        ledger = self.cluster.ledger(ledger_id)
        if ledger.row.state is not State.OPEN:
            raise LedgerFenced(ledger_id=ledger_id)
        assert not ledger.in_flight
        row = self._closed(ledger)
        if self.unheard_until > self.cluster.now():
            await self.hear(None)
        return row

    def _closed(self, ledger: Ledger) -> LedgerMetadata:
        ledger.row = ledger.row.closed(
            last_entry=len(ledger.entries) - 1, length=sum(map(len, ledger.entries))
        )
        return ledger.row

    async def recover(self, ledger_id: int) -> LedgerMetadata:
        await self.ask()
        ledger = self.cluster.ledger(ledger_id)
        if ledger.row.state is State.OPEN:
            ledger.row = ledger.row.in_recovery()
        await self.step()
        if ledger.row.state is not State.CLOSED:
            kept = self.cluster.kept_of(len(ledger.in_flight))
            ledger.entries += [payload for payload, _ in ledger.in_flight[:kept]]
            self._closed(ledger)
            for _, future in ledger.in_flight:
                if not future.done():
                    future.set_exception(LedgerFenced(ledger_id=ledger_id, outcome="unknown"))
                    future.exception()
            ledger.in_flight.clear()
        await self.hear(None)
        return ledger.row

    async def bookies(self) -> BookieList:
        await self.ask()
        return BookieList(
            bookies=tuple(BookieInfo(id=f"b{n}@1", state="writable", url="") for n in range(3))
        )

    async def gateways(self) -> Sequence[Writer]:
        await self.ask()
        return [gateway.writer for gateway in self.cluster.gateways.values()]


async def _from(last: asyncio.Future[EntriesAppended], first: int) -> EntriesAppended:
    done = await last
    return EntriesAppended(first, done.last, done.last_add_confirmed)


class Store(MetadataLogs):
    """The metadata service's log rows, with a race before and after each change."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.cluster = gateway.cluster

    clock = cast(Any, SimpleNamespace(doubt=""))
    """The database's clock is right."""

    def database_ms(self) -> int:
        return self.cluster.database_ms()

    async def get(self, name: str, known: LogMetadata | None = None) -> LogMetadata:
        await self.gateway.ask()
        row = self.row(name)
        await self.gateway.hear()
        return known if known == row else row

    def row(self, name: str) -> LogMetadata:
        if name not in self.cluster.logs:
            raise NoSuchLog(log=name)
        return self.cluster.logs[name]

    async def is_done(self, once: Once) -> bool:
        await self.gateway.ask()
        is_done = self.cluster.is_late(once)
        await self.gateway.hear()
        return is_done

    async def create(
        self, log: LogMetadata, *, once: Once | None = None
    ) -> tuple[LogMetadata, bool]:
        await self.gateway.ask()
        if self.cluster.is_late(once):
            return self.row(log.name), False
        self.cluster.note_done(once)
        return await self._created(log)

    async def _created(self, log: LogMetadata) -> tuple[LogMetadata, bool]:
        is_new = log.name not in self.cluster.logs
        # A name that is given again goes on from the version at which it was freed.
        version = self.cluster.freed.get(log.name, 0) + 1
        created_at = f"2026-01-02T03:04:05.{version:06}Z"
        made = replace(log, version=version, created_at=created_at)
        if is_new:
            self.cluster.logs[log.name] = made
        row = self.cluster.logs[log.name]
        await self.gateway.hear(UNKNOWN)
        return row, is_new

    async def fork(
        self, log: LogMetadata, source: LogMetadata, at: int
    ) -> tuple[LogMetadata, bool]:
        await self.gateway.ask()
        current = self.row(source.name)
        current.check_created(source.created_at)
        if at < current.first_offset or not current.is_sealed_below(at):
            raise InvalidRequest("the source is not sealed there", log=source.name)
        made = current.forked(log, at)
        made.check()
        return await self._created(made)

    async def unshared(self, let_go: Sequence[LedgerMetadata]) -> Sequence[LedgerMetadata]:
        if not let_go:
            return ()
        try:
            await self.gateway.ask()
            logs = self.cluster.logs.values()
            shared = {item.ledger_id for log in logs for item in log.shared}
            found = [row for row in let_go if row.ledger_id not in shared]
            self.cluster.shared_at |= dict.fromkeys(shared, self.cluster.now())
            await self.gateway.hear()
        except MetadataUnavailable as error:
            raise error.with_outcome(UNKNOWN) from error
        return found

    async def cas(self, log: LogMetadata, once: Once | None = None) -> LogMetadata | RowChanged:
        await self.gateway.ask()
        current = self.row(log.name)
        if self.cluster.is_late(once):
            return current
        if current.version != log.version:
            return RowChanged(current)
        self._replace(current, log)
        self.cluster.note_done(once)
        await self.cluster.late_answer()
        await self.gateway.hear(None)
        # As the service does: a repeat of what was done gets the row as it is by then.
        return self.row(log.name)

    def _replace(self, current: LogMetadata, log: LogMetadata) -> LogMetadata:
        new = replace(log, version=log.version + 1)
        new.check()
        rewrites = check_log(current, new)
        for item in new.items:
            if item.ledger_id in self.cluster.deleted:
                raise InvalidRequest(f"ledger {item.ledger_id} does not exist")
            if item.last_offset is not None:
                state = self.cluster.ledgers[item.ledger_id].row.state
                assert state is State.CLOSED, "rules 23 and 28: an end that is none"
        for number in ledgers_of(new.items) - ledgers_of(current.items):
            if number in {item.index for item in new.items}:
                ledger = self.cluster.ledgers.get(number)
                if ledger is None or ledger.row.log != log.name:
                    raise InvalidRequest(f"ledger {number} does not exist")
                assert ledger.row.state is State.CLOSED, "rule 27e: an index that may grow"
        self.cluster.replaced_by |= {
            item.ledger_id: by for by, items in rewrites.items() for item in items
        }
        now = self.cluster.now()
        self.cluster.places |= {
            item.ledger_id: item.first_offset for item in new.items if item.first_offset is not None
        }
        if current.items and new.item_of(current.items[-1].ledger_id) is not None:
            # Else it is overwritten: copies of the next ledger's row tell that the log begins there.
            rewritten = {item for each in rewrites.values() for item in each}
            gone = [
                (item.ledger_id, item.last_offset)
                for item in current.items
                if new.item_of(item.ledger_id) is None
                and item not in rewritten
                and item.last_offset is not None
                and not item.is_empty
            ]
            self.cluster.let_go.setdefault(log.name, []).extend(gone)
            if gone:
                self.cluster.on_let_go(self.gateway)
        for number in ledgers_of(current.items) - ledgers_of(new.items):
            if number in self.cluster.ledgers:
                self.cluster.ledgers[number].since_s = now
        self.cluster.logs[log.name] = new
        if self.cluster.watch is not None:
            self.cluster.watch.replaced(current, new)
        return new

    async def delete(self, log: LogMetadata) -> RowChanged | None:
        await self.gateway.ask()
        if self.row(log.name).version != log.version:
            return RowChanged(self.row(log.name))
        check_unprotected(self.row(log.name))
        row = self.cluster.logs.free(log.name)
        self.cluster.freed[log.name] = row.version + 1
        gone = self.cluster.deleted_with[log.name] = set[int]()
        own = {item.ledger_id for item in row.own}
        for number in sorted(ledgers_of(row.items)):
            ledger = self.cluster.ledgers.get(number)
            if self.cluster.is_named(number):
                continue  # by a fork, or by the log that this one was forked from (rule 27a)
            if ledger is not None and ledger.row.state is State.CLOSED and number in own:
                self.cluster.delete(number)
                gone.add(number)
            elif ledger is not None:
                ledger.since_s = self.cluster.now()
        # Others have replaced them (rule 27c).
        for number, ledger in list(self.cluster.ledgers.items()):
            is_placed = ledger.row.log == log.name and number in self.cluster.places
            is_closed = ledger.row.state is State.CLOSED
            if is_placed and is_closed and not self.cluster.is_named(number):
                self.cluster.delete(number)
                gone.add(number)
        for found in list(self.cluster.transactions.values()):
            if found.log == log.name and found.is_open:
                self.cluster.abort(found.id)
        self.cluster.on_freed(log.name, self.gateway)
        await self.gateway.hear(None)
        return None

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        prefix: str = "",
        shown: Sequence[str] | None = None,
    ) -> tuple[list[LogMetadata], str | None]:
        assert shown is None, "callers of the model may see everything"
        await self.gateway.ask()
        found = (name for name in self.cluster.logs if name.startswith(prefix))
        names = sorted(name for name in found if after is None or name > after)
        rows = [self.cluster.logs[name] for name in names[:limit]]
        return rows, names[limit - 1] if len(names) > limit else None

    async def orphans(
        self,
        *,
        older_than_s: float,
        after: int | None = None,
        limit: int = 100,
        log: str | None = None,
    ) -> tuple[int, ...]:
        await self.gateway.ask()
        before = self.cluster.now() - older_than_s
        found = (
            number
            for number, ledger in sorted(self.cluster.ledgers.items())
            if not self.cluster.is_named(number)
            and ledger.since_s <= before
            and (after is None or number > after)
            and (log is None or (ledger.row.log == log and number in self.cluster.places))
        )
        return tuple(itertools.islice(found, limit))

    async def transaction(self, transaction_id: str) -> Transaction:
        await self.gateway.ask()
        found = self.cluster.transactions[transaction_id]
        await self.gateway.hear()
        return found

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> Committed | RowChanged:
        await self.gateway.ask()
        done = self._commit(transaction_id, ledgers, log)
        if isinstance(done, RowChanged):
            return done
        await self.cluster.late_answer()
        await self.gateway.hear(None)
        return replace(done, log=None if done.log is None else self.row(done.log.name))

    def _commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> Committed | RowChanged:
        """What the metadata service does in one transaction of its database."""
        found = self.cluster.transactions[transaction_id]
        asked = tuple(sealed.ledger_id for sealed in ledgers)
        if found.state is TransactionState.ABORTED:
            raise TransactionAborted
        if not found.is_open:
            if asked != found.requested and found.app is None:
                raise TransactionCommitted
            is_other = found.is_duplicate or asked != found.requested
            return Committed(replace(found, is_duplicate=is_other), None)
        published: tuple[LogItem, ...] = ()
        is_duplicate = found.app is not None and self.cluster.app_versions.get(found.app, -1) >= (
            found.version or 0
        )
        if log is not None and not is_duplicate:
            current = self.row(found.log)
            if current.version != log.version:
                return RowChanged(current)
            published = published_by(current, log, ledgers)
            ids = _ids(found)
            assert all(item.ledger_id in ids for item in published)
            log = self._replace(current, log)
        if found.app is not None and not is_duplicate:
            self.cluster.app_versions[found.app] = found.version or 0
        ended = replace(
            found,
            state=TransactionState.COMMITTED,
            requested=asked,
            is_duplicate=is_duplicate,
            ledgers=tuple(
                TransactionLedger(
                    item.ledger_id, first_offset=item.first_offset, last_offset=item.last_offset
                )
                for item in published
            ),
        )
        self.cluster.end(ended, found)
        return Committed(ended, None if is_duplicate else log)

    async def delete_unnamed(self, ledger_id: int) -> None:
        await self.gateway.ask()
        ledger = self.cluster.ledger(ledger_id)
        if self.cluster.is_named(ledger_id):
            raise OwnedByLog(ledger_id=ledger_id)
        self.cluster.delete(ledger_id)
        for _, future in ledger.in_flight:
            if not future.done():
                future.set_exception(LedgerClosed(ledger_id=ledger_id))
                future.exception()


class ModelTransactions(TransactionClient):
    """The metadata service's transactions, as one gateway asks for them."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def get(self, transaction_id: str) -> Transaction:
        await self.gateway.ask()
        return self.gateway.cluster.transactions[transaction_id]

    async def abort(self, transaction_id: str) -> Transaction:
        await self.gateway.ask()
        done = self.gateway.cluster.abort(transaction_id)
        await self.gateway.hear(None)
        return done


class Net(LogPeers):
    """Requests between gateways: lost when either end dies, late otherwise."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.cluster = gateway.cluster

    async def forward(
        self, owner: Writer, name: str, call: Append | Publish | Consult | None
    ) -> RecordsAppended | Transaction | bytes | OwnerLost | None:
        async def done(peer: Gateway) -> Any:
            reported = await peer.logs.forwarded(name, call)
            return orjson.dumps(reported) if isinstance(call, Consult) else reported

        return await self._ask(owner, done)

    async def access(self, keeper: Writer, name: str, expiry: Expiry, is_access: bool) -> Verdict:
        reported = await self._ask(
            keeper, lambda peer: peer.logs.accesses.here(name, expiry, is_access=is_access)
        )
        if isinstance(reported, OwnerLost):
            raise WriterLost(reported.detail)
        return reported

    async def ends(self, owner: Writer, heads: Sequence[LogHead]) -> Mapping[str, int]:
        async def ends(peer: Gateway) -> Mapping[str, int]:
            return peer.logs.views.ends_here(heads)

        found = await self._ask(owner, ends)
        return {} if isinstance(found, OwnerLost) else found

    async def is_alive(self, owner: Writer) -> bool:
        await self.gateway.step()
        peer = self.cluster.gateways[owner.id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALIVE_S):
                await peer.goes.wait()
        return not peer.is_silent

    async def _ask(self, owner: Writer, work: Callable[[Gateway], Awaitable[T]]) -> T | OwnerLost:
        """The answer of a process, or OwnerLost if the process dies."""
        await self.gateway.step()
        peer = self.cluster.gateways[owner.id]
        if peer.is_dead:
            return OwnerLost("refused", sent=False)

        async def answer() -> T:
            await peer.goes.wait()
            answer = await work(peer)
            await peer.step()
            return answer

        try:
            done = await peer.while_it_lives(answer())
        except ConnectionResetError:
            return OwnerLost("the connection broke", sent=True)
        await self.gateway.step()
        return done


def _ids(transaction: Transaction) -> set[int]:
    return {ledger.ledger_id for ledger in transaction.ledgers}
