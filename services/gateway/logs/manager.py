"""All logs of one gateway: their rows, their records, and who is asked for what.

Any gateway takes any request: it forwards to the log's owner, or becomes it (`ownership.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from quorumlog.errors import (
    UNKNOWN,
    ExpiredProducer,
    InvalidRequest,
    LogClosed,
    LogExists,
    NoSuchLedger,
    QuorumLogError,
    QuorumTimeout,
    VersionConflict,
)
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import RowTaken
from quorumlog.protocol.metadata import State
from quorumlog.protocol.transaction import Transaction
from services.gateway.logs.handle import LogHandle
from services.gateway.logs.ownership import (
    Ownership,
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
    Peers,
    Publish,
)
from services.gateway.logs.publishing import sizes_of
from services.gateway.logs.reading import LogReader, Start
from services.gateway.logs.views import LogView, LogViews

log = logging.getLogger(__name__)

T = TypeVar("T")

ORPHANS_KEPT_MAX: Final = 100
"""Orphans that can't be deleted now, in one round: each may take until a timeout, and the sweep has
more to do. The next round goes on behind them."""


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
        self._engine, self._store = engine, store
        self.times = times or Times()
        self._orphans_after: int | None = None
        """Where a round stopped that met too many orphans which can't be deleted."""
        loop, wall = asyncio.get_running_loop(), wall_ms or _wall_ms
        self.ownership = Ownership(
            engine=engine,
            store=store,
            peers=peers,
            times=self.times,
            now=lambda: Now(wall(), store.database_ms(), loop.time()),
        )
        self.counts = self.ownership.counts
        self._reader = LogReader(
            engine=engine, store=store, index=self.ownership.index, heal=self.ownership.heal
        )
        self._views = LogViews(
            engine=engine, store=store, peers=peers, ownership=self.ownership, reader=self._reader
        )

    async def put(self, name: str, settings: LogSettings) -> tuple[LogView, bool]:
        """The log of this name, and whether it was made now. Raises: LogExists with others."""
        row, is_new = await self._store.create(LogMetadata(name, settings, next_offset=0))
        if row.settings != settings:
            raise LogExists(f"the log {name} exists with other settings", log=name)
        return await self._views.view(row), is_new

    async def get(self, name: str) -> LogView:
        """The log. Raises: NoSuchLog."""
        return await self._views.view(await self._reader.row(name))

    async def page(self, *, after: str | None, limit: int) -> tuple[list[LogView], str | None]:
        """One page by name, and the `after` of the next one."""
        return await self._views.page(after=after, limit=limit)

    def ends_here(self, heads: Iterable[LogHead]) -> dict[str, int]:
        """For another gateway: where those of these logs end that this process owns."""
        return self._views.ends_here(heads)

    async def delete(self, name: str) -> None:
        """Delete the log and its ledgers. Raises: NoSuchLog, RecoveryBlocked."""
        row = await self.ownership.handle(name).delete()
        await self._drop([item.ledger_id for item in row.items])

    async def truncate(self, name: str, before: int) -> LogView:
        """Drop whole ledgers that end below `before`."""
        while True:
            row = await self._store.get(name)
            changed = row.truncated(before)
            if changed == row:
                return await self._views.view(row)
            with contextlib.suppress(LogChanged):
                new = await self._store.cas(changed)
                break
        self._tell(new)
        kept = {item.ledger_id for item in new.items}
        await self._drop([item.ledger_id for item in row.items if item.ledger_id not in kept])
        return await self._views.view(new)

    async def archived(self, name: str, through: int, *, expect: int | None) -> LogView:
        """Note that all records below an offset are kept elsewhere; again is the same.

        Raises: VersionConflict where something else is archived than `expect` says, InvalidRequest
        beyond the end.
        """
        while True:
            row = await self._store.get(name)
            if row.archived_through == through:
                return await self._views.view(row)
            if row.archived_through != expect:
                raise VersionConflict(
                    f"the log is archived through {row.archived_through}", log=name
                )
            end = (await self._views.view(row)).next_offset
            if not (row.archived_through or 0) <= through <= end:
                raise InvalidRequest(
                    f"the log's end is {end}, and what is archived stays archived",
                    log=name,
                    errors=[{"pointer": "/through", "detail": f"at most {end}, never back"}],
                )
            with contextlib.suppress(LogChanged):
                new = await self._store.cas(row.archived(through))
                break
        self._tell(new)
        return await self._views.view(new)

    def _tell(self, row: LogMetadata) -> None:
        """The owner here, if there is one, learns of a change of the row that did not end it."""
        handle = self.ownership.known(row.name)
        if handle is not None:
            handle.hear(RowTaken(row))

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
        handle = self.ownership.handle(name)
        await self._done(handle, handle.roll(is_forwarded=False))
        return await self.get(name)

    async def roll_here(self, name: str) -> None:
        """Roll for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        handle = self.ownership.handle(name)
        await self._done(handle, handle.roll(is_forwarded=True))

    async def publish(self, name: str, call: Publish) -> Transaction:
        """Put a transaction's ledgers onto the log, through whoever owns that (rule 28).

        Raises: LogFenced, LogClosed, InvalidRequest, and why the transaction can't be committed.
        """
        sizes = await sizes_of(call.ledgers, self._engine)
        handle = self.ownership.handle(name)
        try:
            return await self._done(handle, handle.publish(call, sizes, is_forwarded=False))
        except QuorumLogError as error:
            if error.outcome == UNKNOWN:
                # A repeat is told what became of it.
                raise error.replace(retryable=True) from error
            raise

    async def publish_here(self, name: str, call: Publish) -> Transaction:
        """Publish for another gateway. Raises: WriterLost, not done, when this is not the owner."""
        sizes = await sizes_of(call.ledgers, self._engine)
        handle = self.ownership.handle(name)
        return await self._done(handle, handle.publish(call, sizes, is_forwarded=True))

    async def _done(self, handle: LogHandle, future: asyncio.Future[T]) -> T:
        """What a request is answered in time."""
        try:
            async with asyncio.timeout(self.times.append_s):
                return await future
        except asyncio.CancelledError:
            handle.abandon(future)
            raise
        except TimeoutError as error:
            handle.abandon(future)
            detail = f"the log did not answer within {self.times.append_s:g} s"
            raise QuorumTimeout(detail, log=handle.name) from error

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
            handle = self.ownership.handle(name)
            return await self._done(handle, handle.append(call, is_forwarded=False))
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
        handle = self.ownership.handle(name)
        return await self._done(handle, handle.append(call, is_forwarded=True))

    async def drain(self) -> None:
        """Hand the logs that are owned here over to whoever comes next."""
        await self.ownership.drain()


def _wall_ms() -> int:
    """The clock of this machine."""
    return int(datetime.now(UTC).timestamp() * 1000)
