"""A bookie's storage: combines the rules (`Replica`), the log and the index. No sockets.

Everything runs on one event loop's thread, except for three kinds of threads: the writer's thread
owns the end of the log, readers read from the disk, and a thread writes each checkpoint. Answers
are passed to callbacks, so that an add costs no task.

This module applies the rules and manages the lifecycle. Stored ledgers are in holdings.py, queued
records in pending.py, reads in reads.py, free space in directory.py.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from quorumlog.errors import Overloaded
from quorumlog.net.timers import Tasks
from quorumlog.protocol import replica
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.record import Run
from services.bookie.config import StoreOptions
from services.bookie.directory import Disk, lock_directory, open_index
from services.bookie.extents import Extent, join
from services.bookie.holdings import LedgerTable
from services.bookie.ledger import StoredLedger
from services.bookie.parts import Part, split_run
from services.bookie.pending import Checkpoints, PendingWrites, answered
from services.bookie.reads import Damages, FoundParts, Reads
from services.bookie.records import packed
from services.bookie.replay import Replayed, replay_log
from services.bookie.segments import Segments, sync_directory
from services.bookie.writer import LogWriter, Position

log = logging.getLogger(__name__)

COMPARE_ROUNDS_MAX: Final = 8
"""Maximum comparisons of an add with stored copies that keep changing; then it gets `unknown`."""

AT_ONCE: Final = 32
"""Number of parts or ledgers rewritten in one turn of the event loop; each takes some 0.2 ms,
including its index lookup (measured)."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The answer to a read. Ids in neither `run` nor `absent` are unknown."""

    status: Status
    last_add_confirmed: int
    run: bytes | None
    absent: Ranges


class Store:
    """The ledgers of one bookie in one directory.

    Invariants: an answer is sent only when the records that it depends on are on disk (rule 3); one
    process owns the directory; the checkpoint has a log position below which all records are on
    disk.
    """

    def __init__(
        self,
        directory: Path,
        me: str,
        options: StoreOptions,
        *,
        lock_held: int | None = None,
        on_segment: Callable[[], None] = lambda: None,
    ) -> None:
        """Lock and open the directory, and replay its log. Blocks; nothing is served yet.

        `lock_held`: a lock that the caller has taken with `lock_directory`; `on_segment` is called
        after each segment read.

        Raises: DirectoryTooNew, DirectoryInUse, LogDamaged.
        """
        self.directory = directory
        self.me = me
        self._read_bytes_max = options.read_bytes_max
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(directory) if lock_held is None else lock_held
        self.segments = Segments(directory / "log", options.segment_bytes)
        self.counters: Counter[str] = Counter()
        with ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self.segments.directory.mkdir(exist_ok=True)
            sync_directory(directory)
            self.disk = Disk(directory, options)
            self.index = open_index(directory / "index")
            undo.callback(self.index.close)
            self.holdings = LedgerTable(me, self.index, is_deferred=options.is_deferred)
            self.replayed: Replayed = replay_log(
                self.segments, self.index.checkpoint(), self.holdings.apply_stored, on_segment
            )
            undo.pop_all()
        self.damages = Damages(lambda ledger_id, *span: self.ledger(ledger_id).find(*span))
        self._checkpoints = Checkpoints(
            self.holdings, self.index, self.disk, self.counters, lambda: self.position
        )
        self.pending = PendingWrites(
            options.pending_bytes_max,
            self.replayed.position,
            self.counters,
            self._checkpoints.note_written,
        )
        self._reads = Reads(self.segments, self.damages, self.counters)
        self.withheld: set[int] = set()
        """Ledgers whose drop is being decided. Their reads and adds get `unknown`, so that no
        repair counts their entries."""
        self._writer: LogWriter | None = None
        self._tasks = Tasks()
        self._is_ending = False
        """Whether newly queued records may never reach the disk."""
        self.is_closed_to_adds = False
        """Whether an operator stopped normal adds, regardless of the disk's free space."""
        self.check_space()

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Start writing, on the running loop. `on_fatal` is called if the log can't be written."""
        self._writer = LogWriter(
            self.segments,
            self.replayed.head,
            self.replayed.fd,
            self.replayed.position,
            reserve=self.disk.reserve,
            on_synced=self.pending.on_batch_synced,
            on_fatal=on_fatal,
        )
        self.pending.start(self._writer, on_fatal)
        if self.holdings.replayed_much:
            self._checkpoints.start_background()

    def set_member(self, me: str) -> None:
        """Continue as another incarnation. Call this before any request is served."""
        self.me = me
        self.holdings.set_member(me)

    async def stop(self) -> None:
        """Write the queued records, the clean end and a checkpoint."""
        self._is_ending = True
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop)
            # Let the loop handle the writer's last callback first.
            await asyncio.sleep(0)
        await self._tasks.ended()
        await self._checkpoints.run_final()
        self.close()

    def close(self) -> None:
        """Release the directory as a crash would: nothing more is written."""
        self._checkpoints.close()
        self._reads.close()
        if self._writer is None:
            os.close(self.replayed.fd)
        self.index.close()
        self.segments.close()
        os.close(self._lock)

    async def checkpoint(self) -> None:
        """Run a checkpoint now."""
        await self._checkpoints.run()

    def add(self, asked: replica.AddAsked, done: Callable[[replica.Verdict], None]) -> None:
        """Accept or refuse an add; `done` is called when the answer may be sent.

        Raises: Overloaded when too much is queued.
        """
        run = asked.run
        if self.pending.is_over_limit:
            raise Overloaded("too many bytes are queued for the disk: retry later")
        if run.ledger_id in self.withheld or self._is_ending:
            done(replica.Verdict(Status.UNKNOWN))
            return
        if self.takes_no_adds:
            asked = replace(asked, read_only=True)
            if self.disk.is_full and asked.recovery:
                done(replica.Verdict(Status.READ_ONLY))
                return
        pieces = split_run(run)
        if len(pieces) > 1:
            self._tasks.start(self._add_pieces(asked, pieces, done))
            return
        ledger = self.ledger(run.ledger_id)
        verdict = ledger.replica.step(asked)
        if verdict.compare:
            self._tasks.start(self._add_compared(asked, verdict.compare, done))
            return
        self.pending.submit(ledger, verdict)
        if verdict.records and ledger.replica.is_limbo:
            self.counters["limbo_copied_entries"] += run.count
        ledger.when_synced(verdict.after, lambda: done(verdict))

    async def _add_pieces(
        self, asked: replica.AddAsked, pieces: list[Run], done: Callable[[replica.Verdict], None]
    ) -> None:
        """Add a run that is too wide for one part, piece by piece, until a piece is refused."""
        verdict = replica.Verdict(Status.UNKNOWN)
        try:
            for piece in pieces:
                verdict = await answered(partial(self.add, replace(asked, run=piece)))
                if verdict.status is not Status.OK:
                    break
        except Exception:
            log.exception("add-failed", extra={"ledger": asked.run.ledger_id})
            verdict = replica.Verdict(Status.UNKNOWN)
        done(verdict)

    async def _add_compared(
        self, asked: replica.AddAsked, compare: Ranges, done: Callable[[replica.Verdict], None]
    ) -> None:
        """Add entries under ids that have stored entries: read these entries, and decide again."""
        ledger_id = asked.run.ledger_id
        ledger = self.ledger(ledger_id)
        verdict = replica.Verdict(Status.UNKNOWN)
        try:
            for _ in range(COMPARE_ROUNDS_MAX):
                stored, damaged = await self._reads.stored(ledger, compare)
                again = replace(asked, stored=stored, damaged=damaged)
                # Look the ledger up again, because it may have been evicted and loaded since: two
                # objects would miss each other's fence.
                ledger = self.ledger(ledger_id)
                if ledger_id in self.withheld or self._is_ending:
                    verdict = replica.Verdict(Status.UNKNOWN)
                    break
                verdict = ledger.replica.step(again)
                if not verdict.compare:
                    self.pending.submit(ledger, verdict)
                    break
                compare = verdict.compare
        except Exception:
            log.exception("add-failed", extra={"ledger": ledger.ledger_id})
            verdict = replica.Verdict(Status.UNKNOWN)
        ledger.when_synced(verdict.after, lambda: done(verdict))

    def ask(
        self,
        ledger_id: int,
        asked: replica.FenceAsked | replica.LacAsked | replica.LacReported | replica.RowReported,
        done: Callable[[replica.Verdict], None],
    ) -> None:
        """Fence a ledger, read or store its LAC, or store a copy of its metadata; `done` is called
        when the answer may be sent.
        """
        ledger = self.ledger(ledger_id)
        verdict = ledger.replica.step(asked)
        self.pending.submit(ledger, verdict)
        ledger.when_synced(verdict.after, lambda: done(verdict))

    async def enter_limbo(self, ledger_id: int, ledger_key: bytes, *, is_fenced: bool) -> None:
        """Durably put a ledger into limbo, and fence the ledger if `is_fenced`."""
        ledger = self.ledger(ledger_id)
        verdict = ledger.replica.enter_limbo(ledger_key, is_fenced=is_fenced)
        self.pending.submit(ledger, verdict)
        await self.pending.wait_synced(ledger)

    async def leave_limbo(self, ledger_id: int) -> None:
        """Durably end a ledger's limbo, because this bookie has all entries that it should have."""
        # The index may record the end of limbo before the log does, so restored entries must be on
        # disk first (I27).
        await self.pending.wait_synced(self.ledger(ledger_id))
        ledger = self.ledger(ledger_id)
        self.pending.submit(ledger, ledger.replica.set_limbo(limbo=False))
        await self.pending.wait_synced(ledger)

    def read(
        self,
        ledger_id: int,
        asked: replica.ReadAsked,
        bytes_max: int,
        done: Callable[[ReadAnswer], None],
    ) -> None:
        """Read. `done` is called once the log records that the answer depends on, such as a fence,
        are on disk, and the answer's bytes are in memory.
        """
        unknown = ReadAnswer(Status.UNKNOWN, NO_ENTRY, None, ())
        if ledger_id in self.withheld:
            done(unknown)
            return
        bytes_max = max(1, min(bytes_max, self._read_bytes_max))
        ledger = self.ledger(ledger_id)
        parts, known_to = ledger.find_some(asked.first, asked.last, bytes_max)
        if known_to != asked.last:
            asked = replace(asked, last=known_to)
        ledger.lookup = (asked.first, known_to, parts)
        verdict = ledger.replica.step(asked)
        ledger.lookup = None
        self.pending.submit(ledger, verdict)
        if not verdict.present:
            parts = []
        reads = self._reads
        is_advised = reads.note_read(ledger, asked.first, known_to, parts, bytes_max)
        is_advised = is_advised and not asked.from_disk  # `from_disk` drops the page cache

        def answer(found: FoundParts) -> None:
            reported = unknown
            try:
                body = join(found, asked.first, known_to, bytes_max) if found else None
                reported = ReadAnswer(
                    verdict.status, verdict.last_add_confirmed, body, verdict.absent
                )
            except Exception:
                log.exception("read-failed", extra={"ledger": ledger_id})
            done(reported)

        def fetch() -> None:
            try:
                found, missing = reads.fetch_cached(ledger, parts, from_disk=asked.from_disk)
                if missing:
                    self._tasks.start(deliver(found, missing))
                else:
                    answer(found)
            except Exception:
                # Answer despite the defect, because the reader must not wait for ever.
                log.exception("read-failed", extra={"ledger": ledger_id})
                done(unknown)

        async def deliver(found: FoundParts, missing: list[Extent]) -> None:
            try:
                found = found + await reads.read(
                    ledger, missing, is_advised=is_advised, from_disk=asked.from_disk
                )
            except Exception:
                # Unreadable entries are unknown, so the answer does not name them.
                log.exception("read-failed", extra={"ledger": ledger_id})
                found = []
            answer(found)

        ledger.when_synced(verdict.after, fetch)

    async def examine(
        self, ledger_id: int, first: int, last: int, bytes_max: int, *, from_disk: bool = False
    ) -> tuple[Ranges, Run | None, int]:
        """Read about `bytes_max` from the beginning of a range for an audit, even entries withheld
        from readers. Returns the stored ids, their readable entries, and the last id that was
        examined. `from_disk`: wait for queued records, and read the disk (rule 20a).
        """
        if from_disk:
            await self.pending.wait_synced(self.ledger(ledger_id))
        ledger = self.ledger(ledger_id)
        return await self._reads.examine(ledger, first, last, bytes_max, from_disk=from_disk)

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Drop the entries of a ledger. With `keep_stub`, its key and fence are kept (rule 16).
        Without it, only the id is kept, because the metadata has a tombstone (rules 16a, 17 and
        18).
        """
        ledger = self.ledger(ledger_id)
        verdict = ledger.replica.drop() if keep_stub else ledger.replica.delete()
        self.pending.submit(ledger, verdict)
        self.counters["dropped_ledgers"] += 1

    def forget_copies(self, ledger_id: int) -> None:
        """Forget a ledger's superseded metadata copies, whose changes the database contains."""
        self.ledger(ledger_id).replica.forget_copies()

    async def move(self, parts: list[tuple[int, Part]]) -> list[bool]:
        """Durably rewrite parts at the end of the log, in this order. Returns False for each
        unreadable part.
        """
        # Read all parts in one call of a thread, because there may be a hundred small parts.
        read = await self._reads.fetch_each([(self.ledger(item), part) for item, part in parts])
        bodies = {id(part): body for part, body in read}
        moved: set[StoredLedger] = set()
        for number, (ledger_id, part) in enumerate(parts, 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            ledger, body = self.ledger(ledger_id), bodies.get(id(part))
            # The part may have been replaced or dropped meanwhile.
            if body is None or not ledger.holds(part):
                continue
            run = Run(bytes(body)).where(part.has)
            if run is not None:
                self.pending.submit(ledger, ledger.replica.moved(run))
                moved.add(ledger)
        for ledger in moved:
            await self.pending.wait_synced(ledger)
        return [
            id(part) in bodies or not self.ledger(ledger_id).holds(part)
            for ledger_id, part in parts
        ]

    async def rewrite_state(self, ledger_id: int) -> None:
        """Durably rewrite a ledger's state (key, fence, LAC, limbo)."""
        ledger = self.ledger(ledger_id)
        if ledger.highest == NO_ENTRY and ledger.replica.is_fenced:
            # The ledger is probably a stub: repeat its drop, so that dropped entries stay dropped.
            self.pending.submit(ledger, ledger.replica.drop())
        self.pending.submit(ledger, ledger.replica.repeated())
        await self.pending.wait_synced(ledger)

    async def rewrite_deleted(self, ledger_ids: Sequence[int]) -> None:
        """Durably rewrite deletions that the index already has, as one record (rule 16a)."""
        await self.pending.write(packed(ledger_ids))

    def ledger(self, ledger_id: int) -> StoredLedger:
        """A ledger, from memory or from the index."""
        return self.holdings.ledger(ledger_id)

    @property
    def position(self) -> Position:
        """The log position up to which all records are on disk."""
        return self.pending.position

    @property
    def takes_no_adds(self) -> bool:
        """Whether only adds of recovery and repair are accepted."""
        return self.disk.is_read_only or self.is_closed_to_adds

    @property
    def is_stuck(self) -> bool:
        """Whether accepted records wait for room on the disk."""
        return self._writer is not None and self._writer.is_full

    def check_space(self) -> None:
        """Check the free space, and change between writable and read-only accordingly."""
        self.disk.check(is_stuck=self.is_stuck)
        if self.index.is_failed and self._writer is not None:
            self._checkpoints.start_background()
