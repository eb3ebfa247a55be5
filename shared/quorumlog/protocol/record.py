"""Entries as bytes, encoded in runs. A run is the unit that is sent, stored and acknowledged.

An entry has the fields of BookKeeper's protocol: ledger id, entry id, last add confirmed, length
(the ledger's payload bytes up to and including this entry), digest, payload. A run has entries of
one ledger in ascending order, by column, so that Python's overhead is per run and not per entry.

Layout, big-endian:
    format u8 (1) | digest u8 (0 none, 1 crc32c, 2 hmac-sha256) | 0 u16 | count u32 | ledger i64
    entry ids i64[count] | LACs i64[count] | lengths i64[count] | payload sizes u32[count]
    digests [count x size of the digest] | payloads, one after another

Bytes never change (rule 2): retries, write-backs and repairs carry the original bytes. The digest
covers ledger id, entry id, LAC, length (each i64) and payload (BookKeeper: DigestManager).
"""

import hashlib
import hmac
import itertools
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import google_crc32c

from quorumlog.protocol.metadata import DigestKind

FORMAT: Final = 1
HEAD: Final = struct.Struct(">BBHIq")
_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_HEAD_BYTES: Final = 32
"""Size of the fields that a digest covers before the payload: ledger id, entry id, LAC, length."""
_TABLE_ENTRIES: Final = 10_000
"""Largest run whose columns are computed as a whole; a gateway makes no larger run."""
_ONES, _PLACES = (
    int.from_bytes(struct.pack(f">{_TABLE_ENTRIES}q", *numbers), "big")
    for numbers in ([1] * _TABLE_ENTRIES, range(_TABLE_ENTRIES))
)
"""The columns 1, 1, 1, ... and 0, 1, 2, ... as large numbers; a shorter column is a prefix."""
_KINDS: Final = (DigestKind.NONE, DigestKind.CRC32C, DigestKind.HMAC_SHA256)
_SIZES: Final = (0, 4, 32)


class BadRun(ValueError):
    """The bytes are not a valid run: truncated, of an unknown format, or with unordered ids."""


class Columns(NamedTuple):
    """The offsets at which the columns of a run begin in its bytes."""

    ids: int
    lacs: int
    lengths: int
    sizes: int
    digests: int
    payloads: int
    digest_bytes: int
    """Bytes of one entry's digest."""


def columns(count: int, kind: int) -> Columns:
    """The offsets of a run of `count` entries. `kind`: the digest's number in the head."""
    ids, column = HEAD.size, 8 * count
    sizes = ids + 3 * column
    digests = sizes + 4 * count
    digest_bytes = _SIZES[kind]
    payloads = digests + count * digest_bytes
    return Columns(ids, ids + column, ids + 2 * column, sizes, digests, payloads, digest_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, as the ledger's writer encoded it."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int
    digest: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Codec:
    """Computes the digests of one ledger's entries. `mac_key` is needed only for hmac-sha256."""

    kind: DigestKind
    mac_key: bytes = b""

    def digest(self, head: bytes, payload: bytes | memoryview) -> bytes:
        """The digest of an entry, over the 32 bytes of its header and its payload."""
        if self.kind is DigestKind.CRC32C:
            crc = google_crc32c.extend(google_crc32c.value(head), bytes(payload))
            return int(crc).to_bytes(4, "big")
        if self.kind is DigestKind.HMAC_SHA256:
            mac = hmac.new(self.mac_key, head, hashlib.sha256)
            mac.update(payload)
            return mac.digest()
        return b""

    def digests(self, heads: Iterable[bytes], payloads: Iterable[bytes]) -> bytes:
        """The digests of many entries as one column."""
        if self.kind is DigestKind.CRC32C:
            # `map` is faster than a loop, and digests are most of an append's cost per entry.
            crcs = list(map(google_crc32c.extend, map(google_crc32c.value, heads), payloads))
            return struct.pack(f">{len(crcs)}I", *crcs)
        return b"".join(map(self.digest, heads, payloads))


class Run:
    """Entries of one ledger in ascending order, as the bytes that are sent and stored.

    Invariants: a run has at least one entry; ids grow strictly; `body` is never changed.
    """

    __slots__ = (
        "_at",
        "_found_offsets",
        "_ids",
        "body",
        "count",
        "first",
        "kind",
        "last",
        "ledger_id",
    )

    def __init__(self, body: bytes) -> None:
        """Read the columns of `body`. Raises BadRun if `body` is not a valid run."""
        if len(body) < HEAD.size:
            raise BadRun(f"the run is truncated: its head has only {len(body)} bytes")
        fmt, kind, zero, count, ledger_id = HEAD.unpack_from(body)
        if fmt != FORMAT or kind >= len(_KINDS) or zero:
            raise BadRun(f"the run has an unknown format ({fmt}) or kind of digest ({kind})")
        at = columns(count, kind)
        if count == 0 or len(body) < at.payloads:
            raise BadRun(f"the run is empty or truncated: {count} entries in {len(body)} bytes")
        (first,) = _I64.unpack_from(body, at.ids)
        if first < 0 or ledger_id < 0:
            raise BadRun("the run's ledger id or first entry id is negative")
        ids: Sequence[int] = range(first, first + count)
        if count > 1 and not _is_contiguous(body[at.ids : at.lacs], first, count):
            ids = struct.unpack_from(f">{count}q", body, at.ids)
            if any(a >= b for a, b in itertools.pairwise(ids)):
                raise BadRun("the run's entry ids are not in ascending order")
        end = at.payloads + sum(_sizes(body, count, at))
        if end != len(body):
            raise BadRun(f"the run has {len(body)} bytes, but its columns require {end}")
        self._set(body, _KINDS[kind], ledger_id, ids, at)

    def _set(
        self, body: bytes, kind: DigestKind, ledger_id: int, ids: Sequence[int], at: Columns
    ) -> None:
        self.body = body
        self.kind = kind
        self.count = len(ids)
        self.ledger_id = ledger_id
        self.first = ids[0]
        self.last = ids[-1]
        self._ids = ids
        self._at = at
        self._found_offsets: list[int] | None = None

    @classmethod
    def _of(cls, body: bytes, kind: DigestKind, ledger_id: int, ids: range) -> "Run":
        """Create a run from bytes that this process just encoded, without parsing them."""
        run = cls.__new__(cls)
        run._set(body, kind, ledger_id, ids, columns(len(ids), _KINDS.index(kind)))  # noqa: SLF001
        return run

    @property
    def _offsets(self) -> list[int]:
        """The offset in `body` at which each payload starts, and the end of the last payload.
        Computed on first use, because writers don't need them.
        """
        if self._found_offsets is None:
            first = self._at.payloads
            self._found_offsets = list(itertools.accumulate(self.sizes, initial=first))
        return self._found_offsets

    def __eq__(self, other: object) -> bool:
        """Whether two runs have equal bytes."""
        return isinstance(other, Run) and other.body == self.body

    def __hash__(self) -> int:
        """The hash of the bytes."""
        return hash(self.body)

    def __repr__(self) -> str:
        """Ledger, range and count, for traces."""
        return f"Run({self.ledger_id}, {self.first}..{self.last}, {self.count})"

    @property
    def ids(self) -> Sequence[int]:
        """The entry ids, ascending."""
        return self._ids

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return len(self.body) - self._at.payloads

    @property
    def last_add_confirmed(self) -> int:
        """The highest LAC that an entry of the run carries."""
        body, at = self.body, self._at
        column = body[at.lacs : at.lengths]
        if column == column[:8] * self.count:  # all LACs are equal, as in a writer's runs
            return int(_I64.unpack_from(column)[0])
        lacs: tuple[int, ...] = struct.unpack(f">{self.count}q", column)
        return max(lacs)

    @property
    def last_length(self) -> int:
        """The ledger's payload bytes up to and including the run's last entry."""
        return int(_I64.unpack_from(self.body, self._at.sizes - 8)[0])

    def index(self, entry_id: int) -> int | None:
        """The index of an entry in the run; None if the run does not contain the entry."""
        ids = self._ids
        if isinstance(ids, range):
            return entry_id - ids[0] if entry_id in ids else None
        index = bisect_left(ids, entry_id)
        return index if index < len(ids) and ids[index] == entry_id else None

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of all payloads in bytes, by index."""
        return _sizes(self.body, self.count, self._at)

    def payload_size(self, index: int) -> int:
        """The size of the payload at an index, in bytes."""
        return self._offsets[index + 1] - self._offsets[index]

    def payload(self, index: int) -> memoryview:
        """The payload at an index, without a copy."""
        return memoryview(self.body)[self._offsets[index] : self._offsets[index + 1]]

    def payloads(self) -> Iterator[memoryview]:
        """All payloads in order, without a copy."""
        view = memoryview(self.body)
        return (view[start:end] for start, end in itertools.pairwise(self._offsets))

    def _copied_payloads(self) -> Iterable[bytes]:
        body, at = self.body, self._at
        column = body[at.sizes : at.digests]
        if column == column[:4] * self.count and self.count <= _TABLE_ENTRIES:
            found: Iterable[bytes] = _cutter(
                int.from_bytes(column[:4], "big"), self.count
            ).unpack_from(body, at.payloads)
            return found
        return (body[a:b] for a, b in itertools.pairwise(self._offsets))

    def digest(self, index: int) -> bytes:
        """The digest of the entry at an index."""
        size = self._at.digest_bytes
        at = self._at.digests + index * size
        return self.body[at : at + size]

    def entry(self, index: int) -> Entry:
        """The entry at an index."""
        (lac,) = struct.unpack_from(">q", self.body, self._at.lacs + 8 * index)
        (length,) = struct.unpack_from(">q", self.body, self._at.lengths + 8 * index)
        return Entry(
            self.ledger_id,
            self._ids[index],
            lac,
            length,
            self.digest(index),
            bytes(self.payload(index)),
        )

    def entries(self) -> Iterator[Entry]:
        """All entries in ascending order."""
        return map(self.entry, range(self.count))

    def where(self, wanted: Callable[[int], bool]) -> "Run | None":
        """The run of the entries with `wanted` ids, bytes unchanged; None if there are none."""
        chosen = [index for index, entry_id in enumerate(self._ids) if wanted(entry_id)]
        if len(chosen) == self.count:
            return self
        if not chosen:
            return None
        body, offsets = self.body, self._offsets
        size, at, count = self._at.digest_bytes, self._at.digests, len(chosen)
        numbers = struct.unpack_from(f">{3 * self.count}q", body, self._at.ids)
        kept = [numbers[column * self.count + index] for column in range(3) for index in chosen]
        return Run(
            b"".join(
                (
                    HEAD.pack(FORMAT, _KINDS.index(self.kind), 0, count, self.ledger_id),
                    struct.pack(f">{3 * count}q", *kept),
                    struct.pack(f">{count}I", *[self.payload_size(index) for index in chosen]),
                    *[body[at + index * size : at + (index + 1) * size] for index in chosen],
                    *[body[offsets[index] : offsets[index + 1]] for index in chosen],
                )
            )
        )

    def invalid(self, codec: Codec) -> list[int]:
        """The ids of entries with a wrong digest; all ids if `codec` has another kind of digest."""
        if codec.kind is not self.kind:
            return list(self._ids)
        if codec.kind is DigestKind.NONE:
            return []
        count, size = self.count, self._at.digest_bytes
        body, at = self.body, self._at.digests
        heads = _heads(
            self.ledger_id,
            body[self._at.ids : self._at.lacs],
            body[self._at.lacs : self._at.lengths],
            body[self._at.lengths : self._at.sizes],
        )
        digests = codec.digests(heads, self._copied_payloads())
        if hmac.compare_digest(digests, body[at : at + count * size]):
            return []
        bad = []
        for entry_id, place in zip(self._ids, range(0, count * size, size), strict=True):
            made, found = digests[place : place + size], body[at + place : at + place + size]
            if not hmac.compare_digest(made, found):
                bad.append(entry_id)
        return bad


def make(
    *,
    ledger_id: int,
    first_entry: int,
    last_add_confirmed: int,
    length_before: int,
    payloads: Sequence[bytes],
    codec: Codec,
) -> Run:
    """Make the run of new entries from `first_entry` on. `length_before`: payload bytes of the
    ledger before that entry.
    """
    # Computes whole columns instead of an Entry for each entry, which would cost more per entry.
    count = len(payloads)
    ids = range(first_entry, first_entry + count)
    sizes = list(map(len, payloads))
    size = sizes[0]
    # Lengths of a ledger stay below 2**63, like ids, so `_progression` may compute them.
    id_column = _progression(first_entry, 1, count)
    lac_column = _I64.pack(last_add_confirmed) * count
    if sizes.count(size) == count:
        size_column = _U32.pack(size) * count
        length_column = _progression(length_before + size, size, count)
    else:
        size_column = struct.pack(f">{count}I", *sizes)
        lengths = itertools.accumulate(sizes, initial=length_before)
        length_column = struct.pack(f">{count}q", *itertools.islice(lengths, 1, None))
    heads = _heads(ledger_id, id_column, lac_column, length_column)
    body = b"".join(
        (
            HEAD.pack(FORMAT, _KINDS.index(codec.kind), 0, count, ledger_id),
            id_column,
            lac_column,
            length_column,
            size_column,
            codec.digests(heads, payloads),
            *payloads,
        )
    )
    return Run._of(body, codec.kind, ledger_id, ids)  # noqa: SLF001


@lru_cache(maxsize=16)
def _cutter(size: int, count: int) -> struct.Struct:
    """A struct that cuts bytes into `count` pieces of `size` bytes in one call."""
    return struct.Struct(f"{size}s" * count)


def _progression(first: int, step: int, count: int) -> bytes:
    """The column of the non-negative numbers first, first + step, first + 2 * step, and so on.
    Multiplying two large numbers takes a fifth of the time of a loop over all values (measured).
    """
    if count == 1:
        return _I64.pack(first)
    if count > _TABLE_ENTRIES:
        return struct.pack(f">{count}q", *itertools.islice(itertools.count(first, step), count))
    behind = 64 * (_TABLE_ENTRIES - count)
    return (first * (_ONES >> behind) + step * (_PLACES >> behind)).to_bytes(8 * count, "big")


def _is_contiguous(ids: bytes, first: int, count: int) -> bool:
    """Whether a column has the ids first, first + 1, and so on."""
    # Above 2**63, numbers would overflow into the neighbouring 8 bytes of the progression.
    return first + count <= 1 << 63 and ids == _progression(first, 1, count)


def _sizes(body: bytes, count: int, at: Columns) -> Sequence[int]:
    """Read the sizes of a run's payloads from their column."""
    if count == 1:
        return _U32.unpack_from(body, at.sizes)
    column = body[at.sizes : at.digests]
    if column == column[:4] * count:
        return (int.from_bytes(column[:4], "big"),) * count
    return struct.unpack(f">{count}I", column)


def _heads(ledger_id: int, ids: bytes, lacs: bytes, lengths: bytes) -> Iterable[bytes]:
    """Make the headers that digests cover, one for each entry, from columns of a run."""
    count = len(ids) // 8
    if count == 1:
        return (b"".join((_I64.pack(ledger_id), ids, lacs, lengths)),)
    table = array("q", _I64.pack(ledger_id)) * (4 * count)
    for place, column in enumerate((ids, lacs, lengths), start=1):
        table[place::4] = array("q", column)
    if count > _TABLE_ENTRIES:
        data = table.tobytes()
        return (data[at : at + _HEAD_BYTES] for at in range(0, len(data), _HEAD_BYTES))
    heads: Iterable[bytes] = _cutter(_HEAD_BYTES, count).unpack(table)
    return heads


def pack(entries: Sequence[Entry], kind: DigestKind) -> Run:
    """Make a run of the unchanged entries of one ledger, at least one, in ascending order."""
    count = len(entries)
    return Run(
        b"".join(
            (
                HEAD.pack(FORMAT, _KINDS.index(kind), 0, count, entries[0].ledger_id),
                struct.pack(f">{count}q", *[e.entry_id for e in entries]),
                struct.pack(f">{count}q", *[e.last_add_confirmed for e in entries]),
                struct.pack(f">{count}q", *[e.length for e in entries]),
                struct.pack(f">{count}I", *[len(e.payload) for e in entries]),
                *[e.digest for e in entries],
                *[e.payload for e in entries],
            )
        )
    )


def merge(runs: Iterable[Run]) -> Run | None:
    """Merge runs of one ledger into a run with each entry once; None if there are no runs."""
    chosen: dict[int, Entry] = {}
    kind = DigestKind.NONE
    for run in runs:
        kind = run.kind
        for entry in run.entries():
            chosen.setdefault(entry.entry_id, entry)
    return pack([chosen[entry_id] for entry_id in sorted(chosen)], kind) if chosen else None
