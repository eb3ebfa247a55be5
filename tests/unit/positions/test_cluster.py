"""Consumers on real processes: owners that die or stand still, metadata that is away or lost."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores, scratch
from quorumlog.client import Client, transport
from quorumlog.protocol import offset_store
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.logs import keeper
from tests.cluster.restore.operator import Operator
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Answer, Http
from tests.unit.metadata.restores import dump, restore
from tests.unit.positions.test_http import commit, served

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
        await http.append_once(f"{LOG}/records", records)
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
        for at in (0, 1):  # the log of positions has a ledger, which is in no list
            ledgers = (await http.done("GET", "/v1/ledgers", at=at))["ledgers"]
            assert [ledger["ledger_id"] for ledger in ledgers] == [1]
        deleted = await http.ask("DELETE", "/v1/ledgers/2")
        assert (deleted.status, deleted.json["code"]) == (409, "owned-by-log")
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


async def test_an_owner_that_stood_still_tells_and_undoes_nothing_old(stores: Stores) -> None:
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


async def test_unused_consumers_and_those_of_deleted_logs_go(stores: Stores) -> None:
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


SETTINGS = {**UNHURRIED, "COLLECT_S": "1", "COLLECT_GRACE_S": "1"}


async def append(http: Http, count: int) -> None:
    """One append for each record, so that the log rolls."""
    for at in range(count):
        await http.append_once(f"{LOG}/records", {"records": [{"text": str(at)}]})


async def shown(http: Http) -> Any:
    """The consumer, once the logs are taken over."""

    async def look() -> Any:
        answer = await http.ask("GET", ME)
        # Where the log's row is there, so is that of the positions.
        assert answer.status != 404, answer
        return answer.json if answer.status == 200 else None

    return await until(look, "the consumer is told", SETTLED_S, passing=(aiohttp.ClientError,))


async def goes_on(http: Http, token: str, *, at: int, to: int) -> None:
    """The consumer is where it was, its lease is held, and its holder goes on."""
    reported = await shown(http)
    assert (reported["offset"], reported["state"], reported["lease"]["holder"]) == (at, "ok", "w1")
    assert reported["lag"]["records"] == 10 - at
    refused = await http.ask("POST", f"{ME}/lease", {"holder": "w2"})
    assert (refused.status, refused.json["code"]) == (409, "lease-held")
    moved = await committed(http, to, token, at=0)
    assert (moved["offset"], moved["version"] > reported["version"]) == (to, True)
    await http.done("POST", f"{ME}/reset", {"to": 1})
    fenced = await http.ask("PUT", ME, {"offset": 9}, headers={"Fencing-Token": token})
    assert (fenced.status, fenced.json["code"]) == (409, "lease-lost")
    assert int(await acquired(http, "w2", at=0)) > int(token)


async def test_positions_and_leases_survive_the_loss_of_the_database() -> None:
    with scratch("ql-positions-") as folder:
        settings: dict[str, Any] = {"gateways": 1, "data": folder, "environment": SETTINGS}
        async with running(None, **settings) as cluster, aiohttp.ClientSession() as session:
            http = Http(session, cluster.gateways)
            await http.done("PUT", LOG, {"roll_entries": 3})
            await append(http, 10)
            token = await acquired(http, "w1", at=0)
            before = await committed(http, 7, token, at=0)
            await cluster.kill_all()
        shutil.rmtree(Path(folder) / "postgres")

        async with (
            running(None, **settings, rebuild_metadata=True) as cluster,
            aiohttp.ClientSession() as session,
        ):
            http = Http(session, cluster.gateways)
            reported = await shown(http)
            assert reported["log_created_at"] == before["log_created_at"]
            assert reported["version"] == before["version"]
            await goes_on(http, token, at=7, to=8)


async def test_no_position_begins_anew_after_a_restore(stores: Stores, tmp_path: Path) -> None:
    async with (
        running(stores, bookies=3, gateways=1, environment=SETTINGS) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http, operator = Http(session, cluster.gateways), Operator(cluster)
        await http.done("PUT", LOG, {})
        await append(http, 10)
        old = await dump(stores, tmp_path / "old")
        token = await acquired(http, "w1", at=0)
        await committed(http, 7, token, at=0)
        await operator.kill(operator.named("gateway"))
        await operator.kill(operator.named("autorecovery"))
        await operator.stop_metadata()
        await restore(stores, old)
        await operator.until_told()
        cluster.start("gateway-1")
        await until_up(cluster, session)

        for method, path, json, headers in (
            ("POST", f"{ME}/lease", {"holder": "w2", "lease_ms": 1000}, {}),
            ("PUT", ME, {"offset": 1}, {"If-None-Match": "*"}),
        ):
            refused = await http.ask(method, path, json, headers=headers)
            assert refused.status == 503, refused

        await operator.rebuild()
        await operator.accept()
        await operator.kill(operator.named("gateway"))
        await operator.until_well()
        await goes_on(http, token, at=7, to=8)


async def until_up(cluster: Cluster, session: aiohttp.ClientSession) -> None:
    """Wait until the gateway answers, ready or not."""

    async def answers() -> bool:
        async with session.get(f"{cluster.gateways[0]}/health/live") as answer:
            return answer.status == 200

    await until(answers, "the gateway answers", SETTLED_S, passing=(aiohttp.ClientError,))


async def test_a_rebuilt_log_of_positions_rolls_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuilt log has the default settings: a takeover would read what ledgers of 256 MiB have gathered."""
    monkeypatch.setattr(offset_store, "_TRUNCATE_EVERY", 3)
    monkeypatch.setattr(offset_store, "_KEPT_RECORDS", 1)
    async with served() as (http, cluster):
        made = await commit(http, 0, If_None_Match="*")
        row = cluster.logs[POSITIONS_LOG]
        assert row.settings.roll_bytes == keeper._ROLL_BYTES
        cluster.logs[POSITIONS_LOG] = row.with_limits({"roll_bytes": 256 << 20}).protected(
            is_on=False
        )
        tag = made.headers["ETag"]
        for offset in range(1, 9):
            tag = (await commit(http, offset, If_Match=tag)).headers["ETag"]

        def is_small() -> bool:
            row = cluster.logs[POSITIONS_LOG]
            return row.settings.roll_bytes == keeper._ROLL_BYTES and row.deletion_protection

        await until(is_small, "the limit is set")
