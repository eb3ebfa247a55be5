"""A log's records as pages."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

import orjson

from quorumlog import header
from services.gateway.edge import arrow
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.pages import TAIL_BYTES, Pages
from services.gateway.edge.payloads import encoded, encoded_key
from services.gateway.edge.starts import token_of
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import LogBatches, Start, StoredBatch


class LogPages(Pages[LogBatches]):
    """Records of one log: of that which was created at `created_at`, else of that which the first page is of. Pages of a
    later log of this name are never among them (rule 27b).
    """

    noun = b"records"

    def __init__(self, logs: LogManager, name: str, created_at: str | None = None) -> None:
        super().__init__(b'"log":"%b"' % name.encode())
        self._logs, self._log, self._created_at = logs, name, created_at

    @property
    def key(self) -> Hashable | None:
        """The log and its creation."""
        return None if self._created_at is None else (self.name, self._created_at)

    def id_end(self, page: LogBatches) -> bytes:
        """The log's creation."""
        return b".%b" % token_of(page.created_at).encode()

    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> LogBatches:
        """The records from an offset on. Raises: what the log raises."""
        page = await self._logs.reader.read(
            self._log,
            at,
            limit=limit,
            max_bytes=max_bytes,
            wait_s=wait_s,
            created_at=self._created_at,
        )
        self._created_at = page.created_at
        return page

    async def end(self, page: LogBatches) -> int:
        """The offset after the last acknowledged record."""
        return (await self._logs.reader.tail(self._log, created_at=page.created_at))[0]

    def count(self, page: LogBatches) -> int:
        """Records of a page."""
        return page.next - page.first

    def payload_bytes(self, page: LogBatches) -> int:
        """Bytes of their values, keys and headers."""
        return sum(found.columns.size for found in page.batches)

    def rest(self, page: LogBatches, at: int) -> LogBatches:
        """The records from an offset on."""
        batches = [found for found in page.batches if found.first_offset + found.count > at]
        return replace(page, batches=(batches[0].since(at), *batches[1:]), first=at)

    def is_end(self, page: LogBatches) -> bool:
        """Whether the log is closed, and this is its end."""
        return page.closed

    def position(self, page: LogBatches) -> dict[str, str]:
        """Where to go on, and where the log begins."""
        return {
            header.NEXT_OFFSET: str(page.next),
            "First-Offset": str(page.first_offset),
            "Log-Closed": "true" if page.closed else "false",
            "Log-Created-At": page.created_at,
        }

    def numbers(self, page: LogBatches) -> Iterable[int]:
        """The offsets."""
        return range(page.first, page.next)

    def payloads(self, page: LogBatches) -> Iterable[tuple[int, memoryview]]:
        """The offsets with the records' values."""
        return enumerate(page.values, page.first)

    def arrow(self, page: LogBatches) -> bytes:
        """All columns of the records."""
        return arrow.records_stream(page.batches)

    def items(self, page: LogBatches, encoding: str) -> Iterable[bytes]:
        """Each record as a JSON object."""
        return chain.from_iterable(_records_json(found, encoding) for found in page.batches)

    def members(self, page: LogBatches) -> bytes:
        """`"next","first_offset","closed","created_at"`."""
        return b'"next":%d,"first_offset":%d,"closed":%b,"created_at":"%b"' % (
            page.next,
            page.first_offset,
            b"true" if page.closed else b"false",
            page.created_at.encode(),
        )

    def ending(self, page: LogBatches) -> dict[str, int]:
        """The offset after the last record."""
        return {"next_offset": page.next}


def _records_json(found: StoredBatch, encoding: str) -> Iterator[bytes]:
    place = b'"ledger_id":%d,"entry_id":%d' % (found.ledger_id, found.entry_id)
    appended = time_text(found.time_ms).encode()
    rows = enumerate(found.columns.rows, found.first_offset)
    for offset, (value, key, headers, time_ms) in rows:
        yield b'{"offset":%d,"timestamp":"%b",%b,%b,"headers":%b,%b}' % (
            offset,
            appended if time_ms is None else time_text(time_ms).encode(),
            place,
            encoded_key(key, encoding),
            orjson.dumps(dict(headers)) if headers else b"{}",
            encoded(value, encoding),
        )


def time_text(milliseconds: int) -> str:
    """A time as the API writes it; a time outside the calendar is cut to the calendar's first or last."""
    at = min(max(milliseconds, -62_135_596_800_000), 253_402_300_799_999)
    seconds, rest = divmod(at, 1000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text.rjust(19, '0')}.{rest:03d}Z"
