"""Connections of clients that may be slow, broken or hostile.

aiohttp waits for ever for a request's head and for a client that does not read its answers, and it
answers malformed HTTP with plain text. This module adds deadlines, a limit on connections, and
problem documents for malformed HTTP. The code that reads bodies has its own deadlines.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from quorumlog import errors, header
from quorumlog.net.aiohttp_parts import DIRECT, DirectConnection
from quorumlog.net.budget import Budget, peer_of
from quorumlog.net.proxies import Proxies
from quorumlog.net.responses import error_of_http, problem_response, raw_response, request_id
from quorumlog.net.timers import awake

log = logging.getLogger(__name__)

_CHUNKS_FREE_BYTES: Final = 1 << 20
"""The heads of a body's chunks may take half as many bytes as the content, plus half of this
allowance. The allowance includes the 256 KiB that aiohttp's parser may keep unparsed."""
_TURN_BYTES: Final = 128 << 10
"""Size of one read after which a connection is paused until the next turn of the event loop.
Otherwise libuv (`uv__read`) reads up to 32 times 256 KiB before it serves the next connection."""
_CHUNKS_READ_BYTES: Final = 32 << 10
"""Bytes parsed between two checks of the chunks' heads: 10 ms for chunks of one byte (measured)."""
_REFUSED_S: Final = 1.0
"""Time for a refused connection to send its request and to end (chosen by judgement)."""
_REFUSED_MAX: Final = 200
_REFUSED_SHARE: Final = 8
"""At most `_REFUSED_MAX` refused connections, and at most an eighth of the limit, may stay open.
All further connections are closed at once."""
_REFUSALS_LOGGED_EVERY_S: Final = 60.0
_CURRENT: Final[ContextVar["Connection | None"]] = ContextVar("connection", default=None)

_HEAD_KEPT_BYTES: Final = 16 << 10
"""Maximum size of a request's head after which the connection is kept open. aiohttp keeps three
times a head's size in memory, some 500 MB at most for 10,000 idle connections."""
HEAD_LINE_BYTES: Final = 8190
"""Maximum length of a line of a request's head, equal to aiohttp's default."""


@dataclass(frozen=True, slots=True)
class ListenLimits:
    """Limits of one listening socket. Times in seconds, sizes in bytes."""

    connections_max: int = 10_000
    peer_connections_max: int = 10_000
    """Maximum connections of one address once seven eighths of `connections_max` are in use."""
    head_timeout_s: float = 10.0
    """The deadline for a request's head, from its first byte."""
    idle_timeout_s: float = 65.0
    """The time for which an idle connection is kept, longer than the 60 s of common proxies."""
    stalled_answer_timeout_s: float = 60.0
    """The time for which a client may stop reading its answer."""
    head_line_bytes_max: int = HEAD_LINE_BYTES
    headers_max: int = 100
    proxies: Proxies | None = None
    """The trusted proxies. Each connection of a proxy is a separate peer, which serves many clients."""
    drain_timeout_s: float = 20.0


def as_sent(request: web.Request) -> web.Request:
    """Return the request, with its client's address as `remote` if a trusted proxy sent it."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return request  # from a server of aiohttp's own
    client = connection.client_of(request.headers)
    return request if client in ("", request.remote) else request.clone(remote=client)


def wants_socket(socket: web.WebSocketResponse, request: web.Request) -> bool:
    """Whether a request is a valid handshake for a WebSocket (RFC 6455)."""
    try:
        return socket.can_prepare(request).ok
    except UnicodeEncodeError:
        # aiohttp's error quotes the invalid header, which is not UTF-8.
        return False


def end_limits(limits: Iterable[asyncio.Timeout]) -> None:
    """Make each of these timeouts expire now."""
    now = asyncio.get_running_loop().time()
    for limit in limits:
        if not limit.expired():
            limit.reschedule(now)


@contextlib.contextmanager
def ending_with_the_connection(limit: asyncio.Timeout) -> Iterator[None]:
    """Make a timeout expire early if the client of the current request is gone or stops sending."""
    connection = _CURRENT.get()
    waits = set() if connection is None else connection.waits
    waits.add(limit)
    if client_listens_only():
        end_limits(waits)
    try:
        yield
    finally:
        waits.discard(limit)


def client_listens_only() -> bool:
    """Whether the client of the current request has ended its side of the connection."""
    connection = _CURRENT.get()
    return connection is not None and connection.is_half_closed


UPGRADES: Final = web.AppKey("upgrades", bool)
"""Set if an application upgrades connections, so that its listener tracks the last bytes read."""


def is_followed(request: web.Request) -> bool:
    """Whether bytes followed a request's head. aiohttp's parser drops some bytes after a request
    for an upgrade, and parses the remaining bytes as HTTP.
    """
    connection = request.protocol
    if not isinstance(connection, Connection):
        return False  # from a server of aiohttp's own
    assert isinstance(connection, UpgradableConnection), "its application has UPGRADES"
    return connection.is_followed


class Connection(DirectConnection):
    """A connection with its deadlines.

    Invariant: a timer runs only while a head is incomplete or unread answers pile up. An ordinary
    request, which arrives in one piece, starts no timer.
    """

    __slots__ = (
        "_chunked",
        "_chunked_bytes",
        "_head_timer",
        "_is_dropping",
        "_listener",
        "_stall_timer",
        "_stalled_at",
        "hand_over",
        "is_half_closed",
        "waits",
    )

    def __init__(self, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(listener.server, listener.direct, **kwargs)
        self.hand_over: Callable[[], None] | None = None
        """Gives back the place in the budget that the handshake used."""
        self._listener = listener
        self._chunked: web.BaseRequest | None = None
        """The request whose body arrives in chunks. `_chunked_bytes` is the size of the received
        part, with the chunks' heads."""
        self._chunked_bytes = 0
        self._is_dropping = False
        """Whether further bytes of the client are dropped."""
        self.is_half_closed = False
        """Whether the client has ended its side of the connection."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.waits: set[asyncio.Timeout] = set()
        """The timeouts of work that only waits for this connection's client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it if there are too many."""
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.address = self.address or peer[0]
        self.peer = peer_of(self.address)
        proxies = self._listener.limits.proxies
        if proxies is not None and proxies.trusts(self.address):
            self.proxies, self.peer = proxies, f"{self.address} {peer[1]}"
        if self.hand_over is not None:
            self.hand_over()
        try:
            self._listener.connections.take(self.peer)
        except errors.Overloaded as error:
            refusal = _Refusal(self._listener, error)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return
        _CURRENT.set(self)  # for the task that handles its requests, which starts here
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection and its timers, and end all work that only waits for its client."""
        if not self.is_served:
            return
        self._listener.connections.give(self.peer)
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)
        end_limits(self.waits)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's always ends the connection
        """Answer the requests that arrived before the client's end of input, then disconnect."""
        transport = self.transport
        # asyncio can't keep one direction of TLS open.
        if transport is None or transport.get_extra_info("ssl_object") is not None:
            return False
        if not self.end_input():
            return False
        self.is_half_closed = True
        end_limits(self.waits)
        return True

    @property
    def in_progress(self) -> str:
        """The request that is being answered, as text; "" if there is none."""
        request = self.request_in_work
        return "" if request is None else f"{request.method} {request.path}"

    def data_received(self, data: bytes) -> None:
        """Start the head's timer if a head is incomplete, and refuse a body in tiny chunks."""
        if self._is_dropping:
            return
        if len(data) >= _TURN_BYTES:
            self.pause_for_a_turn()
        # A read of the body calls this method without bytes, to parse bytes that the parser has kept.
        request = self.chunked_request if data else None
        if request is None:
            self._take(data)
            return
        if request is not self._chunked:
            self._chunked, self._chunked_bytes = request, 0
        for start in range(0, len(data), _CHUNKS_READ_BYTES):
            content, free = request.content, _CHUNKS_FREE_BYTES
            if 2 * self._chunked_bytes > 3 * content.total_bytes + free and not content.is_eof():
                # Refuse the body, because each chunk costs as much CPU as some hundred bytes.
                self._is_dropping = True
                self.break_body(request, web.RequestPayloadError("the body's chunks are too small"))
                return
            part = data[start : start + _CHUNKS_READ_BYTES]
            self._chunked_bytes += len(part)
            self._take(part)

    def _take(self, data: bytes) -> None:
        if self.feed(data):
            self._cancel_head_timer()
        elif self._head_timer is None and self.is_idle:
            # No request is being handled, and the bytes so far are an incomplete head.
            limit_s = self._listener.limits.head_timeout_s
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(limit_s, self._head_is_late)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.is_idle and self.transport is not None:
            limit_s = self._listener.limits.head_timeout_s
            error = errors.RequestTimeout(f"the headers did not arrive within {limit_s:g} s")
            self.transport.write(raw_response(error))
            self.force_close()

    def pause_writing(self) -> None:
        """Start the stall timer, because the client has stopped reading."""
        super().pause_writing()
        if self._stall_timer is None:
            limit_s = self._listener.limits.stalled_answer_timeout_s
            self._stalled_at = awake().time()
            self._stall_timer = asyncio.get_running_loop().call_later(
                limit_s, self._answer_is_stalled
            )

    def resume_writing(self) -> None:
        """Stop the stall timer, because the client reads again."""
        self._cancel_stall_timer()
        super().resume_writing()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _answer_is_stalled(self) -> None:
        self._stall_timer = None
        limit_s = self._listener.limits.stalled_answer_timeout_s
        left_s = self._stalled_at + limit_s - awake().time()
        if left_s > 0:
            # The timer also counted time while this process was suspended: wait for the rest.
            self._stall_timer = asyncio.get_running_loop().call_later(
                left_s, self._answer_is_stalled
            )
        elif self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP, or an error that no middleware caught, with a problem document.

        Raises: ConnectionError if the client can't get an answer, which ends the connection.
        """
        if isinstance(exc, ConnectionError) and self._is_gone():
            # If the client disconnected, no answer is possible. Otherwise the handler's own connection broke.
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("the response has already begun, so no error can be sent")
        error: errors.QuorumLogError
        if isinstance(exc, LineTooLong) or "many headers" in (message or "").lower():
            error = errors.HeadersTooLarge(
                "the request line or a header is too long, or there are too many headers"
            )
        elif isinstance(exc, HttpProcessingError):
            error = errors.BadRequest("the request is not valid HTTP/1.1: " + _one_line(message))
        elif isinstance(exc, web.HTTPException):
            error = error_of_http(exc, request.method, request.path)
        elif 400 <= status < 500:
            error = errors.BadRequest("the request is not valid HTTP/1.1")
        elif isinstance(exc, UnicodeEncodeError):
            # aiohttp's error for an unsupported Expect header quotes the header, which is not UTF-8.
            error = errors.BadRequest("a request header is not UTF-8: encode it as UTF-8")
        else:
            log.error("unhandled-error", exc_info=exc)
            error = errors.QuorumLogError()
        response = problem_response(error, request_id(None))
        response.force_close()
        return response

    def _is_gone(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; exceptions from outside all middlewares become problem documents.
        aiohttp keeps the request and the response until the next request, and no budget counts
        them. So the response's body is freed, and a connection with a long head is closed.
        """
        if isinstance(resp, web.HTTPException):
            instance = request_id(request.headers.get(header.REQUEST_ID))
            resp = problem_response(error_of_http(resp, request.method, request.path), instance)
        if self.is_half_closed:
            self.close_after_the_last()
        if not self.has_queued and isinstance(resp, web.StreamResponse):
            head = sum(len(name) + len(value) for name, value in request.raw_headers)
            if len(request.raw_path) + head > _HEAD_KEPT_BYTES:
                resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        self._chunked = None
        if isinstance(resp, web.Response):
            resp.body = None
        return finished


class UpgradableConnection(Connection):
    """A connection that may be upgraded to another protocol."""

    __slots__ = ("_ending",)

    def __init__(self, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(listener, **kwargs)
        self._ending = b""

    def data_received(self, data: bytes) -> None:
        """Remember the last four bytes that have arrived."""
        self._ending = (self._ending + data[-4:])[-4:]
        super().data_received(data)

    @property
    def is_followed(self) -> bool:
        """Whether bytes have followed the head of the request that is being answered."""
        return self._ending != b"\r\n\r\n" or self.has_queued


class _Refusal(asyncio.Protocol):
    """A connection beyond the limit: its request is answered with a 429 without being read.

    The answer waits for the request, since some clients treat an earlier answer as a broken
    connection. The connection is read until the client ends it, because closing it with unread
    bytes would reset it, and the client might lose the answer.
    """

    def __init__(self, listener: "Listener", error: errors.Overloaded) -> None:
        self._listener, self._error = listener, error
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait briefly for the request, unless too many refused connections wait already."""
        # `isinstance` can't be used, because uvloop's transports are not of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        wait_s = _REFUSED_S if self._listener.refuse() else 0.0
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._end)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """Answer when the first bytes of a request arrive, and drop all further bytes."""
        if not self._is_answered:
            self._answer()
            if self._transport.can_write_eof():  # not over TLS: the timer ends such a connection
                self._transport.write_eof()

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        """Forget the connection."""
        self._timer.cancel()
        self._listener.give_refused()

    def _end(self) -> None:
        if not self._is_answered:
            self._answer()
        self._transport.close()

    def _answer(self) -> None:
        self._is_answered = True
        self._transport.write(raw_response(self._error))


def _one_line(message: str | None) -> str:
    """The first line of a parser's message, since the other lines repeat the client's bytes."""
    return (message or "malformed").strip().splitlines()[0].rstrip(":")[:200]


class Listener:
    """A listening socket with the application behind it."""

    def __init__(self, runner: web.AppRunner, limits: ListenLimits) -> None:
        self.runner = runner
        self.limits = limits
        self.connections = Budget(
            "connections", "CONNECTIONS_MAX", limits.connections_max, limits.peer_connections_max
        )
        self.refused_count = 0
        """Number of open connections beyond the limit."""
        self._refusals_logged_at = -math.inf
        self.port = 0
        assert runner.server is not None, "the runner is set up"
        self.server = runner.server
        self._connection_class = UpgradableConnection if runner.app.get(UPGRADES) else Connection
        self.direct = runner.app.get(DIRECT)

    def transports(self) -> Iterator[asyncio.Transport]:
        """The transports of the open connections."""
        for connection in self.server.connections:
            if connection.transport is not None:
                yield connection.transport

    def waits_for(self) -> Sequence[str]:
        """The requests in progress, as text."""
        protocols = cast("Iterable[Connection]", self.server.connections)
        return [f"the answer to {found}" for each in protocols if (found := each.in_progress)]

    def refuse(self) -> bool:
        """Count and log a connection beyond the limit; return whether it may send a request."""
        self.refused_count += 1
        most, now = self.limits.connections_max, asyncio.get_running_loop().time()
        if now - self._refusals_logged_at >= _REFUSALS_LOGGED_EVERY_S:
            self._refusals_logged_at = now
            log.warning("connections-refused", extra={"connections_max": most})
        return self.refused_count <= min(_REFUSED_MAX, most // _REFUSED_SHARE + 1)

    def give_refused(self) -> None:
        """Forget a connection beyond the limit."""
        self.refused_count -= 1

    def connection(self) -> "Connection":
        """Make the protocol of a new connection."""
        limits = self.limits
        return self._connection_class(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.head_line_bytes_max,
            max_field_size=limits.head_line_bytes_max,
            max_headers=limits.headers_max,
            lingering_time=limits.head_timeout_s,
            auto_decompress=False,
            access_log=None,
        )
