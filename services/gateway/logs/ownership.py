"""The handles of this gateway's logs, and liveness checks of other processes."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import Event, HeadLearned, RowTaken, Ticked
from quorumlog.protocol.log.owner import Owner
from quorumlog.protocol.metadata import Writer
from services.gateway.engine import Engine
from services.gateway.logs.driver import LogPorts
from services.gateway.logs.handle import LogCounts, LogHandle
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.store import MetadataLogs

log = logging.getLogger(__name__)

T = TypeVar("T")

CONSUMER_EXPIRY_S: Final = 2_592_000.0
"""The default time after which unused consumers expire: 30 days."""

ORPHAN_AGE_S: Final = 300.0
"""The age at which the sweep deletes an orphaned ledger. No roll or takeover waits this long for
its compare-and-swap. Unpublished ledgers of an ended transaction are deleted at any age."""


@dataclass(frozen=True, slots=True)
class LogTimes:
    """Timeouts of log operations, and intervals and ages of the sweep, in seconds."""

    append_s: float = 30.0
    """Timeout of an append, including takeovers, after which the append's outcome is unknown."""
    settle_s: float = 20.0
    """Timeout for finding the end of a ledger whose handle has ended."""
    probe_every_s: float = 2.0
    """Interval at which the sender of a forwarded append checks whether the owner is alive."""
    jitter_s: float = 0.3
    """Maximum pause between the two liveness checks; an owner that fails both counts as gone."""
    drain_s: float = 10.0
    consumer_expiry_s: float = CONSUMER_EXPIRY_S
    """A consumer is deleted after this long without use; 0: never."""
    sweep_every_s: float = 5.0
    """Interval of the sweep over changed and due logs (protocol.md, Times)."""
    sweep_all_every_s: float = 300.0
    """Interval at which the sweep reads all logs, even without announced changes."""
    orphans_every_s: float = 10.0
    orphan_age_s: float = ORPHAN_AGE_S


class Ownership:
    """The handles of this gateway's logs. Each handle tracks whether this process owns its log."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: MetadataLogs,
        peers: LogPeers,
        times: LogTimes,
        now: Callable[[], Now],
    ) -> None:
        """Starts without handles."""
        self._engine, self._peers, self.now = engine, peers, now
        self.times = times
        self.counts = LogCounts()
        self.index = OffsetIndex()
        self.ports = LogPorts(
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
        self._is_draining = False
        self._sealing: Mapping[str, asyncio.Future[None]] = {}

    def handle(self, name: str) -> LogHandle:
        """Return the log's handle, which is created if necessary."""
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = LogHandle(
                name,
                self.ports,
                settle_s=self.times.settle_s,
                counts=self.counts,
                on_gone=self._forget,
            )
            if self._is_draining:
                _ = handle.drain()
        return handle

    def _forget(self, handle: LogHandle) -> None:
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]

    def owner(self, name: str) -> Owner | None:
        """The log's owner, if it is in this process."""
        handle = self._handles.get(name)
        return None if handle is None else handle.owner

    @property
    def owned(self) -> Sequence[str]:
        """Names of the logs that this process owns."""
        return [name for name, handle in self._handles.items() if handle.owner is not None]

    def notify(self, name: str, event: Event) -> None:
        """Pass an event to the log's machine, if this process has one."""
        handle = self._handles.get(name)
        if handle is not None:
            handle.hear(event)

    def tick(self, row: LogMetadata) -> bool:
        """Pass `row` and a tick to the log's owner, and return whether this process owns the log.
        The owner applies settings that another gateway may have changed, and starts work that is
        due. If `row` no longer names the owner, the owner ends.
        """
        self.notify(row.name, HeadLearned(LogHead.of(row)))
        owner = self.owner(row.name)
        if owner is None or not owner.is_mine(row):
            return False
        self.notify(row.name, RowTaken(row))
        self.notify(row.name, Ticked())
        return True

    async def writer_of(self, ledger_id: int) -> Writer | None:
        """The writer of a ledger. Raises: NoSuchLedger."""
        return (await self._engine.get(ledger_id)).writer

    def roll_if_due(self, name: str, now: Now) -> bool:
        """Notify the log's owner if the log must roll. Returns whether this process owns the log."""
        owner = self.owner(name)
        if owner is not None and owner.tenancy.is_roll_due(now):
            self.notify(name, Ticked())
        return owner is not None

    async def is_other_alive(self, writer: Writer) -> bool:
        """Whether a process other than this one is alive. Returns False for this process."""
        return writer.id != self._engine.writer.id and await self.is_alive(writer)

    async def is_alive(self, writer: Writer) -> bool:
        """Check liveness twice, a jittered time apart, so a busy process does not count as dead."""
        if await self._peers.is_alive(writer):
            return True
        await asyncio.sleep(self.times.jitter_s * random.uniform(0.1, 1.0))  # noqa: S311
        return await self._peers.is_alive(writer)

    async def drain(self) -> None:
        """Accept no new work, settle requests in flight, and seal the last ledgers of this
        process's logs, so that another gateway can own these logs at once.
        """
        self._is_draining = True
        self._sealing = {name: handle.drain() for name, handle in self._handles.items()}
        if self._sealing:
            await asyncio.wait(self._sealing.values(), timeout=self.times.drain_s)
        await self.stop()

    def waits_for(self) -> Sequence[str]:
        """Describe to operators which logs must still be sealed before the drain can end."""
        return [f"the seal of log {name}" for name, end in self._sealing.items() if not end.done()]

    async def stop(self) -> None:
        """Stop the handles and cancel the background work."""
        for handle in list(self._handles.values()):
            handle.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that outlives the request that began it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QuorumLogError):
            log.error("log-task-failed", exc_info=error)
