"""Types for reads and appends of logs, and the page that a read fills with stored batches."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from sys import maxsize
from typing import Final, Literal
from urllib.parse import unquote

from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Columns, Record, StoredBatch
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from services.gateway.interface import LedgerView

CREATED_AT: Final = r"[0-9a-fT:.Z-]{1,40}"
"""Pattern of `created_at`, which distinguishes logs of the same name (rule 27b)."""

STREAM_PREFIX: Final = "durable-stream."
"""Reserved prefix of the logs that back streams; clients can't create other logs with it."""
_ESCAPED: Final = re.compile(rb"[^A-Za-z0-9.-]")

_REST: Final = 8
"""A page ends after a read from bookies if less than 1/8 of its bytes is left (by judgement)."""

RECORD_COST: Final = 64
"""Bytes charged for each record besides its own bytes, to bound a page of empty records."""

_EXPIRED_BYTES_MAX: Final = 16 << 20
"""A page ends after this many bytes of batches with expired records (chosen by judgement)."""

_SHRINKS: Final = 4
"""Expected compression ratio of batches until the first batch is read. If this ratio is too high, a
page needs another read from bookies. If the ratio is too low, a read returns too much."""


def stream_name(path: str) -> str:
    """The name of a stream's log, without the prefix. Each byte of the path's UTF-8, except letters,
    digits, `.` and `-`, becomes `_` and two hexadecimal digits. Raises: UnicodeEncodeError.
    """
    return _ESCAPED.sub(lambda found: b"_%02X" % found[0][0], path.encode()).decode()


def stream_path(name: str) -> str:
    """The path of the stream that a log backs."""
    return unquote(name.removeprefix(STREAM_PREFIX).replace("_", "%"))


@dataclass(frozen=True, slots=True)
class Since:
    """Starts a read at the first record appended at this time or later, in ms since 1970."""

    ms: int


@dataclass(frozen=True, slots=True)
class Last:
    """Starts a read this many offsets before the log's end."""

    count: int


Start = int | Literal["earliest", "latest"] | Since | Last
"""The start of a read of a log. A number is an offset."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One record that a read returns. `timestamp_ms` is the record's own time or its append time."""

    offset: int
    timestamp_ms: int
    record: Record
    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class LogBatches:
    """A page of records in order, possibly empty. It has the records at the offsets `first` to
    `next` - 1 that exist and match the read's filter.

    The next page begins at `next`, in the log that was created at `created_at` and begins at
    `first_offset`. `closed`: the log is closed and ends at `next`. `is_at_end`: `next` was the
    log's end when the page was read. `is_full`: the page ends because of its size limits, and not
    because the log ends or a record is unavailable. A cached page has no batches.
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
        """Whether the page covers no offsets. A filtered page may cover offsets without records."""
        return self.first == self.next

    def below(self, end: int) -> "LogBatches":
        """The part of the page below an offset. In a compacted log, a page of n records may cover
        more than n offsets.
        """
        if self.next <= end:
            return self
        batches = tuple(
            found
            if found.first_offset + found.count <= end
            else replace(found, columns=found.columns.part(0, end - found.first_offset))
            for found in self.batches
            if found.first_offset < end
        )
        return replace(self, batches=batches, next=end, closed=False, is_at_end=False)

    @property
    def values(self) -> Iterator[memoryview]:
        """The records' values, not copied: views of the received buffers."""
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
    """The page that a read fills, so far with `count` records below the offset `at`. `row` is the
    log metadata that the read uses.

    Metadata is fresh if it was fetched after this read began. Older metadata is used only to find
    the records of closed ledgers, which never change. Only fresh metadata proves that the log ends.
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
        now_ms: int = 0,
    ) -> None:
        """`created_at` identifies the log to read (None: the current log of the name, rule 27b).
        With `is_recent`, the page ends where fresh metadata is needed. A page may still use the
        open ledger that `row` names, because records acknowledged there stay in the log. `now_ms`
        decides which records have expired (rule 27f).
        """
        self.row, self.is_fresh, self.is_recent = row, is_fresh, is_recent
        self.created_at = created_at
        self.asked_s = float("-inf")
        """The time at which this read requested the metadata; -inf if it uses older metadata."""
        self.first = self.at = at
        """The offset at which the page begins, and the next offset to read. Offsets of removed
        records lie in between (rule 27d)."""
        self.limit, self.bytes_left, self.count = limit, max_bytes, 0
        self._now_ms, self._expired_bytes = now_ms, 0
        self.batches: list[StoredBatch] = []
        self._rest = max_bytes // _REST
        self.is_whole = False
        """Whether batches are kept whole, so the page ends with the batch that exceeds `max_bytes`."""
        self.is_cut = False
        """Whether the page ends early, before a record that this read will not fetch."""
        self.stored = 1
        self.plain = 1 if row.settings.batch_compression == "none" else _SHRINKS
        """Bytes of the batches so far, stored and uncompressed. From their ratio, the next read
        from bookies estimates how many stored bytes fill the page."""
        self.is_over = False
        """Whether the page's last batch ends the log (rule 25b)."""
        self.stop: int | None = None
        """The end offset of the log's part of the current ledger, if the metadata has it. In a
        ledger that a fork shares, records of other logs may follow (rule 27a)."""
        self.view: LedgerView | None = None
        """The ledger that was read last, with its acknowledged end at that time."""
        self.news: LedgerView | None = None
        """A newer view of the ledger that was read last, from a wait for records. The next read
        uses this view."""

    @property
    def is_full(self) -> bool:
        """Whether the page accepts no more records."""
        if self.is_cut or self.is_over:
            return True
        return self.count >= self.limit or (self.count > 0 and self.bytes_left <= 0)

    @property
    def is_large(self) -> bool:
        """Whether the page is full enough to need no other read from bookies."""
        return self.count >= self.limit or (self.count > 0 and self.bytes_left < self._rest)

    @property
    def is_through(self) -> bool:
        """Whether the page has reached the end of the log's part of the current ledger."""
        return self.own(1) <= 0

    def own(self, count: int) -> int:
        """The number of the ledger's next `count` records that belong to the log (rule 27a)."""
        return count if self.stop is None else min(count, self.stop - self.at)

    @property
    def is_end(self) -> bool:
        """Whether the log is closed and ends with this page."""
        is_closed = self.row.state is LogState.CLOSED and self.at >= (self.row.end_offset or 0)
        return is_closed or self.is_over

    @property
    def stored_bytes_left(self) -> int:
        """The estimated number of stored bytes that would fill the page."""
        return max(self.bytes_left * self.stored // self.plain, 1)

    def take(self, item: LogItem, entry_id: int, data: batch.Stored) -> Columns:
        """Add an entry's records from `at` on, as far as the page has room. Returns all records of
        the entry. Raises: BadBatch.
        """
        plain = packed.unpack(data)
        self.stored += len(data)
        self.plain += len(plain)
        found = batch.opened(plain)
        head = found.head
        first = (item.first_offset or 0) + head.records_before
        if first <= self.at < first + head.count and not self.is_through:
            self._add(found, first, item, entry_id)
        if self.at == first + head.count:
            # An end mark in a shared ledger ends the source, and not the fork (rule 27a).
            self.is_over = head.is_end and not self.row.is_shared(item)
        return found

    def _add(self, found: Columns, first: int, item: LogItem, entry_id: int) -> None:
        """Add a batch's unexpired records, in parts with consecutive offsets. `first`: the batch's
        first offset.
        """
        time_ms = item.published_ms or found.head.append_time_ms  # rule 26b
        if self.row.settings.compacts:
            found = found.buried(time_ms, self._now_ms)
        bytes_max = maxsize if self.is_whole else 0
        end = self.at + self.own(first + found.head.count - self.at)
        lasting = found.lasting(time_ms, self._now_ms)
        if len(lasting) < found.count:
            self._expired_bytes += found.size
        for begin, until in found.runs(lasting):
            start = first + found.indexes[begin]
            skip = begin + max(self.at - start, 0)
            after = min(until, begin + end - start)
            if skip >= after:
                continue
            if self.count >= self.limit or (self.count > 0 and self.bytes_left + bytes_max <= 0):
                return
            self.at = max(self.at, start)
            left = min(after - skip, self.limit - self.count)
            count, size = found.fitting(skip, left, bytes_max or self.bytes_left, RECORD_COST)
            part = found if count == found.head.count else found.part(skip, count)
            self.batches.append(StoredBatch(self.at, item.ledger_id, entry_id, time_ms, part))
            self.bytes_left -= size
            self.count += count
            self.at += count
            if count < after - skip:
                return
        self.at = end
        self.is_cut |= self._expired_bytes > _EXPIRED_BYTES_MAX

    def done(self) -> LogBatches:
        """The finished page, as the reader gets it."""
        return LogBatches(
            tuple(self.batches),
            first=self.first,
            next=self.at,
            first_offset=self.row.first_offset,
            closed=self.is_end,
            created_at=self.row.created_at,
            is_at_end=self.is_end or not (self.is_full or self.is_large),
            is_full=self.is_large and not self.is_end,
        )
