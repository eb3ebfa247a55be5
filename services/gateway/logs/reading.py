"""Reads a log by offset: finds the ledger and the entry, and detects the log's end.

A read sees all records that were acknowledged before it began, because it reads the log's metadata
first and the LAC afterwards. So each acknowledged record is in a ledger that the metadata names,
and that ledger's writer reports the LAC. Each read requests the LAC once, and reads the ledger up
to that LAC (`LedgerView`).

The end of a CLOSED ledger never changes, so reads within the ledger need no writer. One request per
RECENT_S checks that the ledger still exists, for all readers that continue in the log (rule 27b).
"""

import asyncio
import contextlib
import random
from functools import partial
from typing import Final

from quorumlog import errors
from quorumlog.protocol import batch
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView
from services.gateway.logs.offsets import damaged, find_entry, find_time, read_head
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import RECENT_S, LogRows
from services.gateway.logs.values import Last, LogBatches, Page, Since, Start

_ROW_POLL_S: Final = 0.2
"""Interval at which a read at the tail polls the metadata of a log without an open ledger."""

TRIES_MAX: Final = 5
"""Maximum retries of a read if the metadata names a deleted ledger. Races need fewer retries."""

_ASK_S: Final = 5.0
"""Time for which a reader repeats its request for the LAC of an owner that is alive."""


class _Resealed(Exception):
    """Raised if the log's open ledger was sealed, so that the caller reads the metadata again."""


class LogReader:
    """Reads of all logs at this gateway."""

    def __init__(self, engine: Engine, rows: LogRows, ownership: Ownership) -> None:
        """Keeps no state except cached metadata."""
        self._engine, self._reads, self._ownership = engine, engine.reads, ownership
        self.rows = rows
        self._index = ownership.index
        self._clock = asyncio.get_running_loop().time

    async def read(
        self,
        name: str,
        start: Start,
        *,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        wait_s: float = 0.0,
        created_at: str | None = None,
        row: LogMetadata | None = None,
        is_whole: bool = False,
    ) -> LogBatches:
        """Return records from `start` on, including all records acknowledged before the call.
        `created_at` identifies the log (None: the current log of the name). `row` is its metadata,
        read after the client's request arrived.

        Raises: NoSuchLog, LogReplaced, OffsetBeyondEnd, OffsetTruncated, EntryLost,
        EntryUnavailable and the engine's errors.
        """
        deadline = self._clock() + wait_s
        page = await self._begun(name, start, row, created_at, limit, max_bytes)
        page.is_whole = is_whole
        page.at, page.row = await self.begin(name, start, page.row, page)
        page.first = page.at
        await self._fill(page)
        if page.at == start:
            await self._check_within(page.row, start)
        while (
            not (page.count or page.is_cut or page.is_end)
            and (left_s := deadline - self._clock()) > 0
        ):
            with contextlib.suppress(errors.NoSuchLedger):  # the next metadata shows why
                await self._wait(page, left_s)
            await self._look(page)
            await self._fill(page)
        return page.done()

    async def full_page(
        self, row: LogMetadata, start: int, *, limit: int, max_bytes: int
    ) -> LogBatches | None:
        """Return a full page, read with metadata from the last RECENT_S; None if the page is not
        full (ADR 45).

        Raises: the errors of `read`. With fresh metadata the result may differ.
        """
        page = Page(row, limit, max_bytes, at=start, is_recent=True, now_ms=self.now_ms)
        await self._fill(page)
        return None if page.is_over or not page.is_large else page.done()

    async def _begun(
        self,
        name: str,
        start: Start,
        row: LogMetadata | None,
        created_at: str | None,
        limit: int,
        max_bytes: int,
    ) -> Page:
        """Return an empty page that has the log metadata with which a read begins. Raises:
        LogReplaced if fresh metadata belongs to another log than requested.
        """
        known = self.rows.known(name) if isinstance(start, int) and row is None else None
        if known is not None and created_at in (None, known.created_at):
            return Page(known, limit, max_bytes, created_at=created_at, now_ms=self.now_ms)
        asked_s = float("-inf") if row is not None else self._clock()
        row = row or await self.fresh(name, created_at)
        created_at = row.created_at
        now_ms = self.now_ms
        page = Page(row, limit, max_bytes, is_fresh=True, created_at=created_at, now_ms=now_ms)
        page.asked_s = asked_s
        return page

    @property
    def now_ms(self) -> int:
        """The database's time, if known, which decides which records have expired."""
        return self._ownership.now().sealed_ms()

    async def fresh(self, name: str, created_at: str | None) -> LogMetadata:
        """The log's metadata. Raises: NoSuchLog; LogReplaced if its creation time differs."""
        row = await self.rows.row(name)
        row.check_created(created_at)
        return row

    async def _look(self, page: Page) -> None:
        """Read the metadata again. If the log was replaced, a page with records of the older log
        ends, and the next page's read raises LogReplaced. A page that uses recent metadata also
        ends.

        Raises: LogReplaced for a page without records, if the read is for the replaced log.
        """
        if page.is_recent:
            page.is_cut = True
            return
        asked_s = self._clock()
        row = await self.rows.row(page.row.name)
        if page.count and row.created_at != page.row.created_at:
            page.is_cut = True
            return
        row.check_created(page.created_at)
        page.row, page.is_fresh, page.created_at, page.asked_s = row, True, row.created_at, asked_s

    async def _check_within(self, row: LogMetadata, start: int) -> None:
        """Raise OffsetBeyondEnd if `start` is beyond the log's end. `row` is fresh metadata."""
        item = row.item_at(start) or row.base
        is_border = item is not None and self._index.points(item.ledger_id).has(
            start - (item.first_offset or 0)  # this process knows that an entry begins or ends here
        )
        if start <= row.known_end or is_border:
            return
        end = await self.end(row.name, row)
        if start > end:
            end = max(end, await self.closed_end(row))
        if start > end:
            detail = f"offset {start} is beyond the log's end {end}"
            raise errors.OffsetBeyondEnd(detail, log=row.name, next_offset=end)

    async def closed_end(self, row: LogMetadata) -> int:
        """The log's end according to its last ledger, if this ledger is CLOSED and the log's
        metadata `row` lacks the end; otherwise 0.

        An owner that was displaced without noticing may report an earlier end than a client knows.
        So before a caller rejects an offset, it takes the greater of two ends: first the owner's
        end, which never decreases, and then this one (rule 27b).
        """
        item = row.base
        if item is None or item.last_offset is not None:
            return 0
        try:
            view = await self._reads.ended(item.ledger_id, is_fresh=True)
        except errors.NoSuchLedger:
            return 0
        if view.last_add_confirmed == NO_ENTRY:
            return 0
        head = await self._last_head(item, view)
        return (item.first_offset or 0) + head.records_after

    async def _last_head(self, item: LogItem, view: LedgerView) -> batch.BatchHead:
        """The head of the ledger's last confirmed entry, which must exist."""
        return await read_head(self._engine, item.ledger_id, view.last_add_confirmed, view)

    async def begin(
        self, name: str, start: Start, row: LogMetadata, page: Page | None = None
    ) -> tuple[int, LogMetadata]:
        """Return the offset at which a read begins, and the metadata used to find it. If the open
        ledger was read, `page` keeps the ledger's view.
        """
        match start:
            case int():
                return start, row
            case "earliest":
                return row.first_offset, row
            case "latest":
                return await self.end(name, row, page), row
            case Last(count):
                return max(await self.end(name, row, page) - count, row.first_offset), row
            case Since(ms):
                return await self._find(name, ms, row)

    async def _find(self, name: str, ms: int, row: LogMetadata) -> tuple[int, LogMetadata]:
        """The offset of the first record since `ms`, else the end. Raises: EntryUnavailable."""

        async def last_entry(item: LogItem) -> int:
            view = await self.view(name, item)
            if view is None:
                raise _Resealed
            return view.last_add_confirmed

        for _ in range(TRIES_MAX):
            try:
                at = await find_time(
                    row, ms, last_entry=last_entry, read_head=partial(read_head, self._engine)
                )
            except _Resealed:
                pass  # the writer was gone, and its ledger was sealed
            except errors.NoSuchLedger as error:
                if error.members.get("deleted") is False:
                    item = row.item_of(error.ledger_id or NO_ENTRY)
                    at = row.first_offset if item is None else item.first_offset or 0
                    raise _without_row(name, error.ledger_id, at) from error
            else:
                return at, row
            row = await self.fresh(name, row.created_at)
        raise unstable(name)

    async def view(self, name: str, item: LogItem, page: Page | None = None) -> LedgerView | None:
        """The ledger with its acknowledged end; None if the log's metadata must be read again.
        `page` has the metadata of the read; None means fresh metadata.

        If the page's metadata is not fresh, a CLOSED ledger may have been deleted since, so the
        ledger's metadata is read again. Reads that name the log's creation time reuse the answer
        for RECENT_S.
        """
        if item.last_offset is None:
            news = None if page is None else page.news
            if news is not None and news.row.ledger_id == item.ledger_id:
                return news
            return await self._confirmed(name, item)
        if page is None:
            return await self._reads.ended(item.ledger_id, is_fresh=False)
        points, now_s = self._index.points(item.ledger_id), self._clock()
        points.named_s = max(points.named_s, page.asked_s)
        is_named = page.created_at is not None and now_s - points.named_s <= RECENT_S
        is_asked = not (page.is_fresh or page.is_recent or is_named)
        view = await self._reads.ended(item.ledger_id, is_fresh=is_asked)
        if is_asked:
            points.named_s = now_s
        return view

    async def end(self, name: str, row: LogMetadata | None = None, page: Page | None = None) -> int:
        """The offset after the last acknowledged record. `row` was read for this request."""
        return (await self.tail(name, row, page=page))[0]

    async def tail(
        self,
        name: str,
        row: LogMetadata | None = None,
        *,
        created_at: str | None = None,
        page: Page | None = None,
    ) -> tuple[int, bool]:
        """The log's end, and whether the log is closed there. Raises: NoSuchLog; LogReplaced if the
        name belongs to another log than `row` or `created_at`.
        """
        row = row or await self.fresh(name, created_at)
        for _ in range(TRIES_MAX):
            found = await self.ended_at(row, page)
            if found is not None:
                return found
            row = await self.fresh(name, row.created_at)
        raise unstable(name)

    async def last_batch(self, row: LogMetadata) -> batch.BatchHead | None:
        """The head of a CLOSED log's last batch; None if its own last ledger has no batch."""
        item = row.last_item
        if item is None or row.is_shared(item):
            return None
        view = await self._reads.ended(item.ledger_id, is_fresh=False)
        return None if view.last_add_confirmed == NO_ENTRY else await self._last_head(item, view)

    async def ended_at(self, row: LogMetadata, page: Page | None = None) -> tuple[int, bool] | None:
        """The log's end according to `row`, and whether the log is closed there; None if `row` is
        out of date.
        """
        name = row.name
        if row.end_offset is not None:
            return row.end_offset, row.state is LogState.CLOSED
        item = row.base
        # The first ledger has no start yet, or a roll is between its two steps. No entry of the new
        # ledger is acknowledged yet.
        if item is None:
            return row.known_end, False
        if item.last_offset is not None:
            return item.last_offset + 1, False
        assert item.first_offset is not None
        try:
            confirmed = await self._confirmed(name, item)
            if confirmed is None:
                return None
            is_empty = confirmed.last_add_confirmed == NO_ENTRY
            head = None if is_empty else await self._last_head(item, confirmed)
            if page is not None:
                page.news = confirmed
            if head is None:
                return item.first_offset, False
        except errors.NoSuchLedger as error:
            if error.members.get("deleted") is False:
                raise _without_row(name, item.ledger_id, item.first_offset) from error
            return None  # the log was taken over and truncated, or deleted
        return item.first_offset + head.records_after, head.is_end

    async def _fill(self, page: Page) -> None:
        """Gather records until the page is full or fresh metadata shows the log's end. With recent
        metadata, stop where fresh metadata would be needed.
        """
        tries = 0
        while not page.is_full:
            row, before = page.row, page.at
            item = row.item_at(before)
            is_sealed = item is not None and item.last_offset is not None
            is_known = is_sealed or (item is not None and page.is_recent)
            if not page.is_fresh and (before < row.first_offset or not is_known):
                await self._look(page)
                continue
            if before < row.first_offset:
                raise errors.OffsetTruncated(
                    f"offset {before} was dropped: the log begins at offset {row.first_offset}",
                    log=row.name,
                    first_offset=row.first_offset,
                )
            if item is None:
                return
            try:
                is_through = await self._fill_from(item, page)
            except errors.NoSuchLedger as error:
                # The ledger was truncated, or the log was deleted, since the metadata was read.
                tries += 1
                if page.count:
                    page.is_cut = True
                    return
                if error.members.get("deleted") is False:
                    raise _without_row(row.name, item.ledger_id, page.at) from error
                if tries > TRIES_MAX:
                    raise unstable(row.name) from None
                is_through = False
            is_last = not is_sealed or (page.at == before and page.is_fresh)
            if is_through and is_last:
                return
            if not is_through or page.at == before:
                await self._look(page)

    async def _fill_from(self, item: LogItem, page: Page) -> bool:
        """Gather records of one ledger; False if the log's metadata must be read again."""
        page.stop = None if item.last_offset is None else item.last_offset + 1
        view = page.view = await self.view(page.row.name, item, page)
        page.news = None
        if view is None:
            return False
        last = view.last_add_confirmed
        if last == NO_ENTRY:
            return True
        entry_id = await self.entry_at(item, page.at, view)
        while entry_id is not None and entry_id <= last and not page.is_full:
            if page.is_through:
                break
            if page.is_large:
                page.is_cut = True
                break
            try:
                entry_id = await self._take(item, entry_id, view, page)
            except errors.EntryLost as error:
                if await self._is_lost(item, error, page):
                    return True
                entry_id = error.members["next"]
            except errors.EntryUnavailable as error:
                _cut(page, error)
                return True
        return True

    async def _take(self, item: LogItem, entry_id: int, view: LedgerView, page: Page) -> int:
        """Gather records by one read of bookies. Returns the next id. Raises the engine's errors."""
        points, first = self._index.points(item.ledger_id), item.first_offset or 0
        if page.stop is not None and not points.density:
            points.density = max(page.stop - first, 1) / (view.last_add_confirmed + 1)
        wanted = points.entries_of(page.at - first, page.limit - page.count)
        found = await self._reads.read(
            item.ledger_id,
            entry_id,
            view=view,
            limit=min(wanted, 10_000),
            max_bytes=page.stored_bytes_left,
        )
        if found.next <= entry_id:
            detail = f"bookies did not return the confirmed entry {entry_id}: retry"
            raise errors.EntryUnavailable(detail, ledger_id=item.ledger_id, entry_id=entry_id)
        records = entries = 0
        for run in found.runs:
            for at, payload in zip(run.ids, run.payloads(), strict=True):
                if page.is_full or page.is_through:
                    break
                try:
                    batch_found = page.take(item, at, payload)
                except batch.BadBatch as error:
                    raise damaged(error, item.ledger_id, at) from error
                records, entries = records + batch_found.count, entries + 1
                after = batch_found.head.records_after
                if page.at == first + after:
                    points.add(after, at + 1)
        if entries:
            points.density = max(records, 1) / entries
        return found.next

    async def _is_lost(self, item: LogItem, error: errors.EntryLost, page: Page) -> bool:
        """Whether the page's next record is lost; False if it comes after the lost entries.

        Raises: EntryLost if the page is empty, with the offset at which to continue.
        """
        assert error.entry_id is not None
        hole = await read_head(self._engine, item.ledger_id, error.entry_id)
        following = (item.first_offset or 0) + hole.records_after
        if item.last_offset is not None:
            following = min(following, item.last_offset + 1)
        if page.at >= following:
            return False
        if not page.count:
            raise errors.EntryLost(
                f"offsets {page.at} to {following - 1} are lost: continue at offset {following}",
                ledger_id=item.ledger_id,
                entry_id=error.entry_id,
                log=page.row.name,
                next=error.members["next"],
                next_offset=following,
            ) from error
        return True

    async def _confirmed(self, name: str, item: LogItem) -> LedgerView | None:
        """The LAC of a ledger without a known end, from its writer or its CLOSED metadata. Returns
        None if the writer was gone and the ledger was sealed instead.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + _ASK_S
        while True:
            confirmed = await self._reads.last_add_confirmed(item.ledger_id)
            if confirmed.lac_source != "bookies" or confirmed.closed:
                return confirmed
            # A read must not depend on a later append to make another gateway the owner.
            if await self._ownership.handle(name).heal(item.ledger_id):
                return None
            # The writer is alive: the request was lost, or the writer is recovering the ledger.
            if loop.time() > end:
                raise errors.EntryUnavailable("the log's owner reports no LAC: retry", log=name)
            await _pause(end - loop.time())

    async def _wait(self, page: Page, left_s: float) -> None:
        """Wait until there may be more records than this read has seen."""
        row, view = page.row, page.view
        item = row.item_at(page.at)
        is_written = item is not None and item.last_offset is None and row.base is row.last_item
        if item is None or not is_written or view is None or view.row.ledger_id != item.ledger_id:
            await _pause(left_s)
            return
        after = view.last_add_confirmed
        news = await self._reads.last_add_confirmed(
            item.ledger_id, after=after, wait_s=left_s, view=view
        )
        if news.closed or news.last_add_confirmed <= after:
            # The ledger is closed and the metadata names no next ledger, or the writer is gone.
            await _pause(left_s)
        elif news.lac_source == "writer":
            page.news = news

    async def entry_at(self, item: LogItem, offset: int, view: LedgerView) -> int | None:
        """The ledger's entry that contains `offset`; None if the offset is not confirmed."""
        assert item.first_offset is not None
        return await find_entry(
            self._index.points(item.ledger_id),
            offset - item.first_offset,
            last_entry=view.last_add_confirmed,
            read_head=partial(read_head, self._engine, item.ledger_id, view=view),
        )


def _cut(page: Page, error: errors.EntryUnavailable) -> None:
    """End a page before a record that can't be read now.

    Raises: EntryUnavailable if the page is empty.
    """
    if not page.count:
        raise errors.EntryUnavailable(
            f"records from offset {page.at} on can't be read now: {error.detail}",
            ledger_id=error.ledger_id,
            entry_id=error.entry_id,
            bookie=error.bookie,
            log=page.row.name,
            offset=page.at,
            **error.members,
        ) from error
    page.is_cut = True


def _without_row(name: str, ledger_id: int | None, at: int) -> errors.EntryUnavailable:
    """The error for a ledger whose metadata is missing although it was not deleted (rule 18f)."""
    return errors.EntryUnavailable(
        f"records from offset {at} on can't be read now: the database lacks the metadata of ledger"
        f" {ledger_id}. Wait until a rebuild has restored this metadata from bookies",
        ledger_id=ledger_id,
        log=name,
        offset=at,
    )


def unstable(name: str) -> errors.EntryUnavailable:
    """The error for a log whose metadata changed at every try."""
    return errors.EntryUnavailable("the log's metadata changed at every try: retry", log=name)


async def _pause(left_s: float) -> None:
    await asyncio.sleep(min(max(left_s, 0), _ROW_POLL_S * random.uniform(0.5, 1.0)))  # noqa: S311
