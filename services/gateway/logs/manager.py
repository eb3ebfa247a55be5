"""All logs of one gateway: their rows, their records, and who is asked for what.

Any gateway takes any request: it forwards to the log's owner, or becomes it (`ownership.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    ExpiredProducer,
    InvalidRequest,
    LogClosed,
    LogExists,
    NoSuchLedger,
    NoSuchLog,
    QuorumLogError,
    QuorumTimeout,
    VersionConflict,
    WriterLost,
)
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import NOT_OWNER, NotOwner
from quorumlog.protocol.log.owner import not_the_owner
from quorumlog.protocol.metadata import State, Writer
from quorumlog.protocol.transaction import Transaction
from services.gateway.logs.owner import LogOwner, refuse
from services.gateway.logs.ownership import (
    Ownership,
    Remote,
    Slot,
    Times,
)
from services.gateway.logs.ports import (
    Append,
    LogAppended,
    LogBatches,
    LogChanged,
    LogEngine,
    LogRead,
    LogStore,
    PeerLost,
    Peers,
    Publish,
)
from services.gateway.logs.publishing import sizes_of
from services.gateway.logs.reading import LogReader, Start

log = logging.getLogger(__name__)

T = TypeVar("T")

ORPHANS_KEPT_MAX: Final = 100
"""Orphans that can't be deleted now, in one round: each may take until a timeout, and the sweep has
more to do. The next round goes on behind them."""

_VIEWS_AT_ONCE: Final = 32
"""Logs of a page whose ends are asked for at once."""


@dataclass(slots=True)
class Counts:
    """What was done here, since the start."""

    requests: int = 0
    records: int = 0
    duplicates: int = 0

    def add(self, call: Append, done: LogAppended) -> None:
        """One append was acknowledged by an owner in this process."""
        self.requests += 1
        if done.is_duplicate:
            self.duplicates += 1
        else:
            self.records += len(call.records)


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
        wall_ms: Callable[[], int] | None = None,
    ) -> None:
        self._engine, self._store, self._peers = engine, store, peers
        self.times = times or Times()
        self.counts = Counts()
        self._orphans_after: int | None = None
        """Where a round stopped that met too many orphans which can't be deleted."""
        loop, wall = asyncio.get_running_loop(), wall_ms or _wall_ms
        self.ownership = Ownership(
            engine=engine,
            store=store,
            peers=peers,
            times=self.times,
            now=lambda: Now(wall(), store.database_ms(), loop.time()),
            append=self.append,
        )
        self._reader = LogReader(
            engine=engine, store=store, index=self.ownership.index, heal=self.ownership.heal
        )

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

        async def view(row: LogMetadata) -> LogView | None:
            async with room:
                try:
                    return await self._view(row)
                except NoSuchLog:
                    return None  # deleted since the page was read

        views = await asyncio.gather(*map(view, rows))
        return [view for view in views if view is not None], following

    async def _view(self, row: LogMetadata) -> LogView:
        states = {item.ledger_id: State.CLOSED for item in row.items}
        owner: Writer | None = None
        for item in row.unsealed:
            with contextlib.suppress(NoSuchLedger):
                ledger = await self._engine.get(item.ledger_id)
                states[item.ledger_id] = ledger.state
                if item is row.last_item and ledger.state is State.OPEN:
                    owner = ledger.writer
        slot = self.ownership.known(row.name)
        end = row.end_offset
        if end is None and slot is not None and slot.owner is not None and slot.owner.is_mine(row):
            end = slot.owner.acknowledged_offset
        if end is None:
            end = await self._reader.end(row.name, row)
        return LogView(row, end, owner, states)

    async def delete(self, name: str) -> None:
        """Delete the log and its ledgers. Raises: NoSuchLog, RecoveryBlocked."""
        row = await self._store.get(name)
        slot = self.ownership.slot(name)
        async with slot.lock:
            while True:
                await self._fence(row)
                try:
                    await self._store.delete(row)
                    break
                except LogChanged as changed:
                    if changed.current.created_at != row.created_at:
                        # A namesake that was made since: not what this request is about.
                        raise NoSuchLog(f"the log {name} was deleted", log=name) from changed
                    row = changed.current
            again = await self.ownership.retire(slot)
            refuse(again, NoSuchLog(f"the log {name} was deleted", log=name))
            slot.remote = None
            self.ownership.forget(slot)
        await self._drop([item.ledger_id for item in row.items])

    async def _fence(self, row: LogMetadata) -> None:
        """End who writes a log, before its name is free (rule 27): the name may be given again, and
        an owner that heard of nothing would go on in a ledger of the log that is no more.
        """
        for item in row.unsealed:
            with contextlib.suppress(NoSuchLedger):
                await self._engine.recover(item.ledger_id)

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
        slot = self.ownership.slot(name)
        if slot.owner is not None:
            slot.owner.took(new)
        kept = {item.ledger_id for item in new.items}
        await self._drop([item.ledger_id for item in row.items if item.ledger_id not in kept])
        return await self._view(new)

    async def archived(self, name: str, through: int, *, expect: int | None) -> LogView:
        """Note that all records below an offset are kept elsewhere; again is the same.

        Raises: VersionConflict where something else is archived than `expect` says, InvalidRequest
        beyond the end.
        """
        while True:
            row = await self._store.get(name)
            if row.archived_through == through:
                return await self._view(row)
            if row.archived_through != expect:
                raise VersionConflict(
                    f"the log is archived through {row.archived_through}", log=name
                )
            end = (await self._view(row)).next_offset
            if not (row.archived_through or 0) <= through <= end:
                raise InvalidRequest(
                    f"the log's end is {end}, and what is archived stays archived",
                    log=name,
                    errors=[{"pointer": "/through", "detail": f"at most {end}, never back"}],
                )
            with contextlib.suppress(LogChanged):
                new = await self._store.cas(row.archived(through))
                break
        slot = self.ownership.slot(name)
        if slot.owner is not None:
            slot.owner.took(new)
        return await self._view(new)

    async def _drop(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers that no log names any more; the sweep does what fails here."""
        for ledger_id in ledger_ids:
            self.ownership.index.drop(ledger_id)
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

    async def delete_orphans(self, *, older_than_s: float) -> None:
        """Delete ledgers that were made for a log and that none has named for so long, and those
        of transactions that were not published.
        """
        kept = 0
        after, self._orphans_after = self._orphans_after, None
        while found := await self._store.orphans(older_than_s=older_than_s, after=after):
            for ledger_id in found:
                after = ledger_id
                try:
                    await self.delete_orphan(ledger_id)
                except NoSuchLedger:
                    continue
                except QuorumLogError as error:
                    kept += 1
                    log.warning("orphan-kept", extra={"ledger": ledger_id, "error": repr(error)})
                else:
                    log.info("orphan-deleted", extra={"ledger": ledger_id})
                if kept == ORPHANS_KEPT_MAX:
                    self._orphans_after = after
                    return

    async def open(self, name: str, owner: str) -> tuple[int, int]:
        """Open the log for one writer, by the seeds' steps: its token, and the next offset."""
        row = await self.ownership.force(name, create=True, finish=lambda row: row.opened(owner))
        item = row.last_item
        assert item is not None
        return row.writer_token, item.first_offset or 0

    async def close(self, name: str) -> LogView:
        """Close the log for good."""
        with contextlib.suppress(LogClosed):
            await self.ownership.force(name, create=False, finish=LogMetadata.closed)
        return await self.get(name)

    async def roll(self, name: str) -> LogView:
        """Go on in a new ledger."""
        await self._through_owner(name, LogOwner.roll, lambda owner: self._peers.roll(owner, name))
        return await self.get(name)

    async def roll_here(self, name: str) -> None:
        """Roll for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        await self._as_owner(name, LogOwner.roll)

    async def publish(self, name: str, call: Publish) -> Transaction:
        """Put a transaction's ledgers onto the log, through whoever owns that (rule 28).

        Raises: LogFenced, LogClosed, InvalidRequest, and why the transaction can't be committed.
        """
        sizes = await sizes_of(call.ledgers, self._engine)
        try:
            return await self._through_owner(
                name,
                lambda owner: owner.publish(call, sizes),
                lambda owner: self._peers.publish(owner, name, call),
            )
        except QuorumLogError as error:
            if error.outcome == UNKNOWN:
                # A repeat is told what became of it.
                raise error.replace(retryable=True) from error
            raise

    async def publish_here(self, name: str, call: Publish) -> Transaction:
        """Publish for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        sizes = await sizes_of(call.ledgers, self._engine)
        return await self._as_owner(name, lambda owner: owner.publish(call, sizes))

    async def _through_owner(
        self,
        name: str,
        here: Callable[[LogOwner], Awaitable[T | NotOwner]],
        there: Callable[[Writer], Awaitable[T]],
    ) -> T:
        """Let the log's owner do something, whoever that is by then: what may be done twice, since
        an owner may be lost over it.
        """
        slot = self.ownership.slot(name)
        async with self._deadline(name):
            while True:
                route = await self.ownership.route(slot)
                if isinstance(route, LogOwner):
                    done = await here(route)
                    if done is not NOT_OWNER:
                        return done
                    continue
                try:
                    return await self._forward(route, there(route.writer))
                except PeerLost:
                    await self.ownership.reroute(slot, route, is_suspect=True)
                except WriterLost as error:
                    if error.outcome != NOT_DONE:
                        raise
                    await self.ownership.reroute(slot, route, is_suspect=False)

    async def _as_owner(self, name: str, here: Callable[[LogOwner], Awaitable[T | NotOwner]]) -> T:
        """Do something for another gateway that took this one for the owner."""
        async with self._deadline(name):
            route = await self.ownership.route(self.ownership.slot(name))
            done = await here(route) if isinstance(route, LogOwner) else NOT_OWNER
            if done is NOT_OWNER:
                raise not_the_owner(name)
            return done

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

    async def batches(
        self,
        name: str,
        start: Start,
        *,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        wait_s: float = 0.0,
    ) -> LogBatches:
        """The same, as the records are stored (`LogReader.batches`)."""
        return await self._reader.batches(
            name, start, limit=limit, max_bytes=max_bytes, wait_s=wait_s
        )

    async def end(self, name: str) -> int:
        """The offset after the last acknowledged record. Raises: NoSuchLog."""
        return await self._reader.end(name)

    async def append(self, name: str, call: Append) -> LogAppended:
        """Append records as one batch, through whoever owns the log."""
        try:
            async with self._deadline(name):
                return await self._append(self.ownership.slot(name), call, is_forwarded=False)
        except QuorumLogError as error:
            if (
                call.producer is not None
                and error.outcome == UNKNOWN
                and not isinstance(error, ExpiredProducer)
            ):
                # A repeat gets the first answer, if there was one.
                raise error.replace(retryable=True) from error
            raise

    async def append_here(self, name: str, call: Append) -> LogAppended:
        """Append for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        async with self._deadline(name):
            return await self._append(self.ownership.slot(name), call, is_forwarded=True)

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

    async def _append(self, slot: Slot, call: Append, *, is_forwarded: bool) -> LogAppended:
        while True:
            route = await self.ownership.route(slot)
            if isinstance(route, LogOwner):
                pending = route.append(call)
                if pending is None:
                    continue
                done = await pending
                self.counts.add(call, done)
                return done
            if is_forwarded:
                raise not_the_owner(slot.name)
            try:
                asked = self._peers.append(route.writer, slot.name, call)
                return await self._forward(route, asked)
            except PeerLost as lost:
                if lost.sent and call.producer is None:
                    self.ownership.forget_remote(slot, route)
                    raise WriterLost(
                        f"the log's owner went away while it appended: {lost}",
                        log=slot.name,
                        outcome=UNKNOWN,
                    ) from lost
                await self.ownership.reroute(slot, route, is_suspect=True)
            except WriterLost as error:
                if error.outcome != NOT_DONE:
                    raise
                await self.ownership.reroute(slot, route, is_suspect=False)

    async def _forward(self, remote: Remote, asked: Awaitable[T]) -> T:
        """What the owner answers; give up when it does not live any more (rule 11)."""
        task = asyncio.ensure_future(asked)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.times.probe_every_s)
                if done:
                    return task.result()
                if not await self.ownership.is_alive(remote.writer):
                    raise PeerLost("it does not answer", sent=True)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuorumLogError, PeerLost):
                await task

    async def drain(self) -> None:
        """Hand the logs that are owned here over to whoever comes next."""
        await self.ownership.drain()


def _wall_ms() -> int:
    """The clock of this machine."""
    return int(datetime.now(UTC).timestamp() * 1000)
