"""Reads the log back: the replay at startup, and scans of whole segments in little memory.

A replay separates proven, torn and damaged data (rules 3 and 19). Every start begins a new segment,
whose head contains the predecessor's end. Data that a crash left beyond that end is never read
again. Unlike a replay, a scan continues after damage, at the next valid batch.
"""

import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c

from services.bookie.index import PAUSE_S
from services.bookie.log import (
    CLEAN_END,
    SEGMENT_HEAD,
    Kind,
    LogBatch,
    LogDamaged,
    QueuedRecord,
    RecordHead,
    SegmentHead,
    Stop,
    StoredRecord,
    encode_batch,
    later_sync_point,
    next_batch,
    parse_batch,
    parse_record_heads,
    read_batches,
    whole_bytes,
)
from services.bookie.records import packed_in
from services.bookie.segments import SegmentFile, Segments
from services.bookie.writer import Position

STEP_BYTES: Final = 1024 * 1024
"""Bytes per read call; a larger batch is read with one call. Larger than any batch's heads."""
HEADS_BYTES: Final = 64 * 1024
"""Bytes per read call where only heads are needed, so that large bodies are skipped."""
HEADS_AT_ONCE: Final = 100

Apply = Callable[[int, StoredRecord], None]
"""A function that applies a record; its arguments are the record's segment and the record."""


@dataclass(slots=True)
class Replayed:
    """The end of the log after a start: a new segment, ready for writing."""

    head: SegmentHead
    fd: int
    position: Position
    was_clean: bool
    copied_records: int = 0
    cut_bytes: int = 0


def replay_log(
    segments: Segments,
    checkpoint: Position | None,
    apply: Apply,
    on_segment: Callable[[], None] = lambda: None,
) -> Replayed:
    """Apply all records from the checkpoint (None: from the beginning) in order, and begin a new
    segment. `on_segment` is called after each segment.

    When this returns, every applied record is on disk.
    Raises: LogDamaged if data that was on disk is missing or invalid.
    """
    segments.remove_leftovers()
    numbers = segments.numbers()
    if not numbers:
        if checkpoint is not None or segments.gone() or segments.first() > 1:
            raise LogDamaged(f"the segments are missing from {segments.directory}: restore them")
        head, fd, end = segments.create(1, 1, 0, may_be_short=True)
        return Replayed(head, fd, Position(1, end, 1), was_clean=True)
    last = numbers[-1]
    at = checkpoint or _start(segments)
    if at.segment < segments.first():
        # The index is at an earlier checkpoint. Data of removed segments that was still in use was
        # rewritten in later segments.
        at = _start(segments)
    if at.segment > last:
        raise LogDamaged(f"{segments.path(at.segment)} is missing, but is indexed: restore it")
    for batch_of, batch in _whole_segments(segments, at, last, on_segment):
        for record in batch.records:
            apply(batch_of, record)
    replayed = _last_segment(segments, last, checkpoint, apply)
    on_segment()
    return replayed


def _start(segments: Segments) -> Position:
    """The beginning of the log: its first segment, present or removed."""
    first = segments.first()
    if min(segments.numbers() + segments.gone()) != first:
        raise LogDamaged(f"{segments.path(first)} is missing")
    return Position(first, SEGMENT_HEAD.size, segments.head(first).first_sequence)


def _whole_segments(
    segments: Segments, at: Position, last: int, on_segment: Callable[[], None]
) -> Iterator[tuple[int, LogBatch]]:
    """Yields the batches of all segments but the last, up to the end in the successor's head."""
    present = set(segments.numbers())
    for number in range(at.segment, last):
        head = segments.head(number)
        if number not in present:
            continue
        start = at.offset if number == at.segment else SEGMENT_HEAD.size
        sequence = at.sequence if number == at.segment else head.first_sequence
        end = segments.head(number + 1).previous_end
        for batch in read_batches(head, segments.read_from(number, start), start, end):
            if isinstance(batch, Stop):
                raise LogDamaged(_message(segments, number, batch.offset, batch.reason))
            if batch.sequence != sequence:
                raise LogDamaged(_message(segments, number, batch.offset, "a batch is missing"))
            sequence += 1
            yield number, batch
        expected = segments.head(number + 1).first_sequence
        if sequence != expected:
            raise LogDamaged(_message(segments, number, end, "batches are missing at the end"))
        on_segment()


class LogTail(NamedTuple):
    """The last segment, as a start interprets it."""

    batches: list[LogBatch]
    """All valid batches, without the clean end."""
    proven: int
    """The offset below which batches were synced before a later batch was written."""
    end: int
    next_sequence: int
    was_clean: bool
    cut_bytes: int


def read_tail(segments: Segments, number: int, checkpoint: Position | None) -> LogTail:
    """Read the last segment from the checkpoint (None: from the segment's beginning), and decide
    how the log ends. Changes nothing. Raises LogDamaged.
    """
    head = segments.head(number)
    start, sequence = SEGMENT_HEAD.size, head.first_sequence
    if checkpoint is not None and checkpoint.segment == number:
        start, sequence = checkpoint.offset, checkpoint.sequence
    data = segments.read_from(number, start)
    if len(data) == 0 and start > segments.path(number).stat().st_size:
        raise LogDamaged(_message(segments, number, start, "the segment ends before this offset"))
    batches: list[LogBatch] = []
    proven, end = start, start
    stop: Stop | None = None
    for item in read_batches(head, data, start):
        if isinstance(item, Stop):
            stop = item
            break
        if item.sequence != sequence + len(batches):
            raise LogDamaged(_message(segments, number, item.offset, "a batch is missing"))
        batches.append(item)
        proven = max(proven, item.synced_below)
        end = item.end
    was_clean = bool(batches) and batches[-1].flags & CLEAN_END != 0
    cut_bytes = 0
    if stop is not None and not stop.is_blank:
        _judge(segments, head, data, start, stop)
        cut_bytes = max(0, len(data.rstrip(b"\0")) - (stop.offset - start))
    if not was_clean and start + len(data) < head.allocated:
        # The file's length was on disk before the first batch, so the missing bytes may have been
        # on disk too.
        reason = f"the file had {head.allocated} bytes, and was not closed cleanly"
        raise LogDamaged(_message(segments, number, start + len(data), reason))
    if was_clean and not batches[-1].records:
        # The clean end may be in the page cache only, so later starts must not rely on it. All
        # earlier batches were synced before the clean end was written.
        end = batches.pop().offset
    return LogTail(batches, proven, end, sequence + len(batches), was_clean, cut_bytes)


def _last_segment(
    segments: Segments,
    number: int,
    checkpoint: Position | None,
    apply: Apply,
) -> Replayed:
    batches, proven, end, next_sequence, was_clean, cut_bytes = read_tail(
        segments, number, checkpoint
    )
    tail = [] if was_clean else [batch for batch in batches if batch.offset >= proven]
    for batch in batches[: len(batches) - len(tail)]:
        for record in batch.records:
            apply(number, record)
    previous_end = tail[0].offset if tail else end
    first_sequence = next_sequence - len(tail)
    copies: list[list[QueuedRecord]] = [[r.again() for r in batch.records] for batch in tail]

    def fill(new_head: SegmentHead) -> list[bytes]:
        buffers: list[bytes] = []
        at = SEGMENT_HEAD.size
        for place, records in enumerate(copies):
            made = encode_batch(
                new_head,
                offset=at,
                sequence=first_sequence + place,
                synced_below=SEGMENT_HEAD.size,
                records=records,
            )
            at += sum(map(len, made))
            buffers += made
        return buffers

    new_head, fd, new_end = segments.create(
        number + 1, first_sequence, previous_end, fill, may_be_short=True
    )
    for batch, records in zip(tail, copies, strict=True):
        for stored, copy in zip(batch.records, records, strict=True):
            apply(copy.segment, stored._replace(offset=copy.offset))
    return Replayed(
        new_head,
        fd,
        Position(number + 1, new_end, next_sequence),
        was_clean,
        copied_records=sum(map(len, copies)),
        cut_bytes=cut_bytes,
    )


def _judge(segments: Segments, head: SegmentHead, data: bytes, start: int, stop: Stop) -> None:
    """Raise LogDamaged unless the tail is clearly torn, since a cut could lose data (rule 19)."""
    later = later_sync_point(head, data, stop.offset - start, start)
    if later > stop.offset:
        reason = f"{stop.reason}, but later batches prove that all below offset {later} was on disk"
        raise LogDamaged(_message(segments, head.segment, stop.offset, reason))
    if not stop.looks_torn:
        reason = f"{stop.reason}, and the end does not look like an interrupted write"
        raise LogDamaged(_message(segments, head.segment, stop.offset, reason))


def _message(segments: Segments, segment: int, offset: int, reason: str) -> str:
    return (
        f"{segments.path(segment)} is damaged at offset {offset}: {reason}. This bookie does not"
        " start, since it might deny acknowledged entries. Restore the file; or keep the readable"
        " records with `python -m services.bookie salvage DATA_DIR`; or move the data"
        " directory away and start with AUTO_FIX_COOKIES=1. The bookie then continues as a new"
        " incarnation and is filled from its peers."
    )


class Scanned(NamedTuple):
    """A valid batch, or a stretch of a segment without a valid batch."""

    start: int
    end: int
    batch: LogBatch | None


def end_of(segments: Segments, segment: int) -> int:
    """The end of a segment, from its successor's head; if that head is invalid, the file's size."""
    try:
        return segments.head(segment + 1).previous_end
    except LogDamaged:
        return segments.path(segment).stat().st_size


def scan(segments: Segments, segment: int) -> Generator[Scanned]:
    """Read a whole segment that has a successor. Raises OSError, LogDamaged (invalid head)."""
    head, end = segments.head(segment), end_of(segments, segment)
    file = SegmentFile(segments.path(segment))
    yield from _scan(file.fd, head, end)


def _scan(fd: int, head: SegmentHead, end: int) -> Iterator[Scanned]:
    base = at = SEGMENT_HEAD.size
    data = b""
    while at < end:
        size = whole_bytes(head, data, at - base, base)
        if size is None or at + size > base + len(data):
            # The batch is incomplete in `data`, so read again from the batch's start.
            data, base = _read(fd, at, max(STEP_BYTES, size or 0), end), at
            size = whole_bytes(head, data, 0, base)
            if size is not None and size > len(data):
                # The head of the batch shows that the batch is larger than `data`.
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
        # The windows overlap, so that heads across a border are not missed.
        data = _read(fd, at, 2 * STEP_BYTES, end)
        found = next_batch(head, data, at)
        if found is not None and found < at + STEP_BYTES:
            return found
        at += STEP_BYTES
    return end


def _read(fd: int, at: int, size: int, end: int) -> bytes:
    """Bytes of the file; empty if the disk fails."""
    try:
        return os.pread(fd, min(size, end - at), at)
    except OSError:
        return b""


def is_blank(segments: Segments, segment: int, start: int, end: int) -> bool:
    """Whether start..end of a segment is all zeros, as after an unclean stop. Raises OSError."""
    with segments.path(segment).open("rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(STEP_BYTES, end - start))):
            if data.count(0) != len(data):
                return False
            start += len(data)
    return True


class SegmentState(NamedTuple):
    """The content of a segment, except its entries."""

    ledgers: set[int]
    """Ledgers with records other than deletions in the segment."""
    deleted: "array[int]"
    """Ledgers that the segment records as deleted (rule 16a)."""
    packed_bytes: int
    """Size of the records that pack many deletions."""
    is_whole: bool
    """Whether the whole segment was readable."""


def state_of(segments: Segments, segment: int) -> SegmentState:
    """Read a segment's content, except entries. Raises OSError, LogDamaged (invalid head). Entries
    need not be read, because the record heads, which have a CRC, name their ledgers.
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
    """The record heads of each batch; None stands for a stretch without a valid batch."""
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
    """The ids in a record of packed deletions, or None if the record is damaged."""
    try:
        body = os.pread(fd, record.size, record.offset)
    except OSError:
        return None
    is_right = len(body) == record.size and google_crc32c.value(body) == record.crc
    return packed_in(body) if is_right else None
