"""Reading a whole segment in little memory: which stretches of it are right, and whom they name.

Unlike a replay it does not stop where something is wrong: it goes on at the next right batch.
"""

import os
from array import array
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from services.bookie.log import (
    SEGMENT_HEAD,
    Batch,
    Kind,
    LogDamaged,
    SegmentHead,
    next_batch,
    parse_batch,
    whole_bytes,
)
from services.bookie.records import deleted_in
from services.bookie.segments import Segments

STEP_BYTES: Final = 1024 * 1024
"""Read with one call; more only where a single batch is larger. Above the table of a batch."""


class Scanned(NamedTuple):
    """A batch, or a stretch in which none is right."""

    start: int
    end: int
    batch: Batch | None


def end_of(segments: Segments, segment: int) -> int:
    """Where a segment ends that has a successor; its size, if that one's head is not right."""
    try:
        return segments.head(segment + 1).previous_end
    except LogDamaged:
        return segments.path(segment).stat().st_size


def scan(segments: Segments, segment: int) -> Generator[Scanned]:
    """All of a segment that has a successor, in order. Raises OSError, LogDamaged (its head)."""
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
            # Not all of it is here yet: read on from there.
            data, base = _read(fd, at, max(STEP_BYTES, size or 0), end), at
            size = whole_bytes(head, data, 0, base)
            if size is not None and size > len(data):
                # Only its head tells that a batch is larger than what was read.
                data = _read(fd, at, size, end)
        batch = None if size is None else parse_batch(head, data, at - base, base)
        if batch is not None:
            yield Scanned(at, batch.end, batch)
            at = batch.end
        else:
            start, at = at, _next(fd, head, at + 1, end) if size is None else at + size
            yield Scanned(start, min(at, end), None)


def _next(fd: int, head: SegmentHead, at: int, end: int) -> int:
    """The next place where a batch's heads are right, or the end."""
    while at < end:
        # Windows overlap, so that no heads lie across two of them unseen.
        data = _read(fd, at, 2 * STEP_BYTES, end)
        found = next_batch(head, data, at)
        if found is not None and found < at + STEP_BYTES:
            return found
        at += STEP_BYTES
    return end


def _read(fd: int, at: int, size: int, end: int) -> bytes:
    """Bytes of the file; none where the disk can't read them."""
    try:
        return os.pread(fd, min(size, end - at), at)
    except OSError:
        return b""


def is_blank(segments: Segments, segment: int, start: int, end: int) -> bool:
    """Nothing was ever written there: the end of a segment that was not closed. Raises OSError."""
    with segments.path(segment).open("rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(STEP_BYTES, end - start))):
            if data.count(0) != len(data):
                return False
            start += len(data)
    return True


class Words(NamedTuple):
    """What a segment says beside entries."""

    ledgers: set[int]
    """Whom it speaks of, deleted ones by their other records only."""
    deleted: "array[int]"
    """Who it says is deleted (rule 16a)."""
    packed_bytes: int
    """Of the records that name many of these."""
    is_whole: bool
    """Whether all of it could be read."""


def words_of(segments: Segments, segment: int) -> Words:
    """What a segment says beside entries. Raises OSError, LogDamaged (its head)."""
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
    return Words(ledgers, deleted, packed_bytes, is_whole)
