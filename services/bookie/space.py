"""Segments are removed when no part names them, and compacted when little of them is in use.

What is in use is moved to the end of the log, ordered by ledger and entry: what lay scattered among
thousands of ledgers lies together afterwards. What a segment's records say beside entries (fences,
keys, LACs, limbo, and who was deleted) is written again first, so that the index can always be
rebuilt from the log.

Who was deleted is said for ever (rule 16a), by records that name many. They count as what is in use,
so that they are written again as seldom as entries are, and not at each compaction.

A crash at any step loses nothing: a segment goes only when a checkpoint that does not name it is on
disk. A broken segment stays, and never stops the rest.
"""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Final

from services.bookie.log import LogDamaged
from services.bookie.pace import Pace
from services.bookie.parts import Part
from services.bookie.records import IDS_MAX
from services.bookie.scan import words_of
from services.bookie.store import Store

log = logging.getLogger(__name__)

LIVE_SHARE_MIN: Final = 0.2
"""A segment of which less is in use is compacted (BookKeeper's minor compaction)."""

COMPACT_BYTES_PER_S: Final = 32 * 1024 * 1024
"""A tenth of what a disk of a small machine writes (taste)."""

MOVE_BYTES: Final = 1024 * 1024
"""Of parts written together: each write has a sync, and a long one would crowd out adds (taste)."""

REPEATS_AT_ONCE: Final = 256
"""Ledgers of which is written again together what is known: a segment may speak of thousands, and
each by itself would wait for a sync (measured: most of what a compaction took)."""

SEGMENTS_AT_ONCE: Final = 8
"""Compacted together: more sorts better, and all their parts are in memory meanwhile."""


class Space:
    """Gives segments back."""

    def __init__(
        self,
        store: Store,
        *,
        live_share_min: float = LIVE_SHARE_MIN,
        bytes_per_s: int = COMPACT_BYTES_PER_S,
        pace: Pace | None = None,
    ) -> None:
        """`bytes_per_s`: what moving may write."""
        self._store = store
        self._live_share_min = live_share_min
        self._bytes_per_s = bytes_per_s
        self._pace = pace or Pace()
        self._packed: dict[int, int] = {}
        """Segments that stay for those whom they say are deleted, and how many bytes say so."""

    async def free(self) -> None:
        """Remove segments that nothing names, and compact those of which little is left."""
        store = self._store
        await store.checkpoint()
        position = store.index.checkpoint()
        if position is None:
            return
        used = await asyncio.to_thread(self._used_bytes)
        chosen = []
        for number in store.segments.numbers():
            if number >= position.segment:
                break
            size = store.segments.path(number).stat().st_size
            # A full disk has no room for what would be moved.
            share = 0.0 if store.disk.is_full else self._live_share_min
            if used[number] <= size * share and self._packed.get(number, 0) <= self._packed_max(
                number
            ):
                chosen.append(number)
        for start in range(0, len(chosen), SEGMENTS_AT_ONCE):
            await self._give_up(chosen[start : start + SEGMENTS_AT_ONCE])

    async def _give_up(self, numbers: list[int]) -> None:
        store = self._store
        parts = await asyncio.to_thread(self._parts_of, set(numbers))
        broken = await self._move(parts)
        repeated = []
        for number in numbers:
            if number in broken:
                log.error("segment-kept", extra={"segment": number, "reason": "damaged"})
                continue
            try:
                is_repeated = await self._repeat(number)
            except (OSError, LogDamaged) as error:
                log.error("segment-kept", extra={"segment": number, "reason": str(error)})  # noqa: TRY400
                continue
            if is_repeated:
                repeated.append(number)
        # The index must not name a segment any more before it goes.
        await store.checkpoint()
        named = await self._named(repeated)
        for number in repeated:
            if number in named:
                log.error("segment-kept", extra={"segment": number, "reason": "named"})
                continue
            try:
                await asyncio.to_thread(store.segments.remove, number)
            except (OSError, LogDamaged) as error:
                log.error("segment-kept", extra={"segment": number, "reason": str(error)})  # noqa: TRY400
                continue
            self._packed.pop(number, None)
            store.damages.segment_removed(number)
            store.counters["removed_segments"] += 1
            log.info("segment-removed", extra={"segment": number})

    async def _named(self, numbers: list[int]) -> set[int]:
        """Which of these segments a part names still: what was left of a run when a part of it was
        replaced meanwhile. What lies in memory only is never in a segment this old: it was taken from
        a part that the checkpoint before this wrote, or comes to the log's end.
        """
        left = await asyncio.to_thread(self._parts_of, set(numbers))
        return {part.segment for _, part in left}

    async def _move(self, parts: list[tuple[int, Part]]) -> set[int]:
        """Move parts to the end of the log, in this order; the segments of those that can't be
        read.
        """
        store = self._store
        broken: set[int] = set()
        for some, size in _batches(parts):
            moved = await store.moves.move(some)
            for (_, part), is_moved in zip(some, moved, strict=True):
                if not is_moved:
                    broken.add(part.segment)
            store.counters["compacted_bytes"] += size
            await self._pace.spend(size, self._bytes_per_s)
        return broken

    async def _repeat(self, number: int) -> bool:
        """Write again what a segment's records say beside entries. False: it says of so many that
        they are deleted that it stays. Raises OSError, LogDamaged.
        """
        store = self._store
        words = await asyncio.to_thread(words_of, store.segments, number)
        if words.packed_bytes > self._packed_max(number):
            self._packed[number] = words.packed_bytes
            return False
        ledgers, deleted = words.ledgers, words.deleted
        if not words.is_whole:
            # What can't be read may speak of anybody.
            ledgers = {ledger_id for ledger_id, _ in store.ledgers()}
            deleted = await asyncio.to_thread(lambda: array("q", store.index.deleted()))

        async def repeat(ledger_id: int) -> None:
            if store.row(ledger_id) is not None:
                await store.moves.repeat(ledger_id)

        ledger_ids = sorted(ledgers)
        for start in range(0, len(ledger_ids), REPEATS_AT_ONCE):
            some = ledger_ids[start : start + REPEATS_AT_ONCE]
            await asyncio.gather(*map(repeat, some))
        await self._repeat_deleted(deleted)
        return True

    async def _repeat_deleted(self, ledger_ids: "array[int]") -> None:
        """Write again who was deleted, in records that name many."""
        for start in range(0, len(ledger_ids), IDS_MAX):
            some = ledger_ids[start : start + IDS_MAX]
            await self._store.moves.repeat_deleted(some)
            if len(some) == IDS_MAX:
                # So many at most a start has to go through again, some microseconds each.
                await self._store.checkpoint()
            await self._pace.spend(8 * len(some), self._bytes_per_s)

    def _packed_max(self, number: int) -> int:
        """How many bytes of packed ids are carried to the end of the log with a segment. A short one,
        which a restart ended, is measured as a whole one, so that many of them become one; but for a
        full disk, where more has to be given back than is written.
        """
        store = self._store
        size = store.segments.segment_bytes
        if store.disk.is_full:
            size = store.segments.path(number).stat().st_size
        return int(size * self._live_share_min)

    def _used_bytes(self) -> Counter[int]:
        """What the index names of each segment; in a thread."""
        used: Counter[int] = Counter()
        for _, part in self._store.index.all_parts():
            used[part.segment] += part.size
        return used

    def _parts_of(self, numbers: set[int]) -> list[tuple[int, Part]]:
        """The index's parts that lie in some segments, by ledger and entry; in a thread."""
        return [item for item in self._store.index.all_parts() if item[1].segment in numbers]


def _batches(parts: list[tuple[int, Part]]) -> Iterator[tuple[list[tuple[int, Part]], int]]:
    """Parts that are moved together, and their bytes."""
    some: list[tuple[int, Part]] = []
    size = 0
    for item in parts:
        some.append(item)
        size += item[1].size
        if size >= MOVE_BYTES:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size
