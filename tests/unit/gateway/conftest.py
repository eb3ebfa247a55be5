"""A gateway's edge on a real socket, with an engine in memory behind it."""

import contextlib
import functools
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

from loadtest.ports import free_ports
from quorumlog.net import service
from quorumlog.net.connections import Listener, ListenLimits
from quorumlog.net.listen import listening
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import DEADLINE_S, until, within
from tests.unit.gateway.fake_engine import FakeEngine

AUTOMATIC = ("Content-Type", "Accept", "Accept-Encoding")


@functools.cache
def gateway_port() -> int:
    """One lease for all these tests: they run one after another."""
    return free_ports(1)[0]


class Answer:
    """A response that was read whole."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"{self.status} {dict(self.headers)} {self.body[:500]!r}"

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str | None:
        """The problem's code, where it is one."""
        kind = self.headers.get("Content-Type", "")
        return str(self.json["code"]) if kind == "application/problem+json" else None


class Gateway:
    """The gateway, its engine, and a client."""

    def __init__(
        self, engine: FakeEngine, listener: Listener, session: aiohttp.ClientSession
    ) -> None:
        self.engine = engine
        self.listener = listener
        self.session = session
        self.url = f"http://127.0.0.1:{listener.port}"

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request; a body in `json` has the JSON type, one in `body` none by itself."""
        headers = dict(headers or {})
        if json is not None:
            body = orjson.dumps(json)
            headers.setdefault("Content-Type", "application/json")
        data = body.encode() if isinstance(body, str) else body
        async with (
            within(f"{method} {path[:50]} is answered"),
            self.session.request(
                method,
                URL(self.url + path, encoded=True),
                data=io.BytesIO(data) if data is not None and len(data) > 1 << 20 else data,
                headers=headers,
                skip_auto_headers=AUTOMATIC,
                allow_redirects=False,
            ) as response,
        ):
            return Answer(response.status, response.headers, await response.read())

    async def drain(self) -> None:
        """What SIGTERM begins."""
        await service._drain(self.listener.runner.app, DEADLINE_S)

    async def create(self, **options: object) -> int:
        """A ledger's id."""
        answer = await self.ask("POST", "/v1/ledgers", json=options)
        assert answer.status == 201, answer
        return int(answer.json["ledger_id"])


@contextlib.asynccontextmanager
async def running(
    *,
    limits: Limits | None = None,
    listen: ListenLimits | None = None,
    cors_origins: tuple[str, ...] = (),
) -> AsyncIterator[Gateway]:
    """A gateway for as long as the block runs."""
    engine = FakeEngine()
    app = build_app(engine, limits or Limits(), cors_origins=cors_origins)
    async with listening(
        app,
        host="127.0.0.1",
        port=gateway_port(),
        limits=listen or ListenLimits(drain_timeout_s=0.5),
    ) as listener:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            yield Gateway(engine, listener, session)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running() as started:
        yield started


@pytest.fixture
async def gateway_with_ledger() -> AsyncIterator[Gateway]:
    """Ledger 1 is there. A module whose tests all use it imports this as `gateway`."""
    async with running() as started:
        await started.create()
        yield started


async def received(socket: aiohttp.ClientWebSocketResponse) -> Any:
    """The next message: a value, bytes, or the code with which the socket was closed."""
    async with within("a message comes"):
        message = await socket.receive()
    if message.type is aiohttp.WSMsgType.TEXT:
        return orjson.loads(message.data)
    return message.data


async def held_bytes(gateway: Gateway) -> float:
    text = (await gateway.ask("GET", "/metrics")).body.decode()
    return float(text.partition("\nquorumlog_http_held_bytes ")[2].partition("\n")[0])


async def until_held(gateway: Gateway, least: int, what: str) -> None:
    """Wait until bodies and messages in memory have so many bytes."""

    async def is_held() -> bool:
        return await held_bytes(gateway) >= least

    await until(is_held, what)


async def until_nothing_held(gateway: Gateway) -> None:
    async def is_given_back() -> bool:
        return await held_bytes(gateway) == 0

    await until(is_given_back, "the room is given back")
