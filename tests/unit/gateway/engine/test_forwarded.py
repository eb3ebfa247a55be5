"""Requests of clients that come to another gateway than the ledger's writer."""

import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.stores import Stores
from quorumlog import header
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import FRAMES, LedgerOptions
from tests.unit.gateway.engine.support import World, world_of

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
async def test_what_an_append_expects_and_its_password_count_through_any_gateway(
    asking: Asking, at: int
) -> None:
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


async def test_a_request_that_is_passed_on_counts_once_as_a_request_of_a_client(
    asking: Asking,
) -> None:
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
