"""Compressed answers: to whom, which ones, and that each unpacks to what was sent plain."""

import asyncio
import os
import zlib
from collections.abc import AsyncIterator
from typing import Final

import pytest

from quorumlog.zstd import zstd
from services.gateway.app import _ROOM
from services.gateway.edge.http.codings import chosen
from services.gateway.edge.http.limits import Limits, Room
from tests.support.events import after_retry
from tests.support.waiting import until
from tests.unit.gateway.conftest import Answer, Gateway, running

ENTRIES: Final = "/v1/ledgers/1/entries"
FRAMES: Final = "application/vnd.quorumlog.frames"
NDJSON: Final = "application/x-ndjson"
ON: Final = Limits(compressed_answer_bytes_min=1024)
coded = pytest.mark.parametrize("coding", ["gzip", "zstd"])


def plain(answer: Answer) -> bytes:
    match answer.headers.get("Content-Encoding"):
        case "gzip":
            return zlib.decompress(answer.body, 31)
        case "zstd":
            return zstd.decompress(answer.body)
        case coding:
            assert coding is None
            return answer.body


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """One that compresses answers."""
    async with running(limits=ON) as started:
        yield started


async def ask(gateway: Gateway, path: str, method: str = "GET", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.ask(method, path, headers=named)


@pytest.mark.parametrize(
    ("accept", "coding", "takes_plain"),
    [
        ("", None, True),
        ("gzip", "gzip", True),
        ("x-gzip", "gzip", True),
        ("GZIP , br", "gzip", True),
        ("gzip, deflate, br, zstd", "zstd", True),
        ("zstd;q=0.1, gzip;q=0.2", "gzip", True),
        ("zstd;q=0, gzip", "gzip", True),
        ("gzip;q=0", None, True),
        ("gzip;q=0.5, identity", None, True),
        ("gzip;q=0.5, identity;q=0.2", "gzip", True),
        ("identity;q=0, gzip;q=0.1", "gzip", False),
        ("identity;q=0", None, False),
        ("identity;q=0, *", "zstd", False),
        ("*;q=0", None, False),
        ("*;q=0, gzip", "gzip", False),
        ("*;q=0, identity", None, True),
        ("*", None, True),
        ("br", None, True),
        ("gzip;q=nonsense", None, True),
        ("gzip;q=2", None, True),
    ],
)
def test_the_coding_is_the_one_that_the_client_likes_best(
    accept: str, coding: str | None, takes_plain: bool
) -> None:
    assert chosen(accept) == (coding, takes_plain)


async def _filled(gateway: Gateway, count: int = 50, size: int = 1000) -> None:
    await gateway.create()
    entries = [{"text": f"{number:4}" + "abc " * (size // 4 - 1)} for number in range(count)]
    for start in range(0, count, 200):
        made = await gateway.ask("POST", ENTRIES, json={"entries": entries[start : start + 200]})
        assert made.status == 201


@coded
@pytest.mark.parametrize("count", [50, 2500], ids=["short", "in parts"])
@pytest.mark.parametrize(
    ("path", "accept"),
    [
        (f"{ENTRIES}?encoding=text&limit=10000&max_bytes=60000000", "application/json"),
        (f"{ENTRIES}?limit=10000&max_bytes=60000000", FRAMES),
        (ENTRIES, NDJSON),
        (f"{ENTRIES}/3", "application/octet-stream"),
        ("/openapi.json", "*/*"),
    ],
)
async def test_a_compressed_answer_unpacks_to_the_plain_one(
    coding: str, count: int, path: str, accept: str
) -> None:
    async with running(limits=ON) as gateway:
        await _filled(gateway, count, 1200)
        expected = await ask(gateway, path, Accept=accept)
        assert "Content-Encoding" not in expected.headers
        answer = await ask(gateway, path, Accept=accept, Accept_Encoding=coding)
        assert answer.headers["Content-Encoding"] == coding
        assert plain(answer) == expected.body
        assert len(answer.body) < len(expected.body) / 2
        for each in (expected, answer):
            assert "Accept-Encoding" in each.headers["Vary"]
            assert each.headers["Content-Type"] == expected.headers["Content-Type"]
        head = await ask(gateway, path, "HEAD", Accept=accept, Accept_Encoding=coding)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["Content-Encoding"] == coding
        assert head.headers["Vary"] == answer.headers["Vary"]
        assert gateway_room(gateway).answers.used == 0


def gateway_room(gateway: Gateway) -> Room:
    return gateway.listener.runner.app[_ROOM]


async def test_short_unshrinking_and_tagged_answers_are_sent_as_they_are(gateway: Gateway) -> None:
    await gateway.create(metadata={"a": "b" * 4000})
    for size in (900, 60_000, 500_000):
        made = await gateway.ask(
            "POST", ENTRIES, os.urandom(size), headers={"Content-Type": "application/octet-stream"}
        )
        assert made.status == 201
    octets = {"Accept": "application/octet-stream", "Accept_Encoding": "gzip, zstd"}
    for path, headers in (
        (f"{ENTRIES}/0", octets),
        (f"{ENTRIES}/1", octets),
        (f"{ENTRIES}/2", octets),
        ("/v1/ledgers/1", {"Accept_Encoding": "gzip"}),
        ("/v1/ledgers/2", {"Accept_Encoding": "gzip"}),
    ):
        assert "Content-Encoding" not in (await ask(gateway, path, **headers)).headers, path
    assert (await ask(gateway, "/v1/ledgers/1")).headers["ETag"]
    only = {**octets, "Accept_Encoding": "gzip, identity;q=0"}
    for number, size in ((0, 900), (1, 60_000), (2, 500_000)):
        answer = await ask(gateway, f"{ENTRIES}/{number}", **only)
        assert answer.headers["Content-Encoding"] == "gzip", "plain was refused"
        assert len(plain(answer)) == size


async def test_events_are_not_compressed(gateway: Gateway) -> None:
    await _filled(gateway)
    await gateway.ask("POST", "/v1/ledgers/1/close")
    answer = await ask(gateway, ENTRIES, Accept="text/event-stream", Accept_Encoding="gzip")
    assert after_retry(answer.body).startswith(b"id: 0\n")
    assert "Content-Encoding" not in answer.headers


async def test_nothing_is_compressed_unless_an_operator_says_so() -> None:
    async with running() as gateway:
        await _filled(gateway)
        answer = await ask(gateway, f"{ENTRIES}?encoding=text", Accept_Encoding="gzip")
        assert "Content-Encoding" not in answer.headers
        assert answer.headers["Vary"] == "Accept"


@coded
async def test_a_compressor_without_room_is_no_error(coding: str) -> None:
    """The answer goes plain; while nothing is in use anything may be taken, so somebody else reads too."""
    limits = ON.model_copy(update={"answers_bytes_max": 1000})
    async with running(limits=limits) as gateway:
        await _filled(gateway, 20)
        room = gateway_room(gateway)
        room.answers.take("somebody", 990)
        answer = await ask(gateway, ENTRIES, Accept=NDJSON, Accept_Encoding=coding)
        assert "Content-Encoding" not in answer.headers
        assert len(answer.body.splitlines()) == 20
        room.answers.give("somebody", 990)
        assert room.answers.used == 0


@coded
async def test_a_reader_that_stops_leaves_no_bytes_taken(gateway: Gateway, coding: str) -> None:
    await _filled(gateway, 5000, 4000)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    writer.write(
        b"GET %b HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-ndjson\r\nAccept-Encoding: %b\r\n\r\n"
        % (ENTRIES.encode(), coding.encode())
    )
    assert await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    room = gateway_room(gateway)

    async def is_free() -> bool:
        return room.answers.used == 0

    await until(is_free, "the room is given back")
