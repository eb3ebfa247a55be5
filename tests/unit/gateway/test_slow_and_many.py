"""Clients that are slow, many, or gone halfway: what each of them gets, and what the others notice."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import orjson
import pytest

from quorumlog.errors import LedgerFenced, QuorumTimeout
from quorumlog.net.connections import ListenLimits
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import LedgerOptions
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import Gateway, running
from tests.unit.gateway.conftest import gateway_with_ledger as gateway

__all__ = ("gateway",)

ENTRIES = "/v1/ledgers/1/entries"
HEAD = b"POST /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"


@contextlib.asynccontextmanager
async def connection(
    gateway: Gateway,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    async with within("the server answers"):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), orjson.loads(body)


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with within("the server answers"):
        with contextlib.suppress(ConnectionError):
            return await reader.read() == b""
    return True


@pytest.mark.parametrize(
    "start",
    [
        HEAD + b"Content-Length: 100\r\n\r\nx",
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_a_body_that_does_not_come_is_a_408(start: bytes) -> None:
    limits = Limits(body_timeout_s=0.2)
    async with running(limits=limits, listen=ListenLimits(head_timeout_s=0.2)) as gateway:
        # Not over HTTP: these times are too short for a client that means well.
        await gateway.engine.create(LedgerOptions())
        async with connection(gateway) as (reader, writer):
            writer.write(start)

            status, problem = await answer(reader)

            assert (status, problem["code"], problem["outcome"]) == (
                408,
                "request-timeout",
                "not-done",
            )
            assert await is_cut(reader)
        assert gateway.engine.entries[1] == []


async def test_a_body_that_ends_too_early_appends_nothing(gateway: Gateway) -> None:
    async with connection(gateway) as (_reader, writer):
        writer.write(HEAD + b"Content-Length: 100\r\n\r\nx")
        await writer.drain()
    await until(lambda: gateway.listener.connections.used <= 1, "the connection is gone")

    # The client's own connection still works, and the ledger has nothing.
    assert (await gateway.ask("GET", ENTRIES)).json["entries"] == []


async def test_a_broken_chunk_appends_nothing(gateway: Gateway) -> None:
    async with connection(gateway) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\nnot a size\r\n\r\n")
        status, problem = await answer(reader)

        assert (status, problem["code"]) == (400, "bad-request")
    assert gateway.engine.entries[1] == []


async def test_a_chunked_body_is_cut_at_the_limit() -> None:
    async with running(limits=Limits(entry_bytes_max=100)) as gateway:
        await gateway.create()
        async with connection(gateway) as (reader, writer):
            chunk = b"28\r\n" + b"x" * 40 + b"\r\n"
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3)

            status, problem = await answer(reader)

            assert (status, problem["code"]) == (413, "too-large")
        assert gateway.engine.entries[1] == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET /v1/bookies\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_requests_without_version_or_host_are_refused(gateway: Gateway, head: bytes) -> None:
    async with connection(gateway) as (reader, writer):
        writer.write(head)

        status, problem = await answer(reader)

        assert (status, problem["code"]) == (400, "bad-request")


async def test_what_is_asked_while_too_much_is_in_work_is_refused_before_its_body() -> None:
    async with running(limits=Limits(requests_max=2)) as gateway:
        await gateway.create()
        gateway.engine.gate = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            first = [
                group.create_task(gateway.ask("POST", ENTRIES, json={"text": "a"}))
                for _ in range(2)
            ]
            await until(lambda: gateway.engine.appending == 2, "two are in work")

            async with connection(gateway) as (reader, writer):
                writer.write(HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
                status, problem = await answer(reader)
                assert (status, problem["code"]) == (429, "overloaded")
                assert problem["retryable"] is True
            assert (await gateway.ask("GET", "/health/live")).status == 200
            gateway.engine.gate.set()

        assert [task.result().status for task in first] == [201, 201]
        assert (await gateway.ask("POST", ENTRIES, json={"text": "a"})).status == 201


async def test_bodies_beyond_the_room_for_them_are_refused() -> None:
    async with running(limits=Limits(held_bytes_max=100)) as gateway:
        await gateway.create()
        gateway.engine.gate = asyncio.Event()
        octets = {"Content-Type": "application/octet-stream"}
        async with asyncio.TaskGroup() as group:
            first = group.create_task(gateway.ask("POST", ENTRIES, b"x" * 90, headers=octets))
            await until(lambda: gateway.engine.appending == 1, "the first one is in work")

            second = await gateway.ask("POST", ENTRIES, b"x" * 20, headers=octets)
            small = group.create_task(gateway.ask("POST", ENTRIES, b"x" * 10, headers=octets))
            await until(lambda: gateway.engine.appending == 2, "the small one fits")
            gateway.engine.gate.set()

        assert (second.status, second.code, second.headers["Retry-After"]) == (
            429,
            "overloaded",
            "1",
        )
        assert (first.result().status, small.result().status) == (201, 201)
        whole = await gateway.ask("POST", ENTRIES, b"x" * 200, headers=octets)
        assert whole.status == 201, (
            "one body that is larger than the room is taken when it is empty"
        )


async def test_a_long_poll_ends_with_the_next_entry(gateway: Gateway) -> None:
    for expected in (0, 1):
        async with asyncio.TaskGroup() as group:
            query = f"?from={expected}&wait_ms=60000"
            read = group.create_task(gateway.ask("GET", ENTRIES + query))
            query = f"?after={expected - 1}&wait_ms=60000"
            lac = group.create_task(gateway.ask("GET", "/v1/ledgers/1/last-add-confirmed" + query))
            await until(lambda: gateway.engine.waiting == 2, "both polls wait")
            await gateway.ask("POST", ENTRIES, json={"text": "a"})

        assert [entry["entry_id"] for entry in read.result().json["entries"]] == [expected]
        assert lac.result().json["last_add_confirmed"] == expected


async def test_a_long_poll_ends_when_the_ledger_is_closed(gateway: Gateway) -> None:
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(gateway.ask("GET", ENTRIES + "?wait_ms=60000"))
        await until(lambda: gateway.engine.waiting == 1, "the poll waits")
        await gateway.ask("POST", "/v1/ledgers/1/close")

    assert poll.result().json["closed"] is True
    assert poll.result().json["entries"] == []


async def test_a_long_poll_ends_after_its_time_with_nothing(gateway: Gateway) -> None:
    polled = await gateway.ask("GET", ENTRIES + "?wait_ms=10")
    asked = await gateway.ask("GET", "/v1/ledgers/1/last-add-confirmed?after=-1&wait_ms=10")

    assert (polled.status, polled.json["entries"], polled.json["next"]) == (200, [], 0)
    assert (asked.status, asked.json["last_add_confirmed"]) == (200, -1)


async def test_long_polls_have_a_limit_and_take_no_place_among_those_in_work() -> None:
    async with running(limits=Limits(waiters_max=2, requests_max=2)) as gateway:
        await gateway.create()
        path = ENTRIES + "?wait_ms=60000"
        async with asyncio.TaskGroup() as group:
            group.create_task(gateway.ask("GET", path))
            group.create_task(gateway.ask("GET", path))
            await until(lambda: gateway.engine.waiting == 2, "both wait")

            refused = await gateway.ask("GET", path)
            assert (refused.status, refused.code) == (429, "overloaded")
            assert (await gateway.ask("POST", ENTRIES, json={"text": "a"})).status == 201


async def test_errors_of_the_engine_keep_what_they_say(gateway: Gateway) -> None:
    for error in (
        QuorumTimeout("too slow", ledger_id=1, entry_id=5, bookie="b@1"),
        LedgerFenced("gone", ledger_id=1, outcome="unknown"),
    ):
        gateway.engine.fails = error

        reported = await gateway.ask("POST", ENTRIES, json={"text": "a"})

        assert (reported.status, reported.code, reported.json["outcome"]) == (
            error.status,
            error.code,
            "unknown",
        )
        assert (reported.json["ledger_id"], reported.json.get("entry_id")) == (1, error.entry_id)


async def test_a_fault_of_ours_is_a_500_without_a_trace(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.engine.fails = ZeroDivisionError("secret detail")

    reported = await gateway.ask("POST", ENTRIES, json={"text": "a"})

    assert (reported.status, reported.code, reported.json["outcome"]) == (
        500,
        "internal-error",
        "unknown",
    )
    assert b"secret detail" not in reported.body
    assert "unhandled-error" in caplog.text


def append(payload: bytes, *lines: str) -> bytes:
    head = [f"POST {ENTRIES} HTTP/1.1", "Host: localhost", "Content-Type: application/octet-stream"]
    head += [f"Content-Length: {len(payload)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


def read(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines]).encode() + b"\r\n\r\n"


async def answers(gateway: Gateway, *parts: bytes) -> bytes:
    """All that a connection gets on which some bytes are sent, and then the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        async with within("the answer comes and the connection ends"):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "lines", [(), ("Accept: application/json, */*",), ("Connection: close",)], ids=str
)
async def test_an_append_is_answered(gateway: Gateway, lines: tuple[str, ...]) -> None:
    got = await answers(gateway, append(b"x", *lines))

    assert got.startswith(b"HTTP/1.1 201 ")
    assert b'"entry_id":0' in got


async def test_a_body_in_chunks_is_answered(gateway: Gateway) -> None:
    head = append(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")

    got = await answers(gateway, head, b"3\r\nabc\r\n", b"0\r\n\r\n")

    assert got.startswith(b"HTTP/1.1 201 ")


async def test_a_streamed_append_is_answered_line_by_line(gateway: Gateway) -> None:
    lines = b"".join(b'{"json":%d}\n' % n for n in range(20))
    head = append(lines).removesuffix(lines).replace(b"octet-stream", b"x-ndjson")

    got = await answers(gateway, head, lines[:50], lines[50:])

    assert got.startswith(b"HTTP/1.1 200 ")
    assert b'"last_entry":19}' in got


async def test_each_of_several_requests_is_answered(gateway: Gateway) -> None:
    got = await answers(gateway, append(b"x") + append(b"y") + read(ENTRIES))

    assert got.count(b"HTTP/1.1 201 ") == 2
    assert got.count(b"HTTP/1.1 200 ") == 1


async def test_who_waits_for_entries_waits_no_longer(gateway: Gateway) -> None:
    gateway.engine.wait_s_min = 3600.0

    got = await answers(gateway, read(f"{ENTRIES}?wait_ms=60000"))

    assert got.startswith(b"HTTP/1.1 200 ")
    assert b'"entries":[]' in got


async def test_a_tail_ends(gateway: Gateway) -> None:
    await gateway.ask("POST", ENTRIES, b"one", headers={"Content-Type": "application/octet-stream"})
    gateway.engine.wait_s_min = 3600.0

    got = await answers(gateway, read(f"{ENTRIES}", "Accept: text/event-stream"))

    assert got.startswith(b"HTTP/1.1 200 ")


async def test_half_a_request_changes_nothing(gateway: Gateway) -> None:
    for part in (append(b"abc")[:-1], append(b"abc")[:40]):
        assert await answers(gateway, part) == b""

    assert (await gateway.ask("GET", ENTRIES)).json["entries"] == []


async def test_a_body_that_breaks_off_is_no_error_of_ours(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.create()

    for _ in range(20):
        assert await answers(gateway, append(b"abcdefgh")[:-4]) == b""
    gc.collect()  # an exception that no task retrieved is logged when the task is freed

    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "lines", [("Host: localhost",), ("Max-Forwards: 0",) * 2, ("A b: c",)], ids=str
)
async def test_malformed_http_is_answered(gateway: Gateway, lines: tuple[str, ...]) -> None:
    got = await answers(gateway, read(ENTRIES, *lines))

    assert b" 400 " in got.split(b"\r\n")[0]
    assert b"application/problem+json" in got
