"""The index of the keys of one CLOSED ledger of a log: which entries hold a key (rule 27e).

An index is a ledger of its own, whose entry i is bucket i of 2^n. The high n bits of a key's hash
choose the bucket, so a lookup reads one entry. Layout of a bucket, big-endian:
    version u8 (1) | n u8 | bucket u16 | count u32 | ledger id i64 | last entry of that ledger i64
    digest of everything else, 16 bytes
    hashes u64[count], ascending | entry ids u32[count], ascending for equal hashes
Each bucket proves by itself which ledger it is about, so a lookup needs no other entry.

Two keys may have one hash. An index may therefore name an entry that lacks the key, but it names
all entries that have the key, or says that there are more: then the last pair of the hash has the
entry id 2^32 - 1, and the pair before it the last entry.
"""

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final, NamedTuple

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Stored

BUCKET_PAIRS: Final = 1365
"""About how many pairs a bucket has: 16 KiB, which a read of a bookie returns at once."""

ENTRIES_MAX: Final = (1 << 32) - 1
"""A ledger with more entries gets no index, which stores entry ids in four bytes."""

ENTRIES_OF_KEY_MAX: Final = 1024
"""The entries of one key that an index names. Of a key with more entries it names the last one,
and a read of the key reads the ledger as if it had no index (chosen by judgement)."""

_MANY: Final = ENTRIES_MAX
"""In place of an entry: the hash has more entries than the index names."""

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BBHIqq")
_DIGEST_BYTES: Final = 16
_PAIR_BYTES: Final = 12
_PART_BITS: Final = 12
"""The pairs in memory are kept in 2^12 parts, by the high bits of their hashes; an index has at
most as many buckets."""


class BadIndex(ValueError):
    """The bytes are not this bucket of an index of this ledger."""


def hash_of(key: bytes) -> int:
    """The 64-bit hash of a key. It is the same in each process and release."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())


def keys_of(data: Stored) -> set[bytes]:
    """The keys of a batch's records. Raises: BadBatch."""
    found = batch.opened(packed.unpack(data))
    return {key for key in found.keys if key is not None}


class KeyFound(NamedTuple):
    """The entries, ascending, of a ledger that may hold a key: all of them, or the last ones."""

    entries: Sequence[int]
    is_all: bool = True


class KeyEntries:
    """Pairs of a key's hash and an entry that holds the key, in about 12 bytes each. Of a hash with
    more than ENTRIES_OF_KEY_MAX entries only the last entry is kept.
    """

    def __init__(self) -> None:
        self.pairs = 0
        """The pairs of the index. It has two for each hash with too many entries."""
        self._parts: dict[int, tuple[array[int], array[int]]] = {}
        """Hashes and entry ids, in the order in which they were added."""
        self._many: dict[int, int] = {}
        """The last entries of hashes that have too many."""

    def add(self, entry_id: int, keys: Iterable[bytes]) -> None:
        """Add the keys, without duplicates, of an entry. Entries are added in ascending order."""
        for key in keys:
            hashed = hash_of(key)
            if hashed in self._many:
                self._many[hashed] = entry_id
                continue
            number = hashed >> 64 - _PART_BITS
            part = self._parts.get(number)
            if part is None:
                part = self._parts[number] = array("Q"), array("I")
            hashes, entries = part
            hashes.append(hashed)
            entries.append(entry_id)
            self.pairs += 1
            count = len(hashes)
            if count > 2 * ENTRIES_OF_KEY_MAX and not count & (count - 1):
                self._collapse(number)

    def _collapse(self, number: int) -> None:
        """Keep only the last entries of a part's hashes that have too many."""
        hashes, entries = self._parts[number]
        counts = Counter(hashes)
        many = {each for each, count in counts.items() if count > ENTRIES_OF_KEY_MAX}
        if not many:
            return
        last = dict(zip(hashes, entries, strict=True))
        self._many |= {each: last[each] for each in many}
        kept = [each not in many for each in hashes]
        part = array("Q", compress(hashes, kept)), array("I", compress(entries, kept))
        self._parts[number] = part
        self.pairs -= len(hashes) - len(part[0]) - 2 * len(many)

    @property
    def bits(self) -> int:
        """The logarithm of the number of buckets."""
        return min((self.pairs // BUCKET_PAIRS).bit_length(), _PART_BITS)

    def bucket(self, number: int, ledger_id: int, last_entry: int) -> bytes:
        """One of the 2^bits buckets of the index of the ledger to which these entries belong."""
        width = 1 << _PART_BITS - self.bits
        pairs: list[tuple[int, int]] = []
        for at in range(number * width, (number + 1) * width):
            pairs += zip(*self._parts.get(at, ((), ())), strict=True)
        for hashed, last in self._many.items():
            if hashed >> 64 - self.bits == number:
                pairs += ((hashed, last), (hashed, _MANY))
        pairs.sort()
        columns = _big_endian(array("Q", [hashed for hashed, _ in pairs]))
        columns += _big_endian(array("I", [entry for _, entry in pairs]))
        head = _HEAD.pack(_VERSION, self.bits, number, len(pairs), ledger_id, last_entry)
        return head + _digest(head, columns) + columns


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a key in an index of so many buckets. Raises: BadIndex if none has so many."""
    bits = buckets.bit_length() - 1
    if buckets != 1 << max(bits, 0) or bits > _PART_BITS:
        raise BadIndex(f"an index of {buckets} buckets")
    return hash_of(key) >> 64 - bits


class Bucket:
    """One verified bucket of an index."""

    def __init__(self, data: bytes, *, buckets: int, ledger_id: int, last_entry: int) -> None:
        """`data` must be a bucket of an index of so many `buckets`, of the ledger that ends at
        `last_entry`. Raises: BadIndex.
        """
        at = _HEAD.size + _DIGEST_BYTES
        if len(data) < at:
            raise BadIndex(f"a bucket of {len(data)} bytes")
        head, columns = data[: _HEAD.size], data[at:]
        version, bits, self.number, count, about, last = _HEAD.unpack(head)
        if (version, 1 << bits, about, last) != (_VERSION, buckets, ledger_id, last_entry):
            raise BadIndex(f"a bucket of {1 << bits} of an index of ledger {about} to {last}")
        if len(columns) != count * _PAIR_BYTES or data[_HEAD.size : at] != _digest(head, columns):
            raise BadIndex(f"bucket {self.number} is damaged")
        self.size = len(data)
        self._hashes, self._entries = (
            array("Q", columns[: 8 * count]),
            array("I", columns[8 * count :]),
        )
        if sys.byteorder == "little":
            self._hashes.byteswap()
            self._entries.byteswap()

    def entries_of(self, key: bytes) -> "KeyFound":
        """What the index tells of a key, which must be one of this bucket's."""
        hashed = hash_of(key)
        begin = bisect_left(self._hashes, hashed)
        entries = self._entries[begin : bisect_right(self._hashes, hashed)]
        is_all = not entries or entries[-1] != _MANY
        return KeyFound(entries if is_all else entries[:-1], is_all)


def _big_endian(column: "array[int]") -> bytes:
    if sys.byteorder == "little":
        column.byteswap()
    return column.tobytes()


def _digest(head: bytes, columns: bytes) -> bytes:
    return hashlib.blake2b(head + columns, digest_size=_DIGEST_BYTES).digest()
