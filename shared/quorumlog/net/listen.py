"""Serve an aiohttp application to clients that may be slow, broken or hostile.

aiohttp waits without a limit for a request's head and for a client to read its answers, and answers
malformed HTTP with plain text. Here each connection has deadlines, the number of connections has a
limit, and malformed HTTP gets a problem document. Bodies have their deadlines where they are read.
Every service listens through this module.
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from aiohttp import web, web_response
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong, PayloadEncodingError
from yarl import URL

from quorumlog import header
from quorumlog.errors import (
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    Overloaded,
    QuorumLogError,
    RequestTimeout,
    RouteNotFound,
    TooLarge,
)
from quorumlog.net.awake import awake
from quorumlog.net.budget import Budget, peer_of
from quorumlog.net.direct import DIRECT, DirectConnection
from quorumlog.net.proxies import Proxies, read_header
from quorumlog.net.timers import Tasks, restarted
from quorumlog.wire import problems

log = logging.getLogger(__name__)

SERVER_NAME: Final = "quorumlog"
web_response.SERVER_SOFTWARE = SERVER_NAME  # type: ignore[attr-defined]
"""By default aiohttp names its version and Python's in `Server` of each answer, its parser's answers
included."""


_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Vary": "Accept",
}
"""A page loads nothing, runs no script, and can't be framed."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_CHUNKS_FREE_BYTES: Final = 1 << 20
"""Twice the bytes of a body that come while its chunks' heads are longer than half of it. aiohttp's parser keeps one read of
256 KiB unparsed at most, which counts too.
"""
_NO_TARGET: Final = URL("/")
_TURN_BYTES: Final = 128 << 10
"""A connection that delivers so many bytes in one read is paused until the next turn of the event loop. Otherwise libuv
(`uv__read`) reads up to 32 times 256 KiB from it before it serves the next connection.
"""
_CHUNKS_READ_BYTES: Final = 32 << 10
"""Parsed between two looks at that: 10 ms of chunks of one byte (measured)."""
_REFUSED_S: Final = 1.0
"""How long a refused connection may take for its request, and to end (taste)."""
_REFUSED_MAX: Final = 200
_REFUSED_SHARE: Final = 8
"""Refused connections that may take that time at once: 200, and an eighth of the limit; others are
answered and closed immediately.
"""
_REFUSALS_LOGGED_EVERY_S: Final = 60.0
_BACKLOG: Final = 1024
_ACCEPT_AGAIN_S: Final = 0.1
"""After a connection could not be accepted (taste)."""
_TOLD_EVERY_S: Final = 1.0
_ACCEPT_TURNS: Final = 3
"""Turns of asyncio's event loop from the acceptance of a connection until its protocol knows of it."""
_NAMED: Final = 5
"""Of what a process waits for, so many are named."""
_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)
_CONNECTION: Final[ContextVar["_Connection | None"]] = ContextVar("connection", default=None)
_ids = itertools.count(1)
_process = secrets.token_hex(4)

HEAD_LINE_BYTES: Final = 8190
"""The longest line of a request's head that clients may send: aiohttp's own bound."""


@dataclass(frozen=True, slots=True)
class ListenLimits:
    """Limits of one listening socket. Times in seconds, sizes in bytes."""

    connections_max: int = 10_000
    peer_connections_max: int = 10_000
    """Of one address, once seven eighths of all are taken."""
    head_timeout_s: float = 10.0
    """From the first byte of a request's head to the last."""
    idle_timeout_s: float = 65.0
    """An idle connection: longer than the 60 s for which proxies commonly keep one."""
    stalled_answer_timeout_s: float = 60.0
    """How long a client may pause reading its answer."""
    head_line_bytes_max: int = HEAD_LINE_BYTES
    headers_max: int = 100
    proxies: Proxies | None = None
    """The trusted proxies. Their connections have no share of the budget, since each carries requests of many clients."""
    drain_timeout_s: float = 20.0


def request_id(offered: str | None) -> str:
    """The id of a request: the client's if it is short and harmless, else a new one."""
    if offered is not None and _REQUEST_ID.fullmatch(offered):
        return offered
    return f"{_process}-{next(_ids):x}"


CODE: Final = web.ResponseKey("code", str)
"""The code of the problem that an answer is."""


def problem_response(error: QuorumLogError, instance: str) -> web.Response:
    """The answer that carries an error."""
    response = web.Response(
        body=problems.to_bytes(error, instance),
        status=error.status,
        content_type=problems.CONTENT_TYPE,
        headers=error.headers,
    )
    response[CODE] = error.code
    response.headers[header.REQUEST_ID] = instance
    response.headers["Cache-Control"] = "no-store"
    if error.status in (408, 413):
        # The rest of the request is not worth reading.
        response.force_close()
    return response


def html_response(text: str) -> web.Response:
    """A page for people."""
    return web.Response(text=text, content_type="text/html", headers=_PAGE_HEADERS)


def error_of_http(exc: web.HTTPException, method: str, path: str) -> QuorumLogError:
    """Our error for an HTTP exception of aiohttp's."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(exc.allowed_methods | {"OPTIONS"}))
        return MethodNotAllowed(f"{path} has no {method}, but {allow}", headers={"Allow": allow})
    by_status: dict[int, type[QuorumLogError]] = {404: RouteNotFound, 413: TooLarge}
    if exc.status in by_status:
        return by_status[exc.status](f"{method} {path}: {exc.reason}")
    return BadRequest(exc.reason) if 400 <= exc.status < 500 else QuorumLogError(exc.reason)


def forgotten(error: ConnectionError) -> ConnectionError:
    """A lost connection's error without its traceback.

    aiohttp's error refers to itself through its traceback: the frames, and with them the answer that
    nobody read, would stay in memory until the next full garbage collection, which is rare.
    """
    return error.with_traceback(None)


def as_sent(request: web.Request) -> web.Request:
    """Return the request with the address of its client as `remote`, if it came through a trusted proxy."""
    connection = request.protocol
    if not isinstance(connection, _Connection):
        return request  # of a server of aiohttp's own
    client = connection.client_of(request.headers)
    return request if client in ("", request.remote) else request.clone(remote=client)


def wants_socket(socket: web.WebSocketResponse, request: web.Request) -> bool:
    """Whether a request is a handshake for the socket as RFC 6455 defines it."""
    try:
        return socket.can_prepare(request).ok
    except UnicodeEncodeError:
        # aiohttp's refusal quotes the wrong header, which is not UTF-8.
        return False


def end_limits(limits: Iterable[asyncio.Timeout]) -> None:
    """Let the time of each limit be over now."""
    now = asyncio.get_running_loop().time()
    for limit in limits:
        if not limit.expired():
            limit.reschedule(now)


@contextlib.contextmanager
def ending_with_the_connection(limit: asyncio.Timeout) -> Iterator[None]:
    """End a limit early where the client of the request that is being handled is gone, or sends no more."""
    connection = _CONNECTION.get()
    waits = set() if connection is None else connection.waits
    waits.add(limit)
    if client_listens_only():
        end_limits(waits)
    try:
        yield
    finally:
        waits.discard(limit)


def client_listens_only() -> bool:
    """Whether the client of the request that is being handled has said that it sends no more."""
    connection = _CONNECTION.get()
    return connection is not None and connection.is_half_closed


UPGRADES: Final = web.AppKey("upgrades", bool)
"""Set in an application that upgrades connections to another protocol: only its listener looks at each read for that."""


def is_followed(request: web.Request) -> bool:
    """Whether bytes came behind a request's head. Of what follows a request that asks for an upgrade aiohttp's parser
    drops some and takes the rest for HTTP.
    """
    connection = request.protocol
    if not isinstance(connection, _Connection):
        return False  # of a server of aiohttp's own
    assert isinstance(connection, _Upgradable), "its application has UPGRADES"
    return connection.is_followed


class _Connection(DirectConnection):
    """One connection with its deadlines.

    Invariant: a timer runs only while a head is incomplete or answers pile up; an ordinary request,
    which arrives in one piece, starts no timer.
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
        """Gives back the place that the handshake had."""
        self._listener = listener
        self._chunked: web.BaseRequest | None = None
        """The request whose body comes in chunks, and the bytes that came of it with the chunks' heads."""
        self._chunked_bytes = 0
        self._is_dropping = False
        """Whether what still comes is of no use."""
        self.is_half_closed = False
        """Whether the client has said that it sends no more."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.waits: set[asyncio.Timeout] = set()
        """Limits of what waits for this connection's client only."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it where there are too many."""
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
        except Overloaded as error:
            refusal = _Refusal(self._listener, error)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return
        _CONNECTION.set(self)  # for the task that handles its requests, which starts here
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection and its timers, and end what only waits for its client."""
        if self._manager is None:
            return
        self._listener.connections.give(self.peer)
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)
        end_limits(self.waits)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's always ends the connection
        """Answer what the client has asked for before it said that it sends no more, and end the connection then."""
        transport = self.transport
        if (
            self._is_idle()
            or self._upgraded
            or self._payload_parser is not None
            or transport is None
            # asyncio can't keep one direction of TLS open.
            or transport.get_extra_info("ssl_object") is not None
        ):
            return False
        assert self._parser is not None
        try:
            self._parser.feed_eof()
        except PayloadEncodingError:
            return False  # in the middle of a body
        except HttpProcessingError:
            pass  # malformed, which is answered
        self.is_half_closed = True
        self._close = not self._messages
        end_limits(self.waits)
        return True

    @property
    def in_progress(self) -> str:
        """The request that is being answered, for people; "" where there is none."""
        request = self._current_request or self._begun
        return "" if request is None else f"{request.method} {request.path}"

    def data_received(self, data: bytes) -> None:
        """Start the head's timer when a head arrives incomplete, and refuse a body in tiny chunks."""
        if self._is_dropping:
            return
        if len(data) >= _TURN_BYTES:
            self._pause_transport_reading()
            self._loop.call_soon(self._read_on)
        request = self._current_request
        # Without bytes aiohttp goes on with what its parser has, in the middle of a read of the body.
        if not data or request is None or not request._message.chunked:  # noqa: SLF001
            self._take(data)
            return
        if request is not self._chunked:
            self._chunked, self._chunked_bytes = request, 0
        for start in range(0, len(data), _CHUNKS_READ_BYTES):
            content, free = request.content, _CHUNKS_FREE_BYTES
            if 2 * self._chunked_bytes > 3 * content.total_bytes + free and not content.is_eof():
                # Each chunk costs as much as some hundred bytes.
                content._buffer.clear()  # noqa: SLF001
                content.set_exception(web.RequestPayloadError("chunks of a few bytes each"))
                content.feed_eof()
                self._is_dropping = True
                self.close()
                return
            part = data[start : start + _CHUNKS_READ_BYTES]
            self._chunked_bytes += len(part)
            self._take(part)

    def _read_on(self) -> None:
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _take(self, data: bytes) -> None:
        count = self._request_count
        super().data_received(data)
        if self._request_count != count:
            self._name_targets()
            if self._head_timer is not None:
                self._cancel_head_timer()
        elif self._head_timer is None and self._is_idle():
            # No request is being handled, and the bytes so far are no request: part of a head.
            limit_s = self._listener.limits.head_timeout_s
            self._head_timer = self._loop.call_later(limit_s, self._head_is_late)

    def _name_targets(self) -> None:
        """Give a CONNECT without a target, which aiohttp's parser accepts as HTTP/0.9, a URL: without one the task of the
        connection would fail, and the connection stay open. `Hosts.check` refuses the request.
        """
        for at, (message, content) in enumerate(self._messages):
            if isinstance(message, RawRequestMessage) and message.url is None:
                self._messages[at] = message._replace(path="", url=_NO_TARGET), content

    def _is_idle(self) -> bool:
        """Whether no request is being handled or about to be: a request that has just arrived has set
        the handler's waiter, and the rest of its body may arrive before the handler runs. The first
        bytes of a connection may come before there is a waiter.
        """
        if self._waiter is None:
            return self._request_count == 0
        return not self._waiter.done() and not self._messages

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_idle() and self.transport is not None:
            limit_s = self._listener.limits.head_timeout_s
            error = RequestTimeout(f"the headers were not complete within {limit_s:g} s")
            self.transport.write(_raw_answer(error))
            self.force_close()

    def pause_writing(self) -> None:
        """The client has stopped reading: start the timer."""
        super().pause_writing()
        if self._stall_timer is None:
            limit_s = self._listener.limits.stalled_answer_timeout_s
            self._stalled_at = awake().time()
            self._stall_timer = self._loop.call_later(limit_s, self._answer_is_stalled)

    def resume_writing(self) -> None:
        """The client reads again."""
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
            # This process stood still: the peer may have read all the time.
            self._stall_timer = self._loop.call_later(left_s, self._answer_is_stalled)
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

        Raises: ConnectionError where nobody reads an answer any more, which ends the connection.
        """
        if isinstance(exc, ConnectionError) and self._is_gone():
            # A client that goes away is not our error; a broken connection of a handler's own may be.
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        error: QuorumLogError
        if isinstance(exc, LineTooLong) or "many headers" in (message or "").lower():
            error = HeadersTooLarge(
                "the request line or a header is too long, or there are too many"
            )
        elif isinstance(exc, HttpProcessingError):
            error = BadRequest("the request is not HTTP/1.1: " + _one_line(message))
        elif isinstance(exc, web.HTTPException):
            error = error_of_http(exc, request.method, request.path)
        elif 400 <= status < 500:
            error = BadRequest("the request is not HTTP/1.1")
        elif isinstance(exc, UnicodeEncodeError):
            # Outside of all middlewares aiohttp quotes a header (Expect) in a message of its own.
            error = BadRequest("a header is not UTF-8")
        else:
            log.error("unhandled-error", exc_info=exc)
            error = QuorumLogError()
        response = problem_response(error, request_id(None))
        response.force_close()
        return response

    def _is_gone(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """Send an answer; exceptions from outside all middlewares become problem documents."""
        if isinstance(resp, web.HTTPException):
            instance = request_id(request.headers.get(header.REQUEST_ID))
            resp = problem_response(error_of_http(resp, request.method, request.path), instance)
        self._close = self._close or (self.is_half_closed and not self._messages)
        return super().finish_response(request, resp, start_time)


class _Upgradable(_Connection):
    """One connection that may become one of another protocol."""

    __slots__ = ("_ending",)

    def __init__(self, listener: "Listener", **kwargs: Any) -> None:
        super().__init__(listener, **kwargs)
        self._ending = b""

    def data_received(self, data: bytes) -> None:
        """Keep how what has come ends."""
        self._ending = (self._ending + data[-4:])[-4:]
        super().data_received(data)

    @property
    def is_followed(self) -> bool:
        """Whether more has come than the head of the request that is being answered."""
        return self._ending != b"\r\n\r\n" or bool(self._messages)


class _Refusal(asyncio.Protocol):
    """A connection beyond the limit: its request is answered with a 429, unread.

    The answer waits for the request, since some clients take an earlier answer for a broken connection.
    The connection is read until the client ends it: closing it with unread bytes would reset it, and the
    client might lose the answer.
    """

    def __init__(self, listener: "Listener", error: Overloaded) -> None:
        self._listener, self._error = listener, error
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request: briefly, and not while too many refused connections wait already."""
        # No `isinstance`: the transports of uvloop are not of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        wait_s = _REFUSED_S if self._listener.refuse() else 0.0
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._end)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """Answer the first bytes of a request, and drop all others."""
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
        self._transport.write(_raw_answer(self._error))


def _one_line(message: str | None) -> str:
    """The first line of a parser's message: the other lines repeat the client's bytes."""
    return (message or "malformed").strip().splitlines()[0].rstrip(":")[:200]


def _raw_answer(error: QuorumLogError) -> bytes:
    """The bytes of an answer on a connection without a request."""
    body = problems.to_bytes(error)
    headers = {
        "Content-Type": problems.CONTENT_TYPE,
        "Content-Length": str(len(body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        header.REQUEST_ID: request_id(None),
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} Error", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Listener:
    """A listening socket with the application behind it."""

    def __init__(self, runner: web.AppRunner, limits: ListenLimits) -> None:
        self.runner = runner
        self.limits = limits
        self.connections = Budget(
            "connections", "CONNECTIONS_MAX", limits.connections_max, limits.peer_connections_max
        )
        self.refused_count = 0
        """Connections beyond the limit that have not ended yet."""
        self._refusals_logged_at = -math.inf
        self.port = 0
        assert runner.server is not None, "the runner is set up"
        self.server = runner.server
        self._connection_class = _Upgradable if runner.app.get(UPGRADES) else _Connection
        self.direct = runner.app.get(DIRECT)

    def transports(self) -> Iterator[asyncio.Transport]:
        """Of the connections that stand."""
        for connection in self.server.connections:
            if connection.transport is not None:
                yield connection.transport

    def waits_for(self) -> Sequence[str]:
        """The requests in progress, for people."""
        protocols = cast("Iterable[_Connection]", self.server.connections)
        return [f"the answer to {found}" for each in protocols if (found := each.in_progress)]

    def refuse(self) -> bool:
        """Count and log a connection beyond the limit; returns whether it may wait for its request."""
        self.refused_count += 1
        most, now = self.limits.connections_max, asyncio.get_running_loop().time()
        if now - self._refusals_logged_at >= _REFUSALS_LOGGED_EVERY_S:
            self._refusals_logged_at = now
            log.warning("connections-refused", extra={"connections_max": most})
        return self.refused_count <= min(_REFUSED_MAX, most // _REFUSED_SHARE + 1)

    def give_refused(self) -> None:
        """Forget a connection beyond the limit."""
        self.refused_count -= 1

    def connection(self) -> "_Connection":
        """A new connection's protocol."""
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


class PortUnusable(OSError):
    """Nothing can listen at a port; says why."""


@contextlib.contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used ({error})"
        raise PortUnusable(f"port {port} of {host} {reason}") from error


def bind(host: str, port: int) -> socket.socket:
    """A socket for `listening`, whose port is known before the application is made; with port 0 the system
    chooses one. Raises: PortUnusable, OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _naming(host, port):
            bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.asynccontextmanager
async def _listening_on(
    listener: Listener, bound: socket.socket, context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Accept connections that begin with a handshake, or with what a proxy says, until the end of the block. Each counts as
    a connection from its start and has a deadline: asyncio's server would begin any number at once, whose peers may say
    nothing.
    """
    bound.setblocking(False)
    bound.listen(_BACKLOG)
    listener.port = bound.getsockname()[1]
    tasks = Tasks()
    tasks.start(restarted(partial(_accept_all, listener, bound, context, tasks)))
    try:
        yield
    finally:
        await tasks.close()
        bound.close()


async def _accept_all(
    listener: Listener, bound: socket.socket, context: ssl.SSLContext | None, tasks: Tasks
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, address = await loop.sock_accept(bound)
        except OSError as error:  # the peer has gone, or descriptors are used up
            log.warning("accept-failed", extra={"error": repr(error)})
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        with contextlib.ExitStack() as refused:
            refused.callback(accepted.close)
            give = _take_place(listener, peer_of(address[0]))
            if give is not None:
                refused.pop_all()
                tasks.start(_welcome(listener, accepted, address[0], context, give))


def _take_place(listener: Listener, peer: str) -> Callable[[], None] | None:
    """Have a connection count before its handshake; returns what gives its place back, None where there is none."""
    try:
        listener.connections.take(peer)
    except Overloaded:
        # Nothing can be said before the handshake. A few may end it, and get their 429 then.
        if listener.refuse():
            return listener.give_refused
        listener.give_refused()
        return None
    return partial(listener.connections.give, peer)


async def _welcome(
    listener: Listener,
    accepted: socket.socket,
    address: str,
    context: ssl.SSLContext | None,
    give: Callable[[], None],
) -> None:
    """Read what a proxy says of a connection and do its handshake; it serves itself then."""
    connection, has_place = listener.connection(), True
    proxies, limit_s = listener.limits.proxies, listener.limits.head_timeout_s

    def hand_over() -> None:
        nonlocal has_place
        has_place = False
        give()

    connection.hand_over = hand_over
    try:
        if proxies is not None and proxies.begins(address):
            async with asyncio.timeout(limit_s):
                connection.address = await read_header(accepted) or ""
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=context,
            ssl_handshake_timeout=None if context is None else limit_s,
        )
    except (OSError, ValueError):  # of TLS, of time, of the connection, of the proxy
        accepted.close()
    finally:
        if has_place:
            give()


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str,
    port: int,
    limits: ListenLimits | None = None,
    bound: socket.socket | None = None,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Listener]:
    """Start the application and listen, on a socket that is bound already where there is one, and with a context
    over TLS. At the end stop listening, finish the requests in progress (for `drain_timeout_s` at most), then run the
    application's clean-up.

    Raises: PortUnusable.
    """
    place: dict[str, Any] = {"host": host, "port": port, "reuse_address": True}
    if bound is not None:
        place = {"sock": bound}
    limits = limits or ListenLimits()
    waits_for: Callable[[], Sequence[str]] = tuple
    runner = web.AppRunner(app, shutdown_timeout=limits.drain_timeout_s)
    await runner.setup()
    try:
        listener = Listener(runner, limits)
        waits_for = listener.waits_for
        if context is not None or limits.proxies is not None:
            async with _listening_on(listener, bound or bind(host, port), context):
                yield listener
            return
        with _naming(host, port):
            sockets = await asyncio.get_running_loop().create_server(
                listener.connection, backlog=_BACKLOG, **place
            )
        listener.port = sockets.sockets[0].getsockname()[1]
        try:
            yield listener
        finally:
            await _stop_accepting(sockets)
    finally:
        async with telling(waits_for):
            await runner.cleanup()


async def _stop_accepting(sockets: asyncio.Server) -> None:
    """Close a server once the protocols know of all connections that it has accepted. asyncio would lose the others without closing them."""
    loop = asyncio.get_running_loop()
    for each in sockets.sockets:
        loop.remove_reader(each)
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    sockets.close()


def in_words(waits_for: Sequence[str]) -> str:
    """What a process waits for, for people: the first few, and the number of the others."""
    more = len(waits_for) - _NAMED
    return "; ".join((*waits_for[:_NAMED], *([f"{more} more"] if more > 0 else ())))


@contextlib.asynccontextmanager
async def telling(waits_for: Callable[[], Sequence[str]]) -> AsyncIterator[None]:
    """Log what a process that is about to end waits for, until the end of the block."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(_TOLD_EVERY_S)
            if found := waits_for():
                log.info("drain-waits", extra={"why": in_words(found)})

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
