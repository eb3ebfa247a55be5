"""What an idle writer was told last is readable everywhere, though its gateway is gone (rule 5)."""

from typing import Any

import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.cluster.e2e.test_deaths import ensemble
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_an_idle_writers_last_entry_outlives_all_who_knew_it(cluster: Cluster) -> None:
    async with (
        Client(cluster.gateways[0]) as writer,
        Client(cluster.gateways[1]) as other,
        cluster.session() as session,
    ):
        ledger = await writer.create_ledger()
        sent = [b"%d" % number for number in range(3)]
        for payload in sent:
            await ledger.append(payload)
        bookies = await ensemble(ledger)

        async def lac_at(name: str) -> int:
            url = f"{cluster.url(name)}/v1/ledgers/{ledger.ledger_id}"
            async with session.get(url) as answer:
                held: dict[str, Any] = await answer.json()
                return int(held.get("last_add_confirmed", -1))

        async def is_reported() -> bool:
            return [await lac_at(name) for name in bookies] == [2, 2, 2]

        await until(is_reported, "every bookie knows the LAC though nothing more was appended")
        await cluster.kill("gateway-1")
        for name in bookies:
            await cluster.kill(name)
        for name in bookies:
            cluster.start(name)
        for name in bookies:
            await cluster.until_up(name)

        assert [await lac_at(name) for name in bookies] == [2, 2, 2]
        found = other.ledger(ledger.ledger_id)

        async def is_readable() -> bool:
            return [entry.payload async for entry in found.entries()] == sent

        # Its gateway may wait for the writer first, and must find the bookies again.
        await until(is_readable, "another gateway reads the last entry")
