"""The handle of one named log: append records, read them by offset, follow the log."""

import asyncio
import uuid
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast
from urllib.parse import quote

from quorumlog import header
from quorumlog.client import checks
from quorumlog.client.batching import Batcher, Batching, Call
from quorumlog.client.consumer import Consumer
from quorumlog.client.ledger import PAGE, WAIT_MS
from quorumlog.client.producer import Producer
from quorumlog.client.queue import Queue
from quorumlog.client.records import (
    FRAMES,
    LogAppended,
    LogPage,
    LogRecord,
    Paged,
    Record,
    Start,
    ahead,
    checked_start,
    encoded,
    record_of,
    share,
    shown_start,
    size_of,
)
from quorumlog.client.shown import ConsumerInfo, LogInfo
from quorumlog.client.streaming import AppendStream
from quorumlog.client.table import Table
from quorumlog.client.transport import Transport
from quorumlog.errors import KeyScanLimit, NoSuchKey, StaleProducer


class Log:
    """A handle of a log. It keeps the name, appends under way and, after `open`, a writer token."""

    name: str
    writer_token: int | None

    def __init__(
        self, transport: Transport, name: str, writer_token: int | None, batching: Batching
    ) -> None:
        """Use `Client.log` or `Client.create_log`."""
        self.name = checks.text("a log's name", name)
        self.writer_token = checks.maybe_offset("writer_token", writer_token)
        self._transport = transport
        self._batching = batching
        self._path = f"/v1/logs/{quote(name, safe='')}"
        self._stream = AppendStream(transport, f"{self._path}/ws")
        self.batcher = Batcher(self._send, share, size_of, transport, batching)

    def __repr__(self) -> str:
        """The class and the name, for log lines."""
        return f"Log({self.name!r})"

    async def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records at consecutive offsets, all or none; return once the records are durable.

        Appends that are made while a request is under way share the next request, in the order of
        the calls. After an error whose `outcome` is unknown the records may have been appended. The
        client does not retry this append, and does not send the appends that were queued behind it.
        Use a `producer` to append exactly once. `expect`: the offset that the first record must
        get; otherwise UnexpectedOffset is raised, and nothing is written.
        """
        return await self.batcher.append(records, expect)

    async def submit(self, *records: bytes | Record) -> asyncio.Future[LogAppended]:
        """Queue records; the future is done once the records are durable.

        Waits only while the queue is full (`Batching.queued_bytes_max`).
        """
        return await self.batcher.submit(records)

    async def flush(self) -> None:
        """Wait until every append of this handle has succeeded or failed."""
        await self.batcher.flush()

    def producer(
        self,
        producer_id: str | None = None,
        *,
        epoch: int | None = None,
        since: int | None = None,
    ) -> Producer:
        """A producer. Its appends are exactly-once even if processes fail. A producer with a
        higher epoch fences older producers with the same id. The default epoch is the current time
        in ms, but always higher than the epoch that fenced a producer of this client.

        `since`: the log's `next_offset` before the producer with this id and epoch sent its first
        request. With the default epoch, the first append reads `since` from the log. A caller that
        passes an epoch may have used that epoch before, so it must also pass the `since` with which
        that epoch began. Without `since`, a log that has forgotten any producer rejects unknown
        producers with ExpiredProducer: begin a new epoch then.
        """
        name = uuid.uuid4().hex if producer_id is None else producer_id
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        newest = self._transport.epochs.get((self._path, name), 0)
        return Producer(
            self._request,
            name,
            max(now_ms, newest + 1) if epoch is None else epoch,
            self._end if epoch is None and since is None else since,
            self._transport,
            self._batching,
        )

    async def _end(self, end: float | None = None) -> tuple[int, str]:
        """The log's next offset and time of creation. `end`: deadline, on the loop's clock."""
        answer = await self._transport.request("GET", self._path, is_repeatable=True, end=end)
        shown = answer.json()
        return int(shown["next_offset"]), str(shown["created_at"])

    async def _send(self, call: Call[bytes | Record]) -> LogAppended:
        if call.expect is None and self._stream.is_ready(self._token_header()):
            content_type, body = encoded(call.payloads)
            reported = await self._stream.send(body, call.end, is_text=content_type != FRAMES)
            if reported is not None:
                return _appended(reported)
        return await self._request(call, {})

    def _token_header(self) -> dict[str, str]:
        return {} if self.writer_token is None else {header.WRITER_TOKEN: str(self.writer_token)}

    async def _request(
        self,
        call: Call[bytes | Record],
        headers: Mapping[str, str],
        created_at: str | None = None,
    ) -> LogAppended:
        """Send an append of this handle or of a producer. Only producers' appends are retried."""
        content_type, body = encoded(call.payloads)
        try:
            answer = await self._transport.request(
                "POST",
                f"{self._path}/records",
                body=body,
                content_type=content_type,
                params={"expect": call.expect, **_meant(created_at)},
                headers={**headers, **self._token_header()},
                is_repeatable=header.PRODUCER_ID in headers,
                end=call.end,
            )
        except StaleProducer as error:
            newest = int(error.members.get("producer_epoch", 0))
            self._transport.epochs[self._path, headers[header.PRODUCER_ID]] = newest
            raise
        is_duplicate = answer.headers.get(header.PRODUCER_DUPLICATE) == "true"
        return _appended(answer.json(), is_duplicate=is_duplicate)

    async def read(
        self,
        start: Start = "earliest",
        *,
        limit: int | None = None,
        wait_ms: int = 0,
        created_at: str | None = None,
        key: str | None = None,
        key_prefix: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> LogPage:
        """Read records from `start` on, as many as fit in one response.

        `start`: an offset; -N for N offsets before the end; or a datetime, for the first record
        appended at that time or later. If -N or the datetime lies before the first record, the read
        begins with the first record. If the datetime lies after the last record, the read begins at
        the log's end. `wait_ms`: how long the server may wait for a new record at the tail.
        `created_at`: from the previous page, to continue in the same log. `key`, `key_prefix`,
        `headers`: return only records with this key, with a key that begins with this text, and
        with all of these headers. The server scans up to 16 MiB of records for one page, so a page
        may be empty before the log's end. `next` is the offset at which the scan stopped.

        Raises: LogReplaced if the log was deleted and created again after `created_at`;
        OffsetBeyondEnd; OffsetTruncated.
        """
        is_offset = isinstance(start, int) and start >= 0
        if wait_ms and not is_offset and start != "earliest":
            # A retry of a waiting request would resolve `start` again, and miss new records.
            page = await self.read(
                start,
                limit=limit,
                created_at=created_at,
                key=key,
                key_prefix=key_prefix,
                headers=headers,
            )
            if page.records or page.closed:
                return page
            start, created_at = page.next, page.created_at
        params = {
            "from": shown_start(checked_start(start)),
            "wait_ms": checks.offset("wait_ms", wait_ms),
            "limit": checks.maybe_offset("limit", limit),
            "key": checks.maybe_text("key", key),
            "key_prefix": checks.maybe_text("key_prefix", key_prefix),
            **checks.conditions(headers),
            **_meant(created_at),
        }
        answer = await self._transport.request(
            "GET",
            f"{self._path}/records",
            params=params,
            is_repeatable=True,
            wait_s=wait_ms / 1000,
        )
        shown = answer.json()
        return LogPage(
            tuple(map(record_of, shown["records"])),
            int(shown["next"]),
            int(shown["first_offset"]),
            bool(shown["closed"]),
            shown["created_at"],
        )

    def records(
        self,
        start: Start = "earliest",
        *,
        key: str | None = None,
        key_prefix: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Paged[LogRecord]:
        """The records that are confirmed when the iteration begins, in order. `key`, `key_prefix`,
        `headers` and errors: as for `read`.
        """
        checks.maybe_text("key", key), checks.maybe_text("key_prefix", key_prefix)
        checks.conditions(headers)
        read = partial(self.read, limit=PAGE, key=key, key_prefix=key_prefix, headers=headers)
        return Paged(ahead(self._records(read, checked_start(start))))

    async def _records(
        self, read: Callable[..., Awaitable[LogPage]], start: Start
    ) -> AsyncGenerator[Sequence[LogRecord], None]:
        end, created_at = await self._end()
        while start != end:
            page = await read(start, created_at=created_at)
            if page.next > end:
                yield [record for record in page.records if record.offset < end]
                return
            yield page.records
            if page.next == start:
                return
            start = page.next

    def tail(
        self,
        start: Start = "earliest",
        *,
        key: str | None = None,
        key_prefix: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Paged[LogRecord]:
        """Follow the log: all records in order, and new records as they are confirmed, until the
        log is closed. A tail never fences. `key`, `key_prefix`, `headers`: as in `read`. Raises: as
        `read`; LogReplaced if the log was deleted and created again.
        """
        checks.maybe_text("key", key), checks.maybe_text("key_prefix", key_prefix)
        checks.conditions(headers)
        read = partial(self.read, limit=PAGE, key=key, key_prefix=key_prefix, headers=headers)
        return Paged(self._tail(read, checked_start(start)))

    async def _tail(
        self, read: Callable[..., Awaitable[LogPage]], start: Start
    ) -> AsyncGenerator[Sequence[LogRecord], None]:
        created_at: str | None = None
        while True:
            page = await read(start, wait_ms=WAIT_MS, created_at=created_at)
            yield page.records
            start, created_at = page.next, page.created_at
            if page.closed:
                return

    async def get(self, key: str) -> LogRecord | None:
        """The newest record of a key, or None if it is a tombstone, or if no record that was
        confirmed before the call has the key. The key is sent in a URL, so it must be UTF-8, and not
        empty, `.` or `..`; a `table` supports all keys.

        Raises: KeyScanLimit if the ledgers without an index are too large for the deadline.
        """
        if checks.text("a key", key) in ("", ".", ".."):
            raise ValueError(f"the key {key!r} can't be sent in a URL: use `read` or `table`")
        path = f"{self._path}/keys/{quote(key, safe='')}"
        params: dict[str, str | int | None] = {}
        end = asyncio.get_running_loop().time() + self._transport.deadline_s
        while True:
            try:
                answer = await self._transport.request(
                    "GET", path, params=params, is_repeatable=True, end=end
                )
            except KeyScanLimit as error:
                if asyncio.get_running_loop().time() >= end:
                    raise
                created_at = error.members.get("created_at")
                params = {"before": int(error.members["before"]), "created": created_at}
            except NoSuchKey:
                return None
            else:
                return record_of(answer.json())

    def keys(self, prefix: str = "") -> Paged[bytes]:
        """The keys of the records that are confirmed when the iteration begins, each once, in the
        order of their first records. `prefix`: only keys that begin with this text. Listed keys are
        kept in memory. A deleted key is listed if its tombstone is on a later page than its record;
        `get` returns None for such a key.
        """
        return Paged(self._keys(checks.text("prefix", prefix)))

    async def _keys(self, prefix: str) -> AsyncGenerator[Sequence[bytes], None]:
        end, created_at = await self._end()
        at: int | str = "earliest"
        listed: set[bytes] = set()
        while at != end:
            params = {"prefix": prefix, "from": at, "limit": PAGE, **_meant(created_at)}
            answer = await self._transport.request(
                "GET", f"{self._path}/keys", params=params, is_repeatable=True
            )
            page = answer.json()
            found = [b64decode(each["key"]) for each in page["keys"] if each["offset"] < end]
            yield [key for key in found if key not in listed]
            listed.update(found)
            if page["next"] == at or page["next"] > end:
                return
            at = page["next"]

    def table(self) -> Table:
        """The newest record of each key, in memory, for `with` or `async with`."""
        return Table(partial(self.read, limit=PAGE), self._end, WAIT_MS)

    def consumer(
        self,
        name: str,
        *,
        start: Start = "earliest",
        holder: str | None = None,
        lease_s: float = 30.0,
        wait_s: float | None = None,
    ) -> Consumer:
        """A worker of the consumer `name`, for `with` or `async with`. It continues at the
        committed offset.

        `start`: where a consumer without a committed offset begins. `holder`: this worker's name. A
        later process with the same name takes over the lease at once; other workers get it
        `lease_s` after its last renewal. `wait_s`: how long to wait for the lease; None waits as
        long as it takes, 0 does not wait.
        """
        path = self._consumer(name)
        return Consumer(self._transport, path, self.read, name, start, holder, lease_s, wait_s)

    def consumers(self, *, prefix: str | None = None) -> Paged[dict[str, Any]]:
        """All consumers with their lags, by name. `prefix`: only names that begin with this text."""
        path, only = f"{self._path}/consumers", {"prefix": checks.maybe_text("prefix", prefix)}
        return Paged(self._transport.pages(path, "consumers", only))

    async def consumer_info(self, name: str) -> ConsumerInfo:
        """A consumer as the API shows it: committed offset, lease, lag. Raises: NoSuchConsumer."""
        return cast("ConsumerInfo", await self._transport.call("GET", self._consumer(name)))

    async def reset_consumer(self, name: str, to: Start) -> dict[str, Any]:
        """Set a consumer's committed offset. Its worker loses the lease. `to`: as `start` in
        `read`.

        Raises: NoSuchConsumer.
        """
        path, wanted = f"{self._consumer(name)}/reset", {"to": shown_start(checked_start(to))}
        return await self._transport.change_consumer("POST", path, wanted)

    async def delete_consumer(self, name: str) -> None:
        """Delete a consumer with its offset. Raises: NoSuchConsumer; LeaseHeld if the consumer is active."""
        await self._transport.change_consumer("DELETE", self._consumer(name))

    def _consumer(self, name: str) -> str:
        """The path of a consumer in the API."""
        return f"{self._path}/consumers/{quote(checks.text('a consumer name', name), safe='')}"

    def queue(self, name: str) -> Queue:
        """A handle of the work queue `name` of this log. `Queue.create` creates the queue."""
        path = f"{self._path}/queues/{quote(checks.text('a queue name', name), safe='')}"
        return Queue(self._transport, path, name)

    def queues(self) -> Paged[dict[str, Any]]:
        """All queues with their progress, by name."""
        return Paged(self._transport.pages(f"{self._path}/queues", "queues", {}))

    async def open(self, owner: str, *, created_at: str | None = None) -> int:
        """Become the log's only writer: fence earlier writers, and send the writer token with this
        handle's appends. Returns the offset that the next record gets. `created_at`: as for
        `truncate`.
        """
        wanted = {"owner": checks.text("owner", owner)}
        shown = await self._call(
            "POST", "/open", wanted, is_repeatable=False, created_at=created_at
        )
        self.writer_token = int(shown["writer_token"])
        return int(shown["next_offset"])

    async def info(self) -> LogInfo:
        """The log as the API shows it: settings, ledgers, offsets, owner."""
        return cast("LogInfo", await self._call("GET", ""))

    async def roll(self) -> dict[str, Any]:
        """Roll: close the log's open ledger and continue in a new ledger."""
        return await self._call("POST", "/roll")

    async def truncate(self, before: int, *, created_at: str | None = None) -> dict[str, Any]:
        """Drop whole ledgers that end below an offset; `first_offset` of `info` shows the result.

        `created_at`: the log's time of creation, from `info` or a page. Raises: LogReplaced if the
        log was created at another time.
        """
        wanted = {"before": checks.offset("before", before)}
        return await self._call("POST", "/truncate", wanted, created_at=created_at)

    async def archived(
        self, through: int, *, expect: int | None = None, created_at: str | None = None
    ) -> dict[str, Any]:
        """Record that all records below an offset are archived elsewhere; retention keeps all later
        records.

        `expect`: the current `archived_through`, or else VersionConflict is raised; `created_at`:
        as for `truncate`. Raises: VersionConflict, InvalidRequest, LogReplaced.
        """
        wanted = {
            "through": checks.offset("through", through),
            "expect": checks.maybe_offset("expect", expect),
        }
        return await self._call("POST", "/archived", wanted, created_at=created_at)

    async def close(self, *, created_at: str | None = None) -> dict[str, Any]:
        """Close the log for good. `created_at`: as for `truncate`."""
        return await self._call("POST", "/close", created_at=created_at)

    async def change(
        self,
        *,
        roll_bytes: int | None = None,
        roll_entries: int | None = None,
        roll_seconds: int | None = None,
        retention_bytes: int | None = None,
        retention_seconds: int | None = None,
        merge_below_bytes: int | None = None,
        cleanup_policy: str | None = None,
        min_compaction_lag_s: int | None = None,
        delete_retention_s: int | None = None,
        max_dirty_percent: int | None = None,
        if_version: int | None = None,
        created_at: str | None = None,
    ) -> dict[str, Any]:
        """Change the given limits; 0 removes a limit. The new limits take effect within seconds.

        `if_version`: raise VersionConflict unless the log still has this `version` (from `info`).
        A roll and a new owner also change the version. `created_at`: as for `truncate`.
        """
        limits = {
            "roll_bytes": roll_bytes,
            "roll_entries": roll_entries,
            "roll_seconds": roll_seconds,
            "retention_bytes": retention_bytes,
            "retention_seconds": retention_seconds,
            "merge_below_bytes": merge_below_bytes,
            "min_compaction_lag_s": min_compaction_lag_s,
            "delete_retention_s": delete_retention_s,
            "max_dirty_percent": max_dirty_percent,
        }
        given: dict[str, int | str] = {
            name: checks.offset(name, value) for name, value in limits.items() if value is not None
        }
        if cleanup_policy is not None:
            given["cleanup_policy"] = checks.text("cleanup_policy", cleanup_policy)
        if not given:
            raise ValueError("no limits given: pass at least one limit to change")
        headers = {}
        if if_version is not None:
            headers["If-Match"] = f'"{checks.offset("if_version", if_version)}"'
        return await self._call("PATCH", "", given, created_at=created_at, headers=headers)

    async def protect(
        self, *, deletion_protection: bool = True, created_at: str | None = None
    ) -> dict[str, Any]:
        """Protect the log from deletion, truncation and overwriting, or remove the protection.

        `created_at`: as for `truncate`.
        """
        wanted = {"deletion_protection": deletion_protection}
        return await self._call("PATCH", "", wanted, created_at=created_at)

    async def delete(self, *, created_at: str | None = None) -> None:
        """Delete the log. Raises: LogProtected; NoSuchLog, also if `created_at` differs."""
        await self._call("DELETE", "", is_repeatable=False, created_at=created_at)

    async def _call(
        self,
        method: str,
        path: str,
        value: Mapping[str, Any] | None = None,
        *,
        created_at: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Like `Transport.call`, but a log with another `created_at` rejects the request."""
        url, params = self._path + path, _meant(created_at)
        return await self._transport.call(method, url, value, params=params, **more)


def _appended(shown: Mapping[str, Any], *, is_duplicate: bool = False) -> LogAppended:
    return LogAppended(
        int(shown["first_offset"]),
        int(shown["last_offset"]),
        int(shown["ledger_id"]),
        int(shown["entry_id"]),
        is_duplicate,
    )


def _meant(created_at: str | None) -> dict[str, str | int | None]:
    """The query parameter that makes a log reject the request if it was created at another time."""
    return {"created": checks.maybe_text("created_at", created_at)}
