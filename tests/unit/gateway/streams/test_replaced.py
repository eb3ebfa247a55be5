"""A stream or log on real processes that is deleted and created again while a gateway stands still, or follows it (rule 27b)."""

import asyncio
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Answer, Http

TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
CLOSED = {"Stream-Closed": "true"}
TRIES = 12
"""Each stands still at another moment of a request, whose two steps are some milliseconds apart."""


@pytest.fixture
async def cluster(stores: Stores) -> AsyncIterator[Cluster]:
    async with running(stores, bookies=3, environment=UNHURRIED) as found:
        yield found


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session, cluster.gateways)


async def done(http: Http, method: str, path: str, *, at: int = 0, **more: object) -> Answer:
    """The answer to a request that the cluster takes in the end."""

    async def ask() -> Answer | None:
        answer = await http.ask(method, path, at=at, **more)  # type: ignore[arg-type]
        assert answer.status < 300 or answer.status in (409, 429, 503, 504), answer
        return answer if answer.status < 300 else None

    found = await until(ask, f"{method} {path} is done", SETTLED_S)
    assert found is not None
    return found


async def test_a_request_that_was_judged_by_a_stream_changes_no_later_one(
    cluster: Cluster, http: Http
) -> None:
    rng = random.Random(1)
    for number in range(TRIES):
        path, headers = f"/v1/stream/late-{number}", TEXT | (CLOSED if number % 2 else {})
        await done(http, "PUT", path, headers=TEXT)
        await done(http, "POST", path, headers=TEXT, body=b"0")
        await done(http, "POST", path, headers=TEXT, body=b"1", at=1)
        late = asyncio.ensure_future(
            http.ask("POST", path, headers=headers, body=b"this is {no json", at=1)
        )
        await asyncio.sleep(rng.random() * 0.012)
        cluster.pause("gateway-2")
        try:
            await done(http, "DELETE", path)
            await done(http, "PUT", path, headers=JSON)
        finally:
            cluster.resume("gateway-2")
        answer = await late

        found = await done(http, "GET", f"{path}?offset=-1")
        assert (found.body, "Stream-Closed" in found.headers) == (b"[]", False), answer
        assert answer.status in (204, 404, 409, 503), answer


async def test_a_follower_gets_no_record_of_a_later_log_and_is_told(http: Http) -> None:
    for at in (0, 1):
        await followed(http, at)


async def followed(http: Http, at: int) -> None:
    """A log is replaced while it is followed through a gateway."""
    path = f"/v1/logs/followed-{at}"
    await done(http, "PUT", path, json={})
    for text in ("old0", "old1"):
        await done(http, "POST", f"{path}/records", json={"text": text})
    url = f"{http.urls[at]}{path}/records?encoding=text"
    async with http.session.get(url, headers={"Accept": "text/event-stream"}) as response:
        lines = response.content
        seen = b""
        while b"old1" not in seen:
            seen += await lines.readline()

        await done(http, "DELETE", path)
        await done(http, "PUT", path, json={})
        for number in range(4):
            await done(http, "POST", f"{path}/records", json={"text": f"new{number}"})
        rest = (await lines.read()).decode()

    assert "new" not in rest
    assert "event: problem" in rest
    last = [line[4:] for line in seen.decode().splitlines() if line.startswith("id: ")][-1]
    back = await http.ask(
        "GET",
        f"{path}/records",
        at=at,
        headers={"Accept": "text/event-stream", "Last-Event-ID": last},
    )
    assert (back.status, back.json["code"]) == (409, "log-replaced")
