"""The format of a bookie's log. Encodes batches of records, and parses the bytes of a segment.

A segment is a file with a head and batches, one per group commit. All numbers are big-endian.

    segment head   magic 8s | segment u64 | nonce u64 | first sequence u64 | previous end u64
                   | allocated u64 | crc u32
    batch head     magic u32 | flags u32 | segment u64 | nonce u64 | offset u64 | sequence u64
                   | synced below u64 | records u32 | bytes u32 | crc u32
    record heads   kind u8 | flags u8 | 0 u16 | ledger i64 | bytes u32 | crc u32 of the body   (each)
    bodies         one after another

A batch's CRC covers the batch head and the record heads, which contain the batch's place and the
CRCs of the bodies. So the CRC protects the whole batch, but one body can be checked alone.

`synced below` (rule 19) is an offset in this segment: bytes below it were on disk before this batch
was written. Earlier segments are on disk up to the `previous end` in their successor's head.
Each segment has a random nonce, so that a payload cannot pose as a batch.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import google_crc32c

SEGMENT_MAGIC: Final = b"qlogseg2"
BATCH_MAGIC: Final = 0x71_6C_42_31
SEGMENT_HEAD: Final = struct.Struct(">8sQQQQQI")
_SEGMENT_START: Final = struct.Struct(">8sQQQQQ")
BATCH_HEAD: Final = struct.Struct(">IIQQQQQIII")
_BATCH_START: Final = struct.Struct(">IIQQQQQII")
_RECORD_HEAD: Final = struct.Struct(">BBHqII")
_MAGIC_BYTES: Final = BATCH_MAGIC.to_bytes(4, "big")

SECTOR: Final = 512
"""Bytes of a sector, which a disk writes completely or not at all."""

CLEAN_END: Final = 1
"""Batch flag of a cleanly closed log: nothing follows in this segment."""

KEY_BYTES: Final = 32


class Kind(IntEnum):
    """The kind of a record. Bodies begin with the ledger's key, except LIMBO, DELETE, DELETED."""

    RUN = 1
    """key | body of a run. Flag 1: replaces damaged copies."""
    FENCE = 2
    """key"""
    LAC = 3
    """key | LAC i64"""
    LIMBO = 4
    """counter u64 | limbo u8"""
    DROP = 5
    """key. Drops the ledger's earlier runs; a fenced stub stays (rule 16)."""
    DELETE = 6
    """No body. The metadata has a tombstone, so only the id is kept (rules 16a, 17)."""
    DELETED = 7
    """id i64 (each). Deleted ledgers, packed by a compaction; the record head has the first id."""
    ROW = 8
    """key | version u64 | attempt [16] (zeros: none) | copy of ledger metadata (rule 18b)."""


_KINDS: Final = frozenset(Kind)

REPLACES: Final = 1


class LogDamaged(Exception):
    """Data that was on disk is missing or corrupt, so an operator must decide (rule 19)."""


class SegmentHead(NamedTuple):
    """The head of a segment; it also records where the previous segment ends."""

    segment: int
    nonce: int
    first_sequence: int
    previous_end: int
    allocated: int
    """The file's length, which is durably allocated before the first use. So a shorter file that
    was not closed cleanly was truncated."""

    def encode(self) -> bytes:
        """The head as bytes, with its CRC."""
        start = _SEGMENT_START.pack(SEGMENT_MAGIC, *self)
        return start + int(google_crc32c.value(start)).to_bytes(4, "big")


def parse_segment_head(data: bytes) -> SegmentHead | None:
    """The segment head that `data` begins with, or None if it is invalid."""
    if len(data) < SEGMENT_HEAD.size:
        return None
    magic, *fields, crc = SEGMENT_HEAD.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc != google_crc32c.value(data[: SEGMENT_HEAD.size - 4]):
        return None
    return SegmentHead(*fields)


@dataclass(slots=True)
class QueuedRecord:
    """A record on its way to the disk. The writer fills in segment, offset and CRC."""

    kind: Kind
    ledger_id: int
    parts: tuple[bytes, ...]
    """The pieces of the body, which are not joined, so that no payload is copied."""
    size: int
    flags: int = 0
    tag: object = None
    """An object of the caller, returned with the record once the record is on disk."""
    segment: int = -1
    offset: int = -1
    """The offset of the body in the segment."""
    crc: int = 0


class StoredRecord(NamedTuple):
    """A record read back from the log."""

    kind: Kind
    flags: int
    ledger_id: int
    offset: int
    size: int
    crc: int
    body: bytes

    def again(self) -> QueuedRecord:
        """A copy of the record, to be appended to the log."""
        return QueuedRecord(self.kind, self.ledger_id, (self.body,), self.size, self.flags)


class LogBatch(NamedTuple):
    """A batch read back from the log, with valid checksums."""

    flags: int
    offset: int
    end: int
    sequence: int
    synced_below: int
    records: tuple[StoredRecord, ...]


class Stop(NamedTuple):
    """The place and the reason of an early end of reading a segment."""

    offset: int
    is_blank: bool
    """Whether only zeros follow, which shows that nothing was written there."""
    looks_torn: bool
    """Whether the end looks like an interrupted write: a blank sector, or a batch cut off."""
    reason: str


def crc_of(parts: tuple[bytes, ...]) -> int:
    """The CRC of a body in pieces."""
    crc = google_crc32c.value(parts[0])
    for part in parts[1:]:
        crc = google_crc32c.extend(crc, part)
    return int(crc)


def encode_batch(
    head: SegmentHead,
    *,
    offset: int,
    sequence: int,
    synced_below: int,
    records: list[QueuedRecord],
    flags: int = 0,
) -> list[bytes]:
    """The buffers of a batch. Sets each record's place and CRC."""
    table = []
    buffers = [b""]
    at = offset + BATCH_HEAD.size + len(records) * _RECORD_HEAD.size
    for record in records:
        record.segment = head.segment
        record.offset = at
        record.crc = crc_of(record.parts)
        table.append(
            _RECORD_HEAD.pack(
                record.kind, record.flags, 0, record.ledger_id, record.size, record.crc
            )
        )
        buffers.extend(record.parts)
        at += record.size
    heads = b"".join(table)
    start = _BATCH_START.pack(
        BATCH_MAGIC,
        flags,
        head.segment,
        head.nonce,
        offset,
        sequence,
        synced_below,
        len(records),
        at - offset,
    )
    crc = google_crc32c.extend(google_crc32c.value(start), heads)
    buffers[0] = start + int(crc).to_bytes(4, "big") + heads
    return buffers


def batch_bytes(records: list[QueuedRecord]) -> int:
    """The size of a batch of these records."""
    return BATCH_HEAD.size + sum(_RECORD_HEAD.size + record.size for record in records)


def parse_batch(head: SegmentHead, data: bytes, at: int, base: int) -> LogBatch | None:
    """The valid batch at index `at` of `data` (which begins at segment offset `base`), or None."""
    parsed = _parse_heads(head, data, at, base)
    if parsed is None:
        return None
    flags, sequence, synced_below, size, heads = parsed
    records = []
    body_at = at + BATCH_HEAD.size + len(heads) * _RECORD_HEAD.size
    # A valid CRC proves that these numbers were written, but not that they make sense: with a size
    # of zero, the reader would loop for ever.
    if at + size > len(data) or body_at + sum(row[4] for row in heads) != at + size:
        return None
    for kind, record_flags, _, ledger_id, body_bytes, crc in heads:
        body = data[body_at : body_at + body_bytes]
        if google_crc32c.value(body) != crc or kind not in _KINDS:
            return None
        records.append(
            StoredRecord(Kind(kind), record_flags, ledger_id, base + body_at, body_bytes, crc, body)
        )
        body_at += body_bytes
    return LogBatch(flags, base + at, base + at + size, sequence, synced_below, tuple(records))


class RecordHead(NamedTuple):
    """The head of a record. `offset` is the body's place in the segment."""

    kind: Kind
    ledger_id: int
    offset: int
    size: int
    crc: int


def parse_record_heads(
    head: SegmentHead, data: bytes, at: int, base: int
) -> tuple[int, list[RecordHead]] | None:
    """The end and the record heads of the batch at index `at` of `data`; bodies are not checked.
    None if `data` (which begins at segment offset `base`) has no complete, valid heads there.
    """
    parsed = _parse_heads(head, data, at, base) if at < len(data) else None
    if parsed is None:
        return None
    size, rows = parsed[3], parsed[4]
    end, offset = base + at + size, base + at + BATCH_HEAD.size + len(rows) * _RECORD_HEAD.size
    records = []
    for kind, _, _, ledger_id, body_bytes, crc in rows:
        if kind not in _KINDS:
            return None
        records.append(RecordHead(Kind(kind), ledger_id, offset, body_bytes, crc))
        offset += body_bytes
    return (end, records) if offset == end else None


def read_batches(
    head: SegmentHead, data: bytes, base: int, end: int | None = None
) -> Iterator[LogBatch | Stop]:
    """Yields the batches of `data`, which begins at segment offset `base`. The last item is a Stop
    if reading ended before `end` (None if the end is unknown).
    """
    at = 0
    limit = len(data) if end is None else end - base
    while at < limit:
        batch = parse_batch(head, data, at, base)
        if batch is None:
            yield _stop(head, data, at, base)
            return
        yield batch
        at = batch.end - base
        if batch.flags & CLEAN_END:
            return
    if end is not None and at != limit:
        yield Stop(base + at, is_blank=False, looks_torn=False, reason="a batch crosses the end")


def later_sync_point(head: SegmentHead, data: bytes, at: int, base: int) -> int:
    """The highest `synced below` of any batch head after index `at`, or -1. An invalid batch below
    that offset is damage, because the batch was on disk (rule 19).
    """
    found = _heads_from(head, data, at + 1, base)
    return max((synced_below for _, (_, _, synced_below, _, _) in found), default=-1)


def whole_bytes(head: SegmentHead, data: bytes, at: int, base: int) -> int | None:
    """The size of the batch at index `at`; None if its heads are invalid or incomplete."""
    parsed = _parse_heads(head, data, at, base) if at < len(data) else None
    return None if parsed is None else parsed[3]


def next_batch(head: SegmentHead, data: bytes, base: int) -> int | None:
    """The segment offset of the first batch in `data` with valid heads, or None."""
    return next((base + at for at, _ in _heads_from(head, data, 0, base)), None)


_Heads = tuple[int, int, int, int, list[tuple[int, int, int, int, int, int]]]


def _heads_from(head: SegmentHead, data: bytes, at: int, base: int) -> Iterator[tuple[int, _Heads]]:
    """Yield each index of `data`, from `at` on, where a batch has valid heads, with these heads."""
    while (at := data.find(_MAGIC_BYTES, at)) >= 0:
        if (parsed := _parse_heads(head, data, at, base)) is not None:
            yield at, parsed
        at += 1


def _parse_heads(head: SegmentHead, data: bytes, at: int, base: int) -> _Heads | None:
    """Flags, sequence, sync point, size and record heads of a batch, without its bodies."""
    if at + BATCH_HEAD.size > len(data):
        return None
    magic, flags, segment, nonce, offset, sequence, synced_below, count, size, crc = (
        BATCH_HEAD.unpack_from(data, at)
    )
    if magic != BATCH_MAGIC or (segment, nonce, offset) != (head.segment, head.nonce, base + at):
        return None
    table_at = at + BATCH_HEAD.size
    table_end = table_at + count * _RECORD_HEAD.size
    if table_end > len(data):
        return None
    actual = google_crc32c.extend(
        google_crc32c.value(data[at : table_at - 4]), data[table_at:table_end]
    )
    if actual != crc:
        return None
    heads = list(_RECORD_HEAD.iter_unpack(data[table_at:table_end]))
    return flags, sequence, synced_below, size, heads


def _stop(head: SegmentHead, data: bytes, at: int, base: int) -> Stop:
    rest = len(data) - at
    if _is_blank(data, at, len(data)):
        return Stop(base + at, is_blank=True, looks_torn=True, reason="blank")
    parsed = _parse_heads(head, data, at, base)
    if parsed is not None:
        size, table = parsed[3], parsed[4]
        if unknown := {row[0] for row in table} - _KINDS:
            # The heads' CRC is valid: a later release wrote the batch. Never cut off this batch.
            reason = f"a record has kind {min(unknown)}, which only a later release supports"
            return Stop(base + at, is_blank=False, looks_torn=False, reason=reason)
        if size > rest:
            return Stop(base + at, is_blank=False, looks_torn=True, reason="cut short by the file")
        torn = _has_blank_sector(data, at, at + size, base)
        return Stop(base + at, is_blank=False, looks_torn=torn, reason="a record's CRC is wrong")
    # The head is incomplete, so the batch's size is unknown.
    if rest < BATCH_HEAD.size:
        return Stop(base + at, is_blank=False, looks_torn=True, reason="cut short by the file")
    (count,) = struct.unpack_from(">I", data, at + BATCH_HEAD.size - 12)
    heads_end = min(len(data), at + BATCH_HEAD.size + min(count, 1 << 20) * _RECORD_HEAD.size)
    torn = _has_blank_sector(data, at, heads_end, base)
    return Stop(base + at, is_blank=False, looks_torn=torn, reason="a batch's head is wrong")


def _is_blank(data: bytes, start: int, end: int) -> bool:
    return data.count(0, start, end) == end - start


def _has_blank_sector(data: bytes, start: int, end: int, base: int) -> bool:
    """Whether the bytes start..end of any sector are all zeros."""
    at = start
    while at < end:
        edge = min(end, at + SECTOR - (base + at) % SECTOR)
        if _is_blank(data, at, edge):
            return True
        at = edge
    return False
