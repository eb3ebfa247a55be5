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
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

from quorumlog.errors import (
    InvalidRequest,
    LogFenced,
    NoSuchLog,
    NotEnoughBookies,
    Overloaded,
    QuorumLogError,
    TooLarge,
    UnexpectedOffset,
    WriterLost,
)
from quorumlog.protocol import batch
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import Answer, LogMetadata, LogState
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.transaction import Transaction
from quorumlog.wire.log_bodies import LOG_LEDGERS_MAX
from services.gateway.interface import LedgerOptions
from services.gateway.logs.clock import Clock
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.pending import Pending, follow, pending_of, repeated
from services.gateway.logs.ports import Append, LogChanged, LogEngine, LogStore, Publish
from services.gateway.logs.producers import ProducerTable

IN_FLIGHT_MAX: Final = 10_000
"""Requests of one log that wait for their acknowledgement; beyond: 429 (taste)."""

LEDGERS_SPARE: Final = 1000
"""Rolls leave room for so many ledgers: takeovers, without which a log does not go on."""

_POINT_EVERY: Final = 16
"""Every 16th batch is noted in the offset index as it is written."""

_ROLL_AGAIN_S: Final = 2.0
"""After a roll by itself failed, the next one waits for so long."""


class Phase(Enum):
    """An owner begins LIVE; ENDED is for good."""

    LIVE = auto()
    DRAINING = auto()
    """A roll waits for what is in flight; new requests wait for the next ledger."""
    ENDED = auto()


class OwnerEnded(Exception):
    """This owner takes nothing any more; nothing of the request was done."""


class LogOwner:
    """Appends to one log, in this process."""

    def __init__(
        self,
        *,
        log: LogMetadata,
        engine: LogEngine,
        store: LogStore,
        producers: ProducerTable[Pending],
        clock: Clock,
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
        self._producers, self._clock = producers, clock
        self._appended_ms = log.appended_ms
        """The append time of the last batch."""
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
        self.ledger_id = self._ahead = ledger_id
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
            pending.resolve(error.replace(log=self.log.name))
        self._roll_if_due()

    def _begin(self, pending: Pending) -> None:
        call = pending.call
        self._check_token(call.token)
        self._check_since(call.since)
        pending.appended_ms = self._clock.stamp_ms(self._appended_ms)
        data = batch.encode(
            call.records,
            append_time_ms=pending.appended_ms,
            records_before=self._records,
            producer=call.producer,
            after_producer=self._has_producers,
        )
        if len(data) > batch.BATCH_BYTES_MAX:
            raise TooLarge(f"a record batch has at most {batch.BATCH_BYTES_MAX} bytes")
        if call.producer is not None:
            pending.content = batch.content(data)
            first = self._producers.find(call.producer, pending.content, since=call.since)
            if isinstance(first, Answer):
                pending.resolve(repeated(first))
                return
            if first is not None:
                first.future.add_done_callback(lambda done: follow(pending, done))
                return
        if call.expect is not None and call.expect != self.next_offset:
            raise UnexpectedOffset(
                f"the next record gets the offset {self.next_offset}", next_offset=self.next_offset
            )
        self._submit(pending, data)

    def _check_token(self, token: int | None) -> None:
        """Raise LogFenced unless who writes may (`open`)."""
        mine = self.log.writer_token
        if (token or 0) != mine and (token is not None or mine):
            raise LogFenced(f"the log is open for the writer token {mine}", log=self.log.name)

    def _check_since(self, since: int) -> None:
        """Raise InvalidRequest where Producer-Since is above the log's end: so each record is at or
        above the since of its request, which rule 26a rests on (`producers.py`).
        """
        if since > self.next_offset:
            detail = f"the log's next record gets the offset {self.next_offset}"
            raise InvalidRequest(
                f"Producer-Since is {since}, but {detail}",
                log=self.log.name,
                errors=[{"pointer": "/header/Producer-Since", "detail": detail}],
            )

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
        self._appended_ms = pending.appended_ms
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
                now_ms=pending.appended_ms,
            )
            self._producers.forget(now_ms=self._clock.expiry_ms(self._appended_ms))
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
        """Time has passed. Nobody is forgotten by it: that goes by what is appended (rule 26a)."""
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
                await self._look_again()
                return
            await self._check_room(LEDGERS_SPARE)
            await self._check_bookies()
            new = await self._engine.create(options_of(self.log))
            self._ahead = new.ledger_id
            try:
                await self._change(lambda log: log.with_ledger(new.ledger_id))
                old, end = await self._drained()
                await self._change(lambda log: self._with_end(log, old, end))
            except BaseException as error:
                self.end(error)
                await self._discard(new.ledger_id, error)
                raise
            self._go_on(new.ledger_id)

    async def publish(self, call: Publish, sizes: Sequence[tuple[int, int, int]]) -> Transaction:
        """Put a transaction's ledgers onto the log, and go on in a new one after them (rule 28).

        `sizes`: (ledger, records, bytes) of each of them. One that was ended before is answered as
        then. Raises: OwnerEnded, LogFenced; why the transaction was refused; NotEnoughBookies and
        others, with the log as it was.
        """
        async with self._rolling:
            if self.phase is Phase.ENDED:
                raise OwnerEnded
            self._check_token(call.token)
            if not (await self._store.transaction(call.transaction)).is_open:
                return (await self._store.commit(call.transaction, call.ledgers, None))[0]
            await self._check_room(LEDGERS_SPARE + len(sizes))
            await self._check_bookies()
            new = await self._engine.create(options_of(self.log))
            self._ahead = new.ledger_id
            try:
                old, end = await self._drained()
                done, is_named = await self._commit(call, sizes, old, end, new.ledger_id)
            except BaseException as error:
                self.end(error)
                await self._discard(new.ledger_id, error)
                raise
            if is_named:
                self._go_on(new.ledger_id)
            else:
                # Another owner did it, or has taken over since: this one has no ledger to go on in.
                self.end(OwnerEnded())
                await self._discard(new.ledger_id, OwnerEnded())
            return done

    async def _commit(
        self,
        call: Publish,
        sizes: Sequence[tuple[int, int, int]],
        old: int,
        end: tuple[int, int],
        new: int,
    ) -> tuple[Transaction, bool]:
        """The one transaction of rule 28; and whether the log goes on in `new` by it."""
        while True:
            now = self._clock.sealed_ms()
            row = self._with_end(self.log, old, end)
            row = row.with_published(sizes, now_ms=now, is_new_start=call.overwrite)
            row = self._with_end(row.with_ledger(new))
            try:
                done, named = await self._store.commit(call.transaction, call.ledgers, row)
            except LogChanged as changed:
                self._follow_change(changed)
                continue
            if named is None or not is_last(named, new):
                return done, False
            self.log = named
            return done, True

    async def _discard(self, ledger_id: int, error: BaseException) -> None:
        """Delete a ledger that was made ahead, unless the log names it; the sweep does the rest."""
        if isinstance(error, Exception):
            with contextlib.suppress(QuorumLogError):
                await self._store.delete_unnamed(ledger_id)

    async def _drained(self) -> tuple[int, tuple[int, int]]:
        """Settle what is in flight and close the ledger: its id, its records and bytes."""
        if self.phase is Phase.ENDED:
            raise OwnerEnded
        self.phase = Phase.DRAINING
        await self.settled()
        if self.error is not None or self.is_ended:
            raise OwnerEnded
        old = self.ledger_id
        closed = await self._engine.close(old)
        if closed.last_entry != self._next_entry - 1:
            raise WriterLost(f"the ledger {old} ends at {closed.last_entry}", log=self.log.name)
        return old, (self._records, closed.length or 0)

    def _with_end(
        self, log: LogMetadata, ledger_id: int = -1, end: tuple[int, int] = (0, 0)
    ) -> LogMetadata:
        """The row with the end of a ledger, and with the producers as they are now."""
        producers = self._producers.snapshot()
        return log.with_ends(
            {} if ledger_id < 0 else {ledger_id: end},
            producers=producers,
            now_ms=self._clock.sealed_ms(),
            forgotten_end=self._producers.forgotten_end,
            appended_ms=self._appended_ms,
        )

    def _go_on(self, ledger_id: int) -> None:
        """Write to the ledger that the row names last now, what waited first."""
        if self.is_ended:
            raise OwnerEnded
        self._index.points(self.ledger_id).add(self._records, self._next_entry)
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

    async def _check_room(self, spare: int) -> None:
        """Raise Overloaded where the row has no room. Others may have truncated it since, whom this
        owner did not hear.
        """
        try:
            check_room(self.log, spare=spare)
        except Overloaded:
            await self._look_again()
            check_room(self.log, spare=spare)

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
            wanted = transform(self.log)
            try:
                done = await self._store.cas(wanted)
            except LogChanged as changed:
                self._follow_change(changed)
                continue
            last = wanted.last_item
            if last is None or not is_last(done, last.ledger_id):
                raise OwnerEnded  # it was done, and another one has taken over since
            self.log = done
            return

    def _follow_change(self, changed: LogChanged) -> None:
        """The row that won a race, if this owner still writes the log. Raises: OwnerEnded."""
        if not self.is_mine(changed.current):
            raise OwnerEnded from changed
        self.log = changed.current

    async def check_owns(self) -> None:
        """Return while the row names this owner's ledger last: one that was displaced while it was
        idle does not know it, and what it says of the log means nothing.

        Raises: OwnerEnded, and the owner is; NoSuchLog, MetadataUnavailable.
        """
        async with self._rolling:  # a roll's own changes would look like another owner's
            await self._look_again()

    async def _look_again(self) -> None:
        """`check_owns`, with the roll's lock held; takes the row as it is now."""
        if self.is_ended:
            raise OwnerEnded
        try:
            row = await self._store.get(self.log.name)
        except NoSuchLog as error:
            self.end(error)
            raise
        if self.is_ended:
            raise OwnerEnded
        if not self.is_mine(row):
            self.end(OwnerEnded())
            raise OwnerEnded
        self.took(row)

    def learn(self, head: LogHead) -> None:
        """A row of the primary. One above what this owner knows that names another owner, or another
        state, ends it at once: nothing more is acknowledged by it (rule 16a).
        """
        if not self.is_ended and head.version > self.log.version and not self._may_be_own(head):
            self.end(OwnerEnded())

    def _may_be_own(self, head: LogHead) -> bool:
        """Whether this owner writes the row's last ledger: also while its roll or publication, which
        it may not have heard the end of, names the next one.
        """
        return (
            head.state is LogState.OPEN
            and head.last_ledger in (self.ledger_id, self._ahead)
            and head.writer_token == self.log.writer_token
        )

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


def is_last(log: LogMetadata, ledger_id: int) -> bool:
    """Whether a row names this ledger last: its writer owns the log."""
    return log.last_item is not None and log.last_item.ledger_id == ledger_id
