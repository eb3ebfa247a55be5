"""The logs that this gateway has to do with, by name, and which processes live."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import Finish, HeadLearned, Ticked
from quorumlog.protocol.metadata import Writer
from services.gateway.logs.counts import Counts
from services.gateway.logs.driver import World
from services.gateway.logs.handle import LogHandle
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.ports import LogEngine, LogStore, Peers
from services.gateway.rereads import Rereads

log = logging.getLogger(__name__)

T = TypeVar("T")

_WRITERS_MAX: Final = 10_000
"""Ledgers whose writer is remembered, which spares the sweep their rows."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things may take, in seconds."""

    append_s: float = 30.0
    """An append, takeovers and all; then its outcome is unknown."""
    settle_s: float = 20.0
    """Learning the end of a ledger whose handle is over."""
    probe_every_s: float = 2.0
    """A forwarded append that takes longer makes its sender ask whether the owner lives."""
    jitter_s: float = 0.3
    """Between the two questions after which an owner counts as gone, at most."""
    drain_s: float = 10.0


class Ownership:
    """The handles on logs, each of which knows whether this process owns its log."""

    def __init__(
        self,
        *,
        engine: LogEngine,
        store: LogStore,
        peers: Peers,
        times: Times,
        now: Callable[[], Now],
    ) -> None:
        self._engine, self._peers = engine, peers
        self.times = times
        self.counts = Counts()
        self.index = OffsetIndex()
        self._world = World(
            engine,
            store,
            peers,
            self.is_alive,
            now,
            self.index,
            self.task,
            times.jitter_s,
            times.probe_every_s,
        )
        self._handles: dict[str, LogHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: dict[int, Writer] = {}
        self._is_draining = False
        self.rereads = Rereads(self._owned, store.heads, self._learned)
        """Of the rows of the logs that this process owns."""

    def handle(self, name: str) -> LogHandle:
        """The handle on a log; made if there is none."""
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = LogHandle(
                name,
                self._world,
                settle_s=self.times.settle_s,
                counts=self.counts,
                on_gone=self._forget,
            )
            if self._is_draining:
                _ = handle.drain()
        return handle

    def known(self, name: str) -> LogHandle | None:
        """The handle on a log, if there is one."""
        return self._handles.get(name)

    def _forget(self, handle: LogHandle) -> None:
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]

    def _owned(self) -> Iterator[str]:
        return (name for name, handle in self._handles.items() if handle.owner is not None)

    @property
    def owned(self) -> int:
        """Logs that this process owns."""
        return sum(1 for _ in self._owned())

    def _learned(self, head: LogHead) -> None:
        handle = self._handles.get(head.name)
        if handle is not None:
            handle.hear(HeadLearned(head))

    def tick(self, row: LogMetadata) -> bool:
        """Whether this process owns the log of this row; if so, let its owner see to the time, and if
        not, let the owner end.
        """
        handle = self._handles.get(row.name)
        if handle is None:
            return False
        handle.hear(HeadLearned(LogHead.of(row)))
        if handle.owner is None or not handle.owner.is_mine(row):
            return False
        handle.hear(Ticked())
        return True

    async def force(self, name: str, *, create: bool, finish: Finish) -> LogMetadata:
        """Take the log over from whoever owns it, whatever becomes of the one who asked."""
        return await self.handle(name).force(creates=create, finish=finish)

    async def heal(self, name: str, ledger_id: int) -> bool:
        """Take a log over because the writer of a ledger of it can't be reached: a read must not
        wait for the next append. False when that process lives after all.
        """
        return await self.handle(name).heal(ledger_id)

    async def writer_of(self, ledger_id: int) -> Writer | None:
        """The process that writes a ledger, which never changes. Raises: NoSuchLedger."""
        writer = self._writers.get(ledger_id)
        if writer is None:
            writer = (await self._engine.get(ledger_id)).writer
            if writer is not None:
                self._writers[ledger_id] = writer
                if len(self._writers) > _WRITERS_MAX:
                    del self._writers[next(iter(self._writers))]
        return writer

    async def is_other_alive(self, writer: Writer) -> bool:
        """Whether a process lives that is not this one: what this one does not own, it lost."""
        return writer.id != self._engine.writer.id and await self.is_alive(writer)

    async def is_alive(self, writer: Writer) -> bool:
        """Asked twice, a jittered time apart: a busy process must not look like a dead one."""
        if await self._peers.is_alive(writer):
            return True
        await asyncio.sleep(self.times.jitter_s * random.uniform(0.1, 1.0))  # noqa: S311
        return await self._peers.is_alive(writer)

    async def drain(self) -> None:
        """Take nothing new, settle what is in flight, and seal the logs that are owned here, so
        that another gateway goes on at once.
        """
        self._is_draining = True
        sealed = [handle.drain() for handle in self._handles.values()]
        if sealed:
            await asyncio.wait(sealed, timeout=self.times.drain_s)
        await self.stop()

    async def stop(self) -> None:
        """End what goes on in the background."""
        for handle in list(self._handles.values()):
            handle.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on when the request that began it has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QuorumLogError):
            log.error("log-task-failed", exc_info=error)
