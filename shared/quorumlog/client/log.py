"""One named log: append records, read them by offset, follow them; and exactly-once producers."""

import asyncio
import base64
import struct
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import quote

import orjson

from quorumlog.client.transport import Transport
from quorumlog.errors import UNKNOWN, QuorumLogError

_FRAMES: Final = "application/vnd.quorumlog.frames"
_LENGTH: Final = struct.Struct(">I")
_WAIT_MS: Final = 30_000

Start = int | Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append."""

    value: bytes
    key: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp: str | None = None
    """RFC 3339; the time of the append where it is not given."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record as it was appended. `offset` is dense per log, from 0."""

    offset: int
    value: bytes
    key: bytes | None
    headers: Mapping[str, str]
    timestamp: str
    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class LogAppended:
    """Records that are durable, all of one request. `is_duplicate`: an earlier one did it."""

    first_offset: int
    last_offset: int
    ledger_id: int
    entry_id: int
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some records in order. Go on at `next`; `closed` says that nothing ever follows."""

    records: tuple[LogRecord, ...]
    next: int
    first_offset: int
    closed: bool


class Log:
    """A log of a cluster. Holds nothing but its name and, once opened, its writer token."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.name = name
        self.writer_token: int | None = None
        self._transport = transport
        self._path = f"/v1/logs/{quote(name, safe='')}"

    def __repr__(self) -> str:
        """The name."""
        return f"Log({self.name!r})"

    async def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records as one atomic batch; returns when they are durable.

        An error whose `outcome` is unknown may have appended them; they are never sent twice by
        itself. Where that must not be, use a `producer`.
        `expect`: the offset that the first must get, else UnexpectedOffset, nothing written.
        """
        return await self.send(records, expect=expect, headers={}, is_repeatable=False)

    def producer(self, producer_id: str | None = None, *, epoch: int | None = None) -> "Producer":
        """Who appends exactly once, whatever dies. One of the same id with a higher epoch ends the
        ones before it; the epoch is the time by the clock where it is not given.
        """
        return Producer(self, producer_id or uuid.uuid4().hex, epoch)

    async def send(
        self,
        records: Sequence[bytes | Record],
        *,
        expect: int | None,
        headers: Mapping[str, str],
        is_repeatable: bool,
    ) -> LogAppended:
        """One append request, as `append` and producers make it."""
        content_type, body = _encoded(records)
        token = self.writer_token
        answer = await self._transport.request(
            "POST",
            f"{self._path}/entries",
            body=body,
            content_type=content_type,
            params=None if expect is None else {"expect": expect},
            headers={**headers, **({} if token is None else {"Writer-Token": str(token)})},
            is_repeatable=is_repeatable,
        )
        told = answer.json()
        return LogAppended(
            int(told["first_offset"]),
            int(told["last_offset"]),
            int(told["ledger_id"]),
            int(told["entry_id"]),
            answer.headers.get("Producer-Duplicate") == "true",
        )

    async def read(
        self, start: Start = "earliest", *, limit: int | None = None, wait_ms: int = 0
    ) -> LogPage:
        """Read records from `start` on, as many as one answer holds.

        `wait_ms`: how long the server may wait for one at the tail.
        """
        params: dict[str, str | int] = {"from": start, "wait_ms": wait_ms}
        if limit is not None:
            params["limit"] = limit
        answer = await self._transport.request(
            "GET",
            f"{self._path}/entries",
            params=params,
            is_repeatable=True,
            wait_s=wait_ms / 1000,
        )
        page = answer.json()
        return LogPage(
            tuple(map(_record_of, page["entries"])),
            int(page["next"]),
            int(page["first_offset"]),
            bool(page["closed"]),
        )

    async def records(self, start: Start = "earliest") -> AsyncIterator[LogRecord]:
        """The records that are there now, in order."""
        while True:
            page = await self.read(start, limit=1000)
            for record in page.records:
                yield record
            if not page.records:
                return
            start = page.next

    async def tail(self, start: Start = "earliest") -> AsyncIterator[LogRecord]:
        """The records in order, and those to come, until the log is closed."""
        while True:
            page = await self.read(start, limit=1000, wait_ms=_WAIT_MS)
            for record in page.records:
                yield record
            start = page.next
            if page.closed:
                return

    async def open(self, owner: str) -> int:
        """Become its only writer: whoever wrote it is fenced off, and this object's appends carry
        the token. Returns the offset that the next record gets.
        """
        told = await self._call("POST", "/open", {"owner": owner}, is_repeatable=False)
        self.writer_token = int(told["writer_token"])
        return int(told["next_offset"])

    async def info(self) -> dict[str, Any]:
        """The log as the API shows it: settings, ledgers, offsets, owner."""
        return await self._call("GET", "")

    async def roll(self) -> dict[str, Any]:
        """Go on in a new ledger."""
        return await self._call("POST", "/roll")

    async def truncate(self, before: int) -> dict[str, Any]:
        """Drop whole ledgers that end below an offset; `first_offset` tells the result."""
        return await self._call("POST", "/truncate", {"before": before})

    async def close(self) -> dict[str, Any]:
        """End the log for good."""
        return await self._call("POST", "/close")

    async def delete(self) -> None:
        """Delete the log with its records."""
        await self._transport.request("DELETE", self._path, is_repeatable=False)

    async def _call(
        self, method: str, path: str, body: Any = None, *, is_repeatable: bool = True
    ) -> dict[str, Any]:
        answer = await self._transport.request(
            method,
            self._path + path,
            body=None if body is None else orjson.dumps(body),
            is_repeatable=is_repeatable,
        )
        found: dict[str, Any] = answer.json()
        return found


class Producer:
    """Appends to a log exactly once: a repeat of a request gets the first one's answer.

    Invariant: one request at a time, and `seq` is the one that comes next; after an error whose
    outcome is unknown it stays, so the same records sent again are not there twice.
    """

    def __init__(self, log: Log, producer_id: str, epoch: int | None = None) -> None:
        """Use `Log.producer`."""
        self.log = log
        self.producer_id = producer_id
        self.epoch = int(datetime.now(UTC).timestamp() * 1000) if epoch is None else epoch
        self.seq = 0
        self._turn = asyncio.Lock()

    async def append(self, *records: bytes | Record) -> LogAppended:
        """Append records as one atomic batch, once; calls are done in their order."""
        async with self._turn:
            try:
                done = await self.log.send(
                    records,
                    expect=None,
                    headers={
                        "Producer-Id": self.producer_id,
                        "Producer-Epoch": str(self.epoch),
                        "Producer-Seq": str(self.seq),
                    },
                    is_repeatable=True,
                )
            except QuorumLogError as error:
                if error.outcome == UNKNOWN:
                    error.add_note(f"append the same records again: seq {self.seq} is still open")
                raise
            self.seq += 1
            return done


def _encoded(records: Iterable[bytes | Record]) -> tuple[str, bytes]:
    """Frames where there are only values, else JSON."""
    given = list(records)
    plain = [record for record in given if isinstance(record, bytes)]
    if len(plain) == len(given):
        return _FRAMES, b"".join(part for v in plain for part in (_LENGTH.pack(len(v)), v))
    return "application/json", orjson.dumps({"entries": [_entry_of(record) for record in given]})


def _entry_of(record: bytes | Record) -> dict[str, Any]:
    if isinstance(record, bytes):
        return {"data": base64.b64encode(record).decode()}
    entry: dict[str, Any] = {"data": base64.b64encode(record.value).decode()}
    if record.key is not None:
        entry["key"] = base64.b64encode(record.key).decode()
    if record.headers:
        entry["headers"] = dict(record.headers)
    if record.timestamp is not None:
        entry["timestamp"] = record.timestamp
    return entry


def _record_of(entry: Mapping[str, Any]) -> LogRecord:
    key = entry["key"]
    return LogRecord(
        int(entry["offset"]),
        base64.b64decode(entry["data"]),
        None if key is None else base64.b64decode(key),
        entry["headers"],
        entry["timestamp"],
        int(entry["ledger_id"]),
        int(entry["entry_id"]),
    )
