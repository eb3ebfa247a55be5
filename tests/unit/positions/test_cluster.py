"""Consumers on real processes: owners that are killed or stand still, and metadata that is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client, transport
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Answer, Http

LOG = "/v1/logs/log"
ME = f"{LOG}/consumers/me"
LEASE_MS = 600_000
"""Longer than any test: who waits for its end fails."""


@asynccontextmanager
async def a_log(stores: Stores, **environment: str) -> AsyncIterator[tuple[Cluster, Http]]:
    async with (
        running(stores, bookies=3, environment=environment) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        records = {"records": [{"text": str(at)} for at in range(100)]}
        await http.done("POST", f"{LOG}/records", records)
        yield cluster, http


async def acquired(http: Http, holder: str, *, at: int, started: int = 0) -> str:
    """The fencing token."""
    wanted = {"holder": holder, "lease_ms": LEASE_MS, "started": started}
    answer = await http.done("POST", f"{ME}/lease", wanted, at=at)
    return str(answer["lease"]["fencing_token"])


async def committed(http: Http, offset: int, token: str, *, at: int) -> Any:
    """Commit until there is an answer that says what became of it."""

    async def ask() -> Answer | None:
        async with asyncio.timeout(10):  # a gateway that stands still must not hold it for ever
            answer = await http.ask(
                "PUT", ME, {"offset": offset}, at=at, headers={"Fencing-Token": token}
            )
        if answer.status < 300:
            return answer
        problem = answer.json
        assert problem["retryable"] or problem["outcome"] == "unknown", answer
        return None

    answer = await until(
        ask, f"{offset} is committed", SETTLED_S, passing=(aiohttp.ClientError, TimeoutError)
    )
    assert answer is not None
    return answer.json


async def test_a_position_and_its_lease_outlive_the_gateway_that_owned_them(stores: Stores) -> None:
    """Metrics show it though nobody asks for a position: the gateway that is left takes them over by itself."""
    async with a_log(stores) as (cluster, http):
        token = await acquired(http, "w1", at=0)
        await committed(http, 40, token, at=0)
        await cluster.kill("gateway-1")
        shown = 'quorumlog_consumer_lag_records{consumer="me",log="log"} 60.0'

        async def is_reported() -> bool:
            metrics = f"{cluster.url('gateway-2')}/metrics"
            async with http.session.get(metrics, headers=cluster.headers) as answer:
                return shown in (await answer.text()).splitlines()

        await until(is_reported, "the lag is measured", SETTLED_S, passing=(aiohttp.ClientError,))
        assert (await http.done("GET", ME, at=1))["offset"] == 40
        held = await http.ask("POST", f"{ME}/lease", {"holder": "w2"}, at=1)
        assert (held.status, held.json["code"]) == (409, "lease-held")
        await committed(http, 50, token, at=1)
        await cluster.restart("gateway-1")
        await committed(http, 60, token, at=0)
        await http.done("POST", f"{ME}/reset", {"to": 10}, at=1)
        assert int(await acquired(http, "w2", at=0)) > int(token)
        fenced = await http.ask("PUT", ME, {"offset": 70}, headers={"Fencing-Token": token}, at=1)
        assert (fenced.status, fenced.json["code"]) == (409, "lease-lost")
        found = await http.done("GET", ME, at=1)
        assert (found["offset"], found["lease"]["holder"]) == (10, "w2")
        assert found["lag"]["records"] == 90
        assert found["lag"]["bytes"] > 0


async def stays(http: Http, token: str) -> None:
    """The lease holds and the position goes on, whatever a gateway that woke up does late."""
    for offset in range(50, 80):
        answer = await http.ask(
            "PUT", ME, {"offset": offset}, at=offset % 2, headers={"Fencing-Token": token}
        )
        assert answer.status == 200, answer
        assert (await http.done("GET", ME, at=offset % 2))["offset"] == offset


async def test_an_owner_that_stood_still_tells_no_older_position_and_undoes_no_change_of_another(
    stores: Stores,
) -> None:
    """Gateways repeat by themselves what they have sent to an owner that does not answer."""
    async with a_log(stores) as (cluster, http):
        await acquired(http, "w1", at=0)
        cluster.pause("gateway-1")
        try:
            token = await acquired(http, "w1", at=1, started=1)
            await committed(http, 40, token, at=1)
        finally:
            cluster.resume("gateway-1")
        assert (await http.done("GET", ME, at=0))["offset"] == 40
        await stays(http, token)
        cluster.pause("gateway-2")  # the owner now
        try:
            await http.done("POST", f"{ME}/reset", {"to": 0}, at=0)
            token = await acquired(http, "w1", at=0, started=1)
            await committed(http, 40, token, at=0)
        finally:
            cluster.resume("gateway-2")
        await stays(http, token)


async def test_a_gateway_that_stood_still_with_a_clients_reset_does_not_do_it_after_another_has(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_ATTEMPT_S", 1.0)
    async with a_log(stores) as (cluster, http), Client(*reversed(http.urls)) as client:
        await acquired(http, "w1", at=0)
        log = client.log("log")
        await log.consumer_info("me")
        cluster.pause("gateway-2")
        try:
            assert (await log.reset_consumer("me", 0))["offset"] == 0
            token = await acquired(http, "w1", at=0)
            await committed(http, 40, token, at=0)
        finally:
            cluster.resume("gateway-2")
        await stays(http, token)


async def test_consumers_of_a_deleted_log_and_unused_ones_go_and_one_whose_lease_is_held_stays(
    stores: Stores,
) -> None:
    async with a_log(stores, CONSUMER_EXPIRY_S="2") as (_, http):
        await acquired(http, "w1", at=0)
        await http.done("PUT", "/v1/logs/kept", {})
        kept, idle = "/v1/logs/kept/consumers/me", "/v1/logs/kept/consumers/idle"
        token = (await http.done("POST", f"{idle}/lease", {"holder": "w"}))["lease"]
        let_go = {"Fencing-Token": str(token["fencing_token"])}
        await http.done("POST", f"{kept}/lease", {"holder": "w", "lease_ms": LEASE_MS})
        assert (await http.ask("DELETE", f"{idle}/lease", headers=let_go)).status == 204
        assert (await http.ask("DELETE", LOG, at=1)).status == 204

        async def are_gone() -> bool:
            found = (await http.done("GET", "/v1/consumers"))["consumers"]
            return [(one["log"], one["consumer"]) for one in found] == [("kept", "me")]

        await until(are_gone, "two consumers go", SETTLED_S)
        assert (await http.done("GET", kept))["lease"]["holder"] == "w"


async def test_a_cluster_without_consumers_has_no_log_of_positions_and_later_it_is_in_no_list(
    stores: Stores,
) -> None:
    async with a_log(stores) as (_, http):
        assert (await http.done("GET", f"{LOG}/consumers"))["consumers"] == []
        assert [log["name"] for log in (await http.done("GET", "/v1/logs"))["logs"]] == ["log"]
        assert [
            ledger["ledger_id"] for ledger in (await http.done("GET", "/v1/ledgers"))["ledgers"]
        ] == [1]
        token = await acquired(http, "w1", at=1)
        await committed(http, 40, token, at=0)
        for at in (0, 1):
            logs = (await http.done("GET", "/v1/logs", at=at))["logs"]
            ledgers = (await http.done("GET", "/v1/ledgers", at=at))["ledgers"]
            assert [log["name"] for log in logs] == ["log"]
            assert [ledger["ledger_id"] for ledger in ledgers] == [1]
        deleted = await http.ask("DELETE", "/v1/ledgers/2")
        assert (deleted.status, deleted.json["code"]) == (409, "owned-by-log")


async def test_commits_go_on_while_the_metadata_service_stands_still(stores: Stores) -> None:
    async with a_log(stores) as (cluster, http):
        token = await acquired(http, "w1", at=0)
        await committed(http, 1, token, at=0)
        cluster.pause("metadata-1")
        try:
            for offset in range(2, 30):
                await committed(http, offset, token, at=0)
        finally:
            cluster.resume("metadata-1")
        assert (await http.done("GET", ME, at=1))["offset"] == 29
