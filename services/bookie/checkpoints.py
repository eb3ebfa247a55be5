"""When the index is brought up to where the log is on disk, and by whom."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from services.bookie.directory import is_no_room
from services.bookie.disk import Disk
from services.bookie.holdings import Holdings
from services.bookie.index import Index
from services.bookie.writer import Position

log = logging.getLogger(__name__)

CHECKPOINT_COST: Final = 2048
"""What a record counts for the next checkpoint beside its bytes: parts of small entries are held in
memory until then, some 300 bytes each, and a checkpoint of many stalls the loop."""


class Checkpoints:
    """One after another. Invariant: a checkpoint names a place below which everything is on disk,
    taken before what it writes is.
    """

    def __init__(
        self,
        holdings: Holdings,
        index: Index,
        disk: Disk,
        counters: Counter[str],
        position: Callable[[], Position],
    ) -> None:
        """`position`: up to where the log is on disk."""
        self._holdings = holdings
        self._index = index
        self._disk = disk
        self._counters = counters
        self._position = position
        self._running: asyncio.Task[None] | None = None
        self._since = 0

    def written(self, size: int, count: int) -> None:
        """So many records of so many bytes came to the log: it may be time."""
        self._since += size + CHECKPOINT_COST * count
        if self._since >= self._disk.options.checkpoint_bytes:
            self.begin()

    def begin(self) -> None:
        """One that nobody waits for, if none runs."""
        if self._running is None:
            self._running = asyncio.create_task(self._quietly())

    async def now(self) -> None:
        """One that begins after this was asked. Raises what went wrong."""
        while self._running is not None:
            await asyncio.wait({self._running})
        self._running = asyncio.create_task(self._once())
        await asyncio.shield(self._running)

    async def last(self) -> None:
        """The one of an orderly end."""
        if self._running is not None:
            # Who asked for it hears what went wrong with it.
            await asyncio.wait({self._running})
        await self._quietly()

    async def _once(self) -> None:
        try:
            await self._write()
        finally:
            self._running = None

    async def _quietly(self) -> None:
        """What it could not do is done by the next one."""
        try:
            await self._once()
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
            )
        except Exception as error:
            for ledger, _ in changes:
                ledger.not_checkpointed()
            if is_no_room(error):
                # The next one has it, or waits for somebody to make room.
                self._disk.give_reserve_up()
            raise
        self._holdings.checkpointed(changes)
        self._counters["checkpoints"] += 1
