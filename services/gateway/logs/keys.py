"""Finds the records of a key by the indexes of a log's sealed ledgers (rule 27e).

A reader uses an index only after it has verified that the index belongs to the ledger. Otherwise
it reads the ledger's batches, and the log drops the index, which is then built anew. To find the
newest record of a key in a ledger without an index, a gateway reads the ledger backward and
remembers the hashes of the ledger's keys.
"""

import asyncio
import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Literal, TypeVar

from quorumlog import errors
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Stored, StoredBatch
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata
from quorumlog.protocol.log.keys import BadIndex, Bucket, Hints, bucket_of, hash_of, names_all
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView
from services.gateway.logs.offsets import damaged
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.reading import TRIES_MAX, LogReader, unstable
from services.gateway.logs.scans import Piece, Scans, Work
from services.gateway.logs.values import LogBatches, Page

log = logging.getLogger(__name__)

SCANNED_BYTES_MAX: Final = 16 << 20
"""Maximum cost of a request for a key's newest record: decoding and lookups (see `Work`)."""

BUCKET_BYTES_MAX: Final = 32 << 20
"""Maximum bytes of index buckets that this gateway caches (chosen by judgement)."""

HINT_BYTES_MAX: Final = 32 << 20
"""Maximum bytes of hints about buckets that this gateway caches (chosen by judgement). Hints cover
six times as many keys as buckets of this size, and save most lookups of keys that a ledger lacks.
"""

_SCAN_BYTES: Final = 256 << 10
"""Maximum bytes of one read from bookies."""

_READ_ENTRIES: Final = 10_000
"""Maximum entries of one read from bookies."""

_LOOKUP_COST: Final = 16 << 10
"""The cost of one lookup in an index: about the bytes of a bucket."""

_PIECE_COST: Final = 64
"""The cost of one lookup in a `Piece` in memory."""

_AT_ONCE: Final = 8
"""The number of indexes that are read concurrently (chosen by judgement)."""

_HINTS_SHARE: Final = 4
"""Once lookups have read this fraction of an index, all its hints are read in the background. So
hints cost at most four times the bytes of lookups, even if the cache evicts them at once."""

_INDEXES_COUNTED: Final = 10_000
"""Maximum indexes whose read buckets are counted. Beyond it, all counts begin again at zero."""

_LOOKUPS_MAX: Final = 16
"""Maximum ledgers that one page covers, because their lookups read about as many bytes as a page.
The reader continues with the next page."""

Change = Callable[[str, Callable[[LogMetadata], Awaitable[LogMetadata]]], Awaitable[object]]
"""Changes a log's metadata by compare-and-swap."""


@dataclass(slots=True)
class _Search:
    """A search for a key's newest record below an offset, in one version of the log's metadata."""

    row: LogMetadata
    key: bytes
    log_end: int
    end: int
    """The search considers only records below this offset."""
    looked: int
    """No record from this offset to `end` has the key, according to the search so far."""
    work: Work
    now_ms: int
    """The time that decides which records have expired (rule 27f)."""

    def check(self) -> None:
        """Raise KeyScanLimit if the request's budget is used up."""
        if self.work.left <= 0:
            at = self.looked
            raise errors.KeyScanLimit(
                f"no record from offset {at} on has the key: retry with before={at}",
                log=self.row.name,
                before=at,
                created_at=self.row.created_at,
            )

    def stop(self, item: LogItem) -> int:
        """The offset after the last record that the search considers in a ledger."""
        last = item.last_offset
        return min(self.end, self.log_end if last is None else last + 1)

    def seen(self, item: LogItem, place: int) -> None:
        """Note that no record of a ledger has the key, except perhaps the first `place` records."""
        self.looked = min(self.looked, (item.first_offset or 0) + place)


_Place = tuple[int, int, int]
"""The ledger id of an index, the number of a bucket, and the indexed ledger."""

_Part = TypeVar("_Part", Bucket, Hints)


class _Cache(Generic[_Part]):
    """Verified parts of indexes, of at most `bytes_max`. Evicts the least recently used part."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max, self.bytes = bytes_max, 0
        self.parts: OrderedDict[_Place, _Part] = OrderedDict()

    def get(self, place: _Place) -> _Part | None:
        part = self.parts.get(place)
        if part is not None:
            self.parts.move_to_end(place)
        return part

    def put(self, place: _Place, part: _Part) -> None:
        self.bytes += part.size * (place not in self.parts)
        self.parts[place] = part
        while self.bytes > self._bytes_max:
            self.bytes -= self.parts.popitem(last=False)[1].size


class KeyReader:
    """Serves reads by key at this gateway."""

    def __init__(
        self, engine: Engine, reader: LogReader, ownership: Ownership, change: Change
    ) -> None:
        """Starts with empty caches."""
        self._reads, self._reader, self._ownership = engine.reads, reader, ownership
        self._change = change
        self.lookups = self.skipped_bytes = self.damaged = 0
        """The numbers of index lookups, of ledger bytes that lookups saved from being read, and of
        indexes that could not be used."""
        self._buckets = _Cache[Bucket](BUCKET_BYTES_MAX)
        self._hints = _Cache[Hints](HINT_BYTES_MAX)
        self._bucket_reads = Counter[int]()
        """The number of buckets without hints that lookups have read, by index."""
        self._hints_task: asyncio.Task[None] | None = None
        self._scans = Scans()

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
        """Return the batches from an offset on that may have records of a key, according to the
        ledgers' indexes. None if the next record must be read without an index.

        Raises: NoSuchLog, LogReplaced.
        """
        # Without `created_at`, each read checks which log has the name now (rule 27b).
        recent = None if created_at is None else self._reader.rows.recent(name)
        row = recent or await self._reader.fresh(name, created_at)
        row.check_created(created_at)
        at = row.first_offset if start == "earliest" else start
        if at < row.first_offset:
            return None
        page = Page(row, limit, max_bytes, at=at, now_ms=self._reader.now_ms)
        with contextlib.suppress(errors.EntryLost, errors.EntryUnavailable, errors.NoSuchLedger):
            # The following read without an index raises these errors.
            await self._fill(page, key)
        if page.at == at:
            return None
        return _part(row, page.batches, at, page.at)

    async def _fill(self, page: Page, key: bytes) -> None:
        """Add the batches that may have records of a key, until the page is full or a ledger has
        no usable index.
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
                if not await self._gather(page, item, entries):
                    return

    async def _gather(self, page: Page, item: LogItem, entries: Sequence[int]) -> bool:
        """Add the batches of a sealed ledger's entries that may contain a key. Returns whether the
        page now covers the rest of the ledger.
        """
        assert item.last_offset is not None, "only sealed ledgers have indexes"
        page.stop = item.last_offset + 1
        before, is_whole = page.stored, page.at == item.first_offset
        if entries:
            view = await self._reads.ended(item.ledger_id, is_fresh=False)
            start = 0 if is_whole else await self._reader.entry_at(item, page.at, view)
            if not names_all(entries) and (start or 0) < entries[0]:
                return False
            end = await self._last_entry(page.row, item, page.stop, view)
            chosen = entries[bisect_left(entries, start or 0) : bisect_right(entries, end)]
            for first, last in _ranges(chosen):
                entry_id = first
                while entry_id <= last:
                    entry_id = await self._take(page, item, entry_id, last, view)
                    if page.is_large or page.is_full:
                        return False  # the page may end within a batch
        page.at = page.stop
        if is_whole:
            self.skipped_bytes += max(item.bytes - (page.stored - before), 0)
        return True

    async def _last_entry(
        self, row: LogMetadata, item: LogItem, stop: int, view: LedgerView
    ) -> int:
        """The last entry with records of this log below an offset. Later entries of a shared ledger
        may belong to other logs (rule 27a).
        """
        end = None if item.last_offset is None else item.last_offset + 1
        if stop == end and not row.is_shared(item):
            return view.last_add_confirmed
        found = await self._reader.entry_at(item, stop - 1, view)
        return view.last_add_confirmed if found is None else found

    async def _take(
        self, page: Page, item: LogItem, first: int, last: int, view: LedgerView
    ) -> int:
        """Add the batches of consecutive entries to a page. Returns the next entry to read."""
        found = await self._reads.read(
            item.ledger_id,
            first,
            last=last,
            limit=last - first + 1,
            max_bytes=page.stored_bytes_left,
            view=view,
        )
        if found.next <= first:
            raise _missing(item, first)
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
        """Return a page with the newest record of a key below the offset `before`; without records
        if there is no such record. The page ends at `before`, which is by default the log's end.

        Raises: KeyScanLimit, with the `before` of the next request, if the indexes and the ledgers
        without an index are too large for one request; the errors of `LogReader.read`.
        """
        fresh, known = self._reader.fresh(name, created_at), self._reader.rows.known(name)
        if known is None:
            row = await fresh
        else:
            row, found = await self._newest_in_known(known, fresh, key, before)
            if found is not None:
                return found
        work = Work(SCANNED_BYTES_MAX)
        for _ in range(TRIES_MAX):
            with contextlib.suppress(errors.NoSuchLedger):  # truncated or rewritten meanwhile
                found = await self._newest(row, key, before, work)
                if found is not None:
                    return found
            row = await self._reader.fresh(name, row.created_at)
        raise unstable(name)

    async def _newest_in_known(
        self, known: LogMetadata, fresh: Awaitable[LogMetadata], key: bytes, before: int | None
    ) -> tuple[LogMetadata, LogBatches | None]:
        """Search in cached metadata while the metadata is read again, which takes as long as the
        search. Returns the metadata, and what was found if the cached metadata is up to date.
        """
        work = Work(SCANNED_BYTES_MAX)
        search = asyncio.create_task(self._newest(known, key, before, work))
        try:
            row = await fresh
            is_same = (row.created_at, row.version) == (known.created_at, known.version)
            if is_same and row.attempt == known.attempt:
                with contextlib.suppress(errors.NoSuchLedger):
                    return row, await search
            return row, None
        finally:
            search.cancel()
            await asyncio.gather(search, return_exceptions=True)

    async def _newest(
        self, row: LogMetadata, key: bytes, before: int | None, work: Work
    ) -> LogBatches | None:
        """The newest record of a key, according to `row`; None if `row` is out of date."""
        page = Page(row, 1, 1, is_fresh=True)
        ended = await self._reader.ended_at(row, page)
        if ended is None:
            return None
        end = ended[0] if before is None else min(ended[0], before)
        search = _Search(row, key, ended[0], end, end, work, self._reader.now_ms)
        known = (i for i in reversed(row.items) if i.first_offset is not None and not i.is_empty)
        items = [item for item in known if (item.first_offset or 0) < end]
        for at in range(0, len(items), _AT_ONCE):
            group = items[at : at + _AT_ONCE]
            search.check()
            await work.charge(_LOOKUP_COST * sum(i.index not in {None, NO_KEYS} for i in group))
            looked = await asyncio.gather(*(self._indexed(row, item, key) for item in group))
            for item, entries in zip(group, looked, strict=True):
                if entries is None or entries:
                    view = await self._reader.view(row.name, item, page)
                    if view is None:
                        return None
                    found = await self._newest_in(search, item, view, entries)
                    if found is not None and found.columns.tombstones:
                        return _part(row, (), row.first_offset, end)  # a deleted key (rule 27d)
                    if found is not None:
                        return _part(row, (found,), found.first_offset, end)
                search.seen(item, 0)
        return _part(row, (), min(row.first_offset, end), end)

    async def _newest_in(
        self, search: _Search, item: LogItem, view: LedgerView, entries: Sequence[int] | None
    ) -> StoredBatch | None:
        """The newest record with the key in a ledger. `entries`: the entries that the ledger's
        index names for the key; None without an index. Raises: KeyScanLimit.
        """
        stop = search.stop(item)
        if item.last_offset is None and stop == search.log_end:
            last = view.last_add_confirmed  # `_looked` skips records beyond `stop`
        else:
            last = await self._last_entry(search.row, item, stop, view)
        if entries is None:
            return await self._scanned(search, item, view, last + 1)
        for entry_id in reversed(entries[: bisect_right(entries, last)]):
            search.check()
            payloads = await self._read(item, view, entry_id, entry_id + 1)
            record, _ = await self._examined(search, item, payloads, entry_id + 1, is_indexed=True)
            if record is not None:
                return record
        if names_all(entries):
            return None
        return await self._scanned(search, item, view, min(last + 1, entries[0]))

    async def _scanned(
        self, search: _Search, item: LogItem, view: LedgerView, after: int
    ) -> StoredBatch | None:
        """The newest record with the key below the entry `after`. Reads entries backward, and skips
        entries whose hashes in memory lack the key. Raises: KeyScanLimit.
        """
        hashed, count, lock = hash_of(search.key), 1, self._scans.lock(item.ledger_id)
        while after > 0:
            search.check()
            async with lock:
                piece = self._scans.below(item.ledger_id, after)
                floor = 0 if piece is None else piece.after
                if piece is not None and piece.after >= after:
                    if not piece.has(hashed):
                        after = piece.first
                        search.seen(item, piece.place)
                        await search.work.charge(_PIECE_COST)
                        continue
                    floor = piece.first
                first = max(after - count, floor)
                payloads = await self._read(item, view, first, after)
                size = sum(len(payload) for _, payload in payloads)
                if len(payloads) < after - first:  # the last ones are missing: read fewer at once
                    await search.work.charge(size)
                    count = len(payloads)
                    continue
                if 4 * size <= _SCAN_BYTES:
                    count = min(4 * count, _READ_ENTRIES)
                found, after = await self._examined(search, item, payloads, after)
                if found is not None:
                    return found
        return None

    async def _read(
        self, item: LogItem, view: LedgerView, first: int, after: int
    ) -> list[tuple[int, memoryview]]:
        """Read entries from `first` to below `after`, or fewer if one read returns fewer."""
        found = await self._reads.read(
            item.ledger_id,
            first,
            last=after - 1,
            limit=after - first,
            max_bytes=_SCAN_BYTES,
            view=view,
        )
        entries = [each for run in found.runs for each in zip(run.ids, run.payloads(), strict=True)]
        if not entries or entries[0][0] != first:
            raise _missing(item, first)
        return entries

    async def _examined(
        self,
        search: _Search,
        item: LogItem,
        payloads: Sequence[tuple[int, memoryview]],
        after: int,
        *,
        is_indexed: bool = False,
    ) -> tuple[StoredBatch | None, int]:
        """Look for the newest record in the entries before `after`. Unless the ledger has an index,
        remember the hashes of the entries' keys. Returns the record, and the lowest decoded entry.
        Raises: KeyScanLimit.
        """
        found, first, place, left = None, after, 0, search.work.left
        hashes: set[int] = set()
        try:
            for at, payload in reversed(payloads):
                search.check()
                look = partial(_looked, search, item, at, is_hashed=not is_indexed)
                place_of, new, found = await search.work.decode(look, payload)
                hashes |= new
                first, place = at, place_of
                search.seen(item, place)
                if found is not None:
                    break
        except batch.BadBatch as error:
            raise damaged(error, item.ledger_id, first - 1) from error
        finally:
            if first < after and not is_indexed:
                cost = left - search.work.left
                self._scans.add(item.ledger_id, Piece.of(first, after, place, cost, hashes))
        return found, first

    async def _indexed(self, row: LogMetadata, item: LogItem, key: bytes) -> Sequence[int] | None:
        """The entries of a ledger that may contain a key; None if no index can be used."""
        if item.index is None or item.last_offset is None:
            return None
        self.lookups += 1
        if item.index == NO_KEYS:
            self._scans.drop(item.ledger_id)
            return ()
        try:
            return await self._look_up(item, item.index, key)
        except (BadIndex, errors.EntryLost, errors.NoSuchLedger) as error:
            _ = self._ownership.task(self._drop(row, item, error))
        except errors.QuorumLogError:
            pass  # the index may be readable later
        return None

    async def _look_up(self, item: LogItem, index: int, key: bytes) -> Sequence[int]:
        """Look a key up in an index. Raises: BadIndex if `index` is not the index of `item`."""
        view = await self._reads.ended(index, is_fresh=False)
        buckets = view.last_add_confirmed + 1
        place = index, bucket_of(key, buckets), item.ledger_id
        hints = self._hints.get(place)
        if hints is not None and not hints.may_have(key):
            return ()
        bucket = self._buckets.get(place)
        if bucket is None:
            (bucket,) = await self._read_buckets(item, view, place[1], place[1])
            self._scans.drop(item.ledger_id)
            self._buckets.put(place, bucket)
            if hints is None:
                self._hints.put(place, bucket.hints())
                self._count_read(item, view)
        return bucket.entries_of(key)

    def _count_read(self, item: LogItem, view: LedgerView) -> None:
        """Count a bucket without hints that a lookup has read. Read all hints of a busy index."""
        index, reads, buckets = view.row.ledger_id, self._bucket_reads, view.last_add_confirmed + 1
        if len(reads) >= _INDEXES_COUNTED:
            reads.clear()
        reads[index] += 1
        is_idle = self._hints_task is None or self._hints_task.done()
        if is_idle and buckets > _HINTS_SHARE and reads[index] * _HINTS_SHARE >= buckets:
            del reads[index]
            self._hints_task = self._ownership.task(self._read_hints(item, view))

    async def _read_hints(self, item: LogItem, view: LedgerView) -> None:
        """Read the hints of a whole index, because lookups have needed many of its buckets."""
        number, last = 0, view.last_add_confirmed
        with contextlib.suppress(BadIndex, errors.QuorumLogError):  # the next lookup reports it
            while number <= last:
                for bucket in await self._read_buckets(item, view, number, last):
                    number = bucket.number + 1
                    place = view.row.ledger_id, bucket.number, item.ledger_id
                    self._hints.put(place, bucket.hints())

    async def _read_buckets(
        self, item: LogItem, view: LedgerView, first: int, last: int
    ) -> list[Bucket]:
        """Read and verify buckets of an item's index, at least the first. Raises: BadIndex."""
        data = await self._reads.ended(item.ledger_id, is_fresh=False)
        found = await self._reads.read(
            view.row.ledger_id,
            first,
            last=last,
            limit=_READ_ENTRIES,
            max_bytes=_SCAN_BYTES,
            view=view,
        )
        buckets = [
            Bucket(
                bytes(each),
                buckets=view.last_add_confirmed + 1,
                ledger_id=item.ledger_id,
                last_entry=data.last_add_confirmed,
            )
            for run in found.runs
            for each in run.payloads()
        ]
        numbers = [bucket.number for bucket in buckets]
        if not numbers or numbers != list(range(first, first + len(numbers))):
            raise BadIndex(f"the index has buckets {numbers} instead of buckets {first} to {last}")
        return buckets

    async def _drop(self, row: LogMetadata, item: LogItem, why: Exception) -> None:
        """Remove a ledger's index from the log's metadata, so that the owner builds a new one. Does
        nothing if the log no longer names this index for the ledger.
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


def _part(
    row: LogMetadata, batches: Sequence[StoredBatch], first: int, following: int
) -> LogBatches:
    """A page of batches that never reports the log's end. The next page may report the end."""
    return LogBatches(
        tuple(batches),
        first=first,
        next=following,
        first_offset=row.first_offset,
        closed=False,
        created_at=row.created_at,
    )


def _looked(
    search: _Search, item: LogItem, entry_id: int, data: Stored, *, is_hashed: bool
) -> tuple[int, set[int], StoredBatch | None]:
    """Return the number of the ledger's offsets before an entry, the hashes of the entry's keys (if
    `is_hashed`), and the entry's newest unexpired record with the key. Raises: BadBatch.
    """
    found = batch.opened(packed.unpack(data))
    time_ms = item.published_ms or found.head.append_time_ms  # rule 26b
    if search.row.settings.compacts:
        found = found.buried(time_ms, search.now_ms)
    keys, before = list(found.keys), found.head.records_before
    first, stop = (item.first_offset or 0) + before, search.stop(item)
    lasting = reversed(found.lasting(time_ms, search.now_ms))
    below = (n for n in lasting if first + found.indexes[n] < stop)
    at = next((n for n in below if keys[n] == search.key), None)
    stored = None
    if at is not None:
        offset = first + found.indexes[at]
        stored = StoredBatch(offset, item.ledger_id, entry_id, time_ms, found.part(at, 1))
    hashed = {*keys} if is_hashed else ()
    return before, {hash_of(key) for key in hashed if key is not None}, stored


def _missing(item: LogItem, entry_id: int) -> errors.EntryUnavailable:
    """The error for an entry that a read did not return."""
    detail = f"bookies did not return the confirmed entry {entry_id}: retry"
    return errors.EntryUnavailable(detail, ledger_id=item.ledger_id, entry_id=entry_id)


def _ranges(entries: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Group entry ids into ranges of consecutive ids. Yields the first and last id of each range."""
    begin = 0
    for at, entry_id in enumerate(entries):
        if at + 1 == len(entries) or entries[at + 1] != entry_id + 1:
            yield entries[begin], entry_id
            begin = at + 1
