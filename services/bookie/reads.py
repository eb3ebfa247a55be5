"""Reads stored entries from memory or, in threads with read-ahead, from the disk.

store.py decides which entries a reader may get. This module reads the bytes and records damage.

Reads and the scrubber find damaged entries; recovery and repair replace them. The list of damage is
only in memory; after a restart, reads and the scrubber find the damage again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.ranges import Ranges, ranges_of
from quorumlog.protocol.record import Run, merge
from services.bookie import extents
from services.bookie.bodies import DamagedEntries, DamagedStretch
from services.bookie.ledger import StoredLedger
from services.bookie.parts import Part, present_in
from services.bookie.segments import Segments

K = TypeVar("K")
V = TypeVar("V")

FoundParts = list[tuple[Part, extents.Bytes]]
"""A list of parts, each with the bytes of its run."""

DAMAGES_MAX: Final = 10_000
"""Maximum number of damaged places kept in memory. If more are found, `Damages.is_cut` is set until
a whole pass of the scrubber stays within the maximum.
"""


class Damages:
    """The known damage that is not repaired yet. `find(ledger, first, last)` looks up parts."""

    def __init__(self, find: Callable[[int, int, int], list[Part]]) -> None:
        self._find = find
        self._parts: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int], DamagedStretch] = {}
        self.is_cut = False
        """Whether more than DAMAGES_MAX damaged places were found."""
        self._is_cut_in_pass = False

    def note(self, ledger_id: int, part: Part) -> bool:
        """Record an unreadable part. Returns False if another copy has replaced the part."""
        place = (ledger_id, part.segment, part.offset)
        if not self._parts_at(place, part.first, part.last):
            return False
        self._keep(self._parts, place, (part.first, part.last))
        return True

    def note_stretch(self, stretch: DamagedStretch) -> None:
        """Record an unreadable stretch of a segment."""
        self._keep(self._stretches, (stretch.segment, stretch.start), stretch)

    def _keep(self, places: dict[K, V], place: K, damage: V) -> None:
        if place in places or len(places) < DAMAGES_MAX:
            places[place] = damage
        else:
            self.is_cut = self._is_cut_in_pass = True

    def pass_begins(self) -> None:
        """Record that the scrubber begins a pass over the whole log."""
        self._is_cut_in_pass = False

    def pass_ends(self) -> None:
        """Record a pass's end. `is_cut` stays set only if the pass found more than the maximum."""
        self.is_cut = self._is_cut_in_pass

    def segment_removed(self, segment: int) -> None:
        """Forget the damage of a removed segment."""
        for place in [place for place in self._stretches if place[0] == segment]:
            del self._stretches[place]

    def stretches(self) -> list[DamagedStretch]:
        """Damaged stretches of the log, ordered by place."""
        return [self._stretches[place] for place in sorted(self._stretches)]

    def lost(self) -> Iterator[DamagedEntries]:
        """Yield the unreadable entries, ordered by ledger; forget entries that were repaired."""
        for place in sorted(self._parts):
            first, last = self._parts[place]
            named = self._parts_at(place, first, last)
            if named:
                yield DamagedEntries(
                    ledger_id=place[0],
                    ranges=present_in(named, first, last),
                    segment=place[1],
                    offset=place[2],
                )
            else:
                del self._parts[place]

    @property
    def count(self) -> int:
        """The number of damaged places."""
        return len(self._parts) + len(self._stretches)

    def _parts_at(self, place: tuple[int, int, int], first: int, last: int) -> list[Part]:
        return [
            part
            for part in self._find(place[0], first, last)
            if (part.segment, part.offset) == place[1:]
        ]


class Reads:
    """Reads stored parts. Invariant: an unreadable part is left out and recorded as damage; its
    entries are unknown, never absent.
    """

    def __init__(self, segments: Segments, damages: Damages, counters: Counter[str]) -> None:
        """All methods must be called on the event loop's thread."""
        self._segments = segments
        self._damages = damages
        self._counters = counters
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="log-reader")
        self._advisor = ThreadPoolExecutor(1, thread_name_prefix="log-advisor")
        """A separate thread, so that read-ahead begins before a reader needs the bytes."""
        self._scratch = extents.scratch()

    def close(self) -> None:
        """Wait until all running reads have ended."""
        self._readers.shutdown(wait=True)
        self._advisor.shutdown(wait=True)

    def note_read(
        self, ledger: StoredLedger, first: int, last: int, parts: list[Part], bytes_max: int
    ) -> bool:
        """Record a read; if sequential, read ahead. Returns whether the range was read ahead."""
        is_in_order = ledger.read_to == first - 1
        ledger.read_to = last
        if not is_in_order:
            ledger.is_cold = False
            ledger.ahead_to = NO_ENTRY
        elif ledger.is_cold and parts:
            self._read_ahead(ledger, first, last, parts, bytes_max)
        return is_in_order and last <= ledger.ahead_to

    def _read_ahead(
        self, ledger: StoredLedger, first: int, last: int, parts: list[Part], bytes_max: int
    ) -> None:
        """Make the kernel read these and the following parts into its page cache. The kernel sees
        only jumps from run to run, so it does not detect sequential reads of a ledger.
        """
        if last < ledger.ahead_to:
            return
        wanted = [] if first <= ledger.ahead_to else parts
        ahead, ledger.ahead_to = ledger.find_some(last + 1, ledger.highest, bytes_max)
        stored = [part for part in (*wanted, *ahead) if part.body is None]
        self._advisor.submit(extents.advise, extents.extents(self._segments, stored))

    def fetch_cached(
        self, ledger: StoredLedger, parts: list[Part], *, from_disk: bool = False
    ) -> tuple[FoundParts, list[extents.Extent]]:
        """The runs found in memory or in the page cache, and the extents of all other parts. With
        `from_disk`, returns no runs, and the extents of all parts that are on disk.
        """
        found, wanted = self._split(parts)
        if from_disk:
            return [], wanted
        for place, extent in enumerate(wanted):
            good = self._read_cached(extent, ledger.ledger_id)
            if good is None:
                ledger.is_cold = True
                return found, wanted[place:]
            self._note_damage(ledger, extent.parts, good)
            found += good
        return found, []

    def _split(self, parts: list[Part]) -> tuple[FoundParts, list[extents.Extent]]:
        """The runs of parts that are not on disk yet, and the extents of all other parts."""
        found: FoundParts = [(part, part.body) for part in parts if part.body is not None]
        stored = [part for part in parts if part.body is None]
        return found, extents.extents(self._segments, stored) if stored else []

    def _read_cached(self, extent: extents.Extent, ledger_id: int) -> FoundParts | None:
        if extents.is_large(extent):
            return extents.read_large_cached(extent, ledger_id)
        data = extents.read_cached(extent, self._scratch)
        return None if data is None else list(extents.bodies(extent, data, ledger_id))

    async def fetch(
        self, ledger: StoredLedger, parts: list[Part], *, from_disk: bool = False
    ) -> FoundParts:
        """The runs of parts, except damaged ones. `from_disk`: read the disk instead of memory, and
        omit parts that are not on disk yet (rule 20a).
        """
        found, wanted = self._split(parts)
        read = await self.read(ledger, wanted, from_disk=from_disk)
        return read if from_disk else found + read

    async def fetch_each(self, items: Sequence[tuple[StoredLedger, Part]]) -> FoundParts:
        """The runs of parts of several ledgers, except damaged ones, all read in one thread."""
        parts: dict[StoredLedger, list[Part]] = {}
        found: FoundParts = []
        for ledger, part in items:
            if part.body is not None:
                found.append((part, part.body))
            else:
                parts.setdefault(ledger, []).append(part)
        wanted = [(ledger, extents.extents(self._segments, own)) for ledger, own in parts.items()]

        def work() -> list[FoundParts]:
            return [extents.read_all(own, ledger.ledger_id) for ledger, own in wanted]

        read = await asyncio.get_running_loop().run_in_executor(self._readers, work)
        for (ledger, own), good in zip(parts.items(), read, strict=True):
            self._note_damage(ledger, own, good)
            found += good
        return found

    async def stored(self, ledger: StoredLedger, ranges: Ranges) -> tuple[Run | None, Ranges]:
        """The readable entries of stored ranges, and the unreadable ids."""
        runs: list[Run] = []
        damaged: list[int] = []
        for first, last in ranges:
            parts = ledger.find(first, last)
            body = extents.join(await self.fetch(ledger, parts), first, last, ID_MAX)
            run = None if body is None else Run(body)
            if run is not None:
                runs.append(run)
            damaged += [
                entry_id
                for low, high in present_in(parts, first, last)
                for entry_id in range(low, high + 1)
                if run is None or run.index(entry_id) is None
            ]
        return merge(runs), ranges_of(damaged)

    async def examine(
        self, ledger: StoredLedger, first: int, last: int, bytes_max: int, *, from_disk: bool
    ) -> tuple[Ranges, Run | None, int]:
        """Read about `bytes_max` from the beginning of a range for an audit, even entries withheld
        from readers. Returns the stored ids, their readable entries, and the last id examined.
        """
        parts, known_to = ledger.find_some(first, last, bytes_max)
        expected = tuple(present_in(parts, first, known_to))
        body = extents.join(
            await self.fetch(ledger, parts, from_disk=from_disk), first, known_to, ID_MAX
        )
        return expected, None if body is None else Run(body), known_to

    async def read(
        self,
        ledger: StoredLedger,
        wanted: list[extents.Extent],
        *,
        is_advised: bool = False,
        from_disk: bool = False,
    ) -> FoundParts:
        """Read the undamaged runs in these extents, in a thread."""
        if not wanted:
            return []
        work = partial(
            extents.read_all, wanted, ledger.ledger_id, is_advised=is_advised, from_disk=from_disk
        )
        found = await asyncio.get_running_loop().run_in_executor(self._readers, work)
        self._note_damage(ledger, [part for extent in wanted for part in extent.parts], found)
        return found

    def _note_damage(self, ledger: StoredLedger, parts: list[Part], read: FoundParts) -> None:
        if len(read) == len(parts):
            return
        good = {id(part) for part, _ in read}
        for part in parts:
            if id(part) not in good and self._damages.note(ledger.ledger_id, part):
                self._counters["damaged_reads"] += 1
