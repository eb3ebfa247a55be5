"""Records queued for the disk: their size, and the tasks that wait for them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from quorumlog.protocol.replica import RunStored, Verdict
from services.bookie.ledger import StoredLedger
from services.bookie.log import QueuedRecord
from services.bookie.parts import Part
from services.bookie.records import owner_of, to_log
from services.bookie.writer import LogWriter, Position

log = logging.getLogger(__name__)

T = TypeVar("T")

CROWDED_PART: Final = 4
"""Channels are not read while more than this part of `bytes_max` is queued, which a disk writes in some
50 ms: TCP then slows their peers down. Adds by plain HTTP are refused only above `bytes_max`."""


def resolve(waiting: "asyncio.Future[T]", answer: T) -> None:
    """Set a future's result unless its waiter was cancelled."""
    if not waiting.done():
        waiting.set_result(answer)


class PendingWrites:
    """Records that were given to the writer and are not on disk yet.

    Invariant: a ledger learns of its records in the order of submission.
    """

    def __init__(
        self,
        bytes_max: int,
        position: Position,
        counters: Counter[str],
        on_written: Callable[[int, int], None],
    ) -> None:
        """`position`: how far the log is on disk; `on_written` gets each batch's bytes, count."""
        self._bytes_max = bytes_max
        self.position = position
        self._counters = counters
        self._on_written = on_written
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: LogWriter | None = None
        self.bytes = 0
        self._room_waiters: list[Callable[[], None]] = []

    def start(self, writer: LogWriter, on_fatal: Callable[[BaseException], None]) -> None:
        """Send records to `writer`, which reports each batch to `on_batch_synced`. `on_fatal` is called
        if those who wait for the disk can no longer be answered.
        """
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        writer.start()

    def submit(self, ledger: StoredLedger, verdict: Verdict) -> None:
        """Queue the records of a verdict."""
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
        """Queue a record of no single ledger; on disk when it returns."""
        assert self._loop is not None
        record.tag = synced = self._loop.create_future()
        self.put(record)
        await synced

    async def wait_synced(self, ledger: StoredLedger) -> None:
        """Wait until all records of a ledger are on disk."""
        assert self._loop is not None
        synced: asyncio.Future[None] = self._loop.create_future()
        ledger.when_synced(ledger.replica.accepted_count, lambda: resolve(synced, None))
        await synced

    @property
    def is_over_limit(self) -> bool:
        """Whether more is queued than may stay in memory."""
        return self.bytes > self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether so much is queued that peers should wait before they send more."""
        return self.bytes * CROWDED_PART > self._bytes_max

    def when_roomy(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the queue, which is crowded, is crowded no longer."""
        self._room_waiters.append(tell)

    def on_batch_synced(self, records: list[QueuedRecord], position: Position) -> None:
        """In the writer's thread: notify the loop, once per batch."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_synced, records, position)

    def _on_synced(self, records: list[QueuedRecord], position: Position) -> None:
        try:
            self._note_synced(records, position)
        except Exception as error:
            # A defect: what waits for this batch would wait for ever.
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
                # Another part may have taken entries while this one was queued.
                part = part.rest
            counts[ledger] = counts.get(ledger, 0) + 1
        self.position = position
        self.bytes -= size
        self._counters["log_bytes"] += size
        self._counters["log_records"] += len(records)
        self._counters["log_syncs"] += 1
        for ledger, count in counts.items():
            ledger.on_synced(count)
        if self._room_waiters and not self.is_crowded:
            waiting, self._room_waiters = self._room_waiters, []
            loop = asyncio.get_running_loop()
            for tell in waiting:
                loop.call_soon(tell)
        self._on_written(size, len(records))
