"""The lag of consumers in metrics: what is told, by whom, and what it costs. The ledgers behind are the model's."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quorumlog.errors import UnexpectedOffset
from quorumlog.protocol import positions
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log.messages import Append
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.logs import keeper, lags
from services.gateway.logs.lags import Measured
from services.gateway.logs.sweep import Sweep
from tests.model.logs.attempts import write
from tests.model.logs.model import Cluster, Gateway, Store
from tests.unit.logs.support import Http
from tests.unit.logs.test_manager import SETTINGS
from tests.unit.positions.test_http import served

HOUR_MS = 3600 * 1000
SLOW_S = 900
"""The test itself takes less on any machine; an hour more or less is told apart."""


async def swept(gateway: Gateway) -> Measured | None:
    """What a sweep measures."""
    await Sweep(gateway.logs, Store(gateway)).sweep_logs()
    task = gateway.logs.lags._task
    if task is not None:
        await task
    return gateway.logs.lags.measured


def shown(measured: Measured | None) -> dict[tuple[str, str], tuple[int, float | None]]:
    assert measured is not None
    return {(lag.log, lag.consumer): (lag.records, lag.seconds) for lag in measured.lags}


async def append(gateway: Gateway, log: str, count: int) -> None:
    records = [Record(b"%d" % at) for at in range(count)]
    await gateway.logs.append(log, Append.of(records))


@asynccontextmanager
async def gateways(*logs: str) -> AsyncIterator[tuple[Cluster, list[Gateway]]]:
    """Two gateways, and logs of ten records that the second one owns."""
    cluster = Cluster(1)
    made = [cluster.gateway(), cluster.gateway()]
    for log in logs:
        await made[1].logs.put(log, SETTINGS)
        await append(made[1], log, 10)
    try:
        yield cluster, made
    finally:
        for gateway in cluster.gateways.values():
            await gateway.end()


async def place(gateway: Gateway, log: str, consumer: str, offset: int) -> None:
    """A new consumer."""
    await gateway.logs.consumers.commit(
        log, consumer, offset, token=None, version=None, is_new=True
    )


async def test_the_owner_of_the_positions_tells_how_far_each_consumer_is_behind() -> None:
    async with gateways("a", "b") as (cluster, (one, two)):
        await place(one, "a", "billing", 4)
        await place(two, "b", "billing", 10)
        await place(two, "b", "mails", 0)
        cluster.ahead_ms += HOUR_MS
        await append(two, "a", 5)

        found = shown(await swept(one))

        assert found.keys() == {("a", "billing"), ("b", "billing"), ("b", "mails")}
        assert found["b", "billing"] == (0, 0.0)
        for key, records in (("a", "billing"), 11), (("b", "mails"), 10):
            assert found[key][0] == records
            # The first record that is not processed is an hour old, whatever came since.
            assert found[key][1] == pytest.approx(3600, abs=SLOW_S)
        assert await swept(two) is None, "who does not own the positions tells nothing"


async def test_a_measurement_costs_no_append_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways("a") as (_, (one, _)):
        await place(one, "a", "billing", 4)
        await swept(one)
        end = (await one.logs.get(POSITIONS_LOG)).next_offset
        asked: list[str] = []

        async def get(_store: Store, name: str, _known: object = None) -> Any:
            asked.append(name)
            raise AssertionError(name)

        monkeypatch.setattr(Store, "get", get)
        found = shown(await swept(one))
        monkeypatch.undo()

        assert found["a", "billing"][0] == 6
        assert asked == []
        assert (await one.logs.get(POSITIONS_LOG)).next_offset == end


async def test_the_time_of_a_record_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways("a") as (cluster, (one, _)):
        await place(one, "a", "billing", 4)
        await swept(one)
        cluster.ahead_ms += HOUR_MS

        async def never(*_: Any) -> int:
            raise AssertionError("it is known")

        monkeypatch.setattr(one.logs.consumers, "appended_ms", never)
        assert shown(await swept(one))["a", "billing"][1] == pytest.approx(3600, abs=SLOW_S)


async def test_consumers_without_a_log_are_counted_and_have_no_lag() -> None:
    async with gateways("gone", "replaced", "truncated", "whole") as (_, (one, two)):
        for log in ("gone", "replaced", "truncated", "whole"):
            await place(one, log, "me", 5)
        await two.logs.delete("gone")
        await two.logs.delete("replaced")
        await two.logs.put("replaced", SETTINGS)
        await two.logs.roll("truncated")
        await append(two, "truncated", 3)
        await two.logs.truncate("truncated", 10)

        measured = await swept(one)

        assert measured is not None
        assert measured.states == {
            "no-such-log": 1,
            "log-replaced": 1,
            "offset-truncated": 1,
            "ok": 1,
        }
        found = shown(measured)
        assert {key: records for key, (records, _) in found.items()} == {
            ("truncated", "me"): 3,
            ("whole", "me"): 5,
        }


async def test_beyond_the_bound_the_most_behind_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lags, "CONSUMERS_SHOWN_MAX", 2)
    async with gateways("a", "gone") as (cluster, (one, two)):
        for consumer, offset in (("a", 9), ("b", 8), ("c", 3), ("d", 6)):
            await place(one, "a", consumer, offset)
        cluster.ahead_ms += HOUR_MS

        found = shown(await swept(one))
        assert {key: records for key, (records, _) in found.items()} == {
            ("a", "a"): 1,
            ("a", "b"): 2,
            ("_other", "_other"): 7,
        }
        assert found["_other", "_other"][1] == pytest.approx(3600, abs=SLOW_S)

        # One that is deleted frees its place; one whose log is gone takes none.
        await one.logs.consumers.delete("a", "a", None)
        await place(one, "gone", "0", 1)
        await two.logs.delete("gone")
        await swept(one)
        found = shown(await swept(one))
        assert {key: records for key, (records, _) in found.items()} == {
            ("a", "b"): 2,
            ("a", "c"): 7,
            ("_other", "_other"): 4,
        }


async def test_a_silent_owners_log_has_its_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways("a") as (_, (one, two)):
        await place(one, "a", "me", 4)
        assert shown(await swept(one))["a", "me"][0] == 6
        await append(two, "a", 5)

        async def nobody(*_: Any) -> Mapping[str, int]:
            return {}

        views = one.logs.views
        monkeypatch.setattr(views, "ends", nobody)
        assert shown(await swept(one))["a", "me"][0] == 6
        monkeypatch.undo()
        assert shown(await swept(one))["a", "me"][0] == 11


async def test_lags_are_told_after_the_owner_has_died_though_nobody_asks_for_a_position() -> None:
    async with gateways("a") as (_, (one, two)):
        await place(one, "a", "me", 4)
        one.kill()

        # It finds the log of positions without an owner, seals it, takes it, and measures.
        found: Measured | None = None
        for _ in range(4):
            found = found or await swept(two)

        assert shown(found)["a", "me"][0] == 6


async def test_what_a_transaction_published_is_as_old_as_its_publication() -> None:
    """Its entries were written before; nobody could read them then (rule 26b)."""
    async with gateways("a") as (cluster, (one, two)):
        await place(one, "a", "me", 10)
        transaction = cluster.begin("a")
        ledger = write(cluster, transaction, [["x"], ["y", "z"]])
        cluster.ahead_ms += HOUR_MS
        await two.transactions.commit(transaction, (ledger,))
        cluster.ahead_ms += HOUR_MS

        found = shown(await swept(one))
        view = await one.logs.consumers.look("a", "me")

        assert found["a", "me"][0] == 3
        assert found["a", "me"][1] == pytest.approx(3600, abs=SLOW_S)
        assert view.lag is not None
        assert view.lag.ms == pytest.approx(3_600_000, abs=SLOW_S * 1000)


async def test_a_scrape_shows_what_was_measured_and_for_how_long_it_is_known() -> None:
    async with served() as (http, cluster):
        made = await http.ask(
            "PUT", "/v1/logs/log/consumers/me", {"offset": 4}, headers={"If-None-Match": "*"}
        )
        assert made.status == 200
        one = next(iter(cluster.gateways.values()))
        assert "quorumlog_consumer" not in await scraped(http)
        await swept(one)

        text = await scraped(http)

        assert 'quorumlog_consumer_lag_records{consumer="me",log="log"} 6.0' in text
        assert re.search(r'^quorumlog_consumer_lag_seconds\{.*"me".*\} \d', text, re.MULTILINE)
        assert 'quorumlog_consumers{state="ok"} 1.0' in text
        assert re.search(r"^quorumlog_consumer_lag_age_seconds \d", text, re.MULTILINE)
        assert "quorumlog_consumer" not in await scraped(http, at=1)


async def scraped(http: Http, at: int = 0) -> str:
    return (await http.ask("GET", "/metrics", at=at)).body.decode()


async def names(gateway: Gateway, log: str = "") -> list[str]:
    """The consumers of all logs, or of one."""
    rows, following = await gateway.logs.consumers.page_of_all(
        log, prefix="", after="", limit=100, is_shown=lambda _log: True
    )
    assert following is None
    return ["/".join(row.key) for row in rows]


async def test_consumers_go_with_their_log_and_those_of_a_namesake_are_kept() -> None:
    async with gateways("gone", "replaced", "whole") as (_, (one, two)):
        for log in ("gone", "replaced", "whole"):
            await place(one, log, "me", 5)
        await two.logs.delete("gone")
        await two.logs.delete("replaced")
        await two.logs.put("replaced", SETTINGS)
        assert await names(one, "gone") == ["gone/me"]
        await swept(one)
        await swept(two)
        assert await names(one) == ["replaced/me", "whole/me"]
        assert await names(one, "gone") == []


async def test_a_consumer_unused_for_30_days_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "GRACE_S", 0.0)
    async with gateways("a") as (cluster, (one, two)):
        await place(one, "a", "idle", 4)
        await place(one, "a", "busy", 4)
        for _ in range(2):
            cluster.ahead_ms += 16 * 24 * HOUR_MS
            row = await one.logs.consumers.look("a", "busy")
            await one.logs.consumers.commit(
                "a", "busy", 4, token=None, version=row.position.version, is_new=False
            )
        await swept(two)
        assert await names(two) == ["a/busy", "a/idle"]  # another gateway owns the positions
        await swept(one)
        assert await names(one) == ["a/busy"]


async def test_consumers_of_forgotten_deleted_logs_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_DELETED_MAX", 1)
    async with gateways("first", "second") as (_, (one, two)):
        for log in ("first", "second"):
            await place(one, log, "me", 5)
            await two.logs.delete(log)
        await swept(two)
        assert await names(one) == ["second/me"]


async def test_an_overtaken_keepers_requests_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways("a") as (_, (one, _)):
        await place(one, "a", "me", 5)
        is_owned, submit, consult = one.logs.is_owned, one.logs.submit, one.logs.consult
        consulted: list[Any] = []

        def overtaken(name: str, _call: Append) -> asyncio.Future[Any]:
            monkeypatch.setattr(one.logs, "submit", submit)
            monkeypatch.setattr(one.logs, "is_owned", lambda _name: False)
            done = asyncio.get_running_loop().create_future()
            done.set_exception(UnexpectedOffset("another gateway has appended", log=name))
            return done

        async def counted(*args: Any, **more: Any) -> Any:
            consulted.append(args)
            monkeypatch.setattr(one.logs, "is_owned", is_owned)
            return await consult(*args, **more)

        monkeypatch.setattr(one.logs, "submit", overtaken)
        monkeypatch.setattr(one.logs, "consult", counted)
        asked = [one.logs.positions.ask(positions.Look("a", "me")) for _ in range(20)]
        assert {found.offset for found in await asyncio.gather(*asked)} == {5}
        assert len(consulted) == 1
