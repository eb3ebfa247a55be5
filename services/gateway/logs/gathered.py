"""What a read of a log gathers from entries: records, batches as they are stored, or values alone."""

from abc import ABC, abstractmethod
from typing import Final

from quorumlog.protocol import batch, packed
from quorumlog.protocol.log import LogItem
from services.gateway.logs.values import ReadRecord, StoredBatch

_REST: Final = 8
"""A page of which less than this part is left ends where a read of bookies ended (taste)."""

_RECORD_BYTES: Final = 64
"""Bytes that a record counts for in `max_bytes` beside its own, so that a page of empty records ends."""


class Page(ABC):
    """What a read has gathered: `count` records up to, not including, the offset `at`."""

    def __init__(self, limit: int, bytes_left: int) -> None:
        self.at, self.limit, self.bytes_left, self.count = 0, limit, bytes_left, 0
        self._rest = bytes_left // _REST
        self.is_cut = False
        """Whether the page ends before a record that is not read now."""
        self.stored = self.plain = 1
        """Bytes of the batches that were taken, as they are stored and as they are read: so much is asked for at once
        as is expected to fill the page.
        """
        self.is_over = False
        """Whether the log ends with the page: its last batch says so (rule 25b)."""
        self.stop: int | None = None
        """Where the log's part of the ledger that is read ends, if the row tells: of a ledger that a fork shares, others'
        records may follow (rule 27a).
        """

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
        return self.stop is not None and self.at >= self.stop

    @property
    def stored_bytes_left(self) -> int:
        """About how many stored bytes have what the page lacks."""
        return max(self.bytes_left * self.stored // self.plain, 1)

    def plain_batch(self, data: batch.Stored) -> batch.Stored:
        """A stored batch with plain columns. Raises BadBatch."""
        plain = packed.unpack(data)
        self.stored += len(data)
        self.plain += len(plain)
        return plain

    @abstractmethod
    def unpack(self, item: LogItem, entry_id: int, data: batch.Stored) -> batch.BatchHead:
        """Take the records from `at` on of an entry. Raises BadBatch."""


class RecordsPage(Page):
    """Decoded records."""

    def __init__(self, limit: int, bytes_left: int) -> None:
        super().__init__(limit, bytes_left)
        self.records: list[ReadRecord] = []

    def unpack(self, item: LogItem, entry_id: int, data: batch.Stored) -> batch.BatchHead:
        """Decode the entry."""
        head, records = batch.decode(self.plain_batch(data))
        first = (item.first_offset or 0) + head.records_before
        for offset, record in enumerate(records, first):
            if offset == self.at and not self.is_full and not self.is_through:
                own = record.timestamp_ms
                time = head.append_time_ms if own is None else own
                self.records.append(ReadRecord(offset, time, record, item.ledger_id, entry_id))
                self.bytes_left -= record.size + _RECORD_BYTES
                self.count += 1
                self.at = offset + 1
        return head


class BatchesPage(Page):
    """Entries with plain columns, for a format that uses these as they are."""

    def __init__(self, limit: int, bytes_left: int) -> None:
        super().__init__(limit, bytes_left)
        self.batches: list[StoredBatch] = []

    def unpack(self, item: LogItem, entry_id: int, data: batch.Stored) -> batch.BatchHead:
        """Keep the entry; the limit may exclude its last records."""
        head = batch.decode_head(data)
        first = (item.first_offset or 0) + head.records_before
        skip = self.at - first
        if 0 <= skip < head.count and not self.is_through:
            data = bytes(self.plain_batch(data))
            left = head.count if self.stop is None else self.stop - self.at
            count = min(head.count - skip, self.limit - self.count, left)
            self.batches.append(StoredBatch(first, item.ledger_id, entry_id, data, skip, count))
            self.bytes_left -= len(data) * count // head.count
            self.count += count
            self.at += count
        return head


class ValuesPage(Page):
    """The records' values, as they are stored."""

    def __init__(self, limit: int, bytes_left: int) -> None:
        super().__init__(limit, bytes_left)
        self.values: list[memoryview] = []

    def unpack(self, item: LogItem, entry_id: int, data: batch.Stored) -> batch.BatchHead:
        """Take the values of the entry."""
        del entry_id
        head, values, sizes = batch.values(self.plain_batch(data))
        skip = self.at - (item.first_offset or 0) - head.records_before
        if not 0 <= skip < head.count:
            return head
        start = sum(sizes[:skip])
        for size in sizes[skip:]:
            if self.is_full or self.is_through:
                break
            self.values.append(values[start : start + size])
            start += size
            self.bytes_left -= size + _RECORD_BYTES
            self.count += 1
            self.at += 1
        return head
