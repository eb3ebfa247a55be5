"""Where an offset is: from the place of a record in its ledger to the entry that holds the record.

Each batch says how many records precede it, so a search over entries needs no index. Known places are
kept, sparsely, and narrow the next search. Among batches of one size the first guess finds the entry.
"""

import bisect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from quorumlog.protocol.batch import BatchHead

POINTS_MAX: Final = 512
"""Points that are kept of one ledger. Beyond this every second one is dropped, so that points are
densest where a tail is read."""

LEDGERS_MAX: Final = 4096
"""Ledgers whose points are kept; the least recently used one is dropped first."""

ReadHead = Callable[[int], Awaitable[BatchHead]]


class Points:
    """Known places of one ledger: the number of records before an entry, and the entry; both ascend."""

    def __init__(self) -> None:
        self.named_s = float("-inf")
        """When the ledger was last known to exist: a question that was asked then was answered so."""
        self._places: list[int] = [0]
        self._entries: list[int] = [0]

    def __len__(self) -> int:
        """The number of points."""
        return len(self._places)

    def add(self, place: int, entry_id: int) -> None:
        """Add that entry `entry_id` begins at `place`, or will begin there once it is written."""
        at = bisect.bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            return
        self._places.insert(at, place)
        self._entries.insert(at, entry_id)
        if len(self._places) > POINTS_MAX:
            # The first and the last point stay: the start, and where a tail continues.
            self._places[1:-1] = self._places[1:-1:2]
            self._entries[1:-1] = self._entries[1:-1:2]

    def around(self, place: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The nearest points at or below `place`, and above it."""
        at = bisect.bisect_right(self._places, place)
        low = (self._places[at - 1], self._entries[at - 1])
        if at == len(self._places):
            return low, None
        return low, (self._places[at], self._entries[at])


class OffsetIndex:
    """The points of the ledgers that were used last in this process."""

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
        """Forget a ledger."""
        self._ledgers.pop(ledger_id, None)


async def find_entry(
    points: Points, place: int, *, last_entry: int, read_head: ReadHead
) -> int | None:
    """The entry that holds the record at `place`; None if that is beyond `last_entry`.

    `last_entry` is confirmed. Reads O(log n) heads; one or none if batches have one size or the
    reader reads in order.
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
