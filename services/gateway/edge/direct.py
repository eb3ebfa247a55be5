"""Appends that are answered without a task: those of a client that sends one small request after another.

Only what is plain comes this way: a short body that came with its head, to a ledger that this process writes, without a
password, from a caller whom no token has to name. Whatever else a request has or lacks, and whatever is wrong with it,
goes the usual way (`EntryRoutes.append` behind `edge_middleware`), which says what the answer is. So this way has no rules
of its own: what it answers, and what it counts, is what the usual way would.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Final

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import RawRequestMessage

from quorumlog import header
from quorumlog.errors import QuorumLogError
from quorumlog.net import trace
from quorumlog.net.budget import PEER
from quorumlog.net.direct import DirectConnection
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import SERVER_NAME, problem_response, request_id
from quorumlog.net.operations import JSON
from services.gateway.edge import entry_operations as op
from services.gateway.edge.entries import appended_body
from services.gateway.edge.media import FRAMES, OCTETS
from services.gateway.edge.middleware import Metrics
from services.gateway.edge.payloads import from_frames, from_json
from services.gateway.edge.room import Room
from services.gateway.interface import EngineInterface, EntriesAppended

log = logging.getLogger(__name__)

_SMALL_BYTES: Final = 256 << 10
"""As much as one read brings. A longer body costs more than its way."""
_PATH: Final = re.compile(r"/v1/ledgers/(0|[1-9][0-9]{0,17})/entries", re.ASCII)
_TYPES: Final = frozenset((OCTETS, JSON, FRAMES))
_OTHERS: Final = (
    hdrs.ORIGIN,
    hdrs.EXPECT,
    hdrs.CONTENT_ENCODING,
    hdrs.TRANSFER_ENCODING,
    header.LEDGER_PASSWORD,
)
"""Headers of requests that go the usual way."""
_CREATED: Final = (
    "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nVary: Accept\r\nCache-Control: no-store\r\n"
    "X-Request-Id: %s\r\nContent-Length: %d\r\nDate: %s\r\nServer: %s\r\n\r\n"
)
_STATUS: Final = 201


class DirectAppends:
    """Takes plain appends (`net/direct.py`)."""

    def __init__(
        self,
        engine: EngineInterface,
        room: Room,
        metrics: Metrics,
        *,
        hosts: Hosts,
        is_usual: Callable[[], bool],
    ) -> None:
        """`is_usual`: whether all requests go the usual way just now."""
        self._engine, self._room, self._metrics = engine, room, metrics
        self._hosts, self._is_usual = hosts, is_usual
        self.bytes_max = min(
            _SMALL_BYTES,
            room.limits.entry_bytes_max,
            room.limits.body_bytes_max,
            room.limits.frames_bytes_max,
        )

    def begin(self, message: RawRequestMessage, body: bytes, connection: DirectConnection) -> bool:
        """Begin an append, if it is plain. Nothing is taken and nothing is done where it is not."""
        started = time.perf_counter()
        headers, found = message.headers, _PATH.fullmatch(message.path)
        if (
            found is None
            or message.method != hdrs.METH_POST
            or message.version != HttpVersion11
            or len(body) > self.bytes_max
            or headers.get(hdrs.CONTENT_TYPE) not in _TYPES
            or headers.get(hdrs.ACCEPT, "*/*") not in ("*/*", JSON)
            or not self._hosts.knows(headers.get(hdrs.HOST))
            or self._is_usual()
        ):
            return False
        for name in _OTHERS:
            if name in headers:
                return False
        ledger_id, peer = int(found[1]), connection.peer
        append = self._engine.at_hand(ledger_id)
        if append is None:
            return False
        room, size = self._room, len(body)
        try:
            payloads, is_batch = self._payloads(headers[hdrs.CONTENT_TYPE], body)
            room.requests.check(peer, 1)
            room.bodies.check(peer, size)
            instance = request_id(headers.get(header.REQUEST_ID))
            # Its own, as a task would have: timers and logs of what begins here are this request's.
            submitted = copy_context().run(
                _submit, append, payloads, peer, instance, headers.get(trace.HEADER)
            )
        except QuorumLogError:
            return False
        room.requests.back(peer)
        room.bodies.back(peer, size)
        submitted.add_done_callback(
            partial(self._answer, connection, ledger_id, is_batch, size, instance, started)
        )
        return True

    def _payloads(self, media: str, body: bytes) -> tuple[list[bytes], bool]:
        if media == OCTETS:
            return [body], False
        if media == JSON:
            return from_json(body, self._room.limits.entry_bytes_max)
        return from_frames(body, self._room.limits.entry_bytes_max), True

    def _answer(
        self,
        connection: DirectConnection,
        ledger_id: int,
        is_batch: bool,
        size: int,
        instance: str,
        started: float,
        done: asyncio.Future[EntriesAppended],
    ) -> None:
        """Give the answer, and give back what the request took."""
        room, peer = self._room, connection.peer
        room.requests.give(peer)
        room.bodies.give(peer, size)
        if done.cancelled():
            connection.answer(b"", closes=True)
            return
        try:
            body = appended_body(ledger_id, done.result(), is_batch=is_batch)
            head = _CREATED % (instance, len(body), rfc822_formatted_time(), SERVER_NAME)
            status, data, closes = _STATUS, head.encode("ascii") + body, False
        except Exception as raised:
            error = raised if isinstance(raised, QuorumLogError) else QuorumLogError()
            if error is not raised:
                extra = {"request_id": instance, "path": op.APPEND.path}
                log.exception("unhandled-error", extra=extra)
            response = problem_response(error, instance)
            status, data = response.status, _serialized(response)
            closes = response.keep_alive is False
        seconds = time.perf_counter() - started
        self._metrics.observe(hdrs.METH_POST, op.APPEND.path, status, seconds)
        connection.answer(data, closes=closes)


def _submit(
    append: Callable[[Sequence[bytes]], asyncio.Future[EntriesAppended]],
    payloads: Sequence[bytes],
    peer: str,
    instance: str,
    traceparent: str | None,
) -> asyncio.Future[EntriesAppended]:
    PEER.set(peer)
    trace.begin(instance, traceparent)
    return append(payloads)


def _serialized(response: web.Response) -> bytes:
    """A problem's answer as aiohttp sends it."""
    body = response.body
    assert isinstance(body, bytes), "a problem is"
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
