"""The scrubber: all of the log is read again and again, slowly, before somebody needs what rotted.

BookKeeper's auditor looks at the first and the last entry of a fragment once a week; this one checks
every byte's CRC. What is wrong is reported with its place, for repair from peers; nothing is
changed here. Where it stopped is kept, so that a bookie that restarts often is scrubbed all the same.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import google_crc32c

from services.bookie.damage import Stretch
from services.bookie.log import LogDamaged
from services.bookie.pace import Pace
from services.bookie.parts import Part
from services.bookie.reading import Extent, read_waiting
from services.bookie.scan import Scanned, scan
from services.bookie.segments import write_durably
from services.bookie.store import Store

log = logging.getLogger(__name__)

_FILE: Final = "scrubbed"
_STEP_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class Progress:
    """How far the scrubber is."""

    segment: int = 0
    """The last one that was checked in this pass."""
    checked_bytes: int = 0
    passes: int = 0
    damaged: int = 0
    """Places that were found damaged, since the process began."""


class Scrubber:
    """Reads sealed segments in order, at `bytes_per_s` (0: never)."""

    def __init__(self, store: Store, pace: Pace, *, bytes_per_s: int, pass_s: float) -> None:
        """`pass_s`: a pass over all of the log begins no sooner after the one before."""
        self._store = store
        self._pace = pace
        self._bytes_per_s = bytes_per_s
        self._pass_s = pass_s
        self.progress = Progress(_where(store))

    async def run(self) -> None:
        """For ever, pass after pass."""
        if not self._bytes_per_s:
            return
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.one_pass()
            await asyncio.sleep(max(0.0, began + self._pass_s - loop.time()))

    async def one_pass(self) -> None:
        """What is left of a pass over all segments that are not written any more."""
        store, progress = self._store, self.progress
        for segment in store.segments.numbers():
            if segment <= progress.segment or segment >= store.position.segment:
                continue
            try:
                await self._check(segment)
            except Exception:
                # One broken segment must not keep the others from being looked at.
                log.exception("scrub-failed", extra={"segment": segment})
            progress.segment = segment
            await asyncio.to_thread(_remember, store, segment)
        await self._find_missing()
        progress.segment = 0
        progress.passes += 1
        await asyncio.to_thread(_remember, store, 0)

    async def _check(self, segment: int) -> None:
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
            return  # it was removed on purpose just now; a missing one is found at the end
        except (OSError, LogDamaged) as error:
            if not store.segments.path(segment).exists():
                return
            await self._report(segment, 0, 1 << 62, str(error))
        for start, end in wrong:
            if not store.segments.path(segment).exists():
                return  # it was given up meanwhile, and then cut
            await self._report(segment, start, end, "a CRC is wrong, or it can't be read")

    async def _find_missing(self) -> None:
        store = self._store
        lowest = await asyncio.to_thread(store.segments.first)
        known = {*store.segments.numbers(), *store.segments.gone()}
        for segment in range(lowest, store.position.segment):
            if segment not in known and segment >= store.segments.first():
                await self._report(segment, 0, 1 << 62, "the file is missing")

    async def _report(self, segment: int, start: int, end: int, reason: str) -> None:
        """Note the damage, and which entries it hits."""
        store = self._store
        self.progress.damaged += 1
        store.counters["scrub_damages"] += 1
        store.damages.note_stretch(Stretch(segment, start, end, reason))
        log.error(
            "log-damaged",
            extra={"segment": segment, "start": start, "end": end, "reason": reason},
        )
        for ledger_id, part in await asyncio.to_thread(self._bad_parts, segment, start, end):
            store.damages.note(ledger_id, part)

    def _bad_parts(self, segment: int, start: int, end: int) -> list[tuple[int, Part]]:
        """The parts in a stretch whose bytes are not right; in a thread."""
        store = self._store
        bad = []
        for ledger_id, part in store.index.all_parts():
            if part.segment != segment or not start <= part.offset < end:
                continue
            try:
                file = store.segments.opened(segment)
            except OSError:
                file = None
            data = read_waiting(Extent(file, part.offset, part.offset + part.size, [part]))
            if len(data) != part.size or google_crc32c.value(bytes(data)) != part.crc:
                bad.append((ledger_id, part))
        return bad


def _steps(scanned: Iterator[Scanned]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """About a megabyte at a time: how much was read, and which stretches of it are wrong."""
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


def _where(store: Store) -> int:
    """Up to where a pass came before the process ended; what can't be understood begins anew."""
    try:
        text = (store.directory / _FILE).read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _remember(store: Store, segment: int) -> None:
    # A disk that is full or fails is not this task's to report.
    with contextlib.suppress(OSError):
        write_durably(store.directory / _FILE, str(segment).encode())
