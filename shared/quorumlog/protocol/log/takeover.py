"""Takes a log over: recovers open ledgers, reads ends, rebuilds producers, changes the metadata.

The protocol documents define these steps for opening a log. Two gateways may take a log over at
once. Then both recoveries find the same ends, and one compare-and-swap wins. The other gateway
deletes the ledger that it created, unless a log names the ledger, and yields (rule 22).
"""

from enum import Enum
from typing import Any

from quorumlog.errors import (
    NOT_DONE,
    EntryUnavailable,
    LogFull,
    NoSuchLedger,
    QuorumLogError,
    WriterLost,
)
from quorumlog.protocol import batch
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BatchesRead,
    BeginTakeover,
    CreateLedger,
    DeleteLedger,
    Effect,
    Event,
    Finish,
    LedgerEnd,
    MeasureLedger,
    Question,
    ReadBatches,
    ReadLedger,
    RecoverLedger,
    RowChanged,
    Stopped,
    SwapLog,
    TakeoverDone,
)
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import LOG_LEDGERS_MAX, Answer, LogItem, LogMetadata, LogState
from quorumlog.protocol.once import Once


class TakeoverStage(Enum):
    """The stage of a takeover."""

    IDLE = "idle"
    RECOVERING = "recovering"
    """Ledgers with an unknown end are closed, then measured, one by one."""
    MEASURING = "measuring"
    """The ledger that shows the producers is measured, if it was CLOSED before."""
    REPLAYING = "replaying"
    CREATING = "creating"
    SWAPPING = "swapping"
    DISCARDING = "discarding"
    """The new ledger is deleted, because another gateway won, or the takeover failed."""
    DONE = "done"


class Takeover:
    """Takes one log over once, and ends with TakeoverDone.

    Afterwards all ledgers of the log are CLOSED, except the new last ledger if `creates` is set.
    """

    def __init__(
        self, log: LogMetadata, *, creates: bool, finish: Finish, once: Once | None = None
    ) -> None:
        """Prepare a takeover. `log`: the metadata as last read. `once`: the client's request that
        `finish` carries out (rule 6a).
        """
        self.stage = TakeoverStage.IDLE
        self._log = log
        self._creates = creates
        self._finish = finish
        self._once = once
        self._number = 0
        self._ends: dict[int, LedgerEnd] = {}
        self._measured = -1
        """The ledger that is being measured."""
        self.producers: ProducerTable[Any] = ProducerTable(forgotten_end=log.forgotten_end)
        """The producers at the log's end, once the takeover is done."""
        self._is_compacted = False
        """Whether the replayed ledger lacks removed records (rule 27d)."""
        self._changed = log
        self._new: int | None = None
        self._result: LogMetadata | QuorumLogError | None = None
        self._out: list[Effect] = []

    def step(self, event: Event, now: Now) -> list[Effect]:
        """Process an event and return the effects."""
        match event:
            case BeginTakeover():
                self._recover_next(now)
            case Answered(number, value) if number == self._number:
                self._answered(value, now)
            case Stopped() if self.stage is not TakeoverStage.DONE:
                self._done(ending(self._log.name))
            case _:
                pass
        out, self._out = self._out, []
        return out

    def _ask(self, stage: TakeoverStage, question: Question) -> None:
        self.stage = stage
        self._number += 1
        self._out.append(Ask(self._number, question))

    def _answered(self, value: Any, now: Now) -> None:
        if self.stage is TakeoverStage.DISCARDING:
            self._done(self._result)  # if the deletion failed, the sweep repeats it
        elif isinstance(value, QuorumLogError):
            self._give_up(without_row(value, self._log.name))
        elif self.stage in (TakeoverStage.RECOVERING, TakeoverStage.MEASURING):
            self._measure(value, now)
        elif self.stage is TakeoverStage.REPLAYING:
            self._replay(value, now)
        elif self.stage is TakeoverStage.CREATING:
            self._new = value.ledger_id
            self._swap(now)
        elif self.stage is TakeoverStage.SWAPPING:
            self._swapped(value)

    def _give_up(self, result: QuorumLogError | None) -> None:
        """End without success, and delete the ledger that was created."""
        if self._new is None:
            self._done(result)
        else:
            self._result = result
            self._ask(TakeoverStage.DISCARDING, DeleteLedger(self._new))

    def _done(self, result: LogMetadata | QuorumLogError | None) -> None:
        self.stage = TakeoverStage.DONE
        self._out.append(TakeoverDone(result))

    # --- the ledgers ----------------------------------------------------------------------------

    def _recover_next(self, now: Now) -> None:
        for item in self._log.unsealed:
            if item.ledger_id not in self._ends:
                self._measured = item.ledger_id
                self._ask(TakeoverStage.RECOVERING, RecoverLedger(item.ledger_id))
                return
        base = self._log.base
        if base is not None and base.ledger_id not in self._ends:
            self._measured = base.ledger_id
            self._ask(TakeoverStage.MEASURING, ReadLedger(base.ledger_id))
        else:
            self._rebuild(now)

    def _measure(self, value: Any, now: Now) -> None:
        """Measure a ledger that is now CLOSED, or store its end."""
        if isinstance(value, LedgerEnd):
            self._ends[self._measured] = value
            self._recover_next(now)
        else:
            self._ask(self.stage, MeasureLedger(value))

    @property
    def _appended_ms(self) -> int:
        return max((self._log.appended_ms, *(end.appended_ms for end in self._ends.values())))

    # --- the producers ---------------------------------------------------------------------------

    def _rebuild(self, now: Now) -> None:
        """Rebuild the producers at the log's end, from the table at its last known ledger start and
        a replay of later batches. Producers that the previous owner forgot may be known again.
        """
        base = self._log.base
        if base is None:
            self._change(now)
            return
        self.producers = ProducerTable(base.producers, forgotten_end=self._log.forgotten_end)
        end = self._ends[base.ledger_id]
        if end.has_producers:
            self._ask(TakeoverStage.REPLAYING, ReadBatches(base.ledger_id, 0, end.last_entry))
        else:
            self._rebuilt(now)

    def _rebuilt(self, now: Now) -> None:
        self.producers.forget(now_ms=now.expiry_ms(self._appended_ms))
        self._change(now)

    def _replay(self, read: BatchesRead, now: Now) -> None:
        base = self._log.base
        assert base is not None
        assert base.first_offset is not None
        end = self._ends[base.ledger_id]
        if read.is_lost:
            # A producer with requests only in lost entries is unknown, because its retries can't be
            # recognized.
            self.producers.lost(base.first_offset + end.records)
        try:
            for entry_id, data in read.entries:
                self._learn(base, entry_id, data)
        except batch.BadBatch as error:
            # An entry that isn't a batch is damaged, not absent.
            self._give_up(EntryUnavailable(str(error), ledger_id=base.ledger_id))
            return
        if read.next > end.last_entry:
            self._rebuilt(now)
        else:
            self._ask(
                TakeoverStage.REPLAYING, ReadBatches(base.ledger_id, read.next, end.last_entry)
            )

    def _learn(self, item: LogItem, entry_id: int, data: bytes) -> None:
        head = batch.decode_head(data)
        first = item.first_offset or 0
        if head.has_gaps:
            # Requests are missing, so all producers are unknown. A compacted ledger is the last
            # ledger only after a rebuild from bookies (rule 27d).
            self._is_compacted = True
            end = first + self._ends[item.ledger_id].records
            self.producers = ProducerTable((), forgotten_end=end)
        if head.producer is None or self._is_compacted:
            return
        answer = Answer(
            head.producer.seq,
            first + head.records_before,
            first + head.records_after - 1,
            item.ledger_id,
            entry_id,
            batch.content(data),
        )
        self.producers.done(head.producer, answer, now_ms=head.append_time_ms)

    # --- the metadata ----------------------------------------------------------------------------

    def _stream_seq(self) -> str | None:
        """The last stream sequence, from the measured ends of ledgers: each batch has the last
        stream sequence up to the batch (rule 25a).
        """
        ends = [self._ends[i.ledger_id] for i in self._log.items if i.ledger_id in self._ends]
        return next((end.seq for end in reversed(ends) if end.seq is not None), None)

    def _has_ended(self) -> bool:
        """Whether a batch has ended the log (rule 25b)."""
        return any(end.is_end for end in self._ends.values())

    def _change(self, now: Now) -> None:
        """Prepare the changed metadata, then create the next ledger or swap."""
        if self._has_ended():
            # The log has ended, so it gets no further ledger, whatever the takeover's purpose is
            # (rule 25b).
            self._creates, self._finish = False, LogMetadata.closed
        self._changed = self._log.with_ends(
            {ledger_id: (end.records, end.bytes) for ledger_id, end in self._ends.items()},
            producers=self.producers.snapshot(),
            now_ms=now.sealed_ms(),
            forgotten_end=self.producers.forgotten_end,
            appended_ms=self._appended_ms,
            stream_seq=self._stream_seq(),
        )
        if not self._creates:
            self._swap(now)
            return
        full = no_room(self._changed)
        if full is None:
            self._ask(TakeoverStage.CREATING, CreateLedger(self._log))
        else:
            self._give_up(full)

    def _swap(self, now: Now) -> None:
        row = self._changed
        if self._new is not None:
            row = row.with_ledger(self._new).with_ends(
                {}, producers=self.producers.snapshot(), now_ms=now.sealed_ms()
            )
        self._ask(TakeoverStage.SWAPPING, SwapLog(self._finish(row), self._once))

    def _swapped(self, value: LogMetadata | RowChanged) -> None:
        if isinstance(value, RowChanged):
            self._give_up(None)  # another gateway won, so this one yields (rule 22)
        elif value.created_at != self._log.created_at:
            # The change was made, and the log was deleted and created again since (rule 27b).
            self._give_up(None)
        elif self._new is not None and not is_written(value, self._new):
            self._give_up(None)  # the change was made, and another gateway took over since
        else:
            self._done(value)


def no_room(log: LogMetadata, *, spare: int = 0) -> LogFull | None:
    """The error if a log has no room for another ledger; None if it has room."""
    if len(log.items) < LOG_LEDGERS_MAX - spare:
        return None
    return LogFull(
        f"the log has {len(log.items)} ledgers, too many: truncate it, or set its retention",
        log=log.name,
    )


def without_row(error: QuorumLogError, name: str) -> QuorumLogError:
    """The error for the client after a request about a ledger of the log `name` has failed. If the ledger
    has no metadata but was not deleted, a rebuild has not restored it (rule 18f), and the next
    ledger's first offset is unknown.
    """
    if not (isinstance(error, NoSuchLedger) and error.members.get("deleted") is False):
        return error
    return EntryUnavailable(
        f"the log accepts no records, because the database lacks the metadata of its ledger {error.ledger_id}: start"
        " the bookies that hold a copy of it, and run `quorumlog metadata rebuild`",
        log=name,
        ledger_id=error.ledger_id,
        outcome=NOT_DONE,
    )


def ending(name: str) -> WriterLost:
    """The error for a request in progress when this process ends. The outcome is unknown."""
    return WriterLost("this gateway is shutting down: retry", log=name, retryable=True)


def is_written(log: LogMetadata, ledger_id: int) -> bool:
    """Whether a ledger's writer owns the log: it is OPEN, and its last item is this open ledger."""
    last = log.last_item
    return (
        log.state is LogState.OPEN
        and last is not None
        and (last.ledger_id, last.last_offset) == (ledger_id, None)
    )
