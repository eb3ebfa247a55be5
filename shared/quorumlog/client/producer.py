"""Producers: exactly-once appends to a log, even if processes fail."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from quorumlog import header
from quorumlog.client import checks
from quorumlog.client.batching import Batcher, Batching, Call
from quorumlog.client.records import LogAppended, Record, share, size_of
from quorumlog.client.transport import Transport
from quorumlog.errors import NOT_DONE, UNKNOWN, ExpiredProducer, QuorumLogError


class Unsettled(
    QuorumLogError,
    code="unsettled",
    status=409,
    title="The previous request is not settled",
    outcome=NOT_DONE,
    travels=False,
):
    """The outcome of the producer's last request is unknown, so no other request may follow. Append
    the same records again in one call, or call `settle`.
    """


AppendRequest = Callable[
    [Call[bytes | Record], Mapping[str, str], str | None], Awaitable[LogAppended]
]
"""Sends an append request. Arguments: the request, its headers, and the log's `created_at`."""


class Producer:
    """Appends to a log exactly once: a retried request gets the first request's answer.

    Invariants: `seq` is the sequence number of the next request. A request whose outcome is unknown
    keeps its number, and no other records are sent under that number. `since` is the log's end
    before this producer's first request. With `since`, a log that has forgotten producers can
    distinguish a new producer from a forgotten producer. Once known, `since` never changes; while
    it is None, requests do not carry it. A producer that has read `since` from a log appends only
    to this log, not to a later log with the same name.
    """

    producer_id: str
    epoch: int
    seq: int
    since: int | None

    def __init__(
        self,
        request: AppendRequest,
        producer_id: str,
        epoch: int,
        since: int | Callable[[float], Awaitable[tuple[int, str]]] | None,
        transport: Transport,
        batching: Batching,
    ) -> None:
        """Use `Log.producer`."""
        self.producer_id = checks.header_value("producer_id", producer_id)
        self.epoch = checks.offset("epoch", epoch)
        self.seq = 0
        self.since = None if since is None or callable(since) else checks.offset("since", since)
        self._read_since = since if callable(since) else None
        self._created_at: str | None = None
        self._request = request
        self._open: Call[bytes | Record] | None = None
        self.batcher = Batcher(self._send, share, size_of, transport, batching)

    async def append(self, *records: bytes | Record, expect: int | None = None) -> LogAppended:
        """Append records at consecutive offsets, all or none, exactly once.

        Appends that are made while a request is under way share the next request, in the order of
        the calls. After an error whose outcome is unknown, repeat the same call. If the records
        shared a request with other appends, the repeated call raises Unsettled, and `settle`
        returns where the records are. `expect`: the offset that the first record must get, unless
        an earlier request appended the records. Otherwise UnexpectedOffset is raised, and nothing
        is written.
        """
        return await self.batcher.append(records, expect)

    async def submit(self, *records: bytes | Record) -> asyncio.Future[LogAppended]:
        """Queue records; the future is done once the records are durable.

        Waits only while the queue is full (`Batching.queued_bytes_max`).
        """
        return await self.batcher.submit(records)

    async def flush(self) -> None:
        """Wait until every append of this producer has succeeded or failed."""
        await self.batcher.flush()

    async def settle(self) -> LogAppended | None:
        """Retry the request whose outcome is unknown, and return the offsets of all its records, in
        the order of the calls. Returns None if there is no such request.
        """
        await self.batcher.flush()
        asked = self._open
        if asked is None:
            return None
        return await self.batcher.append(asked.payloads, asked.expect, is_alone=True)

    async def _send(self, call: Call[bytes | Record]) -> LogAppended:
        if self._open is not None and not _is_same(self._open, call):
            raise Unsettled(
                f"the outcome of request {self.seq} is unknown: append its records again, or call settle"
            )
        if self.since is None and self._read_since is not None:
            try:
                self.since, self._created_at = await self._read_since(call.end)
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
                self._created_at,
            )
        except QuorumLogError as error:
            # If the caller chose the epoch, another process may have sent this request before.
            may_be_anothers = isinstance(error, ExpiredProducer) and self._read_since is None
            if error.outcome == NOT_DONE and not may_be_anothers and self._open is None:
                raise
            self._open = call
            unknown = error.with_outcome(UNKNOWN)
            unknown.add_note(
                f"request {self.seq} may have succeeded: append the same records again, or call settle"
            )
            raise unknown from error
        except BaseException:
            # The task was cancelled, or the client has a defect: the request may have been sent.
            self._open = call
            raise
        self._open = None
        self.seq += 1
        return done


def _is_same(asked: Call[bytes | Record], call: Call[bytes | Record]) -> bool:
    return asked.expect == call.expect and list(asked.payloads) == list(call.payloads)
