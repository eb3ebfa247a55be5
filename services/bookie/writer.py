"""Group commit, by the one thread that owns the end of the log.

The writer takes all queued records, writes them as one batch with one call, syncs once, and
notifies the loop once. The next batch gathers during the sync, so no timer is needed. Records are
written in the order in which they were appended.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeVar

from services.bookie.log import (
    CLEAN_END,
    SEGMENT_HEAD,
    QueuedRecord,
    SegmentHead,
    batch_bytes,
    encode_batch,
)
from services.bookie.segments import NO_ROOM, Segments, allocate, write_all

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Size at which a batch gets no further record; chosen by judgement: some 10 ms of disk time."""

BATCH_RECORDS_MAX: Final = 4096

FULL_RETRY_S: Final = 0.2
"""Interval of a writer's retries while it waits for room."""

T = TypeVar("T")

ZEROS: Final = bytes(256 * 1024)
"""Zeros that are written after small batches. A sync of blocks that were written before costs 66 us
instead of 82 us (measured), because the file system need not convert an unwritten extent."""

SMALL_BATCH_BYTES: Final = 32 * 1024
"""Maximum size of a batch that zeros follow; after larger batches they double the writes."""


class Position(NamedTuple):
    """A place in the log between two batches, and the sequence number of the batch after it."""

    segment: int
    offset: int
    sequence: int


@dataclass(eq=False)
class LogWriter:
    """Appends records, batch by batch.

    `on_synced(records, position)` and `on_fatal(error)` are called in the writer's thread. After
    `on_fatal` nothing more is written: a failed fsync is never retried, because the kernel may have
    dropped the data (rule 3).
    """

    _segments: Segments
    _head: SegmentHead
    _fd: int
    """The file of the segment `_head`."""
    position: InitVar[Position]
    """The position in the segment from which to continue."""
    reserve: Path
    on_synced: Callable[[list[QueuedRecord], Position], None]
    on_fatal: Callable[[BaseException], None]
    is_full: bool = False
    """Whether the writer waits for room on the disk."""
    sync_ns: int = 0
    """Total duration of all syncs; the store's counter `log_syncs` has their number."""

    def __post_init__(self, position: Position) -> None:
        self._offset = self._filled = position.offset
        self._sequence = position.sequence
        self._allocated = os.fstat(self._fd).st_size
        self._queue: SimpleQueue[QueuedRecord | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self._is_ending = threading.Event()

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def append(self, record: QueuedRecord) -> None:
        """Queue a record; `on_synced` reports it once it is on disk."""
        self._queue.put(record)

    def stop(self) -> None:
        """Write queued records and the clean end, and wait. On a full disk the writer gives up,
        since queued records were not acknowledged, except deferred entries (rule 31).
        """
        self._is_ending.set()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            is_last = False
            while not is_last:
                records, is_last = self._take()
                if records:
                    self._write(records)
                    position = Position(self._head.segment, self._offset, self._sequence)
                    self.on_synced(records, position)
            self._write([], CLEAN_END)
            os.ftruncate(self._fd, self._offset)
            os.fsync(self._fd)
        except BaseException as error:  # noqa: BLE001 - any error ends the log
            self.on_fatal(error)
        finally:
            os.close(self._fd)

    def _take(self) -> tuple[list[QueuedRecord], bool]:
        queue = self._queue
        record = queue.get()
        records: list[QueuedRecord] = []
        size = 0
        try:
            while record is not None:
                records.append(record)
                size += record.size
                if size >= BATCH_BYTES_MAX or len(records) >= BATCH_RECORDS_MAX:
                    return records, False
                record = queue.get_nowait()
        except Empty:
            return records, False
        return records, True

    def _write(self, records: list[QueuedRecord], flags: int = 0) -> None:
        size = batch_bytes(records)
        if self._offset + size > self._segments.segment_bytes and self._offset > SEGMENT_HEAD.size:
            self._roll()
        # All below `_offset` is synced, because a batch is synced before the next one begins.
        buffers = encode_batch(
            self._head,
            offset=self._offset,
            sequence=self._sequence,
            synced_below=self._offset,
            records=records,
            flags=flags,
        )
        end = self._offset + size
        if end > self._allocated:  # a large batch, or a segment created on a full disk
            self._with_room(lambda: allocate(self._fd, end))
            self._allocated = end
        if size <= SMALL_BATCH_BYTES and end > self._filled:
            ahead = min(len(ZEROS), self._allocated - end)
            self._filled = end + ahead
            buffers.append(ZEROS[:ahead])
        write_all(self._fd, buffers, self._offset)
        self._sync()
        self._offset = end
        self._filled = max(self._filled, end)
        self._sequence += 1

    def _sync(self) -> None:
        """Sync the written batch. After an error nothing more is written (rule 3)."""
        begun = time.perf_counter_ns()
        os.fdatasync(self._fd)
        self.sync_ns += time.perf_counter_ns() - begun

    def _roll(self) -> None:
        """Begin a new segment. Its head contains the old segment's end, which is on disk."""
        number = self._head.segment + 1
        created = self._with_room(
            lambda: self._segments.create(number, self._sequence, self._offset)
        )
        os.ftruncate(self._fd, self._offset)
        os.close(self._fd)
        self._head, self._fd, self._offset = created
        self._filled = self._offset
        self._allocated = os.fstat(self._fd).st_size

    def _with_room(self, work: Callable[[], T]) -> T:
        """Run `work`, which allocates blocks. On a full disk, first release the reserve, because
        accepted records must be written. Then wait until there is room. Nothing is lost meanwhile,
        because waiting records are not acknowledged, except deferred entries (rule 31).
        """
        while True:
            try:
                done = work()
            except OSError as error:
                if error.errno not in NO_ROOM or self._is_ending.is_set():
                    raise
                self.is_full = True
                try:
                    self.reserve.unlink()
                except FileNotFoundError:
                    # The reserve is used already, perhaps by a checkpoint.
                    self._is_ending.wait(FULL_RETRY_S)
            else:
                self.is_full = False
                return done


def keep_reserve(path: Path, size: int) -> bool:
    """Reserve disk blocks of `size` bytes for a full disk. Returns False if there is no room."""
    if path.exists():
        return True
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            allocate(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        path.unlink(missing_ok=True)
        return False
    return True


def has_room(directory: Path, size: int) -> bool:
    """Whether `size` bytes can be allocated. Free space alone is no proof, because of quotas."""
    probe = directory / "room"
    probe.unlink(missing_ok=True)
    is_there = keep_reserve(probe, size)
    probe.unlink(missing_ok=True)
    return is_there
