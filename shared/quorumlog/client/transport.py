"""Requests to whichever gateway answers, with retries where these are safe.

A retry is safe for one of two reasons only: the request certainly was not done (`outcome`), or doing it
twice equals doing it once (`is_repeatable`). A connection that breaks after a request was sent says
nothing about the request's outcome.

A gateway that stands still may carry out a request long after another gateway has answered its retry. So all tries of
one call share an `Idempotency-Key`, by which the late one is recognised and not carried out (rule 6a).
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
"""Of both: the next ones take half as much CPU again for a tenth fewer bytes (docs/performance.md)."""
_SHORT_BYTES: Final = 1024
"""Shorter bodies go as they are: a packet carries them anyway."""
_LONG_BYTES: Final = 1 << 20
"""Longer ones are compressed by a thread, so that the event loop goes on meanwhile (some milliseconds)."""


def _packing(coding: object) -> Callable[[bytes], bytes]:
    """What compresses by a content coding. Raises: TypeError, ValueError."""
    if not isinstance(coding, str):
        raise TypeError(f"compression is a str, not {type(coding).__name__}")
    if coding == "gzip":
        return lambda data: zlib.compress(data, _LEVEL, 31)
    if coding != "zstd":
        raise ValueError(f"compression is gzip or zstd, not {coding!r}")
    try:
        from quorumlog.zstd import zstd  # noqa: PLC0415  (Python has it from 3.14 on)
    except ImportError:
        raise ValueError("compression 'zstd' needs: pip install 'quorumlog[zstd]'") from None
    return lambda data: bytes(zstd.compress(data, _LEVEL))


_log = logging.getLogger(__name__)

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0
_CONNECT_S: Final = 5.0
"""A gateway whose machine is gone must not use up the whole deadline (taste)."""
_ATTEMPT_S: Final = 20.0
"""How long one gateway may take for a request that another gateway can serve too: the first one may hang."""

STREAMS_MAX: Final = 32
"""Sockets of one client: a gateway's connections are for all of its clients."""
_SEEN_S: Final = 5.0
"""How long a `Consumers-Version` is sent after it was read: much shorter than gateways remember changes (taste)."""
_CROWDED_S: Final = 10.0
"""For so long after a gateway refused a request as too much, there are no sockets (taste)."""
_CLOSE_S: Final = 1.0
"""How long a gateway may take to say goodbye (taste)."""


class Way(NamedTuple):
    """What a socket is opened with. What is to be sent another way needs another socket."""

    url: str
    token: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """A gateway's answer that is not an error."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body, a JSON object; {} for 204 No Content."""
        parsed: dict[str, Any] = {} if self.status == 204 else orjson.loads(self.body)
        return parsed


class Transport:
    """Connections to the gateways of one cluster.

    Invariant: the gateway `_current` has not failed since it was chosen: a healthy gateway is kept.
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
        """`deadline_s`: for one call with all its retries. `token`: goes with each request; a function is asked for
        each. `context`: of TLS, in place of the system's. `compression`: the content coding of bodies and answers.
        """
        if not urls:
            raise ValueError("a client needs the URL of at least one gateway")
        self._urls = [checks.gateway_url(url) for url in urls]
        self.deadline_s = checks.seconds("deadline_s", deadline_s)
        self._present_token = token if callable(token) else None
        self._headers = {} if token is None or callable(token) else _authorization(token)
        self._pack = None if compression is None else _packing(compression)
        # Said in any case: aiohttp would ask for what it can unpack.
        self._headers["Accept-Encoding"] = compression or "identity"
        self._current = 0
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop
        self._pid: int
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        """Each holds a socket, until it is cancelled."""
        self._crowded_until = 0.0
        self.epochs: dict[tuple[str, str], int] = {}
        """The epochs that ended producers of this client, by path of the log and producer id."""
        self._seen = (0, 0.0)
        """The last `Consumers-Version`, and when it was read."""

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
        """Wait for the work that is under way, or cancel it after an exception. In a forked child: nothing."""
        if os.getpid() != self._pid:
            return
        try:
            if kind is not None:
                self._cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            # Also where the wait itself is cancelled: nothing is sent from here on.
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
        """The event loop of the `async with`, kept: asyncio's own question costs a system call in Python 3.11, more
        than all else that an append does. Raises: ClientClosed.
        """
        self.check_open()
        return self._loop

    def check_open(self) -> None:
        """Raise ClientClosed outside of `async with`, and in a forked child."""
        if self._session is None:
            raise errors.ClientClosed("the client is used inside `with` or `async with` only")
        checks.check_process(self._pid)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in the background; leaving the client waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def has_room(self, now: float) -> bool:
        """Whether sockets may be open now: not for a while after a gateway refused a request, since each socket takes a
        connection, and never with compression, which sockets do not have.
        """
        return self._pack is None and now >= self._crowded_until

    def stream(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run work that holds a socket, until the client ends; None if the client has too many sockets."""
        if len(self._streams) >= STREAMS_MAX:
            work.close()
            return None
        task = self._loop.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return task

    def way(self, headers: Mapping[str, str]) -> Way:
        """How a socket would be opened now. Raises: TypeError, ValueError for a token that can't be sent."""
        token = None if self._present_token is None else checks.token(self._present_token())
        return Way(self._urls[self._current], token, headers)

    @asynccontextmanager
    async def socket(
        self, path: str, way: Way, protocols: Sequence[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a socket for the time of a block. Raises: aiohttp.ClientError, OSError, TimeoutError."""
        assert self._session is not None, "the client is open"
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
        """Send the next request to another gateway: that of a socket has failed."""
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
        """Like `call`, for a request that changes a consumer: it is carried out once (rule 32). Raises: as `request`."""
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
                # No gateway has carried it out, since it named no version.
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
        """Send a request and return the JSON of the answer. `value`: the body, without its None fields."""
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
        """Read a list page by page, and yield the items of each page: the member `kind` of the answer."""
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

        `params`: those that are None are left out. `wait_s`: how long the request asks the server to wait, in
        addition to the deadline. `end`: when the deadline ends, in the event loop's time, where the deadline
        began before this call.
        Raises: a class of `quorumlog.errors`, the server's own or ConnectionLost.
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
        rests_until: dict[int, float] = {}  # as each gateway has asked for (Retry-After)
        while True:
            until = min(end, loop.time() + _ATTEMPT_S + wait_s) if is_repeatable else end
            asked = self._current
            try:
                url = self._urls[asked]
                return await self._once(url, method, path, body, given, sent, until)
            except errors.QuorumLogError as raised:
                # The outcome of a retry says nothing about the tries before it: ExpiredProducer means
                # that this try did nothing, though an earlier one may have appended.
                is_expired = isinstance(raised, errors.ExpiredProducer)
                error = raised.with_outcome(errors.NOT_DONE) if is_expired else raised
                if isinstance(error, errors.Overloaded):
                    self._crowded_until = loop.time() + _CROWDED_S
                may_be_done = may_be_done or (error.outcome == errors.UNKNOWN and method != "GET")
                if error.retryable and asked == self._current:
                    # The next gateway may be able to do what this one can't do now.
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
                text = "%s: %s; tried again for %.0f s"
                _log.log(level, text, error.code, error.detail, left_s, extra={"rest_s": left_s})
                level = logging.INFO
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _packed(self, body: bytes, headers: dict[str, str]) -> bytes:
        """A body as it is sent, and the header of its coding; one that does not shrink goes as it is."""
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
        """Ask one gateway."""
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
            # Every answer of a gateway has a request id. A proxy's blank page or login form is no
            # answer, and must not make a delete count as done.
            raise errors.ConnectionLost(
                f"{url}: something else answers there", outcome=errors.UNKNOWN
            )
        return GatewayAnswer(response.status, response.headers, content)


def _authorization(token: object) -> dict[str, str]:
    """Raises: TypeError, ValueError."""
    return {"Authorization": f"Bearer {checks.token(token)}"}


def _watched() -> aiohttp.TraceConfig:
    """Mark a request's outcome as unknown just before its first byte is sent: a request whose deadline
    ends while it waits for a connection is not done. And follow no redirect of a socket, for which aiohttp has no
    other switch: passwords and tokens would go along.
    """
    config = aiohttp.TraceConfig()

    async def sending(_session: object, context: SimpleNamespace, _headers: object) -> None:
        # A socket's handshake has none.
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
