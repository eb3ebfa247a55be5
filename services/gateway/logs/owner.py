"""The owner of one log: gives out offsets, pipelines appends, remembers producers, rolls.

An owner lives as long as its handle on the last ledger of the row. Whatever goes wrong ends it:
it is never mended. What it had in flight is settled by the manager, by the end of its ledger
(rule 24), and the next owner is made from the row and a replay.

Invariants:
  - entry n of the ledger holds the records from `records_before`, so offsets are dense (rule 25);
  - nothing is written to a ledger before the row names it with its first offset (rule 23);
  - `in_flight` is in the order of entry ids, and acknowledged from its head only.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final

from quorumlog.errors import (
    InvalidRequest,
    LogFenced,
    NotEnoughBookies,
    Overloaded,
    QuorumLogError,
    TooLarge,
    UnexpectedOffset,
    WriterLost,
)
from quorumlog.protocol import batch
from quorumlog.protocol.log import Answer, LogMetadata, LogState
from quorumlog.protocol.metadata import DigestKind
from quorumlog.wire.log_bodies import LOG_LEDGERS_MAX
from services.gateway.interface import Appended, LedgerOptions
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.ports import Append, LogAppended, LogChanged, LogEngine, LogStore
from services.gateway.logs.producers import ProducerTable

IN_FLIGHT_MAX: Final = 10_000
"""Requests of one log that wait for their acknowledgement; beyond: 429 (taste)."""

LEDGERS_SPARE: Final = 1000
"""Rolls leave room for so many ledgers: takeovers, without which a log does not go on."""

_POINT_EVERY: Final = 16
"""Every 16th batch is noted in the offset index as it is written."""

_ROLL_AGAIN_S: Final = 2.0
"""After a roll by itself failed, the next one waits for so long."""


def now_ms() -> int:
    """The wall clock: data for people, and for ages of hours."""
    return int(datetime.now(UTC).timestamp() * 1000)


class Phase(Enum):
    """An owner begins LIVE; ENDED is for good."""

    LIVE = auto()
    DRAINING = auto()
    """A roll waits for what is in flight; new requests wait for the next ledger."""
    ENDED = auto()


class OwnerEnded(Exception):
    """This owner takes nothing any more; nothing of the request was done."""


@dataclass(slots=True, eq=False)
class Pending:
    """One request that waits for its answer."""

    call: Append
    future: asyncio.Future[LogAppended]
    submitted: asyncio.Future[Appended] | None = None
    entry_id: int = -1
    first_offset: int = -1
    content: str = ""

    def answer(self, ledger_id: int) -> LogAppended:
        """What the client is told when the entry is durable."""
        last = self.first_offset + len(self.call.records) - 1
        return LogAppended(self.first_offset, last, ledger_id, self.entry_id)

    def resolve(self, result: LogAppended | BaseException) -> None:
        """Answer, unless the client went away."""
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def pending_of(call: Append) -> Pending:
    """A request that nobody has to wait for: its error is never reported as forgotten."""
    future: asyncio.Future[LogAppended] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return Pending(call, future)


class LogOwner:
    """Appends to one log, in this process."""

    def __init__(
        self,
        *,
        log: LogMetadata,
        engine: LogEngine,
        store: LogStore,
        producers: ProducerTable[Pending],
        index: OffsetIndex,
        on_end: Callable[["LogOwner"], None],
        on_roll: Callable[["LogOwner"], None],
    ) -> None:
        """`log` names a last ledger of this process, empty, with its first offset.

        `on_end` is called once, when the owner failed; `on_roll` when it is time to roll.
        """
        item = log.last_item
        assert item is not None
        assert item.first_offset is not None
        self.log = log
        self.phase = Phase.LIVE
        self.error: BaseException | None = None
        self._engine, self._store, self._index = engine, store, index
        self._producers = producers
        self._on_end, self._on_roll = on_end, on_roll
        self._rolling = asyncio.Lock()
        self._roll_asked = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight: deque[Pending] = deque()
        self.waiting: deque[Pending] = deque()
        self._enter(item.ledger_id, item.first_offset)

    def _enter(self, ledger_id: int, first_offset: int) -> None:
        """Write to this ledger from now on."""
        self.ledger_id = ledger_id
        self.first_offset = first_offset
        self._next_entry = 0
        self._records = 0
        self._bytes = 0
        self._acknowledged = 0
        self._has_producers = False
        self._since_s = asyncio.get_running_loop().time()

    @property
    def next_offset(self) -> int:
        """What the next request gets, if all that is in flight is acknowledged."""
        return self.first_offset + self._records

    @property
    def acknowledged_offset(self) -> int:
        """The end of what is acknowledged."""
        return self.first_offset + self._acknowledged

    # --- appending ---------------------------------------------------------------------------

    def append(self, call: Append) -> Pending:
        """Begin an append. Order is that of the calls; the answer comes in `future`.

        Raises: OwnerEnded, Overloaded.
        """
        if self.phase is Phase.ENDED:
            raise OwnerEnded
        if len(self.in_flight) + len(self.waiting) >= IN_FLIGHT_MAX:
            raise Overloaded("too many appends to this log wait", log=self.log.name)
        pending = pending_of(call)
        self.adopt(pending)
        return pending

    def adopt(self, pending: Pending) -> None:
        """Begin an append that may have waited elsewhere."""
        if self.phase is not Phase.LIVE:
            self.waiting.append(pending)
            return
        try:
            self._begin(pending)
        except QuorumLogError as error:
            error.log = self.log.name
            pending.resolve(error)
        self._roll_if_due()

    def _begin(self, pending: Pending) -> None:
        call = pending.call
        if (call.token or 0) != self.log.writer_token and (
            call.token is not None or self.log.writer_token
        ):
            raise LogFenced(f"the log is open for the writer token {self.log.writer_token}")
        data = batch.encode(
            call.records,
            append_time_ms=now_ms(),
            records_before=self._records,
            producer=call.producer,
            after_producer=self._has_producers,
        )
        if len(data) > batch.BATCH_BYTES_MAX:
            raise TooLarge(f"a record batch has at most {batch.BATCH_BYTES_MAX} bytes")
        if call.producer is not None:
            pending.content = batch.content(data)
            first = self._producers.find(call.producer, pending.content)
            if isinstance(first, Answer):
                pending.resolve(_repeated(first))
                return
            if first is not None:
                first.future.add_done_callback(lambda done: _follow(pending, done))
                return
        if call.expect is not None and call.expect != self.next_offset:
            raise UnexpectedOffset(
                f"the next record gets the offset {self.next_offset}", next_offset=self.next_offset
            )
        self._submit(pending, data)

    def _submit(self, pending: Pending, data: bytes) -> None:
        try:
            submitted = self._engine.submit(self.ledger_id, (data,), expect=self._next_entry)
        except (Overloaded, InvalidRequest, TooLarge):
            raise
        except QuorumLogError as error:
            self.waiting.append(pending)
            self.end(error)
            return
        call = pending.call
        if call.producer is not None:
            self._producers.begin(call.producer, pending.content, pending)
            self._has_producers = True
        pending.submitted = submitted
        pending.entry_id = self._next_entry
        pending.first_offset = self.next_offset
        if self._next_entry % _POINT_EVERY == 0:
            self._index.points(self.ledger_id).add(self._records, self._next_entry)
        self._next_entry += 1
        self._records += len(call.records)
        self._bytes += len(data)
        self.in_flight.append(pending)
        self._idle.clear()
        submitted.add_done_callback(lambda _: self._advance())

    def _advance(self) -> None:
        """Acknowledge what is durable, in order."""
        if self.phase is Phase.ENDED:
            return
        while self.in_flight:
            head = self.in_flight[0]
            assert head.submitted is not None
            if not head.submitted.done():
                return
            error = (
                asyncio.CancelledError()
                if head.submitted.cancelled()
                else head.submitted.exception()
            )
            if error is not None:
                self.end(error)
                return
            if head.submitted.result().first != head.entry_id:
                self.end(WriterLost("an entry got another id than the one it was encoded for"))
                return
            self.in_flight.popleft()
            self._acknowledge(head)
        self._idle.set()

    def _acknowledge(self, pending: Pending) -> None:
        answer = pending.answer(self.ledger_id)
        self._acknowledged += len(pending.call.records)
        if pending.call.producer is not None:
            at = now_ms()
            self._producers.done(
                pending.call.producer,
                Answer(
                    pending.call.producer.seq,
                    answer.first_offset,
                    answer.last_offset,
                    answer.ledger_id,
                    answer.entry_id,
                    pending.content,
                ),
                now_ms=at,
            )
            self._producers.forget(now_ms=at)
        pending.resolve(answer)

    def end(self, error: BaseException) -> None:
        """This owner is over; whoever made it settles what it had in flight."""
        if self.phase is Phase.ENDED:
            return
        self.phase = Phase.ENDED
        self.error = error
        self._idle.set()
        self._on_end(self)

    def retire(self) -> None:
        """End without a failure: `on_end` is not called."""
        self.phase = Phase.ENDED
        self._idle.set()

    async def settled(self) -> None:
        """Return when nothing is in flight, or the owner has ended."""
        await self._idle.wait()

    # --- rolling ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        self._producers.forget(now_ms=now_ms())
        self._roll_if_due()

    def _roll_if_due(self) -> None:
        if self.phase is Phase.LIVE and not self._roll_asked and self.is_roll_due():
            self._roll_asked = True
            self._on_roll(self)

    def is_roll_due(self) -> bool:
        """Whether the ledger has reached a limit of the log's settings."""
        settings = self.log.settings
        age_s = asyncio.get_running_loop().time() - self._since_s
        return self._next_entry > 0 and (
            0 < settings.roll_bytes <= self._bytes
            or 0 < settings.roll_entries <= self._next_entry
            or 0 < settings.roll_seconds <= age_s
        )

    async def roll_by_itself(self) -> None:
        """Roll if it still is due; a failure that leaves the owner alive is tried again later."""
        try:
            if self.phase is Phase.LIVE and self.is_roll_due():
                await self.roll()
        except (QuorumLogError, OwnerEnded):
            await asyncio.sleep(_ROLL_AGAIN_S)
        finally:
            self._roll_asked = False

    async def roll(self) -> None:
        """Go on in a new ledger (rule 23). An empty ledger stays.

        Raises: OwnerEnded; NotEnoughBookies and others, with the log as it was.
        """
        async with self._rolling:
            if self.phase is Phase.ENDED:
                raise OwnerEnded
            if self._next_entry == 0:
                return
            check_room(self.log, spare=LEDGERS_SPARE)
            await self._check_bookies()
            new = await self._engine.create(options_of(self.log))
            try:
                await self._change(lambda log: log.with_ledger(new.ledger_id))
            except BaseException as error:
                self.end(error)
                if isinstance(error, Exception):
                    with contextlib.suppress(QuorumLogError):
                        await self._store.delete_unnamed(new.ledger_id)
                raise
            await self._switch(new.ledger_id)

    async def _switch(self, ledger_id: int) -> None:
        if self.phase is Phase.ENDED:
            raise OwnerEnded
        self.phase = Phase.DRAINING
        try:
            await self.settled()
            if self.error is not None or self.is_ended:
                raise OwnerEnded
            old = self.ledger_id
            closed = await self._engine.close(old)
            if closed.last_entry != self._next_entry - 1:
                raise WriterLost(f"the ledger {old} ends at {closed.last_entry}", log=self.log.name)
            end = (self._records, closed.length or 0)
            await self._change(
                lambda log: log.with_ends(
                    {old: end},
                    producers=self._producers.snapshot(),
                    now_ms=now_ms(),
                    forgotten=self._producers.forgotten,
                )
            )
        except BaseException as error:
            self.end(error)
            raise
        if self.is_ended:
            raise OwnerEnded
        self._index.points(old).add(self._records, self._next_entry)
        item = self.log.last_item
        assert item is not None
        assert item.first_offset is not None
        assert item.ledger_id == ledger_id
        self._enter(ledger_id, item.first_offset)
        self.phase = Phase.LIVE
        waiting, self.waiting = self.waiting, deque()
        for pending in waiting:
            self.adopt(pending)

    @property
    def is_ended(self) -> bool:
        """Whether this owner is over; asked again after each wait."""
        return self.phase is Phase.ENDED

    async def _check_bookies(self) -> None:
        needed = self.log.settings.quorum.ensemble_size
        states = [bookie.state for bookie in (await self._engine.bookies()).bookies]
        if states.count("writable") < needed:
            raise NotEnoughBookies(
                f"a roll needs {needed} live bookies, {states.count('writable')} live",
                log=self.log.name,
            )

    async def _change(self, transform: Callable[[LogMetadata], LogMetadata]) -> None:
        """Compare-and-swap the row; others may truncate it meanwhile, but not write to it.

        Raises: OwnerEnded when another one owns the log now.
        """
        while True:
            try:
                self.log = await self._store.cas(transform(self.log))
                return
            except LogChanged as changed:
                if not self.is_mine(changed.current):
                    raise OwnerEnded from changed
                self.log = changed.current

    def is_mine(self, log: LogMetadata) -> bool:
        """Whether a row still says that this owner writes the log's last ledger."""
        mine, last = self.log.last_item, log.last_item
        return (
            log.state is LogState.OPEN
            and mine is not None
            and last is not None
            and mine.ledger_id == last.ledger_id
            and mine.first_offset == last.first_offset
            and log.writer_token == self.log.writer_token
        )

    def took(self, log: LogMetadata) -> None:
        """Somebody else changed the row without ending this owner (truncated it)."""
        if log.version > self.log.version and self.is_mine(log):
            self.log = log


def check_room(log: LogMetadata, *, spare: int = 0) -> None:
    """Raise Overloaded where a row names so many ledgers that another one does not fit."""
    if len(log.items) >= LOG_LEDGERS_MAX - spare:
        raise Overloaded(
            f"the log has {len(log.items)} ledgers: truncate it, or let its retention do so",
            log=log.name,
        )


def options_of(log: LogMetadata) -> LedgerOptions:
    """How a log's ledgers are created."""
    quorum = log.settings.quorum
    return LedgerOptions(
        ensemble_size=quorum.ensemble_size,
        write_quorum=quorum.write_quorum,
        ack_quorum=quorum.ack_quorum,
        digest=DigestKind(log.settings.digest),
        custom=log.settings.custom,
        allow_degraded=True,
        log=log.name,
    )


def _repeated(answer: Answer) -> LogAppended:
    return LogAppended(
        answer.first_offset,
        answer.last_offset,
        answer.ledger_id,
        answer.entry_id,
        is_duplicate=True,
    )


def _follow(pending: Pending, first: asyncio.Future[LogAppended]) -> None:
    """A duplicate of a request in flight gets what that gets."""
    error = asyncio.CancelledError() if first.cancelled() else first.exception()
    pending.resolve(error or replace(first.result(), is_duplicate=True))
