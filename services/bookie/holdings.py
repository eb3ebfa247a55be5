"""The table of a bookie's ledgers: one view of the ledgers in memory and in the index."""

import asyncio
from collections.abc import Iterator
from heapq import merge
from operator import itemgetter
from typing import Final

from quorumlog.protocol.ids import NO_LEDGER
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.row_copy import RowCopy, RowName
from quorumlog.wire.rebuild_bodies import HeldRows
from services.bookie.index import Index, IndexChange, IndexRow
from services.bookie.ledger import StoredLedger
from services.bookie.log import Kind, StoredRecord
from services.bookie.parts import present_in
from services.bookie.records import apply_stored, deleted_in
from services.bookie.witnesses import FreshCopies
from services.bookie.writer import Position

LEDGERS_MAX: Final = 20_000
"""Maximum number of ledgers in memory; above it, `evict_idle` evicts all idle ledgers."""
_ROUND: Final = 60
"""Number of calls of `evict_idle`, one per second, that check each ledger once. A ledger that is
unused between two checks is evicted, because one small object can keep a MiB of Python's memory in
use. Loading a ledger again takes some 30 µs (measured)."""

REPLAY_CHUNK: Final = 100_000
"""Number of replayed records after which the records in memory are written to the index."""

ROWS_BYTES_MAX: Final = 1 << 20
"""Maximum size of the copies in one page for a rebuild; each page has at least one ledger."""
_ROWS_AT_ONCE: Final = 50
"""Number of ledgers of a page handled in one turn of the event loop: about a millisecond."""

RANGES_AT_ONCE_BYTES: Final = 1024 * 1024


class LedgerTable:
    """A bookie's ledgers. Use the table on the event loop's thread only.

    Invariant: all callers share one object per ledger in memory; two objects would miss each
    other's fence.
    """

    def __init__(self, me: str, index: Index, *, is_deferred: bool) -> None:
        """Create the table from the index; a replay adds later records."""
        self._me = me
        self._index = index
        self._is_deferred = is_deferred
        self._ledgers: dict[int, StoredLedger] = {}
        self._unheld: set[int] = set()
        """Loaded ledgers of which this bookie stored nothing when they were loaded."""
        self._to_look_at: list[int] = []
        """The ledgers that the current round of `evict_idle` has not checked yet."""
        self.deleted: set[int] = set()
        """Ledgers of which a replay found only the deletion, until the index has the deletion."""
        self.fresh = FreshCopies(index.fresh())
        self._applied_count = 0

    def set_member(self, me: str) -> None:
        """Continue as another incarnation. Call this before any request is served."""
        self._me = me
        for ledger in self._ledgers.values():
            ledger.replica.me = me

    def ledger(self, ledger_id: int) -> StoredLedger:
        """A ledger, from memory or from the index."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = self._ledgers[ledger_id] = StoredLedger(
                ledger_id,
                self._me,
                self._index,
                self.fresh,
                is_deferred=self._is_deferred,
                is_deleted=ledger_id in self.deleted,
            )
            if ledger.replica.ledger_key is None:
                self._unheld.add(ledger_id)
        ledger.is_used = True
        return ledger

    def ledgers(self, after: int = -1) -> Iterator[tuple[int, IndexRow]]:
        """All stored ledgers with ids above `after`, ascending."""
        mine = ((item, None) for item in sorted(self._ledgers) if item > after)
        last_id = -1
        for ledger_id, indexed in merge(mine, self._index.ledgers(after), key=itemgetter(0)):
            # `merge` yields a ledger in memory before the same ledger in the index.
            if ledger_id == last_id:
                continue
            last_id = ledger_id
            row = self.row(ledger_id) if indexed is None else indexed
            if row is not None:
                yield ledger_id, row

    def remembered(self, after: int = -1) -> Iterator[tuple[int, IndexRow | None]]:
        """Ledgers with ids above `after`, ascending. The row of a deleted ledger is None."""
        mine = {item for item, ledger in self._ledgers.items() if ledger.replica.is_deleted}
        recent = sorted(item for item in mine | self.deleted if item > after)
        last_id = -1
        deleted = ((item, None) for item in merge(recent, self._index.deleted(after)))
        for ledger_id, row in merge(deleted, self.ledgers(after), key=itemgetter(0)):
            if ledger_id != last_id:
                yield ledger_id, row
            last_id = ledger_id

    def row_copies(self, ledger_id: int) -> list[RowCopy]:
        """This bookie's copies of a ledger's metadata (rule 18b)."""
        held = self._ledgers.get(ledger_id)
        if held is None:
            return list(self._index.copies(ledger_id))
        return [held.row_copy(name) for name in held.row_names]

    def row_names(self, ledger_id: int) -> tuple[RowName, ...]:
        """The names of a ledger's copies of metadata. Does not load the ledger."""
        held = self._ledgers.get(ledger_id)
        if held is not None:
            return held.row_names
        return tuple(copy.name for copy in self._index.copies(ledger_id))

    def row(self, ledger_id: int) -> IndexRow | None:
        """A ledger's index row; None if the ledger was never seen or is deleted."""
        held = self._ledgers.get(ledger_id)
        if held is not None and held.replica.is_deleted:
            return None
        row = held.row() if held is not None else self._index.row(ledger_id)
        return row if row is not None and (row.ledger_key is not None or row.is_limbo) else None

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether a ledger was stored here and deleted (rule 16a)."""
        held = self._ledgers.get(ledger_id)
        if held is not None:
            return held.replica.is_deleted
        return ledger_id in self.deleted or self._index.is_deleted(ledger_id)

    def highest_ledger(self, below: int) -> int:
        """The highest id below `below` of a ledger that is or was stored here; else NO_LEDGER."""
        known = (
            ledger_id
            for ledger_id in sorted(self._ledgers, reverse=True)
            if ledger_id < below and (self.row(ledger_id) or self.is_deleted(ledger_id))
        )
        deleted = (ledger_id for ledger_id in self.deleted if ledger_id < below)
        return max(
            next(known, NO_LEDGER),
            max(deleted, default=NO_LEDGER),
            self._index.highest_ledger(below),
        )

    async def ranges(self, ledger_id: int, first: int, last: int, limit: int) -> Ranges:
        """About `limit` stored ranges of first..last. Yields to the event loop between steps."""
        found: list[tuple[int, int]] = []
        while first <= last and len(found) < limit:
            ledger = self.ledger(ledger_id)
            parts, known_to = ledger.find_some(first, last, RANGES_AT_ONCE_BYTES)
            for low, high in present_in(parts, first, known_to):
                if found and found[-1][1] == low - 1:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
            first = known_to + 1
            await asyncio.sleep(0)
        return tuple(found)

    def evict_idle(self) -> None:
        """Evict idle ledgers that store nothing or were unused for a round. Above `LEDGERS_MAX`,
        evict all idle ledgers.
        """
        is_much = len(self._ledgers) > LEDGERS_MAX
        asked, self._unheld = self._unheld, set()
        for ledger_id in list(self._ledgers) if is_much else asked:
            ledger = self._ledgers.get(ledger_id)
            if ledger is None or not (is_much or ledger.replica.ledger_key is None):
                continue
            if ledger.is_idle:
                del self._ledgers[ledger_id]
            elif ledger.replica.ledger_key is None:
                self._unheld.add(ledger_id)
        self._to_look_at = self._to_look_at or list(self._ledgers)
        count = len(self._ledgers) // _ROUND + 1
        for ledger_id in self._to_look_at[-count:]:
            ledger = self._ledgers.get(ledger_id)
            if ledger is None:
                continue
            if not ledger.is_used and ledger.is_idle:
                del self._ledgers[ledger_id]
            ledger.is_used = False
        del self._to_look_at[-count:]

    @property
    def replayed_much(self) -> bool:
        """Whether a replay applied so many records that a checkpoint should follow."""
        return self._applied_count >= REPLAY_CHUNK

    def apply_stored(self, segment: int, record: StoredRecord) -> None:
        """Apply a replayed record."""
        if record.kind in {Kind.DELETE, Kind.DELETED}:
            for ledger_id in deleted_in(record):
                # Don't create an object for each ledger, because a compaction's record names many
                # deleted ledgers, most of which have no other record.
                if ledger_id in self._ledgers or self._index.row(ledger_id) is not None:
                    apply_stored(self.ledger(ledger_id), segment, record)
                else:
                    self.deleted.add(ledger_id)
                self._applied()
            return
        ledger = self.ledger(record.ledger_id)
        if not ledger.replica.is_deleted:
            apply_stored(ledger, segment, record)
        self._applied()

    def _applied(self) -> None:
        self._applied_count += 1
        if self._applied_count % REPLAY_CHUNK == 0:
            # Bound memory. The index keeps its position, since a repeated replay is harmless.
            self.write_index(None)
            self.evict_idle()

    def write_index(self, position: Position | None) -> None:
        """Write all ledgers to the index. Blocks, so call this before the event loop runs."""
        changes = self.changes()
        self._index.write(
            position, [change for _, change in changes], self.deleted, self.fresh.encode()
        )
        self.checkpointed(changes)

    def changes(self) -> list[tuple[StoredLedger, IndexChange]]:
        """The changes of all dirty ledgers, which the next checkpoint writes."""
        dirty = [ledger for ledger in self._ledgers.values() if ledger.is_dirty]
        return [(ledger, ledger.change()) for ledger in dirty]

    def checkpointed(self, changes: list[tuple[StoredLedger, IndexChange]]) -> None:
        """Record that a checkpoint has written `changes` and the deleted ledgers to disk."""
        self.deleted.clear()
        for ledger, change in changes:
            ledger.checkpointed(change)
            if ledger.is_deletion_synced and ledger.is_idle:
                self._ledgers.pop(ledger.ledger_id, None)

    async def rows_page(self, after: int, limit: int) -> tuple[list[HeldRows], int | None]:
        """A page of ledgers with ids above `after`, including deleted ones, for a rebuild of the
        metadata database (rule 18d), and the `after` of the next page. The page includes copies
        that are not on disk yet, because their metadata is committed in the database all the same.
        """
        found: list[HeldRows] = []
        size = 0
        for ledger_id, row in self.remembered(after):
            if len(found) == limit or size >= ROWS_BYTES_MAX:
                return found, found[-1].ledger_id
            if row is None:
                found.append(HeldRows(ledger_id=ledger_id, deleted=True))
            else:
                copies = tuple(copy.body.decode() for copy in self.row_copies(ledger_id))
                size += sum(map(len, copies))
                found.append(
                    HeldRows(
                        ledger_id=ledger_id,
                        ledger_key=row.ledger_key or b"",
                        highest_entry=row.highest,
                        limbo=row.is_limbo,
                        copies=copies,
                    )
                )
            if len(found) % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return found, None
