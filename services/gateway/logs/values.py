"""The values in which clients of a gateway's logs ask and read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

from quorumlog.protocol.batch import Columns, Record
from quorumlog.protocol.log.messages import Append, Publish, RecordsAppended

__all__ = [
    "STREAM_PREFIX",
    "Append",
    "LogBatches",
    "Publish",
    "ReadRecord",
    "RecordsAppended",
    "StoredBatch",
]
"""Requests are the machines' own messages."""

CREATED_AT: Final = r"[0-9a-fT:.Z-]{1,40}"
"""The `created_at` of a log, as a regular expression: by it a request says which log of a name it is for (rule 27b)."""

STREAM_PREFIX: Final = "durable-stream."
"""Begins the names of the logs of streams (`streams/`), and no other log's that is made by its name."""


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
