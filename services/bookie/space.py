"""Frees space: removes segments without references, and compacts segments with little live data.

Live parts are moved to the end of the log, ordered by ledger and entry, so that scattered parts of
a ledger end up together. Before a segment is removed, its other records (fences, keys, LACs, limbo,
deletions) are rewritten, so that the index can always be rebuilt from the log.

Deletions are kept for ever (rule 16a), in records of many ids. Deletions count as live data, so
that they are rewritten as rarely as entries, and not by each compaction.

A crash at any step loses nothing, because a segment is removed only when a checkpoint that does not
reference the segment is on disk. A broken segment is kept, and never delays other segments.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from services.bookie.log import LogDamaged
from services.bookie.parts import Part
from services.bookie.records import IDS_MAX
from services.bookie.replay import SegmentState, state_of
from services.bookie.scrub import Pace
from services.bookie.store import AT_ONCE, Store

log = logging.getLogger(__name__)

LIVE_SHARE_MIN: Final = 0.2
"""Share of live data below which a segment is compacted (BookKeeper's minor compaction)."""

COMPACT_BYTES_PER_S: Final = 32 * 1024 * 1024
"""About a tenth of a small machine's disk bandwidth; chosen by judgement."""

MOVE_BYTES: Final = 1024 * 1024
"""Bytes moved per write and sync; larger writes would delay adds. Chosen by judgement."""

MOVE_PARTS: Final = 200
"""Maximum number of parts moved by one write, a limit for small runs."""

REWRITES_AT_ONCE: Final = 256
"""Number of ledgers whose state is rewritten concurrently. A segment may have records of thousands
of ledgers; one by one, each would wait for a sync (measured: most of a compaction's time)."""

SEGMENTS_AT_ONCE: Final = 8
"""Number of segments compacted together. More would sort parts better, but take more memory."""

EMPTY_AT_ONCE: Final = 256
"""Number of empty segments removed together, with one index scan and joint rewrites of state."""

T = TypeVar("T")


@dataclass(eq=False)
class Space:
    """Frees the disk space of a store's segments."""

    _store: Store
    live_share_min: float = LIVE_SHARE_MIN
    bytes_per_s: int = COMPACT_BYTES_PER_S
    """The rate of moving parts."""
    pace: Pace = field(default_factory=Pace)
    _kept_packed_bytes: dict[int, int] = field(default_factory=dict)
    """Sizes of packed deletions, for segments that are kept because of these deletions."""
    scan_s: float = 0.0
    """CPU time of the index scans in the last `free`."""

    async def free(self) -> None:
        """Remove segments that no part references, and compact segments with little live data."""
        store = self._store
        await store.checkpoint()
        position = store.index.checkpoint()
        if position is None:
            return
        self.scan_s = 0.0
        used = await self._scanned(store.index.used_bytes)
        empty: list[int] = []
        worn: list[int] = []
        for number in store.segments.numbers():
            if number >= position.segment:
                break
            size = store.segments.path(number).stat().st_size
            # Move no parts on a full disk, which has no room for them.
            share = 0.0 if store.disk.is_full else self.live_share_min
            if used[number] <= size * share and self._kept_packed_bytes.get(
                number, 0
            ) <= self._packed_max(number):
                (worn if used[number] else empty).append(number)
        # A full disk has room for only a few rewritten states before a segment is removed.
        at_once = SEGMENTS_AT_ONCE if store.disk.is_full else EMPTY_AT_ONCE
        for start in range(0, len(empty), at_once):
            await self._free_segments(empty[start : start + at_once], [])
        for start in range(0, len(worn), SEGMENTS_AT_ONCE):
            some = worn[start : start + SEGMENTS_AT_ONCE]
            await self._free_segments(some, await self._parts_of(some))

    async def _free_segments(self, numbers: list[int], parts: list[tuple[int, Part]]) -> None:
        """Move `parts` (all parts in these segments), and remove the segments."""
        store = self._store
        broken = await self._move(parts)
        for number in broken:
            _keep(number, "damaged")
        movable = [number for number in numbers if number not in broken]
        states = await self._states(movable)
        try:
            await self._rewrite_state(_joined(states.values()))
        except (OSError, LogDamaged) as error:
            for number in states:
                _keep(number, str(error))
            return
        # The index must not reference a segment when it is removed.
        await store.checkpoint()
        named = await self._referenced(list(states))
        for number in states:
            if number in named:
                _keep(number, "named")
                continue
            try:
                await asyncio.to_thread(store.segments.remove, number)
            except (OSError, LogDamaged) as error:
                _keep(number, str(error))
                continue
            self._kept_packed_bytes.pop(number, None)
            store.damages.segment_removed(number)
            store.counters["removed_segments"] += 1
            log.info("segment-removed", extra={"segment": number})

    async def _referenced(self, numbers: list[int]) -> set[int]:
        """The segments that the index still references, for example by the rest of a run that was
        partly replaced meanwhile. A part that exists only in memory never needs such an old
        segment: it is the rest of an indexed part, or its record is queued for the log's end.
        """
        return {part.segment for _, part in await self._parts_of(numbers)}

    async def _move(self, parts: list[tuple[int, Part]]) -> set[int]:
        """Move parts to the end of the log, in order. Returns the segments of unreadable parts."""
        store = self._store
        broken: set[int] = set()
        for some, size in _batches(parts):
            moved = await store.move(some)
            for (_, part), is_moved in zip(some, moved, strict=True):
                if not is_moved:
                    broken.add(part.segment)
            store.counters["compacted_bytes"] += size
            await self.pace.spend(size, self.bytes_per_s)
        return broken

    async def _states(self, numbers: list[int]) -> dict[int, SegmentState]:
        """The log records in these segments that are not entries. Omits segments that must stay."""
        states = {}
        for number in numbers:
            try:
                state = await asyncio.to_thread(state_of, self._store.segments, number)
            except (OSError, LogDamaged) as error:
                _keep(number, str(error))
                continue
            if state.packed_bytes > self._packed_max(number):
                self._kept_packed_bytes[number] = state.packed_bytes
            else:
                states[number] = state
        return states

    async def _rewrite_state(self, state: SegmentState) -> None:
        """Rewrite the state of segments together, because several segments may name one ledger."""
        store, ledgers, deleted = self._store, state.ledgers, state.deleted
        if not state.is_whole:
            # The unreadable stretch may have had any ledger's records: rewrite every state.
            ledgers = {ledger_id for ledger_id, _ in store.holdings.ledgers()}
            deleted = await asyncio.to_thread(lambda: array("q", store.index.deleted()))

        async def rewrite(ledger_id: int) -> None:
            if store.holdings.row(ledger_id) is not None:
                await store.rewrite_state(ledger_id)

        ledger_ids = sorted(ledgers)
        for start in range(0, len(ledger_ids), REWRITES_AT_ONCE):
            some = ledger_ids[start : start + REWRITES_AT_ONCE]
            rewrites = []
            for number, ledger_id in enumerate(some, 1):
                rewrites.append(asyncio.create_task(rewrite(ledger_id)))
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*rewrites)
        await self._rewrite_deleted(deleted)

    async def _rewrite_deleted(self, ledger_ids: "array[int]") -> None:
        """Rewrite deletions, in records of many ids."""
        for start in range(0, len(ledger_ids), IDS_MAX):
            some = ledger_ids[start : start + IDS_MAX]
            await self._store.rewrite_deleted(some)
            if len(some) == IDS_MAX:
                # The checkpoint limits the deletions that a start replays (microseconds each).
                await self._store.checkpoint()
            await self.pace.spend(8 * len(some), self.bytes_per_s)

    def _packed_max(self, number: int) -> int:
        """Maximum size of packed deletions that may be rewritten to remove a segment. A short
        segment, which a restart ended, counts as a full segment, so that short segments are merged.
        On a full disk a segment's true size counts, because more must be freed than is written.
        """
        store = self._store
        size = store.segments.segment_bytes
        if store.disk.is_full:
            size = store.segments.path(number).stat().st_size
        return int(size * self.live_share_min)

    async def _parts_of(self, numbers: list[int]) -> list[tuple[int, Part]]:
        """The index's parts in these segments, by ledger and entry."""
        return await self._scanned(partial(self._store.index.parts_in, set(numbers)))

    async def _scanned(self, scan: Callable[[], T]) -> T:
        """Run a scan of the whole index in a thread; adds its CPU time to `scan_s`."""

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return scan(), time.thread_time() - began

        found, taken_s = await asyncio.to_thread(timed)
        self.scan_s += taken_s
        return found


def _joined(states: Iterable[SegmentState]) -> SegmentState:
    """Join the states of several segments."""
    ledgers: set[int] = set()
    deleted = array("q")
    packed_bytes, is_whole = 0, True
    for state in states:
        ledgers |= state.ledgers
        deleted.extend(state.deleted)
        packed_bytes += state.packed_bytes
        is_whole = is_whole and state.is_whole
    return SegmentState(ledgers, deleted, packed_bytes, is_whole)


def _keep(number: int, reason: str) -> None:
    log.error("segment-kept", extra={"segment": number, "reason": reason})


def _batches(parts: list[tuple[int, Part]]) -> Iterator[tuple[list[tuple[int, Part]], int]]:
    """Split parts into groups that are moved by one write; yields each with its size."""
    some: list[tuple[int, Part]] = []
    size = 0
    for item in parts:
        some.append(item)
        size += item[1].size
        if size >= MOVE_BYTES or len(some) >= MOVE_PARTS:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size
