"""Reads the LAC and the entries of any ledger, and proves that entries do not exist.

The LAC comes from the writer, in this process or over HTTP. If the writer can't be reached, a
covering set of bookies determines the LAC. Cached metadata may be stale, so a negative answer
requires a read from the primary (rule 5).
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from quorumlog import errors
from quorumlog.net.driver import Driver, Reported, error_of
from quorumlog.net.ports import BookiesPort, Ports
from quorumlog.protocol.ends import LacByCoverage
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Begin, EntriesRead, Failed, Status
from quorumlog.protocol.metadata import LedgerMetadata, Writer
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Run
from services.gateway.engine.handle import WriteHandle
from services.gateway.engine.handles import NOT_THE_WRITER, Handles
from services.gateway.engine.peers import Peers
from services.gateway.engine.rows import is_closed
from services.gateway.engine.tails import Tails
from services.gateway.interface import LedgerView, ReadResult

log = logging.getLogger(__name__)

_SLACK_BYTES: Final = 64 << 10
"""Bytes added to the payload limit of a read, for columns and digests of many small entries."""
_AHEAD_MAX: Final = 8
"""Maximum number of pages that are read ahead and not yet requested (chosen by judgement)."""
_AHEAD_BYTES: Final = 1 << 20
"""Larger pages are not read ahead. The edge reads a large page in parts of this size anyway."""
_AHEAD_S: Final = 5.0
"""A page that was read ahead may be dropped after this time (chosen by judgement)."""
_FOLLOWING_MAX: Final = 1000
"""Maximum number of expected next pages, one for each recent reader."""


class _Page(NamedTuple):
    """The parameters of a read. The ledger key tells apart two ledgers with one id (rule 17): a
    caller may choose a deleted ledger's id again if the database loses the tombstone.
    """

    ledger_id: int
    ledger_key: bytes
    first: int
    limit: int
    max_bytes: int


class LedgerReads:
    """The reads of one gateway. Invariant: metadata returned with an LAC is at least as new as the
    LAC, so it names the current bookies of all entries up to the LAC.
    """

    def __init__(self, handles: Handles, peers: Peers) -> None:
        """`handles`: the ledgers that this process writes; `peers`: the other gateways."""
        self._handles, self._peers = handles, peers
        self._rows, self._ends, self._ports = handles.rows, handles.ends, handles.ports
        self._gatekeeper = handles.gatekeeper
        self._following: OrderedDict[_Page, None] = OrderedDict()
        """The expected next read of each reader."""
        self._ahead: dict[_Page, tuple[float, asyncio.Future[list[Run]]]] = {}
        """The reads that were started ahead of a request, each with its start time."""
        self.tails = Tails(self._poll_lac, self._ports.tasks)

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        password: str | None = None,
        view: LedgerView | None = None,
    ) -> ReadResult:
        """Reads confirmed entries first..last: at most `limit` and about `max_bytes` of payload,
        but at least one entry. All entries acknowledged before the call are readable. Beyond the
        end the result is empty, and `next` is `first`. A read stops before lost entries (rule 31).
        A read that begins at a lost entry raises EntryLost, whose `next` is the first entry after
        the loss. `view`: the ledger's view, if known.

        Raises: EntryLost, EntryUnavailable, NoSuchLedger.
        """
        view = view or await self._view(ledger_id)
        row = self._gatekeeper.check(view.row, password)
        end = min(view.last_add_confirmed, first + limit - 1)
        if last is not None:
            end = min(end, last)
        runs = []
        if first <= end:
            end = _end_before_lost(row, first, end)
            handle = self._handles.by_ledger.get(ledger_id)
            if handle is not None:
                runs = handle.recent(first, end, max_bytes)
            if not runs:
                page = _Page(ledger_id, row.ledger_key, first, limit, max_bytes)
                lac = view.last_add_confirmed
                runs = await self._page(page, row, end, lac if last is None else min(lac, last))
        return ReadResult(
            tuple(runs),
            runs[-1].last + 1 if runs else first,
            view.last_add_confirmed,
            view.closed,
            view.lac_source,
            row.last_entry if view.closed else None,
        )

    async def _page(self, page: _Page, row: LedgerMetadata, end: int, final: int) -> list[Run]:
        """Reads the entries of a page up to `end` from bookies. For a reader that requests
        consecutive pages, the next page is read ahead, up to the entry `final`.
        """
        is_in_order = self._following.pop(page, True) is None
        _, ahead = self._ahead.pop(page, (0.0, None))
        found = [] if ahead is None else await ahead
        runs = [run for run in found if run.last <= end]
        if not runs:
            runs = await read_range(self._ports, row, page.first, end, page.max_bytes)
        following = page._replace(first=runs[-1].last + 1)
        if following.first <= final and page.max_bytes <= _AHEAD_BYTES:
            self._following[following] = None
            if len(self._following) > _FOLLOWING_MAX:
                self._following.popitem(last=False)
            if is_in_order:
                self._read_ahead(following, row, final)
        return runs

    def _read_ahead(self, page: _Page, row: LedgerMetadata, final: int) -> None:
        """Reads a page ahead if there is room. If the read fails, the page's reader retries."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if len(self._ahead) >= _AHEAD_MAX:
            kept = self._ahead.items()
            self._ahead = {key: held for key, held in kept if now_s - held[0] < _AHEAD_S}
        if page in self._ahead or len(self._ahead) >= _AHEAD_MAX:
            return
        read: asyncio.Future[list[Run]] = loop.create_future()

        async def fetch() -> None:
            runs: list[Run] = []
            try:
                last = _end_before_lost(row, page.first, min(final, page.first + page.limit - 1))
                runs = await read_range(self._ports, row, page.first, last, page.max_bytes)
            except errors.QuorumLogError:
                log.debug("read-ahead-failed", extra={"ledger": page.ledger_id}, exc_info=True)
            finally:
                if not read.done():
                    read.set_result(runs)

        self._ahead[page] = now_s, read
        self._ports.tasks.start(fetch())

    async def entry(
        self, ledger_id: int, entry_id: int, *, password: str | None = None
    ) -> ReadResult:
        """Reads one entry (rule 5).

        Raises: NoSuchEntry, NotYetConfirmed, EntryLost, EntryUnavailable.
        """
        found = await self.read(ledger_id, entry_id, limit=1, password=password)
        if not found.runs:
            view = await self._view(ledger_id, is_strict=True)
            found = await self.read(ledger_id, entry_id, limit=1, password=password, view=view)
            if not found.runs:
                raise _absent(view, entry_id)
        return found

    async def last_add_confirmed(
        self,
        ledger_id: int,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
        password: str | None = None,
        view: LedgerView | None = None,
    ) -> LedgerView:
        """Returns the ledger's LAC. With `after`, first waits up to `wait_s` for an LAC above
        `after` or for the ledger's close. `view`: the ledger's current view, if already known.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            view = view or await self._view(ledger_id)
            self._gatekeeper.check(view.row, password)
            left_s = end - loop.time()
            if after is None or view.last_add_confirmed > after or view.closed or left_s <= 0:
                return view
            handle = self._handles.by_ledger.get(ledger_id)
            if handle is not None and handle.is_live:
                await handle.tails.wait(after, left_s)
            else:
                await self.tails.wait(ledger_id, after, left_s)
            view = None

    async def ended(self, ledger_id: int, *, is_fresh: bool) -> LedgerView:
        """Returns the view of a ledger that the caller knows to be CLOSED. Unless `is_fresh`, any
        cached CLOSED metadata is used, because the end never changes.

        Raises: NoSuchLedger, MetadataUnavailable, DatabaseWentBack.
        """
        row = None if is_fresh else self._rows.cached(ledger_id)
        if row is None or not is_closed(row):
            row = await self._rows.fresh(ledger_id)
        return _view_of_ended(await self._ends.reported(row))

    async def writers_lac(
        self, ledger_id: int, *, after: int | None, wait_s: float
    ) -> tuple[LedgerView, int]:
        """Returns the LAC of a ledger that this process writes, and the metadata's version.

        Raises: WriterLost if this process has no live handle and the ledger is not CLOSED.
        """
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is not None and handle.is_live:
            if after is not None and handle.last_add_confirmed <= after and wait_s > 0:
                await handle.tails.wait(after, wait_s)
            if handle.is_live:
                return _view_of_writer(handle), handle.row.version
        row = await self._rows.row(ledger_id)
        if not is_closed(row):
            row = await self._rows.fresh(ledger_id)
        if not is_closed(row):
            raise errors.WriterLost(NOT_THE_WRITER, ledger_id=ledger_id, outcome=errors.NOT_DONE)
        view = await self._ended(row)
        return view, view.row.version

    async def _view(self, ledger_id: int, *, is_strict: bool = False) -> LedgerView:
        """Returns the LAC, and metadata as new as it; `is_strict`: from the primary (rule 5)."""
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is not None and self._rows.cached(ledger_id) is None:
            self._rows.put(handle.row)  # so that a read needs no request to the metadata service
        row = await (self._rows.fresh(ledger_id) if is_strict else self._rows.row(ledger_id))
        if is_closed(row):
            return await self._ended(row)
        if handle is not None:
            if handle.is_live:
                return _view_of_writer(handle)
        elif row.writer is not None and row.writer.id != self._handles.writer.id:
            with contextlib.suppress(errors.WriterLost, errors.MetadataUnavailable):
                return await self._ask_writer(row.writer, row)
        if not is_strict:
            with contextlib.suppress(errors.MetadataUnavailable):
                row = await self._rows.fresh(ledger_id)
            if is_closed(row):
                return await self._ended(row)
        return await self._by_bookies(row)

    async def _ended(self, row: LedgerMetadata) -> LedgerView:
        """Returns the end of a CLOSED ledger. If the check that bookies keep the end fails, returns
        the LAC that bookies report instead of the end (rule 18b).
        """
        try:
            return _view_of_ended(await self._ends.reported(row))
        except (errors.MetadataUnavailable, errors.DatabaseWentBack):
            return await self._by_bookies(row)

    async def _by_bookies(self, row: LedgerMetadata) -> LedgerView:
        """Returns the LAC that a covering set of bookies reports. Raises: EntryUnavailable."""
        lac_by_bookies = await confirmed_by_bookies(row, self._ports.bookies)
        if lac_by_bookies is None:
            raise errors.EntryUnavailable(
                "neither the ledger's writer nor enough bookies reported the LAC: retry",
                ledger_id=row.ledger_id,
            )
        return LedgerView(row, lac_by_bookies, closed=False, lac_source="bookies")

    async def _ask_writer(
        self,
        writer: Writer,
        row: LedgerMetadata,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
    ) -> LedgerView:
        lac, closed, version = await self._peers.last_add_confirmed(
            writer, row.ledger_id, after=after, wait_s=wait_s
        )
        if closed or version > row.version:
            row = await self._rows.row(row.ledger_id, newer_than=version - 1)
        if is_closed(row):
            return await self._ended(row)
        return LedgerView(row, lac, closed=False, lac_source="writer")

    async def _poll_lac(self, ledger_id: int, after: int, wait_s: float) -> LedgerView:
        """Returns the LAC for `Tails`, by a long poll at the writer if it can be reached."""
        row = await self._rows.row(ledger_id)
        writer = row.writer
        if not is_closed(row) and writer is not None and writer.id != self._handles.writer.id:
            with contextlib.suppress(errors.WriterLost):
                return await self._ask_writer(writer, row, after=after, wait_s=wait_s)
        return await self._view(ledger_id)


async def confirmed_by_bookies(row: LedgerMetadata, bookies: BookiesPort) -> int | None:
    """Returns the highest LAC that a covering set of the last fragment's bookies reports (rules 5
    and 13); None if too few bookies answered. All entries below the last fragment are confirmed.
    """
    machine = LacByCoverage(row)
    end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def on_lac(position: int, status: Status, lac: int) -> None:
        machine.answered(position, status, lac)
        if machine.is_over and not end.done():
            end.set_result(machine.confirmed)

    for position, member in enumerate(row.last_fragment.bookies):
        bookies.read_lac(member, row.ledger_id, partial(on_lac, position))
    return await end


async def read_range(
    ports: Ports, row: LedgerMetadata, first: int, last: int, bytes_max: int
) -> list[Run]:
    """Reads contiguous entries from bookies: at least `first`, and about `bytes_max` of payload.

    Raises: EntryUnavailable for the entry `first`. If a later entry is unavailable, the list ends
    before it.
    """
    runs: list[Run] = []
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_outcome(news: Reported) -> None:
        if end.done():
            return
        if isinstance(news, EntriesRead):
            runs.append(news.run)
            if news.is_last:
                end.set_result(None)
        elif isinstance(news, Failed):
            if runs:
                end.set_result(None)
            else:
                end.set_exception(error_of(news, row.ledger_id))

    reader = RangeReader(
        row, first=first, last=last, max_bytes=max(bytes_max, 1), turn=row.ledger_id
    )
    asked_bytes = min(ports.read_bytes_max, bytes_max + _SLACK_BYTES)
    driver = Driver(reader, row.ledger_id, replace(ports, read_bytes_max=asked_bytes), on_outcome)
    try:
        driver.post(Begin())
        await end
    finally:
        driver.stop()
    return runs


def _view_of_writer(handle: WriteHandle) -> LedgerView:
    return LedgerView(handle.row, handle.last_add_confirmed, closed=False, lac_source="writer")


def _view_of_ended(row: LedgerMetadata) -> LedgerView:
    end = NO_ENTRY if row.last_entry is None else row.last_entry
    return LedgerView(row, end, closed=True, lac_source="metadata")


def _end_before_lost(row: LedgerMetadata, first: int, last: int) -> int:
    """Returns the last entry of first..last before any lost entry. Lost entries are never read from
    bookies, so the response doesn't change if a copy is found later. Raises: EntryLost.
    """
    lost = row.lost_at(first)
    if lost is not None:
        raise errors.EntryLost(
            f"entries {lost[0]} to {lost[1]} are lost: continue with entry {lost[1] + 1}",
            ledger_id=row.ledger_id,
            entry_id=first,
            next=lost[1] + 1,
        )
    return row.kept(first, last)[0][1]


def _absent(view: LedgerView, entry_id: int) -> errors.QuorumLogError:
    """The error for an unreadable entry: NoSuchEntry only if its absence is proven (rule 5)."""
    ledger_id = view.row.ledger_id
    is_beyond = entry_id > view.last_add_confirmed
    if view.closed and is_beyond:
        detail = f"the ledger is closed, and its last entry is {view.row.last_entry}"
        return errors.NoSuchEntry(detail, ledger_id=ledger_id, entry_id=entry_id)
    lac, source = view.last_add_confirmed, view.lac_source
    detail = f"the {source} reported {lac} as the last confirmed entry: retry later"
    if view.lac_source == "writer" and is_beyond:
        return errors.NotYetConfirmed(detail, ledger_id=ledger_id, entry_id=entry_id)
    return errors.EntryUnavailable(detail, ledger_id=ledger_id, entry_id=entry_id)
