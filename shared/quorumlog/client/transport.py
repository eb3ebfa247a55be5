"""Sends requests to a gateway that responds, with retries where a retry is safe.

A retry is safe for one of two reasons only: the request certainly was not done (`outcome`), or
doing it twice has the same effect as doing it once (`is_repeatable`). A connection that breaks
after a request was sent says nothing about the request's outcome.

A gateway that hangs may carry out a request long after another gateway has answered its retry. So
all attempts of one call share an `Idempotency-Key`, by which the cluster recognises the late copy
and drops it (rule 6a).
"""

import asyncio
import logging
import os
import random
import ssl
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Self

import aiohttp
import orjson

from quorumlog import errors, header
from quorumlog.client import checks
from quorumlog.wire import problems
from quorumlog.wire.outgoing import outgoing

_LEVEL: Final = 1
"""Level of gzip and zstd: level 2 takes 50 % more CPU to save another 10 % (docs/internals/performance.md)."""
_SHORT_BYTES: Final = 1024
"""Shorter bodies are sent uncompressed, because they fit into one packet anyway."""
_LONG_BYTES: Final = 1 << 20
"""Longer bodies are compressed in a thread: compression would block the event loop for milliseconds."""


def _packing(coding: object) -> Callable[[bytes], bytes]:
    """The function that compresses bodies with a content coding. Raises: TypeError, ValueError."""
    if not isinstance(coding, str):
        raise TypeError(f"compression must be a str, not {type(coding).__name__}")
    if coding == "gzip":
        return lambda data: zlib.compress(data, _LEVEL, 31)
    if coding != "zstd":
        raise ValueError(f"compression must be gzip or zstd, not {coding!r}")
    try:
        from quorumlog.zstd import zstd  # noqa: PLC0415  (Python has it from 3.14 on)
    except ImportError:
        raise ValueError("compression 'zstd' needs: pip install 'quorumlog[zstd]'") from None
    return lambda data: bytes(zstd.compress(data, _LEVEL))


_log = logging.getLogger(__name__)

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0
_CONNECT_S: Final = 5.0
"""Connect timeout, so that a dead machine does not use up the deadline (chosen by judgement)."""
_ATTEMPT_S: Final = 20.0
"""How long one gateway may take for a repeatable request before the client tries the next gateway."""

STREAMS_MAX: Final = 32
"""Maximum WebSockets of one client, since clients share a gateway's connection limit."""
_SEEN_S: Final = 5.0
"""How long requests carry a received `Consumers-Version`. Gateways store changes much longer."""
_CROWDED_S: Final = 10.0
"""How long the client opens no sockets after an overload error (chosen by judgement)."""
_CLOSE_S: Final = 1.0
"""How long a gateway may take for the closing handshake of a socket (chosen by judgement)."""


class Way(NamedTuple):
    """The URL, token and headers of a socket. If any value changes, a new socket is needed."""

    url: str
    token: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """A gateway's successful response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The JSON object in the body; {} for 204 No Content."""
        parsed: dict[str, Any] = {} if self.status == 204 else orjson.loads(self.body)
        return parsed


class Transport:
    """Connections to the gateways of one cluster.

    Invariant: the gateway `_current` has not failed since it was chosen; the client stays with a
    healthy gateway.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadline_s: float,
        token: str | Callable[[], str] | None = None,
        context: ssl.SSLContext | None = None,
        compression: str | None = None,
    ) -> None:
        """`deadline_s`: seconds for one call with all its retries. `token`: an access token, or a
        function that is called for each request. `context`: replaces the system's TLS context.
        `compression`: content coding of all bodies.
        """
        if not urls:
            raise ValueError("a client needs the URL of at least one gateway")
        self._urls = [checks.gateway_url(url) for url in urls]
        self.deadline_s = checks.seconds("deadline_s", deadline_s)
        self._present_token = token if callable(token) else None
        self._headers = {} if token is None or callable(token) else _authorization(token)
        self._pack = None if compression is None else _packing(compression)
        # Always set: otherwise aiohttp would request every coding that it can decompress.
        self._headers["Accept-Encoding"] = compression or "identity"
        self._current = 0
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop
        self._pid: int
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        """Tasks that each keep a socket open until they are cancelled."""
        self._crowded_until = 0.0
        self.epochs: dict[tuple[str, str], int] = {}
        """Epochs that fenced this client's producers, by log path and producer id."""
        self._seen = (0, 0.0)
        """The last `Consumers-Version`, and the time of its response."""

    async def __aenter__(self) -> Self:
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, ssl=self._context or True),
            headers=self._headers,
            trace_configs=[_watched()],
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """Wait for work under way, or cancel it after an exception. No effect in a forked child."""
        if os.getpid() != self._pid:
            return
        try:
            if kind is not None:
                self._cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            # Runs even if the wait is cancelled, because nothing may be sent from here on.
            self._cancel()
            session, self._session = self._session, None
            try:
                for stream in (streams := tuple(self._streams)):
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
            finally:
                if session is not None:
                    await session.close()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The cached event loop of the `async with` block. In Python 3.11 `get_running_loop` makes a
        system call, which costs more than the rest of an append. Raises: ClientClosed.
        """
        self.check_open()
        return self._loop

    def check_open(self) -> None:
        """Raise ClientClosed outside of the `async with` block, and in a forked child."""
        if self._session is None:
            raise errors.ClientClosed(
                "the client is not open: use it inside `with` or `async with`"
            )
        checks.check_process(self._pid)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in the background. The end of the client's `async with` block waits for the work."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def has_room(self, now: float) -> bool:
        """Whether sockets may be open now. Sockets do not support compression. After a gateway has
        rejected a request because of overload, the client opens no sockets for some seconds,
        because each socket takes a connection.
        """
        return self._pack is None and now >= self._crowded_until

    def stream(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run work that keeps a socket open until the client ends; None if there are too many sockets."""
        if len(self._streams) >= STREAMS_MAX:
            work.close()
            return None
        task = self._loop.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return task

    def way(self, headers: Mapping[str, str]) -> Way:
        """The parameters of a new socket. Raises: TypeError, ValueError for an unusable token."""
        token = None if self._present_token is None else checks.token(self._present_token())
        return Way(self._urls[self._current], token, headers)

    @asynccontextmanager
    async def socket(
        self, path: str, way: Way, protocols: Sequence[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A socket, open during the block. Raises: aiohttp.ClientError, OSError, TimeoutError."""
        assert self._session is not None, "the client must be open"
        headers = {**way.headers, **({} if way.token is None else _authorization(way.token))}
        async with asyncio.timeout(_CONNECT_S):
            socket = await self._session.ws_connect(
                way.url + path,
                headers=headers,
                protocols=protocols,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
            )
        async with socket:
            yield socket

    def failed(self, way: Way) -> None:
        """Handle the failure of a socket's gateway: the next request goes to another gateway."""
        if way.url == self._urls[self._current]:
            self._current = (self._current + 1) % len(self._urls)

    async def change_consumer(
        self,
        method: str,
        path: str,
        value: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Like `call`, for a change of a consumer. The change is applied only once (rule 32).

        Raises: as `request`.
        """
        body = None if value is None else checks.json_of(value)
        end = self.loop.time() + self.deadline_s
        while True:
            version, read_s = self._seen
            if self.loop.time() > read_s + _SEEN_S:
                version = 0
            sent = {**(headers or {}), header.CONSUMERS_VERSION: str(version)}
            try:
                answer = await self.request(
                    method, path, body=body, headers=sent, is_repeatable=True, end=end
                )
            except errors.RequestOutdated as error:
                if version:
                    raise
                # No gateway carries out a request without a version, so a retry is safe.
                self._seen = int(error.members["version"]), self.loop.time()
            else:
                if seen := int(answer.headers.get(header.CONSUMERS_VERSION, 0)):
                    self._seen = max(self._seen[0], seen), self.loop.time()
                return answer.json()

    async def call(
        self,
        method: str,
        path: str,
        value: Mapping[str, Any] | None = None,
        *,
        is_repeatable: bool = True,
        params: Mapping[str, str | int | None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of the response.

        `value`: the body; fields that are None are left out.
        """
        answer = await self.request(
            method,
            path,
            body=None if value is None else checks.json_of(value),
            params=params,
            headers=headers,
            is_repeatable=is_repeatable,
        )
        return answer.json()

    async def pages(
        self, path: str, kind: str, params: Mapping[str, str | int | None]
    ) -> AsyncGenerator[Sequence[dict[str, Any]], None]:
        """Read a list page by page, and yield each page's items (its member `kind`)."""
        after: str | int | None = None
        while True:
            page = await self.call("GET", path, params={**params, "after": after})
            yield page[kind]
            after = page["next"]
            if after is None:
                return

    async def request(
        self,
        method: str,
        path: str,
        *,
        is_repeatable: bool,
        body: bytes | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str | int | None] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        end: float | None = None,
    ) -> GatewayAnswer:
        """Send a request, with safe retries, until there is a final answer.

        `params`: parameters that are None are left out. `wait_s`: how long the server may wait at a
        tail, in addition to the deadline. `end`: the end of a deadline that began before this call,
        in the event loop's time. Raises: a class of `quorumlog.errors`: the server's error or
        ConnectionLost.
        """
        sent = {**(headers or {})}
        given = {name: value for name, value in (params or {}).items() if value is not None}
        if is_repeatable and method != "GET" and header.PRODUCER_ID not in sent:
            sent.setdefault(header.IDEMPOTENCY_KEY, uuid.uuid4().hex)
        if body is not None:
            sent["Content-Type"] = content_type
            body = await self._packed(body, sent)
        loop = asyncio.get_running_loop()
        if end is None:
            end = loop.time() + self.deadline_s + wait_s
        pause_s = _BACKOFF_FIRST_S
        may_be_done, level = False, logging.WARNING
        rests_until: dict[int, float] = {}  # when each gateway may get a retry (Retry-After)
        while True:
            until = min(end, loop.time() + _ATTEMPT_S + wait_s) if is_repeatable else end
            asked = self._current
            try:
                url = self._urls[asked]
                return await self._once(url, method, path, body, given, sent, until)
            except errors.QuorumLogError as raised:
                # The outcome of a retry says nothing about earlier attempts: ExpiredProducer means
                # that this attempt did nothing, though an earlier attempt may have appended.
                is_expired = isinstance(raised, errors.ExpiredProducer)
                error = raised.with_outcome(errors.NOT_DONE) if is_expired else raised
                if isinstance(error, errors.Overloaded):
                    self._crowded_until = loop.time() + _CROWDED_S
                may_be_done = may_be_done or (error.outcome == errors.UNKNOWN and method != "GET")
                if error.retryable and asked == self._current:
                    # The next gateway may be able to serve a request that this gateway can't serve now.
                    self._current = (asked + 1) % len(self._urls)
                may_repeat = error.retryable and (is_repeatable or error.outcome == errors.NOT_DONE)
                rests_until[asked] = loop.time() + (error.retry_after_s or 0)
                rest_s = max(
                    pause_s * random.uniform(0.5, 1),  # noqa: S311
                    rests_until.get(self._current, 0.0) - loop.time(),
                )
                if not may_repeat or loop.time() + rest_s >= end:
                    final = error.with_outcome(errors.UNKNOWN) if may_be_done else error
                    if final.outcome == raised.outcome:
                        raise
                    raise final from raised
                left_s = end - loop.time()
                text = "%s: %s; retrying for %.0f s"
                _log.log(level, text, error.code, error.detail, left_s, extra={"rest_s": left_s})
                level = logging.INFO
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _packed(self, body: bytes, headers: dict[str, str]) -> bytes:
        """Compress a body and add Content-Encoding, unless the body would not shrink."""
        if self._pack is None or len(body) < _SHORT_BYTES:
            return body
        is_long = len(body) > _LONG_BYTES
        packed = await asyncio.to_thread(self._pack, body) if is_long else self._pack(body)
        if len(packed) >= len(body):
            return body
        headers["Content-Encoding"] = self._headers["Accept-Encoding"]
        return packed

    async def _once(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None,
        params: Mapping[str, str | int],
        headers: Mapping[str, str],
        end: float,
    ) -> GatewayAnswer:
        """Send a request to one gateway, without retries."""
        self.check_open()
        assert self._session is not None
        if self._present_token is not None:
            headers = {**headers, **_authorization(self._present_token())}
        sent = SimpleNamespace(outcome=errors.NOT_DONE)
        try:
            async with (
                asyncio.timeout_at(end),
                self._session.request(
                    method,
                    url + path,
                    data=outgoing(body),
                    params=params,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=sent,
                ) as response,
            ):
                content = await response.read()
        except aiohttp.ClientConnectorCertificateError as error:
            raise errors.UntrustedServer(f"{url}: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise errors.ConnectionLost(f"{url}: {error}", outcome=errors.NOT_DONE) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            detail = f"{url}: {type(error).__name__} {error}".rstrip()
            raise errors.ConnectionLost(detail, outcome=sent.outcome) from error
        if response.status >= 300:
            raise problems.from_answer(response.status, content, response.headers, url)
        if (
            header.REQUEST_ID not in response.headers
            and response.content_type != "application/json"
        ):
            # Every response of a gateway has a request id. A proxy's blank page or login form has
            # no such id, and must not make a delete count as done.
            raise errors.ConnectionLost(
                f"{url}: the response is not from a gateway: check the URL", outcome=errors.UNKNOWN
            )
        return GatewayAnswer(response.status, response.headers, content)


def _authorization(token: object) -> dict[str, str]:
    """The header with an access token. Raises: TypeError, ValueError."""
    return {"Authorization": f"Bearer {checks.token(token)}"}


def _watched() -> aiohttp.TraceConfig:
    """Mark a request's outcome as unknown just before its first byte is sent: a request whose
    deadline ends while it waits for a connection is certainly not done. Also reject redirects of
    WebSockets, because the new address would receive the password and token (no option disables them).
    """
    config = aiohttp.TraceConfig()

    async def sending(_session: object, context: SimpleNamespace, _headers: object) -> None:
        # The handshake of a WebSocket has no `trace_request_ctx`.
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.outcome = errors.UNKNOWN

    async def redirected(
        _session: object, _context: object, found: aiohttp.TraceRequestRedirectParams
    ) -> None:
        answer = found.response
        answer.close()
        raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status)

    config.on_request_headers_sent.append(sending)
    config.on_request_redirect.append(redirected)
    return config
