"""Rewrites adjacent sealed ledgers of a log as one new ledger, which replaces them (rule 27c).

The new ledger has the records of the old ledgers, at the same offsets. A compaction leaves out some
records (rule 27d), and writes no ledger if a first scan finds no record to leave out.

    IDLE -> CHECKING (-> SCANNING) -> CREATING -> READING <-> WRITING -> CLOSING -> SWAPPING
         -> RELEASING -> DONE

Until the swap, no log names the new ledger, so the sweep of orphans deletes it if the process ends
(rule 22). After the swap, the sweep deletes the old ledgers. A rewrite may run in any process. It
changes the metadata by a compare-and-swap, which the log's owner notices like a truncation.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from quorumlog.errors import EntryUnavailable, NoSuchLedger, QuorumLogError, WriterLost
from quorumlog.protocol import batch, packed
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.compaction import Compaction
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BatchesRead,
    BeginRewrite,
    CloseLedger,
    CreateLedger,
    Effect,
    Event,
    Question,
    ReadBatches,
    ReadLedger,
    ReleaseLedgers,
    RewriteDone,
    RowChanged,
    Stopped,
    SwapLog,
    WriteBatches,
)
from quorumlog.protocol.log.row import LogItem, LogMetadata, ledgers_of
from quorumlog.protocol.log.takeover import ending
from quorumlog.protocol.metadata import LedgerMetadata, State

CONFLICTS_MAX: Final = 20
"""Maximum attempts of one rewrite to change the log's metadata, if changes conflict."""


SECONDS_MAX: Final = 240.0
"""Maximum time from the new ledger's creation to the last read of an old ledger. Soon after, the
sweep would delete the new ledger as an orphan (`ORPHAN_AGE_S`)."""

GAP_MAX: Final = 1 << 31
"""Maximum offsets that one batch covers, including removed records. The count has 32 bits."""


def unfit(ledger: LedgerMetadata) -> str | None:
    """The reason why a ledger's records can't be copied to another ledger; None if they can. A
    ledger that may lack entries must stay, so that readers learn of a loss.
    """
    if ledger.state is not State.CLOSED or ledger.last_entry is None:
        return "the ledger is not CLOSED"
    is_whole = not ledger.lost_entries and not ledger.may_lack_entries
    return None if is_whole else "the ledger may lack entries"


class RewriteStage(Enum):
    """The stage of a rewrite."""

    IDLE = "idle"
    CHECKING = "checking"
    """Reads each old ledger's metadata: only CLOSED ledgers without losses are rewritten."""
    SCANNING = "scanning"
    """A compaction reads the old ledgers until it finds a record to remove."""
    CREATING = "creating"
    READING = "reading"
    WRITING = "writing"
    CLOSING = "closing"
    SWAPPING = "swapping"
    RELEASING = "releasing"
    """Deletes the old ledgers, except ledgers that a fork names."""
    DISCARDING = "discarding"
    """Deletes the new ledger, because the rewrite failed or the log changed."""
    DONE = "done"


class Rewrite:
    """The state machine that rewrites some ledgers of a log. Its last effect is RewriteDone."""

    def __init__(self, log: LogMetadata, items: Sequence[LogItem], compaction: Compaction) -> None:
        """Prepare a rewrite. `log`: the metadata as last read. `items`: adjacent sealed ledgers of
        the log. `compaction`: decides which records stay.
        """
        assert log.names_sealed(items), "the log must name these sealed ledgers (rule 27c)"
        self.stage = RewriteStage.IDLE
        self._log = log
        self._items = tuple(items)
        self._compaction = compaction
        self._number = 0
        self._tries = 0
        self._now = Now(0, None)
        self._created_s = 0.0
        self._last_entries: list[int] = []
        """The last entry of each old ledger that was checked so far."""
        self._index = 0
        """The index in `items` of the ledger that is being read."""
        self._entry = 0
        """The next entry to read in that ledger."""
        self._offset = items[0].first_offset or 0
        """The first offset of the next batch to read."""
        self._new: int | None = None
        self._written = 0
        """The number of entries of the new ledger."""
        self._size = 0
        self._has_producers = False
        """Whether the new ledger has a producer's batch so far. Each entry stores this flag, so
        that a takeover reads it from the last entry before it replays the new ledger."""
        self._gap = 0
        """The number of offsets before the next batch that the new ledger doesn't cover yet."""
        self._last: batch.BatchHead | None = None
        """The new head of the last batch of which the rewrite removed all records."""
        self._result: LogMetadata | QuorumLogError | None = None
        self._spoiled: int | None = None
        """The old ledger that can never be rewritten, if any."""
        self._out: list[Effect] = []

    def step(self, event: Event, now: Now) -> list[Effect]:
        """Process an event and return the effects."""
        self._now = now
        if self.stage is RewriteStage.DONE:
            return []
        match event:
            case BeginRewrite():
                self._check_next()
            case Answered(number, value) if number == self._number:
                self._answered(value)
            case Stopped():
                self._done(ending(self._log.name))
            case _:
                pass
        out, self._out = self._out, []
        return out

    @property
    def _item(self) -> LogItem:
        return self._items[self._index]

    @property
    def size_before(self) -> int:
        """The bytes of the old ledgers."""
        return sum(item.bytes for item in self._items)

    @property
    def _old(self) -> tuple[int, ...]:
        return tuple(sorted(ledgers_of(self._items)))

    def _ask(self, stage: RewriteStage, question: Question) -> None:
        self.stage = stage
        self._number += 1
        self._out.append(Ask(self._number, question))

    def _answered(self, value: Any) -> None:
        match self.stage:
            case RewriteStage.RELEASING | RewriteStage.DISCARDING:
                self._done(self._result)  # if the deletion failed, the sweep repeats it
            case RewriteStage.CHECKING if isinstance(value, NoSuchLedger):
                # The log has changed, or a rebuild has not found the ledger (rule 18f).
                self._spoil(self._items[len(self._last_entries)].ledger_id, value.detail)
            case _ if isinstance(value, QuorumLogError):
                self._give_up(value)
            case RewriteStage.CHECKING:
                self._checked(value)
            case RewriteStage.CREATING:
                self._new, self._created_s = value.ledger_id, self._now.monotonic_s
                self._read_next()
            case RewriteStage.SCANNING | RewriteStage.READING:
                self._read(value)
            case RewriteStage.WRITING:
                self._read_next()
            case RewriteStage.CLOSING:
                self._closed(value)
            case RewriteStage.SWAPPING:
                self._swapped(value)
            case _:
                raise AssertionError(f"a rewrite must not get an answer in stage {self.stage}")

    def _spoil(self, ledger_id: int, detail: str) -> None:
        """Fail, and report that a ledger can never be rewritten."""
        self._spoiled = ledger_id
        self._give_up(EntryUnavailable(detail, ledger_id=ledger_id, log=self._log.name))

    def _give_up(self, result: QuorumLogError | None) -> None:
        """End without success, and have the new ledger deleted. If the swap succeeded after all,
        the log names the new ledger, and the deletion has no effect.
        """
        self._result = result
        if self._new is None:
            self._done(result)
        else:
            self._ask(RewriteStage.DISCARDING, ReleaseLedgers((self._new,)))

    def _done(self, result: LogMetadata | QuorumLogError | None) -> None:
        self.stage = RewriteStage.DONE
        self._out.append(RewriteDone(result, self._size, self._spoiled))

    # --- the old ledgers -------------------------------------------------------------------------

    def _check_next(self) -> None:
        if len(self._last_entries) < len(self._items):
            item = self._items[len(self._last_entries)]
            self._ask(RewriteStage.CHECKING, ReadLedger(item.ledger_id))
        elif self._compaction.settings is not None:
            self._read_next()
        else:
            self._create()

    def _checked(self, ledger: LedgerMetadata) -> None:
        if why := unfit(ledger):
            self._spoil(ledger.ledger_id, why)
        else:
            self._last_entries.append(ledger.last_entry or 0)
            self._check_next()

    def _create(self) -> None:
        """Create the new ledger, and begin to copy at the first record."""
        self._index = self._entry = self._gap = 0
        self._offset, self._last = self._items[0].first_offset or 0, None
        self._has_producers = False
        self._ask(RewriteStage.CREATING, CreateLedger(self._log))

    def _read_next(self) -> None:
        """Read the next batches of the old ledgers. After the last batch, finish."""
        while self._entry > self._last_entries[self._index]:
            if self._offset != (self._item.last_offset or 0) + 1:
                detail = f"the records end at {self._offset - 1}, not at {self._item.last_offset}"
                self._spoil(self._item.ledger_id, detail)
                return
            if self._index + 1 == len(self._items):
                self._finish()
                return
            self._index, self._entry = self._index + 1, 0
        if self._new is not None and self._now.monotonic_s > self._created_s + SECONDS_MAX:
            self._spoil(self._item.ledger_id, f"the rewrite took more than {SECONDS_MAX} s")
            return
        stage = RewriteStage.SCANNING if self._new is None else RewriteStage.READING
        last = self._last_entries[self._index]
        self._ask(stage, ReadBatches(self._item.ledger_id, self._entry, last))

    def _finish(self) -> None:
        """Cover the last offsets, then close the new ledger. Without a new ledger, no record was
        removed, so the old ledgers only become clean.
        """
        if self._new is None:
            self._swap(self._log)
        elif payloads := self._bridged():
            self._write(payloads)
        else:
            self._ask(RewriteStage.CLOSING, CloseLedger(self._new))

    def _read(self, read: BatchesRead) -> None:
        item, payloads = self._item, list[bytes]()
        try:
            if read.is_lost:
                raise batch.BadBatch(f"entries of ledger {item.ledger_id} are lost")
            for entry_id, data in read.entries:
                head = batch.decode_head(data)
                first = self._next(item, entry_id, head)
                kept = self._kept(item, first, head, data)
                if self._new is not None:
                    payloads += self._moved(item, first, head, data, kept)
                elif kept is not None and len(kept[1]) < kept[0].count:
                    self._create()
                    return
            if self._entry != read.next:
                raise batch.BadBatch(f"entry {self._entry} of the ledger is missing")
        except batch.BadBatch as error:
            self._spoil(item.ledger_id, str(error))
            return
        if payloads and self._new is not None:
            self._write(payloads)
        else:
            self._read_next()

    def _write(self, payloads: Sequence[bytes]) -> None:
        assert self._new is not None
        first, self._written = self._written, self._written + len(payloads)
        self._size += sum(map(len, payloads))
        self._ask(RewriteStage.WRITING, WriteBatches(self._new, first, tuple(payloads)))

    def _next(self, item: LogItem, entry_id: int, head: batch.BatchHead) -> int:
        """Record that a batch was read, and return its first offset. Raises: BadBatch if the batch
        does not follow the last batch.
        """
        first = (item.first_offset or 0) + head.records_before
        if entry_id != self._entry or first != self._offset or head.is_end:
            raise batch.BadBatch(f"entry {entry_id} at offset {first} does not continue the log")
        self._entry += 1
        self._offset += head.count
        return first

    def _moved(
        self,
        item: LogItem,
        first: int,
        head: batch.BatchHead,
        data: bytes,
        kept: tuple[batch.Columns, Sequence[int]] | None,
    ) -> list[bytes]:
        """The new ledger's entries for a batch. `kept`: the records that stay; None: all."""
        after_producer = self._has_producers or head.after_producer
        self._has_producers |= head.producer is not None or head.after_producer
        before = first - (self._items[0].first_offset or 0)
        time_ms = item.published_ms or head.append_time_ms
        if kept is None:
            return [
                *self._bridged(),
                batch.moved(
                    data,
                    records_before=before,
                    append_time_ms=time_ms,
                    after_producer=after_producer,
                ),
            ]
        # A takeover that replays the new ledger must notice that producers are missing.
        head = replace(
            head,
            records_before=before,
            append_time_ms=time_ms,
            after_producer=self._has_producers,
        )
        columns, numbers = kept
        bridged = self._bridged() if self._gap + head.count > GAP_MAX else []
        if not numbers:
            self._last, self._gap = head, self._gap + head.count
            return bridged
        gap, self._gap = self._gap, 0
        thinned = columns.thinned(head, numbers, gap)
        return [*bridged, packed.pack(thinned) if batch.is_packed(data) else thinned]

    def _kept(
        self, item: LogItem, first: int, head: batch.BatchHead, data: bytes
    ) -> tuple[batch.Columns, Sequence[int]] | None:
        """The decoded batch and the numbers of the records that stay; None if all records stay.

        Raises: BadBatch.
        """
        if not self._compaction.may_remove(head):
            return None
        stored = columns = batch.opened(packed.unpack(data))
        if self._log.settings.compacts:
            time_ms = item.published_ms or head.append_time_ms
            columns = stored.buried(time_ms, self._compaction.now_ms)
        numbers = self._compaction.survivors(item, first, columns)
        if numbers is None and (columns is not stored or not columns.count):
            numbers = range(columns.count)  # perhaps emptied by an earlier compaction
        return None if numbers is None else (columns, numbers)

    def _bridged(self) -> list[bytes]:
        """A batch without records that covers the offsets of `_gap`; no batch if `_gap` is 0."""
        if self._last is None or not self._gap:
            return []
        gap, self._gap = self._gap, 0
        return [batch.emptied(self._last, gap)]

    # --- the metadata ----------------------------------------------------------------------------

    def _closed(self, closed: LedgerMetadata) -> None:
        if closed.last_entry != self._written - 1 or closed.last_entry == NO_ENTRY:
            detail = f"the new ledger ends at {closed.last_entry}, not at {self._written - 1}"
            self._give_up(WriterLost(detail, log=self._log.name))
            return
        self._size = closed.length or 0
        self._swap(self._log)

    def _swap(self, log: LogMetadata) -> None:
        """Replace the old ledgers in the log's metadata if the log still names them unchanged and
        the compaction may still remove records. Without a new ledger, only mark them as clean.
        """
        self._tries += 1
        is_same = log.created_at == self._log.created_at and log.names_sealed(self._items)
        is_wanted = is_same and self._compaction.is_wanted(log)
        if not is_wanted or self._tries > CONFLICTS_MAX:
            self._give_up(None)
            return
        now_ms = 0 if self._now.is_doubted else self._now.sealed_ms()
        compacted_ms = self._compaction.compacted(self._items, now_ms)
        if self._new is not None:
            row = log.rewritten(self._items, self._new, self._size, compacted_ms)
        else:
            row = log.cleaned(self._items, compacted_ms)
        if row == log:
            self._done(log)
        else:
            self._ask(RewriteStage.SWAPPING, SwapLog(row))

    def _swapped(self, value: LogMetadata | RowChanged) -> None:
        if isinstance(value, RowChanged):
            self._swap(value.current)
            return
        # `value` may be later metadata that no longer names the new ledger. In any case, the log
        # no longer names the old ledgers.
        self._result = value
        if self._new is None:
            self._done(value)
        else:
            self._ask(RewriteStage.RELEASING, ReleaseLedgers(self._old))
