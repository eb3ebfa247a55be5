"""A client of the Durable Streams protocol that repeats what it may, as a proxy: tests that know of no kills pass through it.

A request is sent again, to another gateway, after a broken connection and after 429, 503 and 504. What was perhaps
done is told as it was then: a creation that a repeat finds done is 201, a deletion 204, an acknowledged wake 200. An append without a producer can't
be repeated, so the proxy sends it as the first request of a producer of its own. Events go on where they broke off.
"""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote
from uuid import uuid4

import aiohttp
from aiohttp import web
from yarl import URL

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from loadtest.produce import Plan, kill_in_turn
from quorumlog import header
from tests.outside.conformance.appends import Appends

PATIENCE_S: Final = 45.0
"""For one request: then its last answer is the answer."""
_ATTEMPT_S: Final = 75.0
"""For one attempt: a long poll takes 20 s."""
_PAUSE_S: Final = 0.1
_EVERY_S: Final = 5.0
"""Between deaths: each fourth one is the same gateway's, which must live for a long poll meanwhile."""
_AGAIN: Final = (429, 503, 504)
_HOP: Final = frozenset(
    ("host", "connection", "keep-alive", "content-length", "transfer-encoding", "expect", "date", "server")
)  # fmt: skip
_PRODUCER: Final = (header.PRODUCER_ID, header.PRODUCER_EPOCH, header.PRODUCER_SEQ)
_CONTROL: Final = "/v1/stream/__ds/"
"""Where subscriptions are."""
_OFFSET: Final = re.compile(r"(?<=[?&])offset=[^&]*")
_EVENTS_S: Final = 50.0
"""Events that end earlier, and not with the stream, broke off."""


@dataclass(slots=True)
class _Call:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    is_doubtful: bool = False
    """Whether an attempt was perhaps done that has no answer."""
    gateway: str | None = None
    """To which all attempts go; None: to each in turn. A long poll lasts nearly as long as a gateway lives here, and the
    one that has just come back lives longest.
    """

    @property
    def path(self) -> str:
        """The stream."""
        return unquote(self.target.partition("?")[0])


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Repeats:
    """The proxy, in front of these gateways. `appends` is what was acknowledged through it."""

    def __init__(self, gateways: Sequence[str]) -> None:
        """Listens from the beginning of the block on."""
        self._turns = itertools.cycle(gateways)
        self.appends = Appends()
        self.url = ""
        self._exist: set[str] = set()
        """The streams that are there, as far as answers have told."""
        self._taken: set[tuple[str, ...]] = set()
        """Requests of producers that were acknowledged."""

    async def __aenter__(self) -> Self:
        """Listen."""
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(total=_ATTEMPT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None))
        await self._runner.setup()
        port = free_ports(1)[0]
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Listen no more."""
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        call = _Call(request.method, request.raw_path, headers, await request.read())
        if call.path.startswith(_CONTROL):
            call.headers["Host"] = request.headers["Host"]  # callbacks come to this proxy too
            answer = await self._controlled(call)
            return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
        if call.method == "GET" and request.query.get("live") == "sse":
            return await self._events(request, call)
        match call.method:
            case "PUT":
                answer = await self._create(call)
            case "POST":
                answer = await self._append(call)
            case "DELETE":
                answer = await self._delete(call)
            case _:
                if request.query.get("live") == "long-poll":
                    call.gateway = next(self._turns)
                answer = await self._settled(call)
        body = None if call.method == "HEAD" else answer.body
        return web.Response(status=answer.status, headers=answer.headers, body=body)

    # --- attempts --------------------------------------------------------------------------------

    async def _settled(self, call: _Call) -> _Answer:
        """The first answer that is no request to come again."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + PATIENCE_S
        while True:
            answer = await self._attempt(call)
            if answer is not None and answer.status not in _AGAIN:
                return answer
            if loop.time() >= end_s:
                return answer or _Answer(502, {}, b"no gateway answers")
            await asyncio.sleep(_PAUSE_S)

    async def _attempt(self, call: _Call) -> _Answer | None:
        """The answer of one gateway, if it gives one."""
        try:
            async with self._sent(call) as response:
                body = await response.read()
                answer = _Answer(response.status, _passed_on(response), body)
        except aiohttp.ClientConnectorError:
            return None
        except (aiohttp.ClientError, OSError, TimeoutError):
            call.is_doubtful = True
            return None
        if answer.status in _AGAIN and b'"unknown"' in body:
            call.is_doubtful = True
        return answer

    def _sent(self, call: _Call) -> "aiohttp.client._RequestContextManager":
        url = URL((call.gateway or next(self._turns)) + call.target, encoded=True)
        # A connection that a killed process leaves must not meet the next request.
        headers = {**call.headers, "Connection": "close"}
        return self._session.request(call.method, url, headers=headers, data=call.body or None)

    # --- what changes a stream -------------------------------------------------------------------

    async def _create(self, call: _Call) -> _Answer:
        was_there = call.path in self._exist
        answer = await self._settled(call)
        if answer.status == 200 and call.is_doubtful and not was_there:
            found = {**answer.headers, "Location": self.url + call.target}
            answer = _Answer(201, found, answer.body)
        if answer.status == 201:
            self.appends.created(call.path, call.headers, answer.headers, call.body)
        if answer.status in (200, 201):
            self._exist.add(call.path)
        return answer

    async def _delete(self, call: _Call) -> _Answer:
        was_there = call.path in self._exist
        self.appends.deleted(call.path)
        answer = await self._settled(call)
        self._exist.discard(call.path)
        if answer.status == 404 and call.is_doubtful and was_there:
            return _Answer(204, {"Cache-Control": "no-store"})
        return answer

    async def _append(self, call: _Call) -> _Answer:
        names = {name.lower() for name in call.headers}
        is_whole = all(name.lower() in names for name in _PRODUCER)
        is_ours = bool(call.body) and not any(name.lower() in names for name in _PRODUCER)
        if is_ours:
            ours = dict(zip(_PRODUCER, (f"proxy-{uuid4()}", "0", "0"), strict=True))
            # Unlike the suite the proxy has thousands of producers, and a stream remembers some of them.
            since = {header.PRODUCER_SINCE: str(self.appends.end(call.path))}
            call.headers = {**call.headers, **ours, **since}
        answer = await self._settled(call)
        if is_ours:
            answer = _without_producer(answer)
        elif is_whole:
            answer = self._told_first(call, answer)
        if answer.status in (200, 204) and call.body:
            is_repeat = is_whole and answer.status == 204
            if not is_repeat:
                end = int(_value(answer.headers, "Stream-Next-Offset").partition("_")[0])
                self.appends.acknowledged(call.path, end, call.body)
        return answer

    def _told_first(self, call: _Call, answer: _Answer) -> _Answer:
        """A request that was done, and whose first answer is a repeat's, has the first one's status."""
        key = (call.path, *(_value(call.headers, name) for name in _PRODUCER))
        is_known, is_done = key in self._taken, answer.status in (200, 204)
        if is_done:
            self._taken.add(key)
        if answer.status == 204 and call.body and call.is_doubtful and not is_known:
            return _Answer(200, answer.headers, answer.body)
        return answer

    async def _controlled(self, call: _Call) -> _Answer:
        """The answer to a request for a subscription."""
        was_there = call.path in self._exist
        answer = await self._settled(call)
        if call.method == "PUT" and answer.status in (200, 201):
            self._exist.add(call.path)
            if call.is_doubtful and not was_there:
                return _Answer(201, answer.headers, answer.body)
        if call.is_doubtful and answer.status == 409 and b'"FENCED"' in answer.body:
            return _Answer(200, answer.headers, b'{"ok":true,"next_wake":false}')
        return answer

    # --- events ----------------------------------------------------------------------------------

    async def _events(self, request: web.BaseRequest, call: _Call) -> web.StreamResponse:
        """Events, each part of them with the place after it, from whichever gateway goes on with them."""
        loop = asyncio.get_running_loop()
        began_s, sent = loop.time(), None
        while True:
            try:
                async with self._sent(call) as upstream:
                    is_again = upstream.status in _AGAIN
                    if sent is None and upstream.status != 200 and not is_again:
                        body = await upstream.read()
                        return web.Response(
                            status=upstream.status, headers=_passed_on(upstream), body=body
                        )
                    if upstream.status == 200:
                        if sent is None:
                            sent = web.StreamResponse(headers=_passed_on(upstream))
                            await sent.prepare(request)
                        if await self._forwarded(upstream, sent, call):
                            break
                    elif not is_again:
                        break
            except (aiohttp.ClientError, OSError, TimeoutError):
                if request.transport is None or request.transport.is_closing():
                    break  # nobody reads any more
            if loop.time() - began_s >= _EVENTS_S:
                break
            await asyncio.sleep(_PAUSE_S)
        if sent is None:
            return web.Response(status=503)
        with contextlib.suppress(aiohttp.ClientConnectionResetError):
            await sent.write_eof()
        return sent

    async def _forwarded(
        self, upstream: aiohttp.ClientResponse, sent: web.StreamResponse, call: _Call
    ) -> bool:
        """Pass events on up to each place that they tell; returns whether they have come to the stream's end."""
        unread, parts = b"", list[bytes]()
        async for data in upstream.content.iter_any():
            *events, unread = (unread + data).split(b"\n\n")
            for event in events:
                parts.append(event + b"\n\n")
                place = _place_of(event)
                if place is None and not event.startswith(b":"):
                    continue
                await sent.write(b"".join(parts))
                parts.clear()
                if place is not None:
                    offset, is_closed = place
                    call.target = _OFFSET.sub(f"offset={offset}", call.target)
                    if is_closed:
                        return True
        return False


def _place_of(event: bytes) -> tuple[str, bool] | None:
    """The offset that a control event tells, and whether the stream ends there."""
    lines = event.splitlines()
    if b"event: control" not in lines:
        return None
    control = json.loads(b"".join(line[5:] for line in lines if line.startswith(b"data:")))
    return control["streamNextOffset"], control.get("streamClosed") is True


def _passed_on(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.lower() not in _HOP}


def _value(headers: Mapping[str, str], name: str) -> str:
    return next(value for key, value in headers.items() if key.lower() == name.lower())


def _without_producer(answer: _Answer) -> _Answer:
    """As an append without a producer is answered."""
    kept = {
        name: value
        for name, value in answer.headers.items()
        if not name.lower().startswith("producer-")
    }
    return _Answer(204 if answer.status == 200 else answer.status, kept, answer.body)


@asynccontextmanager
async def killing(cluster: Cluster, plan: Plan | None = None) -> AsyncIterator[list[str]]:
    """A block in which one process after another is killed and started again; who was killed, so far."""
    kills: list[str] = []
    over = asyncio.Event()
    killer = asyncio.create_task(
        kill_in_turn(cluster, plan or Plan(every_s=_EVERY_S), lambda _line: None, kills, over)
    )
    try:
        yield kills
    finally:
        over.set()
        await killer
