"""The values in which clients of a gateway's logs ask and read, and the page that a read fills with stored batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from sys import maxsize
from typing import Final, Literal

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Columns, Record
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from services.gateway.interface import LedgerView

CREATED_AT: Final = r"[0-9a-fT:.Z-]{1,40}"
"""The `created_at` of a log, as a regular expression: by it a request says which log of a name it is for (rule 27b)."""

STREAM_PREFIX: Final = "durable-stream."
"""Begins the names of the logs of streams (`streams/`), and no other log's that is made by its name."""

_REST: Final = 8
"""A page of which less than this part is left ends where a read of bookies ended (chosen by judgement)."""

RECORD_COST: Final = 64
"""Bytes that a record counts for in `max_bytes` beside its own, so that a page of empty records ends."""

_SHRINKS: Final = 4
"""By how much compressed batches are expected to shrink before one was read. Too little costs another read of bookies,
too much reads more than fits into the page.
"""


@dataclass(frozen=True, slots=True)
class Since:
    """A read begins with the first record that was appended at this time or later, in milliseconds since 1970."""

    ms: int


@dataclass(frozen=True, slots=True)
class Last:
    """A read begins this many offsets before the log's end."""

    count: int


Start = int | Literal["earliest", "latest"] | Since | Last
"""Where a read of a log begins. A number is an offset."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One record as a reader gets it. `timestamp_ms` is the record's own, else that of its append."""

    offset: int
    timestamp_ms: int
    record: Record
    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Records of one entry as they are stored, the first one at the offset `first_offset`. Whoever formats them decodes them.

    `time_ms`: when they were appended, which is the time of each record that has none of its own.
    """

    first_offset: int
    ledger_id: int
    entry_id: int
    time_ms: int
    columns: Columns

    @property
    def count(self) -> int:
        """How many records."""
        return self.columns.head.count

    def since(self, offset: int) -> "StoredBatch":
        """The records from an offset on, which one of them has."""
        skip = offset - self.first_offset
        return replace(
            self, first_offset=offset, columns=self.columns.part(skip, self.count - skip)
        )


@dataclass(frozen=True, slots=True)
class LogBatches:
    """Records from the requested offset on, in order, possibly none: `first` to `next` - 1.

    `next` is where to continue, in the log that was created at `created_at` and begins at `first_offset`. `closed`: the log
    is closed, and `next` is its end. `is_at_end`: `next` was the log's end. `is_full`: the page ends because it is as
    large as it may be, and not because the log ends or a record cannot be read now. A page that is kept without its records
    has no batches.
    """

    batches: tuple[StoredBatch, ...]
    first: int
    next: int
    first_offset: int
    closed: bool
    created_at: str
    is_at_end: bool = False
    is_full: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return self.first == self.next

    @property
    def values(self) -> Iterator[memoryview]:
        """The values of the records, in the memory that they were received into."""
        return chain.from_iterable(found.columns.values for found in self.batches)

    @property
    def records(self) -> Sequence[ReadRecord]:
        """The records, decoded."""
        return [
            ReadRecord(
                offset,
                found.time_ms if record.timestamp_ms is None else record.timestamp_ms,
                record,
                found.ledger_id,
                found.entry_id,
            )
            for found in self.batches
            for offset, record in enumerate(found.columns.records, found.first_offset)
        ]


class Page:
    """What a read has gathered: `count` records up to, not including, the offset `at`; and the log's row by which it reads.

    A row is fresh if it was fetched after this read began. An older row is used only for facts that never change: where the
    records of a closed ledger are. Only a fresh row says that the log ends.
    """

    def __init__(
        self,
        row: LogMetadata,
        limit: int,
        max_bytes: int,
        *,
        at: int = 0,
        is_fresh: bool = False,
        is_recent: bool = False,
        created_at: str | None = None,
    ) -> None:
        """`created_at`: of the log that the read is for; None: whichever has the name (rule 27b). `is_recent`: the
        page ends where only a fresh row says more. The row also says which ledger is open: what was acknowledged there stays
        in the log.
        """
        self.row, self.is_fresh, self.is_recent = row, is_fresh, is_recent
        self.created_at = created_at
        self.asked_s = float("-inf")
        """When the read asked for the row, if it did."""
        self.at, self.limit, self.bytes_left, self.count = at, limit, max_bytes, 0
        self.batches: list[StoredBatch] = []
        self._rest = max_bytes // _REST
        self.is_whole = False
        """Whether `max_bytes` never cuts a batch: the page ends with the batch that crosses the bound."""
        self.is_cut = False
        """Whether the page ends before a record that is not read now."""
        self.stored = 1
        self.plain = 1 if row.settings.batch_compression == "none" else _SHRINKS
        """Bytes of the batches so far, stored and plain: the next read of bookies asks for as many stored bytes as are
        expected to fill the page.
        """
        self.is_over = False
        """Whether the log ends with the page: its last batch says so (rule 25b)."""
        self.stop: int | None = None
        """Where the log's part of the ledger ends that is read, if the row tells. In a ledger that a fork shares, records of
        other logs may follow (rule 27a).
        """
        self.view: LedgerView | None = None
        """The ledger that was read last, as far as it was acknowledged then."""
        self.news: LedgerView | None = None
        """The same ledger after a wait for news: the next look at it needs no question."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is gathered."""
        if self.is_cut or self.is_over:
            return True
        return self.count >= self.limit or (self.count > 0 and self.bytes_left <= 0)

    @property
    def is_large(self) -> bool:
        """Whether what the page lacks is not worth another read of bookies."""
        return self.count >= self.limit or (self.count > 0 and self.bytes_left < self._rest)

    @property
    def is_through(self) -> bool:
        """Whether the page has all of the ledger that is read."""
        return self.own(1) <= 0

    def own(self, count: int) -> int:
        """How many of the ledger's next `count` records belong to the log (rule 27a)."""
        return count if self.stop is None else min(count, self.stop - self.at)

    @property
    def is_end(self) -> bool:
        """Whether the log is closed, and ends with the page."""
        is_closed = self.row.state is LogState.CLOSED and self.at >= (self.row.end_offset or 0)
        return is_closed or self.is_over

    @property
    def stored_bytes_left(self) -> int:
        """About how many stored bytes hold what the page lacks."""
        return max(self.bytes_left * self.stored // self.plain, 1)

    def take(self, item: LogItem, entry_id: int, data: batch.Stored) -> batch.BatchHead:
        """Take the records from `at` on of an entry, of which the page may have room for some only. Raises: BadBatch."""
        plain = packed.unpack(data)
        self.stored += len(data)
        self.plain += len(plain)
        found = batch.opened(plain)
        head = found.head
        first = (item.first_offset or 0) + head.records_before
        skip = self.at - first
        if 0 <= skip < head.count and not self.is_through:
            self._add(found, skip, item, entry_id)
        if self.at == first + head.count:
            # How the log ended that the ledger was made for says nothing of a fork (rule 27a).
            self.is_over = head.is_end and not self.row.is_shared(item)
        return head

    def _add(self, found: Columns, skip: int, item: LogItem, entry_id: int) -> None:
        head = found.head
        left = min(self.own(head.count - skip), self.limit - self.count)
        bytes_max = maxsize if self.is_whole else self.bytes_left
        count, size = found.fitting(skip, left, bytes_max, RECORD_COST)
        if count < head.count:
            found = found.part(skip, count)
        time_ms = item.published_ms or head.append_time_ms  # rule 26b
        self.batches.append(StoredBatch(self.at, item.ledger_id, entry_id, time_ms, found))
        self.bytes_left -= size
        self.count += count
        self.at += count

    def done(self) -> LogBatches:
        """What a reader gets."""
        return LogBatches(
            tuple(self.batches),
            first=self.at - self.count,
            next=self.at,
            first_offset=self.row.first_offset,
            closed=self.is_end,
            created_at=self.row.created_at,
            is_at_end=self.is_end or not (self.is_full or self.is_large),
            is_full=self.is_large and not self.is_end,
        )
