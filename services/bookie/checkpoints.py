"""Checkpoints, when the index catches up with the log on disk; dropped ledgers, and records that are rewritten so that
segments can go (see collect.py, space.py).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.record import Run
from services.bookie.directory import Disk, is_disk_full_error
from services.bookie.holdings import LedgerTable
from services.bookie.index import Index
from services.bookie.ledger import StoredLedger
from services.bookie.parts import Part
from services.bookie.pending import PendingWrites
from services.bookie.reads import Reads
from services.bookie.records import packed
from services.bookie.writer import Position

log = logging.getLogger(__name__)

CHECKPOINT_COST: Final = 2048
"""A record's weight towards the next checkpoint, beside its bytes: parts of small entries stay in
memory until then, some 300 bytes each, and a checkpoint of many parts stalls the loop."""

CHECKPOINT_S: Final = 15.0
"""At the latest so long after a record a checkpoint frees the parts and the copies of metadata that wait for one in memory, which
are as many MB as `checkpoint_bytes` allows (taste: a checkpoint takes a thread some 10 ms)."""


class Checkpoints:
    """Runs one checkpoint at a time.

    Invariant: a checkpoint names a log position below which everything is on disk, and reads that
    position before it writes the index.
    """

    def __init__(
        self,
        holdings: LedgerTable,
        index: Index,
        disk: Disk,
        counters: Counter[str],
        position: Callable[[], Position],
    ) -> None:
        """`position` returns the log position up to which everything is on disk."""
        self._holdings = holdings
        self._index = index
        self._disk = disk
        self._counters = counters
        self._position = position
        self._running: asyncio.Task[None] | None = None
        self._since = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def note_written(self, size: int, count: int) -> None:
        """Count records that reached the log; start a checkpoint when enough have, or some time later."""
        self._since += size + CHECKPOINT_COST * count
        if self._since >= self._disk.options.checkpoint_bytes:
            self.start_background()
        else:
            self._await_due()

    def _await_due(self) -> None:
        if self._since and self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(CHECKPOINT_S, self._is_due)

    def _is_due(self) -> None:
        self._timer = None
        if self._since:
            self.start_background()

    def close(self) -> None:
        """Start no more of them."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def start_background(self) -> None:
        """Start a background checkpoint unless one is running."""
        if self._running is None:
            _ = self._begin(self._run_logged())

    async def run(self) -> None:
        """Run a checkpoint that begins after this call. Raises whatever made it fail."""
        while self._running is not None:
            await asyncio.wait({self._running})
        await asyncio.shield(self._begin(self._write()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._running = task = asyncio.create_task(work)
        # A task that is cancelled before its first step runs none of its code.
        task.add_done_callback(self._ended)
        return task

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._running = None
        self._await_due()

    async def run_final(self) -> None:
        """Run the checkpoint of an orderly shutdown."""
        if self._running is not None:
            # Whoever started the running checkpoint handles its failure.
            await asyncio.wait({self._running})
        await self._run_logged()

    async def _run_logged(self) -> None:
        """Log failures; the next checkpoint retries."""
        try:
            await self._write()
        except Exception:
            log.exception("checkpoint-failed")
            self._counters["failed_checkpoints"] += 1

    async def _write(self) -> None:
        self._since = 0
        changes = self._holdings.changes()
        position = self._position()
        try:
            await asyncio.to_thread(
                self._index.write,
                position,
                [change for _, change in changes],
                self._holdings.deleted,
                self._holdings.fresh.encode(),
            )
        except Exception as error:
            for ledger, change in changes:
                ledger.checkpoint_failed(change)
            if is_disk_full_error(error):
                # The next checkpoint uses the reserve's room, or waits until somebody makes room.
                self._disk.release_reserve()
            self._since = self._disk.options.checkpoint_bytes * 7 // 8
            raise
        self._holdings.checkpointed(changes)
        self._counters["checkpoints"] += 1


AT_ONCE: Final = 32
"""Parts or ledgers that are written again in one turn of the event loop; each costs some 0.2 ms with its look at the index
(measured)."""


class Moves:
    """Drops ledgers, and rewrites parts and ledger states at the end of the log."""

    def __init__(
        self, holdings: LedgerTable, pending: PendingWrites, reads: Reads, counters: Counter[str]
    ) -> None:
        """Used on the event loop's thread."""
        self._holdings = holdings
        self._pending = pending
        self._reads = reads
        self._counters = counters

    def drop(self, ledger_id: int, *, keep_stub: bool) -> None:
        """Drop the entries of a ledger. With a stub its fence stays (rule 16); without one only the
        id stays: the metadata has a tombstone (rules 16a, 17 and 18).
        """
        ledger = self._holdings.ledger(ledger_id)
        verdict = ledger.replica.drop() if keep_stub else ledger.replica.delete()
        self._pending.submit(ledger, verdict)
        self._counters["dropped_ledgers"] += 1

    def forget_copies(self, ledger_id: int) -> None:
        """Forget superseded copies of a ledger's row: the database contains the changes of all that are held."""
        self._holdings.ledger(ledger_id).replica.forget_copies()

    async def move(self, parts: list[tuple[int, Part]]) -> list[bool]:
        """Rewrite parts at the end of the log, in this order; on disk when it returns. False for
        parts that are unreadable.
        """
        ledger_of = self._holdings.ledger
        # Some hundred parts of a few entries each: one read in a thread for all of them.
        read = await self._reads.fetch_each([(ledger_of(item), part) for item, part in parts])
        bodies = {id(part): body for part, body in read}
        moved: set[StoredLedger] = set()
        for number, (ledger_id, part) in enumerate(parts, 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            ledger, body = ledger_of(ledger_id), bodies.get(id(part))
            # The part may have been replaced or dropped meanwhile.
            if body is None or not ledger.holds(part):
                continue
            run = Run(bytes(body)).where(part.has)
            if run is not None:
                self._pending.submit(ledger, ledger.replica.moved(run))
                moved.add(ledger)
        for ledger in moved:
            await self._pending.wait_synced(ledger)
        return [
            id(part) in bodies or not ledger_of(ledger_id).holds(part) for ledger_id, part in parts
        ]

    async def rewrite_state(self, ledger_id: int) -> None:
        """Rewrite a ledger's state (key, fence, LAC, limbo); on disk when it returns."""
        ledger = self._holdings.ledger(ledger_id)
        if ledger.highest == NO_ENTRY and ledger.replica.is_fenced:
            # Probably a stub: dropped copies must stay dropped.
            self._pending.submit(ledger, ledger.replica.drop())
        self._pending.submit(ledger, ledger.replica.repeated())
        await self._pending.wait_synced(ledger)

    async def rewrite_deleted(self, ledger_ids: Sequence[int]) -> None:
        """Rewrite deletions that the index knows as one record (rule 16a); on disk at return."""
        await self._pending.write(packed(ledger_ids))
