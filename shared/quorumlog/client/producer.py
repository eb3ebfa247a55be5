"""Who appends to a log exactly once, whatever dies."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from quorumlog import header
from quorumlog.client.batching import Batcher, Batching, Call
from quorumlog.client.records import LogAppended, Record, share, size_of
from quorumlog.errors import NOT_DONE, UNKNOWN, ExpiredProducer, QuorumLogError


class Unsettled(QuorumLogError, travels=False):
    """Nobody knows what became of the producer's last request, so nothing else may follow it:
    append the same records again in one call, or `settle`.
    """

    code = "unsettled"
    title = "The request before this one is not settled"
    status = 409
    outcome = NOT_DONE


class Request(Protocol):
    """One append request to the log."""

    def __call__(
        self, call: Call[bytes | Record], headers: Mapping[str, str], *, is_repeatable: bool
    ) -> Coroutine[Any, Any, LogAppended]:
        """Send it, again and again where it may be repeated."""
        ...


class Producer:
    """Appends to a log exactly once: a repeat of a request gets the first one's answer.

    Invariants: `seq` is that of the next request; one whose outcome is unknown keeps its own, and no
    other records are sent under it. `since` is the log's end before this producer had sent anything,
    by which a log that has forgotten some tells a new producer from a forgotten one; once it is known
    it never changes. None: it is not said.
    """

    producer_id: str
    epoch: int
    seq: int
    since: int | None

    def __init__(
        self,
        request: Request,
        producer_id: str,
        epoch: int,
        since: int | Callable[[], Awaitable[int]] | None,
        start: Callable[[Coroutine[Any, Any, None]], None],
        batching: Batching,
    ) -> None:
        """Use `Log.producer`."""
        self.producer_id = producer_id
        self.epoch = epoch
        self.seq = 0
        self.since = None if callable(since) else since
        self._read_since = since if callable(since) else None
        self._request = request
        self._open: Sequence[bytes | Record] | None = None
        self._batcher = Batcher(self._send, share, size_of, start, batching)

    async def append(self, *records: bytes | Record) -> LogAppended:
        """Append records next to each other, all or none, and once.

        Appends that are made while one is under way travel together, in the order of the calls.
        After an error whose outcome is unknown the same call again is harmless, if the records
        travelled alone; else it is Unsettled, and `settle` tells where they are.
        """
        return await self._batcher.append(records)

    async def submit(self, *records: bytes | Record) -> asyncio.Future[LogAppended]:
        """Append records without waiting until they are durable: that is when the future is done.

        Waits only while too much is queued.
        """
        return await self._batcher.submit(records)

    async def flush(self) -> None:
        """Wait until every append of this object is settled, or failed."""
        await self._batcher.flush()

    async def settle(self) -> LogAppended | None:
        """Send the request again whose outcome is unknown: where all its records are, in the order
        of their calls. None where there is no such request.
        """
        await self._batcher.flush()
        return None if self._open is None else await self._batcher.append(self._open)

    async def _send(self, call: Call[bytes | Record]) -> LogAppended:
        if self._open is not None and list(self._open) != list(call.payloads):
            raise Unsettled(f"what became of request {self.seq} is not known")
        if self.since is None and self._read_since is not None:
            try:
                self.since = await self._read_since()
            except QuorumLogError as error:
                raise error.with_outcome(NOT_DONE) from error
        since = {} if self.since is None else {header.PRODUCER_SINCE: str(self.since)}
        try:
            done = await self._request(
                call,
                {
                    header.PRODUCER_ID: self.producer_id,
                    header.PRODUCER_EPOCH: str(self.epoch),
                    header.PRODUCER_SEQ: str(self.seq),
                    **since,
                },
                is_repeatable=True,
            )
        except QuorumLogError as error:
            # Under an epoch that the caller gave, another process may have sent it before.
            may_be_anothers = isinstance(error, ExpiredProducer) and self._read_since is None
            if error.outcome == NOT_DONE and not may_be_anothers and self._open is None:
                raise
            self._open = call.payloads
            told = error.with_outcome(UNKNOWN)
            told.add_note(f"request {self.seq} is open: append the same again, or settle")
            raise told from error
        except asyncio.CancelledError:
            self._open = call.payloads
            raise
        self._open = None
        self.seq += 1
        return done
