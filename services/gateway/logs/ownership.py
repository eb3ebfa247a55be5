"""Who owns which log, as far as this gateway knows, and how it becomes the owner.

A gateway owns a log while it writes the last ledger of the log's row. One that needs the log finds
the owner by the row, and takes over when that very process does not answer for a jittered time
(rule 22). The compare-and-swap decides; asking whether an owner lives only spares duels.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from quorumlog.errors import (
    EntryUnavailable,
    LogClosed,
    NoSuchLedger,
    NoSuchLog,
    Overloaded,
    QuorumLogError,
)
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.owner import not_the_owner
from quorumlog.protocol.log.takeover import Finish, Takeover, ending
from quorumlog.protocol.metadata import State, Writer
from services.gateway.logs.driver import World
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.owner import LogOwner, Waiting, lose, refuse, resolve
from services.gateway.logs.ports import (
    Append,
    LogAppended,
    LogEngine,
    LogStore,
    Peers,
)
from services.gateway.logs.takeover import take_over
from services.gateway.rereads import Rereads

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONFLICTS_MAX: Final = 20
"""Takeovers that one request loses before it gives up; each loss means that another one won."""


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


@dataclass(frozen=True, slots=True)
class Remote:
    """Another process that writes the last ledger of a log."""

    writer: Writer
    ledger_id: int


@dataclass(slots=True, eq=False)
class Slot:
    """What this gateway knows of one log. `lock` is held by whoever changes who owns it."""

    name: str
    lock: asyncio.Lock
    owner: LogOwner | None = None
    remote: Remote | None = None
    search: asyncio.Task[LogOwner | Remote] | None = None
    """The one search for the owner that all who wait share."""

    @property
    def route(self) -> LogOwner | Remote | None:
        """Where appends go, as far as is known."""
        if self.owner is not None and not self.owner.is_ended:
            return self.owner
        return self.remote if self.owner is None else None


class Ownership:
    """The owners of logs, here and elsewhere.

    Invariant: whoever puts an owner or a remote into a slot, or takes an owner out, holds its lock. A
    remote that was found to be wrong is forgotten by whoever finds it so (`forget_remote`).
    """

    def __init__(
        self,
        *,
        engine: LogEngine,
        store: LogStore,
        peers: Peers,
        times: Times,
        now: Callable[[], Now],
        append: Callable[[str, Append], Awaitable[LogAppended]],
    ) -> None:
        """`append` appends through whoever owns a log: for what must be appended again."""
        self._engine, self._store, self._peers = engine, store, peers
        self.times = times
        self.index = OffsetIndex()
        self._world = World(engine, store, now, self.index, self.task, times.jitter_s)
        self.takeovers = 0
        self._append = append
        self._slots: dict[str, Slot] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: dict[int, Writer] = {}
        self._draining = False
        self.rereads = Rereads(self._owned, store.heads, self._learned)
        """Of the rows of the logs that this process owns."""

    def _owned(self) -> Iterator[str]:
        return (name for name, slot in self._slots.items() if isinstance(slot.route, LogOwner))

    def _learned(self, head: LogHead) -> None:
        slot = self._slots.get(head.name)
        if slot is not None and slot.owner is not None:
            slot.owner.learn(head)

    def slot(self, name: str) -> Slot:
        """What is known of a log; begins to keep it."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot(name, asyncio.Lock())
        return slot

    def known(self, name: str) -> Slot | None:
        """What is known of a log, if anything."""
        return self._slots.get(name)

    def forget(self, slot: Slot) -> None:
        """The log is deleted."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]

    def tick(self, row: LogMetadata) -> bool:
        """Whether this process owns the log of this row; if so, let its owner see to the time, and if
        not, let it end.
        """
        slot = self._slots.get(row.name)
        if slot is None or slot.owner is None:
            return False
        slot.owner.learn(LogHead.of(row))
        if slot.owner.is_ended or not slot.owner.is_mine(row):
            return False
        slot.owner.tick()
        return True

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

    async def route(self, slot: Slot) -> LogOwner | Remote:
        """Where appends to a log go; takes it over if there is nobody.

        Raises: WriterLost, not done, where that is this process and it is about to end.
        """
        route = slot.route or await self._search(slot)
        if self._draining and isinstance(route, LogOwner):
            raise not_the_owner(slot.name)  # else a busy log would never be settled
        return route

    async def reroute(self, slot: Slot, remote: Remote, *, is_suspect: bool) -> None:
        """The owner that was known could not be reached, or is none any more: look again."""
        if not is_suspect:
            await self._jitter()
        self.forget_remote(slot, remote)
        if slot.route is None:
            await self._search(slot, suspect=remote.writer if is_suspect else None)

    def forget_remote(self, slot: Slot, remote: Remote) -> None:
        """That process could not be reached, or does not own the log any more."""
        if slot.remote is remote:
            slot.remote = None

    async def force(self, name: str, *, create: bool, finish: Finish) -> LogMetadata:
        """Take the log over from whoever owns it, whatever becomes of the one who asked."""
        await self._store.get(name)
        work = self._force_locked(self.slot(name), create=create, finish=finish)
        return await self.finished(work, ending(name))

    async def _force_locked(self, slot: Slot, *, create: bool, finish: Finish) -> LogMetadata:
        async with slot.lock:
            again: list[Waiting] = []
            try:
                for _ in range(_CONFLICTS_MAX):
                    row = await self._store.get(slot.name)
                    if row.state is LogState.CLOSED:
                        raise LogClosed(f"the log {slot.name} is closed", log=slot.name)
                    again += await self.retire(slot)
                    taken = None
                    # A ledger that is gone: the row was changed since it was read.
                    with contextlib.suppress(NoSuchLedger):
                        taken = await self._take_over(row, create=create, finish=finish)
                    if taken is not None:
                        break
                    await self._jitter()
                else:
                    raise Overloaded("the log changes all the time", log=slot.name)
            except QuorumLogError as error:
                refuse(again, error)
                raise
            except asyncio.CancelledError:
                refuse(again, not_the_owner(slot.name))
                raise
            slot.remote = None
            row, machine = taken
            if create:
                slot.owner = self._owner(slot, row, machine)
                slot.owner.adopt(again)
            else:
                refuse(again, LogClosed(f"the log {slot.name} is closed", log=slot.name))
            return row

    async def _search(self, slot: Slot, *, suspect: Writer | None = None) -> LogOwner | Remote:
        """Find or become the owner. One search for all who wait; none of them ends it."""
        if slot.search is None or slot.search.done():
            slot.search = self.task(self._search_locked(slot, suspect))
        try:
            return await _shared(slot.search, not_the_owner(slot.name))
        except QuorumLogError as error:
            raise error.replace() from error  # each waiter raises an error of its own

    async def _search_locked(self, slot: Slot, suspect: Writer | None) -> LogOwner | Remote:
        async with slot.lock:
            if slot.route is not None:
                return slot.route
            return await self._establish(slot, await self.retire(slot), suspect=suspect)

    async def _establish(
        self, slot: Slot, again: Sequence[Waiting], *, suspect: Writer | None = None
    ) -> LogOwner | Remote:
        """Find the owner by the row, or become it; `again` is appended first. Call with the slot's
        lock held and no owner in it.
        """
        try:
            route = await self._find_or_become(slot, suspect)
        except QuorumLogError as error:
            refuse(again, error)
            raise
        except asyncio.CancelledError:
            refuse(again, not_the_owner(slot.name))
            raise
        if isinstance(route, LogOwner):
            slot.owner = route
            route.adopt(again)
        else:
            slot.remote = route
            self._resend(slot, again)
        return route

    async def _find_or_become(self, slot: Slot, suspect: Writer | None) -> LogOwner | Remote:
        for _ in range(_CONFLICTS_MAX):
            if self._draining:
                raise not_the_owner(slot.name)
            try:
                row = await self._store.get(slot.name)
            except NoSuchLog:
                self.forget(slot)
                raise
            if row.state is LogState.CLOSED:
                raise LogClosed(f"the log {slot.name} is closed", log=slot.name)
            # A ledger that is gone: the row was changed since it was read.
            with contextlib.suppress(NoSuchLedger):
                remote = await self._remote_of(row, suspect=suspect)
                if remote is not None:
                    return remote
                taken = await self._take_over(row, create=True)
                if taken is not None:
                    return self._owner(slot, *taken)
            await self._jitter()
        raise Overloaded("the log changes hands all the time", log=slot.name)

    async def _remote_of(self, row: LogMetadata, *, suspect: Writer | None) -> Remote | None:
        """The other process that owns the log, if the row names one; a suspect one must answer."""
        item = row.last_item
        if item is None or item.last_offset is not None:
            return None
        ledger = await self._engine.get(item.ledger_id)
        writer = ledger.writer
        if ledger.state is not State.OPEN or writer is None or writer.id == self._engine.writer.id:
            return None
        if writer == suspect and not await self.is_alive(writer):
            return None
        return Remote(writer, item.ledger_id)

    async def is_alive(self, writer: Writer) -> bool:
        """Asked twice, a jittered time apart: a busy process must not look like a dead one."""
        if await self._peers.is_alive(writer):
            return True
        await self._jitter()
        return await self._peers.is_alive(writer)

    async def _jitter(self) -> None:
        share = random.uniform(0.1, 1.0)  # noqa: S311
        await asyncio.sleep(self.times.jitter_s * share)

    async def _take_over(
        self, row: LogMetadata, *, create: bool, finish: Finish = lambda row: row
    ) -> tuple[LogMetadata, Takeover] | None:
        try:
            taken = await take_over(row, self._world, creates=create, finish=finish)
        except (NoSuchLedger, NoSuchLog):
            raise
        except QuorumLogError as error:
            if error.retryable:
                raise
            # What befell a ledger of the log says nothing that a client of the log could act on.
            log.warning("takeover-failed", extra={"log": row.name, "error": repr(error)})
            raise EntryUnavailable(
                f"the log can't be taken over now: {error.detail}", log=row.name
            ) from error
        if taken is not None:
            self.takeovers += 1
            log.info(
                "log-taken-over",
                extra={"log": row.name, "version": taken[0].version, "writes": create},
            )
        return taken

    def _owner(self, slot: Slot, row: LogMetadata, taken: Takeover) -> LogOwner:
        return LogOwner(
            taken,
            row,
            self._world,
            settle_s=self.times.settle_s,
            on_end=lambda owner: self._ended(slot, owner),
        )

    def _ended(self, slot: Slot, owner: LogOwner) -> None:
        self._spawn(self._settle(slot, owner))

    async def heal(self, name: str, ledger_id: int) -> bool:
        """Take a log over because the writer of a ledger of it can't be reached: a read must not
        wait for the next append. False when that process lives after all.
        """
        ended = EntryUnavailable("this gateway is about to end", log=name)
        return await self.finished(self._heal_locked(self.slot(name), ledger_id), ended)

    async def _heal_locked(self, slot: Slot, ledger_id: int) -> bool:
        async with slot.lock:
            for _ in range(_CONFLICTS_MAX):
                row = await self._store.get(slot.name)
                item = row.item_of(ledger_id)
                if item is None or item.last_offset is not None:
                    return True
                with contextlib.suppress(NoSuchLedger):  # as when the owner is searched
                    if await self._has_living_owner(slot, row, item):
                        return False
                    self._resend(slot, await self.retire(slot))
                    if await self._take_over(row, create=False) is not None:
                        slot.remote = None
                        return True
                await self._jitter()
            raise Overloaded("the log changes hands all the time", log=slot.name)

    async def _has_living_owner(self, slot: Slot, row: LogMetadata, item: LogItem) -> bool:
        # An owner here that does not know yet that it was displaced says nothing of the one who
        # displaced it.
        if await self._writes(item) and isinstance(slot.route, LogOwner):
            return True
        remote = await self._remote_of(row, suspect=None)
        return remote is not None and await self.is_alive(remote.writer)

    async def _settle(self, slot: Slot, owner: LogOwner) -> None:
        """An owner failed: what it had in flight is answered, or appended again (rule 24)."""
        log.info(
            "log-owner-ended",
            extra={"log": slot.name, "ledger": owner.ledger_id, "error": repr(owner.error)},
        )
        async with slot.lock:
            if slot.owner is not owner:
                return
            again = await self.retire(slot)
            if again:
                with contextlib.suppress(QuorumLogError):
                    await self._establish(slot, again)

    def _resend(self, slot: Slot, again: Sequence[Waiting]) -> None:
        if again:
            self._spawn(self._resend_all(slot, again))

    async def _resend_all(self, slot: Slot, again: Sequence[Waiting]) -> None:
        """Append again what certainly was not, in order, through whoever owns the log now."""
        for index, (future, call) in enumerate(again):
            if future.done():
                continue
            try:
                resolve(future, await self._append(slot.name, call))
            except QuorumLogError as error:
                resolve(future, error)
            except asyncio.CancelledError:
                lose(again[index : index + 1], ending(slot.name))
                refuse(again[index + 1 :], not_the_owner(slot.name))
                raise

    async def retire(self, slot: Slot) -> list[Waiting]:
        """Part from the owner in this process, if there is one: what it had in flight is answered
        where the end of its ledger says so; gives those that certainly were not appended.
        """
        owner, slot.owner = slot.owner, None
        return [] if owner is None else await owner.retire()

    @property
    def owned(self) -> int:
        """Logs that this process owns."""
        return sum(isinstance(slot.route, LogOwner) for slot in self._slots.values())

    async def drain(self) -> None:
        """Take nothing new, settle what is in flight, and seal the logs that are owned here, so
        that another gateway goes on at once.
        """
        self._draining = True
        owned = [slot for slot in self._slots.values() if slot.owner is not None]
        await asyncio.gather(*(self._release(slot) for slot in owned))
        await self.stop()

    async def stop(self) -> None:
        """Cancel what goes on in the background."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, slot: Slot) -> None:
        with contextlib.suppress(QuorumLogError, TimeoutError):
            async with asyncio.timeout(self.times.drain_s), slot.lock:
                if slot.owner is None:
                    return
                await slot.owner.release()
                refuse(await self.retire(slot), not_the_owner(slot.name))
                row = await self._store.get(slot.name)
                last = row.last_item
                # Who was displaced, and did not know it, must not end the owner after him.
                if last is not None and last.last_offset is None and await self._writes(last):
                    await self._take_over(row, create=False)

    async def _writes(self, item: LogItem) -> bool:
        """Whether this process is the writer of a ledger."""
        writer = await self.writer_of(item.ledger_id)
        return writer is not None and writer.id == self._engine.writer.id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        _ = self.task(work)

    async def finished(self, work: Coroutine[Any, Any, T], ended: QuorumLogError) -> T:
        """Do some work for a request, and to its end though the request has ended. Raises: `ended`
        where the process ends before.
        """
        return await _shared(self.task(work), ended)

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


async def _shared(task: asyncio.Task[T], ended: QuorumLogError) -> T:
    """What a task gives that others wait for too. Raises: `ended` where the process ends it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        mine = asyncio.current_task()
        if task.cancelled() and mine is not None and not mine.cancelling():
            raise ended from None
        raise
