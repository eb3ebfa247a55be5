"""Appends of a busy handle over one WebSocket, which costs less per request than HTTP.

The socket carries the one request that a handle has under way: the next request waits for the
answer, and no message is sent twice. A request that certainly was not done is sent again over HTTP,
which handles errors, retries and fail-over. If no socket can be opened (because of a proxy, an
older gateway or a limit), the handle uses HTTP.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson

from quorumlog import header
from quorumlog.client.transport import Transport, Way
from quorumlog.errors import NOT_DONE, UNKNOWN, ConnectionLost, QuorumLogError
from quorumlog.wire import problems

MESSAGE_BYTES_MAX: Final = 1 << 19
"""Larger messages use HTTP, which takes less CPU (measured): a WebSocket masks each byte."""
_BUSY_GAP_S: Final = 0.25
_BUSY_REQUESTS: Final = 16
"""A handle is busy after this many requests with gaps up to `_BUSY_GAP_S` (by judgement)."""
_IDLE_S: Final = 5.0
"""A socket unused for this long is closed (chosen by judgement). Gateways ping after 20 s."""
_REST_S: Final = 10.0
"""How long a handle uses only HTTP after a socket has failed (chosen by judgement)."""


class AppendStream:
    """The socket of one handle, while the handle is busy.

    Invariants: one message is under way at a time. A socket carries no further message after the
    client abandoned a message, or after the socket received anything but the expected answer.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        """`path`: the path of the socket in the API."""
        self._transport, self._path = transport, path
        self._loop: asyncio.AbstractEventLoop
        self._way: Way
        """The URL, token and headers of the current socket."""
        self._work: asyncio.Task[None] | None = None
        """The task that opens the socket and reads from it."""
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._answer: asyncio.Future[str | None] | None = None
        """The answer to the message under way. None means that the connection is lost."""
        self._used_at = self._rests_until = 0.0
        self._count = 0
        """Number of requests in close succession."""

    def is_ready(self, headers: Mapping[str, str]) -> bool:
        """Whether `send` can carry an append with these headers over the socket, instead of HTTP.
        Call this before each request: it begins to open a socket if the handle is busy.
        """
        now = self._transport.loop.time()
        gap_s, self._used_at = now - self._used_at, now
        if self._work is None:
            self._count = self._count + 1 if gap_s <= _BUSY_GAP_S else 1
            is_busy = self._count >= _BUSY_REQUESTS
            if is_busy and now >= self._rests_until and self._transport.has_room(now):
                self._begin(headers)
        elif self._way != self._transport.way(headers) or not self._transport.has_room(now):
            # The gateway, token or password has changed since the socket was opened.
            self._end()
        return self._socket is not None

    def _begin(self, headers: Mapping[str, str]) -> None:
        self._loop, self._way = self._transport.loop, self._transport.way(headers)
        self._work = self._transport.stream(self._serve(self._way))
        if self._work is not None:
            # A callback, not a `finally`: a task cancelled before its first step runs no code.
            self._work.add_done_callback(self._ended)
            self._watch(self._work)

    async def send(
        self, message: bytes, end: float, *, is_text: bool = False
    ) -> dict[str, Any] | None:
        """Send an append and return its answer, as HTTP would. None means that the gateway did
        nothing: send the append over HTTP.

        `end`: the end of the deadline, in the event loop's time. Raises: QuorumLogError, with the
        outcome unknown.
        """
        assert self._socket is not None, "the socket must be open: call is_ready first"
        if len(message) > MESSAGE_BYTES_MAX:
            return None
        self._answer = answer = self._loop.create_future()
        try:
            async with asyncio.timeout_at(end):
                if is_text:
                    await self._socket.send_str(message.decode())
                else:
                    await self._socket.send_bytes(message)
                reported = await answer
            return _shown(reported)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._give_up(is_away=True)
            detail = f"{self._way.url}: {type(error).__name__} {error}".rstrip()
            raise ConnectionLost(detail, outcome=UNKNOWN) from error
        except QuorumLogError as error:
            is_done = error.outcome != NOT_DONE
            self._give_up(is_away=is_done and error.retryable)
            if is_done:
                raise
            return None
        except BaseException:
            self._give_up(is_away=False)
            raise
        finally:
            self._answer = None

    async def _serve(self, way: Way) -> None:
        """Open a socket, and deliver the messages that it receives until the socket ends."""
        try:
            async with self._transport.socket(
                self._path, way, (header.APPENDS_PROTOCOL,)
            ) as socket:
                if (
                    socket.protocol == header.APPENDS_PROTOCOL
                    and self._work is asyncio.current_task()
                ):
                    self._socket = socket
                    await self._receive(socket)
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass  # the handle continues over HTTP, which reports the error

    def _ended(self, work: "asyncio.Task[None]") -> None:
        if self._work is work:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)
            self._give_up(is_away=False)

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            answer = self._answer
            if message.type is not aiohttp.WSMsgType.TEXT or answer is None or answer.done():
                return
            answer.set_result(message.data)

    def _watch(self, work: "asyncio.Task[None]") -> None:
        """End a socket that was unused for `_IDLE_S`."""
        if self._work is not work:
            return
        rest_s = self._used_at + _IDLE_S - self._loop.time()
        if rest_s <= 0 and self._answer is None:
            self._end()
        else:
            self._loop.call_later(max(rest_s, _IDLE_S / 2), self._watch, work)

    def _give_up(self, *, is_away: bool) -> None:
        """End the socket after a failure. `is_away`: whether the gateway failed."""
        self._rests_until = self._loop.time() + _REST_S
        if is_away:
            self._transport.failed(self._way)
        self._end()

    def _end(self) -> None:
        work, self._work, self._socket, self._count = self._work, None, None, 0
        if work is not None:
            work.cancel()


def _shown(reported: str | None) -> dict[str, Any]:
    """Parse an answer of a socket. Raises: QuorumLogError if the answer is an error or malformed."""
    if reported is None:
        raise ConnectionLost("the WebSocket was closed during an append", outcome=UNKNOWN)
    try:
        shown = orjson.loads(reported)
    except orjson.JSONDecodeError:
        shown = None
    if not isinstance(shown, dict):
        raise ConnectionLost("the answer on the WebSocket is not a JSON object", outcome=UNKNOWN)
    if "code" in shown:
        raise problems.from_document(shown)
    return shown
