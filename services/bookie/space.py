"""Freeing segments: remove those that no part references, and compact those with little live data.

Live parts are moved to the end of the log, ordered by ledger and entry: parts scattered among
thousands of ledgers end up together. A segment's other records (fences, keys, LACs, limbo,
deletions) are rewritten first, so that the index can always be rebuilt from the log.

Deletions are kept for ever (rule 16a), in records that pack many. They count as live data, so that
they are rewritten as rarely as entries, and not by each compaction.

A crash at any step loses nothing: a segment is removed only after a checkpoint that does not
reference it is on disk. A broken segment stays, and never blocks the others.
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
from services.bookie.scan import state_of
from services.bookie.store import Store

log = logging.getLogger(__name__)

LIVE_SHARE_MIN: Final = 0.2
"""Segments with a smaller share of live data are compacted (BookKeeper's minor compaction)."""

COMPACT_BYTES_PER_S: Final = 32 * 1024 * 1024
"""A tenth of what a small machine's disk writes (taste)."""

MOVE_BYTES: Final = 1024 * 1024
"""Parts written together: each write has a sync, and a long one would delay adds (taste)."""

REWRITES_AT_ONCE: Final = 256
"""Ledgers whose state is rewritten together: a segment may have records of thousands, and one by
one each would wait for a sync (measured: most of a compaction's time)."""

SEGMENTS_AT_ONCE: Final = 8
"""Compacted together: more sort better, but all their parts are in memory meanwhile."""


class Space:
    """Frees segments."""

    def __init__(
        self,
        store: Store,
        *,
        live_share_min: float = LIVE_SHARE_MIN,
        bytes_per_s: int = COMPACT_BYTES_PER_S,
        pace: Pace | None = None,
    ) -> None:
        """`bytes_per_s`: the rate of moving parts."""
        self._store = store
        self._live_share_min = live_share_min
        self._bytes_per_s = bytes_per_s
        self._pace = pace or Pace()
        self._kept_packed_bytes: dict[int, int] = {}
        """Segments kept for their packed deletions, and the size of those."""

    async def free(self) -> None:
        """Remove segments that no part references, and compact those with little live data."""
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
            # A full disk has no room for moved parts.
            share = 0.0 if store.disk.is_full else self._live_share_min
            if used[number] <= size * share and self._kept_packed_bytes.get(
                number, 0
            ) <= self._packed_max(number):
                chosen.append(number)
        for start in range(0, len(chosen), SEGMENTS_AT_ONCE):
            await self._free_segments(chosen[start : start + SEGMENTS_AT_ONCE])

    async def _free_segments(self, numbers: list[int]) -> None:
        store = self._store
        parts = await asyncio.to_thread(self._parts_of, set(numbers))
        broken = await self._move(parts)
        rewritten = []
        for number in numbers:
            if number in broken:
                log.error("segment-kept", extra={"segment": number, "reason": "damaged"})
                continue
            try:
                is_rewritten = await self._rewrite_state(number)
            except (OSError, LogDamaged) as error:
                log.error("segment-kept", extra={"segment": number, "reason": str(error)})  # noqa: TRY400
                continue
            if is_rewritten:
                rewritten.append(number)
        # The index must not reference a segment when it is removed.
        await store.checkpoint()
        named = await self._referenced(rewritten)
        for number in rewritten:
            if number in named:
                log.error("segment-kept", extra={"segment": number, "reason": "named"})
                continue
            try:
                await asyncio.to_thread(store.segments.remove, number)
            except (OSError, LogDamaged) as error:
                log.error("segment-kept", extra={"segment": number, "reason": str(error)})  # noqa: TRY400
                continue
            self._kept_packed_bytes.pop(number, None)
            store.damages.segment_removed(number)
            store.counters["removed_segments"] += 1
            log.info("segment-removed", extra={"segment": number})

    async def _referenced(self, numbers: list[int]) -> set[int]:
        """Which of these segments a part in the index still references: the rest of a run, when a
        part of it was replaced meanwhile. Parts in memory only never lie in segments this old:
        either the checkpoint before this wrote the part that they were taken from, or they go to
        the log's end.
        """
        left = await asyncio.to_thread(self._parts_of, set(numbers))
        return {part.segment for _, part in left}

    async def _move(self, parts: list[tuple[int, Part]]) -> set[int]:
        """Move parts to the end of the log, in this order; the segments of unreadable parts."""
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

    async def _rewrite_state(self, number: int) -> bool:
        """Rewrite a segment's records beside entries. False: its packed deletions are so many that
        the segment stays. Raises OSError, LogDamaged.
        """
        store = self._store
        words = await asyncio.to_thread(state_of, store.segments, number)
        if words.packed_bytes > self._packed_max(number):
            self._kept_packed_bytes[number] = words.packed_bytes
            return False
        ledgers, deleted = words.ledgers, words.deleted
        if not words.is_whole:
            # The unreadable part may have had records of any ledger.
            ledgers = {ledger_id for ledger_id, _ in store.ledgers()}
            deleted = await asyncio.to_thread(lambda: array("q", store.index.deleted()))

        async def rewrite(ledger_id: int) -> None:
            if store.row(ledger_id) is not None:
                await store.moves.rewrite_state(ledger_id)

        ledger_ids = sorted(ledgers)
        for start in range(0, len(ledger_ids), REWRITES_AT_ONCE):
            some = ledger_ids[start : start + REWRITES_AT_ONCE]
            await asyncio.gather(*map(rewrite, some))
        await self._rewrite_deleted(deleted)
        return True

    async def _rewrite_deleted(self, ledger_ids: "array[int]") -> None:
        """Rewrite deletions, in records that pack many."""
        for start in range(0, len(ledger_ids), IDS_MAX):
            some = ledger_ids[start : start + IDS_MAX]
            await self._store.moves.rewrite_deleted(some)
            if len(some) == IDS_MAX:
                # This bounds how many a start replays, at some microseconds each.
                await self._store.checkpoint()
            await self._pace.spend(8 * len(some), self._bytes_per_s)

    def _packed_max(self, number: int) -> int:
        """How many bytes of packed deletions may be rewritten with a segment. A short segment,
        which a restart ended, is measured as a full one, so that many short ones become one; except
        on a full disk, where more must be freed than is written.
        """
        store = self._store
        size = store.segments.segment_bytes
        if store.disk.is_full:
            size = store.segments.path(number).stat().st_size
        return int(size * self._live_share_min)

    def _used_bytes(self) -> Counter[int]:
        """Bytes of live parts per segment, by the index; in a thread."""
        used: Counter[int] = Counter()
        for _, part in self._store.index.all_parts():
            used[part.segment] += part.size
        return used

    def _parts_of(self, numbers: set[int]) -> list[tuple[int, Part]]:
        """The index's parts in these segments, by ledger and entry; in a thread."""
        return [item for item in self._store.index.all_parts() if item[1].segment in numbers]


def _batches(parts: list[tuple[int, Part]]) -> Iterator[tuple[list[tuple[int, Part]], int]]:
    """Parts to move together, and their size."""
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
