"""Finds the records of a key by the indexes of a log's sealed ledgers (rule 27e).

An index is only used if it proves that it belongs to its ledger. Otherwise the ledger's batches are
read, and the log drops the index, which is then built anew. A ledger without an index is scanned
once by a request for the newest record of a key; the hashes of its keys stay in memory.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from sys import maxsize
from typing import Final, Literal

from quorumlog import errors
from quorumlog.protocol import batch
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata
from quorumlog.protocol.log.keys import BadIndex, Bucket, KeyEntries, bucket_of, keys_of
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView
from services.gateway.logs.filters import Filter
from services.gateway.logs.offsets import damaged
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.reading import TRIES_MAX, LogReader, unstable
from services.gateway.logs.values import LogBatches, Page

log = logging.getLogger(__name__)

SCANNED_BYTES_MAX: Final = 16 << 20
"""Bytes of ledgers without an index that one request for a key's newest record reads."""

BUCKET_BYTES_MAX: Final = 32 << 20
"""Bytes of buckets of indexes that are cached: chosen by judgement."""

SCANNED_PAIRS_MAX: Final = 1 << 22
"""Pairs of a key and an entry, of ledgers without an index, that stay in memory: about 48 MiB."""

_SCANS_MAX: Final = 1000
"""Ledgers without an index of which pairs stay in memory."""

_SCAN_BYTES: Final = 256 << 10
"""Bytes that are read and decoded at once: more would delay other requests."""

_AT_ONCE: Final = 8
"""Ledgers whose indexes are asked concurrently (chosen by judgement)."""

_LOOKUPS_MAX: Final = 64
"""Ledgers that one page passes. A read goes on to the next page."""

Change = Callable[[str, Callable[[LogMetadata], Awaitable[LogMetadata]]], Awaitable[object]]
"""Changes a log's metadata by compare-and-swap."""


class _Scan:
    """The keys of the entries of one ledger before the entry `next`."""

    def __init__(self) -> None:
        self.keys, self.next = KeyEntries(), 0


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
        row = self._reader.rows.recent(name) or await self._reader.fresh(name, created_at)
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
            for item, entries in zip(group, looked, strict=True):
                if entries is None or page.is_large:
                    return
                await self._gather(page, item, entries)

    async def _gather(self, page: Page, item: LogItem, entries: Sequence[int]) -> None:
        """Gather the batches of some entries of a sealed ledger."""
        assert item.last_offset is not None, "only sealed ledgers have indexes"
        page.stop = item.last_offset + 1
        before, is_all = page.stored, page.at == item.first_offset
        if entries:
            view = await self._reads.ended(item.ledger_id, is_fresh=False)
            start = 0 if is_all else await self._reader.entry_at(item, page.at, view)
            for first, last in _ranges([each for each in entries if each >= (start or 0)]):
                entry_id = first
                while entry_id <= last:
                    entry_id = await self._take(page, item, entry_id, last, view)
                    if page.is_large or page.is_full:
                        return  # perhaps within a batch
        page.at = page.stop
        if is_all:
            self.skipped_bytes += max(item.bytes - (page.stored - before), 0)

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

    async def newest(self, name: str, key: bytes) -> LogBatches:
        """The newest record of a key, or no record; the page ends at the log's end.

        Raises: KeyScanLimit if ledgers without an index are too large for one request; the errors
        of `LogReader.read`.
        """
        row = await self._reader.rows.row(name)
        for _ in range(TRIES_MAX):
            with contextlib.suppress(errors.NoSuchLedger):  # truncated or rewritten meanwhile
                found = await self._newest(row, key)
                if found is not None:
                    return found
            row = await self._reader.fresh(name, row.created_at)
        raise unstable(name)

    async def _newest(self, row: LogMetadata, key: bytes) -> LogBatches | None:
        """The newest record by this metadata; None if the metadata is out of date."""
        end = await self._reader.end(row.name, row)
        budget = [SCANNED_BYTES_MAX]
        items = [i for i in reversed(row.items) if i.first_offset is not None and not i.is_empty]
        for at in range(0, len(items), _AT_ONCE):
            group = items[at : at + _AT_ONCE]
            looked = await asyncio.gather(*(self._indexed(row, item, key) for item in group))
            for item, indexed in zip(group, looked, strict=True):
                if indexed is not None and not indexed:
                    continue
                view = await self._reader.view(row.name, item)
                if view is None:
                    return None
                entries = indexed or await self._scanned(item, view, key, budget)
                for entry_id in reversed(entries):
                    page = Page(
                        row,
                        maxsize,
                        maxsize,
                        at=item.first_offset or 0,
                        now_ms=self._reader.now_ms,
                    )
                    page.stop = None if item.last_offset is None else item.last_offset + 1
                    await self._take(page, item, entry_id, entry_id, view)
                    found = [part for b in page.batches for part in Filter(key=key).matching(b)]
                    if found:
                        last = found[-1].first_offset + found[-1].count - 1
                        record = found[-1].since(last)
                        if record.columns.tombstones:  # the key is deleted (rule 27d)
                            return _part(row, (), row.first_offset, end)
                        return _part(row, (record,), last, end)
        return _part(row, (), row.first_offset, end)

    async def _scanned(
        self, item: LogItem, view: LedgerView, key: bytes, budget: list[int]
    ) -> Sequence[int]:
        """The entries of a ledger without an index that may hold a key. Reads what was not read
        before, as far as the request's budget allows. Raises: KeyScanLimit.
        """
        scan = self._scans.pop(item.ledger_id, None) or _Scan()
        self._scans[item.ledger_id] = scan
        while scan.next <= view.last_add_confirmed:
            if budget[0] <= 0 or scan.keys.pairs > SCANNED_PAIRS_MAX:
                raise errors.KeyScanLimit(
                    f"ledger {item.ledger_id} has no index of its keys yet: retry, and the gateway"
                    f" goes on at entry {scan.next}",
                    ledger_id=item.ledger_id,
                    entry_id=scan.next,
                )
            first = scan.next
            found = await self._reads.read(
                item.ledger_id, first, limit=10_000, max_bytes=_SCAN_BYTES, view=view
            )
            if found.next <= first:
                raise errors.EntryUnavailable(
                    "a confirmed batch was not found", ledger_id=item.ledger_id, entry_id=first
                )
            if scan.next != first:
                continue  # another request has read the same
            for run in found.runs:
                for at, payload in zip(run.ids, run.payloads(), strict=True):
                    try:
                        scan.keys.add(at, keys_of(payload))
                    except batch.BadBatch as error:
                        raise damaged(error, item.ledger_id, at) from error
                    scan.next = at + 1
                    budget[0] -= len(payload)
        while len(self._scans) > 1 and self._is_over():
            self._scans.popitem(last=False)
        return scan.keys.entries_of(key)

    def _is_over(self) -> bool:
        pairs = sum(scan.keys.pairs for scan in self._scans.values())
        return len(self._scans) > _SCANS_MAX or pairs > SCANNED_PAIRS_MAX

    async def _indexed(self, row: LogMetadata, item: LogItem, key: bytes) -> Sequence[int] | None:
        """The entries of a ledger that may hold a key, by its index; None without a usable one."""
        if item.index is None or item.last_offset is None:
            return None
        self.lookups += 1
        if item.index == NO_KEYS:
            return ()
        try:
            return await self._look_up(item, item.index, key)
        except (BadIndex, errors.EntryLost, errors.NoSuchLedger) as error:
            self.damaged += 1
            log.warning("index-not-used", extra={"log": row.name, "error": repr(error)})
            _ = self._ownership.task(self._drop(row, item))
        except errors.QuorumLogError:
            pass  # it may be readable later
        return None

    async def _look_up(self, item: LogItem, index: int, key: bytes) -> Sequence[int]:
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
            self._bucket_bytes += bucket.size * (place not in self._buckets)
            self._buckets[place] = bucket
        self._buckets.move_to_end(place)
        while self._bucket_bytes > BUCKET_BYTES_MAX:
            self._bucket_bytes -= self._buckets.popitem(last=False)[1].size
        return bucket.entries_of(key)

    async def _drop(self, row: LogMetadata, item: LogItem) -> None:
        """Let the log name no index of a ledger, so that the owner builds a new one."""

        async def dropped(now: LogMetadata) -> LogMetadata:
            now.check_created(row.created_at)
            return now.indexed(item.ledger_id, None, before=item.index) or now

        with contextlib.suppress(errors.QuorumLogError):  # the next lookup tries again
            await self._change(row.name, dropped)


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
