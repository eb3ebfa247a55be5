"""Streams and tails through gateways and connections that fail: nothing is lost or repeated."""

import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.bench.tail import Scale, run
from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.support.waiting import SETTLED_S, until, within

pytestmark = pytest.mark.asyncio(loop_scope="package")

NDJSON = "application/x-ndjson"
COUNT = 3000


async def lines(cluster: Cluster, path: str) -> list[str]:
    """All that is there, in order, through the other gateway."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"{cluster.gateways[1]}{path}?encoding=text", headers={"Accept": NDJSON}
        ) as answer,
    ):
        found = [orjson.loads(line) for line in (await answer.read()).splitlines()]
        return [reported["text"] for reported in found if "text" in reported]


async def new_path(cluster: Cluster, kind: str) -> str:
    async with Client(*cluster.gateways) as client:
        if kind == "ledger":
            return f"/v1/ledgers/{(await client.create_ledger()).ledger_id}/entries"
        log = await client.create_log(f"stream-{random.randrange(1 << 60):x}")
        return f"/v1/logs/{log.name}/records"


class Sender:
    """Streams its lines, is cut off at random, and goes on where `expect` says."""

    def __init__(self, gateways: list[str], path: str, chance: random.Random) -> None:
        self.gateways, self.path, self.chance = gateways, path, chance
        self.following = 0
        """Of the lines that are there for sure, the number."""
        self.cuts = 0

    async def run(self, session: aiohttp.ClientSession) -> None:
        while self.following < COUNT:
            try:
                await self._stream(session, is_cut=self.cuts < 6)
            except aiohttp.ClientError:
                self.cuts += 1

    async def _stream(self, session: aiohttp.ClientSession, *, is_cut: bool) -> None:
        url = self.chance.choice(self.gateways) + self.path
        end = self.following + self.chance.randrange(100, 500) if is_cut else COUNT

        async def body() -> AsyncIterator[bytes]:
            for n in range(self.following, min(end, COUNT)):
                yield b'{"text":"%d"}\n' % n
            if is_cut:
                raise aiohttp.ClientError("cut off by the test")

        async with session.post(
            url, params={"expect": self.following}, data=body(), headers={"Content-Type": NDJSON}
        ) as answer:
            if answer.status == 412:
                header = "Next-Entry-Id" if "ledgers" in self.path else "Next-Offset"
                self.following = int(answer.headers[header])
                return
            if answer.status in (429, 503, 504):  # nothing of it was read; the next one asks anew
                return
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                self._take(orjson.loads(line))

    def _take(self, reported: dict[str, Any]) -> None:
        if "code" in reported:
            return  # where the next one begins is asked by `expect`
        first = reported.get("first_entry", reported.get("first_offset"))
        last = reported.get("last_entry", reported.get("last_offset"))
        assert isinstance(last, int)
        assert first == self.following, "acknowledgements are without a gap"
        self.following = last + 1


@pytest.mark.parametrize("kind", ["ledger", "log"])
async def test_a_stream_cut_off_repeatedly_is_read_once_whole(cluster: Cluster, kind: str) -> None:
    path = await new_path(cluster, kind)
    sender = Sender(cluster.gateways, path, random.Random(11))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, within("all is sent", SETTLED_S):
        await sender.run(session)

    assert sender.cuts

    async def all_lines() -> list[str] | None:
        # Where the writer is slow to answer, the other gateway shows what bookies know: a beginning.
        found = await lines(cluster, path)
        assert found == [str(n) for n in range(len(found))]
        return found if len(found) >= COUNT else None

    found = await until(all_lines, "all is read through the other gateway")
    assert found is not None
    assert len(found) == COUNT


@pytest.mark.parametrize("is_log", [False, True], ids=["ledger", "log"])
async def test_every_reader_sees_every_record(cluster: Cluster, is_log: bool) -> None:
    scale = Scale(readers=40, writers=5, records=20, rate=50.0, is_log=is_log)

    figures = await run(scale, cluster)

    assert figures["wrong readers"] == 0
    # Of the records that arrive together one counts, for each reader.
    assert figures["latencies"] >= scale.readers
