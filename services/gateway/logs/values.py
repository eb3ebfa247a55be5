"""The values in which clients of a gateway's logs ask and read."""

from dataclasses import dataclass

from quorumlog.protocol.batch import Record
from quorumlog.protocol.log.messages import Append, Publish, RecordsAppended

__all__ = ["Append", "Publish", "RecordsAppended"]
"""Requests are the machines' own messages."""


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
    """Records from the requested offset on, in order, possibly none. `next` is where to continue;
    `closed` says that the log is closed and that `next` is its end.
    """

    records: tuple[ReadRecord, ...]
    next: int
    first_offset: int
    closed: bool


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Records of one entry as stored: `count` of them, after the first `skip`.

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
