"""Reading a whole segment in little memory: valid stretches, and the ledgers they name.

Unlike a replay, a scan continues behind damage at the next valid batch.
"""

import os
import time
from array import array
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

import google_crc32c

from services.bookie.index import PAUSE_S
from services.bookie.log import (
    SEGMENT_HEAD,
    Kind,
    LogBatch,
    LogDamaged,
    RecordHead,
    SegmentHead,
    next_batch,
    parse_batch,
    parse_record_heads,
    whole_bytes,
)
from services.bookie.records import packed_in
from services.bookie.segments import SegmentFile, Segments

STEP_BYTES: Final = 1024 * 1024
"""Read with one call, or the size of a batch if larger. Exceeds the table of any batch."""
HEADS_BYTES: Final = 64 * 1024
"""Read with one call where only heads are wanted: the bodies of large batches are skipped."""
HEADS_AT_ONCE: Final = 100


class Scanned(NamedTuple):
    """A batch, or a stretch without a valid one."""

    start: int
    end: int
    batch: LogBatch | None


def end_of(segments: Segments, segment: int) -> int:
    """Where a segment ends, by its successor's head, or its size if that head is invalid."""
    try:
        return segments.head(segment + 1).previous_end
    except LogDamaged:
        return segments.path(segment).stat().st_size


def scan(segments: Segments, segment: int) -> Generator[Scanned]:
    """A whole segment that has a successor, in order. Raises OSError, LogDamaged (its head)."""
    head, end = segments.head(segment), end_of(segments, segment)
    file = SegmentFile(segments.path(segment))
    yield from _scan(file.fd, head, end)


def _scan(fd: int, head: SegmentHead, end: int) -> Iterator[Scanned]:
    base = at = SEGMENT_HEAD.size
    data = b""
    while at < end:
        size = whole_bytes(head, data, at - base, base)
        if size is None or at + size > base + len(data):
            # The batch is incomplete in `data`: read on from its start.
            data, base = _read(fd, at, max(STEP_BYTES, size or 0), end), at
            size = whole_bytes(head, data, 0, base)
            if size is not None and size > len(data):
                # Its head shows a batch larger than what was read.
                data = _read(fd, at, size, end)
        batch = None if size is None else parse_batch(head, data, at - base, base)
        if batch is not None:
            yield Scanned(at, batch.end, batch)
            at = batch.end
        else:
            start, at = at, _next_batch_start(fd, head, at + 1, end) if size is None else at + size
            yield Scanned(start, min(at, end), None)


def _next_batch_start(fd: int, head: SegmentHead, at: int, end: int) -> int:
    """The next offset with valid batch heads, or the end."""
    while at < end:
        # Windows overlap, so that heads across a border are not missed.
        data = _read(fd, at, 2 * STEP_BYTES, end)
        found = next_batch(head, data, at)
        if found is not None and found < at + STEP_BYTES:
            return found
        at += STEP_BYTES
    return end


def _read(fd: int, at: int, size: int, end: int) -> bytes:
    """Bytes of the file; none if the disk fails."""
    try:
        return os.pread(fd, min(size, end - at), at)
    except OSError:
        return b""


def is_blank(segments: Segments, segment: int, start: int, end: int) -> bool:
    """Whether nothing was ever written there, as after an unclean stop. Raises OSError."""
    with segments.path(segment).open("rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(STEP_BYTES, end - start))):
            if data.count(0) != len(data):
                return False
            start += len(data)
    return True


class SegmentState(NamedTuple):
    """What a segment records beside entries."""

    ledgers: set[int]
    """Ledgers with records in it, other than deletions."""
    deleted: "array[int]"
    """Ledgers that it records as deleted (rule 16a)."""
    packed_bytes: int
    """Size of the records that pack many deletions."""
    is_whole: bool
    """Whether the whole segment was readable."""


def state_of(segments: Segments, segment: int) -> SegmentState:
    """What a segment records beside entries. Raises OSError, LogDamaged (its head).

    Entries are not read: their records' heads, which have a CRC, tell whose they are.
    """
    ledgers: set[int] = set()
    deleted = array("q")
    packed_bytes = 0
    is_whole = True
    head, end = segments.head(segment), end_of(segments, segment)
    file = SegmentFile(segments.path(segment))
    for records in _record_heads(file.fd, head, end):
        is_whole = is_whole and records is not None
        for record in records or ():
            if record.kind is Kind.DELETED:
                ids = _packed_ids(file.fd, record)
                is_whole = is_whole and ids is not None
                deleted.extend(ids or ())
                packed_bytes += record.size
            elif record.kind is Kind.DELETE:
                deleted.append(record.ledger_id)
            else:
                ledgers.add(record.ledger_id)
    return SegmentState(ledgers, deleted, packed_bytes, is_whole)


def _record_heads(fd: int, head: SegmentHead, end: int) -> Iterator[list[RecordHead] | None]:
    """The record heads of each batch; None stands for a stretch without a valid one."""
    base = at = SEGMENT_HEAD.size
    data = b""
    count = 0
    while at < end:
        found = parse_record_heads(head, data, at - base, base)
        for size in (HEADS_BYTES, STEP_BYTES):
            if found is None:
                data, base = _read(fd, at, size, end), at
                found = parse_record_heads(head, data, 0, base)
        if found is None or found[0] > end:
            yield None
            at = _next_batch_start(fd, head, at + 1, end)
            continue
        at, records = found
        yield records
        count += len(records)
        if count >= HEADS_AT_ONCE:
            count = 0
            time.sleep(PAUSE_S)


def _packed_ids(fd: int, record: RecordHead) -> Sequence[int] | None:
    """The ids in a record of packed deletions; None where it is damaged."""
    try:
        body = os.pread(fd, record.size, record.offset)
    except OSError:
        return None
    is_right = len(body) == record.size and google_crc32c.value(body) == record.crc
    return packed_in(body) if is_right else None
