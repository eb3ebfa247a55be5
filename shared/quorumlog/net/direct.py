"""Requests that are answered without a task.

aiohttp wakes its connection's task for a request, and that task starts another one for the handler: with the objects of
a request and an answer this is more than half of what a short request costs. A request that comes whole, to a connection
that is idle, is shown to the application's `Direct` before. What that does not take, whatever the reason, goes aiohttp's
way as if nothing had been asked, so it may leave out all that is rare and all that fails.

A body of more than a few segments often comes in two reads, of which the second is a turn of the loop away: a request that
could be taken waits for it so long, and no longer.
"""

import asyncio
from typing import Any, Final, Protocol

from aiohttp import hdrs, web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy

from quorumlog.net.proxies import Proxies

_TURNS: Final = 2
"""Of the event loop, which a request's body may still take: the sender is in the middle of one system call (measured)."""


class Direct(Protocol):
    """What of an application answers requests directly."""

    bytes_max: int
    """Of a body: a longer one is never taken."""

    def begin(
        self, message: RawRequestMessage, body: bytes, connection: "DirectConnection"
    ) -> bool:
        """Take a request, and call `connection.answer` once, later. False: it is not taken, and nothing was done."""


DIRECT: Final = web.AppKey("direct", Direct)
"""Where an application has one."""


class DirectConnection(RequestHandler):
    """A connection whose requests are shown to a `Direct` first.

    Invariant: while a request is answered directly, the task of aiohttp waits for `_idle` as if none had come, and
    `_waiter` is None as if it handled one. So what ends idle connections leaves this one alone, and further requests
    queue up until the answer is sent.

    While `_is_coming`, the one request that is queued has not all of its body, and nobody was woken for it.
    """

    __slots__ = ("_begun", "_direct", "_idle", "_is_coming", "address", "peer", "proxies")

    def __init__(self, manager: web.Server, direct: Direct | None, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._direct = direct
        self.address = ""
        """The address of the client, or of the trusted proxy that has connected."""
        self.peer = ""
        """The peer that this connection counts for in the budget of connections."""
        self.proxies: Proxies | None = None
        """Set if a trusted proxy has connected: its requests come from other addresses."""
        self._idle: asyncio.Future[None] | None = None
        self._begun: RawRequestMessage | None = None
        """The request that is being answered directly."""
        self._is_coming = False

    def client_of(self, headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> str:
        """The address of the client of a request with such headers."""
        return (
            self.address if self.proxies is None else self.proxies.client_of(headers, self.address)
        )

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests."""
        waiter, direct = self._waiter, self._direct
        if direct is None or waiter is None or waiter.done():
            super().data_received(data)
            return
        if self._messages and not self._is_coming:
            super().data_received(data)
            return
        self._waiter = None  # or the task would be woken
        try:
            super().data_received(data)
        finally:
            self._waiter = waiter
        if not self._messages or self._is_coming or self._begin(direct, waiter):
            return
        if self._is_soon_whole(direct):
            self._is_coming = True
            self._loop.call_soon(self._look_again, direct, waiter, _TURNS)
        else:
            waiter.set_result(None)

    def _is_soon_whole(self, direct: Direct) -> bool:
        """Whether only the end of a short body is missing of the one request that came."""
        message, content = self._messages[0]
        if (
            len(self._messages) > 1
            or not isinstance(message, RawRequestMessage)
            or content.is_eof()
        ):
            return False
        length = message.headers.get(hdrs.CONTENT_LENGTH, "")
        # The parser has checked that it is a number.
        return bool(length) and int(length) <= direct.bytes_max

    def _look_again(self, direct: Direct, waiter: asyncio.Future[None], turns: int) -> None:
        """Take the request whose body was coming, or leave it to the task that `waiter` wakes."""
        if waiter.done() or self._waiter is not waiter or not self._messages:
            self._is_coming = False  # the connection has ended
        elif turns > 1 and self._is_soon_whole(direct):
            self._loop.call_soon(self._look_again, direct, waiter, turns - 1)
        else:
            self._is_coming = False
            if not self._begin(direct, waiter):
                waiter.set_result(None)

    def _begin(self, direct: Direct, waiter: asyncio.Future[None]) -> bool:
        """Have the one request that came answered directly, if that is possible."""
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
            or not content._buffer  # noqa: SLF001  (reading it would take it from the usual way)
            or self._paused  # the client does not read its answers
            or self._manager is None
        ):
            return False
        self._waiter, self._idle, self._begun = None, waiter, message
        self._request_in_progress = True
        is_taken = False
        try:
            is_taken = direct.begin(message, b"".join(content._buffer), self)  # noqa: SLF001
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
        """Send the answer to the request that was begun; `closes`: and end the connection behind it."""
        waiter, transport = self._idle, self.transport
        assert waiter is not None, "a request is answered once"
        self._idle = self._begun = None
        if transport is not None and not transport.is_closing():
            transport.write(data)
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        if self._force_close or self._close or closes:
            # The task ends as that of an idle connection.
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
