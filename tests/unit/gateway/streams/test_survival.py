"""A stream on real processes, of which one is killed."""

import asyncio

import aiohttp
import orjson

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Answer, Http

STREAM = "/v1/stream/survivor"
TEXT = {"Content-Type": "text/plain"}


def producer(seq: int) -> dict[str, str]:
    return TEXT | {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(seq)}


async def followed(http: Http) -> bytes:
    """What a reader of events sees until the stream is closed. A connection may end before, as when the owner is killed:
    then it goes on behind what it has.
    """
    seen, unread, offset, is_closed = b"", b"", "-1", False
    while not is_closed:
        events = await http.ask("GET", f"{STREAM}?offset={offset}&live=sse", at=1)
        for event in events.body.split(b"\n\n"):
            lines = event.splitlines()
            data = b"".join(line[5:] for line in lines if line.startswith(b"data:"))
            if b"event: control" in lines:
                control = orjson.loads(data)
                offset, is_closed = control["streamNextOffset"], "streamClosed" in control
                seen, unread = seen + unread, b""
            elif b"event: data" in lines:
                unread = data
    return seen


async def test_a_stream_goes_on_and_ends_once_when_its_owner_is_killed(stores: Stores) -> None:
    async with running(stores) as cluster, aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)

        async def sent(at: int, headers: dict[str, str], body: bytes) -> Answer:
            """The answer to a request that is sent until it gets one: a repeat is harmless."""

            async def ask() -> Answer | None:
                answer = await http.ask("POST", STREAM, at=at, headers=headers, body=body)
                return None if answer.status in (429, 503, 504) else answer

            found = await until(ask, "an answer", SETTLED_S, passing=(aiohttp.ClientError, OSError))
            assert found is not None
            return found

        created = await http.ask("PUT", STREAM, at=0, headers=TEXT, body=b"0")
        assert created.status == 201
        waiting = asyncio.ensure_future(followed(http))
        for seq in range(4):
            # Through both gateways: the first one owns the log.
            assert (await sent(seq % 2, producer(seq), b"%d" % (seq + 1))).status == 200
        await cluster.kill("gateway-1")
        assert (await sent(1, producer(4), b"5")).status == 200
        assert (await sent(1, producer(3), b"x")).status == 204
        last = {**producer(5), "Stream-Closed": "true"}
        assert (await sent(1, last, b"6")).status == 200
        assert (await sent(1, last, b"6")).status == 204
        after = await sent(1, producer(6), b"7")
        assert (after.status, after.headers["Stream-Closed"]) == (409, "true")

        read = await http.ask("GET", STREAM, at=1)
        assert (read.body, read.headers["Stream-Closed"]) == (b"0123456", "true")
        # The reader of the other gateway saw each part of it once, up to the end of the stream.
        assert await waiting == b"0123456"
