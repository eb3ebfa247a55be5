"""Appends of a busy handle by a socket: promised is what is promised of HTTP."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from quorumlog import header
from quorumlog.client import Batching, Client, ConnectionLost, Ledger, Log, Record, streaming, sync
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    LedgerClosed,
    LogFenced,
    Overloaded,
    QuorumLogError,
    QuorumTimeout,
    ShuttingDown,
)
from quorumlog.wire import problems
from tests.support.waiting import until, within

CUT = "cut"
HANG = "hang"
BY_HTTP, BY_SOCKET = "http", "socket"


class Gateway:
    """A ledger in memory, by HTTP and by sockets. The next append by a socket gets `trouble`."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.ways: list[str] = []
        """Of the appends."""
        self.handshakes: list[str | None] = []
        """The tokens of those that came."""
        self.sockets: set[web.WebSocketResponse] = set()
        self.trouble: QuorumLogError | str | bytes | None = None
        self.crowded: QuorumLogError | None = None
        """Of requests that are no appends."""
        self.refuses: QuorumLogError | None = None
        self.speaks = True
        self.hung = asyncio.Event()

    async def append(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_one = request.content_type == "application/octet-stream"
        return web.json_response(self._take(BY_HTTP, [body] if is_one else cut(body)))

    async def socket(self, request: web.Request) -> web.StreamResponse:
        self.handshakes.append(request.headers.get("Authorization"))
        if self.refuses is not None:
            return problem(self.refuses)
        protocols = (header.APPENDS_PROTOCOL,) if self.speaks else ()
        socket = web.WebSocketResponse(protocols=protocols)
        await socket.prepare(request)
        self.sockets.add(socket)
        try:
            async for message in socket:
                reported = await self._answer(request, message.data)
                if reported is None:
                    break
                await socket.send_str(reported)
        finally:
            self.sockets.discard(socket)
        return socket

    async def _answer(self, request: web.Request, data: bytes | str) -> str | None:
        trouble, self.trouble = self.trouble, None
        if isinstance(trouble, QuorumLogError):
            return problems.to_bytes(trouble).decode()
        if isinstance(trouble, bytes):
            return trouble.decode()
        if trouble == CUT:
            assert request.transport is not None
            request.transport.abort()
            return None
        if trouble == HANG:
            self.hung.set()
            await asyncio.Event().wait()
        assert isinstance(data, bytes), "these tests append no JSON"
        return orjson.dumps(self._take(BY_SOCKET, cut(data))).decode()

    def _take(self, way: str, values: Sequence[bytes]) -> dict[str, Any]:
        first = len(self.values)
        self.values.extend(values)
        self.ways.append(way)
        last = len(self.values) - 1
        entries = {"first_entry": first, "last_entry": last, "last_add_confirmed": last}
        return {
            "ledger_id": 7,
            **entries,
            "first_offset": first,
            "last_offset": last,
            "entry_id": first,
        }

    async def info(self, _request: web.Request) -> web.Response:
        if self.crowded is not None:
            error, self.crowded = self.crowded, None
            return problem(error)
        return web.json_response({"ledger_id": 7})


def problem(error: QuorumLogError) -> web.Response:
    return web.Response(
        status=error.status,
        body=problems.to_bytes(error),
        headers=error.headers,
        content_type=problems.CONTENT_TYPE,
    )


def cut(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    for kind, items in (("ledgers", "entries"), ("logs", "records")):
        app.router.add_post(f"/v1/{kind}/{{name}}/{items}", gateway.append)
        app.router.add_get(f"/v1/{kind}/{{name}}/ws", gateway.socket)
        app.router.add_get(f"/v1/{kind}/{{name}}", gateway.info)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def a_slow_machine_makes_no_handle_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_BUSY_GAP_S", 600.0)
    monkeypatch.setattr(streaming, "_IDLE_S", 600.0)


async def make_busy(handle: Ledger | Log, gateway: Gateway) -> None:
    """Append until the handle has a socket."""
    used = gateway.ways.count(BY_SOCKET)
    async with within("the socket is used"):
        while gateway.ways.count(BY_SOCKET) == used:
            await handle.append(b"busy")


async def test_a_busy_handle_appends_by_a_socket_in_the_order_of_the_calls() -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        sent = [b"%d" % number for number in range(3000)]
        got: list[int] = []
        for first in range(0, len(sent), 10):
            ids = [ledger.append(payload) for payload in sent[first : first + 10]]
            got += await asyncio.gather(*ids)
        await make_busy(ledger, gateway)
        entries = [await ledger.append_batch([b"a", b"b"]), await (await ledger.submit(b"c"))]

    assert gateway.values[:3000] == sent
    assert got == list(range(3000))
    assert gateway.ways[0] == BY_HTTP
    assert gateway.ways[-1] == BY_SOCKET
    assert gateway.values[entries[0].first_entry :] == [b"a", b"b", b"c"]
    assert entries[0].last_entry + 1 == entries[1].first_entry
    assert len(gateway.handshakes) == 1


async def test_a_handle_that_is_not_busy_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_BUSY_GAP_S", -1.0)
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        for _ in range(50):
            await ledger.append(b"x")

    assert gateway.handshakes == []


@pytest.mark.parametrize("error", [ShuttingDown(), Overloaded(retry_after_s=0), LedgerClosed()])
async def test_what_a_socket_did_not_do_is_asked_by_http_once(error: QuorumLogError) -> None:
    assert error.outcome == NOT_DONE
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        gateway.trouble = error
        before = len(gateway.values)
        first, second = ledger.append(b"first"), ledger.append(b"second")
        assert list(await asyncio.gather(first, second)) == [before, before + 1]

    assert gateway.values[before:] == [b"first", b"second"]
    assert BY_SOCKET not in gateway.ways[-1:]


@pytest.mark.parametrize("trouble", [QuorumTimeout("late"), CUT, b"[]", b"nonsense"])
async def test_an_append_of_unknown_outcome_is_not_sent_again_nor_what_is_behind_it(
    trouble: QuorumLogError | str | bytes,
) -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        gateway.trouble = trouble
        before = len(gateway.values)
        sent = [
            await ledger.submit(
                b"first",
            ),
            *[await ledger.submit(b"b") for _ in range(2500)],
        ]
        done = await asyncio.gather(*sent, return_exceptions=True)

        outcomes = [error.outcome for error in done if isinstance(error, QuorumLogError)]
        assert len(outcomes) == len(sent)
        assert outcomes[0] == UNKNOWN
        assert outcomes[-1] == NOT_DONE
        assert len(gateway.values) == before
        # The handle goes on, by HTTP for now.
        assert await ledger.append(b"later") == before

    assert gateway.ways[-1] == BY_HTTP


async def test_a_deadline_ends_an_append_and_its_socket() -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        client._transport.deadline_s = 0.05
        gateway.trouble = HANG
        with pytest.raises(ConnectionLost) as caught:
            await ledger.append(b"x")
        client._transport.deadline_s = 60.0
        await ledger.append(b"y")

    assert caught.value.outcome == UNKNOWN
    assert gateway.values[-1] == b"y"
    assert b"x" not in gateway.values
    assert gateway.ways[-1] == BY_HTTP


async def test_leaving_after_an_exception_ends_the_append_and_the_socket() -> None:
    gateway = Gateway()

    async with serving(gateway) as url:
        client = await Client(url).__aenter__()
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        gateway.trouble = HANG
        under_way = await ledger.submit(b"x")
        await gateway.hung.wait()
        await client.__aexit__(KeyError)
        with pytest.raises(ConnectionLost) as caught:
            await under_way
        assert caught.value.outcome == UNKNOWN


async def test_leaving_waits_for_appends_and_closes_sockets() -> None:
    gateway = Gateway()

    async with serving(gateway) as url:
        async with Client(url) as client:
            ledger = client.ledger(7)
            await make_busy(ledger, gateway)
            assert len(gateway.sockets) == 1
            last = await ledger.submit(b"last")
        assert (await last).first_entry == len(gateway.values) - 1
        assert gateway.values[-1] == b"last"
        await until(lambda: not gateway.sockets, "the socket is closed")


@pytest.mark.parametrize("refusal", ["an error", "another protocol"])
async def test_where_no_socket_can_be_had_http_serves_on(refusal: str) -> None:
    gateway = Gateway()
    if refusal == "an error":
        gateway.refuses = QuorumLogError("a proxy that knows no sockets")
    gateway.speaks = refusal == "an error"

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        async with within("a socket is tried"):
            while not gateway.handshakes:
                await ledger.append(b"x")
        for _ in range(50):
            await ledger.append(b"y")

    assert set(gateway.ways) == {BY_HTTP}
    assert len(gateway.handshakes) == 1


async def test_what_a_socket_does_not_carry_goes_by_http_in_its_turn() -> None:
    gateway = Gateway()

    # So the large one travels alone.
    batching = Batching(bytes_max=1000)
    async with serving(gateway) as url, Client(url, batching=batching) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        expected = len(gateway.values)
        sent = [
            ledger.append(b"a"),
            ledger.append(b"b", expect=expected + 1),
            ledger.append(b"c"),
            ledger.append(b"d" * streaming.MESSAGE_BYTES_MAX),
            ledger.append(b"e"),
        ]
        assert await asyncio.gather(*sent) == list(range(expected, expected + 5))

    assert [value[:1] for value in gateway.values[expected:]] == [b"a", b"b", b"c", b"d", b"e"]
    assert gateway.ways[-5:] == [BY_SOCKET, BY_HTTP, BY_SOCKET, BY_HTTP, BY_SOCKET]


async def test_a_token_that_changed_opens_another_socket() -> None:
    gateway = Gateway()
    token = "first"

    async with serving(gateway) as url, Client(url, token=lambda: token) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        token = "second"
        await make_busy(ledger, gateway)

    assert gateway.handshakes == ["Bearer first", "Bearer second"]


async def test_a_writer_token_that_changed_opens_another_socket() -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        log = client.log("l")
        await make_busy(log, gateway)
        log.writer_token = 3
        await log.append(b"x")
        assert gateway.ways[-1] == BY_HTTP
        await make_busy(log, gateway)

    assert len(gateway.handshakes) == 2


async def test_a_client_that_is_refused_as_too_much_gives_its_sockets_back() -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        gateway.crowded = Overloaded(retry_after_s=0)
        await ledger.info()
        for _ in range(50):
            await ledger.append(b"x")
        await until(lambda: not gateway.sockets, "the socket is closed")

    assert set(gateway.ways[-50:]) == {BY_HTTP}


async def test_beyond_its_sockets_a_client_uses_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorumlog.client.transport.STREAMS_MAX", 2)
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        for number in (1, 2):
            await make_busy(client.ledger(number), gateway)
        third = client.ledger(3)
        for _ in range(50):
            await third.append(b"x")
        assert set(gateway.ways[-50:]) == {BY_HTTP}
        assert len(gateway.sockets) == len(gateway.handshakes) == 2


async def test_an_idle_socket_is_closed_and_http_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_IDLE_S", 0.05)
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        async with within("a socket is opened"):
            while not gateway.handshakes:
                await ledger.append(b"x")
        await until(lambda: not gateway.sockets, "it is closed")
        async with within("it is used no more"):
            await ledger.append(b"y")

    assert gateway.ways[-1] == BY_HTTP


async def test_a_socket_that_says_what_nobody_asked_is_used_no_more() -> None:
    gateway = Gateway()

    async with serving(gateway) as url, Client(url) as client:
        ledger = client.ledger(7)
        await make_busy(ledger, gateway)
        (socket,) = gateway.sockets
        await socket.send_str('{"first_entry":999,"last_entry":999,"last_add_confirmed":999}')
        await until(lambda: not gateway.sockets, "the client closes it")

        assert await ledger.append(b"x") == len(gateway.values) - 1

    assert gateway.ways[-1] == BY_HTTP


async def test_threads_append_by_a_socket_too() -> None:
    gateway = Gateway()

    async with serving(gateway) as url:

        def use() -> None:
            with sync.Client(url, batching=Batching(count_max=50)) as client:
                ledger = client.ledger(7)
                while BY_SOCKET not in gateway.ways:
                    ledger.append(b"busy")
                first = len(gateway.values)
                futures = [ledger.submit(b"%d" % number) for number in range(1000)]
                ids = [future.result().first_entry - first for future in futures]
                assert ids == list(range(1000))

        await asyncio.to_thread(use)

    assert gateway.values[-1000:] == [b"%d" % number for number in range(1000)]
    assert gateway.ways[-1] == BY_SOCKET


@pytest.mark.asyncio(loop_scope="package")
class TestCluster:
    """Of real gateways."""

    async def test_entries_by_a_socket_are_there_once_and_in_order(self, cluster: Cluster) -> None:
        async with Client(*cluster.gateways) as client:
            ledger = await client.create_ledger(password="p")
            sent = [b"%d" % number for number in range(2000)]
            ids = []
            for first in range(0, len(sent), 20):
                ids += await asyncio.gather(*map(ledger.append, sent[first : first + 20]))
            async with within("a socket is open"):
                while ledger._stream._socket is None:
                    sent.append(b"more")
                    ids.append(await ledger.append(b"more"))
            sent.append(b"by the socket")
            ids.append(await ledger.append(b"by the socket"))
            assert ids == list(range(len(sent)))
            assert [entry.payload async for entry in ledger.entries()] == sent

            await ledger.close()
            with pytest.raises(LedgerClosed) as caught:
                await ledger.append(b"x")
            assert caught.value.outcome == NOT_DONE

    async def test_records_by_socket_arrive_and_fences_are_told(self, cluster: Cluster) -> None:
        async with Client(*cluster.gateways) as client:
            log = await client.create_log("by-socket")
            await log.open("me")
            sent = 0
            async with within("a socket is open"):
                while log._stream._socket is None:
                    await log.append(b"%d" % sent)
                    sent += 1
            record = Record(b"v", key=b"k", headers={"a": "b"})
            done = await log.append(record, b"w")
            assert (done.first_offset, done.last_offset) == (sent, sent + 1)
            assert not done.is_duplicate
            page = await log.read(sent)
            assert [(one.value, one.key) for one in page.records] == [(b"v", b"k"), (b"w", None)]
            assert page.records[0].ledger_id == done.ledger_id
            assert page.records[0].entry_id == done.entry_id
            assert log._stream._socket is not None

            await client.log("by-socket").open("another")
            with pytest.raises(LogFenced) as caught:
                await log.append(b"late")
            assert caught.value.outcome == NOT_DONE
