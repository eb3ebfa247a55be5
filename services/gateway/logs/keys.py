"""Finds the records of a key by the indexes of a log's sealed ledgers (rule 27e).

An index is only used if it proves that it belongs to its ledger. Otherwise the ledger's batches are
read, and the log drops the index, which is then built anew. To find the newest record of a key, a
ledger without an index is read from its end on; the hashes of its keys stay in memory.
"""

import asyncio
import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Final, Literal

from quorumlog import errors
from quorumlog.protocol import batch
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata
from quorumlog.protocol.log.keys import BadIndex, Bucket, KeyFound, bucket_of, hash_of, keys_of
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView
from services.gateway.logs.filters import Filter
from services.gateway.logs.offsets import damaged
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.reading import TRIES_MAX, LogReader, unstable
from services.gateway.logs.values import LogBatches, Page

log = logging.getLogger(__name__)

SCANNED_BYTES_MAX: Final = 16 << 20
"""Bytes of batches, uncompressed, and of indexes that one request for a key's newest record reads."""

BUCKET_BYTES_MAX: Final = 32 << 20
"""Bytes of buckets of indexes that are cached: chosen by judgement."""

SCANNED_KEYS_MAX: Final = 1 << 19
"""Keys of ledgers without an index that stay in memory: about 80 MiB."""

_SCANS_MAX: Final = 1000
"""Ledgers without an index of which keys stay in memory."""

_SCAN_BYTES: Final = 256 << 10
"""Bytes that are read at once."""

_DECODED_BYTES: Final = 64 << 10
"""Bytes, uncompressed, that are decoded before other tasks run."""

_AT_ONCE: Final = 8
"""Ledgers whose indexes are asked concurrently (chosen by judgement)."""

_LOOKUPS_MAX: Final = 64
"""Ledgers that one page passes. A read goes on to the next page."""

Change = Callable[[str, Callable[[LogMetadata], Awaitable[LogMetadata]]], Awaitable[object]]
"""Changes a log's metadata by compare-and-swap."""


@dataclass(slots=True)
class _Budget:
    """The bytes that a request may still read, and the ledgers that it has scanned."""

    left: int
    ledgers: set[int] = field(default_factory=set)


class _Scan:
    """For the entries `low` to `high` - 1 of a ledger: the last entry of each key, by its hash."""

    def __init__(self, end: int) -> None:
        self.low = self.high = end
        self.last: dict[int, int] = {}
        self.lock = asyncio.Lock()
        self.users = 0
        """Requests that use it now."""
        self.entries = 1
        """Entries that are about as large as one read."""


class KeyReader:
    """Reads by key at this gateway."""

    def __init__(
        self, engine: Engine, reader: LogReader, ownership: Ownership, change: Change
    ) -> None:
        """Starts with empty caches."""
        self._reads, self._reader, self._ownership = engine.reads, reader, ownership
        self._change = change
        self.lookups = self.skipped_bytes = self.damaged = 0
        """Uses of indexes, bytes of ledgers that these made it unnecessary to read, and indexes
        that could not be used."""
        self._buckets: OrderedDict[tuple[int, int, int], Bucket] = OrderedDict()
        """By index, number and the ledger about which the bucket is."""
        self._bucket_bytes = 0
        self._scans: OrderedDict[int, _Scan] = OrderedDict()
        self._scanned_keys = 0
        """Keys in these scans."""

    async def page(
        self,
        name: str,
        start: int | Literal["earliest"],
        key: bytes,
        *,
        created_at: str | None,
        limit: int,
        max_bytes: int,
    ) -> LogBatches | None:
        """The batches from an offset on that may have records of a key, as far as indexes tell.
        None if the next record must be read without an index.

        Raises: NoSuchLog, LogReplaced.
        """
        # A read that names no log asks each time which one has the name (rule 27b).
        recent = None if created_at is None else self._reader.rows.recent(name)
        row = recent or await self._reader.fresh(name, created_at)
        row.check_created(created_at)
        at = row.first_offset if start == "earliest" else start
        if at < row.first_offset:
            return None
        page = Page(row, limit, max_bytes, at=at, now_ms=self._reader.now_ms)
        with contextlib.suppress(errors.EntryLost, errors.EntryUnavailable, errors.NoSuchLedger):
            # A read without the index finds out what to answer.
            await self._fill(page, key)
        if page.at == at:
            return None
        return _part(row, page.batches, at, page.at)

    async def _fill(self, page: Page, key: bytes) -> None:
        """Gather the batches that may have records of a key, until the page is full or a ledger
        has no usable index.
        """
        first = page.row.item_at(page.at)
        begin = page.row.items.index(first) if first is not None else len(page.row.items)
        items = page.row.items[begin : begin + _LOOKUPS_MAX]
        for at in range(0, len(items), _AT_ONCE):
            group = items[at : at + _AT_ONCE]
            looked = await asyncio.gather(*(self._indexed(page.row, item, key) for item in group))
            for item, found in zip(group, looked, strict=True):
                if found is None or not found.is_all or page.is_large:
                    return
                await self._gather(page, item, found.entries)

    async def _gather(self, page: Page, item: LogItem, entries: Sequence[int]) -> None:
        """Gather the batches of some entries of a sealed ledger."""
        assert item.last_offset is not None, "only sealed ledgers have indexes"
        page.stop = item.last_offset + 1
        before, is_whole = page.stored, page.at == item.first_offset
        if entries:
            view = await self._reads.ended(item.ledger_id, is_fresh=False)
            start = 0 if is_whole else await self._reader.entry_at(item, page.at, view)
            end = await self._last_entry(page.row, item, page.stop, view)
            chosen = entries[bisect_left(entries, start or 0) : bisect_right(entries, end)]
            for first, last in _ranges(chosen):
                entry_id = first
                while entry_id <= last:
                    entry_id = await self._take(page, item, entry_id, last, view)
                    if page.is_large or page.is_full:
                        return  # perhaps within a batch
        page.at = page.stop
        if is_whole:
            self.skipped_bytes += max(item.bytes - (page.stored - before), 0)

    async def _last_entry(
        self, row: LogMetadata, item: LogItem, stop: int, view: LedgerView
    ) -> int:
        """The last entry with records of this log below an offset. A shared ledger may go on with
        records of other logs (rule 27a).
        """
        end = None if item.last_offset is None else item.last_offset + 1
        if stop == end and not row.is_shared(item):
            return view.last_add_confirmed
        found = await self._reader.entry_at(item, stop - 1, view)
        return view.last_add_confirmed if found is None else found

    async def _take(
        self, page: Page, item: LogItem, first: int, last: int, view: LedgerView
    ) -> int:
        """Add the batches of adjacent entries to a page. Returns the next entry."""
        found = await self._reads.read(
            item.ledger_id,
            first,
            last=last,
            limit=last - first + 1,
            max_bytes=page.stored_bytes_left,
            view=view,
        )
        if found.next <= first:
            raise errors.EntryUnavailable(
                "a confirmed batch was not found", ledger_id=item.ledger_id, entry_id=first
            )
        for run in found.runs:
            for at, payload in zip(run.ids, run.payloads(), strict=True):
                if page.is_full:
                    return at
                try:
                    before = batch.decode_head(payload).records_before
                    page.at = max(page.at, (item.first_offset or 0) + before)
                    page.take(item, at, payload)
                except batch.BadBatch as error:
                    raise damaged(error, item.ledger_id, at) from error
        return found.next

    async def newest(
        self, name: str, key: bytes, *, before: int | None = None, created_at: str | None = None
    ) -> LogBatches:
        """The newest record of a key below the offset `before` (None: below the log's end), or no
        record; the page ends at that offset.

        Raises: KeyScanLimit, with the `before` of the next request, if the indexes and the ledgers
        without an index are too large for one request; the errors of `LogReader.read`.
        """
        budget = _Budget(SCANNED_BYTES_MAX)
        row = await self._reader.fresh(name, created_at)
        for _ in range(TRIES_MAX):
            with contextlib.suppress(errors.NoSuchLedger):  # truncated or rewritten meanwhile
                found = await self._newest(row, key, before, budget)
                if found is not None:
                    return found
            row = await self._reader.fresh(name, row.created_at)
        raise unstable(name)

    async def _newest(
        self, row: LogMetadata, key: bytes, before: int | None, budget: _Budget
    ) -> LogBatches | None:
        """The newest record by this metadata; None if the metadata is out of date."""
        ended = await self._reader.ended_at(row)
        if ended is None:
            return None
        end = ended[0] if before is None else min(ended[0], before)
        known = (i for i in reversed(row.items) if i.first_offset is not None and not i.is_empty)
        items = [item for item in known if (item.first_offset or 0) < end]
        for at in range(0, len(items), _AT_ONCE):
            group = items[at : at + _AT_ONCE]
            looked = await asyncio.gather(
                *(self._indexed(row, item, key, budget) for item in group)
            )
            for item, found in zip(group, looked, strict=True):
                if found is not None and found.is_all and not found.entries:
                    continue
                view = await self._reader.view(row.name, item)
                if view is None:
                    return None
                stop = end if item.last_offset is None else min(end, item.last_offset + 1)
                record = await self._newest_in(_Place(row, item, view, stop), key, found, budget)
                if record is not None and record.columns.tombstones:
                    return _part(row, (), row.first_offset, end)  # the key is deleted (rule 27d)
                if record is not None:
                    return _part(row, (record,), record.first_offset, end)
            if budget.left <= 0 and len(items) > at + _AT_ONCE:
                raise _limit(row, (group[-1].first_offset or 0))
        return _part(row, (), row.first_offset, end)

    async def _newest_in(
        self, place: "_Place", key: bytes, found: KeyFound | None, budget: _Budget
    ) -> batch.StoredBatch | None:
        """The newest record of a key in one ledger."""
        last = await self._last_entry(place.row, place.item, place.stop, place.view)
        entries = () if found is None else found.entries
        for entry_id in reversed(entries[: bisect_right(entries, last)]):
            record = await self._record(place, entry_id, key)
            if record is not None:
                return record
        if found is not None and found.is_all:
            return None
        return await self._scanned(place, last, key, budget)

    async def _record(self, place: "_Place", entry_id: int, key: bytes) -> batch.StoredBatch | None:
        """The last record of a key in an entry."""
        begin, now_ms = place.item.first_offset or 0, self._reader.now_ms
        page = Page(place.row, maxsize, maxsize, at=begin, now_ms=now_ms)
        page.stop = place.stop
        await self._take(page, place.item, entry_id, entry_id, place.view)
        found = [part for each in page.batches for part in Filter(key=key).matching(each)]
        return found[-1].since(found[-1].first_offset + found[-1].count - 1) if found else None

    async def _scanned(
        self, place: "_Place", last: int, key: bytes, budget: _Budget
    ) -> batch.StoredBatch | None:
        """The newest record of a key in the entries up to `last` of a ledger without an index.
        Reads what it does not remember, as far as the budget allows. Raises: KeyScanLimit.
        """
        ledger_id = place.item.ledger_id
        budget.ledgers.add(ledger_id)
        scan = self._scans.setdefault(ledger_id, _Scan(last + 1))
        self._scans.move_to_end(ledger_id)
        scan.users += 1
        try:
            async with scan.lock:
                await self._catch_up(place, scan, last, budget)
                return await self._remembered(place, scan, last, key, budget)
        finally:
            scan.users -= 1

    async def _remembered(
        self, place: "_Place", scan: _Scan, last: int, key: bytes, budget: _Budget
    ) -> batch.StoredBatch | None:
        """The newest record of a key in the entries up to `last`, most of which are remembered."""
        entry_id = scan.last.get(hash_of(key))
        at = min(last, scan.low - 1) if entry_id is None else last
        if entry_id is not None and entry_id <= last:
            record = await self._record(place, entry_id, key)
            if record is not None:
                return record
        looked = place.stop
        while at >= 0:
            if budget.left <= 0:
                raise _limit(place.row, looked)
            first = max(at - scan.entries + 1, 0)
            for number, data in reversed(await self._piece(place, first, at, scan)):
                keys = await self._keys_of(place, number, data, budget)
                if number == scan.low - 1 and self._has_room(budget):
                    self._remember(scan, number, keys, is_newer=False)
                    scan.low = number
                if key in keys:
                    record = await self._record(place, number, key)
                    if record is not None:
                        return record
                before = batch.decode_head(data).records_before
                looked, at = (place.item.first_offset or 0) + before, number - 1
        return None

    async def _catch_up(self, place: "_Place", scan: _Scan, last: int, budget: _Budget) -> None:
        """Remember the keys of entries that were appended since the last request."""
        while scan.high <= last:
            if budget.left <= 0 or not self._has_room(budget):
                # Too many: this request, or the next one, begins anew at the end.
                self._scanned_keys -= len(scan.last)
                scan.last.clear()
                scan.low = scan.high = last + 1
                return
            piece = await self._piece(place, scan.high, last, scan, is_forward=True)
            for number, data in piece:
                keys = await self._keys_of(place, number, data, budget)
                self._remember(scan, number, keys, is_newer=True)
                scan.high = number + 1

    async def _piece(
        self, place: "_Place", first: int, last: int, scan: _Scan, *, is_forward: bool = False
    ) -> list[tuple[int, memoryview]]:
        """Entries with about _SCAN_BYTES: from `first` on, or up to `last`."""
        while True:
            found = await self._reads.read(
                place.item.ledger_id,
                first,
                last=last,
                limit=min(last - first + 1, 10_000),
                max_bytes=_SCAN_BYTES,
                view=place.view,
            )
            piece = [
                each for run in found.runs for each in zip(run.ids, run.payloads(), strict=True)
            ]
            if not piece:
                raise errors.EntryUnavailable(
                    "a confirmed batch was not found",
                    ledger_id=place.item.ledger_id,
                    entry_id=first,
                )
            size = sum(len(data) for _, data in piece) // len(piece)
            scan.entries = min(max(_SCAN_BYTES // max(size, 1), 1), 10_000)
            if is_forward or found.next > last:
                return piece
            first = max(first + 1, last - len(piece) // 2)  # the entries are larger than thought

    async def _keys_of(
        self, place: "_Place", entry_id: int, data: bytes | memoryview, budget: _Budget
    ) -> set[bytes]:
        """The keys of a batch. Lets other tasks run now and then."""
        before, size = budget.left, batch.plain_size(data)
        budget.left -= size
        if before // _DECODED_BYTES != budget.left // _DECODED_BYTES:
            await asyncio.sleep(0)
        try:
            return keys_of(data)
        except batch.BadBatch as error:
            raise damaged(error, place.item.ledger_id, entry_id) from error

    def _remember(self, scan: _Scan, entry_id: int, keys: set[bytes], *, is_newer: bool) -> None:
        before = len(scan.last)
        for hashed in map(hash_of, keys):
            if is_newer:
                scan.last[hashed] = entry_id
            else:
                scan.last.setdefault(hashed, entry_id)
        self._scanned_keys += len(scan.last) - before

    def _has_room(self, budget: _Budget) -> bool:
        """Whether more keys may be remembered. Forgets keys of ledgers that this request does not
        need.
        """
        while self._scanned_keys >= SCANNED_KEYS_MAX or len(self._scans) > _SCANS_MAX:
            others = (
                ledger_id
                for ledger_id, scan in self._scans.items()
                if ledger_id not in budget.ledgers and not scan.users
            )
            oldest = next(others, None)
            if oldest is None:
                return self._scanned_keys < SCANNED_KEYS_MAX
            self._forget(oldest)
        return True

    def _forget(self, ledger_id: int) -> None:
        scan = self._scans.get(ledger_id)
        if scan is not None and not scan.users:
            del self._scans[ledger_id]
            self._scanned_keys -= len(scan.last)

    async def _indexed(
        self, row: LogMetadata, item: LogItem, key: bytes, budget: _Budget | None = None
    ) -> KeyFound | None:
        """What the index of a ledger tells of a key; None without a usable index."""
        if item.index is None or item.last_offset is None:
            return None
        self.lookups += 1
        found = KeyFound(())
        try:
            if item.index != NO_KEYS:
                found = await self._look_up(item, item.index, key, budget)
        except (BadIndex, errors.EntryLost, errors.NoSuchLedger) as error:
            _ = self._ownership.task(self._drop(row, item, error))
        except errors.QuorumLogError:
            pass  # it may be readable later
        else:
            self._forget(item.ledger_id)
            return found
        return None

    async def _look_up(
        self, item: LogItem, index: int, key: bytes, budget: _Budget | None
    ) -> KeyFound:
        """Ask an index. Raises: BadIndex if it is not what its log takes it for."""
        view = await self._reads.ended(index, is_fresh=False)
        buckets = view.last_add_confirmed + 1
        number = bucket_of(key, buckets)
        place = index, number, item.ledger_id
        bucket = self._buckets.get(place)
        if bucket is None:
            data = await self._reads.ended(item.ledger_id, is_fresh=False)
            found = await self._reads.read(index, number, last=number, limit=1, view=view)
            bucket = Bucket(
                b"".join(bytes(each) for run in found.runs for each in run.payloads()),
                buckets=buckets,
                ledger_id=item.ledger_id,
                last_entry=data.last_add_confirmed,
            )
            if bucket.number != number:
                raise BadIndex(f"bucket {bucket.number} is in the place of {number}")
            if budget is not None:
                budget.left -= bucket.size
            self._bucket_bytes += bucket.size * (place not in self._buckets)
            self._buckets[place] = bucket
        self._buckets.move_to_end(place)
        while self._bucket_bytes > BUCKET_BYTES_MAX:
            self._bucket_bytes -= self._buckets.popitem(last=False)[1].size
        return bucket.entries_of(key)

    async def _drop(self, row: LogMetadata, item: LogItem, why: Exception) -> None:
        """Let the log name no index of a ledger, so that the owner builds a new one. If the log no
        longer names this index, another one has replaced it, or the ledger.
        """

        async def dropped(now: LogMetadata) -> LogMetadata:
            now.check_created(row.created_at)
            changed = now.indexed(item.ledger_id, None, before=item.index)
            if changed is not None:
                self.damaged += 1
                log.warning("index-not-used", extra={"log": row.name, "error": repr(why)})
            return changed or now

        with contextlib.suppress(errors.QuorumLogError):  # the next lookup tries again
            await self._change(row.name, dropped)


@dataclass(frozen=True, slots=True)
class _Place:
    """A ledger of a log, as far as a request looks: below the offset `stop`."""

    row: LogMetadata
    item: LogItem
    view: LedgerView
    stop: int


def _limit(row: LogMetadata, before: int) -> errors.KeyScanLimit:
    return errors.KeyScanLimit(
        f"no record from the offset {before} on has the key: ask again with before={before}",
        log=row.name,
        before=before,
    )


def _part(
    row: LogMetadata, batches: Sequence[batch.StoredBatch], first: int, following: int
) -> LogBatches:
    """Some batches of a part of a log, of which the next page tells whether the log ends there."""
    return LogBatches(
        tuple(batches),
        first=first,
        next=following,
        first_offset=row.first_offset,
        closed=False,
        created_at=row.created_at,
    )


def _ranges(entries: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges of adjacent ids, each with its first and its last one."""
    begin = 0
    for at, entry_id in enumerate(entries):
        if at + 1 == len(entries) or entries[at + 1] != entry_id + 1:
            yield entries[begin], entry_id
            begin = at + 1
