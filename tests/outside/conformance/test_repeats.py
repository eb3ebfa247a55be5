"""The proxy that repeats, and what it remembers, on a cluster whose processes are killed: a share of `make conformance KILLS=1`."""

import asyncio

import aiohttp
import orjson

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.outside.conformance.repeats import Repeats
from tests.unit.logs.support import Http

JSON = {"Content-Type": "application/json"}
STREAM = "/v1/stream/repeated"


async def test_plain_appends_are_there_once_after_their_gateway_is_killed(stores: Stores) -> None:
    async with (
        running(stores) as cluster,
        Repeats(cluster.gateways) as repeats,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, [repeats.url])
        made = await http.ask("PUT", STREAM, [0], headers=JSON)
        assert (made.status, "Location" in made.headers) == (201, True)
        events = asyncio.ensure_future(http.ask("GET", f"{STREAM}?offset=-1&live=sse"))

        async def append(first: int) -> None:
            for number in range(first, first + 20):
                done = await http.ask("POST", STREAM, [number])
                assert done.status == 204, done
                assert not any(name.startswith("Producer-") for name in done.headers)

        one = asyncio.create_task(append(100))
        await append(200)
        await cluster.kill("gateway-1")
        other = asyncio.create_task(append(300))
        await cluster.kill("bookie-1")
        await append(400)
        await asyncio.gather(one, other)
        last = await http.ask("POST", STREAM, [1], headers={"Stream-Closed": "true"})
        assert (last.status, last.headers["Stream-Closed"]) == (204, "true")
        await cluster.restart("gateway-1")

        found = (await http.ask("GET", STREAM)).json
        assert (found[0], found[-1]) == (0, 1)
        assert sorted(found[1:-1]) == [
            n for first in (100, 200, 300, 400) for n in range(first, first + 20)
        ]
        seen = [
            message
            for event in (await events).body.split(b"\n\n")
            if b"event: data" in event
            for message in orjson.loads(event.partition(b"\ndata:")[2])
        ]
        assert seen == found
        assert await repeats.appends.read_back(cluster.gateways) == (82, [])

        # The judge sees what is missing, and what is other than it was.
        repeats.appends.acknowledged(STREAM, 83, b"2")
        repeats.appends.acknowledged(STREAM, 1, b"2")
        _, lost = await repeats.appends.read_back(cluster.gateways)
        assert len(lost) == 2 * len(cluster.gateways)
