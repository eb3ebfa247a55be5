"""Handlers of /v1/stream/{path}, which translate Durable Streams requests to log requests."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import hdrs, web

from quorumlog import errors, header
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from quorumlog.protocol.batch import BATCH_BYTES_MAX, ProducerSeq, Record
from quorumlog.protocol.log import LogMetadata, LogSettings, LogState
from quorumlog.protocol.log.messages import Append
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.logs.manager import LogManager
from services.gateway.streams import operations as op
from services.gateway.streams.config import (
    OCTETS,
    StreamConfig,
    begins_later,
    config_of,
    media_of,
)
from services.gateway.streams.forks import EXISTS, ForkAsked, StreamForks, asked, taken
from services.gateway.streams.messages import records_of
from services.gateway.streams.reads import Found, StreamReads, is_catch_up

_NO_STORE: Final = {"Cache-Control": "no-store"}

_BEGUN_S: Final = 5.0
"""How long a creation waits for the first batch of a concurrent creation (chosen by judgement)."""

_Make = Callable[[LogSettings], Awaitable[tuple[LogMetadata, bool]]]
"""Creates a stream's log. Returns the log's metadata, and whether this call created the log."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """The parameters of an append request."""

    records: tuple[Record, ...]
    closes: bool
    producer: ProducerSeq | None = None
    since: int = 0
    seq: str | None = None
    expect: int | None = None

    @property
    def begins(self) -> str:
        """The kind of data that the creation writes; "" for a stream created empty and open."""
        return "records" if self.records else "closed" if self.closes else ""

    def call(self, row: LogMetadata) -> Append:
        """The append request. A later log of the same name rejects it, because the request was
        checked against the metadata of this log (rule 27b). A producer's retry is a duplicate even
        if its body differs (section 5.2.1).
        """
        return Append.of(
            self.records,
            self.producer,
            expect=self.expect,
            since=self.since,
            seq=self.seq,
            is_end=self.closes,
            is_by_numbers=self.producer is not None,
            created_at=row.created_at,
        )


class StreamRoutes:
    """The handlers of the stream operations."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        """Keeps no state."""
        self._logs, self._room = logs, room
        self._reads = StreamReads(logs, room)
        self._forks = StreamForks(logs, partial(self._find, is_access=True))

    # --- create ----------------------------------------------------------------------------------

    async def create(self, request: web.Request, given: Given) -> web.Response:
        """Handle PUT (section 5.1)."""
        if given[op.TTL] is not None and given[op.EXPIRES_AT] is not None:
            raise errors.BadRequest("send either Stream-TTL or Stream-Expires-At, not both")
        fork = asked(given)
        if fork is not None:
            return await self._create_fork(request, given, fork)
        wanted = StreamConfig(given[op.CONTENT_TYPE] or OCTETS, given[op.EXPIRES_AT], given[op.TTL])
        data = await self._body(request)
        sent = _Sent(await self._records(request, data, wanted), given[op.CLOSED] is True, expect=0)
        name = given[op.STREAM]
        row, is_new = await self._begin(
            name, wanted, sent, partial(self._logs.create, name, idle_s=wanted.ttl_s)
        )
        return await self._created(request, row, sent, wanted.equals, is_new=is_new)

    async def _create_fork(
        self, request: web.Request, given: Given, wanted: ForkAsked
    ) -> web.Response:
        """Handle PUT of a fork (section 4.2)."""
        name, closes = given[op.STREAM], given[op.CLOSED] is True
        data = await self._body(request)
        made = await self._forks.made(name, wanted, self._exists)
        if made is not None and not await self._is_unfinished(made.row):
            sent = _Sent((), closes)
            return await self._created(request, made.row, sent, wanted.is_made, is_new=False)
        plan = await self._forks.plan(request, wanted, None if made is None else made.config)
        records = (*plan.prefix, *await self._records(request, data, plan.config))
        sent = _Sent(records, closes, expect=plan.at)
        make = partial(self._forks.create, name, plan)
        row, is_new = await self._begin(name, plan.config, sent, make)
        return await self._created(request, row, sent, wanted.is_made, is_new=is_new)

    async def _created(
        self,
        request: web.Request,
        row: LogMetadata,
        sent: _Sent,
        is_same: Callable[[StreamConfig], bool],
        *,
        is_new: bool,
    ) -> web.Response:
        """The response to a creation, once the stream exists. Raises: StreamConflict."""
        name = row.name
        if not is_new:
            row = await self._logs.rows.row(name)  # the log may have changed since
            await self._logs.keep_fork(row)
        end, is_closed = await self._logs.reader.tail(name, created_at=row.created_at)
        found = config_of(row)
        if not is_new and (found is None or not is_same(found) or is_closed != sent.closes):
            raise errors.StreamConflict(EXISTS, log=name)
        if not is_new and await self._is_unfinished(row):
            raise errors.StreamConflict(
                "another creation of the stream is unfinished: retry, or delete the stream",
                log=name,
            )
        assert found is not None
        place = _place(row, end, is_closed)
        headers = {**_NO_STORE, hdrs.CONTENT_TYPE: found.content_type, **place}
        if is_new:
            headers[hdrs.LOCATION] = str(request.url.origin().join(request.rel_url))
        return web.Response(status=201 if is_new else 200, headers=headers)

    async def _begin(
        self, name: str, wanted: StreamConfig, sent: _Sent, make: _Make
    ) -> tuple[LogMetadata, bool]:
        """Return the metadata of the stream's log, and whether this request creates the stream.

        A creation with a body or a close completes with its first batch; before that, the stream
        does not exist. Concurrent and later creations with the same settings join an unfinished
        creation, and the log's owner accepts one of their batches. A creation never removes another
        creation's data, because clients may already have read it.
        """
        settings = wanted.settings(sent.begins)
        try:
            row, is_new = await make(settings)
            if not is_new and not await self._exists(row):
                row, is_new = await make(settings)
        except errors.LogDeleted as error:
            raise taken(error.log or name) from error
        if not is_new:
            found = config_of(row)
            is_same = row.settings == settings and found is not None and found.ttl_s == wanted.ttl_s
            if not is_same or not await self._is_unfinished(row):
                return row, False
        with self._logs.accesses.during(row):
            return row, await self._fill(row, sent)

    async def _fill(self, row: LogMetadata, sent: _Sent) -> bool:
        """Write a new stream's first batch. Returns False if another request was first."""
        try:
            if sent.records:
                await self._logs.append(row.name, sent.call(row))
            if sent.closes:
                await self._logs.finish(row.name, row.created_at)
        except errors.UnexpectedOffset:
            # Another request's batch came first. The stream exists once that batch is durable.
            await self._logs.reader.read(
                row.name, sent.expect or 0, limit=1, wait_s=_BEGUN_S, row=row
            )
            return False
        except errors.LogClosed:
            return False
        return True

    async def _is_unfinished(self, row: LogMetadata) -> bool:
        """Whether the creation of a stream is unfinished."""
        start = row.forked_at or 0
        if not begins_later(row) or row.state is LogState.CLOSED or row.known_end > start:
            return False
        return (await self._logs.reader.tail(row.name, row))[0] == start

    async def _exists(self, row: LogMetadata, *, is_access: bool = False) -> bool:
        """Whether a stream has not expired. `row` is its log's metadata. Deletes an expired stream.

        All gateways compare `Stream-Expires-At` with the database's clock, and ignore the header
        while this clock is in doubt. A protected stream does not expire.
        """
        found = config_of(row)
        at_ms = None if found is None else found.expires_ms
        is_over = at_ms is not None and at_ms <= self._logs.now_ms()
        if is_over and self._logs.deletes_by_age and not row.deletion_protection:
            await self._logs.remove(row)
            return False
        return await self._logs.accesses.lives(row, is_access=is_access)

    async def _find(
        self,
        name: str,
        recent: LogMetadata | None = None,
        *,
        is_unfinished_too: bool = False,
        is_access: bool = False,
    ) -> Found:
        """The stream of a log. Raises: NoSuchLog, also if the stream's creation is unfinished."""
        row = recent or await self._logs.rows.row(name)
        found = config_of(row)
        if found is None or (not is_unfinished_too and await self._is_unfinished(row)):
            raise errors.NoSuchLog("no stream has this path", log=name)
        if not await self._exists(row, is_access=is_access):
            raise errors.NoSuchLog("the stream has expired and was deleted", log=name)
        return Found(row, found)

    # --- append and close ------------------------------------------------------------------------

    async def append(self, request: web.Request, given: Given) -> web.Response:
        """Handle POST (sections 5.2 and 5.3)."""
        producer = _producer_of(given)
        data = await self._body(request)
        found = await self._find(given[op.STREAM], is_access=True)
        with self._logs.accesses.during(found.row):
            return await self._append(request, given, found, data, producer)

    async def _append(
        self,
        request: web.Request,
        given: Given,
        found: Found,
        data: bytes,
        producer: ProducerSeq | None,
    ) -> web.Response:
        name, closes = given[op.STREAM], given[op.CLOSED] is True
        if not data and not closes:
            raise errors.BadRequest("an append requires a body, unless it has Stream-Closed: true")
        if data:
            _check_type(given[op.CONTENT_TYPE], found)
        records = await self._records(request, data, found.config)
        if data and not records:
            raise errors.BadRequest("the array is empty: send at least one message")
        if found.row.state is LogState.CLOSED:
            return await self._closed(found, producer, is_close_only=closes and not data)
        since = given[op.PRODUCER_SINCE] or 0
        # A close without a body is not part of the writers' sequence.
        seq = given[op.SEQ] if records or producer is not None else None
        sent = _Sent(records, closes, producer, since, seq)
        try:
            done = await self._logs.append(name, sent.call(found.row))
            if closes:
                # The batch has ended the log, even without records, because bookies store the end
                # mark. The log's metadata must show the end before the client gets the response.
                await self._logs.finish(name, found.row.created_at)
            end, is_duplicate = done.last_offset + 1, done.is_duplicate
            highest = done.highest_seq
        except errors.LogClosed:
            now = await self._find(name)
            now.row.check_created(found.row.created_at)
            return await self._closed(now, producer, is_close_only=closes and not data)
        except errors.SequenceGap as error:
            raise _gap_of(error, producer) from error
        except errors.InvalidRequest as error:
            raise errors.BadRequest(error.detail) from error
        headers = {**_NO_STORE, **_place(found.row, end, closes)}
        if producer is None:
            return web.Response(status=204, headers=headers)
        headers |= _numbers(producer, highest)
        return web.Response(status=200 if records and not is_duplicate else 204, headers=headers)

    async def _closed(
        self, found: Found, producer: ProducerSeq | None, *, is_close_only: bool
    ) -> web.Response:
        """The response to an append to a closed stream, or to another close of the stream."""
        row = found.row
        end, _ = await self._logs.reader.tail(row.name, row)
        place = _place(row, end, is_closed=True)
        headers = {**_NO_STORE, **place}
        if producer is None:
            if is_close_only:
                return web.Response(status=204, headers=headers)
        elif (head := await self._logs.reader.last_batch(row)) and (last := head.producer):
            if producer == last:
                return web.Response(status=204, headers=headers | _numbers(producer, None))
            if producer.id == last.id and producer.epoch < last.epoch:
                detail = f"producer {producer.id} has begun epoch {last.epoch}: use a later epoch"
                raise errors.StaleProducer(detail, producer_epoch=last.epoch, log=row.name)
        detail = "the stream is closed: append to another stream"
        raise errors.LogClosed(detail, log=row.name, headers=place)

    async def _body(self, request: web.Request) -> bytes:
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
            raise errors.UnsupportedMediaType(
                "the body has a Content-Encoding: send the body without one"
            )
        return await body.read(request, self._room, BATCH_BYTES_MAX)

    async def _records(
        self, request: web.Request, data: bytes, config: StreamConfig
    ) -> tuple[Record, ...]:
        make = partial(records_of, is_json=config.is_json)
        return await body.in_turn(request, self._room, data, make, is_json=config.is_json)

    # --- the rest --------------------------------------------------------------------------------

    async def read(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Handle GET and HEAD (sections 5.5 to 5.8)."""
        is_head = request.method == hdrs.METH_HEAD
        name = given[op.STREAM]
        if is_head:
            return await self._head(await self._find(name))
        if is_catch_up(given) and (answer := await self._read_by_recent(request, given)):
            return answer
        found = await self._find(name, is_access=True)
        with self._logs.accesses.during(found.row):
            return await self._reads.answer(request, given, found)

    async def _read_by_recent(self, request: web.Request, given: Given) -> web.Response | None:
        """The response to a read by recent metadata; None if newer metadata could change it."""
        row = self._logs.rows.recent(given[op.STREAM])
        if row is None:
            return None
        try:
            found = await self._find(row.name, row, is_access=True)
            with self._logs.accesses.during(row):
                return await self._reads.by_recent(request, given, found)
        except errors.EntryUnavailable:
            raise
        except errors.QuorumLogError:
            return None

    async def _head(self, found: Found) -> web.Response:
        end, is_closed = await self._logs.reader.tail(found.row.name, found.row)
        headers = {
            **_NO_STORE,
            hdrs.CONTENT_TYPE: found.config.content_type,
            **_place(found.row, end, is_closed),
        }
        if found.config.expires_at is not None:
            headers["Stream-Expires-At"] = found.config.expires_at
        if found.config.ttl_s is not None:
            headers["Stream-TTL"] = str(found.config.ttl_s)
        return web.Response(headers=headers)

    async def delete(self, _request: web.Request, given: Given) -> web.Response:
        """Handle DELETE (section 5.4)."""
        found = await self._find(given[op.STREAM], is_unfinished_too=True)
        await self._logs.delete(found.row.name, created_at=found.row.created_at)
        return web.Response(status=204, headers=_NO_STORE)

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.CREATE, self.create),
            Route(op.APPEND, self.append),
            Route(op.READ, self.read),
            Route(op.DELETE, self.delete),
        ]


async def stream_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of each stream response that protect browsers (section 12)."""
    if request.path.startswith("/v1/stream/"):
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "cross-origin"
        # A text/html stream is a page in the gateway's origin, with all rights of the origin.
        response.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"


def _check_type(given: str | None, found: Found) -> None:
    if given is None:
        raise errors.BadRequest("Content-Type is required: send the stream's content type")
    if media_of(given) != found.config.media:
        detail = f"Content-Type must be the stream's {found.config.media} (got {media_of(given)})"
        raise errors.StreamConflict(detail, log=found.row.name)


def _producer_of(given: Given) -> ProducerSeq | None:
    """Parse the producer's three headers. Raises: BadRequest if only some of them are sent."""
    name, epoch, seq = given[op.PRODUCER_ID], given[op.PRODUCER_EPOCH], given[op.PRODUCER_SEQ]
    if name is None and epoch is None and seq is None:
        return None
    if name is None or epoch is None or seq is None:
        raise errors.BadRequest(
            "Producer-Id, Producer-Epoch and Producer-Seq go together: send all or none"
        )
    return ProducerSeq(name, epoch, seq)


def _gap_of(
    error: errors.SequenceGap, producer: ProducerSeq | None
) -> errors.SequenceGap | errors.BadRequest:
    """The protocol's error for a gap in a producer's numbers."""
    assert producer is not None
    if error.members.get("producer_epoch") is not None:
        return errors.BadRequest(f"a new epoch must begin with Producer-Seq 0 (got {producer.seq})")
    return error.replace(
        extra_headers={**error.extra_headers, "Producer-Received-Seq": str(producer.seq)}
    )


def _place(row: LogMetadata, end: int, is_closed: bool) -> dict[str, str]:
    place = {"Stream-Next-Offset": op.offset_text(end, row.created_at)}
    return place | {"Stream-Closed": "true"} if is_closed else place


def _numbers(producer: ProducerSeq, highest: int | None) -> dict[str, str]:
    seq = producer.seq if highest is None else highest
    return {header.PRODUCER_EPOCH: str(producer.epoch), header.PRODUCER_SEQ: str(seq)}
