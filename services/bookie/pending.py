"""Records on their way to the disk: how many bytes they are, and who waits for them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from quorumlog.protocol.replica import Record
from services.bookie.ledger import Ledger
from services.bookie.log import LogRecord
from services.bookie.records import owner_of, to_log
from services.bookie.writer import LogWriter, Position

T = TypeVar("T")

CROWDED_PART: Final = 4
"""Channels are not read from while more than this part of `bytes_max` is queued: some 50 ms of a
disk. Their peers are told by TCP; plain HTTP is refused at the whole."""


def tell(waiting: "asyncio.Future[T]", answer: T) -> None:
    """Give an answer to one who waits for the disk, unless that one waits no more."""
    if not waiting.done():
        waiting.set_result(answer)


class Pending:
    """What was given to the writer and is not on disk yet.

    Invariant: a ledger hears of its records in the order in which they were submitted.
    """

    def __init__(
        self,
        bytes_max: int,
        position: Position,
        counters: Counter[str],
        on_written: Callable[[int, int], None],
    ) -> None:
        """`position`: up to where the log is on disk; `on_written` hears of bytes and records."""
        self._bytes_max = bytes_max
        self.position = position
        self._counters = counters
        self._on_written = on_written
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: LogWriter | None = None
        self.bytes = 0
        self._no_room: list[asyncio.Future[None]] = []

    def start(self, writer: LogWriter) -> None:
        """From now on records go to `writer`, which tells `synced_elsewhere`."""
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        writer.start()

    def submit(self, ledger: Ledger, records: tuple[Record, ...]) -> None:
        """Have records of the rules written."""
        for record in records:
            self.put(to_log(ledger, record))

    def put(self, made: LogRecord) -> None:
        """Have a record of the log written."""
        assert self._writer is not None
        self.bytes += made.size
        self._writer.append(made)

    async def written(self, record: LogRecord) -> None:
        """Have a record of no single ledger written; on disk when it returns."""
        assert self._loop is not None
        record.tag = synced = self._loop.create_future()
        self.put(record)
        await synced

    async def all_synced(self, ledger: Ledger) -> None:
        """Wait until all records of a ledger are on disk."""
        assert self._loop is not None
        synced: asyncio.Future[None] = self._loop.create_future()
        ledger.when_synced(ledger.replica.accepted_count, lambda: tell(synced, None))
        await synced

    @property
    def is_too_much(self) -> bool:
        """Whether more is queued than is kept in memory."""
        return self.bytes > self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether so much is queued that peers should wait before they send more."""
        return self.bytes * CROWDED_PART > self._bytes_max

    async def room(self) -> None:
        """Wait until it is crowded no more."""
        assert self._loop is not None
        while self.is_crowded:
            room: asyncio.Future[None] = self._loop.create_future()
            self._no_room.append(room)
            await room

    def synced_elsewhere(self, records: list[LogRecord], position: Position) -> None:
        """In the writer's thread: tell the loop, once for the whole batch."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_synced, records, position)

    def _on_synced(self, records: list[LogRecord], position: Position) -> None:
        counts: dict[Ledger, int] = {}
        size = 0
        for record in records:
            size += record.size
            if isinstance(record.tag, asyncio.Future):
                tell(record.tag, None)
                continue
            ledger, part = owner_of(record)
            while part is not None:
                part.segment = record.segment
                part.offset = record.offset
                part.size = record.size
                part.crc = record.crc
                part.body = None
                # Entries may have been taken from it while it was on its way.
                part = part.rest
            counts[ledger] = counts.get(ledger, 0) + 1
        self.position = position
        self.bytes -= size
        self._counters["log_bytes"] += size
        self._counters["log_records"] += len(records)
        self._counters["log_syncs"] += 1
        for ledger, count in counts.items():
            ledger.on_synced(count)
        if self._no_room and not self.is_crowded:
            waiting, self._no_room = self._no_room, []
            for room in waiting:
                if not room.done():
                    room.set_result(None)
        self._on_written(size, len(records))
