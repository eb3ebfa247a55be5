"""Records that are queued for the disk, and the checkpoints that bring the index up to date with
the log.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from quorumlog.protocol.replica import RunStored, Verdict
from services.bookie.directory import Disk, is_disk_full_error
from services.bookie.holdings import LedgerTable
from services.bookie.index import Index
from services.bookie.ledger import StoredLedger
from services.bookie.log import QueuedRecord
from services.bookie.parts import Part
from services.bookie.records import owner_of, to_log
from services.bookie.writer import LogWriter, Position

log = logging.getLogger(__name__)

T = TypeVar("T")

CROWDED_PART: Final = 4
"""Channels are not read while more than `bytes_max` / CROWDED_PART is queued (some 50 ms of disk
time), so that TCP slows the peers down. Adds by plain HTTP are refused only above `bytes_max`."""

CHECKPOINT_COST: Final = 2048
"""A record's weight towards the next checkpoint, in addition to its bytes. A part takes some 300
bytes of memory until a checkpoint, and a checkpoint of many parts stalls the event loop."""

CHECKPOINT_S: Final = 15.0
"""Maximum time from a record to the next checkpoint, which frees parts and copies of ledger
metadata (up to `checkpoint_bytes`). Chosen by judgement: a checkpoint takes a thread 10 ms."""


def resolve(waiting: "asyncio.Future[T]", answer: T) -> None:
    """Set a future's result unless its waiter was cancelled."""
    if not waiting.done():
        waiting.set_result(answer)


async def answered(ask: Callable[[Callable[[T], None]], None]) -> T:
    """Call `ask` with a callback, and return the value passed to the callback."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    ask(partial(resolve, answer))
    return await answer


@dataclass(eq=False)
class PendingWrites:
    """The records that are queued in the writer and not on disk yet.

    Invariant: a ledger is notified of synced records in the order of submission.
    """

    _bytes_max: int
    position: Position
    """The log's end on disk."""
    _counters: Counter[str]
    _on_written: Callable[[int, int], None]
    """`on_written(bytes, records)` reports each batch."""
    _loop: asyncio.AbstractEventLoop | None = None
    _writer: LogWriter | None = None
    bytes: int = 0
    _room_waiters: list[Callable[[], None]] = field(default_factory=list)

    def start(self, writer: LogWriter, on_fatal: Callable[[BaseException], None]) -> None:
        """Send records to `writer`, which reports each batch to `on_batch_synced`. `on_fatal` is
        called if requests that wait for the disk can never be answered.
        """
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        writer.start()

    def submit(self, ledger: StoredLedger, verdict: Verdict) -> None:
        """Queue the records that a replica's verdict requires."""
        part = verdict.made
        assert part is None or isinstance(part, Part), "StoredLedger.accept made it"
        for record in verdict.records:
            self.put(to_log(ledger, record, part if isinstance(record, RunStored) else None))

    def put(self, made: QueuedRecord) -> None:
        """Queue a record of the log."""
        assert self._writer is not None
        self.bytes += made.size
        self._writer.append(made)

    async def write(self, record: QueuedRecord) -> None:
        """Write a record that belongs to no single ledger, and wait until the record is on disk."""
        record.tag = synced = asyncio.get_running_loop().create_future()
        self.put(record)
        await synced

    async def wait_synced(self, ledger: StoredLedger) -> None:
        """Wait until all records of a ledger are on disk."""
        synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ledger.when_synced(ledger.replica.accepted_count, lambda: resolve(synced, None))
        await synced

    @property
    def is_over_limit(self) -> bool:
        """Whether the queued records exceed the memory limit."""
        return self.bytes > self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether peers should wait, because over `bytes_max` / CROWDED_PART is queued."""
        return self.bytes * CROWDED_PART > self._bytes_max

    def when_roomy(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, when the queue is no longer crowded. The queue is crowded now."""
        self._room_waiters.append(notify)

    def on_batch_synced(self, records: list[QueuedRecord], position: Position) -> None:
        """Notify the event loop of a batch that is on disk. Called in the writer's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_synced, records, position)

    def _on_synced(self, records: list[QueuedRecord], position: Position) -> None:
        try:
            self._note_synced(records, position)
        except Exception as error:
            # Without a fatal error, requests that wait for this batch would wait for ever.
            log.exception("batch-not-noted")
            self._on_fatal(error)

    def _note_synced(self, records: list[QueuedRecord], position: Position) -> None:
        counts: dict[StoredLedger, int] = {}
        size = 0
        for record in records:
            size += record.size
            if isinstance(record.tag, asyncio.Future):
                resolve(record.tag, None)
                continue
            ledger, part = owner_of(record)
            while part is not None:
                part.segment = record.segment
                part.offset = record.offset
                part.size = record.size
                part.crc = record.crc
                part.body = None
                # While this part was queued, another part may have replaced some of its entries.
                part = part.rest
            counts[ledger] = counts.get(ledger, 0) + 1
        self.position = position
        self.bytes -= size
        self._counters["log_bytes"] += size
        self._counters["log_records"] += len(records)
        self._counters["log_syncs"] += 1
        assert self._writer is not None
        self._counters["log_sync_us"] = self._writer.sync_ns // 1000
        for ledger, count in counts.items():
            ledger.on_synced(count)
        if self._room_waiters and not self.is_crowded:
            waiting, self._room_waiters = self._room_waiters, []
            loop = asyncio.get_running_loop()
            for notify in waiting:
                loop.call_soon(notify)
        self._on_written(size, len(records))


@dataclass(eq=False)
class Checkpoints:
    """Runs one checkpoint at a time.

    Invariant: a checkpoint contains a log position below which all records are on disk, and this
    position is read before the index is written.
    """

    _holdings: LedgerTable
    _index: Index
    _disk: Disk
    _counters: Counter[str]
    _position: Callable[[], Position]
    """Returns the log position up to which all records are on disk."""
    _running: asyncio.Task[None] | None = None
    _since: int = 0
    """The weight of the records since the last checkpoint began."""
    _timer: asyncio.TimerHandle | None = None
    _is_closed: bool = False
    _is_disk_full: bool = False
    """Whether the last checkpoint lacked room. If so, the next checkpoint waits for a record."""

    def note_written(self, size: int, count: int) -> None:
        """Count records that reached the log; start a checkpoint after enough records or time."""
        self._is_disk_full = False
        self._since += size + CHECKPOINT_COST * count
        if self._since >= self._disk.options.checkpoint_bytes:
            self.start_background()
        else:
            self._await_due()

    def _await_due(self) -> None:
        if self._since and self._timer is None and not (self._is_closed or self._is_disk_full):
            self._timer = asyncio.get_running_loop().call_later(CHECKPOINT_S, self._is_due)

    def _is_due(self) -> None:
        self._timer = None
        if self._since:
            self.start_background()

    def close(self) -> None:
        """Prevent further background checkpoints."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def start_background(self) -> None:
        """Start a background checkpoint unless one is running."""
        if self._running is None and not self._is_closed:
            _ = self._begin(self._run_logged())

    async def run(self) -> None:
        """Run a checkpoint that begins after this call. Raises the checkpoint's error."""
        while self._running is not None:
            await asyncio.wait({self._running})
        await asyncio.shield(self._begin(self._write()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._running = task = asyncio.create_task(work)
        # A task that is cancelled before its first step runs none of its code.
        task.add_done_callback(self._ended)
        return task

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._running = None
        self._await_due()

    async def run_final(self) -> None:
        """Run the checkpoint of an orderly shutdown."""
        if self._running is not None:
            # The caller that started the running checkpoint handles its failure.
            await asyncio.wait({self._running})
        await self._run_logged()

    async def _run_logged(self) -> None:
        """Run a checkpoint and log its failure; the next checkpoint retries."""
        try:
            await self._write()
        except Exception:
            log.exception("checkpoint-failed")
            self._counters["failed_checkpoints"] += 1

    async def _write(self) -> None:
        self._since = 0
        changes = self._holdings.changes()
        position = self._position()
        try:
            await asyncio.to_thread(
                self._index.write,
                position,
                [change for _, change in changes],
                self._holdings.deleted,
                self._holdings.fresh.encode(),
            )
        except Exception as error:
            for ledger, change in changes:
                ledger.checkpoint_failed(change)
            if is_disk_full_error(error):
                # The next checkpoint uses the reserve's room, or waits until there is room.
                self._disk.release_reserve()
                self._is_disk_full = True
            self._since = self._disk.options.checkpoint_bytes * 7 // 8
            raise
        self._holdings.checkpointed(changes)
        self._counters["checkpoints"] += 1
