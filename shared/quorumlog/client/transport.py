"""Requests to whichever gateway answers, sent again where that is safe.

Whether a request may be sent again is decided by two things only: whether it certainly was not
done (`outcome`), or whether doing it twice is the same as once (`is_repeatable`). A connection that
breaks after a request left is no knowledge of what became of it.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import aiohttp
import orjson

from quorumlog.errors import NOT_DONE, QuorumLogError
from quorumlog.wire import problems

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0


class ConnectionLost(QuorumLogError):
    """No gateway could be reached (not-done), or the connection broke under a request (unknown)."""

    title = "The connection to the gateway is lost"
    retryable = True
    status = 503

    def __init__(self, detail: str, **members: Any) -> None:
        super().__init__(detail, **members)
        # Not a code of the HTTP API, and so not in its table.
        self.code = "connection-lost"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is no error."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)


class Transport:
    """Connections to the gateways of one cluster.

    Invariant: `_current` is the gateway that answered last, so that a healthy one is kept.
    """

    def __init__(self, urls: Sequence[str], *, deadline_s: float) -> None:
        """`deadline_s`: for one call with all its repetitions."""
        if not urls:
            raise ValueError("a client needs the URL of at least one gateway")
        self._urls = [url.rstrip("/") for url in urls]
        self._deadline_s = deadline_s
        self._current = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

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
    ) -> Answer:
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
        while True:
            try:
                return await self._once(method, path, body, params, sent, end)
            except QuorumLogError as error:
                may_repeat = error.retryable and (is_repeatable or error.outcome == NOT_DONE)
                rest_s = max(pause_s * random.uniform(0.5, 1), error.retry_after_s or 0)  # noqa: S311
                if not may_repeat or loop.time() + rest_s >= end:
                    raise
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        params: Mapping[str, str | int] | None,
        headers: Mapping[str, str],
        end: float,
    ) -> Answer:
        """Ask one gateway; one that can't be reached hands over to the next."""
        assert self._session is not None, "use the client in `async with`"
        url = self._urls[self._current]
        try:
            async with (
                asyncio.timeout_at(end),
                self._session.request(
                    method, url + path, data=body, params=params, headers=headers
                ) as response,
            ):
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            self._turn()
            raise ConnectionLost(f"{url}: {error}", outcome=NOT_DONE) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            self._turn()
            raise ConnectionLost(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        if response.status >= 400:
            raise problems.from_answer(response.status, content, response.headers)
        return Answer(response.status, response.headers, content)

    def _turn(self) -> None:
        self._current = (self._current + 1) % len(self._urls)
