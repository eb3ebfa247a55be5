"""The client protocol behind one gateway, for any ledger, whoever writes it.

This module decides who serves a request (this process's handle, the writer's gateway, the bookies)
and what the outcome proves; its parts do the work. A gateway holds no state that may not be lost at
any moment (rule 11).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import uuid4

import aiohttp

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    LedgerClosed,
    LedgerFenced,
    MetadataUnavailable,
    NoSuchLedger,
    OwnedByLog,
    QuorumLogError,
    ShuttingDown,
    VersionConflict,
    WriterLost,
)
from quorumlog.net import trace
from quorumlog.net.awake import awake
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.budget import PEER
from quorumlog.net.budget import Budget as PeerBudget
from quorumlog.net.directory import Directory
from quorumlog.net.holdings import HoldingsClient
from quorumlog.net.metadata_client import MetadataClient, new_attempt
from quorumlog.net.ports import Ports, Times
from quorumlog.net.quarantine import Quarantine, QuarantineRule
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.timers import Tasks, Timers, restarted
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieList, ServiceHeartbeat
from services.gateway.engine.handle import Budget, WriteHandle
from services.gateway.engine.keys import Gatekeeper, new_keys
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.engine.losses import Losses
from services.gateway.engine.missed import queue_missed
from services.gateway.engine.peers import Peers
from services.gateway.engine.placing import Placing
from services.gateway.engine.records import RecordAppends, is_of_log
from services.gateway.engine.recoveries import Recoveries
from services.gateway.engine.rows import Rows, ThrottledMetadata, is_closed
from services.gateway.interface import (
    DEGRADED,
    Appended,
    Confirmation,
    EngineInterface,
    EntryResult,
    LedgerOptions,
    LedgerPage,
    LedgerQuery,
    ReadResult,
)
from services.gateway.rereads import Rereads

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 1.0
_RESTART_S: Final = 1.0
_CLOSE_S: Final = 30.0
_CLOSES_AT_ONCE: Final = 64
_CLOSED_KEPT: Final = 10_000
"""How many closed ledgers are remembered, to answer repeated closes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one gateway's engine."""

    url: str
    """The URL at which other gateways reach this process."""
    metadata_urls: tuple[str, ...]
    ledger_in_flight_bytes_max: int = 128 << 20
    """Two of the largest bodies (docs/guides/http.md, Bounds)."""
    gateway_in_flight_bytes_max: int = 512 << 20
    open_ledgers_max: int = 200_000
    peer_open_ledgers_max: int = 25_000
    metadata_s: float = 3.0
    """After this time a caller gets metadata-unavailable."""
    delays_ensemble_change: bool = False
    zones_min: int = 1
    enforces_zones: bool = False
    quarantine: QuarantineRule = field(default_factory=QuarantineRule)
    times: Times = field(default_factory=Times)


class Engine:
    """One gateway's engine. Invariant: a write handle is created once, for a ledger that this
    process created (rule 11).
    """

    def __init__(
        self,
        config: EngineConfig,
        metadata: MetadataClient,
        directory: Directory,
        bookies: BookieClient,
        ports: Ports,
        peers: Peers,
        holdings: HoldingsClient,
    ) -> None:
        """Use `running`."""
        self.writer = Writer(str(uuid4()), config.url)
        self._config = config
        self._metadata = metadata
        self._directory = directory
        self.placing = Placing(
            directory, zones_min=config.zones_min, enforces_zones=config.enforces_zones
        )
        self._bookies = bookies
        self._ports = ports
        self._peers = peers
        self.rereads = Rereads(self._live_ledgers, metadata.heads, self._apply_head)
        """The rows of this process's write handles."""
        self._rows = Rows(metadata, self._row_changed, self._ledger_ended, self._on_missed_news)
        self._on_gap: list[Callable[[], None]] = [self.rereads.gap]
        self._recoveries = Recoveries(self._rows, ports)
        self._losses = Losses(self._rows, ports.metadata, holdings)
        self._gatekeeper = Gatekeeper()
        self._handles: dict[int, WriteHandle] = {}
        self.reading = LedgerReads(
            self.writer, self._handles, self._rows, ports, peers, self._gatekeeper
        )
        self.records = RecordAppends(
            self._handles,
            self._rows,
            peers,
            writer_of=self._writer_of,
            prefer_ledger_state=self._prefer_ledger_state,
        )
        self.append_records = self.records.append
        self.transaction_of = self.records.transaction_of
        self._closed_here: dict[int, int] = {}
        """Ledgers written and closed here, with the last acknowledged entry."""
        self._budget = Budget(config.gateway_in_flight_bytes_max)
        self._open = PeerBudget(
            "open ledgers",
            "OPEN_LEDGERS_MAX",
            config.open_ledgers_max,
            config.peer_open_ledgers_max,
        )
        self._opened_by: dict[int, str] = {}
        """The peer that had each open ledger created here."""
        self._draining = False

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, config: EngineConfig) -> AsyncIterator["Engine"]:
        """An engine with its connections and its background tasks."""
        tasks, timers = Tasks(), Timers(asyncio.get_running_loop(), awake().time)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace.config()],
        ) as session:
            metadata = MetadataClient(config.metadata_urls, session, deadline_s=config.metadata_s)
            directory = Directory(metadata.bookies, Quarantine(config.quarantine))
            bookies = BookieClient(directory.address, session, failed=directory.quarantine.failed)
            narrow = ThrottledMetadata(metadata)
            ports = Ports(bookies, narrow, directory, timers, tasks, config.times)
            engine = cls(
                config,
                metadata,
                directory,
                bookies,
                ports,
                Peers(session, config.times.quorum_s),
                HoldingsClient(directory, session),
            )
            for work in (
                directory.follow,
                engine._rows.follow,
                engine.rereads.run,
                engine._send_heartbeats,
                partial(metadata.keep_confirmed, _HEARTBEAT_S),
            ):
                tasks.start(restarted(work))
            try:
                yield engine
            finally:
                for handle in list(engine._handles.values()):
                    handle.abandon()
                await engine._recoveries.close()
                await tasks.close()
                timers.close()
                await bookies.close()

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Create a ledger whose only writer is this process.

        Raises: NotEnoughBookies, LedgerExists, MetadataUnavailable.
        """
        self._check_not_draining()
        if options.log is None:
            self._open.check(PEER.get(), 1)
        if options.digest is DigestKind.HMAC_SHA256 and options.password is None:
            raise InvalidRequest("the digest hmac-sha256 needs a password")
        try:
            quorum = Quorum(options.ensemble_size, options.write_quorum, options.ack_quorum)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        members, is_degraded = await self.placing.new_ensemble(
            quorum, allow_degraded=options.allow_degraded
        )
        keys = new_keys(options.password, options.digest)
        draft = LedgerMetadata(
            ledger_id=-1 if options.ledger_id is None else options.ledger_id,
            quorum=quorum,
            digest=options.digest,
            fragments=(Fragment(0, members),),
            writer=self.writer,
            ledger_key=keys.ledger_key,
            access_key=keys.access_key,
            mac_key=keys.mac_key,
            custom=tuple(sorted(options.custom)),
            log=options.log,
            extra=(*options.tags, *(((DEGRADED, "true"),) if is_degraded else ())),
        )
        attempt, gaps = new_attempt(), self.rereads.gaps
        try:
            row = await self._metadata.create(
                draft, attempt=attempt, idempotency_key=options.idempotency_key
            )
        except (MetadataUnavailable, asyncio.CancelledError) as error:
            if not isinstance(error, MetadataUnavailable) or error.outcome == UNKNOWN:
                self._ports.tasks.start(
                    self._settle_creation(draft, attempt, options.idempotency_key)
                )
            raise
        self._adopt(row, keys.ledger_key)
        self._reread_after_gap(row, gaps)
        return row

    def _adopt(self, row: LedgerMetadata, ledger_key: bytes) -> None:
        """Become the writer of a ledger created here."""
        self._rows.put(row)
        is_ours = row.writer is not None and row.writer.id == self.writer.id
        # A repeated idempotency key gets the first ledger's row, whose handle may exist; and
        # somebody else may have ended the ledger before this answer arrived.
        is_new = row.ledger_id not in self._handles and row.state is State.OPEN
        if is_ours and row.ledger_key == ledger_key and is_new:
            self._opened_by[row.ledger_id] = PEER.get()
            self._open.back(PEER.get())
            self._handles[row.ledger_id] = WriteHandle(
                row,
                self._ports,
                self,
                lacs=self._bookies,
                ledger_limit_bytes=self._config.ledger_in_flight_bytes_max,
                gateway_budget=self._budget,
                delays_change=self._config.delays_ensemble_change,
            )

    async def _settle_creation(self, draft: LedgerMetadata, attempt: str, key: str | None) -> None:
        """Settle a creation of unknown outcome. While this process lives it counts as the ledger's
        writer (rule 11), so nobody else would close or repair the ledger.
        """
        while True:
            gaps = self.rereads.gaps
            try:
                row = await self._metadata.create(draft, attempt=attempt, idempotency_key=key)
            except MetadataUnavailable:
                await asyncio.sleep(_RESTART_S)
            except QuorumLogError:
                return  # the ledger was never created
            else:
                self._adopt(row, draft.ledger_key)
                self._reread_after_gap(row, gaps)
                return

    def _reread_after_gap(self, row: LedgerMetadata, gaps: int) -> None:
        """Read a created row again if changes may have been missed since the request."""
        if gaps != self.rereads.gaps and row.ledger_id in self._handles:
            self.rereads.want(row.ledger_id)

    async def get(self, ledger_id: int) -> LedgerMetadata:
        """The present row. Raises: NoSuchLedger, MetadataUnavailable."""
        return await self._rows.fresh(ledger_id)

    async def list(self, query: LedgerQuery) -> LedgerPage:
        """One page of rows."""
        rows, after = await self._metadata.list(
            state=query.state,
            bookie=query.bookie,
            log=query.log,
            metadata=dict(query.custom),
            after=query.after,
            limit=query.limit,
        )
        return LedgerPage(tuple(rows), after)

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> Appended:
        """Append payloads as contiguous entries; returns when they are acknowledged."""
        if ledger_id in self._handles:
            return await self.append_here(ledger_id, payloads, password=password, expect=expect)
        row = await self._rows.row(ledger_id)
        if is_closed(row):
            row = await self._rows.fresh(ledger_id)
        if row.log is not None:
            raise OwnedByLog("append to the log", ledger_id=ledger_id, log=row.log)
        self._gatekeeper.check(row, password)
        writer = self._writer_of(row)
        try:
            return await self._peers.append(
                writer, ledger_id, payloads, password=password, expect=expect
            )
        except WriterLost as error:
            raise await self._prefer_ledger_state(error, ledger_id) from error

    async def append_here(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> Appended:
        """Append to a ledger of this process, for its own clients and other gateways."""
        handle = self._handles.get(ledger_id)
        if handle is not None:
            row = handle.row
            if row.log is not None:
                raise OwnedByLog("append to the log", ledger_id=ledger_id, log=row.log)
            self._gatekeeper.check(row, password)
        try:
            submitted = self.submit(ledger_id, payloads, expect=expect)
        except (LedgerFenced, WriterLost) as error:
            raise await self._prefer_ledger_state(error, ledger_id) from error
        return await submitted

    def submit(
        self, ledger_id: int, payloads: Sequence[bytes], *, expect: int | None = None
    ) -> asyncio.Future[Appended]:
        """Begin an append to a ledger of this process; ids follow the order of the calls.

        Checks no password. Raises at once, with nothing done, if the append cannot begin.
        """
        handle = self._handles.get(ledger_id)
        if handle is None:
            raise WriterLost(
                "this process has no write handle", ledger_id=ledger_id, outcome=NOT_DONE
            )
        return handle.append(payloads, sum(map(len, payloads)), expect)

    async def close(self, ledger_id: int, *, password: str | None = None) -> LedgerMetadata:
        """The writer's close. Raises: LedgerClosed, LedgerFenced, WriterLost."""
        if ledger_id in self._handles or ledger_id in self._closed_here:
            return await self.close_here(ledger_id, password=password)
        row = await self._rows.fresh(ledger_id)
        if is_of_log(row):
            raise OwnedByLog("close the log", ledger_id=ledger_id, log=row.log)
        self._gatekeeper.check(row, password)
        if row.writer is None or row.writer.id == self.writer.id:
            return await self._close(row)
        try:
            await self._peers.close(row.writer, ledger_id, password=password)
        except WriterLost as error:
            if is_closed(row):
                return row  # only the lost writer knew its own last entry
            raise await self._prefer_ledger_state(error, ledger_id) from error
        return await self._rows.fresh_closed(ledger_id)

    async def close_here(self, ledger_id: int, *, password: str | None = None) -> LedgerMetadata:
        """The writer's close of a ledger of this process."""
        row = await self._rows.fresh(ledger_id)
        if is_of_log(row):
            raise OwnedByLog("close the log", ledger_id=ledger_id, log=row.log)
        self._gatekeeper.check(row, password)
        return await self._close(row)

    async def close_for_log(self, ledger_id: int) -> LedgerMetadata:
        """The writer's close of a log's ledger (rule 27)."""
        return await self._close(await self._rows.fresh(ledger_id))

    def replace(self, ledger_id: int, member: str) -> None:
        """Have this process's handle replace a bookie (rule 21). Raises: WriterLost."""
        handle = self._handles.get(ledger_id)
        if handle is None:
            raise WriterLost("this process has no write handle", outcome=NOT_DONE)
        handle.replace(member)

    async def recover(
        self, ledger_id: int, *, password: str | None = None, declare_lost: Sequence[str] = ()
    ) -> LedgerMetadata:
        """The reader's close: fence, recover, close. On a closed ledger: its row."""
        row = await self._rows.fresh(ledger_id)
        self._gatekeeper.check(row, password)
        if is_closed(row):
            return row
        return await self._recoveries.run(ledger_id, declare_lost=_members(row, declare_lost))

    async def accept_loss(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        password: str | None = None,
        declare_lost: Sequence[str] = (),
    ) -> LedgerMetadata:
        """Declare entries first..last of a CLOSED ledger lost, which nobody can serve (rule 31).

        Raises: LossNotProven, InvalidRequest, NoSuchLedger, MetadataUnavailable.
        """
        row = await self._rows.fresh(ledger_id)
        self._gatekeeper.check(row, password)
        return await self._losses.accept(row, first, last, _members(row, declare_lost))

    async def delete(self, ledger_id: int, *, password: str | None = None) -> None:
        """Delete a ledger; an open one is recovered first. Raises: NoSuchLedger, OwnedByLog."""
        row = await self._rows.fresh(ledger_id)
        self._gatekeeper.check(row, password)
        while True:
            if row.log is not None:
                raise OwnedByLog("delete the log", ledger_id=ledger_id, log=row.log)
            if not is_closed(row):
                row = await self._recoveries.run(ledger_id)
            try:
                await self._metadata.delete(ledger_id, version=row.version)
            except VersionConflict:
                row = await self._rows.fresh(ledger_id)
                continue
            break
        self._rows.deleted(ledger_id)

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        password: str | None = None,
    ) -> ReadResult:
        """Confirmed entries from `first` on. Raises: EntryUnavailable, NoSuchLedger."""
        return await self.reading.read(
            ledger_id, first, last=last, limit=limit, max_bytes=max_bytes, password=password
        )

    async def entry(
        self, ledger_id: int, entry_id: int, *, password: str | None = None
    ) -> EntryResult:
        """One entry. Raises: NoSuchEntry, NotYetConfirmed, EntryUnavailable (rule 5)."""
        return await self.reading.entry(ledger_id, entry_id, password=password)

    async def last_add_confirmed(
        self,
        ledger_id: int,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
        password: str | None = None,
    ) -> Confirmation:
        """The LAC; with `after`, waits until it is above that or the ledger is closed."""
        return await self.reading.last_add_confirmed(
            ledger_id, after=after, wait_s=wait_s, password=password
        )

    async def bookies(self) -> BookieList:
        """Every registered bookie with its state."""
        return await self._directory.refresh()

    async def gateways(self) -> Sequence[Writer]:
        """The gateways that live as far as is known."""
        services = (await self._metadata.services()).services
        return [Writer(found.id, found.url) for found in services if found.kind == "gateway"]

    async def cluster(self) -> dict[str, Any]:
        """Every service with its state, and this gateway's ledgers with reduced redundancy."""
        queue = RepairClient(self._metadata, self.writer.id)
        bookies, services, metadata, repairs, summary = await asyncio.gather(
            self.bookies(),
            self._metadata.services(),
            self._metadata.own_services(),
            queue.list(),
            queue.summary(),
        )
        return {
            "cluster_id": await self._metadata.cluster_id(),
            "bookies": [bookie.model_dump(mode="json") for bookie in bookies.bookies],
            "services": [
                service.model_dump(mode="json") for service in (*metadata, *services.services)
            ],
            "writer": {"id": self.writer.id, "url": self.writer.url},
            "degraded_ledgers": self.degraded_ledgers(),
            "quarantined": self.quarantined,
            "under_replicated_count": summary.ledgers,
            "under_replicated": [
                {"ledger_id": repair.ledger_id, "bookie": repair.member} for repair in repairs[0]
            ],
        }

    @property
    def open_ledgers(self) -> int:
        """Ledgers that this process writes."""
        return sum(handle.is_live for handle in self._handles.values())

    @property
    def in_flight_bytes(self) -> int:
        """Payload that is accepted and not yet acknowledged."""
        return self._budget.used_bytes

    def degraded_ledgers(self) -> Sequence[int]:
        """Ledgers of this process with a member that takes no adds (rule 8)."""
        return [ledger for ledger, handle in self._handles.items() if handle.is_degraded]

    @property
    def ensemble_changes(self) -> int:
        """Ensemble changes by writers of this process so far."""
        narrow = self._ports.metadata
        return narrow.ensemble_changes if isinstance(narrow, ThrottledMetadata) else 0

    @property
    def quarantined(self) -> Sequence[str]:
        """Bookies that are listed as live and fail here: new ledgers avoid them."""
        return self._directory.quarantine.names

    def channels(self) -> dict[str, bool]:
        """The bookies contacted so far, and whether each one's connection is open."""
        return self._bookies.channels()

    async def ready(self) -> QuorumLogError | None:
        """None if a default ledger could be created now, else the error of that creation."""
        if self._draining:
            return ShuttingDown("this gateway is about to end")
        size = LedgerOptions().ensemble_size
        try:
            await self._directory.refresh()
        except QuorumLogError as error:
            return error
        return None if self._directory.new_ensemble(size) else self.placing.too_few(size)

    async def drain(self) -> None:
        """Refuse new work, settle what is in flight and close the ledgers of this writer."""
        self._draining = True
        room = asyncio.Semaphore(_CLOSES_AT_ONCE)

        async def close(handle: WriteHandle) -> None:
            async with room:
                with contextlib.suppress(QuorumLogError):
                    await handle.close()

        handles = [handle for handle in self._handles.values() if handle.is_live]
        log.info("draining", extra={"ledgers": len(handles)})
        await asyncio.gather(*[close(handle) for handle in handles])

    def handle_closed(self, handle: WriteHandle, row: LedgerMetadata) -> None:
        """The ledger is CLOSED: its row is the answer from now on."""
        self._forget_opener(handle.ledger_id)
        self._rows.put(row)
        if handle.failure_code is None:
            self._queue_missed(handle)
        self._handles.pop(handle.ledger_id, None)
        self._closed_here[handle.ledger_id] = handle.last_add_confirmed
        if len(self._closed_here) > _CLOSED_KEPT:
            del self._closed_here[next(iter(self._closed_here))]

    def handle_failed(self, handle: WriteHandle) -> None:
        """The handle has failed. It stays, so that callers learn why, until the ledger is known to be
        CLOSED or deleted: then the row tells more, and a handle for each failure is kept nowhere.
        """
        self._forget_opener(handle.ledger_id)
        code = handle.end_code
        log.warning("handle-failed", extra={"ledger": handle.ledger_id, "code": code})
        if code in (LedgerFenced.code, LedgerClosed.code):
            self._queue_missed(handle)
        if code in (LedgerFenced.code, LedgerClosed.code, QuorumLogError.code):
            # Nobody else recovers it, since its writer's process lives. A ledger without a handle
            # must end. Of one that has ended, only the row is read.
            self._recoveries.start_background(handle.ledger_id)
        if code == NoSuchLedger.code:
            self._rows.deleted(handle.ledger_id)
        else:
            self._row_changed(handle.ledger_id)  # the news may have come before the failure

    def _forget_opener(self, ledger_id: int) -> None:
        """A ledger is not written here any more."""
        peer = self._opened_by.pop(ledger_id, None)
        if peer is not None:
            self._open.give(peer)

    def _queue_missed(self, handle: WriteHandle) -> None:
        """Queue missed entries, which only this writer knows, after somebody else's close."""
        missed = handle.missed
        if missed:
            repairs = RepairClient(self._metadata, self.writer.id)
            self._ports.tasks.start(queue_missed(repairs, handle.ledger_id, missed))

    def recovery_wanted(self, handle: WriteHandle) -> None:
        """The writer met a recovery of its ledger: run one (rule 10)."""
        self._recoveries.start_background(handle.ledger_id)

    async def _close(self, row: LedgerMetadata) -> LedgerMetadata:
        """Close a ledger that was written here, or answer how it ended."""
        ledger_id = row.ledger_id
        handle = self._handles.get(ledger_id)
        if is_closed(row):
            last = self._closed_here.get(ledger_id) if handle is None else handle.last_add_confirmed
            if last is not None and last != row.last_entry:
                raise LedgerClosed(
                    f"somebody else closed it at {row.last_entry}, not at {last}",
                    ledger_id=ledger_id,
                    last_entry=row.last_entry,
                )
            return row
        if handle is None:
            raise WriterLost("no write handle", ledger_id=ledger_id, outcome=NOT_DONE)
        try:
            async with asyncio.timeout(_CLOSE_S):
                return await handle.close()
        except TimeoutError as error:
            raise MetadataUnavailable(
                "the close is not settled yet", ledger_id=ledger_id, outcome=UNKNOWN
            ) from error

    def _writer_of(self, row: LedgerMetadata) -> Writer:
        """The writer to forward to. Raises: LedgerClosed, LedgerFenced, WriterLost."""
        if is_closed(row):
            raise LedgerClosed(
                f"it ends at {row.last_entry}", ledger_id=row.ledger_id, last_entry=row.last_entry
            )
        if row.state is State.IN_RECOVERY:
            raise LedgerFenced("it is being recovered", ledger_id=row.ledger_id)
        if row.writer is None or row.writer.id == self.writer.id:
            raise WriterLost("no write handle", ledger_id=row.ledger_id, outcome=NOT_DONE)
        return row.writer

    async def _prefer_ledger_state(self, error: QuorumLogError, ledger_id: int) -> QuorumLogError:
        """The ledger's closed or fenced state, read from the primary, if it has one by now."""
        try:
            row = await self._rows.fresh(ledger_id)
            self._writer_of(row)
        except (LedgerClosed, LedgerFenced, NoSuchLedger) as ended:
            return ended.with_outcome(error.outcome)
        except QuorumLogError:
            pass
        return error.replace(ledger_id=ledger_id)

    def _row_changed(self, ledger_id: int) -> None:
        self.reading.tails.changed(ledger_id)
        handle, row = self._handles.get(ledger_id), self._rows.cached(ledger_id)
        if handle is not None and row is not None and is_closed(row):
            handle.closed_by_other(row)
        elif handle is not None and not handle.is_live and self._rows.is_deleted(ledger_id):
            # A live handle ends by the primary's row (`_ledger_ended`).
            del self._handles[ledger_id]

    def on_gap(self, missed: Callable[[], None]) -> None:
        """Register a callback for gaps in the stream of changes (rule 16a)."""
        self._on_gap.append(missed)

    def _on_missed_news(self) -> None:
        for missed in self._on_gap:
            missed()

    def _live_ledgers(self) -> Sequence[int]:
        return [ledger_id for ledger_id, handle in self._handles.items() if handle.is_live]

    def _ledger_ended(self, ledger_id: int) -> None:
        """A change says that a ledger is not OPEN any more. If this process writes it, somebody
        else ended it, and its handle must end now, not at the next append. A notification proves
        nothing, so the row is read.
        """
        handle = self._handles.get(ledger_id)
        if handle is not None and handle.is_live and not handle.is_closing_row:
            self.rereads.want(ledger_id)

    def _apply_head(self, head: LedgerHead) -> None:
        """Apply the primary's row of a ledger that is written here."""
        handle = self._handles.get(head.ledger_id)
        if handle is None:
            return
        if head.state is None:
            self._rows.deleted(head.ledger_id)
        handle.learn(head)
        if head.state is None:
            self._handles.pop(head.ledger_id, None)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise ShuttingDown("this gateway is about to end")

    async def _send_heartbeats(self) -> None:
        while True:
            state = "draining" if self._draining else "ready"
            heartbeat = ServiceHeartbeat(url=self.writer.url, state=state)
            with contextlib.suppress(QuorumLogError):
                await self._metadata.service_lives("gateway", self.writer.id, heartbeat)
            await asyncio.sleep(_HEARTBEAT_S)


class EngineForLogs:
    """The engine as logs use it: without passwords, and with the right to close logs' ledgers."""

    def __init__(self, engine: Engine) -> None:
        """A view."""
        self.writer = engine.writer
        self.create = engine.create
        self.get = engine.get
        self.submit = engine.submit
        self.recover = engine.recover
        self.close = engine.close_for_log
        self.read = engine.read
        self.last_add_confirmed = engine.last_add_confirmed
        self.bookies = engine.bookies
        self.gateways = engine.gateways


def _members(row: LedgerMetadata, names: Sequence[str]) -> tuple[str, ...]:
    """The ledger's members that these names of members or bookies denote."""
    members = sorted(row.all_members)
    for name in names:
        if not any(name in (member, member_name(member)) for member in members):
            raise InvalidRequest(f"{name} is no member of this ledger", ledger_id=row.ledger_id)
    return tuple(m for m in members if m in names or member_name(m) in names)


_is_complete: type[EngineInterface] = Engine
