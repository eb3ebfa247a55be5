"""A bookie's storage: the rules, the log and the index put together. No sockets.

All of it runs on one event loop's thread, but for the writer's thread (which owns the end of the
log), the threads that read what is not in memory, and the one that writes a checkpoint. Answers
are given to callbacks, so that an add costs no task.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import Run, merge
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    LacAsked,
    LacTold,
    Ranges,
    ReadAsked,
    Record,
    Verdict,
    ranges_of,
)
from services.bookie.damage import Damages
from services.bookie.index import Index, LedgerRow
from services.bookie.ledger import Ledger
from services.bookie.log import LogRecord
from services.bookie.parts import Part, present_in, split_run
from services.bookie.reading import (
    Bytes,
    Extent,
    advise,
    bodies,
    extents,
    join,
    read_all,
    read_now,
    scratch,
)
from services.bookie.records import apply_stored, dropped, owner_of, to_log
from services.bookie.replay import Placed, Replayed, replay_log
from services.bookie.segments import Segments, sync_directory
from services.bookie.writer import LogWriter, Position, keep_reserve

log = logging.getLogger(__name__)

LEDGERS_MAX: Final = 20_000
"""Ledgers kept in memory; idle ones beyond it are forgotten at a checkpoint."""

SUSPECT: Final = "index.suspect"
"""A file that has the next start build the index anew."""

REPLAY_CHUNK: Final = 100_000
"""Records that a replay keeps in memory before it gives them to the index."""

CHECKPOINT_COST: Final = 2048
"""What a record counts for the next checkpoint beside its bytes: parts of small entries are held in
memory until then, some 300 bytes each, and a checkpoint of many stalls the loop."""

RANGES_AT_ONCE_BYTES: Final = 1024 * 1024

CROWDED_PART: Final = 4
"""Channels are not read from while more than this part of `pending_bytes_max` is queued: some 50 ms
of a disk. Their peers are told by TCP; plain HTTP is refused at the whole."""

COMPARE_ROUNDS_MAX: Final = 8
"""How often an add is compared again because others came in between; then it is unknown."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store keeps its data. The defaults' reasons stand in config.py."""

    segment_bytes: int = 64 * 1024 * 1024
    checkpoint_bytes: int = 64 * 1024 * 1024
    read_only_below_bytes: int = 512 * 1024 * 1024
    reserve_bytes: int = 16 * 1024 * 1024
    data_bytes_max: int = 0
    pending_bytes_max: int = 64 * 1024 * 1024
    read_bytes_max: int = 4 * 1024 * 1024
    is_deferred: bool = False


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What a read found: what neither `run` nor `absent` names is unknown."""

    status: Status
    last_add_confirmed: int
    run: bytes | None
    absent: Ranges


class DirectoryInUse(Exception):
    """Another process owns the data directory."""


class Overloaded(Exception):
    """More is queued for the disk than is kept in memory."""


class Store:
    """The ledgers of one bookie in one directory.

    Invariants: an answer leaves only when the records that it rests on are on disk (rule 3); one
    process owns the directory; the checkpoint names a place below which everything is on disk.
    """

    def __init__(
        self, directory: Path, me: str, options: StoreOptions, *, lock_held: int | None = None
    ) -> None:
        """Locks and opens the directory, and replays its log. Blocks; nothing is served yet.

        `lock_held`: the lock that the caller took already, by `locked`.

        Raises: DirectoryInUse, LogDamaged.
        """
        self.directory = directory
        self.me = me
        self.options = options
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = locked(directory) if lock_held is None else lock_held
        self.segments = Segments(directory / "log", options.segment_bytes)
        self._ledgers: dict[int, Ledger] = {}
        self._applied_count = 0
        self._leaving: set[int] = set()
        """Ledgers about to be dropped: nothing is said of them."""
        self.counters: Counter[str] = Counter()
        self.damages = Damages(lambda ledger_id, *span: self.ledger(ledger_id).find(*span))
        with ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self.segments.directory.mkdir(exist_ok=True)
            sync_directory(directory)
            self._reserve = directory / "reserve"
            if shutil.disk_usage(directory).free < options.reserve_bytes:
                # A start takes some room: a new segment, and what the index writes of itself.
                self._reserve.unlink(missing_ok=True)
            self.index = _open_index(directory / "index")
            undo.callback(self.index.close)
            self.replayed: Replayed = replay_log(
                self.segments, self.index.checkpoint(), self._apply_stored
            )
            undo.pop_all()
        self._position = self.replayed.position
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: LogWriter | None = None
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="log-reader")
        self._advisor = ThreadPoolExecutor(1, thread_name_prefix="log-advisor")
        """Apart from the readers: what it asks for must be under way when they come to it."""
        self._scratch = scratch()
        self._checkpointing: asyncio.Task[None] | None = None
        self._since_checkpoint = 0
        self._pending_bytes = 0
        self._no_room: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_read_only = False
        self.is_closed_to_adds = False
        """An operator's word: the disk may have room, and no normal add is taken all the same."""
        self.is_full = False
        self.check_space()

    # --- life ------------------------------------------------------------------------------------

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Begin to write, on the running loop. `on_fatal`: nothing can be written any more."""
        self._loop = asyncio.get_running_loop()
        self._writer = LogWriter(
            self.segments,
            self.replayed.head,
            self.replayed.fd,
            self.replayed.position,
            reserve=self._reserve,
            on_synced=self._synced_elsewhere,
            on_fatal=on_fatal,
        )
        self._writer.start()
        if self._applied_count >= REPLAY_CHUNK:
            self._checkpointing = asyncio.create_task(self._checkpoint_quietly())

    def rename(self, me: str) -> None:
        """Be another incarnation; before anything is served."""
        self.me = me
        for ledger in self._ledgers.values():
            ledger.replica.me = me

    async def stop(self) -> None:
        """Write what is queued, the clean end and a checkpoint."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop)
            # What the writer told the loop last is handled before this goes on.
            await asyncio.sleep(0)
        if self._tasks:
            await asyncio.gather(*self._tasks)
        if self._checkpointing is not None:
            await self._checkpointing
        await self._checkpoint_quietly()
        self.close()

    def close(self) -> None:
        """Let go of the directory as a crash would: nothing more is written."""
        self._readers.shutdown(wait=True)
        self._advisor.shutdown(wait=True)
        if self._writer is None:
            os.close(self.replayed.fd)
        self.index.close()
        self.segments.close()
        os.close(self._lock)

    # --- what is asked ----------------------------------------------------------------------------

    def add(self, asked: AddAsked, done: Callable[[Verdict], None]) -> None:
        """Judge an add; `done` is called when its answer may leave.

        Raises: Overloaded when too much is queued.
        """
        run = asked.run
        if self._pending_bytes > self.options.pending_bytes_max:
            raise Overloaded
        if run.ledger_id in self._leaving:
            done(Verdict(Status.UNKNOWN))
            return
        if self.takes_no_adds:
            asked = replace(asked, read_only=True)
            if self.is_full and (asked.recovery or asked.repair):
                done(Verdict(Status.READ_ONLY))
                return
        pieces = split_run(run)
        if len(pieces) > 1:
            self._spawn(self._add_pieces(asked, pieces, done))
            return
        ledger = self.ledger(run.ledger_id)
        verdict = ledger.replica.step(asked)
        if verdict.compare:
            self._spawn(self._add_compared(asked, verdict.compare, done))
            return
        self._submit(ledger, verdict.records)
        if verdict.records and ledger.replica.is_limbo:
            self.counters["limbo_copied_entries"] += run.count
        ledger.when_synced(verdict.after, lambda: done(verdict))

    async def _add_pieces(
        self, asked: AddAsked, pieces: list[Run], done: Callable[[Verdict], None]
    ) -> None:
        """A run too wide for one part: its pieces one after another, until one is refused."""
        assert self._loop is not None
        verdict = Verdict(Status.UNKNOWN)
        try:
            for piece in pieces:
                answered: asyncio.Future[Verdict] = self._loop.create_future()
                self.add(replace(asked, run=piece), answered.set_result)
                verdict = await answered
                if verdict.status is not Status.OK:
                    break
        except Exception:
            log.exception("add-failed", extra={"ledger": asked.run.ledger_id})
            verdict = Verdict(Status.UNKNOWN)
        done(verdict)

    async def _add_compared(
        self, asked: AddAsked, compare: Ranges, done: Callable[[Verdict], None]
    ) -> None:
        """An add of ids that are here: read them, and judge it again."""
        ledger_id = asked.run.ledger_id
        ledger = self.ledger(ledger_id)
        verdict = Verdict(Status.UNKNOWN)
        try:
            for _ in range(COMPARE_ROUNDS_MAX):
                stored, damaged = await self._stored(ledger, compare)
                again = replace(asked, stored=stored, damaged=damaged)
                # It may have been forgotten and loaded again meanwhile: two would not see each
                # other's fence.
                ledger = self.ledger(ledger_id)
                if ledger_id in self._leaving:
                    verdict = Verdict(Status.UNKNOWN)
                    break
                verdict = ledger.replica.step(again)
                if not verdict.compare:
                    self._submit(ledger, verdict.records)
                    break
                compare = verdict.compare
        except Exception:
            log.exception("add-failed", extra={"ledger": ledger.ledger_id})
            verdict = Verdict(Status.UNKNOWN)
        ledger.when_synced(verdict.after, lambda: done(verdict))

    async def _stored(self, ledger: Ledger, ranges: Ranges) -> tuple[Run | None, Ranges]:
        """What can be read of ranges that are held, and what can't."""
        runs: list[Run] = []
        damaged: list[int] = []
        for first, last in ranges:
            parts = ledger.find(first, last)
            body = join(await self._bodies(ledger, parts), first, last, ID_MAX)
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

    def fence(self, ledger_id: int, asked: FenceAsked, done: Callable[[Verdict], None]) -> None:
        """Fence; `done` when the fence is on disk."""
        self._ask(ledger_id, asked, done)

    def read_lac(self, ledger_id: int, asked: LacAsked, done: Callable[[Verdict], None]) -> None:
        """Tell the LAC."""
        self._ask(ledger_id, asked, done)

    def write_lac(self, ledger_id: int, asked: LacTold, done: Callable[[Verdict], None]) -> None:
        """Keep an explicit LAC."""
        self._ask(ledger_id, asked, done)

    def _ask(
        self,
        ledger_id: int,
        asked: FenceAsked | LacAsked | LacTold,
        done: Callable[[Verdict], None],
    ) -> None:
        ledger = self.ledger(ledger_id)
        verdict = ledger.replica.step(asked)
        self._submit(ledger, verdict.records)
        ledger.when_synced(verdict.after, lambda: done(verdict))

    async def enter_limbo(self, ledger_id: int, ledger_key: bytes, *, is_fenced: bool) -> None:
        """Put a ledger into limbo (and fence it); on disk when it returns."""
        ledger = self.ledger(ledger_id)
        verdict = ledger.replica.enter_limbo(ledger_key, is_fenced=is_fenced)
        self._submit(ledger, verdict.records)
        await self._all_synced(ledger)

    async def leave_limbo(self, ledger_id: int) -> None:
        """What belongs here of a ledger is here; on disk when it returns."""
        ledger = self.ledger(ledger_id)
        self._submit(ledger, ledger.replica.set_limbo(limbo=False).records)
        await self._all_synced(ledger)

    def read(
        self,
        ledger_id: int,
        asked: ReadAsked,
        bytes_max: int,
        done: Callable[[ReadAnswer], None],
    ) -> None:
        """Read; `done` when what the answer rests on is on disk and its bytes are here."""
        if ledger_id in self._leaving:
            done(ReadAnswer(Status.UNKNOWN, NO_ENTRY, None, ()))
            return
        bytes_max = max(1, min(bytes_max, self.options.read_bytes_max))
        ledger = self.ledger(ledger_id)
        parts, known_to = ledger.find_some(asked.first, asked.last, bytes_max)
        if known_to != asked.last:
            asked = replace(asked, last=known_to)
        ledger.remember(asked.first, known_to, parts)
        verdict = ledger.replica.step(asked)
        ledger.forget_found()
        self._submit(ledger, verdict.records)
        if not verdict.present:
            parts = []

        def answer(found: list[tuple[Part, Bytes]]) -> None:
            body = join(found, asked.first, known_to, bytes_max) if found else None
            done(ReadAnswer(verdict.status, verdict.last_add_confirmed, body, verdict.absent))

        is_in_order = ledger.read_to == asked.first - 1
        ledger.read_to = known_to
        if not is_in_order:
            ledger.is_cold = False
            ledger.ahead_to = NO_ENTRY

        def fetch() -> None:
            found, missing = self._bodies_now(ledger, parts)
            if not missing:
                answer(found)
                return
            is_advised = is_in_order and known_to <= ledger.ahead_to
            ledger.is_cold = True
            self._spawn(self._answer_later(ledger, found, missing, answer, is_advised=is_advised))

        if is_in_order and ledger.is_cold and parts:
            self._read_ahead(ledger, asked.first, known_to, parts, bytes_max)
        ledger.when_synced(verdict.after, fetch)

    def _read_ahead(
        self, ledger: Ledger, first: int, last: int, parts: list[Part], bytes_max: int
    ) -> None:
        """Somebody reads a ledger from its beginning to its end, and the kernel, which sees jumps
        from run to run, does not notice: have it fetch these parts and what will be asked for next.
        """
        if last < ledger.ahead_to:
            return
        wanted = [] if first <= ledger.ahead_to else parts
        ahead, ledger.ahead_to = ledger.find_some(last + 1, ledger.highest, bytes_max)
        stored = [part for part in (*wanted, *ahead) if part.body is None]
        self._advisor.submit(advise, extents(self.segments, stored))

    async def _answer_later(
        self,
        ledger: Ledger,
        found: list[tuple[Part, Bytes]],
        missing: list[Extent],
        answer: Callable[[list[tuple[Part, Bytes]]], None],
        *,
        is_advised: bool,
    ) -> None:
        try:
            found += await self._read(ledger, missing, is_advised=is_advised)
        except Exception:
            # What can't be read is unknown: the answer just does not name it.
            log.exception("read-failed", extra={"ledger": ledger.ledger_id})
            found = []
        answer(found)

    # --- giving up space (collect.py decides) --------------------------------------------------

    def leave(self, ledger_id: int, *, leaving: bool) -> None:
        """Say nothing of a ledger while it is decided whether it is dropped (or again). Else a
        repair that names this bookie just now might find entries that are about to go.
        """
        if leaving:
            self._leaving.add(ledger_id)
        else:
            self._leaving.discard(ledger_id)

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Hold no entries of a ledger any more. With a stub its fence stays (rule 16); without
        one nothing stays: the metadata has a tombstone (rules 17 and 18).
        """
        assert self._writer is not None
        ledger = self.ledger(ledger_id)
        record = dropped(ledger, keep_stub=keep_stub)
        self._pending_bytes += record.size
        self._writer.append(record)
        self.counters["dropped_ledgers"] += 1

    async def move(self, parts: list[tuple[int, Part]]) -> list[bool]:
        """Write parts anew at the end of the log, in this order; on disk when it returns. False
        for those that can't be read.
        """
        bodies = await asyncio.gather(
            *[self._bodies(self.ledger(ledger_id), [part]) for ledger_id, part in parts]
        )
        moved: set[Ledger] = set()
        for (ledger_id, part), found in zip(parts, bodies, strict=True):
            ledger = self.ledger(ledger_id)
            # It may have been replaced or dropped while it was read.
            if not found or not ledger.holds(part):
                continue
            run = Run(bytes(found[0][1])).where(part.has)
            if run is not None:
                self._submit(ledger, (ledger.replica.moved(run),))
                moved.add(ledger)
        for ledger in moved:
            await self._all_synced(ledger)
        return [
            bool(found) or not self.ledger(ledger_id).holds(part)
            for (ledger_id, part), found in zip(parts, bodies, strict=True)
        ]

    async def repeat(self, ledger_id: int) -> None:
        """Write again what is known of a ledger beside its entries; on disk when it returns."""
        ledger = self.ledger(ledger_id)
        if ledger.highest == NO_ENTRY and ledger.replica.is_fenced:
            # A stub, as far as anybody can tell: copies that were dropped stay dropped.
            assert self._writer is not None
            record = dropped(ledger, keep_stub=True)
            self._pending_bytes += record.size
            self._writer.append(record)
        self._submit(ledger, ledger.replica.repeated())
        await self._all_synced(ledger)

    async def repeat_gone(self, ledger_id: int) -> None:
        """Write again that a ledger is gone; on disk when it returns. Nothing is held of it."""
        ledger = self.ledger(ledger_id)
        if ledger.highest != NO_ENTRY or ledger.replica.ledger_key is not None:
            return
        assert self._writer is not None
        record = dropped(ledger, keep_stub=False)
        self._pending_bytes += record.size
        self._writer.append(record)
        await self._all_synced(ledger)

    async def _all_synced(self, ledger: Ledger) -> None:
        """Wait until all records of a ledger are on disk."""
        assert self._loop is not None
        synced: asyncio.Future[None] = self._loop.create_future()
        ledger.when_synced(ledger.replica.accepted_count, lambda: synced.set_result(None))
        await synced

    def is_named(self, segment: int) -> bool:
        """Whether a part in memory lies in a segment."""
        return any(
            part.segment == segment for ledger in self._ledgers.values() for part in ledger.recent
        )

    # --- looking ------------------------------------------------------------------------------------

    def ledger(self, ledger_id: int) -> Ledger:
        """A ledger, from memory or from the index."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = self._ledgers[ledger_id] = Ledger(
                ledger_id, self.me, self.index, is_deferred=self.options.is_deferred
            )
        return ledger

    def ledgers(self, after: int = -1) -> Iterator[tuple[int, LedgerRow]]:
        """All ledgers that are known here, ascending, from an id on."""
        indexed = self.index.ledgers(after)
        mine = iter(sorted(item for item in self._ledgers if item > after))
        theirs = next(indexed, None)
        memory = next(mine, None)
        while theirs is not None or memory is not None:
            if memory is not None and (theirs is None or memory <= theirs[0]):
                if theirs is not None and theirs[0] == memory:
                    theirs = next(indexed, None)
                row = self.row(memory)
                if row is not None:
                    yield memory, row
                memory = next(mine, None)
            else:
                assert theirs is not None
                yield theirs
                theirs = next(indexed, None)

    def row(self, ledger_id: int) -> LedgerRow | None:
        """What is known of a ledger, or None: it was never seen."""
        held = self._ledgers.get(ledger_id)
        if held is not None and held.is_dropped:
            return None
        row = held.row() if held is not None else self.index.row(ledger_id)
        return row if row is not None and (row.ledger_key is not None or row.is_limbo) else None

    async def ranges(self, ledger_id: int, first: int, last: int, limit: int) -> Ranges:
        """What is held of a range, at most about `limit` ranges of it; a long ledger takes turns
        with the rest of the loop.
        """
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

    async def examine(
        self, ledger_id: int, first: int, last: int, bytes_max: int
    ) -> tuple[Ranges, Run | None, int]:
        """What should be held of the beginning of a range, what of it could be read, and up to
        which entry this is told: about `bytes_max` at a time. Does not ask the rules (audit).
        """
        ledger = self.ledger(ledger_id)
        parts, known_to = ledger.find_some(first, last, bytes_max)
        expected = tuple(present_in(parts, first, known_to))
        body = join(await self._bodies(ledger, parts), first, known_to, ID_MAX)
        return expected, None if body is None else Run(body), known_to

    # --- bytes ----------------------------------------------------------------------------------------

    def _bodies_now(
        self, ledger: Ledger, parts: list[Part]
    ) -> tuple[list[tuple[Part, Bytes]], list[Extent]]:
        """The runs of parts that are in memory (ours or the kernel's), and where the others lie."""
        found: list[tuple[Part, Bytes]] = [
            (part, part.body) for part in parts if part.body is not None
        ]
        stored = [part for part in parts if part.body is None]
        wanted = extents(self.segments, stored) if stored else []
        for place, extent in enumerate(wanted):
            data = read_now(extent, self._scratch)
            if data is None:
                return found, wanted[place:]
            found += self._checked(extent, data, ledger)
        return found, []

    async def _bodies(self, ledger: Ledger, parts: list[Part]) -> list[tuple[Part, Bytes]]:
        """The runs of parts; those that are damaged are left out."""
        found: list[tuple[Part, Bytes]] = [
            (part, part.body) for part in parts if part.body is not None
        ]
        stored = [part for part in parts if part.body is None]
        if stored:
            found += await self._read(ledger, extents(self.segments, stored))
        return found

    async def _read(
        self, ledger: Ledger, wanted: list[Extent], *, is_advised: bool = False
    ) -> list[tuple[Part, Bytes]]:
        """The runs in these extents, from the disk."""
        assert self._loop is not None
        work = partial(read_all, wanted, ledger.ledger_id, is_advised=is_advised)
        read = await self._loop.run_in_executor(self._readers, work)
        self._note_damage(ledger, [part for extent in wanted for part in extent.parts], read)
        return read

    def _checked(self, extent: Extent, data: Bytes, ledger: Ledger) -> list[tuple[Part, Bytes]]:
        good = list(bodies(extent, data, ledger.ledger_id))
        self._note_damage(ledger, extent.parts, good)
        return good

    def _note_damage(
        self, ledger: Ledger, parts: list[Part], read: list[tuple[Part, Bytes]]
    ) -> None:
        if len(read) == len(parts):
            return
        good = {id(part) for part, _ in read}
        for part in parts:
            if id(part) not in good and self.damages.note(ledger.ledger_id, part):
                self.counters["damaged_reads"] += 1

    # --- the log --------------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued for the disk."""
        return self._pending_bytes

    @property
    def is_crowded(self) -> bool:
        """Whether so much is queued that peers should wait before they send more."""
        return self._pending_bytes * CROWDED_PART > self.options.pending_bytes_max

    async def room(self) -> None:
        """Wait until it is crowded no more."""
        assert self._loop is not None
        while self.is_crowded:
            room: asyncio.Future[None] = self._loop.create_future()
            self._no_room.append(room)
            await room

    @property
    def position(self) -> Position:
        """Up to where the log is on disk."""
        return self._position

    def _submit(self, ledger: Ledger, records: tuple[Record, ...]) -> None:
        assert self._writer is not None
        for record in records:
            made = to_log(ledger, record)
            self._pending_bytes += made.size
            self._writer.append(made)

    def _synced_elsewhere(self, records: list[LogRecord], position: Position) -> None:
        """In the writer's thread: tell the loop, once for the whole batch."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_synced, records, position)

    def _on_synced(self, records: list[LogRecord], position: Position) -> None:
        counts: dict[Ledger, int] = {}
        size = 0
        for record in records:
            size += record.size
            ledger, part = owner_of(record)
            if part is not None:
                part.segment = record.segment
                part.offset = record.offset
                part.size = record.size
                part.crc = record.crc
                part.body = None
            counts[ledger] = counts.get(ledger, 0) + 1
        self._position = position
        self._pending_bytes -= size
        self._since_checkpoint += size + CHECKPOINT_COST * len(records)
        self.counters["log_bytes"] += size
        self.counters["log_records"] += len(records)
        self.counters["log_syncs"] += 1
        for ledger, count in counts.items():
            ledger.on_synced(count)
        if self._no_room and not self.is_crowded:
            waiting, self._no_room = self._no_room, []
            for room in waiting:
                if not room.done():
                    room.set_result(None)
        if self._since_checkpoint >= self.options.checkpoint_bytes and self._checkpointing is None:
            self._checkpointing = asyncio.create_task(self._checkpoint_quietly())

    def _apply_stored(self, placed: Placed) -> None:
        """Replay: take over a record that was read back."""
        apply_stored(self.ledger(placed.record.ledger_id), placed)
        self._applied_count += 1
        if self._applied_count % REPLAY_CHUNK == 0:
            # Memory stays flat; the checkpoint's place stays where it is, since replaying the
            # same again does no harm.
            changes = [(ledger, ledger.change()) for ledger in self._ledgers.values()]
            self.index.write(None, [change for _, change in changes])
            for ledger, change in changes:
                ledger.checkpointed(change)
            self.trim()

    # --- checkpoints -----------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Bring the index up to where the log is on disk, now."""
        while self._checkpointing is not None:
            await asyncio.shield(self._checkpointing)
        self._checkpointing = asyncio.create_task(self._checkpoint_once())
        await asyncio.shield(self._checkpointing)

    async def _checkpoint_once(self) -> None:
        try:
            await self._checkpoint()
        finally:
            self._checkpointing = None

    async def _checkpoint_quietly(self) -> None:
        """One that nobody waits for: what it could not do is done by the next one."""
        try:
            await self._checkpoint_once()
        except Exception:
            log.exception("checkpoint-failed")
            self.counters["failed_checkpoints"] += 1
            self._since_checkpoint = self.options.checkpoint_bytes * 7 // 8

    async def _checkpoint(self) -> None:
        self._since_checkpoint = 0
        dirty = [ledger for ledger in self._ledgers.values() if ledger.is_dirty]
        changes = [(ledger, ledger.change()) for ledger in dirty]
        position = self._position
        try:
            await asyncio.to_thread(self.index.write, position, [change for _, change in changes])
        except Exception as error:
            for ledger, _ in changes:
                ledger.not_checkpointed()
            if _is_no_room(error):
                # The next one has it, or waits for somebody to make room.
                self._reserve.unlink(missing_ok=True)
            raise
        for ledger, change in changes:
            ledger.checkpointed(change)
            if ledger.is_dropped and ledger.is_idle:
                self._ledgers.pop(ledger.ledger_id, None)
        self.counters["checkpoints"] += 1

    def write_index(self) -> None:
        """A checkpoint at the end of a replay, where no loop runs."""
        changes = [(ledger, ledger.change()) for ledger in self._ledgers.values()]
        self.index.write(self._position, [change for _, change in changes])
        for ledger, change in changes:
            ledger.checkpointed(change)

    def trim(self) -> None:
        """Forget idle ledgers beyond the limit: the index knows them."""
        if len(self._ledgers) > LEDGERS_MAX:
            idle = [ledger_id for ledger_id, ledger in self._ledgers.items() if ledger.is_idle]
            for ledger_id in idle:
                del self._ledgers[ledger_id]

    # --- room ---------------------------------------------------------------------------------------

    @property
    def takes_no_adds(self) -> bool:
        """Whether only recovery's and repair's adds are taken."""
        return self.is_read_only or self.is_closed_to_adds

    @property
    def is_stuck(self) -> bool:
        """Whether what was accepted waits for room on the disk."""
        return self._writer is not None and self._writer.is_full

    def free_bytes(self) -> int:
        """Room that is left for this bookie."""
        stat = os.statvfs(self.directory)
        free = stat.f_bavail * stat.f_frsize
        if self.options.data_bytes_max:
            used = sum(path.stat().st_size for path in self.segments.directory.iterdir())
            free = min(free, self.options.data_bytes_max - used)
        return max(0, free)

    def check_space(self) -> None:
        """Become read-only below the threshold, and writable again a quarter above it. Recovery
        and repair go on until a quarter of the threshold is left.
        """
        free = self.free_bytes()
        threshold = self.options.read_only_below_bytes
        has_reserve = keep_reserve(self._reserve, self.options.reserve_bytes)
        was = self.is_read_only
        if free < threshold or not has_reserve or self.is_stuck:
            self.is_read_only = True
        elif free >= threshold + threshold // 4:
            self.is_read_only = False
        self.is_full = free < threshold // 4
        if self.index.is_failed and self._writer is not None and self._checkpointing is None:
            self._checkpointing = asyncio.create_task(self._checkpoint_quietly())
        if was != self.is_read_only:
            log.warning("read-only" if self.is_read_only else "writable", extra={"free": free})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task-failed", exc_info=task.exception())


def _open_index(path: Path) -> Index:
    """The index; where it is damaged or was never finished, an empty one, to be rebuilt."""
    suspect = path.with_name(SUSPECT)
    try:
        if suspect.exists():
            raise OSError("it could not be read when it was used last")
        index = Index(path)
        index.checkpoint()
        return index
    except Exception as error:
        if _is_no_room(error):
            raise
        log.exception("index-damaged", extra={"path": str(path)})
        aside = path.with_name("index.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
        made = Index(path)
        suspect.unlink(missing_ok=True)
        # It was kept only until the new one is there, which the log fills.
        shutil.rmtree(aside, ignore_errors=True)
        return made


def _is_no_room(error: Exception) -> bool:
    """Whether RocksDB, which has one exception for all, speaks of a full disk."""
    return "No space left" in str(error)


def locked(directory: Path) -> int:
    """The directory's lock. Raises DirectoryInUse."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryInUse(f"another process uses {directory}") from None
    return fd
