"""Positions of a cluster whose database is lost or goes back: they survive what records survive (rules 18a, 18d)."""

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores, scratch
from quorumlog.protocol import offset_store
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.logs import keeper
from tests.cluster.restore.operator import Operator
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Http
from tests.unit.metadata.restores import dump, restore
from tests.unit.positions.test_cluster import LOG, ME, acquired, committed
from tests.unit.positions.test_http import commit, served

SETTINGS = {**UNHURRIED, "COLLECT_S": "1", "COLLECT_GRACE_S": "1"}


async def append(http: Http, count: int) -> None:
    """One append for each record, so that the log rolls."""
    for at in range(count):
        await http.done("POST", f"{LOG}/records", {"records": [{"text": str(at)}]})


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


async def test_positions_leases_and_the_creation_of_their_log_survive_the_loss_of_the_database() -> (
    None
):
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


async def test_no_position_begins_anew_over_a_database_that_went_back_and_a_rebuild_has_all_of_them(
    stores: Stores, tmp_path: Path
) -> None:
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


async def test_a_log_of_positions_that_was_rebuilt_gets_small_ledgers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
