"""Indexes the keys of one sealed ledger of a log: writes the index to a new ledger (rule 27e).

    IDLE -> CHECKING -> READING -> CREATING -> WRITING -> CLOSING -> SWAPPING -> DONE

The swap adds the index to the log's metadata. Until then, no log names the new ledger, so the sweep
of orphans deletes it if the process ends (rule 22). A ledger without an index is read in full.
"""

from collections.abc import Collection
from enum import Enum
from typing import Any, Final

from quorumlog.errors import EntryUnavailable, NoSuchLedger, QuorumLogError, WriterLost
from quorumlog.protocol.batch import BadBatch
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.keys import BUCKET_PAIRS, ENTRIES_MAX, KeyEntries, keys_of
from quorumlog.protocol.log.merge import GROWTH
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
from quorumlog.protocol.log.rewrite import CONFLICTS_MAX, unfit
from quorumlog.protocol.log.row import NO_KEYS, LogItem, LogMetadata
from quorumlog.protocol.log.takeover import ending
from quorumlog.protocol.metadata import LedgerMetadata

INDEXED_BYTES_MIN: Final = 64 << 10
"""Smaller ledgers are not indexed, because reading them costs little more than a lookup."""

PAIRS_MAX: Final = 1 << 22
"""Maximum pairs of a key and an entry in an index, chosen by judgement. They take about 48 MiB of
memory while the index is written. A ledger with more pairs gets no index."""

BUCKET_PAIRS_MAX: Final = 64 * BUCKET_PAIRS
"""Maximum pairs of a bucket, which take 1 MiB. Chosen by judgement. A ledger with a larger bucket
gets no index, because a client may have chosen keys whose hashes begin alike."""

_BUCKETS_AT_ONCE: Final = 8
"""Buckets that one step encodes. Sorting more buckets would delay other work of the process."""


def next_index(row: LogMetadata, spoiled: Collection[int] = ()) -> LogItem | None:
    """The newest ledger that needs an index; None if no ledger does. Ledgers that a merge may soon
    replace need no index. `spoiled`: ledgers that can't be indexed.
    """
    return next((item for item in reversed(row.items) if _is_due(row, item, spoiled)), None)


def _is_due(row: LogMetadata, item: LogItem, spoiled: Collection[int]) -> bool:
    # A small ledger that was merged before is indexed too, because up to seven such ledgers may
    # never be merged again. Other small ledgers wait, because a merge would discard their indexes.
    is_lasting = GROWTH * item.bytes >= row.settings.merge_below_bytes or item.replaced > 0
    return (
        item.index is None
        and item.last_offset is not None
        and is_lasting
        and item.bytes >= INDEXED_BYTES_MIN
        and item.ledger_id not in spoiled
        and not row.is_shared(item)
    )


class IndexStage(Enum):
    """The stage of an indexing."""

    IDLE = "idle"
    CHECKING = "checking"
    """Reads the ledger's metadata: only a CLOSED ledger without losses is indexed."""
    READING = "reading"
    CREATING = "creating"
    WRITING = "writing"
    CLOSING = "closing"
    SWAPPING = "swapping"
    DISCARDING = "discarding"
    """Deletes the new ledger, because the indexing failed or the log changed."""
    DONE = "done"


class Indexing:
    """The state machine that indexes one ledger of a log. Its last effect is RewriteDone."""

    def __init__(self, log: LogMetadata, item: LogItem) -> None:
        """Prepare an indexing. `log`: the metadata as last read. `item`: a sealed item of it."""
        assert item.last_offset is not None, "the ledger must be sealed (rule 27e)"
        assert not log.is_shared(item), "the ledger must be the log's own (rule 27e)"
        self.stage = IndexStage.IDLE
        self._log, self._item = log, item
        self._number = 0
        self._tries = 0
        self._last_entry = 0
        self._entry = 0
        """The next entry of the ledger to read."""
        self._keys = KeyEntries()
        self._new: int | None = None
        self._written = 0
        """The number of buckets that were sent to the new ledger."""
        self._size = 0
        self._result: LogMetadata | QuorumLogError | None = None
        self._spoiled: int | None = None
        self._out: list[Effect] = []

    def step(self, event: Event, now: Now) -> list[Effect]:
        """Process an event and return the effects."""
        del now
        if self.stage is IndexStage.DONE:
            return []
        match event:
            case BeginRewrite():
                self._ask(IndexStage.CHECKING, ReadLedger(self._item.ledger_id))
            case Answered(number, value) if number == self._number:
                self._answered(value)
            case Stopped():
                self._done(ending(self._log.name))
            case _:
                pass
        out, self._out = self._out, []
        return out

    def _ask(self, stage: IndexStage, question: Question) -> None:
        self.stage = stage
        self._number += 1
        self._out.append(Ask(self._number, question))

    def _answered(self, value: Any) -> None:
        match self.stage:
            case IndexStage.DISCARDING:
                self._done(self._result)  # if the deletion failed, the sweep repeats it
            case IndexStage.CHECKING if isinstance(value, NoSuchLedger):
                self._spoil(value.detail)
            case _ if isinstance(value, QuorumLogError):
                self._give_up(value)
            case IndexStage.CHECKING:
                self._checked(value)
            case IndexStage.READING:
                self._read(value)
            case IndexStage.CREATING:
                self._new = value.ledger_id
                self._write_next()
            case IndexStage.WRITING:
                self._write_next()
            case IndexStage.CLOSING:
                self._closed(value)
            case IndexStage.SWAPPING if isinstance(value, RowChanged):
                self._swap(value.current)
            case IndexStage.SWAPPING:
                self._done(value)
            case _:
                raise AssertionError(f"an indexing must not get an answer in stage {self.stage}")

    def _spoil(self, detail: str) -> None:
        """Fail, and report that the ledger can never be indexed."""
        ledger_id = self._spoiled = self._item.ledger_id
        self._give_up(EntryUnavailable(detail, ledger_id=ledger_id, log=self._log.name))

    def _give_up(self, result: QuorumLogError | None) -> None:
        """End without success, and have the new ledger deleted. If the swap succeeded after all,
        the log names the new ledger, and the deletion has no effect.
        """
        self._result = result
        if self._new is None:
            self._done(result)
        else:
            self._ask(IndexStage.DISCARDING, ReleaseLedgers((self._new,)))

    def _done(self, result: LogMetadata | QuorumLogError | None) -> None:
        self.stage = IndexStage.DONE
        self._out.append(RewriteDone(result, self._size, self._spoiled))

    def _checked(self, ledger: LedgerMetadata) -> None:
        last = ledger.last_entry or 0
        why = "the ledger has too many entries" if last >= ENTRIES_MAX else unfit(ledger)
        if why:
            self._spoil(why)
        else:
            self._last_entry = last
            self._read_next()

    def _read_next(self) -> None:
        """Read the next batches. After the last batch, begin to write the index."""
        if self._entry <= self._last_entry:
            asked = ReadBatches(self._item.ledger_id, self._entry, self._last_entry)
            self._ask(IndexStage.READING, asked)
        elif self._keys.largest > BUCKET_PAIRS_MAX:
            self._spoil(f"the index would have a bucket of more than {BUCKET_PAIRS_MAX} pairs")
        elif self._keys.pairs:
            self._ask(IndexStage.CREATING, CreateLedger(self._log))
        else:
            self._swap(self._log)

    def _read(self, read: BatchesRead) -> None:
        try:
            if read.is_lost:
                raise BadBatch(f"entries of ledger {self._item.ledger_id} are lost")
            for entry_id, data in read.entries:
                if entry_id != self._entry:
                    raise BadBatch(f"entry {self._entry} of the ledger is missing")
                self._keys.add(entry_id, keys_of(data))
                self._entry += 1
                if self._keys.pairs > PAIRS_MAX:
                    raise BadBatch(f"the ledger has more than {PAIRS_MAX} pairs of key and entry")
        except BadBatch as error:
            self._spoil(str(error))
        else:
            self._read_next()

    def _write_next(self) -> None:
        """Write the next buckets. After the last bucket, close the new ledger."""
        assert self._new is not None
        first, count = self._written, 1 << self._keys.bits
        if first == count:
            self._ask(IndexStage.CLOSING, CloseLedger(self._new))
            return
        self._written = min(first + _BUCKETS_AT_ONCE, count)
        buckets = tuple(
            self._keys.bucket(at, self._item.ledger_id, self._last_entry)
            for at in range(first, self._written)
        )
        self._size += sum(map(len, buckets))
        self._ask(IndexStage.WRITING, WriteBatches(self._new, first, buckets))

    def _closed(self, closed: LedgerMetadata) -> None:
        if closed.last_entry != self._written - 1:
            detail = f"the index ends at {closed.last_entry}, not at {self._written - 1}"
            self._give_up(WriterLost(detail, log=self._log.name))
        else:
            self._swap(self._log)

    def _swap(self, log: LogMetadata) -> None:
        """Add the index to the log's metadata, if the log still has the ledger without an index."""
        self._tries += 1
        index = NO_KEYS if self._new is None else self._new
        row = log.indexed(self._item.ledger_id, index)
        is_same = log.created_at == self._log.created_at and self._tries <= CONFLICTS_MAX
        if row is None or not is_same:
            self._give_up(None)
        else:
            self._ask(IndexStage.SWAPPING, SwapLog(row))
