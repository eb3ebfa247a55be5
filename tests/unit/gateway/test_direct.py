"""Short appends are answered without a task, as the usual way would answer them."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.http import RawRequestMessage

from quorumlog.errors import NotEnoughBookies, Overloaded, QuorumLogError, TooLarge
from quorumlog.net.aiohttp_parts import Direct, DirectConnection
from quorumlog.net.connections import Connection
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import Gateway, held_bytes, running, until_nothing_held

OCTETS = "application/octet-stream"
FRAMES = "application/vnd.quorumlog.frames"
JSON = "application/json"
FRAME = b"\0\0\0\1a\0\0\0\2bc"


class Recorder:
    """Notes what goes which way."""

    def __init__(self, inner: Direct) -> None:
        self._inner = inner
        self.bytes_max = inner.bytes_max
        self.direct: list[bool] = []

    def begin(self, message: RawRequestMessage, body: bytes, connection: DirectConnection) -> bool:
        self.direct.append(self._inner.begin(message, body, connection))
        return self.direct[-1]


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        async with within("an answer"):
            head = await self.reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"Content-Length: (\d+)", head)
            assert found is not None, head
            return head + await self.reader.readexactly(int(found[1]))

    async def ended(self) -> None:
        async with within("the connection ends"):
            assert await self.reader.read() == b""


@asynccontextmanager
async def recorded(gateway: Gateway) -> AsyncIterator[tuple[Recorder, Client]]:
    """A connection whose ways are noted. The gateway knows its `Host` already."""
    assert gateway.listener.direct is not None
    gateway.listener.direct = recorder = Recorder(gateway.listener.direct)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    client = Client(reader, writer)
    client.send(b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
    recorder.direct.clear()
    yield recorder, client
    writer.close()


def served(gateway: Gateway, recorder: Recorder) -> DirectConnection:
    """The gateway's end of the connection whose ways are noted."""
    (connection,) = (
        each
        for each in gateway.listener.server.connections
        if isinstance(each, DirectConnection) and each._direct is recorder
    )
    return connection


def request(
    ledger: int, body: bytes, media: str = OCTETS, more: str = "", query: str = ""
) -> tuple[bytes, bytes]:
    """A head and a body."""
    lines = (
        f"POST /v1/ledgers/{ledger}/entries{query} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    )
    return lines.encode(), body


def plain(answer: bytes) -> bytes:
    """Without what differs from one answer to the next: the time, ids of requests, and ids of entries."""
    answer = re.sub(rb"Date: [^\r]*", b"Date:", answer)
    answer = re.sub(
        rb"(?<=X-Request-Id: )[0-9a-f]{8}-[0-9a-f]+|(?<=\"instance\":\")[0-9a-f]{8}-[0-9a-f]+",
        b"",
        answer,
    )
    return re.sub(rb"(_id|_entry|_confirmed)\":\d+", rb"\1", answer)


BODIES = [
    (OCTETS, b"x"),
    (JSON, b'{"text":"a"}'),
    (JSON, b'{"entries":[{"text":"a"},{"data":"Yg=="}]}'),
    (FRAMES, FRAME),
]


@pytest.mark.parametrize(("media", "body"), BODIES)
async def test_both_ways_give_the_same_answer(gateway: Gateway, media: str, body: bytes) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        head, _ = request(ledger, body, media, "X-Request-Id: mine\r\n")
        client.send(head + body)
        direct = await client.answer()
        client.send(head)
        before = recorder.direct.copy()
        await gateway.ask("GET", "/health/live")  # the head has come by now
        client.send(body)
        regular = await client.answer()

    assert before == [True], "the second one came in two pieces"
    assert recorder.direct[0]
    assert not any(recorder.direct[1:])
    assert direct.startswith(b"HTTP/1.1 201 Created\r\n")
    assert b"X-Request-Id: mine\r\n" in direct
    assert plain(direct) == plain(regular)
    entries = gateway.engine.entries[ledger]
    half = len(entries) // 2
    assert entries[:half] == entries[half:] != []


def in_frames(count: int, size: int) -> bytes:
    return (size.to_bytes(4, "big") + b"x" * size) * count


async def test_a_body_whose_end_is_a_read_away_is_waited_for(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        connection = served(gateway, recorder)
        head, body = request(ledger, in_frames(200, 1024), FRAMES)
        connection.data_received(head + body[:70_000])
        assert connection._is_coming
        connection.data_received(body[70_000:150_000])
        connection.data_received(body[150_000:])
        assert isinstance(connection, Connection)
        assert connection._head_timer is None, "the head has come"
        assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
        assert recorder.direct == [True]
    assert gateway.engine.entries[ledger] == [b"x" * 1024] * 200


async def test_what_follows_a_waited_for_body_is_answered_behind_it(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        connection = served(gateway, recorder)
        head, body = request(ledger, b"x" * 1000)
        connection.data_received(head + body[:500])
        connection.data_received(body[500:] + b"".join(request(ledger, b"next")))
        for entry in (0, 1):
            assert b'"entry_id":%d,' % entry in await client.answer()
        assert True not in recorder.direct, "pipelined requests go the usual way"
    assert gateway.engine.entries[ledger] == [b"x" * 1000, b"next"]


async def test_a_body_too_long_for_the_direct_way_is_not_waited_for(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        connection = served(gateway, recorder)
        head, body = request(ledger, b"x" * (recorder.bytes_max + 1))
        connection.data_received(head + body[:500])
        assert not connection._is_coming
        connection.data_received(body[500:])
        assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
    assert True not in recorder.direct


async def test_a_connection_that_ends_while_a_body_comes_holds_nothing(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        connection = served(gateway, recorder)
        head, body = request(ledger, b"x" * 1000)
        connection.data_received(head + body[:500])
        assert connection._is_coming
        connection.force_close()
        await client.ended()
        assert not connection._is_coming
    assert gateway.listener.waits_for() == []
    assert await held_bytes(gateway) == 0


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("too much", retry_after_s=7),
        NotEnoughBookies("two are live"),
        TooLarge("of all things"),
        QuorumLogError("odd"),
        ValueError("a defect"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_late_failure_has_the_usual_problem(gateway: Gateway, error: Exception) -> None:
    answers = []
    ledger = await gateway.create()
    gateway.engine.fails = error
    for is_direct in (True, False):
        async with recorded(gateway) as (recorder, client):
            more = "X-Request-Id: mine\r\n" + ("" if is_direct else "Expect: 100-continue\r\n")
            head, body = request(ledger, b"x", more=more)
            client.send(head + body)
            answers.append(plain(await client.answer()))
            assert recorder.direct == [is_direct]
            if b"Connection: close" in answers[-1]:
                await client.ended()
    assert b"application/problem+json" in answers[0]
    assert answers[0] == answers[1]
    await until_nothing_held(gateway)


OTHERS = [
    (OCTETS, b"x", "Origin: http://elsewhere\r\n", "", 403),
    (OCTETS, b"x", "Ledger-Password: p\r\n", "", 201),
    (OCTETS, b"x", "Accept: text/html\r\n", "", 406),
    (OCTETS, b"x", "Content-Encoding: br\r\n", "", 415),
    (OCTETS, b"x", "", "?expect=5", 412),
    (OCTETS, b"x", "", "?odd=5", 422),
    ("text/plain", b"x", "", "", 415),
    (JSON, b"{", "", "", 400),
    (JSON, b'{"text":1}', "", "", 422),
    (FRAMES, b"\0\0\0\2a", "", "", 400),
    (FRAMES, b"\0\0\0\0" * 10_001, "", "", 413),
    (OCTETS, b"x" * 2001, "", "", 413),
]


@pytest.mark.parametrize(("media", "body", "more", "query", "status"), OTHERS)
async def test_what_is_not_plain_goes_the_usual_way(
    media: str, body: bytes, more: str, query: str, status: int
) -> None:
    limits = Limits(entry_bytes_max=2000) if len(body) == 2001 else Limits()
    async with running(limits=limits) as gateway:
        ledger = await gateway.create()
        async with recorded(gateway) as (recorder, client):
            head, _ = request(ledger, body, media, more, query)
            client.send(head + body)
            answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert True not in recorder.direct


async def test_a_host_is_checked_before_appends_of_it_go_the_direct_way(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        head, body = request(ledger, b"x")
        for host, status, is_direct in (
            (b"evil.example", 421, False),
            (b"evil.example", 421, False),
            (b"127.0.0.9", 201, False),
            (b"127.0.0.9", 201, True),
        ):
            client.send(head.replace(b"Host: localhost", b"Host: " + host) + body)
            assert (await client.answer()).startswith(b"HTTP/1.1 %d " % status)
            assert recorder.direct[-1] is is_direct


async def test_ledgers_that_are_not_at_hand_go_the_usual_way(gateway: Gateway) -> None:
    guarded = await gateway.create(password="p")
    closed = await gateway.create()
    await gateway.ask("POST", f"/v1/ledgers/{closed}/close")
    async with recorded(gateway) as (recorder, client):
        for ledger, status in ((guarded, 403), (closed, 409), (77, 404)):
            client.send(b"".join(request(ledger, b"x")))
            answer = await client.answer()
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert recorder.direct == [False] * 3


async def test_pages_of_other_origins_are_let_in_by_the_usual_way_only() -> None:
    async with running(cors_origins=("https://a.example",)) as gateway:
        ledger = await gateway.create()
        async with recorded(gateway) as (recorder, client):
            client.send(b"".join(request(ledger, b"x")))
            assert b"Vary: Origin\r\n" in await client.answer()
        assert recorder.direct == [False]


async def test_pipelined_appends_are_answered_in_their_order(gateway: Gateway) -> None:
    ledger = await gateway.create()
    gateway.engine.gate = asyncio.Event()
    async with recorded(gateway) as (recorder, client):
        client.send(b"".join(request(ledger, b"0", more="X-Request-Id: n0\r\n")))
        await until(lambda: gateway.engine.appending == 1, "the first is in work")
        for number in (1, 2, 3):
            more = f"X-Request-Id: n{number}\r\n"
            client.send(b"".join(request(ledger, b"%d" % number, more=more)))
        await gateway.ask("GET", "/health/live")
        assert gateway.engine.appending == 1, "the others wait for their turn"
        gateway.engine.gate.set()
        for number in range(4):
            assert b"X-Request-Id: n%d\r\n" % number in await client.answer()
        # The connection is as good as before.
        client.send(b"".join(request(ledger, b"4")))
        assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
    assert gateway.engine.entries[ledger] == [b"0", b"1", b"2", b"3", b"4"]
    assert recorder.direct[0]
    assert recorder.direct[-1]


async def test_an_append_in_work_holds_its_place_until_it_is_answered(gateway: Gateway) -> None:
    ledger = await gateway.create()
    gateway.engine.gate = asyncio.Event()
    async with recorded(gateway) as (recorder, client):
        client.send(b"".join(request(ledger, b"x" * 700)))
        await until(lambda: gateway.engine.appending == 1, "it is in work")
        metrics = (await gateway.ask("GET", "/metrics")).body.decode()
        assert "quorumlog_http_requests_in_work 2.0" in metrics, "and this one of the metrics"
        assert await held_bytes(gateway) == 700
        gateway.engine.gate.set()
        await client.answer()
    assert recorder.direct == [True]
    await until_nothing_held(gateway)
    metrics = (await gateway.ask("GET", "/metrics")).body.decode()
    route = 'method="POST",route="/v1/ledgers/{ledger_id}/entries",status="201"'
    assert f"quorumlog_http_requests_total{{{route}}} 1.0" in metrics
    assert "quorumlog_http_requests_in_work 1.0" in metrics


async def test_a_long_append_keeps_its_connection_which_idles_out_after(gateway: Gateway) -> None:
    ledger = await gateway.create()
    gateway.engine.gate = asyncio.Event()
    async with recorded(gateway) as (recorder, client):
        connection = served(gateway, recorder)

        def idle_time_is_over() -> None:
            assert connection._keepalive_handle is not None
            connection._keepalive_handle.cancel()
            connection._next_keepalive_close_time = 0.0
            connection._process_keepalive()

        client.send(b"".join(request(ledger, b"x")))
        await until(lambda: gateway.engine.appending == 1, "it is in work")
        idle_time_is_over()
        gateway.engine.gate.set()
        assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
        idle_time_is_over()
        await client.ended()
    assert recorder.direct == [True]


async def test_a_defect_of_the_direct_way_ends_the_connection_and_holds_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await gateway.create()

    def breaks(_: int) -> None:
        raise ValueError("a defect")

    async with recorded(gateway) as (recorder, client):
        monkeypatch.setattr(gateway.engine, "at_hand", breaks)
        client.send(b"".join(request(ledger, b"x")))
        await client.ended()
    assert recorder.direct == []
    assert gateway.listener.waits_for() == []
    assert await held_bytes(gateway) == 0


async def test_requests_beyond_the_budget_are_refused_by_the_usual_way() -> None:
    async with running(limits=Limits(requests_max=1, peer_requests_max=1)) as gateway:
        ledger = await gateway.create()
        gateway.engine.gate = asyncio.Event()
        async with recorded(gateway) as (recorder, client):
            client.send(b"".join(request(ledger, b"x")))
            await until(lambda: gateway.engine.appending == 1, "the first is in work")
            refused = await gateway.ask(
                "POST", f"/v1/ledgers/{ledger}/entries", b"y", headers={"Content-Type": OCTETS}
            )
            assert (refused.status, refused.code) == (429, "overloaded")
            gateway.engine.gate.set()
            assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
        assert gateway.engine.entries[ledger] == [b"x"]
        assert recorder.direct == [True]


async def test_a_leaving_client_gives_its_place_back_after_its_append(gateway: Gateway) -> None:
    ledger = await gateway.create()
    gateway.engine.gate = asyncio.Event()
    async with recorded(gateway) as (_, client):
        client.send(b"".join(request(ledger, b"x")))
        await until(lambda: gateway.engine.appending == 1, "it is in work")
    await until(lambda: gateway.listener.connections.used <= 1, "the connection is gone")
    assert await held_bytes(gateway) == 1, "the append goes on"
    gateway.engine.gate.set()
    await until_nothing_held(gateway)
    assert gateway.engine.entries[ledger] == [b"x"]


async def test_a_gateway_that_ends_answers_the_append_in_work_first() -> None:
    stack = running()
    gateway = await stack.__aenter__()
    ledger = await gateway.create()
    gateway.engine.gate = asyncio.Event()
    async with recorded(gateway) as (recorder, client):
        client.send(b"".join(request(ledger, b"x")))
        await until(lambda: gateway.engine.appending == 1, "it is in work")
        assert gateway.listener.waits_for() == [f"the answer to POST /v1/ledgers/{ledger}/entries"]
        ending = asyncio.ensure_future(stack.__aexit__(None, None, None))
        await until(lambda: not _accepts(gateway), "the gateway listens no more")
        gateway.engine.gate.set()
        assert (await client.answer()).startswith(b"HTTP/1.1 201 ")
        await client.ended()
        await ending
    assert recorder.direct == [True]


def _accepts(gateway: Gateway) -> bool:
    protocols = gateway.listener.server.connections
    return not any(protocol._close for protocol in protocols)


async def test_while_a_gateway_drains_appends_are_refused(gateway: Gateway) -> None:
    ledger = await gateway.create()
    async with recorded(gateway) as (recorder, client):
        await gateway.drain()
        client.send(b"".join(request(ledger, b"x")))
        answer = await client.answer()
    assert b'"code":"shutting-down"' in answer
    assert recorder.direct == [False]
