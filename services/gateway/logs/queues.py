"""Work queues at one gateway: claims with their records, settlements, and dead letters (ADR 55).

The owner of the log of queues decides which records a claim gets (`keeper.py`), and the gateway
that the client asked reads them. Records go to a dead-letter log, and back, by a *move*: the queue
names it before the append is sent, and the append has a producer id of its own. So any gateway may
repeat the append, and the other log has its records once.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

from quorumlog import errors
from quorumlog.protocol import queues
from quorumlog.protocol.batch import BATCH_BYTES_MAX, ProducerSeq, Record, encode
from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queues import Move, Order, Queue, QueueSettings, Settlement, Taken
from quorumlog.protocol.rows import Batch, Key
from quorumlog.wire.position_bodies import QUEUE_BODIES
from services.gateway.logs.consumers import Consumers, check_within
from services.gateway.logs.keeper import RowService
from services.gateway.logs.reading import LogReader
from services.gateway.logs.values import LogBatches, ReadRecord, Start

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
"""How often a claim that waits asks another gateway, from which no event comes. By judgement."""
_RETRY_S: Final = 5.0
"""The pause after a move that failed. By judgement."""
_MOVES_AT_ONCE: Final = 16
"""Moves of a queue that are under way: later ones can be joined until they are sent."""
_MOVE_BYTES: Final = 1 << 20
"""The most bytes of a move's append, unless it is a single record."""
_KEY_BYTES: Final = 8 << 20
"""Bytes that one claim reads at most to learn records' keys."""
_QUEUES_MAX: Final = 1000
"""Queues with the order `key` whose records' keys are cached. By judgement."""
_GAPS_S: Final = 5.0
"""How long a claim goes on over offsets without records, beyond the time for which it waits."""

_TRIES: Final = 3
"""Claims of one round by what the last answer said is not done, with the order `key`."""
_SCANNED: Final = 1000

QUEUES_SHOWN_MAX: Final = 100
"""Queues with labels of their own in metrics, whatever names clients choose. By judgement."""

DEAD_LOG: Final = "Dead-Letter-Log"
DEAD_QUEUE: Final = "Dead-Letter-Queue"
DEAD_OFFSET: Final = "Dead-Letter-Offset"
DEAD_ATTEMPTS: Final = "Dead-Letter-Attempts"
DEAD_REASON: Final = "Dead-Letter-Reason"
DEAD_TIME: Final = "Dead-Letter-Timestamp-Ms"
REDRIVEN_FROM: Final = "Redriven-From"
MOVE: Final = "Queue-Move"
"""Headers of records that a move appends."""
_ADDED: Final = frozenset(
    (DEAD_LOG, DEAD_QUEUE, DEAD_OFFSET, DEAD_ATTEMPTS, DEAD_REASON, DEAD_TIME, REDRIVEN_FROM, MOVE)
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The records of a claim, in pages, and how often each was given."""

    token: int
    pages: Sequence[LogBatches]
    attempts: dict[int, int]
    lease_ms: int
    limit: str
    """The bound that keeps the queue from giving further records; empty if none does."""


@dataclass(slots=True)
class _Seen:
    """This gateway's view of a queue with the order `key`: done records, and the keys of others."""

    created: str
    floor: int = -1
    acked: Offsets = NONE
    keys: dict[int, int] = field(default_factory=dict)


class QueueService(RowService[Queue]):
    """Serves this gateway's requests for the work queues of all logs."""

    _list, _free = queues.ListQueues, queues.FreeQueues

    def __init__(self, logs: Any, reader: LogReader, consumers: Consumers, **ports: Any) -> None:
        """The other arguments are those of `RowService`."""
        super().__init__(logs, reader.read, QUEUE_BODIES, queues.Queues, **ports)
        self._reader, self._consumers = reader, consumers
        self._seen_keys: OrderedDict[Key, _Seen] = OrderedDict()
        self._watchers: dict[Key, dict[asyncio.Future[None], None]] = {}
        """Claims that wait for a change of their queue, in order."""
        self._movers: dict[Key, asyncio.Task[None]] = {}
        self._depths: dict[Key, int] = {}
        self._oldest: dict[Key, tuple[str, int, int | None]] = {}
        """For each shown queue: its log's creation, the first record that is not done, and when
        that record was appended; None if that is unknown."""
        self._measuring: asyncio.Task[None] | None = None

    def _counts_once(self, request: Any) -> bool:
        return queues.is_counted_once(request)

    def _makes(self, request: Any) -> bool:
        return isinstance(request, queues.PutQueue)

    def _absent(self, request: Any) -> errors.QuorumLogError:
        return errors.NoSuchQueue(f"the log {request.log} has no queues", log=request.log)

    # --- queues ----------------------------------------------------------------------------------

    async def put(
        self, name: str, queue: str, settings: QueueSettings, start: Start
    ) -> tuple[Queue, int]:
        """Create a queue that begins at `start`, or change its settings. Returns it as `look` does.

        Raises: NoSuchLog for the log or the dead-letter log; QueueExists, TooManyQueues.
        """
        row = await self._reader.rows.row(name)
        offset = await self._consumers.offset(row, start)
        check_within(row, offset, "/from")
        dead_end, dead_created = 0, ""
        if settings.dead_letter_log:
            dead = await self._reader.rows.row(settings.dead_letter_log)
            dead_end, dead_created = await self._reader.end(dead.name, dead), dead.created_at
        asked = queues.PutQueue(
            name, queue, row.created_at, settings, offset, dead_end, dead_created
        )
        end = await self._consumers.end(row)  # an error after the change would deny it
        put: Queue = await self.ask(asked, row)
        return put, max(end, put.next)

    async def look(self, name: str, queue: str) -> tuple[Queue, int]:
        """A queue, and its log's end; -1 if the log was replaced. Raises: NoSuchLog, NoSuchQueue."""
        row = await self._reader.rows.row(name)
        found: Queue = await self.ask(queues.LookQueue(name, queue))
        return found, await self._end_of(found, row)

    async def views(self, name: str, *, after: str, limit: int) -> Sequence[tuple[Queue, int]]:
        """A page of a log's queues, each with its log's end, as `look` has it. Raises: NoSuchLog."""
        row = await self._reader.rows.row(name)
        found = await self.page(name, after=after, limit=limit)
        return [(each, await self._end_of(each, row)) for each in found]

    async def _end_of(self, queue: Queue, row: LogMetadata) -> int:
        return await self._consumers.end(row) if queue.created == row.created_at else -1

    async def delete(self, name: str, queue: str) -> None:
        """Delete a queue, even if its log was deleted. Raises: NoSuchQueue."""
        await self.ask(queues.DeleteQueue(name, queue))

    # --- claims ----------------------------------------------------------------------------------

    async def claim(
        self, name: str, queue: str, count: int, *, wait_s: float, max_bytes: int
    ) -> Claimed:
        """Claim up to `count` records, but of more than `max_bytes` only one. Waits up to `wait_s`
        while there are none.

        Raises: NoSuchLog, NoSuchQueue, LogReplaced, EntryUnavailable.
        """
        deadline, end, is_fresh = self._loop.time() + wait_s, 0, False
        gone = 0
        while True:
            # Watched before the owner is asked, so that no change is missed.
            changed, is_over = self._watch((name, queue)), True
            try:
                row = (await self._consumers.recent(name, is_fresh=is_fresh)).row
                end = max(end, await self._consumers.end(row))
                taken = await self._take(row, queue, end, count, gone)
                claimed = await self._with_records(row, queue, taken, max_bytes)
                left_s = deadline - self._loop.time()
                if claimed.pages:
                    self._wake_here((name, queue))
                has_records = any(page.batches for page in claimed.pages)
                if has_records or (left_s <= 0 and is_fresh and not claimed.pages):
                    return claimed
                if claimed.pages and left_s > -_GAPS_S:
                    # All records were removed or have expired: go on behind the gap.
                    gone, is_over = await self._gap(row, queue), False
                    continue
                if claimed.pages:
                    return claimed
                if left_s <= 0:
                    # Cached metadata may lack the ledger of records that were acknowledged before.
                    is_fresh, is_over = True, False
                    continue
                # Records that could not be read were dropped from the log: its metadata says so.
                if is_fresh and taken.records:
                    await asyncio.sleep(min(left_s, _POLL_S))  # or can't be read for now
                is_fresh = bool(taken.records)
                if not is_fresh:
                    end = await self._news(row, end, taken, changed, left_s)
                is_over = False
            except errors.LogReplaced:
                if is_fresh:
                    raise
                is_fresh, end = True, 0  # the cached metadata may be of the old log
                is_over = False
            finally:
                self._unwatch((name, queue), changed)
                if is_over and changed.done():
                    self._wake((name, queue))
                changed.cancel()

    async def _gap(self, row: LogMetadata, queue: str) -> int:
        """The first offset from the queue's floor on that has a record. The log has removed the
        records in between, as a truncation would (rule 27d).
        """
        floor = max((await self.ask(queues.LookQueue(row.name, queue))).floor, row.first_offset)
        with contextlib.suppress(errors.QuorumLogError):  # a claim finds out what is wrong
            page = await self._reader.read(row.name, floor, limit=1, created_at=row.created_at)
            return page.batches[0].first_offset if page.batches else page.next
        return 0

    async def _news(
        self, row: LogMetadata, end: int, taken: Taken, changed: asyncio.Future[None], left_s: float
    ) -> int:
        """Wait until the queue may have records to give. Returns the log's end."""
        left_s = min(left_s, taken.wait_ms / 1000 if taken.wait_ms >= 0 else left_s)
        if not self.is_here:
            left_s = min(left_s, _POLL_S)
        tail = self._loop.create_task(self._tail(row, end, left_s, is_over=bool(taken.limit)))
        try:
            await asyncio.wait((changed, tail), timeout=left_s, return_when="FIRST_COMPLETED")
            return tail.result() if tail.done() else end
        finally:
            tail.cancel()

    async def _tail(self, row: LogMetadata, end: int, wait_s: float, *, is_over: bool) -> int:
        """The log's end, once the log is longer. Waits for the whole time if `is_over`."""
        if not is_over:
            with contextlib.suppress(errors.Unavailable, errors.EntryLost):
                page = await self._reader.read(
                    row.name, end, limit=_SCANNED, wait_s=wait_s, created_at=row.created_at
                )
                if page.next > end:
                    return page.next
        await asyncio.sleep(wait_s)
        return end

    def _watch(self, key: Key) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._watchers.setdefault(key, {})[future] = None
        return future

    def _unwatch(self, key: Key, future: asyncio.Future[None]) -> None:
        watchers = self._watchers.get(key, {})
        watchers.pop(future, None)
        if not watchers:
            self._watchers.pop(key, None)

    def _wake(self, key: Key) -> None:
        """Let the claim that has waited longest ask again. If it gets records, this change wakes
        the next claim; if it ends without asking, it wakes the next claim itself.
        """
        for future in self._watchers.get(key, ()):
            if not future.done():
                future.set_result(None)
                return

    def _wake_here(self, key: Key) -> None:
        """Wake a claim after this gateway's own change. The owner wakes one after each change."""
        if not self.is_here:
            self._wake(key)

    def _changed(self, batch: Batch[Queue]) -> None:
        for row in batch.rows:
            self._wake(row.key)
            if row.moves:
                self._move(row.key)

    async def _take(self, row: LogMetadata, queue: str, end: int, count: int, gone: int) -> Taken:
        """Claim records at the owner, none below the offset `gone`. With the order `key`, the request has the keys of the records
        that are not done by the last answer; it is sent again if these records have changed.
        """
        key = (row.name, queue)
        first = max(row.first_offset, gone)
        asked = queues.Take(row.name, queue, row.created_at, first, end, count)
        taken = Taken(0, (), 0)
        for _ in range(_TRIES):
            seen = self._seen_keys.get(key)
            if seen is not None and seen.created == row.created_at:
                asked = queues.Take(
                    row.name,
                    queue,
                    row.created_at,
                    first,
                    end,
                    count,
                    await self._keys(row, seen, end),
                )
            taken = await self._asked(asked)
            if taken.order != Order.KEY or not self._saw_keys(key, row, taken) or taken.records:
                return taken
        return replace(taken, wait_ms=50)  # the queue keeps changing: it may have records

    async def _asked(self, asked: queues.Take) -> Taken:
        """Claim records. If the client goes away meanwhile, they are given back."""
        task: asyncio.Task[Any] = self._start(self.ask(asked))

        def gone(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and done.exception() is None and done.result().records:
                items = ((done.result().token, NONE),)
                unread = queues.Settle(asked.log, asked.queue, Settlement.UNREAD, items)
                _ = self._start(self._settled_anyway(unread))

        try:
            taken: Taken = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(gone)
            raise
        return taken

    def _saw_keys(self, key: Key, row: LogMetadata, taken: Taken) -> bool:
        """Note what a queue with the order `key` has done. Returns whether that is news."""
        seen = self._seen_keys.get(key)
        if seen is None or seen.created != row.created_at:
            seen = self._seen_keys[key] = _Seen(row.created_at)
        self._seen_keys.move_to_end(key)
        if len(self._seen_keys) > _QUEUES_MAX:
            self._seen_keys.popitem(last=False)
        is_news = (taken.floor, taken.acked) != (seen.floor, seen.acked)
        seen.floor, seen.acked = taken.floor, taken.acked
        if len(seen.keys) > 2 * queues.KEYS_MAX:
            # What is left are the first records that are not done: KEYS_MAX at most.
            done = seen.acked
            known = seen.keys.items()
            seen.keys = {at: number for at, number in known if at >= seen.floor and at not in done}
        return is_news

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
                    page = await self._reader.read(
                        row.name, at, limit=stop - at, created_at=row.created_at
                    )
                    page = page.below(stop)
                except errors.EntryLost as error:
                    following = min(int(error.members["next_offset"]), stop)
                    known.update((gone, 0) for gone in range(at, following))
                    at = following
                    continue
                except errors.OffsetTruncated:
                    return ()
                if page.is_empty:
                    break
                known.update((gone, 0) for gone in range(at, page.next))  # compaction leaves gaps
                for found in page.records:
                    known[found.offset] = _number(found.record.key)
                    size += found.record.size
                at = page.next
        return tuple((at, known[at]) for at in wanted if at in known)

    async def _with_records(
        self, row: LogMetadata, queue: str, taken: Taken, max_bytes: int
    ) -> Claimed:
        """Read the records of a claim. Records without room are given back; lost ones are noted."""
        attempts = {at: count for count, each in taken.records for at in each}
        claimed = Claimed(taken.token, (), attempts, taken.lease_ms, taken.limit)
        if not taken.records:
            return claimed
        try:
            pages, lost = await self._read_claim(row, Offsets.of(attempts), max_bytes)
        except BaseException:
            unread = queues.Settle(
                row.name, queue, Settlement.UNREAD, ((taken.token, Offsets.of(attempts)),)
            )
            _ = self._start(self._settled_anyway(unread))
            raise
        read, found = NONE, NONE
        for page in pages:
            read |= Offsets.span(page.first, page.next)
            for each in page.batches:
                found |= Offsets.span(each.first_offset, each.first_offset + each.count)
        lost |= read - found  # compaction has removed these records
        unread_part = Offsets.of(attempts) - read - lost
        for kind, part in ((Settlement.LOST, lost), (Settlement.UNREAD, unread_part)):
            if part:
                items = ((taken.token, part),)
                await self._settled_anyway(queues.Settle(row.name, queue, kind, items))
        return Claimed(taken.token, pages, attempts, taken.lease_ms, taken.limit)

    async def _settled_anyway(self, request: queues.Settle) -> None:
        """Settle records; if that fails, they are given again after the lease."""
        with contextlib.suppress(errors.QuorumLogError):
            await self.ask(request)
            self._wake_here((request.log, request.queue))

    async def _read_claim(
        self, row: LogMetadata, offsets: Offsets, max_bytes: int
    ) -> tuple[Sequence[LogBatches], Offsets]:
        """The records at these offsets, as far as there is room, and the offsets of lost ones."""
        pages: list[LogBatches] = []
        lost, left = NONE, max_bytes
        for begin, end in offsets.runs:
            at = begin
            while at < end and left > 0:
                try:
                    page = await self._reader.read(
                        row.name, at, limit=end - at, max_bytes=left, created_at=row.created_at
                    )
                    page = page.below(end)
                except errors.EntryLost as error:
                    following = min(int(error.members["next_offset"]), end)
                    lost |= Offsets.span(at, following)
                    at = following
                    continue
                except errors.OffsetTruncated:
                    break
                except errors.QuorumLogError:
                    if pages:
                        return pages, lost
                    raise
                if page.is_empty:
                    break
                pages.append(page)
                left -= sum(found.columns.size for found in page.batches) or 1
                at = page.next
        return pages, lost

    async def give_back(self, name: str, queue: str, claimed: Claimed) -> None:
        """Give all records of a claim back that can't be sent."""
        items = ((claimed.token, NONE),)
        await self._settled_anyway(queues.Settle(name, queue, Settlement.UNREAD, items))

    async def settle(self, request: queues.Settle) -> queues.Settled:
        """Settle records of claims. Raises: NoSuchQueue."""
        settled: queues.Settled = await self.ask(request)
        self._wake_here((request.log, request.queue))
        return settled

    # --- dead letters ----------------------------------------------------------------------------

    async def tick(self) -> None:
        """Find records that were given too often, and continue moves, if this process owns the log
        of queues.
        """
        if not self.is_here:
            return
        asked = []
        for row in list(self.kept.values()):
            if row.moves:
                self._move(row.key)
            most = row.settings.max_attempts
            if most and any(count >= most for count, _ in row.attempts):
                asked.append(self.submit(queues.Sweep(*row.key)))
        await asyncio.gather(*asked, return_exceptions=True)
        if self._measuring is None or self._measuring.done():
            self._measuring = self._start(self._measure())

    async def _measure(self) -> None:
        """Measure the depth of the shown queues; after an error a queue keeps its last depth."""
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
        """Learn when a queue's first record that is not done was appended."""
        created, at = log_row.created_at, max(row.floor, log_row.first_offset)
        known = self._oldest.get(row.key)
        if known is None or known[2] is None or known[:2] != (created, at):
            self._oldest[row.key] = created, at, None
            self._oldest[row.key] = created, at, await self._consumers.appended_ms(log_row, at)

    @property
    def measured(self) -> Sequence[tuple[Queue, int, float | None]]:
        """The first queues by name, each with its depth and the age in seconds of its first record
        that is not done, if this process owns their log.
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

    def _move(self, key: Key) -> None:
        """Carry out the moves of a queue in the background, unless a task does that already."""
        if key not in self._movers:
            task = self._movers[key] = self._start(self._moving(key))
            task.add_done_callback(lambda _: self._movers.pop(key))

    async def _moving(self, key: Key) -> None:
        while self.is_here and (row := self.kept.get(key)) is not None and row.moves:
            failed = 0
            for move in row.moves[:_MOVES_AT_ONCE]:
                try:
                    await self._carry_out(row, move)
                except errors.QuorumLogError as error:
                    failed += 1
                    await self._note_failure(key, move, error)
                    log.warning("move-failed", extra={"queue": key, "error": repr(error)})
                except Exception:
                    failed += 1
                    log.exception("move-broke", extra={"queue": key})
            if failed:
                await asyncio.sleep(_RETRY_S)

    async def _note_failure(self, key: Key, move: Move, error: errors.QuorumLogError) -> None:
        """Let the queue say why its dead letters are not sent."""
        row = self.kept.get(key)
        if row is not None and row.failed != error.code and not move.is_back:
            with contextlib.suppress(errors.QuorumLogError):
                await self.ask(queues.FailMove(*key, error.code))

    async def _carry_out(self, row: Queue, move: Move) -> Queue:
        """Do the next step of a move. Returns the queue after it."""
        dead = row.settings.dead_letter_log
        source, target = (dead, row.log) if move.is_back else (row.log, dead)
        try:
            records, lost = await self._moved(row, source, move)
        except errors.LogReplaced:  # the log of these records was deleted
            return await self._ended(row, move, len(move.offsets))
        records, keyless = await self._fitted(target, records)
        if keyless and move.is_back:
            lost |= keyless
        elif keyless and move.since < 0:
            # Once the move has begun, the dead-letter log can't be changed any more.
            raise errors.KeyRequired("the dead-letter log needs a key with each record", log=target)
        if move.since < 0:
            return await self._begun(row, move, target, Offsets.of(records) | lost)
        producer = ProducerSeq(f"quorumlog.queue.{move.id}", 0, 0)
        created = row.created if move.is_back else move.created
        try:
            if records:
                call = Append.of(
                    list(records.values()), producer, since=move.since, created_at=created
                )
                await self._logs.append(target, call)
        except errors.LogReplaced:
            if (await self._reader.rows.row(target)).created_at == created:
                raise  # the owner did not know that yet
            # What was sent to the log before is gone with it.
            return await self._begun(row, move, target, move.offsets)
        except (errors.ExpiredProducer, errors.InvalidRequest):
            # The log no longer knows whether it has the records. It will not take this append any
            # more, so what it has by now is the answer.
            end = await self._reader.end(target)
            if not await self._has(target, move, end, created):
                return await self._begun(row, move, target, move.offsets)
        return await self._ended(row, move, len(lost))

    async def _fitted(
        self, target: str, records: dict[int, Record]
    ) -> tuple[dict[int, Record], Offsets]:
        """Records as their target takes them, and the offsets of those that it does not take: a log
        that is compacted wants keys, and no times to live (rules 27d and 27f).
        """
        if not (await self._reader.rows.row(target)).settings.compacts:
            return records, NONE
        taken = {
            at: replace(record, ttl_s=0) for at, record in records.items() if record.key is not None
        }
        return taken, Offsets.of(at for at in records if at not in taken)

    async def _ended(self, row: Queue, move: Move, lost: int) -> Queue:
        ended: Queue = await self.ask(queues.EndMove(row.log, row.queue, move.id, lost))
        return ended

    async def _begun(self, row: Queue, move: Move, target: str, kept: Offsets) -> Queue:
        """Record that the append of these records may be sent, and the present end of its log."""
        log_row = await self._reader.rows.row(target)
        if move.is_back and log_row.created_at != row.created:
            return await self._ended(row, move, 0)
        # Once a move has begun, the dead-letter log can't be changed any more.
        if log_row.writer_token and move.since < 0:
            raise errors.LogFenced("the log accepts appends of its writer only", log=target)
        if log_row.state is LogState.CLOSED and move.since < 0:
            raise errors.LogClosed("the log is closed", log=target)
        end = await self._reader.end(target, log_row)
        created = move.created if move.is_back else log_row.created_at
        seen = (move.since, move.created)
        begin = queues.BeginMove(row.log, row.queue, move.id, seen, end, kept, created)
        begun: Queue = await self.ask(begin)
        return begun

    async def _moved(
        self, row: Queue, source: str, move: Move
    ) -> tuple[dict[int, Record], Offsets]:
        """The records of a move, by their offsets, as the move appends them: as many as one append
        takes before the first one was sent. And the offsets of records that the log does not have
        any more, or that no append takes.
        """
        found: dict[int, Record] = {}
        size, lost = 0, NONE
        created = move.created if move.is_back else row.created
        for begin, end in move.offsets.runs:
            at = begin
            while at < end:
                try:
                    page = await self._reader.read(
                        source, at, limit=end - at, max_bytes=_MOVE_BYTES, created_at=created
                    )
                    page = page.below(end)
                except errors.OffsetTruncated as error:
                    following = min(int(error.members["first_offset"]), end)
                except errors.EntryLost as error:
                    following = min(int(error.members["next_offset"]), end)
                else:
                    if page.is_empty:
                        raise errors.EntryUnavailable("the log ends before a move", log=source)
                    gone = Offsets.span(at, page.next)
                    for each in page.records:
                        gone -= Offsets.span(each.offset, each.offset + 1)
                        shown = _shown(row, move, each)
                        if shown is None:
                            log.warning("too-large-to-move", extra={"queue": row.key})
                            lost |= Offsets.span(each.offset, each.offset + 1)
                            continue
                        size += _size(shown)
                        if move.since < 0 and found and size > _MOVE_BYTES:
                            return found, lost
                        found[each.offset] = shown
                    lost |= gone
                    at = page.next
                    continue
                lost |= Offsets.span(at, following)
                at = following
        return found, lost

    async def _has(self, target: str, move: Move, end: int, created: str) -> bool:
        """Whether a log has a move's records between its `since` and `end`."""
        async for each in self._scan(target, move.since, end, created):
            if (MOVE, str(move.id)) in each.record.headers:
                return True
        return False

    async def _scan(self, name: str, begin: int, end: int, created: str) -> Any:
        """The records from `begin` to `end` - 1 that the log still has."""
        at = begin
        while at < end:
            try:
                page = await self._reader.read(name, at, limit=_SCANNED, created_at=created)
            except errors.OffsetTruncated as error:
                at = int(error.members["first_offset"])
                continue
            except errors.EntryLost as error:
                at = int(error.members["next_offset"])
                continue
            if page.is_empty:
                raise errors.EntryUnavailable(f"records from {at} can't be read now", log=name)
            for each in page.records:
                if each.offset < end:
                    yield each
            at = page.next

    async def redrive(self, name: str, queue: str, count: int) -> int:
        """Send up to `count` dead letters of a queue back to its log, oldest first. Returns how
        many; another request may send some of them. Raises: NoSuchQueue, NoSuchLog, LogReplaced,
        InvalidRequest.
        """
        created = (await self._reader.rows.row(name)).created_at
        row: Queue = await self.ask(queues.LookQueue(name, queue))
        dead = row.settings.dead_letter_log
        if not dead:
            raise errors.InvalidRequest("the queue has no dead-letter log", log=name)
        dead_row = await self._reader.rows.row(dead)
        end = await self._reader.end(dead, dead_row)
        begin = row.redriven if row.dead_created == dead_row.created_at else 0
        mine, until = list[int](), end
        async for each in self._scan(dead, begin, end, dead_row.created_at):
            if _is_of(each.record, name, queue):
                mine.append(each.offset)
            if len(mine) == count or (mine and each.offset - mine[0] >= queues.WINDOW):
                until = each.offset + 1
                break
        offsets = Offsets.of(mine)
        asked = queues.Redrive(
            name, queue, created, dead_row.created_at, row.redriven, until, offsets
        )
        before = {move.id for move in row.moves}
        row = await self.ask(asked)
        is_mine = any(each.offsets == offsets and each.id not in before for each in row.moves)
        for _ in range(2 * len(offsets)):
            move = next((each for each in row.moves if each.is_back), None)
            if move is None:
                break
            row = await self._carry_out(row, move)
        return len(offsets) if is_mine else 0


def _number(key: bytes | None) -> int:
    """A number that stands for a record's key; 0 without a key."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key, digest_size=7).digest(), "big") or 1


def _is_of(record: Record, name: str, queue: str) -> bool:
    headers = dict(record.headers)
    return (headers.get(DEAD_LOG), headers.get(DEAD_QUEUE)) == (name, queue)


def _shown(row: Queue, move: Move, found: ReadRecord) -> Record | None:
    """A record as a move appends it: with as many of the added headers as an append has room for.
    None if it has no room for the record.
    """
    record = found.record
    kept = [(name, text) for name, text in record.headers if name not in _ADDED]
    added: Iterable[tuple[str, str]]
    if move.is_back:
        added = ((REDRIVEN_FROM, f"{row.settings.dead_letter_log}/{found.offset}"),)
    else:
        attempts = next((count for count, each in row.attempts if found.offset in each), 0)
        added = (
            (DEAD_LOG, row.log),
            (DEAD_QUEUE, row.queue),
            (DEAD_OFFSET, str(found.offset)),
            (DEAD_ATTEMPTS, str(attempts)),
            (DEAD_REASON, move.reason),
            (DEAD_TIME, str(found.timestamp_ms)),
        )
    all_of_them = (*added, (MOVE, str(move.id)))
    without_reason = tuple(pair for pair in all_of_them if pair[0] != DEAD_REASON)
    for more in (all_of_them, without_reason, all_of_them[-1:], ()):
        shown = replace(record, headers=(*kept, *more))
        if _size(shown) <= BATCH_BYTES_MAX:
            return shown
    return None


def _size(record: Record) -> int:
    """The bytes of an append of this record by a move."""
    return len(encode((record,), ProducerSeq("quorumlog.queue." + "9" * 19, 0, 0)))
