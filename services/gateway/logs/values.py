"""The values in which clients of a gateway's logs ask and read."""

from dataclasses import dataclass
from typing import Final, Literal

from quorumlog.protocol.batch import Record
from quorumlog.protocol.log.messages import Append, Publish, RecordsAppended

__all__ = [
    "STREAM_PREFIX",
    "Append",
    "LogBatches",
    "LogRead",
    "LogValues",
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
class LogRead:
    """Records from the requested offset on, in order, possibly none. `next` is where to continue, in the log that was
    created at `created_at`; `closed` says that the log is closed and that `next` is its end, `is_at_end` that `next` was
    the log's end.
    """

    records: tuple[ReadRecord, ...]
    next: int
    first_offset: int
    closed: bool
    created_at: str
    is_at_end: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return not self.records


@dataclass(frozen=True, slots=True)
class LogValues:
    """A `LogRead` with the values of its records alone, in the memory that they were received into.

    `first` is the offset of the first one. They are none where a page is kept without them. `is_full`: the page ends since
    it is as large as it may be, and not since the log ends or a record cannot be read now.
    """

    values: tuple[memoryview, ...]
    first: int
    next: int
    closed: bool
    is_at_end: bool = False
    is_full: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return self.first == self.next


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Records of one entry, with plain columns: `count` of them, after the first `skip`.

    `first_offset` is the offset of the entry's first record, skipped or not.
    """

    first_offset: int
    ledger_id: int
    entry_id: int
    data: bytes
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class LogBatches:
    """A `LogRead` whose records are not decoded."""

    batches: tuple[StoredBatch, ...]
    next: int
    first_offset: int
    closed: bool
    created_at: str
