"""Serves work queues at one gateway: claims with their records, and settlements (ADR 55).

The owner of the log of queues decides which records a claim gets (`keeper.py`), and the client's
gateway reads these records. `dead_letters.py` moves records to a dead-letter log, and back.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

from quorumlog import errors
from quorumlog.protocol import queue_requests as asks
from quorumlog.protocol import queues
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_state import Order, Queue
from quorumlog.protocol.rows import Batch, Key
from services.gateway.logs.consumers import Consumers, check_within
from services.gateway.logs.dead_letters import QueueMoves
from services.gateway.logs.reading import LogReader
from services.gateway.logs.values import LogBatches, Start

_POLL_S: Final = 1.0
"""The interval at which a waiting claim polls an owner at another gateway. Chosen by judgement."""
_TAIL_S: Final = 10.0
"""Maximum time for which one read waits for a log's next record."""
_KEY_BYTES: Final = 8 << 20
"""Maximum bytes that one claim reads to get the keys of records."""
_QUEUES_MAX: Final = 1000
"""Maximum queues with the order `key` whose records' keys are cached. Chosen by judgement."""
_GAPS_S: Final = 5.0
"""Time for which a claim skips offsets without records, in addition to its own waiting time."""
_TRIES: Final = 3
"""Maximum requests of one claim with the order `key`. Each request has the keys of the records that
are not done according to the previous answer."""
QUEUES_SHOWN_MAX: Final = 100
"""Maximum queues with their own labels in metrics, because clients choose names. By judgement."""


_End = tuple[str, int]
"""The creation time and an end of a log; the end is 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The records of a claim, in pages, and how often each record was handed out."""

    token: int
    pages: Sequence[LogBatches]
    attempts: dict[int, int]
    lease_ms: int
    limit: str
    """The bound that stops the queue from handing out more records; empty if no bound does."""
    refused: Sequence[asks.Refused] = ()
    """Records whose acknowledgement with this claim was refused."""

    @property
    def is_gap(self) -> bool:
        """Whether all records of the claim were removed or have expired."""
        return bool(self.pages) and not any(page.batches for page in self.pages)


@dataclass(slots=True)
class _Seen:
    """Cached state of a queue with the order `key`: its done records, and keys of other records."""

    created: str
    floor: int = -1
    acked: Offsets = NONE
    keys: dict[int, int] = field(default_factory=dict)


class QueueService(QueueMoves):
    """Serves this gateway's requests for the work queues of all logs."""

    def __init__(self, logs: Any, reader: LogReader, consumers: Consumers, **ports: Any) -> None:
        """Create the service. `ports`: arguments of `RowService`."""
        super().__init__(logs, reader, **ports)
        self._consumers = consumers
        self._seen_keys: OrderedDict[Key, _Seen] = OrderedDict()
        self._watchers: dict[Key, dict[asyncio.Future[_End], None]] = {}
        """Claims that wait for a change of their queue or a new record of its log, in order."""
        self._tails: dict[tuple[Key, bool], asyncio.Task[None]] = {}
        """Tasks that wait for new records of a log, each for all waiting claims of a queue."""
        self._depths: dict[Key, int] = {}
        self._oldest: dict[Key, tuple[str, int, int | None]] = {}
        """For each queue in metrics: the log's creation time, the offset of the first record that
        is not done, and this record's append time (None if unknown)."""
        self._measuring: asyncio.Task[None] | None = None

    # --- queues ----------------------------------------------------------------------------------

    async def put(self, asked: asks.PutQueue, start: Start) -> tuple[Queue, int]:
        """Create a queue that begins at `start`, or change its settings. Adds the logs' creation
        times and offsets to the request `asked`. Returns the queue and its log's end.

        Raises: NoSuchLog for the log or the dead-letter log; QueueExists, TooManyQueues,
        VersionConflict.
        """
        row = await self._reader.rows.row(asked.log)
        offset = await self._consumers.offset(row, start)
        check_within(row, offset, "/from")
        asked = replace(asked, created=row.created_at, start=offset)
        if asked.settings.dead_letter_log:
            dead = await self._reader.rows.row(asked.settings.dead_letter_log)
            dead_end = await self._reader.end(dead.name, dead)
            asked = replace(asked, dead_end=dead_end, dead_created=dead.created_at)
        end = await self._consumers.end(row)  # read first: an error later would hide the change
        put: Queue = await self.ask(asked, row)
        return put, max(end, put.next)

    async def look(self, name: str, queue: str) -> tuple[Queue, int]:
        """A queue and its log's end; -1 if the log was replaced. Raises: NoSuchLog, NoSuchQueue."""
        row = await self._reader.rows.row(name)
        found: Queue = await self.ask(asks.LookQueue(name, queue))
        return found, await self._end_of(found, row)

    async def views(self, name: str, *, after: str, limit: int) -> Sequence[tuple[Queue, int]]:
        """A page of a log's queues, each with its log's end (see `look`). Raises: NoSuchLog."""
        row = await self._reader.rows.row(name)
        found = await self.page(name, after=after, limit=limit)
        return [(each, await self._end_of(each, row)) for each in found]

    async def _end_of(self, queue: Queue, row: LogMetadata) -> int:
        return await self._consumers.end(row) if queue.created == row.created_at else -1

    async def delete(self, name: str, queue: str, version: int | None = None) -> None:
        """Delete a queue, even if its log was deleted. Raises: NoSuchQueue, VersionConflict."""
        await self.ask(asks.DeleteQueue(name, queue, version))

    # --- claims ----------------------------------------------------------------------------------

    async def claim(
        self,
        name: str,
        queue: str,
        count: int,
        *,
        wait_s: float,
        max_bytes: int,
        acked: tuple[tuple[int, Offsets], ...] = (),
    ) -> Claimed:
        """Claim up to `count` records with about `max_bytes` in total, but at least one record.
        Waits up to `wait_s` for records. First acknowledges `acked`: tokens with offsets.

        Raises: NoSuchLog, NoSuchQueue, LogReplaced, EntryUnavailable.
        """
        deadline, is_fresh, owes_wake = self._loop.time() + wait_s, False, False
        created, end, gone = "", 0, 0
        acking: asyncio.Future[asks.Settled] | None = None
        while True:
            # The claim watches the queue before it asks the owner, so that it misses no change.
            changed, is_over = self._watch((name, queue)), True
            try:
                row = (await self._consumers.recent(name, is_fresh=is_fresh)).row
                if row.created_at != created:  # offsets of a deleted log mean nothing in this log
                    created, end, gone = row.created_at, 0, 0
                end = max(end, await self._consumers.end(row))
                if acked:  # the owner decides both requests with one append
                    acking = self.submit(asks.Settle(name, queue, asks.Settlement.ACK, acked))
                    acking.add_done_callback(partial(self._acked, (name, queue)))
                    acked = ()
                taken = await self._take(row, queue, end, count, gone)
                claimed = await self._with_records(row, queue, taken, max_bytes, acking)
                left_s = deadline - self._loop.time()
                owes_wake = owes_wake or bool(claimed.pages)
                if claimed.is_gap and left_s > -_GAPS_S:
                    gone, is_over = await self._gap(row, queue), False
                    continue
                if claimed.pages or (left_s <= 0 and is_fresh):
                    return claimed
                if left_s <= 0:
                    # The cached metadata may lack the ledger of the newest acknowledged records.
                    is_fresh, is_over = True, False
                    continue
                # Unreadable records may have been dropped, which only fresh metadata shows.
                if is_fresh and taken.records:
                    await asyncio.sleep(min(left_s, _POLL_S))  # the records can't be read now
                is_fresh = bool(taken.records)
                if not is_fresh:
                    left_s = min(left_s, taken.wait_ms / 1000 if taken.wait_ms >= 0 else left_s)
                    self._watch_tail((name, queue), row, end, is_over=bool(taken.limit))
                    owes_wake = False
                    await asyncio.wait((changed,), timeout=left_s)
                    if changed.done() and changed.result()[0] == created:
                        end = max(end, changed.result()[1])
                is_over = False
            except errors.LogReplaced:
                if is_fresh:
                    raise
                is_fresh, is_over = True, False  # the metadata may belong to the deleted log
            finally:
                self._unwatch((name, queue), changed)
                owes_wake = owes_wake or changed.done()
                if is_over and owes_wake:
                    self._wake((name, queue))
                changed.cancel()

    async def _gap(self, row: LogMetadata, queue: str) -> int:
        """Return the first offset at or above the queue's floor that has a record. Compaction or
        expiry removed the records in between, which counts like a truncation (rule 27d).
        """
        floor = max((await self.ask(asks.LookQueue(row.name, queue))).floor, row.first_offset)
        with contextlib.suppress(errors.QuorumLogError):  # the claim reports the error
            page = await self._reader.read(row.name, floor, limit=1, created_at=row.created_at)
            return page.batches[0].first_offset if page.batches else page.next
        return 0

    def _acked(self, key: Key, done: asyncio.Future[asks.Settled]) -> None:
        if not (done.cancelled() or done.exception()):
            self._wake_here(key)

    def _watch_tail(self, key: Key, row: LogMetadata, end: int, *, is_over: bool) -> None:
        """Begin to wait for records beyond `end`, unless a task of the queue does so already."""
        if (key, is_over) not in self._tails:
            task = self._start(self._tail(key, row, end, is_over=is_over))
            self._tails[key, is_over] = task
            task.add_done_callback(lambda _: self._tails.pop((key, is_over)))

    async def _tail(self, key: Key, row: LogMetadata, end: int, *, is_over: bool) -> None:
        """Wake a waiting claim once the log is longer than `end`, unless the queue's bounds allow
        no further records (`is_over`). If another gateway owns the log of queues, wakes a claim
        after `_POLL_S` anyway, because the queue may have changed.
        """
        while key in self._watchers:
            wait_s, following = _TAIL_S if self.is_here else _POLL_S, 0
            try:
                if is_over:
                    await asyncio.sleep(wait_s)
                else:
                    page = await self._reader.read(
                        row.name, end, limit=1, wait_s=wait_s, created_at=row.created_at
                    )
                    following = page.next
            except errors.QuorumLogError:
                await asyncio.sleep(_POLL_S)
                self._wake(key)  # the claim reports the error
                return
            if following > end or not self.is_here:
                self._wake(key, (row.created_at, following))
                return

    def _watch(self, key: Key) -> asyncio.Future[_End]:
        future: asyncio.Future[_End] = self._loop.create_future()
        self._watchers.setdefault(key, {})[future] = None
        return future

    def _unwatch(self, key: Key, future: asyncio.Future[_End]) -> None:
        watchers = self._watchers.get(key, {})
        watchers.pop(future, None)
        if not watchers:
            self._watchers.pop(key, None)

    def _wake(self, key: Key, end: _End = ("", 0)) -> None:
        """Wake the claim that has waited longest, so that it requests records below `end`. If this
        claim gets records, the change of the queue wakes the next claim. If the claim ends before
        it waits again, it wakes the next claim itself.
        """
        for future in self._watchers.get(key, ()):
            if not future.done():
                future.set_result(end)
                return

    def _wake_here(self, key: Key) -> None:
        """Wake a claim after this gateway changed a queue. At the owner, `_changed` does so."""
        if not self.is_here:
            self._wake(key)

    def _changed(self, batch: Batch[Queue]) -> None:
        for row in batch.rows:
            self._wake(row.key)
            if row.moves:
                self._move(row.key)

    async def _take(
        self, row: LogMetadata, queue: str, end: int, count: int, gone: int
    ) -> asks.Taken:
        """Claim records at the owner, none below the offset `gone`. With the order `key`, the
        request contains the keys of the records that are not done according to the last answer. If
        the done records have changed, the request is sent again.
        """
        key = (row.name, queue)
        first = max(row.first_offset, gone)
        asked = asks.Take(row.name, queue, row.created_at, first, end, count)
        taken = asks.Taken(0, (), 0)
        for _ in range(_TRIES):
            seen, before = self._seen_keys.get(key), None
            if seen is not None and seen.created == row.created_at:
                before = seen.floor, seen.acked
                asked = replace(asked, keys=await self._keys(row, seen, end))
            taken = await self._asked(asked)
            if taken.order != Order.KEY:
                return taken
            self._saw_keys(key, row, taken)
            if taken.records or before == (taken.floor, taken.acked):
                return taken
        return replace(taken, wait_ms=50)  # the queue keeps changing, so it may have records soon

    async def _asked(self, asked: asks.Take) -> asks.Taken:
        """Claim records, and give them back if the client disconnects meanwhile."""
        answer = self.submit(asked)

        def gone(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and done.exception() is None and done.result().records:
                items = ((done.result().token, NONE),)
                unread = asks.Settle(asked.log, asked.queue, asks.Settlement.UNREAD, items)
                _ = self._start(self._settled_anyway(unread))

        try:
            taken: asks.Taken = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(gone)
            raise
        except errors.NoSuchLog as error:
            raise self._shown(asked, error) from None
        return taken

    def _saw_keys(self, key: Key, row: LogMetadata, taken: asks.Taken) -> None:
        """Note the done records of a queue with the order `key`."""
        seen = self._seen_keys.get(key)
        if seen is None or seen.created != row.created_at:
            seen = self._seen_keys[key] = _Seen(row.created_at)
        self._seen_keys.move_to_end(key)
        if len(self._seen_keys) > _QUEUES_MAX:
            self._seen_keys.popitem(last=False)
        seen.floor, seen.acked = taken.floor, taken.acked
        if len(seen.keys) > 2 * queues.KEYS_MAX:
            # Keep the keys of the first records that are not done, but at most KEYS_MAX keys.
            done = seen.acked
            known = seen.keys.items()
            seen.keys = {at: number for at, number in known if at >= seen.floor and at not in done}

    async def _keys(self, row: LogMetadata, seen: _Seen, end: int) -> tuple[tuple[int, int], ...]:
        """The keys of the first records that are not done, as numbers. Equal keys have equal
        numbers; if two keys share a number, the queue only waits longer.
        """
        floor = max(seen.floor, row.first_offset)
        left = Offsets.span(floor, min(end, floor + queues.WINDOW)) - seen.acked
        wanted = left.lowest(queues.KEYS_MAX)
        known, size = seen.keys, 0
        for begin, stop in (wanted - Offsets.of(at for at in wanted if at in known)).runs:
            at = begin
            while at < stop and size < _KEY_BYTES:
                try:
                    page, following = await self._page(row.name, at, stop, row.created_at, row=row)
                except errors.OffsetTruncated:
                    return ()
                known.update((gone, 0) for gone in range(at, following))
                for found in () if page is None else page.records:
                    known[found.offset] = _number(found.record.key)
                    size += found.record.size
                at = following
        return tuple((at, known[at]) for at in wanted if at in known)

    async def _with_records(
        self,
        row: LogMetadata,
        queue: str,
        taken: asks.Taken,
        max_bytes: int,
        acking: asyncio.Future[asks.Settled] | None,
    ) -> Claimed:
        """Read the records of a claim. Gives back records that exceed `max_bytes`, and settles lost
        records. If the read or the acknowledgement `acking` fails, gives back all records.
        """
        attempts = {at: count for count, each in taken.records for at in each}
        claimed = Claimed(taken.token, (), attempts, taken.lease_ms, taken.limit)
        offsets = Offsets.of(attempts)
        try:
            if acking is not None:
                claimed = replace(claimed, refused=(await acking).refused)
            if not taken.records:
                return claimed
            pages, lost = await self._read_claim(row, offsets, max_bytes)
            read = found = NONE
            for page in pages:
                read |= Offsets.span(page.first, page.next)
                for each in page.batches:
                    found |= Offsets.span(each.first_offset, each.first_offset + each.count)
            lost |= read - found  # these records were removed by compaction or have expired
            parts = ((asks.Settlement.LOST, lost), (asks.Settlement.UNREAD, offsets - read - lost))
            for kind, part in parts:
                if part:
                    items = ((taken.token, part),)
                    await self._settled_anyway(asks.Settle(row.name, queue, kind, items))
        except BaseException:
            _ = self._start(self.give_back(row.name, queue, claimed))
            raise
        return replace(claimed, pages=pages)

    async def _settled_anyway(self, request: asks.Settle) -> None:
        """Settle records. If this fails, the queue hands them out again after the lease."""
        with contextlib.suppress(errors.QuorumLogError):
            await self.ask(request)
            self._wake_here((request.log, request.queue))

    async def _read_claim(
        self, row: LogMetadata, offsets: Offsets, max_bytes: int
    ) -> tuple[Sequence[LogBatches], Offsets]:
        """The records at these offsets, up to the size limit, and the offsets of lost records."""
        pages: list[LogBatches] = []
        lost, left = NONE, max_bytes
        for begin, end in offsets.runs:
            at = begin
            while at < end and left > 0:
                try:
                    page, following = await self._page(
                        row.name, at, end, row.created_at, max_bytes=left, row=row
                    )
                except errors.OffsetTruncated:
                    break
                except errors.QuorumLogError:
                    if pages:
                        return pages, lost
                    raise
                if page is None:
                    lost |= Offsets.span(at, following)
                else:
                    pages.append(page)
                    left -= sum(found.columns.size for found in page.batches) or 1
                at = following
        return pages, lost

    async def give_back(self, name: str, queue: str, claimed: Claimed) -> None:
        """Give back all records of a claim that can't be sent to the client."""
        items = ((claimed.token, NONE),)
        await self._settled_anyway(asks.Settle(name, queue, asks.Settlement.UNREAD, items))

    async def settle(self, request: asks.Settle) -> asks.Settled:
        """Settle records of claims. Raises: NoSuchQueue."""
        settled: asks.Settled = await self.ask(request)
        self._wake_here((request.log, request.queue))
        return settled

    # --- metrics ---------------------------------------------------------------------------------

    async def sweep(self, logs: Collection[str]) -> None:
        """Continue moves, measure the queues, and find deleted logs, if this process owns the log
        of queues. `logs`: the names of almost all logs.
        """
        await self.tick()
        if self.is_here and (self._measuring is None or self._measuring.done()):
            self._measuring = self._start(self._measure())
        gone = {row.log: row.created for row in self.kept.values() if row.log not in logs}
        for name, created in gone.items() if self.is_here and self._database_ms() else ():
            try:
                await self._reader.rows.row(name)
            except errors.NoSuchLog:
                self.log_deleted(name, created)

    async def _measure(self) -> None:
        """Measure the depth of queues for metrics. After an error, a queue keeps its last depth."""
        depths = {}
        for row in islice(sorted(self.kept.values(), key=lambda row: row.key), QUEUES_SHOWN_MAX):
            with contextlib.suppress(errors.QuorumLogError):
                log_row = (await self._consumers.recent(row.log)).row
                end = await self._end_of(row, log_row)
                self._depths[row.key] = row.depth(end)
                if end >= 0 and self._depths[row.key]:
                    await self._find_oldest(row, log_row)
            depths[row.key] = self._depths.get(row.key, 0)
        self._depths = depths
        self._oldest = {key: found for key, found in self._oldest.items() if key in depths}

    async def _find_oldest(self, row: Queue, log_row: LogMetadata) -> None:
        """Get the append time of the first record of a queue that is not done."""
        created, at = log_row.created_at, max(row.floor, log_row.first_offset)
        known = self._oldest.get(row.key)
        if known is None or known[2] is None or known[:2] != (created, at):
            self._oldest[row.key] = created, at, None
            self._oldest[row.key] = created, at, await self._consumers.appended_ms(log_row, at)

    @property
    def measured(self) -> Sequence[tuple[Queue, int, float | None]]:
        """The first queues by name, each with its depth and the age in seconds of its first record
        that is not done. Empty unless this process owns the log of queues.
        """
        rows = self.kept if self.is_here else {}
        return [
            (rows[key], depth, self._age_s(key) if depth else 0.0)
            for key, depth in self._depths.items()
            if key in rows
        ]

    def _age_s(self, key: Key) -> float | None:
        came_ms = self._oldest[key][2] if key in self._oldest else None
        return None if came_ms is None else max(0, self._wall_ms() - came_ms) / 1000


def _number(key: bytes | None) -> int:
    """A hash of a record's key; 0 without a key."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key, digest_size=7).digest(), "big") or 1
