"""Entries as bytes: the run, the unit that travels, is stored and is acknowledged.

An entry is what the overview says: ledger id, entry id, last add confirmed, length (payload bytes
of the ledger up to and including it), authentication code, payload. A run holds entries of one
ledger in ascending order, columns first, so that Python pays per run and not per entry.

Layout, big-endian:
    format u8 (1) | digest u8 (0 none, 1 crc32c, 2 hmac-sha256) | 0 u16 | count u32 | ledger i64
    entry ids i64[count] | LACs i64[count] | lengths i64[count] | payload sizes u32[count]
    digests [count x size of the digest] | payloads, one after another

Bytes never change (rule 2): re-sends, write-backs and repairs carry the entries as they were made.
The digest covers ledger id, entry id, LAC, length (each i64) and payload (BookKeeper: DigestManager).
"""

import hashlib
import hmac
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c

from quorumlog.protocol.metadata import DigestKind

FORMAT: Final = 1
HEAD: Final = struct.Struct(">BBHIq")
_ENTRY_HEAD: Final = struct.Struct(">qqqq")
_KINDS: Final = (DigestKind.NONE, DigestKind.CRC32C, DigestKind.HMAC_SHA256)
_SIZES: Final = (0, 4, 32)


class BadRun(ValueError):
    """The bytes are not a run: cut short, of another format, or out of order."""


class Columns(NamedTuple):
    """Where the columns of a run begin in its bytes."""

    ids: int
    lacs: int
    lengths: int
    sizes: int
    digests: int
    payloads: int
    digest_bytes: int
    """Of one entry."""


def columns(count: int, kind: int) -> Columns:
    """The layout of a run of `count` entries; `kind` is the digest's, as the head has it."""
    ids, column = HEAD.size, 8 * count
    sizes = ids + 3 * column
    digests = sizes + 4 * count
    digest_bytes = _SIZES[kind]
    payloads = digests + count * digest_bytes
    return Columns(ids, ids + column, ids + 2 * column, sizes, digests, payloads, digest_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as its writer made it."""

    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int
    digest: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Codec:
    """Makes and checks the digests of one ledger's entries. `mac_key` only for hmac-sha256."""

    kind: DigestKind
    mac_key: bytes = b""

    def digest(self, head: bytes, payload: bytes | memoryview) -> bytes:
        """The digest over an entry's 32 header bytes and its payload."""
        if self.kind is DigestKind.CRC32C:
            crc = google_crc32c.extend(google_crc32c.value(head), bytes(payload))
            return int(crc).to_bytes(4, "big")
        if self.kind is DigestKind.HMAC_SHA256:
            mac = hmac.new(self.mac_key, head, hashlib.sha256)
            mac.update(payload)
            return mac.digest()
        return b""

    def digests(self, heads: Iterable[bytes], payloads: Iterable[bytes]) -> bytes:
        """The digests of many entries, one after another."""
        if self.kind is DigestKind.CRC32C:
            # By maps, since this is most of what an append costs per entry.
            crcs = list(map(google_crc32c.extend, map(google_crc32c.value, heads), payloads))
            return struct.pack(f">{len(crcs)}I", *crcs)
        return b"".join(map(self.digest, heads, payloads))


class Run:
    """Some entries of one ledger in ascending order, as the bytes that travel and are stored.

    Invariants: at least one entry; ids grow strictly; `body` is never changed.
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
        """Read the columns of `body`. Raises BadRun when they do not add up."""
        if len(body) < HEAD.size:
            raise BadRun("a run is cut short")
        fmt, kind, zero, count, ledger_id = HEAD.unpack_from(body)
        if fmt != FORMAT or kind >= len(_KINDS) or zero:
            raise BadRun(f"a run of format {fmt}, digest {kind}")
        at = columns(count, kind)
        if count == 0 or len(body) < at.payloads:
            raise BadRun("a run is cut short")
        ids: Sequence[int] = struct.unpack_from(f">{count}q", body, at.ids)
        if ids[0] < 0 or ledger_id < 0:
            raise BadRun("a run of negative ids")
        if ids[-1] - ids[0] == count - 1:
            contiguous = range(ids[0], ids[0] + count)
            if count > 2 and ids != tuple(contiguous):
                raise BadRun("a run out of order")
            ids = contiguous
        elif any(a >= b for a, b in itertools.pairwise(ids)):
            raise BadRun("a run out of order")
        end = at.payloads + sum(struct.unpack_from(f">{count}I", body, at.sizes))
        if end != len(body):
            raise BadRun(f"a run of {len(body)} bytes whose columns ask for {end}")
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
        """A run whose columns were just made: nothing of them is read again."""
        run = cls.__new__(cls)
        run._set(body, kind, ledger_id, ids, columns(len(ids), _KINDS.index(kind)))  # noqa: SLF001
        return run

    @property
    def _offsets(self) -> list[int]:
        """Where each payload begins, and where the last one ends. A writer sends its runs without asking."""
        if self._found_offsets is None:
            first = self._at.payloads
            self._found_offsets = list(itertools.accumulate(self.sizes, initial=first))
        return self._found_offsets

    def __eq__(self, other: object) -> bool:
        """Equal bytes."""
        return isinstance(other, Run) and other.body == self.body

    def __hash__(self) -> int:
        """By bytes."""
        return hash(self.body)

    def __repr__(self) -> str:
        """Ledger and range, for traces."""
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
        """The greatest LAC that an entry of the run carries."""
        lacs: tuple[int, ...] = struct.unpack_from(f">{self.count}q", self.body, self._at.lacs)
        return max(lacs)

    @property
    def last_length(self) -> int:
        """The length that the last entry carries: payload bytes up to and including it."""
        return int(struct.unpack_from(">q", self.body, self._at.sizes - 8)[0])

    def index(self, entry_id: int) -> int | None:
        """The place of an entry in the run, or None where it is not in it."""
        ids = self._ids
        if isinstance(ids, range):
            return entry_id - ids[0] if entry_id in ids else None
        try:
            return ids.index(entry_id)
        except ValueError:
            return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each payload."""
        return struct.unpack_from(f">{self.count}I", self.body, self._at.sizes)

    def payload_size(self, index: int) -> int:
        """Bytes of the payload at a place of the run."""
        return self._offsets[index + 1] - self._offsets[index]

    def payload(self, index: int) -> memoryview:
        """The payload at a place of the run, without a copy."""
        return memoryview(self.body)[self._offsets[index] : self._offsets[index + 1]]

    def payloads(self) -> Iterator[memoryview]:
        """All payloads, ascending, without a copy."""
        view = memoryview(self.body)
        return (view[start:end] for start, end in itertools.pairwise(self._offsets))

    def digest(self, index: int) -> bytes:
        """The digest at a place of the run."""
        size = self._at.digest_bytes
        at = self._at.digests + index * size
        return self.body[at : at + size]

    def entry(self, index: int) -> Entry:
        """The entry at a place of the run."""
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
        """All entries, ascending."""
        return map(self.entry, range(self.count))

    def where(self, wanted: Callable[[int], bool]) -> "Run | None":
        """The entries whose id is wanted, bytes unchanged; None where none is."""
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
        """The ids of the entries whose digest is not right. `none` checks nothing."""
        if codec.kind is not self.kind:
            return list(self._ids)
        if codec.kind is DigestKind.NONE:
            return []
        count, size = self.count, self._at.digest_bytes
        body, at = self.body, self._at.digests
        lacs = struct.unpack_from(f">{count}q", body, self._at.lacs)
        lengths = struct.unpack_from(f">{count}q", body, self._at.lengths)
        heads = map(_ENTRY_HEAD.pack, itertools.repeat(self.ledger_id), self._ids, lacs, lengths)
        payloads = (body[a:b] for a, b in itertools.pairwise(self._offsets))
        digests = codec.digests(heads, payloads)
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
    """The run of new entries that begins at `first_entry`; `length_before` is the ledger's length
    in payload bytes before it.
    """
    # Columns at once, without an Entry for each: this is what an append costs per entry.
    count, repeat = len(payloads), itertools.repeat
    ids = range(first_entry, first_entry + count)
    sizes = list(map(len, payloads))
    lengths = list(itertools.accumulate(sizes, initial=length_before))[1:]
    heads = map(_ENTRY_HEAD.pack, repeat(ledger_id), ids, repeat(last_add_confirmed), lengths)
    body = b"".join(
        (
            HEAD.pack(FORMAT, _KINDS.index(codec.kind), 0, count, ledger_id),
            struct.pack(f">{count}q", *ids),
            struct.pack(">q", last_add_confirmed) * count,
            struct.pack(f">{count}q", *lengths),
            struct.pack(f">{count}I", *sizes),
            codec.digests(heads, payloads),
            *payloads,
        )
    )
    return Run._of(body, codec.kind, ledger_id, ids)  # noqa: SLF001


def pack(entries: Sequence[Entry], kind: DigestKind) -> Run:
    """The run of these entries as they are. They are of one ledger, ascending, at least one."""
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
    """One run of the entries of several, each id once; None where there are no runs."""
    chosen: dict[int, Entry] = {}
    kind = DigestKind.NONE
    for run in runs:
        kind = run.kind
        for entry in run.entries():
            chosen.setdefault(entry.entry_id, entry)
    return pack([chosen[entry_id] for entry_id in sorted(chosen)], kind) if chosen else None
