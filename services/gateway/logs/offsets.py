"""Searches a log for the entry of an offset, the offset of a time, and the end of a ledger.

Each entry of a log's ledger stores one record batch. The batch's head has its append time, its
number of records, and the number of records before it in the ledger. So a search reads heads of
entries and needs no index.

`find_entry` finds the entry that contains a record by the record's place: the number of records
before it in the ledger. `OffsetIndex` keeps some known places of each ledger in memory, which
narrow later searches. If all batches have the same size, the first guess is right.

`find_time` finds the first record that was appended at a time or later. Append times never decrease
within a log (rule 26b), so the search is binary: over the ledgers by their last entries, then over
one ledger's entries. For L ledgers of N entries, it reads at most log2(L) + 1 + log2(N) entries.
"""

import asyncio
import bisect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from quorumlog.errors import EntryLost, EntryUnavailable, InvalidRequest, NoSuchLedger
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata
from quorumlog.protocol.log.messages import LedgerEnd, Sizes
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.transaction import Sealed
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView

POINTS_MAX: Final = 512
"""Maximum points kept per ledger. Beyond this bound, every second point is dropped, so points are
densest at the most recently read offsets."""

LEDGERS_MAX: Final = 4096
"""Maximum ledgers whose points are kept. The least recently used ledger is dropped first."""

_AT_ONCE: Final = 32
"""Maximum ledgers of a commit whose ends are read concurrently."""

ReadHead = Callable[[int], Awaitable[BatchHead]]
"""Reads the head of an entry of one ledger."""
LastEntry = Callable[[LogItem], Awaitable[int]]
"""Returns the last acknowledged entry of a ledger, or NO_ENTRY."""
ReadAnyHead = Callable[[int, int], Awaitable[BatchHead]]
"""Reads the head of an entry (ledger, entry). `_hole` computes the head of a lost entry."""


class Points:
    """The points of one ledger, ascending. A point is an entry and the number of records before it."""

    def __init__(self) -> None:
        self.named_s = float("-inf")
        """The time of the last request that confirmed that the ledger exists."""
        self.density = 0.0
        """Records per entry in the last read; 0 if unknown."""
        self._points = [(0, 0)]

    def __len__(self) -> int:
        """The number of points."""
        return len(self._points)

    def add(self, place: int, entry_id: int) -> None:
        """Add a point: `place` records precede `entry_id`, which might not be written yet."""
        if not self.has(place):
            bisect.insort(self._points, (place, entry_id))
        if len(self._points) > POINTS_MAX:
            # The first point (the ledger's start) and the last (where a tail continues) stay.
            self._points[1:-1] = self._points[1:-1:2]

    def has(self, place: int) -> bool:
        """Whether there is a point at `place`, where an entry begins or ends."""
        return self.around(place)[0][0] == place

    def entries_of(self, place: int, count: int) -> int:
        """Estimate how many entries contain `count` records from `place` on; at most `count`. The
        estimate adds a quarter, because an estimate that is too low costs another read of bookies.
        """
        if not self.density:
            return count
        return min(max(int(1.25 * count / self.density) + (not self.has(place)), 1), count)

    def around(self, place: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The nearest point at or below `place`, and the nearest point above it."""
        at = bisect.bisect_left(self._points, (place + 1,))
        return self._points[at - 1], self._points[at] if at < len(self._points) else None


class OffsetIndex:
    """The points of this process's most recently used ledgers."""

    def __init__(self) -> None:
        self._ledgers: OrderedDict[int, Points] = OrderedDict()

    def points(self, ledger_id: int) -> Points:
        """The points of a ledger."""
        points = self._ledgers.get(ledger_id)
        if points is None:
            points = self._ledgers[ledger_id] = Points()
            if len(self._ledgers) > LEDGERS_MAX:
                self._ledgers.popitem(last=False)
        self._ledgers.move_to_end(ledger_id)
        return points

    def drop(self, ledger_id: int) -> None:
        """Forget a ledger's points."""
        self._ledgers.pop(ledger_id, None)


async def find_entry(
    points: Points, place: int, *, last_entry: int, read_head: ReadHead
) -> int | None:
    """The entry that contains the record at `place`; None if the record is beyond `last_entry`.

    `last_entry` is confirmed. Reads O(log n) heads, and at most one if all batches have the same
    size or the reader reads in order.
    """
    (low_place, low), above = points.around(place)
    if low > last_entry:
        return None
    if low_place == place:
        return low
    if above is None or above[1] > last_entry + 1:
        head = await read_head(last_entry)
        points.add(head.records_after, last_entry + 1)
        if place >= head.records_after:
            return None
        if place >= head.records_before:
            return last_entry
        above = (head.records_before, last_entry)
    high_place, high = above
    is_guess = True
    while high - low > 1:
        share = (place - low_place) * (high - low) // (high_place - low_place)
        middle = low + min(share, high - low - 1) if is_guess else (low + high) // 2
        is_guess = not is_guess
        head = await read_head(middle)
        points.add(head.records_before, middle)
        if head.records_before <= place < head.records_after:
            return middle
        if place < head.records_before:
            high_place, high = head.records_before, middle
        else:
            low_place, low = head.records_after, middle + 1
            if low_place == place:
                return low
    return low


async def find_time(
    row: LogMetadata, ms: int, *, last_entry: LastEntry, read_head: ReadAnyHead
) -> int:
    """The offset of the first record appended at `ms` or later; the log's end if there is none.

    Records that are appended during the search may be missing from this end.
    """
    items = [item for item in row.items if item.first_offset is not None and not item.is_empty]
    low, high, found = 0, len(items), row.end_offset or row.first_offset
    end: tuple[int, BatchHead] | None = None
    """The last entry of `items[high]`, if it was read."""
    while low < high:
        middle = (low + high) // 2
        item = items[middle]
        asked = None if item.published_ms else await _last_of(item, last_entry, read_head)
        if item.published_ms:
            is_before = item.published_ms < ms
        else:
            is_before = asked is not None and asked[1].append_time_ms < ms
        if not is_before:
            high, end = middle, asked
            continue
        low = middle + 1
        found = _after(item, asked)
    if high == len(items):
        return max(found, row.first_offset)
    item = items[high]
    assert item.first_offset is not None
    place = 0 if end is None else await _place(item.ledger_id, ms, end, read_head)
    found = item.first_offset + place
    if item.last_offset is not None:
        # A fork may share only the beginning of a ledger (rule 27a). The fork's own records follow.
        found = min(found, item.last_offset + 1)
    return max(found, row.first_offset)


def _after(item: LogItem, end: tuple[int, BatchHead] | None) -> int:
    """The offset after the last record of a ledger."""
    if item.last_offset is not None:
        return item.last_offset + 1
    assert end is not None, "expected an acknowledged entry in an unsealed ledger"
    return (item.first_offset or 0) + end[1].records_after


async def _last_of(
    item: LogItem, last_entry: LastEntry, read_head: ReadAnyHead
) -> tuple[int, BatchHead] | None:
    """The last acknowledged entry of a ledger with its head; None for an empty ledger."""
    last = await last_entry(item)
    return None if last == NO_ENTRY else (last, await read_head(item.ledger_id, last))


async def _place(
    ledger_id: int, ms: int, end: tuple[int, BatchHead], read_head: ReadAnyHead
) -> int:
    """Count the records of a ledger that were appended before the time `ms`. `end` is the last
    entry, which was appended at `ms` or later.
    """
    low, (high, found) = 0, end
    while low < high:
        middle = (low + high) // 2
        head = await read_head(ledger_id, middle)
        if head.append_time_ms < ms:
            low = middle + 1
        else:
            high, found = middle, head
    return found.records_before


async def end_of(ledger: LedgerMetadata, engine: Engine) -> LedgerEnd:
    """The end of a CLOSED ledger of a log, computed from the ledger's last entry alone."""
    assert ledger.last_entry is not None, "it is CLOSED"
    if ledger.last_entry == NO_ENTRY:
        return LedgerEnd(0, 0, NO_ENTRY, has_producers=False)
    head = await read_head(engine, ledger.ledger_id, ledger.last_entry)
    return LedgerEnd(
        head.records_after,
        ledger.length or 0,
        ledger.last_entry,
        head.producer is not None or head.after_producer,
        head.append_time_ms,
        head.seq,
        head.is_end,
    )


async def sizes_of(ledgers: Sequence[Sealed], engine: Engine) -> Sizes:
    """Return the number of records and bytes of each ledger of a commit. A CLOSED ledger never
    changes, so the numbers may be read before the log's owner gets the commit.

    Raises: InvalidRequest if a ledger is not closed, ends elsewhere, or stores no records.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def size(index: int, sealed: Sealed) -> tuple[int, int, int]:
        async with room:
            pointer = f"/ledgers/{index}"
            try:
                row = await engine.get(sealed.ledger_id)
                if row.state is not State.CLOSED:
                    raise _invalid(pointer, f"ledger {sealed.ledger_id} is open: close it first")
                if sealed.last_entry not in (None, row.last_entry):
                    detail = f"ledger {sealed.ledger_id} ends at entry {row.last_entry}"
                    raise _invalid(pointer, f"{detail}, not {sealed.last_entry}")
                end = await end_of(row, engine)
            except NoSuchLedger as error:
                raise _invalid(pointer, f"ledger {sealed.ledger_id} does not exist") from error
            return sealed.ledger_id, end.records, end.bytes

    return tuple(
        await asyncio.gather(*(size(index, sealed) for index, sealed in enumerate(ledgers)))
    )


def _invalid(pointer: str, detail: str) -> InvalidRequest:
    return InvalidRequest(detail, errors=[{"pointer": pointer, "detail": detail}])


async def read_head(
    engine: Engine, ledger_id: int, entry_id: int, view: LedgerView | None = None
) -> BatchHead:
    """The head of a confirmed entry's batch; computed by `_hole` if the entry is lost. `view` is
    the ledger's view, if the caller has one.
    """
    try:
        return (await read_sized_head(engine, ledger_id, entry_id, view))[0]
    except EntryLost:
        return await _hole(engine, ledger_id, entry_id)


async def _hole(engine: Engine, ledger_id: int, entry_id: int) -> BatchHead:
    """Compute a batch head for lost entries, which covers the records between their neighbours
    (rule 31).

    Lost entries at a ledger's end have no later neighbour. Since a record takes at least one byte,
    the head then counts one record per lost byte. So some offsets have no record, but no offset is
    used twice.
    """
    row = await engine.get(ledger_id)
    lost = row.lost_at(entry_id)
    assert lost is not None, "expected that a lost entry stays lost"
    assert row.last_entry is not None, "only a CLOSED ledger has lost entries"
    before, bytes_before, appended_ms = 0, 0, 0
    if lost[0] > 0:
        head, bytes_before = await read_sized_head(engine, ledger_id, lost[0] - 1)
        before, appended_ms = head.records_after, head.append_time_ms
    if lost[1] < row.last_entry:
        after = (await read_sized_head(engine, ledger_id, lost[1] + 1))[0].records_before
    else:
        after = before + (row.length or 0) - bytes_before
    # Append times never decrease, so lost records have at least their predecessor's time.
    return BatchHead(after - before, appended_ms, before, None, after_producer=True)


async def read_sized_head(
    engine: Engine, ledger_id: int, entry_id: int, view: LedgerView | None = None
) -> tuple[BatchHead, int]:
    """The head of an entry's batch, and the bytes of the ledger up to and including the entry."""
    found = await engine.reads.read(ledger_id, entry_id, last=entry_id, limit=1, view=view)
    for run in found.runs:
        index = run.index(entry_id)
        if index is not None:
            entry = run.entry(index)
            try:
                return batch.decode_head(entry.payload), entry.length
            except batch.BadBatch as error:
                raise damaged(error, ledger_id, entry_id) from error
    detail = f"bookies did not return the confirmed entry {entry_id}: retry"
    raise EntryUnavailable(detail, ledger_id=ledger_id, entry_id=entry_id)


def damaged(error: batch.BadBatch, ledger_id: int, entry_id: int) -> EntryUnavailable:
    """The error for an entry whose bytes are not a batch. The entry counts as unavailable."""
    return EntryUnavailable(str(error), ledger_id=ledger_id, entry_id=entry_id)
