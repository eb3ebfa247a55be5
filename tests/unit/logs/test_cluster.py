"""Logs on real processes: what the model of ledgers can't show."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client
from quorumlog.errors import UNKNOWN, ExpiredProducer
from quorumlog.protocol.log import PRODUCERS_MAX
from tests.support.proxy import proxy_to
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.gateway.engine.support import outage
from tests.unit.logs.support import Answer, Http, Producer, check_exactly_once

LOG = "/v1/logs/log"


@asynccontextmanager
async def a_log(stores: Stores, bookies: int = 4) -> AsyncIterator[tuple[Cluster, Http]]:
    async with running(stores, bookies=bookies) as cluster, aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        yield cluster, http


async def owner_of(cluster: Cluster, http: Http) -> int:
    """The number of the gateway that owns the log, from 0."""
    owner = (await http.done("GET", LOG))["owner"]
    assert owner is not None
    return cluster.gateways.index(owner["url"])


async def test_an_overloaded_owner_refuses_appends_and_goes_on(stores: Stores) -> None:
    """Rule 24a: appends that waited for its takeover find too little room; it does not end, and its ledger is not fenced."""
    room = {"LEDGER_IN_FLIGHT_BYTES_MAX": "1000000"}
    async with (
        running(stores, bookies=3, gateways=1, environment=room) as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        large = {"text": "x" * 100_000}

        async def crowd() -> set[int]:
            answers = await asyncio.gather(
                *(http.ask("POST", f"{LOG}/records", large) for _ in range(60))
            )
            return {answer.status for answer in answers}

        assert await crowd() == {201, 429}
        assert await crowd() <= {201, 429}

        shown = await http.done("GET", LOG)
        assert [one["first_offset"] for one in shown["ledgers"]] == [0]
        assert "log-owner-ended" not in cluster.log("gateway-1")


async def until_acknowledged(producers: list[Producer], count: int) -> None:
    await until(
        lambda: sum(len(producer.acknowledged) for producer in producers) >= count,
        f"{count} records are acknowledged",
        SETTLED_S,
    )


async def test_a_log_goes_on_when_its_owner_and_a_bookie_are_killed_under_producers(
    stores: Stores,
) -> None:
    async with a_log(stores) as (cluster, http):
        producers = [
            Producer(http, "log", name, at=at) for at, name in ((0, "a"), (1, "b"), (0, "c"))
        ]
        async with asyncio.TaskGroup() as group:
            for producer in producers:
                group.create_task(producer.run(60))
            await until_acknowledged(producers, 30)
            first = await owner_of(cluster, http)
            await http.done("POST", f"{LOG}/roll", at=1 - first)
            await cluster.kill(f"gateway-{first + 1}")
            await until_acknowledged(producers, 90)
            await cluster.kill("bookie-1")
            await cluster.restart(f"gateway-{first + 1}")

        found = await http.contents("log", at=0)

        assert sum(len(producer.acknowledged) for producer in producers) == len(found) == 180
        check_exactly_once(found, producers)
        assert await http.contents("log", at=1) == found


async def test_an_owner_that_was_paused_and_displaced_loses_and_doubles_nothing(
    stores: Stores,
) -> None:
    async with a_log(stores, bookies=3) as (cluster, http):
        producers = [Producer(http, "log", name, at=at) for at, name in ((0, "a"), (1, "b"))]
        async with asyncio.TaskGroup() as group:
            for producer in producers:
                group.create_task(producer.run(40))
            await until_acknowledged(producers, 20)
            first = await owner_of(cluster, http)
            cluster.pause(f"gateway-{first + 1}")
            try:
                await until_acknowledged(producers, 50)
            finally:
                cluster.resume(f"gateway-{first + 1}")

        found = await http.contents("log", at=first)

        check_exactly_once(found, producers)
        assert len(found) == 80
        assert await http.contents("log", at=1 - first) == found


async def test_a_gateway_that_is_told_to_end_hands_its_logs_over_and_a_killed_one_loses_nothing(
    stores: Stores,
) -> None:
    async with a_log(stores, bookies=3) as (cluster, http):
        producer = Producer(http, "log", "a")
        async with asyncio.TaskGroup() as group:
            group.create_task(producer.run(30))
            await until_acknowledged([producer], 10)
            first = await owner_of(cluster, http)
            await cluster.kill(f"gateway-{first + 1}", signal.SIGTERM)
        second = 1 - first
        ledgers = (await http.done("GET", LOG, at=second))["ledgers"]
        assert [ledger["state"] for ledger in ledgers[:-1]] == ["CLOSED"] * (len(ledgers) - 1)
        await cluster.restart(f"gateway-{first + 1}")
        await cluster.kill(f"gateway-{second + 1}")

        # Nobody appends: the read itself makes what the killed owner acknowledged readable.
        found = await http.contents("log", at=first)

        check_exactly_once(found, [producer])
        assert len(found) == 30


async def test_a_gateway_that_missed_its_logs_end_writes_nothing_into_what_bookies_have_forgotten(
    stores: Stores,
) -> None:
    """Only its metadata connection was gone, while the log was opened and truncated elsewhere, and the
    bookies dropped the ledger that it writes (rule 16a).
    """
    at_once = {"COLLECT_S": "0.2", "COLLECT_GRACE_S": "0", **UNHURRIED}
    async with (
        running(stores, bookies=3, environment=at_once) as cluster,
        aiohttp.ClientSession() as session,
        proxy_to(cluster.url("metadata-1")) as proxy,
    ):
        cluster.notify("gateway-1", METADATA_URLS=proxy.url(cluster.url("metadata-1")))
        await cluster.kill("gateway-1")
        await cluster.restart("gateway-1")
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        old = (await http.append_once(f"{LOG}/records", {"text": "a"}))["ledger_id"]

        async with outage(proxy):
            await http.append_once(f"{LOG}/records", {"text": "b"})
            opened = await http.done("POST", f"{LOG}/open", {"owner": "me"}, at=1)
            token = {"Writer-Token": str(opened["writer_token"])}
            assert (
                await http.ask("POST", f"{LOG}/records", {"text": "c"}, at=1, headers=token)
            ).status == 201
            await http.done("POST", f"{LOG}/truncate", {"before": 2}, at=1)
            await until(lambda: has_dropped(cluster, old), "a bookie has dropped the ledger")

        async def writes_nothing() -> bool:
            metrics = (await http.ask("GET", "/metrics")).body.decode()
            return "quorumlog_gateway_open_ledgers 0.0" in metrics

        await until(writes_nothing, "its handle has ended", SETTLED_S)
        refused = await http.ask("POST", f"{LOG}/records", {"text": "x"})
        done = await http.ask("POST", f"{LOG}/records", {"text": "d"}, headers=token)

        assert (refused.status, refused.json["code"]) == (409, "log-fenced")
        assert (done.status, done.json["first_offset"]) == (201, 3)
        assert await http.contents("log", at=0) == await http.contents("log", at=1) == ["c", "d"]


def has_dropped(cluster: Cluster, ledger_id: int) -> bool:
    """Whether all bookies have."""
    lines = [
        json.loads(line)
        for name in ("bookie-1", "bookie-2", "bookie-3")
        for line in cluster.log(name).splitlines()
        if '"ledger-dropped"' in line
    ]
    return [line["ledger"] for line in lines].count(ledger_id) == 3


async def test_a_producer_that_was_forgotten_is_not_taken_for_new_through_any_gateway_or_takeover(
    stores: Stores,
) -> None:
    async with a_log(stores, bookies=3) as (cluster, http):

        async def send(number: int, since: int | None, *, at: int = 0, epoch: int = 0) -> Answer:
            headers = {
                "Producer-Id": f"p{number}",
                "Producer-Epoch": str(epoch),
                "Producer-Seq": "0",
            } | ({} if since is None else {"Producer-Since": str(since)})

            async def answered() -> Answer | None:
                path = f"{LOG}/records"
                answer = await http.ask("POST", path, {"text": "x"}, at=at, headers=headers)
                return None if answer.status in (429, 503, 504) else answer

            answer = await until(answered, "an answer", SETTLED_S, passing=(aiohttp.ClientError,))
            assert answer is not None
            return answer

        async def is_expired(gateways: tuple[int, ...]) -> None:
            for at in gateways:
                for since, epoch in ((None, 0), (0, 0), (0, 1)):
                    answer = await send(0, since, at=at, epoch=epoch)
                    assert answer.status == 409, answer
                    assert answer.json["code"] == "expired-producer"

        assert (await send(0, 0)).status == 201
        for first in range(1, PRODUCERS_MAX + 1, 50):
            many = range(first, min(first + 50, PRODUCERS_MAX + 1))
            answers = await asyncio.gather(*(send(n, 1, at=n % 2) for n in many))
            assert {answer.status for answer in answers} == {201}
        await is_expired((0, 1))
        owner = await owner_of(cluster, http)
        # One that is made since is new, also where its request is forwarded.
        assert (await send(PRODUCERS_MAX + 1, PRODUCERS_MAX + 1, at=1 - owner)).status == 201
        await http.done("POST", f"{LOG}/roll", at=1 - owner)
        await is_expired((0, 1))
        await cluster.kill(f"gateway-{owner + 1}")
        await is_expired((1 - owner,))

        end = (await http.done("GET", LOG, at=1 - owner))["next_offset"]
        assert end == PRODUCERS_MAX + 2
        assert (await send(0, end, at=1 - owner, epoch=1)).json["first_offset"] == end
        async with Client(*cluster.gateways) as client:
            log = client.log("log")
            assert (await log.producer().append(b"x")).first_offset == end + 1
            with pytest.raises(ExpiredProducer) as expired:
                await log.producer("who?", epoch=0).append(b"x")
            assert expired.value.outcome == UNKNOWN, "whose epoch it is may have sent it before"
        assert len(await http.contents("log", at=1 - owner)) == end + 2
