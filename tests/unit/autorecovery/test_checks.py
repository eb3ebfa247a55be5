"""Real processes: copies that are missing or damaged are found by their digests, and mended."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client, Ledger
from tests.support.database import sql
from tests.support.waiting import MENDED_S, until
from tests.unit.autorecovery.test_heal import contents, written
from tests.unit.autorecovery.test_operator import PATIENT, quorumlog, until_told

SETTINGS = PATIENT | {"DAMAGE_S": "0.2", "CHECK_S": "3600"}
MARK = b"this very copy is flipped "


async def verify(cluster: Cluster, ledger_id: int, *words: str) -> tuple[int, Any]:
    return await quorumlog(cluster, "ledger", "verify", str(ledger_id), *words)


async def is_whole(cluster: Cluster, ledger: Ledger) -> bool:
    status, reported = await verify(cluster, ledger.ledger_id)
    is_all_compared = reported["open_from"] is None and reported["entries"] == 20
    return status == 0 and reported["whole"] is True and is_all_compared


def flip(folder: Path) -> None:
    """Change one byte of the marked payload, in the one file of a bookie's log that has it."""
    for path in sorted((folder / "log").iterdir()):
        at = path.read_bytes().find(MARK)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"T")
            return
    raise AssertionError(f"{folder} does not have the entry")


async def test_missing_copies_are_found_reported_and_repaired(stores: Stores) -> None:
    async with (
        running(
            stores, bookies=3, gateways=1, environment=SETTINGS, lost_bookie_delay_s=3600
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        whole, whole_payloads = await written(client, 20)
        striped = await client.create_ledger(ensemble_size=3, write_quorum=2, ack_quorum=2)
        await striped.append_batch([f"striped {number}".encode() for number in range(20)])
        _, reported = await verify(cluster, whole.ledger_id)
        assert (reported["entries"], reported["open_from"]) == (0, 0)  # it is still written
        await whole.close()
        await striped.close()
        for ledger in (whole, striped):
            # A member that was slow at the close is filled up by repair.
            await until(partial(is_whole, cluster, ledger), "all copies are there", MENDED_S)
        await until_told(cluster, "repair", "pause")
        gappy, gappy_payloads = await written(client, 10)
        await gappy.append(MARK)

        await cluster.kill("bookie-3")
        await gappy.append(b"without bookie-3")
        await gappy.close()
        status, reported = await verify(cluster, whole.ledger_id)
        assert status == 1
        assert (reported["lacking"], reported["silent"]) == (
            [],
            ["bookie-3@1"],
        )  # it is not missing

        await cluster.restart("bookie-3")
        # The writer queued what it knew (rule 8): the check is to find it by itself.
        await sql(stores, "DELETE FROM repairs")
        await asyncio.to_thread(flip, cluster.data / "bookie-2")

        for ledger in (whole, striped):
            await until(partial(is_whole, cluster, ledger), "the others are whole", MENDED_S)

        async def found() -> Any:
            _, reported = await verify(cluster, gappy.ledger_id)
            return reported if reported and not reported["silent"] else None

        reported = await until(found, "all three say what they have", MENDED_S)
        lacking = {(lack["bookie"], lack["why"]): lack for lack in reported["lacking"]}
        assert lacking.keys() >= {("bookie-2@1", "damaged"), ("bookie-3@1", "missing")}
        assert lacking["bookie-3@1", "missing"]["last"] == 11

        async def tells_damage() -> Any:
            status, reported = await quorumlog(cluster, "bookie", "damage", "bookie-2")
            return reported["entries"] if status == 1 and reported else None

        (place,) = await until(tells_damage, "the bookie says what it can't read", MENDED_S)
        assert place["ledger_id"] == gappy.ledger_id
        assert [10, 10] in place["ranges"]

        async def is_queued() -> bool:
            status, reported = await quorumlog(cluster, "repair", "status")
            return status == 0 and "bookie-2@1" in {item["member"] for item in reported["first"]}

        await until(is_queued, "what a bookie itself finds damaged is queued unasked", MENDED_S)
        await until_told(cluster, "repair", "resume")
        await until_told(cluster, "repair", "check")

        async def is_mended() -> bool:
            return (await verify(cluster, gappy.ledger_id))[0] == 0

        await until(is_mended, "the check found it, and repair mended it", MENDED_S)
        await until_told(cluster, "bookie", "damage", "bookie-2")
        assert await contents(gappy) == [*gappy_payloads, MARK, b"without bookie-3"]
        assert await contents(whole) == whole_payloads
        assert (await verify(cluster, 999))[0] == 4


async def test_a_member_away_at_the_close_gets_the_row_from_the_check(stores: Stores) -> None:
    """Rule 18b: the bookie wrote no entry since, and nothing is to be repaired."""
    async with (
        running(
            stores, bookies=3, gateways=1, environment=SETTINGS, lost_bookie_delay_s=3600
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledger = await client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2)
        await ledger.append(b"before")
        await cluster.kill("bookie-3")
        await ledger.close()
        await cluster.restart("bookie-3")
        assert not knows_the_end(cluster.data / "bookie-3")

        async def is_mended() -> bool:
            await until_told(cluster, "repair", "check")
            return knows_the_end(cluster.data / "bookie-3")

        await until(is_mended, "the bookie has the row", MENDED_S)


def knows_the_end(folder: Path) -> bool:
    """Whether a copy of the closed row is in a bookie's log."""
    return any(b'"state":"CLOSED"' in path.read_bytes() for path in (folder / "log").iterdir())
