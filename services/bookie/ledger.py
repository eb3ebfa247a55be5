"""A ledger in memory: its protocol state (`Replica`), the parts stored since the last checkpoint,
and the answers that wait for the disk.

Use a ledger on the event loop's thread only. A checkpoint begins with `change()` and ends with
`checkpointed()`; a change made in between is left to the next checkpoint.
"""

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import merge
from typing import Final

from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.replica import LimboSet, Replica, RunStored
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie.index import Index, IndexChange, IndexRow
from services.bookie.parts import Part, part_of, present_in
from services.bookie.witnesses import FreshCopies

log = logging.getLogger(__name__)

_NOTHING: Final = frozenset[int]()


def _first(part: Part) -> int:
    return part.first


def _without_repeats(parts: Iterable[Part]) -> Iterator[Part]:
    """Skip repeated parts, since a part may be in `recent` and in the index during a checkpoint."""
    last_first = NO_ENTRY
    for part in parts:
        if part.first != last_first:
            last_first = part.first
            yield part


class StoredLedger:
    """A ledger as the bookie stores it, with `recent` parts in memory and all others in the index.

    Invariants:
    - parts are disjoint as sets of ids;
    - a part is in `recent` or in the index, or in both while a checkpoint runs;
    - `hidden`, and `_hiding` while a checkpoint deletes them, contain the first ids of outdated
      parts in the index;
    - a part that was on disk stays in the index, or is written to it, until its replacement is on
      disk.
    """

    # A bookie has up to 20,000 ledgers in memory. An idle ledger takes 0.9 KiB; with a dictionary
    # of attributes, more sets and a deque, it took 1.8 KiB (measured).
    __slots__ = (
        *("ahead_to", "hidden", "highest", "is_cold", "is_used", "ledger_id", "lookup", "read_to"),
        *("recent", "replica", "row_names", "sparse_span", "_copies", "_dirty_count"),
        *("_dropped_copies", "_entry_count", "_fresh", "_hiding", "_index", "_indexed_highest"),
        *("_is_in_checkpoint", "_replaced", "_stored_bytes", "_waiting"),
    )

    def __init__(
        self,
        ledger_id: int,
        me: str,
        index: Index,
        fresh: FreshCopies,
        *,
        is_deferred: bool = False,
        is_deleted: bool = False,
    ) -> None:
        """Load the ledger from the index (an unknown ledger is empty). `is_deleted`: the log has
        the ledger's deletion, which may not be in the index yet.
        """
        self.ledger_id = ledger_id
        self._index = index
        self._fresh = fresh
        self.replica = Replica(me, self, is_deferred=is_deferred)
        self.recent: list[Part] = []
        self.hidden: set[int] = set()
        self._hiding = _NOTHING
        self._replaced: list[tuple[Part, Part, Part | None]] = []
        """(new, old, rest) for each new part that is not on disk yet. The part `new` replaces
        entries of the part `old`, and `rest` contains the remaining entries of `old`."""
        self._is_in_checkpoint = False
        self.read_to = self.ahead_to = NO_ENTRY
        """The last ids that a read and read-ahead have reached."""
        self.is_used = True
        """Whether a request named the ledger since the table's last check (`holdings.py`)."""
        self.is_cold = False
        """Whether the current sequence of reads had to wait for the disk."""
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self.lookup: tuple[int, int, list[Part]] | None = None
        """First id, last id and result of a lookup that `replica` is about to repeat."""
        self._dirty_count = 0
        found = index.row(ledger_id)
        row = found or IndexRow()
        self.replica.restore(
            ledger_key=row.ledger_key,
            is_fenced=row.is_fenced,
            limbo=LimboSet(row.limbo_counter, row.is_limbo),
            last_add_confirmed=row.last_add_confirmed,
            is_deleted=is_deleted or (found is None and index.is_deleted(ledger_id)),
        )
        self.row_names: tuple[RowName, ...] = ()
        """The names of the bookie's copies of this ledger's metadata (rule 18b)."""
        if row.copy_count:
            self.row_names = tuple(copy.name for copy in index.copies(ledger_id))
        self._copies: dict[RowName, RowCopy] = {}
        """Copies stored since the last checkpoint."""
        self._dropped_copies: list[RowName] = []
        self.highest = self._indexed_highest = row.highest
        self.sparse_span = row.sparse_span
        self._entry_count = row.entry_count
        self._stored_bytes = row.stored_bytes

    def present(self, first: int, last: int) -> Ranges:
        """The stored ranges within first..last, synced or not."""
        if self.lookup is not None and self.lookup[:2] == (first, last):
            return present_in(self.lookup[2], first, last)
        return present_in(self.find(first, last), first, last)

    def accept(self, record: RunStored) -> Part:
        """Store a run's entries; new copies replace existing ones. Returns the run's part, which
        has no place in the log yet.
        """
        part = part_of(record.run)
        self._insert(part)
        return part

    def find(self, first: int, last: int) -> list[Part]:
        """All parts that may contain some of first..last, ascending by first."""
        return self.find_some(first, last, ID_MAX)[0]

    def find_some(self, first: int, last: int, bytes_max: int) -> tuple[list[Part], int]:
        """The parts that contain some of first..last, ascending by first, up to about `bytes_max`
        (at least one entry), and the last id that the result covers. Parts are returned whole, so
        that a sequential reader does not read a run twice.
        """
        if first > self.highest:
            return [], last
        # `recent` may be long, so do not copy it or step through its parts before `first`.
        at = max(0, bisect_right(self.recent, first - self.sparse_span, key=_first) - 1)
        recent = map(self.recent.__getitem__, range(at, len(self.recent)))
        is_indexed = first <= self._indexed_highest
        found: list[Part] = []
        size = 0
        for part in self._with_indexed(recent, first, last) if is_indexed else recent:
            if part.first > last:
                break
            if not part.has_any(first, last):
                continue
            size += part.size or len(part.body or b"")
            end = part.first - 1
            # An answer must have at least one entry, and parts may interleave.
            if size > bytes_max and any(before.has_any(first, end) for before in found):
                return found, end
            found.append(part)
        return found, last

    def _with_indexed(self, recent: Iterable[Part], first: int, last: int) -> Iterable[Part]:
        """Recent and indexed parts that may contain some of first..last, ascending by first."""
        hidden, hiding = self.hidden, self._hiding
        indexed = self._index.parts(self.ledger_id, first, last, self.sparse_span)
        if hidden or hiding:
            indexed = (p for p in indexed if p.first not in hidden and p.first not in hiding)
        return _without_repeats(merge(recent, indexed, key=_first)) if self.recent else indexed

    def _insert(self, part: Part) -> None:
        if part.first <= self.highest:
            self._take_over(part)
        recent = self.recent
        if recent and recent[-1].first > part.first:
            insort(recent, part, key=_first)
        else:
            recent.append(part)
        if part.mask:
            self.sparse_span = max(self.sparse_span, part.last - part.first + 1)
        self.highest = max(self.highest, part.last)
        self._entry_count += part.count
        self._stored_bytes += part.size or len(part.body or b"")

    def _take_over(self, part: Part) -> None:
        """Remove a new part's ids from the parts that had these ids before."""
        ids: set[int] | None = None
        for old in self.find(part.first, part.last):
            if ids is None:
                ids = set(part.ids())
            if not any(old.has(entry_id) for entry_id in ids):
                continue
            rest = old.without(ids)
            self._entry_count -= old.count
            place = bisect_left(self.recent, old.first, key=_first)
            if place < len(self.recent) and self.recent[place] is old:
                del self.recent[place]
            self.hidden.add(old.first)
            self._replaced.append((part, old, rest))
            if old.segment < 0:
                old.rest = rest
            if rest is not None:
                self._entry_count += rest.count
                insort(self.recent, rest, key=_first)
                if rest.mask:
                    span = rest.last - rest.first + 1
                    self.sparse_span = max(self.sparse_span, span)

    def holds(self, part: Part) -> bool:
        """Whether a part is still current: not replaced, moved or dropped."""
        place = (part.segment, part.offset, part.mask)
        return any(
            (held.segment, held.offset, held.mask) == place
            for held in self.find(part.first, part.last)
        )

    def row_copy(self, name: RowName) -> RowCopy:
        """The stored copy of ledger metadata with this name."""
        found = self._copies.get(name)
        if found is None:
            found = next(copy for copy in self._index.copies(self.ledger_id) if copy.name == name)
        return found

    def keep_row_copy(self, row: RowCopy) -> None:
        """Keep a copy of the ledger's metadata (rule 18b)."""
        if row.name not in self.row_names:
            self.row_names = tuple(sorted((*self.row_names, row.name)))
            self._fresh.note(row)
        self._copies[row.name] = row

    def drop_row_copies(self, names: Collection[RowName]) -> None:
        """Forget these copies of the ledger's metadata. A replay may restore the copies."""
        self._dropped_copies += names
        for name in names:
            self._copies.pop(name, None)
        self.row_names = tuple(name for name in self.row_names if name not in names)
        self._dirty_count += 1

    def drop(self) -> None:
        """Drop all entries."""
        for part in self.find(0, self.highest):
            self.hidden.add(part.first)
        self.recent.clear()
        self._replaced.clear()
        self.highest = NO_ENTRY
        self.sparse_span = self._entry_count = self._stored_bytes = 0
        self._dirty_count += 1

    def when_synced(self, after: int, callback: Callable[[], None]) -> None:
        """Call `callback` once the ledger's first `after` records are on disk, possibly at once."""
        if after <= self.replica.synced_count:
            callback()
        else:
            self._waiting.append((after, callback))

    def on_synced(self, count: int) -> None:
        """Answer the requests that waited for records: `count` more records are on disk."""
        replica = self.replica
        replica.synced(replica.synced_count + count)
        self._dirty_count += count
        self._prune()
        waiting = self._waiting
        while waiting and waiting[0][0] <= replica.synced_count:
            try:
                waiting.pop(0)[1]()
            except Exception:
                # The error must not stop other requests' answers that wait for this batch.
                log.exception("answer-failed", extra={"ledger": self.ledger_id})

    def touch(self) -> None:
        """Mark the ledger as changed since the last checkpoint."""
        self._dirty_count += 1

    @property
    def is_dirty(self) -> bool:
        """Whether a checkpoint has something to write."""
        return self._dirty_count > 0 or bool(self.hidden)

    @property
    def is_idle(self) -> bool:
        """Whether the index has the whole ledger, which may then be evicted from memory."""
        replica = self.replica
        return (
            not self.recent
            and not self.is_dirty
            # A running checkpoint may be writing data that the index lacks, such as a fence (I13).
            and not self._is_in_checkpoint
            and not self._copies
            and not self._waiting
            and replica.accepted_count == replica.synced_count
        )

    @property
    def is_deletion_synced(self) -> bool:
        """Whether the ledger is deleted (rule 16a) and the deletion is on disk in the log. The
        index must not record the deletion earlier, because an index rebuilt from a log without that
        record would lack the ledger.
        """
        replica = self.replica
        return replica.is_deleted and replica.synced_count == replica.accepted_count

    def _prune(self) -> None:
        """Remove replaced parts whose replacement is on disk from `_replaced`."""
        if self._replaced:
            self._replaced = [item for item in self._replaced if item[0].segment < 0]

    def row(self) -> IndexRow:
        """The ledger's current index row. The counts leave out entries that are not on disk yet."""
        replica = self.replica
        self._prune()
        pending = [part for part in self.recent if part.segment < 0]
        taken = sum(
            old.count - (0 if rest is None else rest.count)
            for _, old, rest in self._replaced
            if old.segment >= 0
        )
        limbo = replica.limbo
        return IndexRow(
            replica.ledger_key,
            replica.is_fenced,
            limbo.limbo,
            limbo.counter,
            replica.last_add_confirmed,
            self.highest,
            self.sparse_span,
            self._entry_count + taken - sum(part.count for part in pending),
            self._stored_bytes - sum(len(part.body or b"") for part in pending),
            len(self.row_names),
        )

    def change(self) -> IndexChange:
        """The ledger's changes for a checkpoint. The index row may be ahead of the checkpoint's log
        position. Its fields only grow, so replaying the same records again is harmless.
        """
        self._dirty_count = 0
        self._is_in_checkpoint = True
        parts = [part for part in self.recent if part.segment >= 0]
        self._prune()
        # A power cut may lose a replacement that is not on disk; the replaced parts are then valid
        # again. So the checkpoint writes replaced parts unchanged.
        left = {id(rest) for _, _, rest in self._replaced}
        kept = [old for _, old, _ in self._replaced if old.segment >= 0 and id(old) not in left]
        if left:
            parts = [part for part in parts if id(part) not in left] + kept
        # The next checkpoint deletes parts that become hidden from now on.
        still = {part.first for part in kept}
        self._hiding, self.hidden = frozenset(self.hidden - still), still
        row = None if self.is_deletion_synced else self.row()
        dropped, self._dropped_copies = self._dropped_copies, []
        return IndexChange(
            self.ledger_id, row, parts, list(self._hiding), list(self._copies.values()), dropped
        )

    def checkpointed(self, change: IndexChange) -> None:
        """Record that the checkpoint with `change` is on disk."""
        self._is_in_checkpoint = False
        written = set(map(id, change.parts))
        self.recent = [part for part in self.recent if id(part) not in written]
        self._hiding = _NOTHING
        for copy in change.copies:
            self._copies.pop(copy.name, None)
        for part in change.parts:
            self._indexed_highest = max(self._indexed_highest, part.last)

    def checkpoint_failed(self, change: IndexChange) -> None:
        """Mark the changes as dirty again, because the checkpoint with `change` failed."""
        self._dropped_copies += change.dropped_copies
        self._is_in_checkpoint = False
        self.hidden |= self._hiding
        self._hiding = _NOTHING
        self._dirty_count += 1
