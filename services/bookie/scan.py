"""Reading a whole segment in little memory: valid stretches, and the ledgers they name.

Unlike a replay, a scan continues behind damage at the next valid batch.
"""

import os
from array import array
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from services.bookie.log import (
    SEGMENT_HEAD,
    Kind,
    LogBatch,
    LogDamaged,
    SegmentHead,
    next_batch,
    parse_batch,
    whole_bytes,
)
from services.bookie.records import deleted_in
from services.bookie.segments import Segments

STEP_BYTES: Final = 1024 * 1024
"""Read with one call, or the size of a batch if larger. Exceeds the table of any batch."""


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
    fd = os.open(segments.path(segment), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from _scan(fd, head, end)
    finally:
        os.close(fd)


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
    """What a segment records beside entries. Raises OSError, LogDamaged (its head)."""
    ledgers: set[int] = set()
    deleted = array("q")
    packed_bytes = 0
    is_whole = True
    for scanned in scan(segments, segment):
        if scanned.batch is None:
            is_whole = False
            continue
        for record in scanned.batch.records:
            ids = deleted_in(record)
            deleted.extend(ids)
            if not ids:
                ledgers.add(record.ledger_id)
            elif record.kind is Kind.DELETED:
                packed_bytes += record.size
    return SegmentState(ledgers, deleted, packed_bytes, is_whole)
