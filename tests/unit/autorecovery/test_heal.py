"""Real processes: restarts move nothing, a lost disk heals under load (`make heal`), a dead writer's ledger is closed."""

from loadtest.cluster import running
from loadtest.heal import PATIENT, Healers, Load, Plan, Story, filled, heal, roll, settled
from loadtest.stores import Stores
from loadtest.waiting import DeadlineMissed
from quorumlog.client import Client, Ledger
from tests.support.waiting import MENDED_S, UNHURRIED, until

SETTINGS = PATIENT | {**UNHURRIED, "LOST_SHARE_MAX": "0.3"}
"""Two of four that are silent at once are a slow machine."""
PLAN = Plan(ledgers=12, entries=30, writers=3, delay_s=1, heal_s=MENDED_S, seed=7)


def judge(load: Load, story: Story) -> None:
    """No append failed, nothing is wrong; what only took too long is no wrong answer."""
    late = [why for why in load.failed if "quorum-timeout" in why or "connection-lost" in why]
    if late:
        raise DeadlineMissed("every append has its ack quorum", late, 50)
    assert load.failed == []
    assert load.wrong == []
    assert story.problems == []


async def test_restarts_move_nothing_and_a_lost_disk_is_repaired(stores: Stores) -> None:
    story = Story(lambda _line: None)
    async with (
        running(
            stores,
            bookies=4,
            gateways=1,
            autorecoveries=2,
            environment=SETTINGS,
            lost_bookie_delay_s=3600,
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        load = await filled(PLAN, [client])
        async with load.running():
            await roll(cluster, load, client, story, ("bookie-1", "bookie-2"))
            # While it runs: by one process, for all of them.
            delay = {"seconds": PLAN.delay_s}
            await Healers(cluster).ask("PUT", "/v1/lost-bookie-delay", delay)
            await heal(cluster, load, [client], story, "bookie-3", killed="auditor")
        await settled(cluster, load, story)
    judge(load, story)
    assert load.appends > 0
    assert load.reads > 0


# --- nobody asks for it --------------------------------------------------------------------------


QUICK = {"ABANDONED_S": "1", "SILENT_S": "10", "IN_RECOVERY_S": "1", "AUDIT_S": "0.5"}


async def written(client: Client, count: int) -> tuple[Ledger, list[bytes]]:
    ledger = await client.create_ledger()
    payloads = [f"{ledger.ledger_id} {number}".encode() * 10 for number in range(count)]
    await ledger.append_batch(payloads)
    return ledger, payloads


async def contents(ledger: Ledger) -> list[bytes]:
    return [entry.payload async for entry in ledger.entries()]


async def test_a_ledger_whose_writer_died_is_closed_without_a_request(stores: Stores) -> None:
    async with (
        running(stores, bookies=3, gateways=2, environment=QUICK) as cluster,
        Client(cluster.gateways[0]) as writer,
        Client(cluster.gateways[1]) as other,
    ):
        ledger, payloads = await written(writer, 20)
        living, _ = await written(other, 5)

        await cluster.kill("gateway-1")

        async def state() -> bool:
            row = await other.ledger(ledger.ledger_id).info()
            return bool(row["state"] == "CLOSED")

        await until(state, "the abandoned ledger is closed", MENDED_S)
        assert await contents(other.ledger(ledger.ledger_id)) == payloads
        assert (await living.info())["state"] == "OPEN"
