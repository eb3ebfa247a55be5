"""Moves the dead letters of queues to dead-letter logs, and back (ADR 55).

The queue's row names a move before the move's append is sent, and each move has its own producer
id. So any gateway may retry the append, and the target log stores the records only once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from quorumlog import errors
from quorumlog.protocol import queue_requests as asks
from quorumlog.protocol.batch import BATCH_BYTES_MAX, ProducerSeq, Record, encode
from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.log.messages import Append
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_state import Move, Queue
from quorumlog.protocol.queues import WINDOW, Queues
from quorumlog.protocol.rows import Key
from quorumlog.wire.position_bodies import QUEUE_BODIES
from services.gateway.logs.keeper import RowService
from services.gateway.logs.reading import LogReader
from services.gateway.logs.values import LogBatches, ReadRecord

log = logging.getLogger(__name__)

_RETRY_S: Final = 5.0
"""The pause after a failed move. Chosen by judgement."""
_MOVES_AT_ONCE: Final = 16
"""Maximum moves of a queue in one round, in each direction. Dead letters can join waiting moves."""
_MOVE_BYTES: Final = 1 << 20
"""Maximum bytes of a move's append, unless the append has a single record."""
_MOVE_READS: Final = 8
"""Maximum reads of a move's source. So a gateway soon finishes a step of a move, and the next owner
need not repeat many reads, which may each take a second on a busy machine. Chosen by judgement."""
_SCANNED: Final = 1000
"""Maximum records of one read. A read includes records between those that it is for, because fewer
reads are faster."""
_FAILED: Final = (errors.ExpiredProducer, errors.InvalidRequest, errors.LogClosed, errors.LogFenced)
"""Errors of an append that the log will never accept."""

DEAD_LOG: Final = "Dead-Letter-Log"
DEAD_QUEUE: Final = "Dead-Letter-Queue"
DEAD_OFFSET: Final = "Dead-Letter-Offset"
DEAD_ATTEMPTS: Final = "Dead-Letter-Attempts"
DEAD_REASON: Final = "Dead-Letter-Reason"
DEAD_TIME: Final = "Dead-Letter-Timestamp-Ms"
REDRIVEN_FROM: Final = "Redriven-From"
MOVE: Final = "Queue-Move"
"""Headers that a move adds to records."""
_ADDED: Final = frozenset(
    (DEAD_LOG, DEAD_QUEUE, DEAD_OFFSET, DEAD_ATTEMPTS, DEAD_REASON, DEAD_TIME, REDRIVEN_FROM, MOVE)
)


class QueueMoves(RowService[Queue]):
    """Serves this gateway's requests for rows of queues, and carries out moves of dead letters."""

    def __init__(self, logs: Any, reader: LogReader, **ports: Any) -> None:
        """Create the service. `ports`: arguments of `RowService`."""
        super().__init__(logs, reader.read, QUEUE_BODIES, Queues, **ports)
        self._reader = reader
        self._movers: dict[Key, asyncio.Task[None]] = {}

    def _counts_once(self, request: Any) -> bool:
        return asks.is_counted_once(request)

    def _makes(self, request: Any) -> bool:
        return isinstance(request, asks.PutQueue)

    async def tick(self) -> None:
        """Find records whose attempts are used up, and continue moves, if this process owns the log
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
                asked.append(self.submit(asks.LookQueue(*row.key)))
        await asyncio.gather(*asked, return_exceptions=True)

    def _move(self, key: Key) -> None:
        """Carry out the moves of a queue in the background, unless a task is already running."""
        if key not in self._movers:
            task = self._movers[key] = self._start(self._moving(key))
            task.add_done_callback(lambda _: self._movers.pop(key))

    async def _moving(self, key: Key) -> None:
        while self.is_here and (row := self.kept.get(key)) is not None and row.moves:
            failed = 0
            away = [move for move in row.moves if not move.is_back][:_MOVES_AT_ONCE]
            back = [move for move in row.moves if move.is_back][:_MOVES_AT_ONCE]
            for move in (*away, *back):
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
        """Store the code of a failed move's error in the queue, where clients can read it."""
        row = self.kept.get(key)
        if row is not None and row.failed != error.code and not move.is_back:
            with contextlib.suppress(errors.QuorumLogError):
                await self.ask(asks.FailMove(*key, error.code))

    async def _carry_out(self, row: Queue, move: Move) -> Queue:
        """Carry out the next step of a move. Returns the changed queue."""
        try:
            return await self._advanced(row, move)
        except errors.NoSuchLog as error:
            if error.log != row.settings.dead_letter_log or not self._database_ms():
                raise
            # The records that were sent to the deleted dead-letter log are gone, too.
            if move.is_back:
                await self._ended(row, move, 0)
            if move.is_back or move.since < 0:
                raise
            return await self._restarted(row, move)

    async def _advanced(self, row: Queue, move: Move) -> Queue:
        dead = row.settings.dead_letter_log
        source, target = (dead, row.log) if move.is_back else (row.log, dead)
        try:
            records, lost = await self._moved(row, source, move)
        except errors.LogReplaced:  # the log that had the records was deleted
            return await self._ended(row, move, len(move.offsets))
        records, keyless = await self._fitted(target, records)
        if keyless and (move.is_back or move.since >= 0):
            lost |= keyless
        elif keyless:
            detail = f"{target} is compacted and requires keys: set another dead_letter_log"
            raise errors.KeyRequired(detail, log=target)
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
                raise  # the log's owner has stale metadata
            return await self._restarted(row, move)
        except _FAILED as error:
            # The append has succeeded only if the log has its records already.
            end = await self._reader.end(target)
            if not await self._has(target, move, end, created):
                if isinstance(error, errors.InvalidRequest) and move.since <= end:
                    detail = "a copy of the append with other records is in flight: retry later"
                    raise errors.EntryUnavailable(detail, log=target) from error
                return await self._restarted(row, move)
        return await self._ended(row, move, len(lost))

    async def _fitted(
        self, target: str, records: dict[int, Record]
    ) -> tuple[dict[int, Record], Offsets]:
        """Returns the records in a form that the target log accepts, and the offsets of all other
        records. A compacted log requires keys, and allows no times to live (rules 27d and 27f).
        """
        if not (await self._reader.rows.row(target)).settings.compacts:
            return records, NONE
        taken = {
            at: replace(record, ttl_s=0) for at, record in records.items() if record.key is not None
        }
        return taken, Offsets.of(at for at in records if at not in taken)

    async def _ended(self, row: Queue, move: Move, lost: int) -> Queue:
        ended: Queue = await self.ask(asks.EndMove(row.log, row.queue, move.id, lost))
        return ended

    async def _begun(self, row: Queue, move: Move, target: str, kept: Offsets) -> Queue:
        """Store in the queue the target log's end, and permission to send the append of `kept`."""
        log_row = await self._reader.rows.row(target)
        try:  # after a move has begun, the dead-letter log can no longer be changed
            log_row.check_created(row.created if move.is_back else None)
            _check_open(log_row)
        except errors.QuorumLogError:
            if move.is_back:
                await self._ended(row, move, 0)
            raise
        end = await self._reader.end(target, log_row)
        return await self._stored(row, move, log_row.created_at, end, kept)

    async def _restarted(self, row: Queue, move: Move) -> Queue:
        """Store in the queue that the target log will never accept the append that the move sent.
        The move can then begin anew, possibly with another dead-letter log.
        """
        return await self._stored(row, move, "", -1, move.offsets)

    async def _stored(
        self, row: Queue, move: Move, created: str, since: int, kept: Offsets
    ) -> Queue:
        created = move.created if move.is_back else created
        seen = (move.since, move.created)
        begin = asks.BeginMove(row.log, row.queue, move.id, seen, since, kept, created)
        begun: Queue = await self.ask(begin)
        return begun

    async def _moved(
        self, row: Queue, source: str, move: Move
    ) -> tuple[dict[int, Record], Offsets]:
        """Returns a move's records by offset, as the move appends them, and the offsets of lost
        records. If the move has not begun, returns only as many records as fit into one append and
        take `_MOVE_READS` reads. A record is lost if the log no longer has it, or if it is too
        large for an append.
        """
        found: dict[int, Record] = {}
        size, reads, lost, left = 0, 0, NONE, move.offsets
        created = move.created if move.is_back else row.created
        while left.bits and (move.since >= 0 or reads < _MOVE_READS):
            end = left.below(left.first + _SCANNED).end
            page, following = await self._page(
                source, left.first, end, created, max_bytes=_MOVE_BYTES
            )
            reads, read, left = reads + 1, left.below(following), left - left.below(following)
            records = () if page is None else page.records
            lost |= read - Offsets.of(each.offset for each in records)
            for each in records:
                if each.offset not in read:
                    continue
                shown = _shown(row, move, each)
                if shown is None:
                    log.warning("too-large-to-move", extra={"queue": row.key})
                    lost |= Offsets.span(each.offset, each.offset + 1)
                    continue
                size += _size(shown)
                if move.since < 0 and found and size > _MOVE_BYTES:
                    return found, lost
                found[each.offset] = shown
        return found, lost

    async def _has(self, target: str, move: Move, end: int, created: str) -> bool:
        """Whether a log has a move's records between the move's `since` and `end`."""
        async for each in self._scan(target, move.since, end, created):
            if (MOVE, str(move.id)) in each.record.headers:
                return True
        return False

    async def _scan(self, name: str, begin: int, end: int, created: str) -> Any:
        """Yields the records from `begin` to `end` - 1 that the log still has."""
        at = begin
        while at < end:
            page, at = await self._page(name, at, min(end, at + _SCANNED), created)
            for each in () if page is None else page.records:
                yield each

    async def _page(
        self,
        name: str,
        at: int,
        end: int,
        created: str,
        *,
        max_bytes: int = 1 << 20,
        row: LogMetadata | None = None,
    ) -> tuple[LogBatches | None, int]:
        """Returns a log's records from `at` to below `end`, and the next offset. None if the log no
        longer has the records. `row`: recent metadata, which may save a request.

        Raises: LogReplaced, EntryUnavailable; OffsetTruncated if `row` is too old.
        """
        page: LogBatches | None = None
        try:
            if row is not None:
                with contextlib.suppress(errors.QuorumLogError):
                    page = await self._reader.full_page(
                        row, at, limit=end - at, max_bytes=max_bytes
                    )
            page = page or await self._reader.read(
                name, at, limit=end - at, max_bytes=max_bytes, created_at=created
            )
        except errors.EntryLost as error:
            return None, min(int(error.members["next_offset"]), end)
        except errors.OffsetTruncated as error:
            if row is not None:
                raise
            return None, min(int(error.members["first_offset"]), end)
        if page.is_empty:
            raise errors.EntryUnavailable(f"offset {at} can't be read now: retry later", log=name)
        page = page.below(end)
        return page, page.next

    async def redrive(self, name: str, queue: str, count: int) -> int:
        """Send up to `count` dead letters of a queue back to its log, oldest first. Returns the
        number of records sent by this request; 0 if a concurrent request was first. Raises:
        NoSuchQueue, NoSuchLog, LogReplaced, LogClosed, LogFenced, InvalidRequest.
        """
        log_row = await self._reader.rows.row(name)
        row: Queue = await self.ask(asks.LookQueue(name, queue))
        dead = row.settings.dead_letter_log
        if not dead:
            raise errors.InvalidRequest(f"queue {queue} has no dead_letter_log: set it", log=name)
        _check_open(log_row)
        dead_row = await self._reader.rows.row(dead)
        end = await self._reader.end(dead, dead_row)
        begin = row.redriven if row.dead_created == dead_row.created_at else 0
        mine, until = list[int](), end
        async for each in self._scan(dead, begin, end, dead_row.created_at):
            if _is_of(each.record, name, queue):
                mine.append(each.offset)
            if len(mine) == count or (mine and each.offset - mine[0] >= WINDOW):
                until = each.offset + 1
                break
        offsets = Offsets.of(mine)
        seen = row.redriven, row.dead_created
        asked = asks.Redrive(
            name, queue, log_row.created_at, dead_row.created_at, seen, until, offsets
        )
        before = {move.id for move in row.moves}
        row = await self.ask(asked)
        is_mine = any(each.offsets == offsets and each.id not in before for each in row.moves)
        for _ in range(2 * len(offsets)):
            move = next((each for each in row.moves if each.is_back), None)
            if move is None:
                break
            row = await self._carry_out(row, move)
        try:  # the owner's task may have ended the move without an append
            _check_open(await self._reader.fresh(name, log_row.created_at))
            await self._reader.fresh(dead, dead_row.created_at)
        except errors.QuorumLogError as error:
            raise error.with_outcome(errors.UNKNOWN) from None
        return len(offsets) if is_mine else 0


def _check_open(row: LogMetadata) -> None:
    """Raises: LogFenced, LogClosed if the log accepts no appends of moves."""
    if row.writer_token:
        detail = f"no record can be moved to {row.name}: only the writer that opened it may append"
        raise errors.LogFenced(detail, log=row.name)
    if row.state is LogState.CLOSED:
        raise errors.LogClosed(f"no record can be moved to the closed log {row.name}", log=row.name)


def _is_of(record: Record, name: str, queue: str) -> bool:
    headers = dict(record.headers)
    return (headers.get(DEAD_LOG), headers.get(DEAD_QUEUE)) == (name, queue)


def _shown(row: Queue, move: Move, found: ReadRecord) -> Record | None:
    """Returns the record that a move appends, with as many added headers as fit into an append.
    None if the record doesn't fit even without these headers.
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
    """The size in bytes of a move's append with only this record."""
    return len(encode((record,), ProducerSeq("quorumlog.queue." + "9" * 19, 0, 0)))
