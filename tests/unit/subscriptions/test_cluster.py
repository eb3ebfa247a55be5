"""Subscriptions on real processes: gateways that deliver are killed or stand still, and nothing is lost."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from loadtest.cluster import Cluster, running
from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.net.listen import listening
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Http

SUB = "/v1/stream/__ds/subscriptions/sub"
GUIDE: Final = Path(__file__).resolve().parents[3] / "docs" / "guides" / "webhooks.md"


class Receiver:
    """A webhook that is done with each wake that it gets, except those that it answers with 500."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: dict[str, str] = {}
        """The last offset of each stream that a wake showed, where the wake was accepted."""
        self.wakes: list[tuple[int, str, int]] = []
        """Of each delivery, the generation, the wake's id and the status."""

    async def handle(self, request: web.Request) -> web.Response:
        wake = orjson.loads(await request.read())
        status = 500 if len(self.wakes) % 4 == 3 else 200
        self.wakes.append((wake["generation"], wake["wake_id"], status))
        if status == 200:
            self.seen |= {each["path"]: each["tail_offset"] for each in wake["streams"]}
        return web.Response(status=status, body=b'{"done":true}')


@asynccontextmanager
async def a_receiver(stores: Stores) -> AsyncIterator[tuple[Cluster, Http, Receiver]]:
    app = web.Application()
    port = free_ports(1)[0]
    receiver = Receiver(f"http://127.0.0.1:{port}/hook")
    app.router.add_post("/hook", receiver.handle)
    environment = {"WEBHOOK_NETWORKS": "127.0.0.0/8"}
    async with (
        listening(app, host="127.0.0.1", port=port),
        running(stores, bookies=3, environment=environment) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)
        hook = {"type": "webhook", "webhook": {"url": receiver.url}, "pattern": "events/**"}
        await http.done("PUT", SUB, hook)
        yield cluster, http, receiver


async def append(http: Http, path: str, *, at: int) -> tuple[str, str]:
    """Append to a stream, which may not exist yet, until that is done. Returns it with its end."""

    async def ask() -> Any:
        async with asyncio.timeout(10):
            answer = await http.ask("POST", f"/v1/stream/{path}", {"n": 1}, at=at)
            if answer.status == 404:
                answer = await http.ask("PUT", f"/v1/stream/{path}", {"n": 1}, at=at)
        return answer if answer.status < 300 else None

    passing = (aiohttp.ClientError, TimeoutError)
    answer = await until(ask, f"{path} is appended to", SETTLED_S, passing=passing)
    return path, answer.headers["Stream-Next-Offset"]


async def told(http: Http, receiver: Receiver, ends: dict[str, str], *, at: int) -> None:
    """Wait until the receiver was told of all, and the subscription says so."""

    async def is_told() -> bool:
        return all(receiver.seen.get(path, "") >= end for path, end in ends.items())

    async def is_acked() -> bool:
        answer = await http.ask("GET", SUB, at=at)
        if answer.status != 200:
            return False
        acked = {each["path"]: each["acked_offset"] for each in answer.json["streams"]}
        return all(acked.get(path, "") >= end for path, end in ends.items())

    await until(is_told, "the receiver is told", SETTLED_S)
    passing = (aiohttp.ClientError, TimeoutError)
    await until(is_acked, "all is acknowledged", SETTLED_S, passing=passing)


def check(receiver: Receiver) -> None:
    """A generation is one wake."""
    wakes: dict[int, str] = {}
    for generation, wake_id, _ in receiver.wakes:
        assert wakes.setdefault(generation, wake_id) == wake_id
    assert {status for _, _, status in receiver.wakes} == {200, 500}


async def test_nothing_is_lost_where_gateways_that_deliver_are_killed(stores: Stores) -> None:
    async with a_receiver(stores) as (cluster, http, receiver):
        ends = dict([await append(http, "events/first", at=0)])
        await told(http, receiver, ends, at=0)
        for number in range(4):
            killed, other = f"gateway-{number % 2 + 1}", 1 - number % 2
            await cluster.kill(killed)
            for path in (f"events/{number}", "events/first", "events/a/b"):
                ends |= dict([await append(http, path, at=other)])
            await told(http, receiver, ends, at=other)
            await cluster.restart(killed)
        check(receiver)


async def test_a_gateway_that_stood_still_takes_nothing_back(stores: Stores) -> None:
    async with a_receiver(stores) as (cluster, http, receiver):
        ends = dict([await append(http, "events/a", at=0)])
        await told(http, receiver, ends, at=0)
        for number in range(2):
            paused, other = f"gateway-{number + 1}", 1 - number
            cluster.pause(paused)
            try:
                for _ in range(3):
                    ends |= dict([await append(http, "events/a", at=other)])
                await told(http, receiver, ends, at=other)
            finally:
                cluster.resume(paused)
            ends |= dict([await append(http, "events/a", at=number)])
            await told(http, receiver, ends, at=number)
        check(receiver)


async def test_the_receiver_of_the_guide_reads_what_the_guide_appends(
    stores: Stores, tmp_path: Path
) -> None:
    page = GUIDE.read_text()
    receiver = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    commands = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    async with a_receiver(stores) as (cluster, http, _):
        port = str(free_ports(1)[0])
        here = r"http://127\.0\.0\.1:8080|localhost:8080"
        texts = [
            re.sub(here, cluster.gateways[0], text).replace("9000", port)
            for text in (receiver, commands)
        ]
        (tmp_path / "receiver.py").write_text(texts[0])
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(tmp_path / "receiver.py"), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert program.stdout is not None
            run = await asyncio.create_subprocess_exec("sh", "-e", "-c", texts[1])
            assert await run.wait() == 0
            async with asyncio.timeout(SETTLED_S):
                assert await program.stdout.readline() == b"events/a [{'n': 1}]\n"

            async def is_done() -> bool:
                shown = await http.done("GET", SUB.removesuffix("sub") + "mailer")
                return bool(shown["streams"][0]["acked_offset"] != "-1")

            await until(is_done, "the guide's receiver is done", SETTLED_S)
            metrics = (await http.ask("GET", "/metrics")).body.decode()
            metrics += (await http.ask("GET", "/metrics", at=1)).body.decode()
            assert re.search(
                r"^quorumlog_subscription_deliveries_total [1-9]", metrics, re.MULTILINE
            )
            assert re.search(
                r"^quorumlog_subscription_oldest_undelivered_seconds ", metrics, re.MULTILINE
            )
            assert re.search(r"^quorumlog_subscriptions 2", metrics, re.MULTILINE)
        finally:
            program.kill()
            await program.wait()
