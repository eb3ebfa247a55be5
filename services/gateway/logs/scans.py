"""Scans of ledgers without an index of keys: a budget for decoding, and a cache of key hashes.

A batch of some hundred bytes may unpack to megabytes. Therefore a request is charged for unpacked
bytes and records, lets other tasks run in between, and decodes large batches in a thread.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from quorumlog.protocol import batch
from quorumlog.protocol.batch import Stored
from services.gateway.logs.values import RECORD_COST

T = TypeVar("T")

SCANNED_KEYS_BYTES_MAX: Final = 48 << 20
"""Maximum memory for hashes of keys of ledgers without an index (chosen by judgement)."""

_PAUSE_COST: Final = 64 << 10
"""A request lets other tasks run after work of this cost, which takes some milliseconds."""

_LARGE_COST: Final = 1 << 20
"""Batches of at least this cost are decoded in a thread."""

PIECE_COST: Final = 256 << 10
"""Maximum cost of a joined piece, because reading a key decodes the piece's entries again."""

_PIECE_BYTES: Final = 512
"""Memory overhead of a piece besides its hashes, in bytes."""


def cost_of(data: Stored) -> int:
    """The cost of decoding a batch: its unpacked bytes, and RECORD_COST for each record."""
    size = batch.plain_size(data)
    try:
        count = batch.decode_head(data).count
    except batch.BadBatch:
        return size
    return size + RECORD_COST * min(count, size // 4)  # each record takes at least four bytes


class Work:
    """One request's budget for decoding. `left` remains."""

    def __init__(self, budget: int) -> None:
        """`budget`: unpacked bytes, plus RECORD_COST for each record."""
        self.left = self._paused_at = budget

    async def charge(self, cost: int) -> None:
        """Charge the budget, and let other tasks run after each _PAUSE_COST."""
        self.left -= cost
        if self._paused_at - self.left >= _PAUSE_COST:
            self._paused_at = self.left
            await asyncio.sleep(0)

    async def decode(self, decode: Callable[[Stored], T], data: Stored) -> T:
        """Decode a batch, in a thread if it is large. Raises: BadBatch."""
        cost = cost_of(data)
        await self.charge(cost)
        return decode(data) if cost < _LARGE_COST else await asyncio.to_thread(decode, data)


@dataclass(frozen=True, slots=True)
class Piece:
    """The hashes of all keys of the entries from `first` to below `after`."""

    first: int
    after: int
    place: int
    """The number of the ledger's offsets before the entry `first`."""
    cost: int
    """The cost of decoding the entries."""
    hashes: "array[int]"
    """The keys' hashes, ascending."""

    @classmethod
    def of(cls, first: int, after: int, place: int, cost: int, hashes: Iterable[int]) -> "Piece":
        """Create a piece with these hashes, given in any order."""
        return cls(first, after, place, cost, array("Q", sorted({*hashes})))

    @property
    def size(self) -> int:
        """The bytes of memory that the piece takes."""
        return _PIECE_BYTES + 8 * len(self.hashes)

    def has(self, hashed: int) -> bool:
        """Whether an entry may have a key with this hash."""
        at = bisect_left(self.hashes, hashed)
        return at < len(self.hashes) and self.hashes[at] == hashed

    def joined(self, later: "Piece") -> "Piece":
        """This piece joined with `later`, which begins where this piece ends."""
        cost, hashes = self.cost + later.cost, (*self.hashes, *later.hashes)
        return Piece.of(self.first, later.after, self.place, cost, hashes)


class Scans:
    """The pieces of all scanned ledgers, of at most SCANNED_KEYS_BYTES_MAX. Evicts pieces of the
    least recently used ledgers first.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._ledgers: OrderedDict[int, list[Piece]] = OrderedDict()
        """The pieces of each ledger, in ascending order and without overlap."""
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self.size = 0

    def lock(self, ledger_id: int) -> asyncio.Lock:
        """Return the lock that lets one request at a time scan a ledger."""
        return self._locks.setdefault(ledger_id, asyncio.Lock())

    def below(self, ledger_id: int, entry_id: int) -> Piece | None:
        """The last piece of a ledger that begins below an entry. The piece may end above it."""
        pieces = self._ledgers.get(ledger_id)
        if pieces is None:
            return None
        self._ledgers.move_to_end(ledger_id)
        at = _place(pieces, entry_id)
        return pieces[at - 1] if at else None

    def add(self, ledger_id: int, piece: Piece) -> None:
        """Remember a piece, unless it overlaps a remembered piece."""
        pieces = self._ledgers.setdefault(ledger_id, [])
        self._ledgers.move_to_end(ledger_id)
        at = _place(pieces, piece.after)
        if at and pieces[at - 1].after > piece.first:
            return
        pieces.insert(at, piece)
        self.size += piece.size
        self._join(pieces, at)
        self._join(pieces, at - 1)
        while self.size > SCANNED_KEYS_BYTES_MAX:
            oldest, pieces = next(iter(self._ledgers.items()))
            self.size -= pieces.pop(0).size
            if not pieces:
                del self._ledgers[oldest]

    def drop(self, ledger_id: int) -> None:
        """Forget a ledger's pieces, because the ledger has an index."""
        self.size -= sum(piece.size for piece in self._ledgers.pop(ledger_id, ()))

    def _join(self, pieces: list[Piece], at: int) -> None:
        """Join the pieces `at` and `at` + 1 if they are adjacent and together below PIECE_COST."""
        both = pieces[at : at + 2] if at >= 0 else []
        if len(both) < 2 or both[0].after < both[1].first:
            return
        if both[0].cost + both[1].cost < PIECE_COST:
            pieces[at : at + 2] = [new := both[0].joined(both[1])]
            self.size += new.size - both[0].size - both[1].size


def _place(pieces: list[Piece], entry_id: int) -> int:
    """The number of pieces that begin below an entry."""
    return bisect_left(pieces, entry_id, key=lambda piece: piece.first)
