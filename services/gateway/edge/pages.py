"""Read pages of a ledger or of a log, and encode a page in each response format.

`LedgerPages` and `LogPages` differ in the source of pages and in a page's members.
"""

import asyncio
import struct
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Final

import orjson
import pybase64

from quorumlog import header
from quorumlog.protocol.batch import StoredBatch
from services.gateway.edge import arrow
from services.gateway.edge.http.follows import Followable, P
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.payloads import encoded, encoded_key, encoded_null
from services.gateway.edge.starts import token_of
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.interface import ReadResult
from services.gateway.logs.filters import Filter
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import LogBatches, Start

TAIL_BYTES: Final = 256 << 10
"""Maximum size of a tail's page, so that pages of hundreds of slow readers fit in memory."""
_FILTERED_BYTES_MAX: Final = 16 << 20
"""Bytes of records to which a filter is applied for one page (chosen by judgement)."""
_ITEM_BYTES: Final = 64
"""Memory overhead of an entry or a record, in addition to the payload."""
_FRAME: Final = struct.Struct(">QI")


class Pages(Followable[P]):
    """Reads and follows a ledger or a log in pages, and encodes the pages.

    An item is an entry or a record. An item's number is its entry id or offset.
    """

    noun = b"entries"
    """The JSON member for a page's items."""
    headers: tuple[str, ...]
    """Headers for the values of `members`, in the same order, for bodies that have only items."""

    def __init__(self, name: bytes, last: int | None = None) -> None:
        """`name` is the JSON member that names the ledger or log. `last` is the last item to read."""
        self.name, self.last = name, last

    @property
    def key(self) -> Hashable | None:
        """Key that all readers of a ledger or log share. None until the key is known."""
        return self.name

    def id_end(self, page: P) -> bytes:
        """The part of an event's id after the item's number. Clients resume by an event's id."""
        del page
        return b""

    @abstractmethod
    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> P:
        """Read a page from `at` on. At the end, wait up to `wait_s`; the page may be empty."""

    @abstractmethod
    async def end(self, page: P) -> int:
        """The number after the last acknowledged item. `page` is the last page that was read."""

    @abstractmethod
    def count(self, page: P) -> int:
        """The number of items in a page."""

    @abstractmethod
    def payload_bytes(self, page: P) -> int:
        """Total bytes of the payloads in a page."""

    @abstractmethod
    def numbers(self, page: P) -> Iterable[int]:
        """The numbers of the items in a page."""

    @abstractmethod
    def values(self, page: P) -> Iterable[bytes | memoryview]:
        """The payloads of the items in a page, in the order of `numbers`."""

    @abstractmethod
    def arrow(self, page: P) -> bytes:
        """Encode a page as an Arrow stream."""

    @abstractmethod
    def items(self, page: P, encoding: str) -> Iterable[bytes]:
        """Encode each item of a page as a JSON object."""

    @abstractmethod
    def members(self, page: P) -> dict[str, int | str]:
        """The JSON members of a page other than its items, such as `next` and `closed`."""

    @abstractmethod
    def ending(self, page: P) -> dict[str, int]:
        """The JSON members of the `end` event that a stream sends after its last page."""

    def size(self, page: P) -> int:
        """The size of a page in memory, in bytes."""
        return self.payload_bytes(page) + _ITEM_BYTES * self.count(page)

    def has_moved(self, page: P) -> bool:
        """Whether the next page begins at another item. A page without items may skip items."""
        return self.count(page) > 0

    def skipped_to(self, page: P) -> int | None:
        """The number of the last item that a page skips after its own items, or None."""
        del page
        return None

    def frames(self, page: P) -> bytes:
        """Encode a page as frames: (u64 number, u32 length, payload) for each item."""
        values = list(self.values(page))
        parts: list[bytes | memoryview] = [b""] * (2 * len(values))
        parts[::2] = map(_FRAME.pack, self.numbers(page), map(len, values))
        parts[1::2] = values
        return b"".join(parts)

    def message(self, page: P, encoding: str) -> bytes:
        """Encode a page as the JSON object that a WebSocket sends."""
        items, members = b",".join(self.items(page, encoding)), self.members(page)
        members.pop("lac_source", None)
        return b'{"%b":[%b],%b' % (self.noun, items, orjson.dumps(members)[1:])

    def position(self, page: P) -> dict[str, str]:
        """The values of `members` as response headers."""
        values = self.members(page).values()
        texts = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        return dict(zip(self.headers, texts, strict=True))

    def document(self, pages: Iterable[P], last: P, encoding: str) -> Iterator[bytes]:
        """Encode pages up to `last` as one JSON object, which also names the ledger or log."""
        end = orjson.dumps(self.members(last))[1:]
        before = b'{%b,"%b":[' % (self.name, self.noun)
        for page in pages:
            items = iter(self.items(page, encoding))
            yield b",".join(chain((before + next(items, b""),), items))
            before = b","
        yield b"],%b" % end


class LedgerPages(Pages[ReadResult]):
    """Pages of one ledger's entries, up to and including the entry `last`."""

    headers = header.NEXT_ENTRY_ID, header.LAST_ADD_CONFIRMED, header.LEDGER_CLOSED, "Lac-Source"

    def __init__(
        self,
        reads: LedgerReads,
        ledger_id: int,
        *,
        last: int | None = None,
        password: str | None = None,
    ) -> None:
        super().__init__(b'"ledger_id":%d' % ledger_id, last)
        self._reads, self._ledger_id, self._password = reads, ledger_id, password

    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> ReadResult:
        """Read the entries from an id on. Raises: the engine's errors."""
        assert isinstance(at, int), "a ledger's pages begin at an id"
        if wait_s > 0:
            await self._reads.last_add_confirmed(
                self._ledger_id, after=at - 1, wait_s=wait_s, password=self._password
            )
        return await self._reads.read(
            self._ledger_id,
            at,
            last=self.last,
            limit=limit,
            max_bytes=max_bytes,
            password=self._password,
        )

    async def end(self, page: ReadResult) -> int:
        """The entry id after the LAC."""
        return page.last_add_confirmed + 1

    def count(self, page: ReadResult) -> int:
        """The number of entries in a page."""
        return sum(run.count for run in page.runs)

    def payload_bytes(self, page: ReadResult) -> int:
        """Total bytes of the payloads in a page."""
        return sum(run.payload_bytes for run in page.runs)

    def rest(self, page: ReadResult, at: int) -> ReadResult:
        """The part of a page from an entry id on."""
        parts = (run.where(lambda entry_id: entry_id >= at) for run in page.runs)
        return replace(page, runs=tuple(part for part in parts if part is not None))

    def is_end(self, page: ReadResult) -> bool:
        """Whether a page reaches the end of a closed ledger."""
        return page.closed and page.next > page.last_add_confirmed

    def numbers(self, page: ReadResult) -> Iterable[int]:
        """The entry ids of a page."""
        return chain.from_iterable(run.ids for run in page.runs)

    def values(self, page: ReadResult) -> Iterable[memoryview]:
        """The payloads of a page."""
        return chain.from_iterable(run.payloads() for run in page.runs)

    def arrow(self, page: ReadResult) -> bytes:
        """Encode a page as an Arrow stream with the columns `entry_id` and `value`."""
        return arrow.entries_stream(page.runs)

    def items(self, page: ReadResult, encoding: str) -> Iterable[bytes]:
        """Encode each entry of a page as a JSON object."""
        numbers, payloads = self.numbers(page), self.values(page)
        if encoding == "base64":  # the most common case, without a Python call per entry
            values = map(pybase64.b64encode, payloads)
            return map(b'{"entry_id":%d,"data":"%b"}'.__mod__, zip(numbers, values, strict=True))
        return (
            b'{"entry_id":%d,%b}' % (number, encoded(payload, encoding))
            for number, payload in zip(numbers, payloads, strict=True)
        )

    def members(self, page: ReadResult) -> dict[str, int | str]:
        """The next entry id to read, the LAC and its source, and whether the ledger is closed."""
        return {
            "next": page.next,
            "last_add_confirmed": page.last_add_confirmed,
            "closed": page.closed,
            "lac_source": page.lac_source,
        }

    def ending(self, page: ReadResult) -> dict[str, int]:
        """The id of the ledger's last entry."""
        return {"last_entry": page.last_add_confirmed}


class LogPages(Pages[LogBatches]):
    """Pages of the records of one log, never of a later log with the same name (rule 27b). Without
    `created_at`, all pages belong to the log of the first page.
    """

    noun = b"records"
    headers = header.NEXT_OFFSET, "First-Offset", "Log-Closed", "Log-Created-At"

    def __init__(
        self,
        logs: LogManager,
        name: str,
        created_at: str | None = None,
        wanted: Filter | None = None,
    ) -> None:
        """`wanted` selects the records to return. None means all."""
        super().__init__(b'"log":"%b"' % name.encode())
        self._logs, self._log, self._created_at = logs, name, created_at
        self._wanted = wanted

    @property
    def key(self) -> Hashable | None:
        """The log's name, creation time and filter. None until the first page is read."""
        if self._created_at is None:
            return None
        return self.name, self._created_at, self._wanted

    def id_end(self, page: LogBatches) -> bytes:
        """The token of the log's creation, after a dot."""
        return b".%b" % token_of(page.created_at).encode()

    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> LogBatches:
        """Read the records from an offset on. With a filter, read until the page is full, the log
        ends, or _FILTERED_BYTES_MAX bytes have been read. Raises: the log's errors.
        """
        if self._wanted is None:
            return await self._read(at, limit, max_bytes, wait_s)
        end_s = asyncio.get_running_loop().time() + wait_s
        batches, first, size = list[StoredBatch](), None, 0
        while True:
            page = await self._indexed(at)
            if page is not None:
                size += TAIL_BYTES  # counts the buckets of indexes that were read
            else:
                left_s = 0.0 if batches else end_s - asyncio.get_running_loop().time()
                page = await self._read(at, BATCH_ENTRIES_MAX, TAIL_BYTES, max(left_s, 0.0))
                size += self.size(page)
            first = page.first if first is None else first
            found = self._wanted.page(page, limit, max_bytes)
            batches += found.batches
            limit, max_bytes = limit - self.count(found), max_bytes - self.size(found)
            is_full = found.next < page.next or limit <= 0 or max_bytes <= 0
            is_over = page.closed or page.is_empty or (batches and page.is_at_end)
            if is_full or is_over or size >= _FILTERED_BYTES_MAX:
                return replace(found, batches=tuple(batches), first=first)
            at = page.next

    async def _indexed(self, at: Start) -> LogBatches | None:
        """Use an index of keys to read a page of batches that may have the key. None without one."""
        key = None if self._wanted is None else self._wanted.key
        if key is None or not (isinstance(at, int) or at == "earliest"):
            return None
        page = await self._logs.keys.page(
            self._log,
            at,
            key,
            created_at=self._created_at,
            limit=BATCH_ENTRIES_MAX,
            max_bytes=TAIL_BYTES,
        )
        self._created_at = self._created_at if page is None else page.created_at
        return page

    async def _read(self, at: Start, limit: int, max_bytes: int, wait_s: float) -> LogBatches:
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
        """The number of records in a page."""
        return sum(found.count for found in page.batches)

    def has_moved(self, page: LogBatches) -> bool:
        """Whether a page has or skips records."""
        return not page.is_empty

    def skipped_to(self, page: LogBatches) -> int | None:
        """The last offset that a page covers; None if the page contains the offset's record."""
        if page.is_empty:
            return None
        last = page.batches[-1] if page.batches else None
        is_shown = last is not None and last.first_offset + last.count == page.next
        return None if is_shown else page.next - 1

    def payload_bytes(self, page: LogBatches) -> int:
        """Total bytes of the values, keys and headers in a page."""
        return sum(found.columns.size for found in page.batches)

    def rest(self, page: LogBatches, at: int) -> LogBatches:
        """The part of a page from an offset on."""
        batches = tuple(
            found.since(at) if found.first_offset < at else found
            for found in page.batches
            if found.first_offset + found.count > at
        )
        return replace(page, batches=batches, first=at)

    def is_end(self, page: LogBatches) -> bool:
        """Whether the log is closed and a page reaches the log's end."""
        return page.closed

    def numbers(self, page: LogBatches) -> Iterable[int]:
        """The offsets of a page."""
        return chain.from_iterable(
            range(found.first_offset, found.first_offset + found.count) for found in page.batches
        )

    def values(self, page: LogBatches) -> Iterable[memoryview]:
        """The values of a page's records."""
        return page.values

    def arrow(self, page: LogBatches) -> bytes:
        """Encode a page as an Arrow stream with all columns of the records."""
        return arrow.records_stream(page.batches)

    def items(self, page: LogBatches, encoding: str) -> Iterable[bytes]:
        """Encode each record of a page as a JSON object."""
        return chain.from_iterable(records_json(found, encoding) for found in page.batches)

    def members(self, page: LogBatches) -> dict[str, int | str]:
        """The next offset to read, and the log's first offset, state and creation time."""
        return {
            "next": page.next,
            "first_offset": page.first_offset,
            "closed": page.closed,
            "created_at": page.created_at,
        }

    def ending(self, page: LogBatches) -> dict[str, int]:
        """The offset after the log's last record."""
        return {"next_offset": page.next}


def records_json(found: StoredBatch, encoding: str) -> Iterator[bytes]:
    """Encode each record of a batch as a JSON object."""
    place = b'"ledger_id":%d,"entry_id":%d' % (found.ledger_id, found.entry_id)
    appended = time_text(found.time_ms).encode()
    tombstones = {found.first_offset + number for number in found.columns.tombstones}
    rows = enumerate(found.columns.rows, found.first_offset)
    for offset, (value, key, headers, time_ms) in rows:
        yield b'{"offset":%d,"timestamp":"%b",%b,%b,"headers":%b,%b}' % (
            offset,
            appended if time_ms is None else time_text(time_ms).encode(),
            place,
            encoded_key(key, encoding),
            orjson.dumps(dict(headers)) if headers else b"{}",
            encoded_null(encoding) if offset in tombstones else encoded(value, encoding),
        )


def time_text(milliseconds: int) -> str:
    """Format a time as in the API. Times outside the years 1 to 9999 are clamped."""
    at = min(max(milliseconds, -62_135_596_800_000), 253_402_300_799_999)
    seconds, rest = divmod(at, 1000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text.rjust(19, '0')}.{rest:03d}Z"
