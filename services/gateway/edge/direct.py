"""The fast path: serves small requests without a task, for clients that send many requests.

The fast path is used only at a gateway that requires no tokens. It accepts these requests if the
body is short and arrives together with the headers:
- an append without a password to a ledger that this process writes;
- a commit of a consumer with its fencing token, if this process owns the log of committed offsets.

All other requests, including invalid ones, take the regular path (`EntryRoutes.append_entries` and
`ConsumerRoutes.commit_consumer` behind `edge_middleware`). The fast path adds no behaviour: its
responses and metrics are the same as the regular path's.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDictProxy

from quorumlog import header
from quorumlog.errors import QuorumLogError
from quorumlog.net import trace
from quorumlog.net.aiohttp_parts import DirectConnection
from quorumlog.net.budget import PEER, peer_of
from quorumlog.net.hosts import Hosts
from quorumlog.net.operations import JSON, Operation
from quorumlog.net.responses import SERVER_NAME, problem_response, request_id
from quorumlog.protocol.positions import Position
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge.consumer_models import position_json
from services.gateway.edge.consumers import ConsumerRoutes
from services.gateway.edge.entries import EntryRoutes, appended_body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import FRAMES, OCTETS
from services.gateway.edge.http.middleware import Metrics
from services.gateway.edge.payloads import from_frames, from_json
from services.gateway.engine.ledger_writes import Appends
from services.gateway.interface import EntriesAppended
from services.gateway.logs.consumers import Consumers

log = logging.getLogger(__name__)

_SMALL_BYTES: Final = 256 << 10
"""Maximum body size: one socket read. The fast path gains little for longer bodies."""
_APPEND: Final = re.compile(r"/v1/ledgers/(0|[1-9][0-9]{0,17})/entries", re.ASCII)
_COMMIT: Final = re.compile(rf"/v1/logs/({LOG_NAME})/consumers/({LOG_NAME})", re.ASCII)
_OFFSET: Final = re.compile(rb'\{"offset": ?(0|[1-9][0-9]{0,17})\}')
"""The common form of a commit's body. Other bodies take the regular path."""
_TOKEN: Final = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_TYPES: Final = frozenset((OCTETS, JSON, FRAMES))
_OTHERS: Final = (
    hdrs.ORIGIN,
    hdrs.EXPECT,
    hdrs.CONTENT_ENCODING,
    hdrs.TRANSFER_ENCODING,
    hdrs.IF_MATCH,
    hdrs.IF_NONE_MATCH,
    header.LEDGER_PASSWORD,
)
"""Requests with one of these headers take the regular path."""
_HEAD: Final = (
    "HTTP/1.1 %s\r\nContent-Type: application/json\r\nVary: Accept\r\nCache-Control: no-store\r\n%s"
    "X-Request-Id: %s\r\nContent-Length: %d\r\nDate: %s\r\nServer: %s\r\n\r\n"
)

Said = tuple[int, str, str, bytes]
"""A response: status, status with reason phrase, additional header lines, body."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """A request on the fast path. `begin` starts the work, and `say` creates the response."""

    operation: Operation
    begin: Callable[[], asyncio.Future[Any]]
    say: Callable[[Any], Said]


@dataclass(eq=False)
class DirectRequests:
    """The fast path for plain appends and commits, which `net/aiohttp_parts.py` calls."""

    _appends: Appends
    _consumers: Consumers | None
    _room: Room
    _metrics: Metrics
    hosts: Hosts
    is_regular: Callable[[], bool]
    """Whether all requests must currently take the regular path."""

    def __post_init__(self) -> None:
        limits = self._room.limits
        bodies = (limits.entry_bytes_max, limits.body_bytes_max, limits.frames_bytes_max)
        self.bytes_max = min(_SMALL_BYTES, *bodies)

    def begin(self, message: RawRequestMessage, body: bytes, connection: DirectConnection) -> bool:
        """Start a plain request, and return True. Returns False for any other request."""
        started = time.perf_counter()
        headers, method = message.headers, message.method
        if (
            method not in (hdrs.METH_POST, hdrs.METH_PUT)
            or message.version != HttpVersion11
            or len(body) > self.bytes_max
            or headers.get(hdrs.CONTENT_TYPE) not in _TYPES
            or headers.get(hdrs.ACCEPT, "*/*") not in ("*/*", JSON)
            or not self.hosts.knows(headers.get(hdrs.HOST))
            or headers.get(hdrs.CONTENT_LENGTH, "0").startswith("0")
            or self.is_regular()
        ):
            return False
        for name in _OTHERS:
            if name in headers:
                return False
        room, size, peer = self._room, len(body), peer_of(connection.client_of(headers))
        try:
            find = self._append if method == hdrs.METH_POST else self._commit
            plain = find(message.path, headers, body)
            if plain is None:
                return False
            room.requests.check(peer, 1)
            room.bodies.check(peer, size)
            instance = request_id(headers.get(header.REQUEST_ID))
            # A separate context, as a task has, so that timers and log lines belong to the request.
            begun = copy_context().run(
                _begun, plain.begin, peer, instance, headers.get(trace.HEADER)
            )
        except QuorumLogError:
            return False
        room.requests.back(peer)
        room.bodies.back(peer, size)
        taken = (peer, size)
        begun.add_done_callback(partial(self._answer, connection, plain, taken, instance, started))
        return True

    def _append(self, path: str, headers: CIMultiDictProxy[str], body: bytes) -> _Plain | None:
        found = _APPEND.fullmatch(path)
        if found is None:
            return None
        ledger_id = int(found[1])
        append = self._appends.at_hand(ledger_id)
        if append is None:
            return None
        payloads, is_batch = self._payloads(headers[hdrs.CONTENT_TYPE], body)

        def say(done: EntriesAppended) -> Said:
            return 201, "201 Created", "", appended_body(ledger_id, done, is_batch=is_batch)

        return _Plain(EntryRoutes.operations["append_entries"], partial(append, payloads), say)

    def _commit(self, path: str, headers: CIMultiDictProxy[str], body: bytes) -> _Plain | None:
        found, offset = _COMMIT.fullmatch(path), _OFFSET.fullmatch(body)
        tokens = headers.getall(header.FENCING_TOKEN, ())
        if (
            self._consumers is None
            or found is None
            or offset is None
            or len(tokens) != 1
            or not _TOKEN.fullmatch(tokens[0])
            or headers[hdrs.CONTENT_TYPE] != JSON
        ):
            return None
        commit = self._consumers.commit_at_hand(found[1], found[2], int(offset[1]), int(tokens[0]))
        return (
            None
            if commit is None
            else _Plain(ConsumerRoutes.operations["commit_consumer"], commit, _committed)
        )

    def _payloads(self, media: str, body: bytes) -> tuple[list[bytes], bool]:
        if media == OCTETS:
            return [body], False
        if media == JSON:
            return from_json(body, self._room.limits.entry_bytes_max)
        return from_frames(body, self._room.limits.entry_bytes_max), True

    def _answer(
        self,
        connection: DirectConnection,
        plain: _Plain,
        taken: tuple[str, int],
        instance: str,
        started: float,
        done: asyncio.Future[Any],
    ) -> None:
        """Send the response, and give back the budgets that the request used."""
        room, operation, (peer, size) = self._room, plain.operation, taken
        room.requests.give(peer)
        room.bodies.give(peer, size)
        if done.cancelled():
            connection.answer(b"", closes=True)
            return
        try:
            status, reason, more, body = plain.say(done.result())
            now = rfc822_formatted_time()
            head = _HEAD % (reason, more, instance, len(body), now, SERVER_NAME)
            data, closes = head.encode("ascii") + body, False
        except Exception as raised:
            error = raised if isinstance(raised, QuorumLogError) else QuorumLogError()
            if error is not raised:
                extra = {"request_id": instance, "path": operation.path}
                log.exception("unhandled-error", extra=extra)
            response = problem_response(error, instance)
            status, data = response.status, _serialized(response)
            closes = response.keep_alive is False
        seconds = time.perf_counter() - started
        self._metrics.observe(operation.method, operation.path, status, seconds)
        connection.answer(data, closes=closes)


def _committed(position: Position) -> Said:
    etag = f'ETag: "{position.version}"\r\n'
    return 200, "200 OK", etag, orjson.dumps(position_json(position))


def _begun(
    begin: Callable[[], asyncio.Future[Any]], peer: str, instance: str, traceparent: str | None
) -> asyncio.Future[Any]:
    PEER.set(peer)
    trace.begin(instance, traceparent)
    return begin()


def _serialized(response: web.Response) -> bytes:
    """Serialize a problem's response as aiohttp would send it."""
    body = response.body
    assert isinstance(body, bytes), "a problem has a body of bytes"
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    lines += [
        f"Content-Length: {len(body)}",
        f"Date: {rfc822_formatted_time()}",
        f"Server: {SERVER_NAME}",
    ]
    if response.keep_alive is False:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
