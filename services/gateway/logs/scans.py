"""Scans of ledgers without an index of keys: what decoding costs, and the hashes kept in memory.

A batch of some hundred bytes may unpack to megabytes. Therefore unpacked bytes and records are
charged, other tasks run in between, and a thread decodes large batches.
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
"""Bytes of hashes of ledgers without an index that stay in memory: chosen by judgement."""

_PAUSE_COST: Final = 64 << 10
"""Cost of work after which other tasks run: some milliseconds."""

_LARGE_COST: Final = 1 << 20
"""Cost of a batch that a thread decodes."""

PIECE_COST: Final = 256 << 10
"""Cost of the entries of a piece, about: a read of a key that is in a piece decodes them again."""

_PIECE_BYTES: Final = 512
"""Memory of a piece besides its hashes."""


class Work:
    """The decoding that one request may still do: `left` is its budget."""

    def __init__(self, budget: int) -> None:
        """`budget`: unpacked bytes, with RECORD_COST for each record."""
        self.left = self._paused_at = budget

    async def charge(self, cost: int) -> None:
        """Charge work, and let other tasks run now and then."""
        self.left -= cost
        if self._paused_at - self.left >= _PAUSE_COST:
            self._paused_at = self.left
            await asyncio.sleep(0)

    async def decode(self, decode: Callable[[Stored], T], data: Stored) -> T:
        """Decode a batch, in a thread if it is large. Raises: BadBatch."""
        cost = batch.plain_size(data) + RECORD_COST * batch.decode_head(data).count
        await self.charge(cost)
        return decode(data) if cost < _LARGE_COST else await asyncio.to_thread(decode, data)


@dataclass(frozen=True, slots=True)
class Piece:
    """The hashes of all keys of the entries from `first` to below `after`."""

    first: int
    after: int
    place: int
    """How many of the ledger's records are before the entry `first`."""
    cost: int
    """What decoding the entries costs."""
    hashes: "array[int]"
    """Ascending."""

    @classmethod
    def of(cls, first: int, after: int, place: int, cost: int, hashes: Iterable[int]) -> "Piece":
        """A piece with these hashes, in any order."""
        return cls(first, after, place, cost, array("Q", sorted({*hashes})))

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return _PIECE_BYTES + 8 * len(self.hashes)

    def has(self, hashed: int) -> bool:
        """Whether an entry may have a key with this hash."""
        at = bisect_left(self.hashes, hashed)
        return at < len(self.hashes) and self.hashes[at] == hashed

    def joined(self, later: "Piece") -> "Piece":
        """This piece with the one that begins where this piece ends."""
        cost, hashes = self.cost + later.cost, (*self.hashes, *later.hashes)
        return Piece.of(self.first, later.after, self.place, cost, hashes)


class Scans:
    """Pieces of ledgers, within SCANNED_KEYS_BYTES_MAX. The ledgers that were used longest ago lose
    their pieces first.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._ledgers: OrderedDict[int, list[Piece]] = OrderedDict()
        """Pieces that do not overlap, ascending."""
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self.size = 0

    def lock(self, ledger_id: int) -> asyncio.Lock:
        """Lets one request at a time read a ledger, so that the next one finds its piece."""
        return self._locks.setdefault(ledger_id, asyncio.Lock())

    def below(self, ledger_id: int, entry_id: int) -> Piece | None:
        """The last piece that begins below an entry; it may end above it."""
        pieces = self._ledgers.get(ledger_id)
        if pieces is None:
            return None
        self._ledgers.move_to_end(ledger_id)
        at = _place(pieces, entry_id)
        return pieces[at - 1] if at else None

    def add(self, ledger_id: int, piece: Piece) -> None:
        """Remember a piece, unless a piece has some of its entries."""
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
        """Forget a ledger, which has an index."""
        self.size -= sum(piece.size for piece in self._ledgers.pop(ledger_id, ()))

    def _join(self, pieces: list[Piece], at: int) -> None:
        """Join a piece with the next one if they are adjacent and small."""
        both = pieces[at : at + 2] if at >= 0 else []
        if len(both) < 2 or both[0].after < both[1].first:
            return
        if both[0].cost + both[1].cost < PIECE_COST:
            pieces[at : at + 2] = [new := both[0].joined(both[1])]
            self.size += new.size - both[0].size - both[1].size


def _place(pieces: list[Piece], entry_id: int) -> int:
    """How many pieces begin below an entry."""
    return bisect_left(pieces, entry_id, key=lambda piece: piece.first)
