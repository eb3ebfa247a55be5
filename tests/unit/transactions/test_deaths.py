"""Transactions on real processes of which some die between the steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Http
from tests.unit.transactions.support import LOG, TRANSACTIONS, begin, write

GATEWAYS = 2


@asynccontextmanager
async def a_log(stores: Stores) -> AsyncIterator[tuple[Cluster, Http]]:
    async with (
        running(stores, gateways=GATEWAYS, environment=UNHURRIED) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        yield cluster, http


async def committed(http: Http, transaction: str, ledgers: list[int]) -> tuple[int, int]:
    """Commit until there is an answer, through one gateway after another: where its records are."""
    at = 0

    async def ask() -> tuple[int, int] | None:
        nonlocal at
        at = (at + 1) % len(http.urls)
        path = f"{TRANSACTIONS}/{transaction}/commit"
        async with asyncio.timeout(20):
            answer = await http.ask("POST", path, {"ledgers": ledgers}, at=at)
        if answer.status == 200:
            return answer.json["first_offset"], answer.json["last_offset"]
        assert answer.json["retryable"] or answer.json["outcome"] == "unknown", answer
        return None

    found = await until(
        ask, "it is committed", SETTLED_S, passing=(aiohttp.ClientError, OSError, TimeoutError)
    )
    assert found is not None
    return found


async def test_a_commit_is_done_once_whatever_dies_on_the_way(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http):
        where: dict[str, tuple[int, int]] = {}

        async def job(number: int) -> None:
            name = await begin(http, at=number % GATEWAYS, app=f"job-{number}", version=0)
            parts = [
                await write(
                    http, name, [[f"{number}.{part}"], [f"{number}.{part}+"]], at=number % 2
                )
                for part in range(2)
            ]
            await write(http, name, [["never"]], at=number % 2, seal=False)
            ready.append(number)
            await go.wait()
            where[str(number)] = await committed(http, name, parts)

        ready: list[int] = []
        go = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(job(number))
            await until(lambda: len(ready) == 6, "all parts are written")
            await http.append_once(f"{LOG}/records", {"text": "first"})
            owner = await until(lambda: owner_of(cluster, http), "somebody owns the log")
            assert owner is not None
            go.set()
            # Some commits are on their way through the owner, some are done, some wait.
            await until(lambda: bool(where), "a commit was answered", SETTLED_S)
            await cluster.kill(f"gateway-{owner}")
            await cluster.restart(f"gateway-{owner}")
            other = 3 - owner
            await cluster.kill(f"gateway-{other}")
            await cluster.restart(f"gateway-{other}")

        for at in range(GATEWAYS):
            found = await http.contents("log", at=at)
            assert found[0] == "first"
            assert len(found) == 1 + 6 * 4
            for name, (first, last) in where.items():
                mine = [f"{name}.0", f"{name}.0+", f"{name}.1", f"{name}.1+"]
                assert found[first : last + 1] == mine

        await until(lambda: is_clean(http), "nothing is left of what was not published", SETTLED_S)


async def owner_of(cluster: Cluster, http: Http) -> int | None:
    """The number of the gateway that owns the log, from 1."""
    owner = (await http.done("GET", LOG))["owner"]
    return None if owner is None else 1 + cluster.gateways.index(owner["url"])


async def is_clean(http: Http) -> bool:
    """Whether every ledger of a transaction is on the log."""
    ledgers = (await http.done("GET", "/v1/ledgers?log=log&limit=1000"))["ledgers"]
    on_log = {ledger["ledger_id"] for ledger in (await http.done("GET", LOG))["ledgers"]}
    return all(ledger["ledger_id"] in on_log for ledger in ledgers if "transaction" in ledger)
