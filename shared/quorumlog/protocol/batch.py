"""Record batches: the entries of a log's ledgers. One append request is one atomic batch (rule 25).

A batch contains the number of earlier offsets in its ledger. A record's offset is the ledger's
`first_offset` plus this number plus the record's index in the batch. Because of this number, a
takeover needs to read only a ledger's last entries.

Layout, big-endian, columns first:
    version u8 (1) | flags u8 | marks u16 | count u32 | append time ms i64 | records before i64
    producer, with flag 1: id size u8 | id | epoch i64 | seq i64
    stream sequence, with mark 1: size u8 | UTF-8
    timestamps ms i64[count] (-2^63: none) with flag 2 | key sizes i32[count] (-1: none) with flag 4
    headers sizes u32[count] with flag 8 | value sizes i32[count] (-1: null, a tombstone)
    keys, headers, values: each column's bytes one after another
Headers of one record: (name size u16 | name | value size u16 | value) repeated, UTF-8.
Flag 16: a producer's batch precedes this batch in the ledger. If the ledger's last batch has
neither flag 16 nor flag 1, a takeover need not replay producers from the ledger.
Flag 32: the columns (from the timestamps on) are packed, which means replaced by
    their size u32 | with flag 1: the first 16 bytes of the digest from `content` | a frame of zstd
`packed.py` packs and unpacks columns. The entry's digest covers the stored bytes.
Mark 1: the batch has the log's last stream sequence, set by this or an earlier batch (rule 25a).
Mark 2: the log ends with this batch (rule 25b). Only a batch with mark 2 or 8 may have no records.
Mark 4: equal producer numbers alone make a request a retry, even if its records differ.
Mark 8: records were removed (rule 27d). `count` is the number of offsets. The columns begin with
    records left u32 | their indexes u32[records left], ascending
and each column has one element for each record left. The batch still covers the offsets of the
removed records, so the batches of a ledger have no gaps between them.
Mark 16: times to live in seconds u32[records] (0: for ever) are between the indexes and the
    timestamps. A record expires this long after its append time (rule 27f).
Batches with an unknown mark, which a later release may have written, are rejected.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, repeat
from typing import Final

VERSION: Final = 1
_HEAD: Final = struct.Struct(">BBHIqq")
_PRODUCER: Final = struct.Struct(">qq")
_HAS_PRODUCER, HAS_TIMES, HAS_KEYS, HAS_HEADERS, _AFTER_PRODUCER, _PACKED = 1, 2, 4, 8, 16, 32
_SIZE: Final = struct.Struct(">I")
_DIGEST_BYTES: Final = 16
_HAS_SEQ, _ENDS, _BY_NUMBERS, _HAS_GAPS, _HAS_TTLS = 1, 2, 4, 8, 16
NO_TIME: Final = -(2**63)
"""The value in the timestamps column for a record without its own timestamp."""

RECORDS_MAX: Final = 10_000
"""The maximum number of records in one batch (docs/reference/http.md, Bounds)."""

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""The maximum size of one batch, which is one ledger entry (docs/reference/http.md, Bounds)."""


TTL_S_MAX: Final = 36_500 * 86_400
"""The maximum time to live of a record in seconds, which batches store as u32."""

STREAM_SEQ_BYTES_MAX: Final = 255
"""The maximum size of a stream sequence in bytes: a batch stores this size in one byte."""


Stored = bytes | memoryview
"""A batch as an entry's payload: a copy, or a view of the receive buffer."""


class BadBatch(ValueError):
    """The bytes are not a valid record batch."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a log. `timestamp_ms` is the client's timestamp; None: the append time."""

    value: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timestamp_ms: int | None = None
    is_tombstone: bool = False
    """Whether the value is null, which deletes the key (rule 27d). Then `value` is empty."""
    ttl_s: int = 0
    """Seconds from the append until the record expires (rule 27f); 0: never."""

    @property
    def size(self) -> int:
        """The length of value and key in bytes, plus the length of the headers in characters."""
        size = len(self.value) + len(self.key or b"")
        if self.headers:
            size += sum(len(name) + len(text) for name, text in self.headers)
        return size


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """The joined columns of `count` records, as a batch stores them. `flags` and `marks` tell
    which columns are present.
    """

    count: int
    flags: int
    columns: bytes
    marks: int = 0

    def with_ttl(self, ttl_s: int) -> "EncodedRecords":
        """A copy with this time to live for each record. No record may have a time to live yet."""
        assert not self.marks, "the records already have times to live"
        ttls = struct.pack(">I", ttl_s) * self.count
        return replace(self, columns=ttls + self.columns, marks=_HAS_TTLS)

    def __len__(self) -> int:
        """The number of records."""
        return self.count


@dataclass(frozen=True, slots=True)
class ProducerSeq:
    """A batch's producer and request number. `seq` counts the producer's requests in an epoch."""

    id: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class BatchHead:
    """A batch's fields without its records."""

    count: int
    """The number of offsets, which equals the number of records unless `has_gaps`."""
    append_time_ms: int
    records_before: int
    producer: ProducerSeq | None
    after_producer: bool = False
    seq: str | None = None
    """The log's last stream sequence up to and including this batch; None if there is none."""
    is_end: bool = False
    """Whether the log ends with this batch."""
    is_by_numbers: bool = False
    """Whether equal producer numbers alone make a request a retry, even if records differ."""
    has_gaps: bool = False
    """Whether some of the batch's offsets have no record (rule 27d)."""
    has_ttls: bool = False
    """Whether some records expire (rule 27f)."""

    @property
    def records_after(self) -> int:
        """The number of the ledger's offsets up to and including this batch."""
        return self.records_before + self.count


@dataclass(frozen=True, slots=True)
class Columns:
    """A plain batch with located, checked columns. Keys and values are decoded on demand.

    For a column that the batch lacks, the byte offset is None and the sizes are empty. A key size
    of -1 means that the record has no key.
    """

    data: memoryview
    head: BatchHead
    ttls_at: int | None
    times_at: int | None
    key_sizes_at: int | None
    header_sizes_at: int | None
    value_sizes_at: int
    columns_at: int
    """The byte offset of the keys. Headers and values follow the keys."""
    key_sizes: Sequence[int]
    header_sizes: Sequence[int]
    value_sizes: Sequence[int]
    headers: Sequence[tuple[tuple[str, str], ...]]
    indexes: Sequence[int]
    """The index of each record's offset among the batch's offsets."""
    tombstones: frozenset[int]
    """The numbers of the records with the value null. `value_sizes` has 0 for these records."""
    _places: list[Sequence[int]] = field(default_factory=list, repr=False, compare=False)
    """The cached result of `places`."""

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.indexes)

    @property
    def size(self) -> int:
        """Total bytes of all keys, headers and values."""
        return len(self.data) - self.columns_at

    @property
    def places(self) -> Sequence[Sequence[int]]:
        """For each of the columns keys, headers and values: the byte offsets of its elements, then
        of its end; empty for a missing column. Cached for the parts of a batch.
        """
        if not self._places:
            at = self.columns_at
            for sizes in (self.key_sizes, self.header_sizes, self.value_sizes):
                plain = [max(size, 0) for size in sizes] if -1 in sizes else sizes
                found = list(accumulate(plain, initial=at)) if sizes else []
                self._places.append(found)
                at = found[-1] if found else at
        return self._places

    @property
    def joined_values(self) -> memoryview:
        """The bytes of all values, one value after another."""
        return self.data[len(self.data) - sum(self.value_sizes) :]

    @property
    def values(self) -> Iterator[memoryview]:
        """The value of each record, as views without a copy."""
        return _cut(self.joined_values, self.value_sizes)

    @property
    def keys(self) -> Iterator[bytes | None]:
        """The key of each record, copied."""
        if not self.key_sizes:
            return repeat(None, self.count)
        found = _cut(self.data[self.columns_at :], [max(n, 0) for n in self.key_sizes])
        return (
            None if size < 0 else bytes(key)
            for key, size in zip(found, self.key_sizes, strict=True)
        )

    @property
    def rows(
        self,
    ) -> Iterator[tuple[memoryview, bytes | None, tuple[tuple[str, str], ...], int | None]]:
        """Value, key, headers and timestamp (None if not set) of each record."""
        times: Iterable[int | None] = repeat(None)
        if self.times_at is not None:
            given = struct.unpack_from(f">{self.count}q", self.data, self.times_at)
            times = (None if time == NO_TIME else time for time in given)
        return zip(self.values, self.keys, self.headers or repeat(()), times, strict=False)

    @property
    def records(self) -> list[Record]:
        """The records, copied."""
        return [
            Record(bytes(value), key, headers, time, number in self.tombstones, ttl_s)
            for number, ((value, key, headers, time), ttl_s) in enumerate(
                zip(self.rows, self.ttls, strict=True)
            )
        ]

    def fitting(self, skip: int, count: int, bytes_max: int, each: int) -> tuple[int, int]:
        """Count how many of the `count` records after the first `skip` fit into `bytes_max`.
        Returns their number and their bytes, including the record that reaches the bound. So at
        least one record fits. `each`: bytes to add for each record.
        """
        whole = self.size + each * self.count
        if count == self.count and whole <= bytes_max:
            return count, whole
        size = 0
        for at in range(skip, skip + count):
            size += each + self.value_sizes[at]
            size += max(self.key_sizes[at], 0) if self.key_sizes else 0
            size += self.header_sizes[at] if self.header_sizes else 0
            if size >= bytes_max:
                return at + 1 - skip, size
        return count, size

    @property
    def ttls(self) -> Sequence[int]:
        """The time to live of each record in seconds; 0: for ever."""
        if self.ttls_at is None:
            return (0,) * self.count
        return struct.unpack_from(f">{self.count}I", self.data, self.ttls_at)

    def lasting(self, time_ms: int, now_ms: int) -> Sequence[int]:
        """The numbers of the records that have not expired at `now_ms`. `time_ms`: append time."""
        if self.ttls_at is None:
            return range(self.count)
        age_ms = now_ms - time_ms
        return [n for n, ttl_s in enumerate(self.ttls) if not ttl_s or age_ms < 1000 * ttl_s]

    def buried(self, time_ms: int, now_ms: int) -> "Columns":
        """Replace each record that has a key and has expired at `now_ms` by a tombstone, for
        compaction (rule 27f). `time_ms`: the batch's append time.
        """
        lasting = frozenset(self.lasting(time_ms, now_ms))
        if len(lasting) == self.count:
            return self
        made = _encoded(
            [
                record
                if number in lasting or record.key is None
                else Record(b"", record.key, (), record.timestamp_ms, is_tombstone=True)
                for number, record in enumerate(self.records)
            ]
        )
        head = replace(self.head, has_ttls=bool(made.marks))
        return opened(_with_gaps(head, made.flags, self.indexes, (made.columns,)))

    def runs(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Split the records `numbers` into runs of consecutive offsets: (begin, end) of each."""
        indexes = self.indexes
        if len(numbers) < self.count:
            indexes = [indexes[number] for number in numbers]
        return ((numbers[begin], numbers[end - 1] + 1) for begin, end in _runs(indexes))

    def part(self, skip: int, count: int) -> "Columns":
        """Copy `count` records after the first `skip` to a batch without a producer or stream
        sequence. The copied records must have consecutive offsets.
        """
        flags, parts = self._copied(((skip, skip + count),))
        before = self.head.records_before + self.indexes[skip]
        marks = 0 if self.ttls_at is None else _HAS_TTLS
        start = _HEAD.pack(VERSION, flags, marks, count, self.head.append_time_ms, before)
        return opened(b"".join((start, *parts)))

    def thinned(self, head: BatchHead, kept: Sequence[int], gap: int) -> bytes:
        """Encode only the records with the numbers `kept` for another ledger, with the fields of
        `head` (rule 27d). The new batch also covers the `gap` offsets before this batch. The new
        batch has no producer, because some of the producer's records are missing.
        """
        flags, parts = self._copied([*self.runs(kept)])
        indexes = [gap + self.indexes[number] for number in kept]
        whole = replace(
            head,
            count=gap + head.count,
            records_before=head.records_before - gap,
            has_ttls=self.ttls_at is not None,
        )
        return _with_gaps(whole, flags, indexes, parts)

    def _copied(self, runs: Sequence[tuple[int, int]]) -> tuple[int, list[bytes | memoryview]]:
        """The flags and the columns of some runs of records. Each run is a pair (begin, end) of
        record numbers.
        """
        flags, data = 0, self.data
        parts: list[bytes | memoryview] = []
        for flag, at, width in (
            (0, self.ttls_at, 4),
            (HAS_TIMES, self.times_at, 8),
            (HAS_KEYS, self.key_sizes_at, 4),
            (HAS_HEADERS, self.header_sizes_at, 4),
            (0, self.value_sizes_at, 4),
        ):
            if at is not None:
                flags |= flag
                parts += [data[at + width * begin : at + width * end] for begin, end in runs]
        for places in filter(None, self.places):
            parts += [data[places[begin] : places[end]] for begin, end in runs]
        return flags, parts


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Undecoded records of one entry. The first record has the offset `first_offset`.

    `time_ms` is the append time, and also the timestamp of records without a timestamp.
    """

    first_offset: int
    ledger_id: int
    entry_id: int
    time_ms: int
    columns: Columns

    @property
    def count(self) -> int:
        """The number of records."""
        return self.columns.count

    def since(self, offset: int) -> "StoredBatch":
        """The records from `offset` on, which must be the offset of one of the records."""
        skip = offset - self.first_offset
        return replace(
            self, first_offset=offset, columns=self.columns.part(skip, self.count - skip)
        )


def encode(
    records: Sequence[Record] | EncodedRecords,
    producer: ProducerSeq | None = None,
    *,
    seq: str | None = None,
    is_end: bool = False,
    is_by_numbers: bool = False,
) -> bytes:
    """Encode a request's batch, which must have a record unless it ends the log. `placed` later
    sets the append time and the number of records before the batch.
    """
    assert records or is_end, "only a batch that ends the log may have no records"
    encoded = records if isinstance(records, EncodedRecords) else _encoded(records)
    flags = encoded.flags
    parts: list[bytes] = []
    if producer is not None:
        flags |= _HAS_PRODUCER
        name = producer.id.encode()
        parts += [bytes([len(name)]), name, _PRODUCER.pack(producer.epoch, producer.seq)]
    marks = encoded.marks | (_ENDS if is_end else 0) | (_BY_NUMBERS if is_by_numbers else 0)
    if seq is not None:
        marks |= _HAS_SEQ
        parts.append(_encode_seq(seq))
    return b"".join(
        (_HEAD.pack(VERSION, flags, marks, len(records), 0, 0), *parts, encoded.columns)
    )


def _encoded(records: Sequence[Record]) -> EncodedRecords:
    count, flags, marks = len(records), 0, 0
    parts: list[bytes] = []
    ttls = [record.ttl_s for record in records]
    if any(ttls):
        marks |= _HAS_TTLS
        parts.append(struct.pack(f">{count}I", *ttls))
    times = [record.timestamp_ms for record in records]
    if any(time is not None for time in times):
        flags |= HAS_TIMES
        parts.append(struct.pack(f">{count}q", *[NO_TIME if t is None else t for t in times]))
    keys = [record.key for record in records]
    if any(key is not None for key in keys):
        flags |= HAS_KEYS
        sizes = [-1 if key is None else len(key) for key in keys]
        parts.append(struct.pack(f">{count}i", *sizes))
    headers = [encode_headers(record.headers) for record in records]
    if any(headers):
        flags |= HAS_HEADERS
        parts.append(struct.pack(f">{count}I", *map(len, headers)))
    values = [-1 if record.is_tombstone else len(record.value) for record in records]
    parts.append(struct.pack(f">{count}i", *values))
    parts += [key for key in keys if key]
    parts += headers
    parts += [record.value for record in records]
    return EncodedRecords(count, flags, b"".join(parts), marks)


def placed(
    data: bytes,
    *,
    append_time_ms: int,
    records_before: int,
    after_producer: bool = False,
    seq: str | None = None,
) -> bytes:
    """Make the ledger entry for a request's batch, without decoding the records. `seq`: the log's
    last stream sequence, which the entry gets if the batch has no stream sequence.
    """
    version, flags, marks, count, _, _ = _HEAD.unpack_from(data)
    flags = flags & ~_AFTER_PRODUCER | (_AFTER_PRODUCER if after_producer else 0)
    rest, at = memoryview(data), _HEAD.size
    carried: tuple[bytes | memoryview, ...] = ()
    if seq is not None and not marks & _HAS_SEQ:
        marks |= _HAS_SEQ
        if flags & _HAS_PRODUCER:
            at += 1 + data[at] + _PRODUCER.size
        carried = (rest[_HEAD.size : at], _encode_seq(seq))
    head = _HEAD.pack(version, flags, marks, count, append_time_ms, records_before)
    return b"".join((head, *carried, rest[at:]))


def moved(
    data: bytes, *, records_before: int, append_time_ms: int, after_producer: bool = False
) -> bytes:
    """Copy a stored batch, packed or plain, for another ledger (rule 27c). `after_producer`:
    whether a producer's batch precedes the copy in that ledger.
    """
    version, flags, marks, count, _, _ = _HEAD.unpack_from(data)
    flags = flags & ~_AFTER_PRODUCER | (_AFTER_PRODUCER if after_producer else 0)
    head = _HEAD.pack(version, flags, marks, count, append_time_ms, records_before)
    return b"".join((head, memoryview(data)[_HEAD.size :]))


def emptied(head: BatchHead, count: int) -> bytes:
    """Make a batch without records that covers the `count` offsets up to the end of `head`. It has
    the append time and stream sequence of `head` (rule 27d).
    """
    before = head.records_after - count
    wanted = replace(head, count=count, records_before=before, has_ttls=False)
    return _with_gaps(wanted, 0, (), ())


def _with_gaps(
    head: BatchHead, flags: int, indexes: Sequence[int], columns: Iterable[bytes | memoryview]
) -> bytes:
    """Encode a batch that has no producer, and records only at the offsets `indexes`."""
    flags |= _AFTER_PRODUCER if head.after_producer else 0
    marks = _HAS_GAPS | (_ENDS if head.is_end else 0) | (_HAS_TTLS if head.has_ttls else 0)
    seq = b""
    if head.seq is not None:
        marks, seq = marks | _HAS_SEQ, _encode_seq(head.seq)
    start = _HEAD.pack(VERSION, flags, marks, head.count, head.append_time_ms, head.records_before)
    numbers = struct.pack(f">{len(indexes) + 1}I", len(indexes), *indexes)
    return b"".join((start, seq, numbers, *columns))


def is_marked(data: bytes) -> bool:
    """Whether a request's batch has any mark. Most batches have no mark."""
    return data[2:4] != b"\0\0"


def has_keys(data: bytes) -> bool:
    """Whether each record of a request's plain batch has a key. Raises: BadBatch."""
    head, flags, at = _parse_head(data)
    if not flags & HAS_KEYS:
        return not head.count
    at += (4 * head.count if head.has_ttls else 0) + (8 * head.count if flags & HAS_TIMES else 0)
    return -1 not in struct.unpack_from(f">{head.count}i", data, at)


def decode_head(data: Stored) -> BatchHead:
    """Decode the head of a batch, but not its records. Raises BadBatch."""
    return _parse_head(data)[0]


def content(data: bytes) -> str:
    """A digest of a batch's records. Equal requests of one producer have equal digests, because
    append time and offset don't count. Raises BadBatch.
    """
    head, flags, at = _parse_head(data)
    if flags & _PACKED:
        if head.producer is None:
            raise BadBatch("the record batch is packed without a producer, so it has no digest")
        return data[at + _SIZE.size : at + _SIZE.size + _DIGEST_BYTES].hex()
    digest = hashlib.sha256(
        struct.pack(">BI", flags & ~(_HAS_PRODUCER | _AFTER_PRODUCER), head.count)
    )
    if head.is_end:
        digest.update(b"end")
    digest.update(memoryview(data)[at:])
    return digest.hexdigest()[:32]


def is_packed(data: Stored) -> bool:
    """Whether the columns of a batch are packed."""
    return len(data) > 1 and bool(data[1] & _PACKED)


def columns_begin(data: Stored) -> int:
    """The byte offset at which a batch's columns, packed or plain, begin. Raises BadBatch."""
    return _parse_head(data)[2]


def with_packed(data: bytes, at: int, frame: bytes) -> bytes:
    """Replace a plain batch's columns, which begin at `at`, with a compressed frame."""
    digest = bytes.fromhex(content(data)) if data[1] & _HAS_PRODUCER else b""
    parts = (data[:1], bytes([data[1] | _PACKED]), data[2:at], _SIZE.pack(len(data) - at))
    return b"".join((*parts, digest, frame))


def plain_size(data: Stored) -> int:
    """The approximate uncompressed size of a batch; for invalid bytes, their length."""
    try:
        return _SIZE.unpack_from(data, columns_begin(data))[0] if is_packed(data) else len(data)
    except (BadBatch, struct.error):
        return len(data)


def packed_columns(data: Stored) -> tuple[int, memoryview]:
    """The unpacked size of a packed batch's columns, and the frame. Raises BadBatch."""
    _, flags, at = _parse_head(data)
    (size,) = _SIZE.unpack_from(data, at)
    return size, memoryview(data)[at + _SIZE.size + _digest_bytes(flags) :]


def with_plain(data: Stored, columns: bytes) -> bytes:
    """Replace a packed batch's frame with the unpacked columns."""
    at = columns_begin(data)
    return b"".join((data[:1], bytes([data[1] & ~_PACKED]), data[2:at], columns))


def _digest_bytes(flags: int) -> int:
    return _DIGEST_BYTES if flags & _HAS_PRODUCER else 0


def opened(data: Stored) -> Columns:
    """Parse and check a plain batch. Raises BadBatch if it is packed or invalid."""
    head, flags, at = _parse_head(data)
    if flags & _PACKED:
        raise BadBatch("the record batch is packed: unpack it first")
    indexes: Sequence[int] = range(head.count)
    if head.has_gaps:
        indexes, at = _parse_indexes(data, at, head.count)
    count = len(indexes)
    ttls_at = at if head.has_ttls else None
    at += 4 * count if head.has_ttls else 0
    places: list[int | None] = []
    for flag, width in ((HAS_TIMES, 8), (HAS_KEYS, 4), (HAS_HEADERS, 4)):
        places.append(at if flags & flag else None)
        at += width * count if flags & flag else 0
    times_at, keys_at, headers_at = places
    columns_at = at + 4 * count
    if columns_at > len(data):
        raise BadBatch("the record batch is truncated in a column")
    key_sizes = () if keys_at is None else struct.unpack_from(f">{count}i", data, keys_at)
    header_sizes = () if headers_at is None else struct.unpack_from(f">{count}I", data, headers_at)
    value_sizes = struct.unpack_from(f">{count}i", data, at)
    tombstones = frozenset[int]()
    if -1 in value_sizes:
        tombstones = frozenset(n for n, size in enumerate(value_sizes) if size == -1)
        value_sizes = tuple(0 if size == -1 else size for size in value_sizes)
    texts_at = columns_at + _bytes_of(key_sizes)
    values_at = texts_at + sum(header_sizes)
    is_bad = min(key_sizes, default=0) < -1 or min(value_sizes, default=0) < 0
    if is_bad or values_at + sum(value_sizes) != len(data):
        raise BadBatch("the record batch's column sizes don't match its length")
    view = memoryview(data)
    headers = [decode_headers(bytes(part)) for part in _cut(view[texts_at:], header_sizes)]
    return Columns(
        view,
        head,
        ttls_at,
        times_at,
        keys_at,
        headers_at,
        at,
        columns_at,
        key_sizes,
        header_sizes,
        value_sizes,
        headers,
        indexes,
        tombstones,
    )


def _parse_indexes(data: Stored, at: int, count: int) -> tuple[Sequence[int], int]:
    """Parse the indexes column at `at`. Returns the indexes, which must ascend below `count`, and
    the byte offset of the column's end. Raises: BadBatch.
    """
    try:
        (size,) = _SIZE.unpack_from(data, at)
        if 4 * size > len(data) - at:
            raise BadBatch("the record batch is truncated in its indexes")
        indexes = struct.unpack_from(f">{size}I", data, at + _SIZE.size)
    except struct.error as error:
        raise BadBatch("the record batch is truncated in its indexes") from error
    if any(after <= before for before, after in pairwise((-1, *indexes, count))):
        raise BadBatch(f"the record batch's indexes must ascend from 0 to at most {count - 1}")
    return indexes, at + _SIZE.size * (1 + size)


def decode(data: Stored) -> tuple[BatchHead, list[Record]]:
    """Decode the head and the records of a plain batch. Raises BadBatch."""
    found = opened(data)
    return found.head, found.records


def _cut(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Split `data` into consecutive pieces of these sizes."""
    ends = accumulate(sizes)
    return (data[end - size : end] for end, size in zip(ends, sizes, strict=True))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split ascending numbers into runs of consecutive numbers: (begin, end) index of each."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return iter(((0, len(numbers)),))
    cuts = [n for n, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    return pairwise([0, *cuts, len(numbers)] if numbers else [])


def _bytes_of(sizes: Sequence[int]) -> int:
    """The total bytes of a column, given the sizes of its elements; -1 counts as 0."""
    return sum(size for size in sizes if size > 0) if -1 in sizes else sum(sizes)


def _parse_head(data: Stored) -> tuple[BatchHead, int, int]:
    try:
        version, flags, marks, count, time_ms, before = _HEAD.unpack_from(data)
        is_known = (
            version == VERSION and flags < 2 * _PACKED and marks < 2 * _HAS_TTLS and before >= 0
        )
        if not is_known or not (count or marks & _ENDS):
            raise BadBatch(
                f"the record batch has an unknown version {version}, flags {flags} or marks {marks}"
            )
        at, producer, seq = _HEAD.size, None, None
        if flags & _HAS_PRODUCER:
            size = data[at]
            name = str(data[at + 1 : at + 1 + size], "utf-8")
            epoch, number = _PRODUCER.unpack_from(data, at + 1 + size)
            producer, at = ProducerSeq(name, epoch, number), at + 1 + size + _PRODUCER.size
        if marks & _HAS_SEQ:
            size = data[at]
            if at + 1 + size > len(data):
                raise BadBatch("the record batch is truncated in its stream sequence")
            seq, at = str(data[at + 1 : at + 1 + size], "utf-8"), at + 1 + size
        size = len(data) - at
        if flags & _PACKED:
            (size,) = _SIZE.unpack_from(data, at)
            if size > BATCH_BYTES_MAX + 4 * RECORDS_MAX or len(
                data
            ) <= at + _SIZE.size + _digest_bytes(flags):
                raise BadBatch(f"the packed record batch is truncated or too large ({size} bytes)")
        # Each record has a value size of four bytes. With gaps, `opened` checks the count.
        if 4 * count > size and not marks & _HAS_GAPS:
            raise BadBatch(f"the record batch has {size} bytes, too few for {count} records")
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BadBatch("the record batch's head is truncated or not UTF-8") from error
    after = bool(flags & _AFTER_PRODUCER)
    head = BatchHead(
        count,
        time_ms,
        before,
        producer,
        after,
        seq,
        is_end=bool(marks & _ENDS),
        is_by_numbers=bool(marks & _BY_NUMBERS),
        has_gaps=bool(marks & _HAS_GAPS),
        has_ttls=bool(marks & _HAS_TTLS),
    )
    return head, flags, at


def _encode_seq(seq: str) -> bytes:
    data = seq.encode()
    return bytes([len(data)]) + data


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode one record's headers."""
    parts = []
    for pair in headers:
        for text in pair:
            data = text.encode()
            parts += [len(data).to_bytes(2, "big"), data]
    return b"".join(parts)


def decode_headers(data: bytes) -> tuple[tuple[str, str], ...]:
    """Decode one record's headers. Raises BadBatch."""
    texts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        at += 2
        if at + size > len(data):
            raise BadBatch("a record's headers are truncated")
        try:
            texts.append(data[at : at + size].decode())
        except UnicodeDecodeError as error:
            raise BadBatch("a record's headers must be UTF-8") from error
        at += size
    if len(texts) % 2:
        raise BadBatch("a record's last header has a name but no value")
    return tuple(zip(texts[::2], texts[1::2], strict=True))
