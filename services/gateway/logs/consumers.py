"""Serves clients' requests for consumers of logs: committed offsets, leases and lag."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from quorumlog import errors
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata
from quorumlog.protocol.positions import (
    Acquire,
    Answer,
    Commit,
    Delete,
    Look,
    Position,
    Release,
    Renew,
    Reset,
)
from quorumlog.protocol.rows import Stamp
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView
from services.gateway.logs.handle import resolve
from services.gateway.logs.offsets import read_head, read_sized_head
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.positions import PositionService
from services.gateway.logs.reading import LogReader
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.values import Start

_ROW_S: Final = 2.0
"""Maximum age of log metadata for a commit. The cache saves one read in Postgres per commit."""
_ROWS_MAX: Final = 10_000
_SCANNED: Final = 2000
"""Maximum consumers listed per request to the owner of their offsets (by judgement). The owner scans
all consumers for each request, so small pages would make sparse lists expensive."""
_AT_ONCE: Final = 16
"""Maximum consumers of a page whose lag is computed concurrently."""

StateOf = Literal["ok", "log-replaced", "offset-truncated"]


@dataclass(frozen=True, slots=True)
class Lag:
    """The amount of data that a consumer has not processed. A field is None if unknown."""

    records: int
    bytes: int | None
    ms: int | None
    """The age of the first unprocessed record."""


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """A consumer as clients see it. `lag` is None if the consumer belongs to a deleted log."""

    position: Position
    state: StateOf
    lag: Lag | None


@dataclass(slots=True)
class _Known:
    row: LogMetadata
    read_s: float
    end: int


class Consumers:
    """Serves requests for consumers of all logs at this gateway."""

    def __init__(
        self,
        engine: Engine,
        store: MetadataLogs,
        ownership: Ownership,
        reader: LogReader,
        positions: PositionService,
    ) -> None:
        """Create the service with an empty cache of log metadata."""
        self._engine, self._store, self._ownership = engine, store, ownership
        self._reader, self.positions = reader, positions
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._loop = asyncio.get_running_loop()

    async def look(self, name: str, consumer: str) -> ConsumerView:
        """Return one consumer with its lag. Raises: NoSuchLog, NoSuchConsumer."""
        row = await self._reader.rows.row(name)
        position: Position = await self.positions.ask(Look(name, consumer))
        return await self._view(position, row, await self.end(row))

    async def page(
        self, name: str, *, after: str, limit: int, prefix: str = ""
    ) -> tuple[Sequence[ConsumerView], str | None]:
        """Return a log's consumers with names that begin with `prefix`, and the next page's `after`.

        Raises: NoSuchLog.
        """
        row = await self._reader.rows.row(name)
        first = max(after, _before(prefix))
        found = [
            position
            for position in await self.positions.page(name, after=first, limit=limit + 1)
            if position.consumer.startswith(prefix)
        ]
        end, room = await self.end(row), asyncio.Semaphore(_AT_ONCE)

        async def view(position: Position) -> ConsumerView:
            async with room:
                return await self._view(position, row, end)

        shown = found[:limit]
        views = await asyncio.gather(*map(view, shown))
        return views, shown[-1].consumer if len(found) > limit else None

    async def page_of_all(
        self, log: str, *, prefix: str, after: str, limit: int, is_shown: Callable[[str], bool]
    ) -> tuple[Sequence[Position], str | None]:
        """Return consumers sorted by log and name, and the next page's `after`. The consumers
        belong to one log, even a deleted log, or to all logs if `log` is empty. `prefix` filters
        the names of consumers, and `is_shown` filters the logs.
        """
        found: list[Position] = []
        while len(found) <= limit:
            rows = await self.positions.page(
                log, after=after.partition("/")[2] if log else after, limit=_SCANNED
            )
            found += (row for row in rows if row.consumer.startswith(prefix) and is_shown(row.log))
            if len(rows) < _SCANNED:
                break
            after = "/".join(rows[-1].key)
        shown = found[:limit]
        return shown, "/".join(shown[-1].key) if len(found) > limit else None

    async def commit(
        self,
        name: str,
        consumer: str,
        offset: int,
        *,
        token: int | None,
        version: int | None,
        is_new: bool,
        stamp: Stamp | None = None,
        caller: str = "",
    ) -> Position:
        """Advance a committed offset. Raises: NoSuchLog, NoSuchConsumer, InvalidRequest beyond the
        log's end, and the owner's errors.
        """
        # A commit without a token is decided only once (rule 32), so stale metadata must not
        # cause a rejection.
        row = await self._row_up_to(name, offset, is_fresh=token is None)
        asked = Commit(name, consumer, row.created_at, offset, token, version, is_new, caller)
        try:
            done: Position = await self.positions.ask(asked, row, stamp)
            return done
        except errors.LogReplaced:
            if token is None or not await self._is_replaced(row):
                raise
        row = await self._row_up_to(name, offset)
        again: Position = await self.positions.ask(replace(asked, created=row.created_at))
        return again

    def commit_at_hand(
        self, name: str, consumer: str, offset: int, token: int
    ) -> Callable[[], asyncio.Future[Position]] | None:
        """Return a function that begins a commit with a token and returns a future of its result.
        Returns None unless everything that the commit needs is in memory.
        """
        known = self._known.get(name)
        now_s = self._loop.time()
        if known is None or now_s - known.read_s > _ROW_S or not self.positions.is_here:
            return None
        if offset > known.end:
            owner = self._ownership.owner(name)
            if owner is None or not owner.is_mine(known.row):
                return None
            known.end = max(known.end, owner.acknowledged_offset)
            if offset > known.end:
                return None
        asked = Commit(name, consumer, known.row.created_at, offset, token)

        def begin() -> asyncio.Future[Position]:
            answer: asyncio.Future[Position] = self._loop.create_future()
            self.positions.submit(asked).add_done_callback(partial(self._committed, asked, answer))
            return answer

        return begin

    def _committed(
        self, asked: Commit, answer: asyncio.Future[Position], done: asyncio.Future[Answer]
    ) -> None:
        error = done.exception()
        if isinstance(error, errors.LogReplaced | errors.NoSuchLog):
            # The cached metadata may be stale, so the regular path reads new metadata.
            again = self.commit(
                asked.log,
                asked.consumer,
                asked.offset,
                token=asked.token,
                version=None,
                is_new=False,
            )
            _ = self._ownership.task(_resolved(again, answer))
        else:
            resolve(answer, done.result() if error is None else error)

    async def acquire(
        self,
        name: str,
        consumer: str,
        *,
        holder: str,
        lease_ms: int,
        start: Start,
        stamp: Stamp | None = None,
        caller: str = "",
        started: int = 0,
    ) -> Position:
        """Acquire the lease. A consumer without a committed offset begins at `start`."""
        row = await self._reader.rows.row(name)
        offset = await self.offset(row, start)
        asked = Acquire(
            name,
            consumer,
            row.created_at,
            holder,
            lease_ms,
            offset,
            first_offset=row.first_offset,
            caller=caller,
            started=started,
        )
        done: Position = await self.positions.ask(asked, row, stamp)
        return done

    async def renew(self, name: str, consumer: str, token: int) -> Position:
        """Extend the lease to its full length from now."""
        row = (await self.recent(name)).row
        asked = Renew(name, consumer, row.created_at, token)
        try:
            done: Position = await self.positions.ask(asked)
            return done
        except errors.LogReplaced:
            if not await self._is_replaced(row):
                raise
        row = (await self.recent(name)).row
        again: Position = await self.positions.ask(replace(asked, created=row.created_at))
        return again

    async def release(
        self, name: str, consumer: str, token: int, stamp: Stamp | None = None
    ) -> None:
        """Release the lease."""
        await self.positions.ask(Release(name, consumer, token), stamp=stamp)

    async def reset(
        self,
        name: str,
        consumer: str,
        start: Start,
        version: int | None,
        stamp: Stamp | None = None,
    ) -> ConsumerView:
        """Set the committed offset to `start`, forwards or backwards."""
        row = await self._reader.rows.row(name)
        offset = await self.offset(row, start)
        check_within(row, offset, "/to")
        # The end is read first, because an error after the reset would report that nothing was done.
        end = max(offset, await self.end(row))
        asked = Reset(name, consumer, row.created_at, offset, version)
        position: Position = await self.positions.ask(asked, stamp=stamp)
        return await self._view(position, row, end)

    async def delete(
        self, name: str, consumer: str, version: int | None, stamp: Stamp | None = None
    ) -> None:
        """Delete the consumer, even if its log was deleted. Raises: LeaseHeld."""
        try:
            await self.positions.ask(Delete(name, consumer, version), stamp=stamp)
        except errors.NoSuchConsumer:
            await self._reader.rows.row(name)  # raises NoSuchLog if there is no log
            raise

    # --- the log ---------------------------------------------------------------------------------

    async def recent(self, name: str, *, is_fresh: bool = False) -> _Known:
        """Return the log's metadata and end, cached for `_ROW_S`. `is_fresh`: read the metadata
        again, unless the metadata service is unavailable.
        """
        now_s = self._loop.time()
        known = self._known.get(name)
        if known is not None and now_s - known.read_s <= _ROW_S and not is_fresh:
            return known
        if known is not None:
            known.read_s = now_s  # so concurrent callers use the cached value
        try:
            row = await self._reader.rows.row(name)
        except errors.MetadataUnavailable:
            if known is None:
                raise
            return known  # commits continue while metadata is unavailable, as appends do
        end = known.end if known and known.row.created_at == row.created_at else 0
        return self._cached(row, now_s, end)

    def _cached(self, row: LogMetadata, read_s: float, end: int) -> _Known:
        """Cache new metadata in a new object, because a pending request may still raise the end in
        the old object, which belongs to the old metadata.
        """
        known = self._known[row.name] = _Known(row, read_s, end)
        self._known.move_to_end(row.name)
        if len(self._known) > _ROWS_MAX:
            self._known.popitem(last=False)
        return known

    async def _is_replaced(self, row: LogMetadata) -> bool:
        """Whether the log was created again since `row` was read, so that `row` is stale."""
        self._known.pop(row.name, None)
        return (await self.recent(row.name)).row.created_at != row.created_at

    async def _row_up_to(self, name: str, offset: int, *, is_fresh: bool = False) -> LogMetadata:
        """Return the log's metadata. Raises: InvalidRequest if `offset` is beyond the log's end."""
        known = await self.recent(name, is_fresh=is_fresh)
        if offset > known.end:
            with contextlib.suppress(errors.LogReplaced):  # the cached metadata is stale
                known.end = max(known.end, await self.end(known.row))
        if offset > known.end:
            row = await self._reader.rows.row(name)
            known = self._cached(row, self._loop.time(), await self._end_for(row, offset))
        if offset > known.end:
            raise _out_of(known.row, "/offset", f"offset must be at most the log's end {known.end}")
        return known.row

    async def end(self, row: LogMetadata) -> int:
        """The log's acknowledged end, according to the log's owner."""
        owner = self._ownership.owner(row.name)
        if owner is not None and owner.is_mine(row):
            return owner.acknowledged_offset
        return await self._reader.end(row.name, row)

    async def _end_for(self, row: LogMetadata, offset: int) -> int:
        """The log's end; an end below `offset` is proven (rule 27b). `row` is fresh metadata."""
        end = await self.end(row)
        return end if offset <= end else max(end, await self._reader.closed_end(row))

    async def offset(self, row: LogMetadata, start: Start) -> int:
        """Return the offset of `start`. Raises: InvalidRequest beyond the log's end."""
        if start == "earliest":
            return row.first_offset
        if start == "latest":
            return await self.end(row)
        if not isinstance(start, int):
            return (await self._reader.begin(row.name, start, row))[0]
        if start > (end := await self._end_for(row, start)):
            raise _out_of(row, "/to", f"offset must be at most the log's end {end} (got {start})")
        return start

    # --- the lag ---------------------------------------------------------------------------------

    async def _view(self, position: Position, row: LogMetadata, end: int) -> ConsumerView:
        if position.created != row.created_at:
            return ConsumerView(position, "log-replaced", None)
        state: StateOf = "offset-truncated" if position.offset < row.first_offset else "ok"
        at = max(position.offset, row.first_offset)
        if at >= end:
            return ConsumerView(position, state, Lag(0, 0, 0))
        lag = Lag(end - at, None, None)
        try:
            size, ms = await self._beyond(row, at)
        except errors.QuorumLogError:
            return ConsumerView(position, state, lag)
        return ConsumerView(position, state, replace(lag, bytes=size, ms=ms))

    async def appended_ms(self, row: LogMetadata, at: int) -> int | None:
        """The append time of the record at an offset, or None if no ledger has the record."""
        found = await self._entry(row, at)
        return None if found is None else await self._came_ms(*found)

    async def _entry(self, row: LogMetadata, at: int) -> tuple[LogItem, LedgerView, int] | None:
        """Return the ledger and the entry that contain an offset."""
        item = row.item_at(at)
        if item is None:
            return None
        view = await self._seen(item)
        entry_id = await self._reader.entry_at(item, at, view)
        return None if entry_id is None else (item, view, entry_id)

    async def _came_ms(self, item: LogItem, view: LedgerView, entry_id: int) -> int:
        """The time at which an entry was appended, or its ledger was published (rule 26b)."""
        if item.published_ms:
            return item.published_ms
        return (await read_head(self._engine, item.ledger_id, entry_id, view)).append_time_ms

    async def _beyond(self, row: LogMetadata, at: int) -> tuple[int | None, int | None]:
        """Return the bytes of the entries from `at` on, and the age in ms of the first entry."""
        found = await self._entry(row, at)
        if found is None:
            return None, None
        item, view, entry_id = found
        came_ms = await self._came_ms(item, view, entry_id)
        size = -(await self._size(view, entry_id - 1))
        for each in row.items[row.items.index(item) :]:
            if each.last_offset is not None:
                size += each.bytes
                continue
            view = await self._seen(each)
            size += await self._size(view, view.last_add_confirmed)
        now_ms = self._store.database_ms()
        return size, None if now_ms is None else max(0, now_ms - came_ms)

    async def _size(self, view: LedgerView, last: int) -> int:
        """The bytes of a ledger's entries up to and including the entry `last`."""
        if last == NO_ENTRY:
            return 0
        return (await read_sized_head(self._engine, view.row.ledger_id, last, view))[1]

    async def _seen(self, item: LogItem) -> LedgerView:
        """Return a view of an item's ledger, up to the ledger's acknowledged end."""
        if item.last_offset is None:
            return await self._engine.reads.last_add_confirmed(item.ledger_id)
        return await self._engine.reads.ended(item.ledger_id, is_fresh=False)


def _before(prefix: str) -> str:
    """Return a string that sorts directly before all names that begin with `prefix`. Names contain
    no `~`, which sorts after all their characters.
    """
    return prefix[:-1] + chr(ord(prefix[-1]) - 1) + "~" if prefix else ""


async def _resolved(asked: Awaitable[Position], answer: asyncio.Future[Position]) -> None:
    """Resolve `answer` with the result of `asked`."""
    try:
        resolve(answer, await asked)
    except errors.QuorumLogError as error:
        resolve(answer, error)


def check_within(row: LogMetadata, offset: int, pointer: str) -> None:
    """Raise InvalidRequest if the offset is below the log's beginning."""
    if offset < row.first_offset:
        raise _out_of(row, pointer, f"offset must be at least {row.first_offset} (got {offset})")


def _out_of(row: LogMetadata, pointer: str, detail: str) -> errors.InvalidRequest:
    found = [{"pointer": pointer, "detail": detail}]
    return errors.InvalidRequest(f"{pointer}: {detail}", log=row.name, errors=found)
