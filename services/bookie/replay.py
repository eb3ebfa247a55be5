"""Replaying the log at startup: separates proven, torn and damaged data (rules 3 and 19).

Every start begins a new segment, whose head says where its predecessor ends. Whatever a crash left
behind that point is never read again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.bookie.log import (
    CLEAN_END,
    SEGMENT_HEAD,
    LogBatch,
    LogDamaged,
    QueuedRecord,
    SegmentHead,
    Stop,
    StoredRecord,
    encode_batch,
    later_sync_point,
    read_batches,
)
from services.bookie.segments import Segments
from services.bookie.writer import Position


class Placed(NamedTuple):
    """A record and the segment that holds it."""

    segment: int
    record: StoredRecord


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
    apply: Callable[[Placed], None],
    on_segment: Callable[[], None] = lambda: None,
) -> Replayed:
    """Apply all records from the checkpoint (None: from the beginning) in order, and begin a new
    segment after them. `on_segment` is called after each segment read.

    When this returns, every applied record is on disk.
    Raises: LogDamaged if data that was on disk is missing or invalid.
    """
    segments.remove_leftovers()
    numbers = segments.numbers()
    if not numbers:
        if checkpoint is not None or segments.gone() or segments.first() > 1:
            raise LogDamaged(f"{segments.directory}: the log's segments are missing")
        head, fd, end = segments.create(1, 1, 0, may_be_short=True)
        return Replayed(head, fd, Position(1, end, 1), was_clean=True)
    last = numbers[-1]
    at = checkpoint or _start(segments)
    if at.segment < segments.first():
        # The index is at an earlier checkpoint. Everything still in use of the removed segments was
        # rewritten after them.
        at = _start(segments)
    if at.segment > last:
        raise LogDamaged(f"{segments.path(at.segment)} is missing: the index covers it")
    for batch_of, batch in _whole_segments(segments, at, last, on_segment):
        _apply(batch_of, batch, apply)
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
    """The batches of all segments but the last; each ends where its successor's head says."""
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
    """Batches below this offset were synced before a later batch was written."""
    end: int
    next_sequence: int
    was_clean: bool
    cut_bytes: int


def read_tail(segments: Segments, number: int, checkpoint: Position | None) -> LogTail:
    """Read the last segment from the checkpoint (None: from its beginning) and judge how it ends.
    Changes nothing. Raises LogDamaged.
    """
    head = segments.head(number)
    start, sequence = SEGMENT_HEAD.size, head.first_sequence
    if checkpoint is not None and checkpoint.segment == number:
        start, sequence = checkpoint.offset, checkpoint.sequence
    data = segments.read_from(number, start)
    if len(data) == 0 and start > segments.path(number).stat().st_size:
        raise LogDamaged(_message(segments, number, start, "it ends before the index's checkpoint"))
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
        # The file's length was on disk before its first batch, so the missing bytes may have been
        # proven.
        reason = f"it was {head.allocated} bytes long, and was not closed cleanly"
        raise LogDamaged(_message(segments, number, start + len(data), reason))
    if was_clean and not batches[-1].records:
        # The clean end may be in the page cache only, so this start must not promise it to later
        # ones. Everything before it was synced before it was written.
        end = batches.pop().offset
    return LogTail(batches, proven, end, sequence + len(batches), was_clean, cut_bytes)


def _last_segment(
    segments: Segments,
    number: int,
    checkpoint: Position | None,
    apply: Callable[[Placed], None],
) -> Replayed:
    batches, proven, end, next_sequence, was_clean, cut_bytes = read_tail(
        segments, number, checkpoint
    )
    tail = [] if was_clean else [batch for batch in batches if batch.offset >= proven]
    for batch in batches[: len(batches) - len(tail)]:
        _apply(number, batch, apply)
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
            apply(Placed(copy.segment, stored._replace(offset=copy.offset)))
    return Replayed(
        new_head,
        fd,
        Position(number + 1, new_end, next_sequence),
        was_clean,
        copied_records=sum(map(len, copies)),
        cut_bytes=cut_bytes,
    )


def _judge(segments: Segments, head: SegmentHead, data: bytes, start: int, stop: Stop) -> None:
    """Tell a torn tail from damage. Cutting on doubt loses data, so doubt refuses (rule 19)."""
    later = later_sync_point(head, data, stop.offset - start, start)
    if later > stop.offset:
        reason = f"{stop.reason}, and what follows proves that it was on disk (below {later})"
        raise LogDamaged(_message(segments, head.segment, stop.offset, reason))
    if not stop.looks_torn:
        reason = f"{stop.reason}, and it does not look like a write that was cut off"
        raise LogDamaged(_message(segments, head.segment, stop.offset, reason))


def _apply(segment: int, batch: LogBatch, apply: Callable[[Placed], None]) -> None:
    for record in batch.records:
        apply(Placed(segment, record))


def _message(segments: Segments, segment: int, offset: int, reason: str) -> str:
    return (
        f"{segments.path(segment)} is damaged at offset {offset}: {reason}. This bookie does not"
        " start, since it might deny entries that it has acknowledged. Restore the file; or keep"
        " what can be read with `python -m services.bookie salvage DATA_DIR`; or move the data"
        " directory away and start with AUTO_FIX_COOKIES=1. It then comes back as a new"
        " incarnation and is filled from its peers."
    )
