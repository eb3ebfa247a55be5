"""The only code that depends on private parts of aiohttp.

No other module reads, replaces or overrides a private name of aiohttp.
`tests/unit/net/test_aiohttp_parts.py` compares the names and behaviour used here with the installed
aiohttp.

The fast path (`DirectConnection`) exists because aiohttp wakes a connection's task for each
request, and that task starts a second task for the handler. The two tasks and the request's objects
cause more than half of a short request's cost. An idle connection first offers a completely
received request to the application's `Direct`. If `Direct` declines, aiohttp handles the request on
the regular path, so `Direct` may decline all rare cases and all failures (ADR 41).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from ssl import SSLContext
from typing import Any, Final, Protocol, cast

import aiohttp
from aiohttp import ClientRequest, WSMessage, hdrs, web, web_response
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, PayloadEncodingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from quorumlog.net.proxies import Proxies

_TURNS: Final = 2
"""Number of turns of the event loop for which a request waits for the end of its body. The end
often arrives in a second read, while the sender is in the middle of a system call (measured)."""


def name_server(name: str) -> None:
    """Set the header `Server` of all responses, including those of aiohttp's parser. The default
    value contains the versions of aiohttp and Python.
    """
    web_response.SERVER_SOFTWARE = name  # type: ignore[attr-defined]


class Direct(Protocol):
    """The application's fast-path handler."""

    bytes_max: int
    """Maximum size of a body on the fast path."""

    def begin(
        self, message: RawRequestMessage, body: bytes, connection: "DirectConnection"
    ) -> bool:
        """Return whether to accept a request; if so, later call `connection.answer` once."""


DIRECT: Final = web.AppKey("direct", Direct)
"""The fast-path handler of an application, if it has one."""


class DirectConnection(RequestHandler):
    """A connection that offers its requests to a `Direct` first.

    Invariants: while a request is on the fast path, aiohttp's task waits for `_idle`, as if no
    request had arrived. `_waiter` is None, as if the task were handling a request. So aiohttp does
    not close the connection as idle, and further requests are queued until the answer is sent.
    While `_is_coming`, the only queued request lacks the end of its body, and aiohttp's task has
    not been woken.
    """

    __slots__ = ("_begun", "_direct", "_idle", "_is_coming", "address", "peer", "proxies")

    def __init__(self, manager: web.Server, direct: Direct | None, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._direct = direct
        self.address = ""
        """The address of the client, or of the trusted proxy that has connected."""
        self.peer = ""
        """The peer whose connection budget includes this connection."""
        self.proxies: Proxies | None = None
        """Set if a trusted proxy has connected; `client_of` then finds each client's address."""
        self._idle: asyncio.Future[None] | None = None
        self._begun: RawRequestMessage | None = None
        """The request that is being answered on the fast path."""
        self._is_coming = False

    def client_of(self, headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> str:
        """The address of the client that sent a request with these headers."""
        return (
            self.address if self.proxies is None else self.proxies.client_of(headers, self.address)
        )

    # Bytes of requests.

    def feed(self, data: bytes) -> bool:
        """Parse received bytes; return whether at least one request's head became complete."""
        count = self._request_count
        waiter, direct = self._waiter, self._direct
        if (
            direct is None
            or waiter is None
            or waiter.done()
            or (self._messages and not self._is_coming)
        ):
            super().data_received(data)
            return self._heads_came(count)
        self._waiter = None  # otherwise aiohttp would wake the task
        try:
            super().data_received(data)
        finally:
            self._waiter = waiter
        if self._messages and not self._is_coming and not self._begin(direct, waiter):
            if self._is_soon_whole(direct):
                self._is_coming = True
                self._loop.call_soon(self._look_again, direct, waiter, _TURNS)
            else:
                waiter.set_result(None)
        return self._heads_came(count)

    def _heads_came(self, count: int) -> bool:
        """Whether heads have become complete since aiohttp's request count was `count`. A CONNECT
        without a target, which aiohttp's parser accepts as HTTP/0.9, gets a URL here, so that
        `Hosts.check` refuses it. Without a URL, the task would fail and leave the connection open.
        """
        if self._request_count == count:
            return False
        for at, (message, content) in enumerate(self._messages):
            if isinstance(message, RawRequestMessage) and message.url is None:
                self._messages[at] = message._replace(path="", url=URL("/")), content
        return True

    def _is_soon_whole(self, direct: Direct) -> bool:
        """Whether exactly one request is queued, and lacks only the end of a short body."""
        message, content = self._messages[0]
        if (
            len(self._messages) > 1
            or not isinstance(message, RawRequestMessage)
            or content.is_eof()
        ):
            return False
        length = message.headers.get(hdrs.CONTENT_LENGTH, "")
        # The parser has checked that the length is a number.
        return bool(length) and int(length) <= direct.bytes_max

    def _look_again(self, direct: Direct, waiter: asyncio.Future[None], turns: int) -> None:
        """Offer the request whose body was incomplete to `direct`, or wake aiohttp's task."""
        # The task must not be woken for a closing connection, whose request factory is gone.
        is_closing = self.transport is None or self.transport.is_closing()
        if is_closing or waiter.done() or self._waiter is not waiter or not self._messages:
            self._is_coming = False
        elif turns > 1 and self._is_soon_whole(direct):
            self._loop.call_soon(self._look_again, direct, waiter, turns - 1)
        else:
            self._is_coming = False
            if not self._begin(direct, waiter):
                waiter.set_result(None)

    def _begin(self, direct: Direct, waiter: asyncio.Future[None]) -> bool:
        """Offer the only queued request to `direct` if possible; return whether it was accepted."""
        message, content = self._messages[0]
        if (
            len(self._messages) > 1
            or not isinstance(message, RawRequestMessage)
            or message.should_close
            or message.upgrade
            or message.chunked
            or message.compression is not None
            or content is EMPTY_PAYLOAD
            or not content.is_eof()
            or not content._buffer  # reading the body would take it from the regular path
            or self._paused  # the client does not read its answers
            or self._manager is None
        ):
            return False
        self._waiter, self._idle, self._begun = None, waiter, message
        self._request_in_progress = True
        is_taken = False
        try:
            is_taken = direct.begin(message, b"".join(content._buffer), self)
        finally:
            if not is_taken:
                self._waiter, self._idle, self._begun = waiter, None, None
                self._request_in_progress = False
        if not is_taken:
            return False
        self._messages.popleft()
        self._manager.requests_count += 1
        if self._parser is not None:
            self._parser.message_consumed()
        return True

    def answer(self, data: bytes, *, closes: bool = False) -> None:
        """Send the answer to the request on the fast path, and end the connection if `closes`."""
        waiter, transport = self._idle, self.transport
        assert waiter is not None, "a request is answered once"
        self._idle = self._begun = None
        if transport is not None and not transport.is_closing():
            transport.write(data)
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        if self._force_close or self._close or closes:
            # aiohttp's task ends here as it does when an idle connection ends.
            waiter.cancel()
            self._close = True
            if transport is not None:
                transport.close()
            return
        self._next_keepalive_close_time = end = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(end, self._process_keepalive)
        self._waiter = waiter
        if self._messages:
            waiter.set_result(None)

    # The state of the connection, for subclasses.

    @property
    def is_served(self) -> bool:
        """Whether the connection is not lost yet: aiohttp's server still counts it."""
        return self._manager is not None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being handled or about to be handled. A new request has completed
        `_waiter`, but the rest of its body may arrive before the handler runs. A connection's first
        bytes may arrive before the waiter exists.
        """
        if self._waiter is None:
            return self._request_count == 0
        return not self._waiter.done() and not self._messages

    @property
    def has_queued(self) -> bool:
        """Whether a request waits behind the request that is being handled."""
        return bool(self._messages)

    @property
    def request_in_work(self) -> web.BaseRequest | RawRequestMessage | None:
        """The request that is being answered."""
        return self._current_request or self._begun

    @property
    def chunked_request(self) -> web.BaseRequest | None:
        """The request that is being handled, if its body is chunked."""
        request = self._current_request
        return request if request is not None and request._message.chunked else None

    def pause_for_a_turn(self) -> None:
        """Stop reading from the connection until the next turn of the event loop."""
        self._pause_transport_reading()
        self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def break_body(self, request: web.BaseRequest, error: Exception) -> None:
        """Make reads of a body fail with `error`, and end the connection after the answer."""
        content = request.content
        content._buffer.clear()
        content.set_exception(error)
        content.feed_eof()
        self.close()

    def end_input(self) -> bool:
        """Process the end of the client's input; return whether a request is unanswered. The
        connection ends after the last answer. Requests before an upgrade or a CONNECT are not
        answered.
        """
        if self.is_idle or self._upgraded or self._payload_parser is not None:
            return False
        assert self._parser is not None
        try:
            self._parser.feed_eof()
        except PayloadEncodingError:
            return False  # in the middle of a body
        except HttpProcessingError:
            pass  # malformed: aiohttp answers that
        self._close = not self._messages
        return True

    def close_after_the_last(self) -> None:
        """End the connection after the answer about to be sent, if no other request waits."""
        self._close = self._close or not self._messages


def take_parser(
    socket: web.WebSocketResponse, connection: RequestHandler, taker: Any, turn_messages: int
) -> tuple[Any, Any]:
    """Return a prepared WebSocket's parser, and its queue of whole messages. From now on, arriving
    bytes are passed to `taker.feed_data`, which returns whether reading ends. The end of the
    connection calls `taker.feed_eof`. Readers of the queue yield to other tasks every
    `turn_messages` messages.
    """
    parser, queue = socket._parser, socket._reader
    socket._reader = cast("Any", _InTurns(queue, turn_messages))
    connection._payload_parser = taker
    return parser, queue


def drop_parser(socket: web.WebSocketResponse) -> None:
    """Free a WebSocket's parser, with the incomplete message in it."""
    socket._parser = None


def messages_in(queue: Any) -> Sequence[tuple[WSMessage, int]]:
    """The messages in a WebSocket's queue, each with its size in bytes."""
    found: Sequence[tuple[WSMessage, int]] = queue._buffer
    return found


def bytes_in(queue: Any) -> int:
    """The size in bytes of all messages in a WebSocket's queue."""
    size: int = queue._size
    return size


class _InTurns:
    """A queue of messages whose readers yield to other tasks. With aiohttp's own queue, a reader
    gets all messages up to the peer's close frame without a pause, even if the peer keeps sending.
    """

    def __init__(self, queue: Any, turn_messages: int) -> None:
        self._messages, self._turn, self._turn_messages = queue, 0, turn_messages
        self.feed_data, self.set_exception = queue.feed_data, queue.set_exception

    async def read(self) -> WSMessage:
        self._turn = (self._turn + 1) % self._turn_messages
        if not self._turn:
            await asyncio.sleep(0)
        message: WSMessage = await self._messages.read()
        return message


class Connector(aiohttp.TCPConnector, ABC):
    """A session's connections. The most recently used free connection is reused first. By default,
    aiohttp reuses the connection that has been free for longest. A process with regular requests,
    such as heartbeats, would then never close the connections of a burst.
    """

    def transports(self) -> Iterator[asyncio.Transport]:
        """The transports of all connections, including free ones."""
        free = (protocol for kept in self._conns.values() for protocol, _ in kept)
        for protocol in (*free, *self._acquired):
            if protocol.transport is not None:
                yield protocol.transport

    @abstractmethod
    def context(self) -> SSLContext:
        """The TLS context of the next connection."""

    def check_server(self, transport: asyncio.Transport, request: ClientRequest) -> None:
        """Check the identity of the server at a new TLS connection. Raises: ClientError."""

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        # aiohttp appends a freed connection at the end, but takes the next one from the front.
        if (free := self._conns.get(key)) is not None:
            free.rotate()

    async def _wrap_create_connection(
        self, *args: Any, req: ClientRequest, **kwargs: Any
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        made = await super()._wrap_create_connection(*args, req=req, **kwargs)
        if req.is_ssl():
            self.check_server(made[0], req)
        return made

    def _get_ssl_context(self, req: ClientRequest) -> SSLContext | None:
        """The newest context. (aiohttp would keep the first context.)"""
        return self.context() if req.is_ssl() else None
