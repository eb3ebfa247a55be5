"""What gateways ask of each other, asked by somebody whom the internal listener lets in, and who lies."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

from loadtest.stores import Stores
from quorumlog import header
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import FRAMES, LedgerOptions
from tests.support.waiting import within
from tests.unit.gateway.engine.support import Gateway, world_of

NINES = "9" * 400
NUMBERS = (
    NINES,
    "-" + NINES,
    "-2",
    "1.5",
    "NaN",
    "1e3",
    "0x1",
    "+1",
    "01",
    "",
    "%D9%A1",
    "%00",
    "%FF",
)


@dataclass(slots=True)
class Stranger:
    """Somebody who knows a gateway's address, and the id that it tells everybody."""

    gateway: Gateway
    session: aiohttp.ClientSession
    ledger_id: int

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """The status, and the code of a problem."""
        writer = self.gateway.engine.writer
        url = URL(writer.url_inside + path.replace("ID", str(self.ledger_id)), encoded=True)
        headers = {header.FORWARDED_WRITER: writer.id} | (headers or {})
        if path.partition("?")[0].endswith("/entries"):
            headers["Content-Type"] = FRAMES
        async with (
            within(f"{method} {path[:60]} is answered"),
            self.session.request(method, url, data=io.BytesIO(body), headers=headers) as answer,
        ):
            reported = orjson.loads(await answer.read())
            return answer.status, reported.get("code", "")


@pytest.fixture
async def stranger(stores: Stores) -> AsyncIterator[Stranger]:
    async with stranger_to(stores) as one:
        yield one


@asynccontextmanager
async def stranger_to(stores: Stores, **settings: Any) -> AsyncIterator[Stranger]:
    async with (
        world_of(stores, bookies=3, gateways=1, **settings) as world,
        aiohttp.ClientSession() as session,
    ):
        ledger = await world.gateways[0].engine.create(LedgerOptions())
        yield Stranger(world.gateways[0], session, ledger.ledger_id)


def payloads(*sizes: int) -> bytes:
    return b"".join(struct.pack(">I", size) + bytes(size) for size in sizes)


def records(count: int = 1, producer: ProducerSeq | None = None) -> bytes:
    return batch.encode([Record(b"")] * count, producer)


async def test_no_number_and_no_text_of_a_stranger_is_an_error_of_ours(stranger: Stranger) -> None:
    ledger, log = "/internal/ledgers/ID", "/internal/logs/x"
    public = "/internal/v1/ledgers/ID"
    numbers = [
        ("GET", "/internal/ledgers/{}/lac", b""),
        ("GET", ledger + "/lac?wait_ms={}", b""),
        ("GET", ledger + "/lac?after={}&wait_ms=1", b""),
        ("POST", public + "/entries?expect={}", payloads(1)),
        ("POST", log + "/forwarded?call=append&expect={}", records()),
        ("POST", log + "/forwarded?call=append&token={}", records()),
        ("POST", log + "/forwarded?call=append&since={}", records()),
    ]
    for method, path, body in numbers:
        for number in NUMBERS:
            if number == "-2" and "wait" in path and "after" not in path:
                continue
            status, code = await stranger.ask(method, path.format(number), body)
            assert (status, code) in {(400, "bad-request"), (422, "invalid")} or (
                status == 404 and "/ledgers//" in path.format(number)
            ), (path, number)
    texts = [
        ("POST", public + "/entries?expect=1&expect=1", payloads(1)),
        ("POST", public + "/entries?unknown=1", payloads(1)),
        ("POST", ledger + "/replace", b""),
        ("POST", ledger + "/replace?member=%00", b""),
        ("POST", ledger + "/replace?member=" + "x" * 4000, b""),
        ("POST", "/internal/logs/%00/forwarded?call=append", records()),
        ("POST", "/internal/logs/" + "x" * 4000 + "/forwarded", b""),
        ("POST", log + "/forwarded?call=publish", b"[" * 100_000),
        ("POST", log + "/forwarded?call=publish", b'{"token":' + NINES.encode() + b"}"),
        ("POST", log + "/forwarded?call=publish", b"\xff"),
        ("POST", log + "/forwarded?call=append", records(producer=ProducerSeq("a\0", 0, 0))),
        ("POST", log + "/forwarded?call=append", records(producer=ProducerSeq("a", -1, 0))),
        ("POST", log + "/forwarded?call=append", b"\x01"),
    ]
    for method, path, body in texts:
        status, code = await stranger.ask(method, path, body)
        assert (status, code) in {(400, "bad-request"), (422, "invalid")}, (path[:80], body[:80])
    stray = {header.FORWARDED_WRITER: "x" * 4000}
    assert (await stranger.ask("POST", public + "/close", headers=stray))[0] == 422
    assert await stranger.ask("POST", public + "/entries?expect=0", payloads(1)) == (201, "")


async def test_the_bounds_of_public_appends_hold_between_gateways_too(stranger: Stranger) -> None:
    entries, records_of = (
        "/internal/v1/ledgers/ID/entries",
        "/internal/logs/x/forwarded?call=append",
    )
    too_large = [
        (entries, payloads((1 << 20) + 1)),
        (entries, payloads(60 << 20)),
        (entries, bytes(4 * 10_001)),
        (records_of, records(10_001)),
        (records_of, bytes((16 << 20) + 1)),
    ]
    for path, body in too_large:
        assert await stranger.ask("POST", path, body) == (413, "too-large")

    assert await stranger.ask("POST", entries + "?expect=0", payloads(*[0] * 10_000)) == (201, "")


async def test_a_body_that_does_not_come_is_a_408_between_gateways_too(stores: Stores) -> None:
    async with stranger_to(stores, limits=Limits(body_timeout_s=0.2)) as stranger:
        writer = stranger.gateway.engine.writer
        port = int(writer.url_inside.rpartition(":")[2])
        head = (
            f"POST /internal/v1/ledgers/{stranger.ledger_id}/entries HTTP/1.1\r\nHost: localhost\r\n"
            f"{header.FORWARDED_WRITER}: {writer.id}\r\nContent-Type: {FRAMES}\r\nContent-Length: 100\r\n\r\nx"
        )

        reader, sender = await asyncio.open_connection("127.0.0.1", port)
        sender.write(head.encode())
        async with within("it is answered"):
            reported = await reader.readline()
        sender.close()

        assert b" 408 " in reported
