"""The database's clock is wrong for a while, beside real gateways (rule 26c)."""

import aiohttp

from loadtest.cluster import running
from loadtest.stores import Stores
from tests.support.shadowed_clock import move, shadow
from tests.support.waiting import SETTLED_S, until
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG

WEEK_S = 7 * 24 * 3600


async def test_a_log_outlives_a_clock_that_is_wrong(stores: Stores) -> None:
    """And its retention goes on once the clock is right."""
    await shadow(stores)
    async with (
        running(stores, bookies=3, gateways=1) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)
        stream = {"Stream-Expires-At": "2099-01-01T00:00:00Z", "Content-Type": "text/plain"}
        await http.done("PUT", LOG, {"roll_seconds": 1, "retention_seconds": WEEK_S})
        assert (await http.ask("PUT", "/v1/stream/s", headers=stream)).status == 201

        async def ledgers(more: int) -> None:
            count = len((await http.done("GET", LOG))["ledgers"])

            async def has_rolled() -> bool:
                await http.done("POST", f"{LOG}/records", {"text": "x"})
                return len((await http.done("GET", LOG))["ledgers"]) >= count + more

            await until(has_rolled, "the sweep rolls the log", SETTLED_S)

        async def doubt() -> str | None:
            return str((await http.done("GET", "/v1/cluster"))["clock_doubt"] or "")

        await ledgers(2)
        assert await doubt() == ""

        await move(stores, "100 years")
        await ledgers(2)  # swept since
        assert "jumped" in (await doubt() or "")
        assert "clock-doubted" in cluster.log("gateway-1")
        assert (await http.done("GET", LOG))["first_offset"] == 0
        assert (await http.ask("GET", "/v1/stream/s?offset=-1")).status == 200

        await move(stores, "0")
        await http.done("PATCH", LOG, {"retention_seconds": 1})

        async def lets_go() -> bool:
            await http.done("POST", f"{LOG}/records", {"text": "x"})
            return bool((await http.done("GET", LOG))["first_offset"] > 0)

        await until(lets_go, "the retention goes on", SETTLED_S)
        assert await doubt() == ""
