"""Whole processes: a disk is lost together with the database, twice (rule 15b). `tests/unit/metadata/test_members.py` has the other ways."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from loadtest.cluster import running
from loadtest.stores import Stores
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError
from tests.cluster.restore.operator import Operator
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.metadata.restores import dump, restore

LEDGERS: Final = 20
"""Which answers come first is a race: without the rule some of so many lose their entry."""
WIPED: Final = "bookie-3"


async def test_a_wiped_bookie_denies_nothing_acknowledged(stores: Stores, tmp_path: Path) -> None:
    async with running(
        stores, bookies=3, gateways=1, environment=UNHURRIED, lost_bookie_delay_s=600
    ) as cluster:
        operator = Operator(cluster)
        old = await dump(stores, tmp_path / "old")
        await operator.wipe(WIPED)
        await operator.until_well()
        async with Client(*cluster.gateways) as client:
            make = partial(until, client.create_ledger, "a ledger", passing=(QuorumLogError,))
            ledgers = [await make() for _ in range(LEDGERS)]
            members = [(await ledger.info())["fragments"][0]["bookies"] for ledger in ledgers]
            cluster.pause("bookie-2")
            # Two acknowledge each: bookie-1, and who loses its disk now.
            await asyncio.gather(*(one.append(b"%d" % one.ledger_id) for one in ledgers))
            await cluster.kill_all()

        await restore(stores, old)
        await operator.wipe(WIPED)
        operator.start(operator.named("metadata"))
        report = await operator.rebuild()
        await operator.accept()
        await operator.until_well()
        async with Client(*cluster.gateways, deadline_s=SETTLED_S) as client:
            names = {bookie["id"] for bookie in await client.bookies()}
            ends = [(await client.ledger(one.ledger_id).recover())["last_entry"] for one in ledgers]
            read = [(await client.ledger(one.ledger_id).read(0)).entries for one in ledgers]

    assert all(f"{WIPED}@2" in each for each in members)
    assert report["ledgers"] == {"write": LEDGERS}
    assert f"{WIPED}@3" in names
    assert ends == [0] * LEDGERS
    assert [entries[0].payload for entries in read] == [b"%d" % one.ledger_id for one in ledgers]
