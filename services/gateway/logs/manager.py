"""All logs of one gateway: who owns which, and what goes where.

A gateway owns a log while it writes the last ledger of the log's row. Any gateway takes any
request: it forwards to the owner, and takes over when that very process does not answer for a
jittered time (rule 22). The compare-and-swap decides; asking whether an owner lives only spares
duels.
"""

import asyncio
import contextlib
import copy
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    EntryUnavailable,
    ExpiredProducer,
    LogClosed,
    LogExists,
    LogFenced,
    NoSuchLedger,
    NoSuchLog,
    Overloaded,
    QuorumLogError,
    QuorumTimeout,
    SequenceGap,
    UnexpectedOffset,
    WriterLost,
)
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.metadata import LedgerMetadata, State, Writer
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.owner import LogOwner, OwnerEnded, Pending
from services.gateway.logs.ports import (
    Append,
    LogAppended,
    LogChanged,
    LogEngine,
    LogRead,
    LogStore,
    PeerLost,
    Peers,
)
from services.gateway.logs.reading import LogReader, Start
from services.gateway.logs.takeover import Finish, Taken, take_over

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONFLICTS_MAX: Final = 20
"""Takeovers that one request loses before it gives up; each loss means that another one won."""


_WRITERS_MAX: Final = 10_000
"""Ledgers whose writer is remembered, which spares the sweep their rows."""

_VIEWS_AT_ONCE: Final = 32
"""Logs of a page whose ends are asked for at once."""

_BY_STATE: Final = (UnexpectedOffset, SequenceGap, ExpiredProducer, LogFenced)
"""Refusals that hold for the state of the log that the owner knows, and only while it owns it."""


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
class _Slot:
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


@dataclass(frozen=True, slots=True)
class LogView:
    """A log as clients see it."""

    log: LogMetadata
    next_offset: int
    owner: Writer | None
    states: dict[int, State]


class LogManager:
    """The logs, in this process."""

    def __init__(
        self,
        *,
        engine: LogEngine,
        store: LogStore,
        peers: Peers,
        times: Times | None = None,
    ) -> None:
        self._engine, self._store, self._peers = engine, store, peers
        self.times = times or Times()
        self._index = OffsetIndex()
        self._reader = LogReader(engine=engine, store=store, index=self._index, heal=self.heal)
        self._slots: dict[str, _Slot] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: dict[int, Writer] = {}
        self._draining = False

    # --- the row ---------------------------------------------------------------------------

    async def put(self, name: str, settings: LogSettings) -> tuple[LogView, bool]:
        """The log of this name, and whether it was made now. Raises: LogExists with others."""
        row, is_new = await self._store.create(LogMetadata(name, settings, next_offset=0))
        if row.settings != settings:
            raise LogExists(f"the log {name} exists with other settings", log=name)
        return await self._view(row), is_new

    async def get(self, name: str) -> LogView:
        """The log. Raises: NoSuchLog."""
        return await self._view(await self._reader.row(name))

    async def page(self, *, after: str | None, limit: int) -> tuple[list[LogView], str | None]:
        """One page by name, and the `after` of the next one."""
        rows, following = await self._store.list(after=after, limit=limit)
        room = asyncio.Semaphore(_VIEWS_AT_ONCE)

        async def view(row: LogMetadata) -> LogView:
            async with room:
                return await self._view(row)

        return list(await asyncio.gather(*map(view, rows))), following

    async def _view(self, row: LogMetadata) -> LogView:
        states = {item.ledger_id: State.CLOSED for item in row.items}
        owner: Writer | None = None
        for item in row.unsealed:
            with contextlib.suppress(NoSuchLedger):
                ledger = await self._engine.get(item.ledger_id)
                states[item.ledger_id] = ledger.state
                if item is row.last_item and ledger.state is State.OPEN:
                    owner = ledger.writer
        slot = self._slots.get(row.name)
        end = row.end_offset
        if end is None and slot is not None and slot.owner is not None and slot.owner.is_mine(row):
            end = slot.owner.acknowledged_offset
        if end is None:
            end = await self._reader.end(row.name, row)
        return LogView(row, end, owner, states)

    async def delete(self, name: str) -> None:
        """Delete the log and its ledgers. Raises: NoSuchLog."""
        slot = self._slot(name)
        async with slot.lock:
            while True:
                row = await self._store.get(name)
                try:
                    await self._store.delete(row)
                    break
                except LogChanged:
                    continue
            again = await self._retire(slot)
            for pending in again:
                pending.resolve(NoSuchLog(f"the log {name} was deleted", log=name))
            slot.remote = None
        await self._drop([item.ledger_id for item in row.items])

    async def truncate(self, name: str, before: int) -> LogView:
        """Drop whole ledgers that end below `before`."""
        while True:
            row = await self._store.get(name)
            changed = row.truncated(before)
            if changed == row:
                return await self._view(row)
            with contextlib.suppress(LogChanged):
                new = await self._store.cas(changed)
                break
        slot = self._slot(name)
        if slot.owner is not None:
            slot.owner.took(new)
        kept = {item.ledger_id for item in new.items}
        await self._drop([item.ledger_id for item in row.items if item.ledger_id not in kept])
        return await self._view(new)

    async def _drop(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers that no log names any more; the sweep does what fails here."""
        for ledger_id in ledger_ids:
            self._index.drop(ledger_id)
            with contextlib.suppress(QuorumLogError):
                await self.delete_orphan(ledger_id)

    async def delete_orphan(self, ledger_id: int) -> None:
        """Delete a ledger that was made for a log which does not name it (rule 22).

        An open one is recovered first (rule 27): its writer must not go on.
        """
        ledger = await self._engine.get(ledger_id)
        if ledger.state is not State.CLOSED:
            await self._engine.recover(ledger_id)
        await self._store.delete_unnamed(ledger_id)

    async def open(self, name: str, owner: str) -> tuple[int, int]:
        """Open the log for one writer, by the seeds' steps: its token, and the next offset."""
        taken = await self._force(name, create=True, finish=lambda row: row.opened(owner))
        item = taken.log.last_item
        assert item is not None
        return taken.log.writer_token, item.first_offset or 0

    async def close(self, name: str) -> LogView:
        """Close the log for good."""
        with contextlib.suppress(LogClosed):
            await self._force(name, create=False, finish=LogMetadata.closed)
        return await self.get(name)

    async def _force(self, name: str, *, create: bool, finish: Finish) -> Taken:
        """Take the log over from whoever owns it, whatever becomes of the one who asked."""
        work = self._force_locked(self._slot(name), create=create, finish=finish)
        return await asyncio.shield(self._task(work))

    async def _force_locked(self, slot: _Slot, *, create: bool, finish: Finish) -> Taken:
        async with slot.lock:
            again: list[Pending] = []
            try:
                for _ in range(_CONFLICTS_MAX):
                    row = await self._store.get(slot.name)
                    if row.state is LogState.CLOSED:
                        raise LogClosed(f"the log {slot.name} is closed", log=slot.name)
                    again += await self._retire(slot)
                    taken = await self._take_over(row, create=create, finish=finish)
                    if taken is not None:
                        break
                    await self._jitter()
                else:
                    raise Overloaded("the log changes all the time", log=slot.name)
            except QuorumLogError as error:
                _refuse(again, error)
                raise
            slot.remote = None
            if create:
                slot.owner = self._owner(slot, taken)
                _adopt(slot.owner, again)
            else:
                _refuse(again, LogClosed(f"the log {slot.name} is closed", log=slot.name))
            return taken

    async def roll(self, name: str) -> LogView:
        """Go on in a new ledger."""
        slot = self._slot(name)
        async with self._deadline(name):
            while True:
                route = await self._route(slot)
                if isinstance(route, LogOwner):
                    try:
                        await asyncio.shield(self._task(route.roll()))
                    except (OwnerEnded, QuorumLogError):
                        if not route.is_ended:
                            raise
                        continue
                    return await self.get(name)
                try:
                    await self._peers.roll(route.writer, name)
                    return await self.get(name)
                except PeerLost:
                    await self._reroute(slot, route, is_suspect=True)
                except WriterLost as error:
                    if error.outcome != NOT_DONE:
                        raise
                    await self._reroute(slot, route, is_suspect=False)

    async def roll_here(self, name: str) -> None:
        """Roll for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        route = await self._route(self._slot(name))
        if not isinstance(route, LogOwner):
            raise _not_the_owner(name)
        try:
            await asyncio.shield(self._task(route.roll()))
        except (OwnerEnded, QuorumLogError) as error:
            if not route.is_ended:
                raise
            raise _not_the_owner(name) from error

    def tick(self, row: LogMetadata) -> bool:
        """Whether this process owns the log of this row; if so, let its owner see to the time."""
        slot = self._slots.get(row.name)
        if slot is None or slot.owner is None or not slot.owner.is_mine(row):
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
        return writer.id != self._engine.writer.id and await self._is_alive(writer)

    # --- records ---------------------------------------------------------------------------

    async def read(
        self,
        name: str,
        start: Start,
        *,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        wait_s: float = 0.0,
    ) -> LogRead:
        """Records by offset (`LogReader.read`)."""
        return await self._reader.read(name, start, limit=limit, max_bytes=max_bytes, wait_s=wait_s)

    async def end(self, name: str) -> int:
        """The offset after the last acknowledged record. Raises: NoSuchLog."""
        return await self._reader.end(name)

    async def append(self, name: str, call: Append) -> LogAppended:
        """Append records as one batch, through whoever owns the log."""
        try:
            async with self._deadline(name):
                return await self._append(self._slot(name), call, is_forwarded=False)
        except QuorumLogError as error:
            if call.producer is not None and error.outcome == UNKNOWN:
                error.retryable = True  # a repeat gets the first answer, if there was one
            raise

    async def append_here(self, name: str, call: Append) -> LogAppended:
        """Append for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        async with self._deadline(name):
            return await self._append(self._slot(name), call, is_forwarded=True)

    @contextlib.asynccontextmanager
    async def _deadline(self, name: str) -> Any:
        limit = asyncio.timeout(self.times.append_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            raise QuorumTimeout(
                f"the log did not answer within {self.times.append_s:g} s", log=name
            ) from error

    async def _append(self, slot: _Slot, call: Append, *, is_forwarded: bool) -> LogAppended:
        while True:
            route = await self._route(slot)
            if isinstance(route, LogOwner):
                try:
                    pending = route.append(call)
                except OwnerEnded:
                    continue
                try:
                    return await asyncio.shield(pending.future)
                except _BY_STATE:
                    if await self._still_owns(slot, route):
                        raise
                    continue
            if is_forwarded:
                raise _not_the_owner(slot.name)
            try:
                return await self._forward(route, slot.name, call)
            except PeerLost as lost:
                if lost.sent and call.producer is None:
                    slot.remote = None if slot.remote is route else slot.remote
                    raise WriterLost(
                        f"the log's owner went away while it appended: {lost}",
                        log=slot.name,
                        outcome=UNKNOWN,
                    ) from lost
                await self._reroute(slot, route, is_suspect=True)
            except WriterLost as error:
                if error.outcome != NOT_DONE:
                    raise
                await self._reroute(slot, route, is_suspect=False)

    async def _still_owns(self, slot: _Slot, owner: LogOwner) -> bool:
        """Whether the row says so too. An owner that was displaced while it was idle does not know
        it, and its refusals mean nothing; its appends fail by themselves.
        """
        if owner.is_ended:
            return False
        if owner.is_mine(await self._store.get(slot.name)):
            return True
        owner.end(OwnerEnded())
        return False

    async def _forward(self, remote: Remote, name: str, call: Append) -> LogAppended:
        """Let the owner append; give up when it does not live any more (rule 11)."""
        task = asyncio.create_task(self._peers.append(remote.writer, name, call))
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.times.probe_every_s)
                if done:
                    return task.result()
                if not await self._is_alive(remote.writer):
                    raise PeerLost("it does not answer", sent=True)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuorumLogError, PeerLost):
                await task

    # --- who owns it -------------------------------------------------------------------------

    def _slot(self, name: str) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = _Slot(name, asyncio.Lock())
        return slot

    async def _route(self, slot: _Slot) -> LogOwner | Remote:
        """Where appends to a log go; takes it over if there is nobody."""
        return slot.route or await self._search(slot)

    async def _reroute(self, slot: _Slot, remote: Remote, *, is_suspect: bool) -> None:
        """The owner that was known could not be reached, or is none any more: look again."""
        if not is_suspect:
            await self._jitter()
        if slot.remote is remote:
            slot.remote = None
        if slot.route is None:
            await self._search(slot, suspect=remote.writer if is_suspect else None)

    async def _search(self, slot: _Slot, *, suspect: Writer | None = None) -> LogOwner | Remote:
        """Find or become the owner. One search for all who wait; none of them ends it."""
        if slot.search is None or slot.search.done():
            slot.search = self._task(self._search_locked(slot, suspect))
        try:
            return await asyncio.shield(slot.search)
        except QuorumLogError as error:
            raise _copied(error) from error

    async def _search_locked(self, slot: _Slot, suspect: Writer | None) -> LogOwner | Remote:
        async with slot.lock:
            if slot.route is not None:
                return slot.route
            return await self._establish(slot, await self._retire(slot), suspect=suspect)

    async def _establish(
        self, slot: _Slot, again: Sequence[Pending], *, suspect: Writer | None = None
    ) -> LogOwner | Remote:
        """Find the owner by the row, or become it; `again` is appended first. Call with the slot's
        lock held and no owner in it.
        """
        try:
            route = await self._find_or_become(slot, suspect)
        except QuorumLogError as error:
            _refuse(again, error)
            raise
        if isinstance(route, LogOwner):
            slot.owner = route
            _adopt(route, again)
        else:
            slot.remote = route
            self._resend(slot, again)
        return route

    async def _find_or_become(self, slot: _Slot, suspect: Writer | None) -> LogOwner | Remote:
        for _ in range(_CONFLICTS_MAX):
            if self._draining:
                raise _not_the_owner(slot.name)
            try:
                row = await self._store.get(slot.name)
            except NoSuchLog:
                self._slots.pop(slot.name, None)
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
                    return self._owner(slot, taken)
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
        if writer == suspect and not await self._is_alive(writer):
            return None
        return Remote(writer, item.ledger_id)

    async def _is_alive(self, writer: Writer) -> bool:
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
    ) -> Taken | None:
        try:
            taken = await take_over(
                row, engine=self._engine, store=self._store, create=create, finish=finish
            )
        except NoSuchLedger:
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
            log.info(
                "log-taken-over",
                extra={"log": row.name, "version": taken.log.version, "writes": create},
            )
        return taken

    def _owner(self, slot: _Slot, taken: Taken) -> LogOwner:
        return LogOwner(
            log=taken.log,
            engine=self._engine,
            store=self._store,
            producers=taken.producers,
            index=self._index,
            on_end=lambda owner: self._ended(slot, owner),
            on_roll=self._due,
        )

    def _ended(self, slot: _Slot, owner: LogOwner) -> None:
        self._spawn(self._settle(slot, owner))

    def _due(self, owner: LogOwner) -> None:
        self._spawn(owner.roll_by_itself())

    async def heal(self, name: str, ledger_id: int) -> bool:
        """Take a log over because the writer of a ledger of it can't be reached: a read must not
        wait for the next append. False when that process lives after all.
        """
        return await asyncio.shield(self._task(self._heal_locked(self._slot(name), ledger_id)))

    async def _heal_locked(self, slot: _Slot, ledger_id: int) -> bool:
        async with slot.lock:
            for _ in range(_CONFLICTS_MAX):
                row = await self._store.get(slot.name)
                item = row.item_of(ledger_id)
                if item is None or item.last_offset is not None:
                    return True
                if slot.owner is not None and not slot.owner.is_ended:
                    return False
                remote = await self._remote_of(row, suspect=None)
                if remote is not None and await self._is_alive(remote.writer):
                    return False
                self._resend(slot, await self._retire(slot))
                if await self._take_over(row, create=False) is not None:
                    slot.remote = None
                    return True
                await self._jitter()
            raise Overloaded("the log changes hands all the time", log=slot.name)

    # --- after an end ------------------------------------------------------------------------

    async def _settle(self, slot: _Slot, owner: LogOwner) -> None:
        """An owner failed: what it had in flight is answered, or appended again (rule 24)."""
        log.info(
            "log-owner-ended",
            extra={"log": slot.name, "ledger": owner.ledger_id, "error": repr(owner.error)},
        )
        async with slot.lock:
            if slot.owner is not owner:
                return
            again = await self._retire(slot)
            if again:
                with contextlib.suppress(QuorumLogError):
                    await self._establish(slot, again)

    def _resend(self, slot: _Slot, again: Sequence[Pending]) -> None:
        if again:
            self._spawn(self._resend_all(slot, again))

    async def _resend_all(self, slot: _Slot, again: Sequence[Pending]) -> None:
        """Append again what certainly was not, in order, through whoever owns the log now."""
        for pending in again:
            if pending.future.done():
                continue
            try:
                pending.resolve(await self.append(slot.name, pending.call))
            except QuorumLogError as error:
                pending.resolve(error)

    async def _retire(self, slot: _Slot) -> list[Pending]:
        """Part from the owner in this process, if there is one: what it had in flight is answered
        where the end of its ledger says so; gives those that certainly were not appended.
        """
        owner, slot.owner = slot.owner, None
        if owner is None:
            return []
        owner.retire()
        in_flight, waiting = list(owner.in_flight), list(owner.waiting)
        owner.in_flight.clear()
        owner.waiting.clear()
        if not in_flight:
            return waiting
        try:
            ledger = await self._recover(owner.ledger_id)
        except QuorumLogError as error:
            for pending in in_flight:
                pending.resolve(_copied(error).with_outcome(UNKNOWN))
            return waiting
        assert ledger.last_entry is not None
        again = []
        for pending in in_flight:
            if pending.entry_id <= ledger.last_entry:
                pending.resolve(pending.answer(owner.ledger_id))
            else:
                again.append(pending)
        return again + waiting

    async def _recover(self, ledger_id: int) -> LedgerMetadata:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.times.settle_s
        while True:
            try:
                return await self._engine.recover(ledger_id)
            except QuorumLogError as error:
                if not error.retryable or loop.time() > deadline:
                    raise
            await self._jitter()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        _ = self._task(work)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on when the request that began it has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QuorumLogError | OwnerEnded):
            log.error("log-task-failed", exc_info=error)

    # --- the end of the process --------------------------------------------------------------

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

    async def _release(self, slot: _Slot) -> None:
        with contextlib.suppress(QuorumLogError, TimeoutError):
            async with asyncio.timeout(self.times.drain_s), slot.lock:
                if slot.owner is None:
                    return
                ledger_id = slot.owner.ledger_id
                await slot.owner.settled()
                with contextlib.suppress(QuorumLogError):
                    await self._engine.close(ledger_id)
                _refuse(await self._retire(slot), _not_the_owner(slot.name))
                row = await self._store.get(slot.name)
                if row.last_item is not None and row.last_item.last_offset is None:
                    await self._take_over(row, create=False)


def _not_the_owner(name: str) -> WriterLost:
    return WriterLost(
        "this gateway does not own the log", log=name, outcome=NOT_DONE, retryable=True
    )


def _copied(error: QuorumLogError) -> QuorumLogError:
    """Each waiter gets an error of its own: raising one adds to its traceback."""
    return copy.copy(error)


def _refuse(pendings: Sequence[Pending], error: QuorumLogError) -> None:
    """These requests certainly were not done."""
    for pending in pendings:
        pending.resolve(_copied(error).with_outcome(NOT_DONE))


def _adopt(owner: LogOwner, pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        owner.adopt(pending)
