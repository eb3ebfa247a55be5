"""Requests to whichever gateway answers, sent again where that is safe.

Whether a request may be sent again is decided by two things only: whether it certainly was not
done (`outcome`), or whether doing it twice is the same as once (`is_repeatable`). A connection that
breaks after a request left is no knowledge of what became of it.
"""

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Self

import aiohttp
import orjson

from quorumlog import header
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    ConnectionLost,
    ExpiredProducer,
    QuorumLogError,
)
from quorumlog.wire import problems

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0
_CONNECT_S: Final = 5.0
"""A gateway's machine that is gone must not cost the whole deadline (taste)."""
_ATTEMPT_S: Final = 20.0
"""So long one gateway may take for what another may be asked as well: it may hang."""


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """An answer that is no error."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)


class Transport:
    """Connections to the gateways of one cluster.

    Invariant: `_current` is a gateway that did not fail since it was chosen: a healthy one is kept.
    """

    def __init__(self, urls: Sequence[str], *, deadline_s: float) -> None:
        """`deadline_s`: for one call with all its repetitions."""
        if not urls:
            raise ValueError("a client needs the URL of at least one gateway")
        self._urls = [url.rstrip("/") for url in urls]
        self._deadline_s = deadline_s
        self._current = 0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            trace_configs=[_tells_of_sending()],
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """Wait for what is under way; after an exception end it instead."""
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside the caller; the client's end waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def request(
        self,
        method: str,
        path: str,
        *,
        is_repeatable: bool,
        body: bytes | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> GatewayAnswer:
        """Send a request until it is answered for good.

        `wait_s` is how long the server was asked to wait; it does not count.
        Raises: a class of `quorumlog.errors`, the server's own or ConnectionLost.
        """
        sent = {**(headers or {})}
        if body is not None:
            sent["Content-Type"] = content_type
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline_s + wait_s
        pause_s = _BACKOFF_FIRST_S
        may_be_done = False
        while True:
            until = min(end, loop.time() + _ATTEMPT_S + wait_s) if is_repeatable else end
            asked = self._current
            try:
                url = self._urls[asked]
                return await self._once(url, method, path, body, params, sent, until)
            except QuorumLogError as raised:
                # What becomes of a repetition says nothing of the tries before it. A request of a
                # producer that is not known any more did nothing now; its tries before may have.
                is_expired = isinstance(raised, ExpiredProducer)
                error = raised.with_outcome(NOT_DONE) if is_expired else raised
                may_be_done = may_be_done or (error.outcome == UNKNOWN and method != "GET")
                if error.retryable and asked == self._current:
                    # What can't be done at one gateway now may be possible at the next.
                    self._current = (asked + 1) % len(self._urls)
                may_repeat = error.retryable and (is_repeatable or error.outcome == NOT_DONE)
                rest_s = max(pause_s * random.uniform(0.5, 1), error.retry_after_s or 0)  # noqa: S311
                if not may_repeat or loop.time() + rest_s >= end:
                    told = error.with_outcome(UNKNOWN) if may_be_done else error
                    if told.outcome == raised.outcome:
                        raise
                    raise told from raised
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _once(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None,
        params: Mapping[str, str | int] | None,
        headers: Mapping[str, str],
        end: float,
    ) -> GatewayAnswer:
        """Ask one gateway."""
        assert self._session is not None, "use the client in `async with`"
        told = SimpleNamespace(outcome=NOT_DONE)
        try:
            async with (
                asyncio.timeout_at(end),
                self._session.request(
                    method,
                    url + path,
                    data=body,
                    params=params,
                    headers=headers,
                    trace_request_ctx=told,
                ) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ConnectionLost(f"{url}: {error}", outcome=NOT_DONE) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            detail = f"{url}: {type(error).__name__} {error}".rstrip()
            raise ConnectionLost(detail, outcome=told.outcome) from error
        if response.status >= 400:
            raise problems.from_answer(response.status, content, response.headers)
        if (
            header.REQUEST_ID not in response.headers
            and response.content_type != "application/json"
        ):
            # Every answer of a gateway has one; a proxy's blank page or login form is no answer, and
            # a delete must not count as done by it.
            raise ConnectionLost(f"{url}: something else answers there", outcome=UNKNOWN)
        return GatewayAnswer(response.status, response.headers, content)


def _tells_of_sending() -> aiohttp.TraceConfig:
    """Has a request say that its outcome is unknown, just before its first byte goes out: a deadline
    that ends the wait for a connection leaves it not done.
    """
    config = aiohttp.TraceConfig()

    async def sending(_session: object, context: SimpleNamespace, _headers: object) -> None:
        context.trace_request_ctx.outcome = UNKNOWN

    config.on_request_headers_sent.append(sending)
    return config
