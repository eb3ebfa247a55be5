"""Streams on real processes, through the gateway that does not write the ledger."""

import asyncio
import struct

import aiohttp
import orjson

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.support.waiting import DEADLINE_S, UNHURRIED, until

COUNT = 3000


async def test_streams_keep_their_order_through_another_gateway(stores: Stores) -> None:
    async with (
        running(stores, bookies=3, gateways=2, environment=UNHURRIED) as cluster,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10 * DEADLINE_S)) as http,
    ):
        writer, other = cluster.gateways

        async def created() -> int:
            async with http.post(f"{writer}/v1/ledgers") as answer:
                return int((await answer.json())["ledger_id"]) if answer.status == 201 else 0

        ledger = f"/v1/ledgers/{await until(created, 'a ledger is created')}"
        tail = asyncio.create_task(_tail(http, f"{other}{ledger}/entries?encoding=text"))
        lines = b"".join(b'{"text":"line %d"}\n' % n for n in range(COUNT))

        async with http.post(
            f"{other}{ledger}/entries",
            data=lines,
            headers={"Content-Type": "application/x-ndjson"},
        ) as streamed:
            acknowledged = [orjson.loads(line) async for line in streamed.content]
        async with http.ws_connect(f"{other}{ledger}/ws") as socket:
            for n in range(COUNT, COUNT + 100):
                payload = b"line %d" % n
                await socket.send_bytes(struct.pack(">I", len(payload)) + payload)
            last = -1
            while last < COUNT + 99:
                last = (await socket.receive_json(timeout=10 * DEADLINE_S))["last_entry"]
        async with http.post(f"{other}{ledger}/close") as closed:
            assert (await closed.json())["last_entry"] == COUNT + 99

        assert acknowledged[0]["first_entry"] == 0
        assert acknowledged[-1]["last_entry"] == COUNT - 1
        assert await tail == [f"line {n}" for n in range(COUNT + 100)]
        async with http.get(
            f"{other}{ledger}/entries?encoding=text", headers={"Accept": "application/x-ndjson"}
        ) as read:
            texts = [orjson.loads(line)["text"] async for line in read.content]
        assert texts == [f"line {n}" for n in range(COUNT + 100)]


async def _tail(http: aiohttp.ClientSession, url: str) -> list[str]:
    """The texts of all events until the last one, which is the end."""
    texts: list[str] = []
    async with http.get(url, headers={"Accept": "text/event-stream"}) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b'data: {"entry_id"'):
                texts.append(orjson.loads(line.removeprefix(b"data: "))["text"])
            elif line.startswith(b"event:"):
                assert line == b"event: end\n"
    return texts
