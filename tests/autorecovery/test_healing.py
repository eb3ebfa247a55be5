"""Real processes: what lacks copies or a writer is mended, though nobody asks for it."""

from loadtest.cluster import running
from loadtest.stores import Stores
from quorumlog.client import Client, Ledger
from tests.support.waiting import MENDED_S, until

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
