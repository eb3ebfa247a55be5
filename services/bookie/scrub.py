"""The scrubber, which slowly and repeatedly reads the whole log, to find bit rot before a reader.

BookKeeper's auditor checks the first and the last entry of a fragment once a week; this scrubber
checks every byte's CRC. The scrubber reports damage with its place, for repair from peers, and
changes nothing. The scrubber's position is stored on disk, so that passes complete in spite of
frequent restarts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Final

import google_crc32c

from services.bookie.bodies import DamagedStretch, ScrubProgress
from services.bookie.extents import Extent, read_blocking
from services.bookie.log import LogDamaged
from services.bookie.parts import Part
from services.bookie.replay import Scanned, scan
from services.bookie.segments import SegmentFile, write_durably
from services.bookie.store import Store


class Pace:
    """Throttles scrubbing and compaction. `pause` stops both, but only between two steps."""

    def __init__(self) -> None:
        """Create a pace that is not paused."""
        self._going = asyncio.Event()
        self._going.set()

    @property
    def is_paused(self) -> bool:
        """Whether work waits for `resume`."""
        return not self._going.is_set()

    def pause(self) -> None:
        """Make work wait before its next step."""
        self._going.clear()

    def resume(self) -> None:
        """End the pause."""
        self._going.set()

    async def spend(self, size: int, bytes_per_s: int) -> None:
        """Sleep for the time that `size` bytes take at this rate, then wait while paused."""
        await asyncio.sleep(size / bytes_per_s)
        await self._going.wait()


log = logging.getLogger(__name__)

_RESUME_FILE: Final = "scrubbed"
_STEP_BYTES: Final = 1024 * 1024


class Scrubber:
    """Reads all segments in order, except the one being written, at `bytes_per_s` (0: never)."""

    def __init__(self, store: Store, pace: Pace, *, bytes_per_s: int, pass_s: float) -> None:
        """`pass_s`: minimum time from the start of one pass to the start of the next."""
        self._store = store
        self._pace = pace
        self._bytes_per_s = bytes_per_s
        self._pass_s = pass_s
        self.progress = ScrubProgress(segment=_resume_segment(store))

    async def run(self) -> None:
        """Run passes for ever."""
        if not self._bytes_per_s:
            return
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.one_pass()
            await asyncio.sleep(max(0.0, began + self._pass_s - loop.time()))

    async def one_pass(self) -> None:
        """Run or resume a pass over all segments that are no longer written."""
        store, progress = self._store, self.progress
        store.damages.pass_begins()
        for segment in store.segments.numbers():
            if segment <= progress.segment or segment >= store.position.segment:
                continue
            try:
                await self._check_segment(segment)
            except Exception:
                # One broken segment must not stop the check of all other segments.
                log.exception("scrub-failed", extra={"segment": segment})
            progress.segment = segment
            await asyncio.to_thread(_store_resume_segment, store, segment)
        await self._find_missing()
        store.damages.pass_ends()
        progress.segment = 0
        progress.passes += 1
        await asyncio.to_thread(_store_resume_segment, store, 0)

    async def _check_segment(self, segment: int) -> None:
        store = self._store
        wrong: list[tuple[int, int]] = []
        try:
            steps = _steps(scan(store.segments, segment))
            while (step := await asyncio.to_thread(next, steps, None)) is not None:
                size, stretches = step
                wrong += stretches
                self.progress.checked_bytes += size
                store.counters["scrubbed_bytes"] += size
                await self._pace.spend(size, self._bytes_per_s)
        except FileNotFoundError:
            return  # the segment was just removed; `_find_missing` finds other losses
        except (OSError, LogDamaged) as error:
            if not store.segments.path(segment).exists():
                return
            await self._report(segment, 0, 1 << 62, str(error))
        for start, end in wrong:
            if not store.segments.path(segment).exists():
                return  # the segment was removed meanwhile
            await self._report(segment, start, end, "a CRC is wrong, or the disk can't read it")

    async def _find_missing(self) -> None:
        store = self._store
        lowest = await asyncio.to_thread(store.segments.first)
        known = {*store.segments.numbers(), *store.segments.gone()}
        for segment in range(lowest, store.position.segment):
            if segment not in known and segment >= store.segments.first():
                await self._report(segment, 0, 1 << 62, "the file is missing")

    async def _report(self, segment: int, start: int, end: int, reason: str) -> None:
        """Record a damaged stretch, and the entries in it."""
        store = self._store
        self.progress.damaged += 1
        store.counters["scrub_damages"] += 1
        store.damages.note_stretch(
            DamagedStretch(segment=segment, start=start, end=end, reason=reason)
        )
        log.error(
            "log-damaged",
            extra={"segment": segment, "start": start, "end": end, "reason": reason},
        )
        for ledger_id, part in await asyncio.to_thread(self._bad_parts, segment, start, end):
            store.damages.note(ledger_id, part)

    def _bad_parts(self, segment: int, start: int, end: int) -> list[tuple[int, Part]]:
        """The damaged parts in a stretch. Runs in a thread."""
        store = self._store
        bad = []
        for ledger_id, part in store.index.all_parts():
            if part.segment != segment or not start <= part.offset < end:
                continue
            try:
                # Files of `Segments.reader` may be used on the loop's thread only.
                file = SegmentFile(store.segments.path(segment))
            except OSError:
                file = None
            data = read_blocking(Extent(file, part.offset, part.offset + part.size, [part]))
            if len(data) != part.size or google_crc32c.value(bytes(data)) != part.crc:
                bad.append((ledger_id, part))
        return bad


def _steps(scanned: Iterator[Scanned]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Group scanned data into steps of about 1 MiB; yields their sizes and damaged stretches."""
    size = 0
    wrong: list[tuple[int, int]] = []
    for start, end, batch in scanned:
        size += end - start
        if batch is None:
            wrong.append((start, end))
        if size >= _STEP_BYTES:
            yield size, wrong
            size, wrong = 0, []
    yield size, wrong


def _resume_segment(store: Store) -> int:
    """The last segment that the previous process checked; 0 if the resume file is unreadable."""
    try:
        text = (store.directory / _RESUME_FILE).read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _store_resume_segment(store: Store, segment: int) -> None:
    # Ignore the error, because another task reports a full or failing disk.
    with contextlib.suppress(OSError):
        write_durably(store.directory / _RESUME_FILE, str(segment).encode())
