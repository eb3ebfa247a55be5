"""Checkpoints: when the index catches up with the log on disk."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from services.bookie.directory import is_disk_full_error
from services.bookie.disk import Disk
from services.bookie.holdings import LedgerTable
from services.bookie.index import Index
from services.bookie.writer import Position

log = logging.getLogger(__name__)

CHECKPOINT_COST: Final = 2048
"""A record's weight towards the next checkpoint, beside its bytes: parts of small entries stay in
memory until then, some 300 bytes each, and a checkpoint of many parts stalls the loop."""


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

    def note_written(self, size: int, count: int) -> None:
        """Count records that reached the log; start a checkpoint when enough have."""
        self._since += size + CHECKPOINT_COST * count
        if self._since >= self._disk.options.checkpoint_bytes:
            self.start_background()

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
            self._since = self._disk.options.checkpoint_bytes * 7 // 8

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
            raise
        self._holdings.checkpointed(changes)
        self._counters["checkpoints"] += 1
