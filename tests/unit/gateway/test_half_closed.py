"""A client that says that it sends no more (`nc -N`, `shutdown(SHUT_WR)`) gets the answers to what it has sent."""

import asyncio
import gc

import pytest

from tests.support.waiting import within
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.conftest import gateway_with_ledger as gateway

__all__ = ("gateway",)

ENTRIES = "/v1/ledgers/1/entries"


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
