"""Requests between gateways: answered alike by any gateway, bounded, and refused for one process alone."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from loadtest.stores import Stores
from quorumlog import header
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    Forbidden,
    ForeignHost,
    Outcome,
    QuorumLogError,
    RouteNotFound,
    Unauthenticated,
    WriterLost,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.metadata import Writer
from quorumlog.wire import problems
from services.gateway.edge.http.limits import Limits
from services.gateway.engine.peers import Peers
from services.gateway.interface import FRAMES, LedgerOptions
from tests.support.waiting import within
from tests.unit.gateway.engine.support import Gateway, World, world_of

JSON, OCTETS, NDJSON = "application/json", "application/octet-stream", "application/x-ndjson"

BODIES = {
    "nothing": (JSON, b""),
    "one entry": (JSON, b'{"text":"a"}'),
    "a batch": (JSON, b'{"entries":[{"text":"a"},{"json":{"b":[1]}}]}'),
    "bytes": (OCTETS, b"\x00a"),
    "no bytes": (OCTETS, b""),
    "frames": (FRAMES, struct.pack(">I", 1) + b"a" + struct.pack(">I", 0)),
    "lines": (NDJSON, b'{"text":"a"}\n{"text":"b"}\n'),
    "no JSON": (JSON, b'{"text":'),
    "two keys": (JSON, b'{"text":"a","text":"b"}'),
    "a stray field": (JSON, b'{"entries":[{"text":"a"},{"texts":"b"}]}'),
    "half a frame": (FRAMES, b"\x00\x00"),
    "a large entry": (JSON, orjson.dumps({"entries": [{"text": "a"}, {"text": "b" * 1001}]})),
    "large bytes": (OCTETS, bytes(1001)),
    "a strange type": ("text/strange", b"a"),
}


@dataclass(slots=True)
class Asking:
    """A client of two gateways, of which the first one writes the ledger."""

    world: World
    session: aiohttp.ClientSession
    ledger_id: int

    async def append(
        self, at: int, media: str, body: bytes, *, query: str = "", **headers: str
    ) -> tuple[int, Any]:
        """The status and what is said: of an error what does not differ from request to request."""
        url = self.world.gateways[at].engine.writer.url
        path = f"/v1/ledgers/{self.ledger_id}/entries{query}"
        sent = {"Content-Type": media} | headers
        async with self.session.post(url + path, data=body, headers=sent) as answer:
            reported = [orjson.loads(line) for line in (await answer.read()).splitlines()]
        for one in reported:
            one.pop("instance", None)
        return answer.status, reported

    async def stored(self) -> list[bytes]:
        page = await self.world.engine.reads.read(self.ledger_id, 0, password="secret")
        return [bytes(run.payload(at)) for run in page.runs for at in range(run.count)]


@pytest.fixture
async def asking(stores: Stores) -> AsyncIterator[Asking]:
    limits = Limits(entry_bytes_max=1000, body_bytes_max=4000)
    async with (
        world_of(stores, bookies=3, limits=limits) as world,
        aiohttp.ClientSession() as session,
    ):
        row = await world.engine.create(LedgerOptions(password="secret"))
        yield Asking(world, session, row.ledger_id)


PASSWORD = {header.LEDGER_PASSWORD: "secret"}


@pytest.mark.parametrize("body", BODIES)
async def test_an_append_is_answered_alike_by_any_gateway(asking: Asking, body: str) -> None:
    media, data = BODIES[body]

    status, there = await asking.append(1, media, data, **PASSWORD)
    again, here = await asking.append(0, media, data, **PASSWORD)

    assert status == again
    if status >= 400:
        assert there == here
        return
    count = sum(_count(one) for one in there)
    ids = [name for name in here[0] if name not in ("ledger_id", "last_add_confirmed")]
    assert [set(one) for one in here] == [set(one) for one in there]
    assert here[-1][ids[-1]] == there[-1][ids[-1]] + count
    stored = await asking.stored()
    assert stored[:count] == stored[count:]


def _count(reported: dict[str, Any]) -> int:
    return (
        int(reported["last_entry"] - reported["first_entry"] + 1)
        if "first_entry" in reported
        else 1
    )


@pytest.mark.parametrize("at", [0, 1])
async def test_expectations_and_passwords_count_anywhere(asking: Asking, at: int) -> None:
    assert (await asking.append(at, JSON, b'{"text":"a"}'))[0] == 403
    wrong = await asking.append(at, JSON, b'{"text":"a"}', **{header.LEDGER_PASSWORD: "other"})
    assert wrong[0] == 403
    early = await asking.append(at, JSON, b'{"text":"a"}', query="?expect=1", **PASSWORD)
    assert (early[0], early[1][0]["next_entry_id"]) == (412, 0)
    assert (await asking.append(at, JSON, b'{"text":"a"}', query="?expect=0", **PASSWORD))[0] == 201


async def test_a_request_that_was_passed_on_goes_no_further(asking: Asking) -> None:
    other = asking.world.other.writer
    for path, body in (("entries", b'{"text":"a"}'), ("close", b"")):
        url = f"{other.url_inside}/internal/v1/ledgers/{asking.ledger_id}/{path}"
        sent = {header.FORWARDED_WRITER: other.id, "Content-Type": JSON} | PASSWORD
        async with asking.session.post(url, data=body, headers=sent) as answer:
            reported = orjson.loads(await answer.read())

        assert (answer.status, reported["code"], reported["outcome"]) == (
            409,
            "writer-lost",
            "not-done",
        )

    assert asking.world.engine.writes(asking.ledger_id)
    assert await asking.stored() == []


async def test_a_forwarded_request_counts_once_as_a_clients_request(asking: Asking) -> None:
    await asking.append(1, JSON, b'{"text":"a"}', **PASSWORD)

    route = 'quorumlog_http_requests_total{method="POST",route="%s"'
    counted = []
    for one in asking.world.gateways:
        async with asking.session.get(one.engine.writer.url_inside + "/metrics") as answer:
            reported = await answer.text()
        counted.append(route % "/v1/ledgers/{ledger_id}/entries" in reported)
        counted.append(route % "/internal/v1/ledgers/{ledger_id}/entries" in reported)

    assert counted == [False, True, True, False]


async def test_a_route_for_requests_that_are_passed_on_declares_any_problem(asking: Asking) -> None:
    async with asking.session.get(
        asking.world.engine.writer.url_inside + "/openapi.json"
    ) as answer:
        paths = (await answer.json())["paths"]

    inside = [path for path in paths if path.startswith("/internal/v1/")]
    assert len(inside) == 2
    assert all("default" in paths[path]["post"]["responses"] for path in inside)


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


def refusal(error: QuorumLogError) -> web.Response:
    body = problems.to_bytes(error)
    return web.Response(status=error.status, body=body, content_type=problems.CONTENT_TYPE)


REFUSALS = (Unauthenticated(), Forbidden(), ForeignHost(), RouteNotFound())
"""By the gateway itself, or by another service at its address."""

STRANGERS = [HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND, HTTPStatus.BAD_GATEWAY]
"""By whatever is between the two."""


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        *((refusal(error), NOT_DONE) for error in REFUSALS),
        *((web.Response(status=status, text="no"), UNKNOWN) for status in STRANGERS),
    ],
    ids=lambda value: str(value.status) if isinstance(value, web.Response) else str(value),
)
async def test_a_writer_that_refuses_a_gateway_is_lost_to_it_and_says_nothing_of_the_ledger(
    answer: web.Response, outcome: Outcome
) -> None:
    async def answers(_request: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        peers, writer = Peers(session), Writer("w", url, url)

        with pytest.raises(WriterLost) as reported:
            await peers.send(writer, "POST", "/v1/ledgers/7/entries", 5.0, media=FRAMES)

    assert reported.value.outcome == outcome
