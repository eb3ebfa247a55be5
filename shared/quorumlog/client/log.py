"""One named log: append records, read them by offset, follow them."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import orjson

from quorumlog import header
from quorumlog.client.batching import Batcher, Batching, Call
from quorumlog.client.ledger import PAGE, WAIT_MS
from quorumlog.client.paging import Paged
from quorumlog.client.producer import Producer
from quorumlog.client.records import (
    LogAppended,
    LogPage,
    LogRecord,
    Record,
    Start,
    encoded,
    record_of,
    share,
    size_of,
)
from quorumlog.client.transport import Transport


class Log:
    """A log of a cluster. Holds its name, appends that are on their way and, once it was opened for
    one writer, the writer token.
    """

    name: str
    writer_token: int | None

    def __init__(
        self, transport: Transport, name: str, writer_token: int | None, batching: Batching
    ) -> None:
        """Use `Client.log` or `Client.create_log`."""
        self.name = name
        self.writer_token = writer_token
        self._transport = transport
        self._batching = batching
        self._path = f"/v1/logs/{quote(name, safe='')}"
        self._batcher = Batcher(self._send, share, size_of, transport.start, batching)

    def __repr__(self) -> str:
        """The name."""
        return f"Log({self.name!r})"

    async def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records next to each other, all or none; returns when they are durable.

        Appends that are made while one is under way travel together, in the order of the calls.
        An error whose `outcome` is unknown may have appended them; they are never sent twice by
        itself, and what was queued behind them is not sent. Where that must not be, use a
        `producer`.
        `expect`: the offset that the first must get, else UnexpectedOffset, nothing written.
        """
        return await self._batcher.append(records, expect)

    async def submit(self, *records: bytes | Record) -> asyncio.Future[LogAppended]:
        """Append records without waiting until they are durable: that is when the future is done.

        Waits only while too much is queued.
        """
        return await self._batcher.submit(records)

    async def flush(self) -> None:
        """Wait until every append of this object is settled."""
        await self._batcher.flush()

    def producer(
        self,
        producer_id: str | None = None,
        *,
        epoch: int | None = None,
        since: int | None = None,
    ) -> Producer:
        """Who appends exactly once, whatever dies. One of the same id with a higher epoch ends the
        ones before it; the epoch is the time by the clock where it is not given.

        `since`: the log's `next_offset` before the producer of this id and epoch had sent anything.
        It is read with the first request where the epoch is made here. Who gives an epoch may have
        sent under it before, and gives the `since` of then; without it a log that has forgotten any
        producer takes no requests of one that it does not know. Raises: ExpiredProducer; begin a
        new epoch then.
        """
        return Producer(
            self._request,
            producer_id or uuid.uuid4().hex,
            int(datetime.now(UTC).timestamp() * 1000) if epoch is None else epoch,
            self._next_offset if epoch is None and since is None else since,
            self._transport.start,
            self._batching,
        )

    async def _next_offset(self) -> int:
        return int((await self.info())["next_offset"])

    async def _send(self, call: Call[bytes | Record]) -> LogAppended:
        return await self._request(call, {}, is_repeatable=False)

    async def _request(
        self, call: Call[bytes | Record], headers: Mapping[str, str], *, is_repeatable: bool
    ) -> LogAppended:
        """One append request, for this object and its producers."""
        content_type, body = encoded(call.payloads)
        token = self.writer_token
        answer = await self._transport.request(
            "POST",
            f"{self._path}/entries",
            body=body,
            content_type=content_type,
            params=None if call.expect is None else {"expect": call.expect},
            headers={**headers, **({} if token is None else {header.WRITER_TOKEN: str(token)})},
            is_repeatable=is_repeatable,
        )
        told = answer.json()
        return LogAppended(
            int(told["first_offset"]),
            int(told["last_offset"]),
            int(told["ledger_id"]),
            int(told["entry_id"]),
            answer.headers.get(header.PRODUCER_DUPLICATE) == "true",
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
            tuple(map(record_of, page["entries"])),
            int(page["next"]),
            int(page["first_offset"]),
            bool(page["closed"]),
        )

    def records(self, start: Start = "earliest") -> Paged[LogRecord]:
        """The records that are there when it begins, in order."""
        return Paged(self._records(start))

    async def _records(self, start: Start) -> AsyncGenerator[Sequence[LogRecord], None]:
        end = await self._next_offset()
        while not isinstance(start, int) or start < end:
            page = await self.read(start, limit=PAGE)
            if page.next > end:
                yield [record for record in page.records if record.offset < end]
                return
            yield page.records
            if not page.records:
                return
            start = page.next

    def tail(self, start: Start = "earliest") -> Paged[LogRecord]:
        """The records in order, and those to come, until the log is closed. Never fences."""
        return Paged(self._tail(start))

    async def _tail(self, start: Start) -> AsyncGenerator[Sequence[LogRecord], None]:
        while True:
            page = await self.read(start, limit=PAGE, wait_ms=WAIT_MS)
            yield page.records
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

    async def archived(self, through: int, *, expect: int | None = None) -> dict[str, Any]:
        """Say that all records below an offset are kept elsewhere too; retention keeps the others.

        `expect`: `archived_through` as it was before. Raises: VersionConflict, InvalidRequest.
        """
        return await self._call("POST", "/archived", {"through": through, "expect": expect})

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
