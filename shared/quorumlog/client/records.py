"""Entries and records as callers append and read them, and their formats on the wire."""

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeVar

import orjson

from quorumlog.client import checks

T = TypeVar("T")

FRAMES: Final = "application/vnd.quorumlog.frames"
_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">QI")
_RECORD_BYTES: Final = 64
"""Bytes counted per record in addition to key and value, which bounds queued empty records."""

Start = int | Literal["earliest", "latest"] | datetime
"""The start of a read: an offset from 0 on, -N for N offsets before the end, `earliest`, `latest`,
or a datetime with a time zone. A datetime selects the first record that was appended at that time
or later (by the log's append times).
"""


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of an append: `first_entry` to `last_entry` are durable on an ack quorum."""

    first_entry: int
    last_entry: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a ledger, as it was appended."""

    entry_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a ledger: entries in order. The next page begins at `next`, unless `is_end`."""

    entries: tuple[Entry, ...]
    next: int
    last_add_confirmed: int
    closed: bool

    @property
    def is_end(self) -> bool:
        """Whether the ledger is closed and nothing follows this page."""
        return self.closed and self.next > self.last_add_confirmed


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append."""

    value: bytes | None
    """None: a tombstone, which deletes its key in a compacted log."""
    key: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp: str | None = None
    """A time in RFC 3339; by default the time of the append."""
    ttl_s: int | None = None
    """How many seconds after its append the record expires; None: never."""

    def __post_init__(self) -> None:
        if self.value is not None:
            checks.octets("a record's value", self.value)
        elif self.key is None:
            raise ValueError("a record without a value (a tombstone) must have a key")
        if self.key is not None:
            checks.octets("a record's key", self.key)
        checks.maybe_offset("a record's ttl_s", self.ttl_s)
        if self.timestamp is not None:
            checks.text("a record's timestamp", self.timestamp)
        if self.headers:
            # A copy: the caller may change the mapping while the record waits to be sent.
            headers = dict(checks.texts("a record's headers", self.headers))
            object.__setattr__(self, "headers", headers)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record of a log, as it was appended. Offsets count from 0. Compaction leaves gaps."""

    offset: int
    value: bytes
    key: bytes | None
    headers: Mapping[str, str]
    timestamp: str
    ledger_id: int
    entry_id: int
    is_tombstone: bool = False
    """Whether the record was appended without a value, to delete its key. `value` is empty."""


@dataclass(frozen=True, slots=True)
class LogAppended:
    """The result of an append: its records are durable.

    `is_duplicate`: an earlier request appended the records.
    """

    first_offset: int
    last_offset: int
    ledger_id: int
    entry_id: int
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class LogPage:
    """A page of the log that was created at `created_at`: records in order. The next page begins at
    `next`. `closed`: no record will ever follow.
    """

    records: tuple[LogRecord, ...]
    next: int
    first_offset: int
    closed: bool
    created_at: str


def encoded(records: Sequence[bytes | Record], noun: str = "records") -> tuple[str, bytes]:
    """The content type and the body of an append: frames if all records are plain values, otherwise
    JSON with the records in the member `noun`.

    The caller has checked the records with `size_of`.
    """
    plain = [record for record in records if isinstance(record, bytes)]
    if len(plain) == len(records):
        return FRAMES, frames(plain)
    return "application/json", orjson.dumps({noun: [_record_of(record) for record in records]})


def size_of(record: bytes | Record) -> int:
    """A record's approximate size in bytes. Raises: TypeError if the value is not a record."""
    if isinstance(record, bytes):
        return len(record) + _RECORD_BYTES
    if not isinstance(record, Record):
        raise TypeError(f"a record must be bytes or Record, not {type(record).__name__}")
    if record.headers:
        checks.texts("a record's headers", record.headers)
    return len(record.value or b"") + len(record.key or b"") + _RECORD_BYTES


def share(done: LogAppended, index: int, count: int) -> LogAppended:
    """The result for `count` records of a batch from `index` on. `done`: the batch's result."""
    first = done.first_offset + index
    return LogAppended(first, first + count - 1, done.ledger_id, done.entry_id, done.is_duplicate)


def _record_of(record: bytes | Record) -> dict[str, Any]:
    if isinstance(record, bytes):
        return {"data": base64.b64encode(record).decode()}
    data = None if record.value is None else base64.b64encode(record.value).decode()
    shown = {
        "key": None if record.key is None else base64.b64encode(record.key).decode(),
        "headers": dict(record.headers) or None,
        "timestamp": record.timestamp,
        "ttl_s": record.ttl_s,
    }
    return {"data": data, **{name: value for name, value in shown.items() if value is not None}}


def record_of(entry: Mapping[str, Any]) -> LogRecord:
    """Parse a record of a JSON page."""
    key, data = entry["key"], entry["data"]
    return LogRecord(
        int(entry["offset"]),
        base64.b64decode(data or ""),
        None if key is None else base64.b64decode(key),
        entry["headers"],
        entry["timestamp"],
        int(entry["ledger_id"]),
        int(entry["entry_id"]),
        data is None,
    )


def checked_start(start: Start) -> Start:
    """Check the start of a read, and return it. Raises: TypeError, ValueError."""
    if isinstance(start, str):
        if start not in ("earliest", "latest"):
            raise ValueError(
                f"start must be an offset, earliest, latest or a datetime, not {start!r}"
            )
        return start
    if isinstance(start, datetime):
        if start.utcoffset() is None:
            raise ValueError(f"start must be a datetime with a time zone, not {start!r}")
        return start
    if not -(1 << 63) < checks.whole("start", start) < 1 << 63:
        raise ValueError(f"start must be between -2**63 + 1 and 2**63 - 1, not {start:.4g}")
    return start


def shown_start(start: Start) -> int | str:
    """Format the start of a read as a request parameter."""
    return start.isoformat() if isinstance(start, datetime) else start


def frames(payloads: Sequence[bytes]) -> bytes:
    """A batch of payloads as one body: each payload follows its length (u32 big-endian)."""
    return b"".join([part for p in payloads for part in (_LENGTH.pack(len(p)), p)])


def entries_of(body: bytes) -> list[Entry]:
    """Parse the body of a page of entries in frames."""
    found, at = [], 0
    while at < len(body):
        entry_id, length = _HEAD.unpack_from(body, at)
        at += _HEAD.size + length
        found.append(Entry(entry_id, body[at - length : at]))
    return found


# --- pages -----------------------------------------------------------------------------------------


async def ahead(
    pages: AsyncGenerator[Sequence[T], None],
) -> AsyncGenerator[Sequence[T], None]:
    """Yield the same pages, but fetch each page while the caller handles the previous one."""

    async def read() -> Sequence[T] | None:
        return await anext(pages, None)

    async with aclosing(pages):
        reading = asyncio.create_task(read())
        try:
            while (page := await reading) is not None:
                reading = asyncio.create_task(read())
                reading.add_done_callback(_passed_over)
                yield page
        finally:
            reading.cancel()
            await asyncio.wait([reading])


def _passed_over(reading: asyncio.Task[Sequence[T] | None]) -> None:
    """Retrieve the error of a prefetched page that no caller awaits, so that asyncio does not log it."""
    if not reading.cancelled():
        reading.exception()


class Paged(AsyncIterator[T], Generic[T]):
    """Iterates over the items of a list in order. Use `pages` instead to handle the items page by page."""

    def __init__(self, pages: AsyncGenerator[Sequence[T], None]) -> None:
        """`pages`: the items of each page; a page may be empty."""
        self._pages = pages
        self._page: Sequence[T] = ()
        self._index = 0

    async def __anext__(self) -> T:
        """The next item."""
        while self._index >= len(self._page):
            self._page, self._index = await anext(self._pages), 0
        item = self._page[self._index]
        self._index += 1
        return item

    def pages(self) -> AsyncGenerator[Sequence[T], None]:
        """The items page by page; a page may be empty."""
        return self._pages

    async def aclose(self) -> None:
        """End the iteration, and fetch no more pages."""
        await self._pages.aclose()
