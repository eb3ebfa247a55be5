"""Limits of a log that are changed while it is written: its owner and its retention keep to them, without a restart."""

import aiohttp

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.model.logs.model import Store
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG
from tests.unit.logs.test_manager import a_cluster, call

RECORDS = f"{LOG}/records"


async def test_an_owner_and_the_retention_keep_to_limits_that_another_gateway_changed(
    stores: Stores,
) -> None:
    """On real processes; and the limits outlive the owner."""
    async with running(stores) as cluster, aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        await http.done("POST", RECORDS, {"text": "0"})
        owner = (await http.done("GET", LOG))["owner"]["url"]
        assert owner == http.urls[0]
        await http.done("PATCH", LOG, {"roll_entries": 2, "retention_bytes": 1}, at=1)

        async def rolls_and_drops() -> bool:
            await http.done("POST", RECORDS, {"text": "more"})
            shown = await http.done("GET", LOG, at=1)
            return bool(shown["first_offset"] > 0)

        await until(rolls_and_drops, "ledgers are rolled and dropped", SETTLED_S)
        assert (await http.done("GET", LOG))["owner"]["url"] == owner, "without a takeover"
        await http.done("PATCH", LOG, {"roll_entries": 0, "retention_bytes": 0}, at=1)
        shown = await http.done("GET", LOG, at=1)
        assert shown["settings"]["roll_entries"] == 0

        await http.done("PATCH", LOG, {"roll_entries": 3}, at=1)
        await cluster.kill("gateway-1")
        begin = (await http.done("POST", RECORDS, {"text": "taken over"}, at=1))["first_offset"]

        async def has_rolled() -> bool:
            await http.done("POST", RECORDS, {"text": "more"}, at=1)
            ledgers = (await http.done("GET", LOG, at=1))["ledgers"]
            return any((found["first_offset"] or 0) > begin for found in ledgers)

        await until(has_rolled, "the new owner rolls", SETTLED_S)


async def test_retention_goes_by_the_limits_of_the_row_that_it_changes() -> None:
    """What was changed after a sweep had read the row holds for that sweep too."""
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        asked: list[int] = []

        def begin(row: object) -> int:
            asked.append(row.settings.retention_bytes)  # type: ignore[attr-defined]
            return 0

        await two.logs.change("log", {"retention_bytes": 7})
        await one.logs.retain("log", begin)

        assert asked == [7]
        assert Store(one).row("log").settings.retention_bytes == 7


async def test_a_roll_that_meets_a_change_of_limits_goes_on_with_them() -> None:
    async with a_cluster() as (_, (one, two)):
        await one.logs.append("log", call("a"))
        await two.logs.change("log", {"roll_entries": 9})
        await one.logs.roll("log")
        await one.logs.append("log", call("b"))

        row = Store(one).row("log")
        assert (row.settings.roll_entries, len(row.items)) == (9, 2)
        assert one.logs.ownership.owner("log") is not None
