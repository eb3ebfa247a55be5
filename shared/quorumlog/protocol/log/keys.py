"""The format of key indexes: an index lists the entries of each key of a CLOSED ledger (rule 27e).

An index is a ledger of its own, whose entry i is bucket i of 2^n. The high n bits of a key's hash
determine the bucket, so a lookup reads one entry. Layout of a bucket, big-endian:
    version u8 (1) | n u8 | bucket u16 | count u32 | ledger id i64 | last entry of that ledger i64
    digest of all other fields, 16 bytes
    hashes u64[count], ascending | entry ids u32[count], ascending for equal hashes
Each bucket proves by itself which ledger it indexes, so a lookup needs no other entry.

Two keys may have the same hash. So an index may name an entry that lacks the key, but it names all
entries that have the key. For a key with KEY_ENTRIES_MAX entries or more, however, an index names
only the last entries, and earlier entries may have the key too.
"""

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Stored

BUCKET_PAIRS: Final = 1365
"""The approximate number of pairs in a bucket of 16 KiB, which one read from a bookie returns."""

KEY_ENTRIES_MAX: Final = 1024
"""An index names at least this many of a key's last entries, and may omit earlier entries. Without
this limit, a key in every entry would fill a bucket with megabytes. Chosen by judgement."""

ENTRIES_MAX: Final = 1 << 32
"""A ledger with more entries gets no index, because an index stores entry ids in four bytes."""

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BBHIqq")
_DIGEST_BYTES: Final = 16
_PAIR_BYTES: Final = 12
_HINTS_BYTES: Final = 256
"""Bytes of memory of `Hints` and their place in a cache, besides the hints."""
_HINT_BITS: Final = 16
"""Bits of each hash in `Hints`: one in about 50 lookups of absent keys finds a hint."""
_HINT_MASK: Final = (1 << _HINT_BITS) - 1

_PART_BITS: Final = 12
"""Pairs in memory are kept in 2^12 parts, by the high bits of their hashes. An index has at most
2^12 buckets."""


class BadIndex(ValueError):
    """The bytes are not the expected bucket of the expected ledger's index."""


def hash_of(key: bytes) -> int:
    """The 64-bit hash of a key, which is the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())


def keys_of(data: Stored) -> set[bytes]:
    """The distinct keys of a batch's records. Raises: BadBatch."""
    found = batch.opened(packed.unpack(data))
    return {key for key in found.keys if key is not None}


def names_all(entries: Sequence[int]) -> bool:
    """Whether `entries`, which an index names for a key, are all entries that may have the key. If
    not, earlier entries may have the key too.
    """
    return len(entries) < KEY_ENTRIES_MAX


class _Part:
    """Pairs of hash and entry, whose hashes have the same high bits, in the order of `add`."""

    __slots__ = ("entries", "hashes", "pairs_max")

    def __init__(self) -> None:
        self.hashes, self.entries = array("Q"), array("I")
        self.pairs_max = 4 * KEY_ENTRIES_MAX

    def add(self, hashed: int, entry_id: int) -> int:
        """Add a pair. Returns the change in the number of pairs, negative after a shrink."""
        before = len(self.hashes)
        self.hashes.append(hashed)
        self.entries.append(entry_id)
        if len(self.hashes) > self.pairs_max:
            self._shrink()
        return len(self.hashes) - before

    def _shrink(self) -> None:
        """Keep the last KEY_ENTRIES_MAX entries of each hash."""
        counts = Counter(self.hashes)
        surplus = {hashed: count - KEY_ENTRIES_MAX for hashed, count in counts.items()}
        hashes, entries = self.hashes, self.entries
        self.hashes, self.entries = array("Q"), array("I")
        for hashed, entry in zip(hashes, entries, strict=True):
            surplus[hashed] -= 1
            if surplus[hashed] < 0:
                self.hashes.append(hashed)
                self.entries.append(entry)
        self.pairs_max = max(2 * len(self.hashes), self.pairs_max)


class KeyEntries:
    """Pairs of a key's hash and an entry that has the key. A pair takes about 12 bytes."""

    def __init__(self) -> None:
        self.pairs = 0
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)

    def add(self, entry_id: int, keys: Iterable[bytes]) -> None:
        """Add an entry's distinct keys. Entries must be added in ascending order."""
        for hashed in map(hash_of, keys):
            self.pairs += self._parts[hashed >> 64 - _PART_BITS].add(hashed, entry_id)

    @property
    def bits(self) -> int:
        """The base-2 logarithm of the number of buckets."""
        return min((self.pairs // BUCKET_PAIRS).bit_length(), _PART_BITS)

    def bucket(self, number: int, ledger_id: int, last_entry: int) -> bytes:
        """Encode one of the 2^bits buckets of ledger `ledger_id`'s index."""
        pairs: list[tuple[int, int]] = []
        for part in self._parts_of(number):
            pairs += sorted(zip(part.hashes, part.entries, strict=True))
        columns = _big_endian(array("Q", [hashed for hashed, _ in pairs]))
        columns += _big_endian(array("I", [entry for _, entry in pairs]))
        head = _HEAD.pack(_VERSION, self.bits, number, len(pairs), ledger_id, last_entry)
        return head + _digest(head, columns) + columns

    @property
    def largest(self) -> int:
        """The number of pairs in the largest bucket."""
        return max(
            sum(len(part.hashes) for part in self._parts_of(number))
            for number in range(1 << self.bits)
        )

    def _parts_of(self, number: int) -> list[_Part]:
        """The parts whose pairs belong to a bucket, ascending by their hashes."""
        width = 1 << _PART_BITS - self.bits
        places = range(number * width, (number + 1) * width)
        return [self._parts[at] for at in places if at in self._parts]


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a key in an index. Raises: BadIndex if no index can have `buckets` buckets."""
    bits = buckets.bit_length() - 1
    if buckets != 1 << max(bits, 0) or bits > _PART_BITS:
        raise BadIndex(f"an index must have 2^n buckets, n <= {_PART_BITS} (got {buckets})")
    return hash_of(key) >> 64 - bits


class Bucket:
    """One verified bucket of an index."""

    def __init__(self, data: bytes, *, buckets: int, ledger_id: int, last_entry: int) -> None:
        """Verify that `data` is a bucket of the index of ledger `ledger_id`. The index has
        `buckets` buckets, and the ledger ends at `last_entry`. Raises: BadIndex.
        """
        at = _HEAD.size + _DIGEST_BYTES
        if len(data) < at:
            raise BadIndex(f"the bucket is truncated: it has {len(data)} bytes, but needs {at}")
        head, columns = data[: _HEAD.size], data[at:]
        version, bits, self.number, count, about, last = _HEAD.unpack(head)
        self._bits = bits
        if (version, 1 << bits, about, last) != (_VERSION, buckets, ledger_id, last_entry):
            raise BadIndex(f"the bucket is of another index: ledger {about} to entry {last}")
        if len(columns) != count * _PAIR_BYTES or data[_HEAD.size : at] != _digest(head, columns):
            raise BadIndex(f"bucket {self.number} is damaged: its size or digest is wrong")
        self.size = len(data)
        self._hashes, self._entries = (
            array("Q", columns[: 8 * count]),
            array("I", columns[8 * count :]),
        )
        if sys.byteorder == "little":
            self._hashes.byteswap()
            self._entries.byteswap()

    def entries_of(self, key: bytes) -> Sequence[int]:
        """The entries, ascending, that may have a key whose hash belongs to this bucket."""
        hashed = hash_of(key)
        begin = bisect_left(self._hashes, hashed)
        return self._entries[begin : bisect_right(self._hashes, hashed)]

    def hints(self) -> "Hints":
        """The bucket's hints, which take a sixth of its memory."""
        return Hints(self._hashes, self._bits)


class Hints:
    """Some bits of each hash in a bucket. They prove that the bucket lacks most other keys."""

    def __init__(self, hashes: Iterable[int], bits: int) -> None:
        """`hashes`: the bucket's hashes, ascending. `bits`: the bits that choose a bucket."""
        self._shift = 64 - bits - _HINT_BITS
        shift = self._shift  # a name of its own halves the time
        self._hints = array("H", [hashed >> shift & _HINT_MASK for hashed in hashes])
        self.size = _HINTS_BYTES + 2 * len(self._hints)

    def may_have(self, key: bytes) -> bool:
        """Whether the bucket may have a key whose hash belongs to the bucket."""
        hint = hash_of(key) >> self._shift & _HINT_MASK
        at = bisect_left(self._hints, hint)
        return at < len(self._hints) and self._hints[at] == hint


def _big_endian(column: "array[int]") -> bytes:
    if sys.byteorder == "little":
        column.byteswap()
    return column.tobytes()


def _digest(head: bytes, columns: bytes) -> bytes:
    return hashlib.blake2b(head + columns, digest_size=_DIGEST_BYTES).digest()
