"""Read a log by offset: which ledger, which entry, and when the end is the end.

What was acknowledged before a read began is seen by it: the row is read first and the LAC after
it. A record that was acknowledged before is then in a ledger that the row names, and its writer
says how far that ledger is confirmed. A ledger that is CLOSED and whose end the row knows never
changes again, so reads within it ask nobody.
"""

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from quorumlog.errors import EntryLost, EntryUnavailable, NoSuchLedger, OffsetTruncated
from quorumlog.protocol import batch
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from services.gateway.interface import Confirmation
from services.gateway.logs.ends import head_reader, read_head
from services.gateway.logs.offsets import OffsetIndex, find_entry
from services.gateway.logs.ports import (
    LogBatch,
    LogBatches,
    LogEngine,
    LogRead,
    LogRecord,
    LogStore,
)

Start = int | Literal["earliest", "latest"]

Heal = Callable[[str, int], Awaitable[bool]]
"""Take over a log whose last ledger's writer can't be reached; False when that lives after all."""

_ROW_POLL_S: Final = 0.2
"""While a log has no open ledger, a tail asks for its row so often."""

_ROWS_MAX: Final = 2000
"""Rows that are kept for reads of what never changes."""

_TRIES_MAX: Final = 5
"""Rows in turn that name a ledger that is gone: more is no race."""

_ASK_S: Final = 5.0
"""For how long a reader asks an owner that lives how far it is."""

_RECORD_BYTES: Final = 64
"""What a record counts for in `max_bytes` beside its bytes, so that empty ones end too."""


class _Page(ABC):
    """What a read has gathered: `count` records up to, not including, the offset `at`."""

    def __init__(self, at: int, limit: int, bytes_left: int) -> None:
        self.at, self.limit, self.bytes_left, self.count = at, limit, bytes_left, 0
        self.is_cut = False
        """Whether it ends before a record that can't be read now."""

    @property
    def is_full(self) -> bool:
        if self.is_cut:
            return True
        return self.count >= self.limit or (self.count > 0 and self.bytes_left <= 0)

    @abstractmethod
    def unpack(self, item: LogItem, entry_id: int, data: bytes) -> batch.BatchHead:
        """Take from an entry what follows `at`. Raises BadBatch."""


class _Records(_Page):
    """Record by record."""

    def __init__(self, at: int, limit: int, bytes_left: int) -> None:
        super().__init__(at, limit, bytes_left)
        self.records: list[LogRecord] = []

    def unpack(self, item: LogItem, entry_id: int, data: bytes) -> batch.BatchHead:
        """Decode the entry."""
        head, records = batch.decode(data)
        first = (item.first_offset or 0) + head.records_before
        for offset, record in enumerate(records, first):
            if offset == self.at and not self.is_full:
                own = record.timestamp_ms
                time = head.append_time_ms if own is None else own
                self.records.append(LogRecord(offset, time, record, item.ledger_id, entry_id))
                self.bytes_left -= record.size + _RECORD_BYTES
                self.count += 1
                self.at = offset + 1
        return head


class _Batches(_Page):
    """Entry by entry, for a form that takes their columns as they are."""

    def __init__(self, at: int, limit: int, bytes_left: int) -> None:
        super().__init__(at, limit, bytes_left)
        self.batches: list[LogBatch] = []

    def unpack(self, item: LogItem, entry_id: int, data: bytes) -> batch.BatchHead:
        """Keep the entry, of which the limit may cut the end."""
        head = batch.decode_head(data)
        first = (item.first_offset or 0) + head.records_before
        skip = self.at - first
        if 0 <= skip < head.count:
            count = min(head.count - skip, self.limit - self.count)
            self.batches.append(LogBatch(first, item.ledger_id, entry_id, data, skip, count))
            self.bytes_left -= len(data) * count // head.count
            self.count += count
            self.at += count
        return head


class LogReader:
    """Reads of all logs, in this process."""

    def __init__(
        self, *, engine: LogEngine, store: LogStore, index: OffsetIndex, heal: Heal
    ) -> None:
        self._engine, self._store, self._index, self._heal = engine, store, index, heal
        self._rows: dict[str, LogMetadata] = {}

    async def row(self, name: str) -> LogMetadata:
        """The row as it is now."""
        try:
            row = await self._store.get(name)
        except Exception:
            self._rows.pop(name, None)
            raise
        self._rows[name] = row
        if len(self._rows) > _ROWS_MAX:
            del self._rows[next(iter(self._rows))]
        return row

    async def read(
        self,
        name: str,
        start: Start,
        *,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        wait_s: float = 0.0,
    ) -> LogRead:
        """Records from `start` on. Sees all that was acknowledged before it began.

        Raises: NoSuchLog, OffsetTruncated, EntryLost, EntryUnavailable and what the engine raises.
        """
        page = _Records(0, limit, max_bytes)
        row, is_end = await self._gather(name, start, page, wait_s)
        return LogRead(tuple(page.records), page.at, row.first_offset, is_end)

    async def batches(
        self,
        name: str,
        start: Start,
        *,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        wait_s: float = 0.0,
    ) -> LogBatches:
        """The same as `read`, with the records as they are stored."""
        page = _Batches(0, limit, max_bytes)
        row, is_end = await self._gather(name, start, page, wait_s)
        return LogBatches(tuple(page.batches), page.at, row.first_offset, is_end)

    async def _gather(
        self, name: str, start: Start, page: _Page, wait_s: float
    ) -> tuple[LogMetadata, bool]:
        """Fill a page; gives the row that says so, and whether the log ends with the page."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        row = self._rows.get(name)
        is_fresh = row is None or not isinstance(start, int)
        if row is None or is_fresh:
            row = await self.row(name)
        if start == "earliest":
            page.at = row.first_offset
        else:
            page.at = await self.end(name, row) if start == "latest" else start
        while True:
            row = await self._fill(name, row, page, is_fresh=is_fresh)
            left_s = deadline - loop.time()
            is_end = row.state is LogState.CLOSED and page.at >= (row.end_offset or 0)
            if page.count or is_end or left_s <= 0:
                return row, is_end
            with contextlib.suppress(NoSuchLedger):  # the row that follows says what became of it
                await self._wait(row, page.at, left_s)
            row, is_fresh = await self.row(name), True

    async def end(self, name: str, row: LogMetadata | None = None) -> int:
        """The offset after the last acknowledged record. `row` was read after the question."""
        for _ in range(_TRIES_MAX):
            found = await self._end(name, row or await self.row(name))
            if found is not None:
                return found
            row = None
        raise _changes_always(name)

    async def _end(self, name: str, row: LogMetadata) -> int | None:
        """The end by this row; None when it was changed since."""
        if row.end_offset is not None:
            return row.end_offset
        item = row.base
        if item is None or item.last_offset is not None:
            # A first ledger without a start, or a roll between its two steps: nothing of the
            # new ledger is acknowledged yet.
            last = -1 if item is None else item.last_offset
            return (last if last is not None else -1) + 1
        assert item.first_offset is not None
        try:
            confirmed = await self._confirmed(name, item)
            if confirmed is None:
                return None
            if confirmed.last_add_confirmed == NO_ENTRY:
                return item.first_offset
            head = await head_reader(self._engine, item.ledger_id)(confirmed.last_add_confirmed)
        except NoSuchLedger:
            return None  # taken over and truncated, or the log was deleted
        return item.first_offset + head.records_after

    async def _fill(
        self, name: str, row: LogMetadata, page: _Page, *, is_fresh: bool
    ) -> LogMetadata:
        """Gather records until the page is full or the log's end; gives the row that said so.

        `is_fresh`: the row was read since the read began. One that is older may only say what
        never changes: where a sealed ledger's records are.
        """
        tries = 0
        while not page.is_full:
            item = row.item_at(page.at)
            is_sealed = item is not None and item.last_offset is not None
            if not is_fresh and (page.at < row.first_offset or not is_sealed):
                row, is_fresh = await self.row(name), True
                continue
            if page.at < row.first_offset:
                raise OffsetTruncated(
                    f"the log begins at {row.first_offset}",
                    log=name,
                    first_offset=row.first_offset,
                )
            if item is None:
                return row
            before = page.at
            try:
                is_known = await self._fill_from(name, item, page)
            except NoSuchLedger:
                # It was truncated away, or the log deleted, since the row was read.
                tries += 1
                if page.count:
                    return row
                if tries > _TRIES_MAX:
                    raise _changes_always(name) from None
                is_known = False
            if not is_known:
                row, is_fresh = await self.row(name), True
            elif page.at == before:
                return row
        return row

    async def _fill_from(self, name: str, item: LogItem, page: _Page) -> bool:
        """Gather from one ledger to its end or the page's; False when the row must be read again."""
        assert item.first_offset is not None
        if item.last_offset is None:
            confirmed = await self._confirmed(name, item)
            if confirmed is None:
                return False
            last = confirmed.last_add_confirmed
        else:
            closed = await self._engine.get(item.ledger_id)
            last = closed.last_entry if closed.last_entry is not None else NO_ENTRY
        if last == NO_ENTRY:
            return True
        points = self._index.points(item.ledger_id)
        entry_id = await find_entry(
            points,
            page.at - item.first_offset,
            last_entry=last,
            read_head=head_reader(self._engine, item.ledger_id),
        )
        while entry_id is not None and entry_id <= last and not page.is_full:
            try:
                entry_id = await self._take(item, entry_id, last, page)
            except EntryLost as error:
                if await self._is_lost(name, item, error, page):
                    return True
                entry_id = error.members["next"]
                continue
            except EntryUnavailable as error:
                _cut(name, page, error)
                return True
        return True

    async def _take(self, item: LogItem, entry_id: int, last: int, page: _Page) -> int:
        """Gather from some entries; gives the entry after them. Raises: what the engine raises."""
        found = await self._engine.read(
            item.ledger_id,
            entry_id,
            last=last,
            limit=min(page.limit - page.count, 10_000),
            max_bytes=max(page.bytes_left, 1),
        )
        if found.next <= entry_id:
            raise EntryUnavailable(
                "a confirmed batch was not found", ledger_id=item.ledger_id, entry_id=entry_id
            )
        for run in found.runs:
            for index, at in enumerate(run.ids):
                if not page.is_full:
                    self._unpack(item, at, bytes(run.payload(index)), page)
        return found.next

    async def _is_lost(self, name: str, item: LogItem, error: EntryLost, page: _Page) -> bool:
        """Whether what comes next in the page is lost; False where it comes after the lost entries.

        Raises: EntryLost where the page is empty, with the offset at which reading goes on.
        """
        assert error.entry_id is not None
        hole = await read_head(self._engine, item.ledger_id, error.entry_id)
        following = (item.first_offset or 0) + hole.records_after
        if item.last_offset is not None:
            following = min(following, item.last_offset + 1)
        if page.at >= following:
            return False
        if not page.count:
            raise EntryLost(
                f"records {page.at} to {following - 1} are lost",
                ledger_id=item.ledger_id,
                entry_id=error.entry_id,
                log=name,
                next=error.members["next"],
                next_offset=following,
            ) from error
        return True

    def _unpack(self, item: LogItem, entry_id: int, data: bytes, page: _Page) -> None:
        try:
            head = page.unpack(item, entry_id, data)
        except batch.BadBatch as error:
            raise EntryUnavailable(
                str(error), ledger_id=item.ledger_id, entry_id=entry_id
            ) from error
        first = (item.first_offset or 0) + head.records_before
        if page.at == first + head.count:
            self._index.points(item.ledger_id).add(head.records_after, entry_id + 1)

    async def _confirmed(self, name: str, item: LogItem) -> Confirmation | None:
        """The LAC of a ledger whose end the row does not know, from its writer or because it is
        closed; None when the log was taken over instead, since the writer is gone.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + _ASK_S
        while True:
            confirmed = await self._engine.last_add_confirmed(item.ledger_id)
            if confirmed.lac_source != "bookies" or confirmed.closed:
                return confirmed
            if await self._heal(name, item.ledger_id):
                return None
            # It lives: what it was asked got lost on the way, or it is recovering the ledger.
            if loop.time() > end:
                raise EntryUnavailable(
                    "the log's owner lives, but does not say how far it is", log=name
                )
            await _pause(end - loop.time())

    async def _wait(self, row: LogMetadata, at: int, left_s: float) -> None:
        """Return when there may be something at `at`."""
        item = row.item_at(at)
        if item is None or item.last_offset is not None or row.base is not row.last_item:
            await _pause(left_s)
            return
        confirmed = await self._engine.last_add_confirmed(item.ledger_id)
        points = self._index.points(item.ledger_id)
        assert item.first_offset is not None
        found = await find_entry(
            points,
            at - item.first_offset,
            last_entry=confirmed.last_add_confirmed,
            read_head=head_reader(self._engine, item.ledger_id),
        )
        if found is not None:
            return
        after = confirmed.last_add_confirmed
        again = await self._engine.last_add_confirmed(item.ledger_id, after=after, wait_s=left_s)
        if again.closed or again.last_add_confirmed <= after:
            # Closed, and the row does not say yet what follows; or the writer is gone.
            await _pause(left_s)


def _cut(name: str, page: _Page, error: EntryUnavailable) -> None:
    """End a page before what can't be read now: the records before it are given.

    Raises: EntryUnavailable where there are none.
    """
    if not page.count:
        raise EntryUnavailable(
            f"records from the offset {page.at} on can't be read now: {error.detail}",
            ledger_id=error.ledger_id,
            entry_id=error.entry_id,
            bookie=error.bookie,
            log=name,
            offset=page.at,
            **error.members,
        ) from error
    page.is_cut = True


def _changes_always(name: str) -> EntryUnavailable:
    return EntryUnavailable("the log changes all the time", log=name)


async def _pause(left_s: float) -> None:
    await asyncio.sleep(min(max(left_s, 0), _ROW_POLL_S * random.uniform(0.5, 1.0)))  # noqa: S311
