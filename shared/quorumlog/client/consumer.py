"""Consumers: workers that share a committed offset; one of them holds the lease and reads."""

import asyncio
import contextlib
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self

from quorumlog import errors, header
from quorumlog.client import checks
from quorumlog.client.ledger import PAGE, WAIT_MS
from quorumlog.client.records import LogPage, LogRecord, Paged, Start, checked_start, shown_start
from quorumlog.client.transport import Transport

_log = logging.getLogger(__name__)

_ASK_S: Final = 1.0
"""Maximum interval between lease requests of a waiting worker (chosen by judgement)."""
_LOST: Final = (errors.LeaseLost, errors.LogReplaced, errors.NoSuchConsumer)
_started_us: int
"""Start or fork time of this process. If processes share a `holder`, the newest gets the lease."""


def _start() -> None:
    global _started_us  # noqa: PLW0603
    _started_us = time.time_ns() // 1000


_start()
os.register_at_fork(after_in_child=_start)


class Consumer:
    """A worker that reads a log as the consumer `name`, from the committed offset on, while it
    holds the lease.

    Inside `with` or `async with` the worker holds the lease and renews it in the background.
    Iteration yields each record from the committed offset on, and waits for new records at the
    log's end. `commit` marks the records that the loop has received as processed. Uncommitted
    records are delivered again, to this worker or to the next one.

    Invariant: a record is delivered only while the worker holds the lease according to its clock.
    """

    name: str
    holder: str
    position: int
    fencing_token: int

    def __init__(
        self,
        transport: Transport,
        path: str,
        read: Callable[..., Awaitable[LogPage]],
        name: str,
        start: Start,
        holder: str | None,
        lease_s: float,
        wait_s: float | None,
    ) -> None:
        """Use `Log.consumer`. `path`: the path in the API; `read`: the log's method `read`."""
        self.name = checks.text("a consumer's name", name)
        self.holder = uuid.uuid4().hex if holder is None else checks.text("holder", holder)
        self.position = self.fencing_token = 0
        self._start = checked_start(start)
        self._lease_s = checks.seconds("lease_s", lease_s)
        self._wait_s = wait_s if wait_s is None or wait_s == 0 else checks.seconds("wait_s", wait_s)
        self._transport, self._path, self._read = transport, path, read
        self._next = 0
        self._created_at: str | None = None
        """When the log was created. The offsets of this log are not valid in a later log with the same name."""
        self._held_until = 0.0
        self._lost: errors.QuorumLogError | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._is_reported = False
        """Whether the current wait for the lease was logged."""

    def __repr__(self) -> str:
        """The class and the name, for log lines."""
        return f"Consumer({self.name!r})"

    async def __aenter__(self) -> Self:
        """Wait for the lease. Raises: LeaseHeld after `wait_s`; LogReplaced, OffsetTruncated."""
        end = None if self._wait_s is None else time.monotonic() + self._wait_s
        self._is_reported = False
        while (held := await self._try_acquire(end)) is None:
            pass
        self.fencing_token = int(held["lease"]["fencing_token"])
        self.position = self._next = int(held["offset"])
        self._created_at = str(held["log_created_at"])
        self._lost = None
        self._renewing = asyncio.get_running_loop().create_task(self._renew_in_time())
        return self

    async def _try_acquire(self, end: float | None) -> dict[str, Any] | None:
        """Request the lease. Returns the lease, or None after a pause if another worker holds it."""
        wanted = {
            "holder": self.holder,
            "started": _started_us,
            "lease_ms": round(self._lease_s * 1000),
            "from": shown_start(self._start),
        }
        asked = time.monotonic()
        try:
            held = await self._transport.change_consumer("POST", f"{self._path}/lease", wanted)
        except errors.LeaseHeld as error:
            left_s = float(error.members.get("expires_in_ms", 0)) / 1000
            rest_s = min(left_s, _ASK_S) * random.uniform(0.5, 1) + 0.01  # noqa: S311
            if end is not None and asked + rest_s >= end:
                raise
            if not self._is_reported:
                holder = error.members.get("holder")
                _log.info("%s waits for its lease, which %s holds", self.name, holder)
                self._is_reported = True
        else:
            self._held_until = asked + self._lease_s
            return held
        await asyncio.sleep(rest_s)
        return None

    async def __aexit__(self, *_reason: object) -> None:
        """Release the lease, so that another worker can acquire it at once. Commits nothing."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._lost is None:
            with contextlib.suppress(errors.QuorumLogError):  # the lease expires by itself
                path = f"{self._path}/lease"
                await self._transport.change_consumer("DELETE", path, headers=self._fencing)
        self._lost = errors.LeaseLost(f"{self.name} has released its lease: enter `with` again")

    async def __aiter__(self) -> AsyncIterator[LogRecord]:
        """Yield each record from the committed offset on, and wait for more. Raises: LeaseLost."""
        async with contextlib.aclosing(self.records().pages()) as pages:
            async for page in pages:
                for record in page:
                    if not self.is_held:
                        await self.check()
                    self.taken(record)
                    yield record

    def records(self, *, follow: bool = True) -> Paged[LogRecord]:
        """Yield the records after the last record passed to `taken`, until the log is closed.
        Without `follow`, stop at the log's end. Before `commit`, pass the last processed record to `taken`.
        """
        return Paged(self._pages(follow=follow))

    async def _pages(self, *, follow: bool) -> AsyncGenerator[Sequence[LogRecord], None]:
        at = self._next
        while True:
            await self.check()
            page = await self._read(
                at, limit=PAGE, wait_ms=WAIT_MS if follow else 0, created_at=self._created_at
            )
            await self.check()
            yield page.records
            is_end = page.closed or (not follow and page.next == at)
            at = page.next
            if is_end:
                return

    def taken(self, record: LogRecord) -> None:
        """Count all records up to `record` as processed: the next `commit` covers them."""
        self._next = checks.offset("a record's offset", record.offset) + 1

    @property
    def is_held(self) -> bool:
        """Whether this worker holds the lease, by its own clock."""
        return self._lost is None and time.monotonic() < self._held_until

    async def check(self) -> None:
        """Raise LeaseLost, or the error that ended the lease, if this worker no longer holds it."""
        if self._lost is None and not self.is_held:
            await self._renew()
        if self._lost is not None:
            raise self._lost.replace()

    async def commit(self, offset: int | None = None) -> int:
        """Commit all records that the loop has received, or all below `offset`, and return the new
        committed offset. No worker gets these records again.

        Raises: LeaseLost if another worker may have taken over; LogReplaced; PositionBehind.
        """
        wanted = self._next if offset is None else checks.offset("offset", offset)
        if self._lost is not None:
            raise self._lost.replace()
        shown = await self._put("", {"offset": wanted})
        self.position = int(shown["offset"])
        return self.position

    @property
    def _fencing(self) -> dict[str, str]:
        return {header.FENCING_TOKEN: str(self.fencing_token)}

    async def _put(self, path: str, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a PUT with the fencing token; success renews the lease."""
        asked = time.monotonic()
        try:
            shown = await self._transport.change_consumer(
                "PUT", self._path + path, value, headers=self._fencing
            )
        except _LOST as error:
            self._lost = error
            raise
        self._held_until = max(self._held_until, asked + self._lease_s)
        return shown

    async def _renew(self) -> None:
        with contextlib.suppress(*_LOST):  # the next record or commit raises the error
            await self._put("/lease")

    async def _renew_in_time(self) -> None:
        while self._lost is None:
            left_s = self._held_until - time.monotonic()
            await asyncio.sleep(max(left_s - self._lease_s * 2 / 3, self._lease_s / 10))
            if self._held_until - time.monotonic() > self._lease_s * 2 / 3:
                continue  # a commit has renewed the lease
            try:
                await self._renew()
            except errors.ClientClosed:
                return
            except errors.QuorumLogError:
                continue  # try again; without success, the lease expires
