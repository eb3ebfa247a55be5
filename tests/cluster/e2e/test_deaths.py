"""What was acknowledged outlives the death of any process, and what an idle writer was told last does (rule 5)."""

import asyncio
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client, Ledger
from quorumlog.errors import (
    LedgerClosed,
    LedgerFenced,
    QuorumLogError,
    WriterLost,
)
from tests.cluster.e2e.conftest import BOOKIES
from tests.support.waiting import UNHURRIED, until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def append(ledger: Ledger, count: int, *, batch: int = 10) -> list[bytes]:
    """Append so many entries in batches; all of them are acknowledged."""
    payloads = [f"{ledger.ledger_id}:{number}".encode() * 20 for number in range(count)]
    for start in range(0, count, batch):
        await ledger.append_batch(payloads[start : start + batch])
    return payloads


async def contents(ledger: Ledger) -> list[bytes]:
    return [entry.payload async for entry in ledger.entries()]


async def ensemble(ledger: Ledger) -> list[str]:
    """The names of the bookies of the last fragment."""
    members = (await ledger.info())["fragments"][-1]["bookies"]
    return [member.partition("@")[0] for member in members]


@pytest.mark.parametrize("is_killed", [True, False], ids=["dies", "hangs"])
@pytest.mark.parametrize(
    ("bookies", "batch"), [(3, 10), (5, 7), (BOOKIES, 10)], ids=["plain", "striped", "no spare"]
)
async def test_a_ledger_outlives_a_bookie_of_its_ensemble(
    cluster: Cluster, bookies: int, batch: int, is_killed: bool
) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger(ensemble_size=bookies, write_quorum=3, ack_quorum=2)
        sent = await append(ledger, 53, batch=batch)

        lost = (await ensemble(ledger))[1]
        if is_killed:
            await cluster.kill(lost)
        else:
            cluster.pause(lost)
        sent += await append(ledger, 53, batch=batch)

        assert await contents(ledger) == sent
        assert (await ledger.close())["last_entry"] == len(sent) - 1


async def test_after_a_standstill_a_gateway_keeps_its_ledgers_and_bookies(stores: Stores) -> None:
    """ADR 16: bookies have answered meanwhile, and what is read late is not held against them."""
    settings = {**UNHURRIED, "SILENT_BOOKIE_S": "5"}
    async with (
        running(stores, bookies=4, gateways=2, environment=settings) as cluster,
        Client(cluster.gateways[0]) as client,
        Client(cluster.gateways[1]) as other,
    ):
        # Enough in flight that a moment between two stops is too short to read all answers.
        ledgers = [await client.create_ledger() for _ in range(48)]
        counts = [0] * len(ledgers)
        idle = await other.create_ledger()
        is_over = asyncio.Event()

        async def append_on(number: int) -> None:
            while not is_over.is_set():
                assert await ledgers[number].append(bytes(64 << 10)) == counts[number]
                counts[number] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(len(ledgers)):
                group.create_task(append_on(number))
            await until(lambda: min(counts) > 0, "all ledgers are written")
            for _ in range(3):
                cluster.pause("gateway-1")
                # A long poll of nothing at the other gateway: longer than a bookie may be silent.
                assert not (await idle.read(wait_ms=5500)).entries
                cluster.resume("gateway-1")
            before = list(counts)
            await until(
                lambda: all(now > was + 1 for now, was in zip(counts, before, strict=True)),
                "all ledgers are written on",
            )
            is_over.set()

        rows = [await ledger.info() for ledger in ledgers]
        assert {row["state"] for row in rows} == {"OPEN"}
        assert {len(row["fragments"]) for row in rows} == {1}


async def test_the_other_gateway_recovers_the_ledger_of_a_dead_writer(cluster: Cluster) -> None:
    first, second = cluster.gateways
    async with Client(first) as writer, Client(second) as other:
        ledger = await writer.create_ledger()
        sent = await append(ledger, 30)

        await cluster.kill("gateway-1")
        closed = await other.ledger(ledger.ledger_id).recover()

        assert closed["state"] == "CLOSED"
        assert closed["last_entry"] == len(sent) - 1
        assert await contents(other.ledger(ledger.ledger_id)) == sent


async def test_a_paused_writer_cannot_append_after_a_recovery(cluster: Cluster) -> None:
    first, second = cluster.gateways
    async with Client(first) as writer, Client(second) as other:
        ledger = await writer.create_ledger()
        sent = await append(ledger, 30)

        cluster.pause("gateway-1")
        closed = await other.ledger(ledger.ledger_id).recover()
        cluster.resume("gateway-1")

        with pytest.raises((LedgerFenced, LedgerClosed, WriterLost)):
            await ledger.append(b"too late")
        assert closed["last_entry"] == len(sent) - 1
        assert await contents(other.ledger(ledger.ledger_id)) == sent


async def code_of_create(gateway: str) -> str:
    """The code of the problem that creating a ledger meets."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway}/v1/ledgers", json={}) as answer,
    ):
        code: str = (await answer.json(content_type=None))["code"]
        return code


async def test_appends_go_on_without_postgres(cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger()
        sent = await append(ledger, 10)

        await cluster.kill("postgres")
        sent += await append(ledger, 10)
        assert await code_of_create(cluster.gateways[0]) == "metadata-unavailable"

        await cluster.restart("postgres")
        await until(client.create_ledger, "a ledger again", passing=(QuorumLogError,))
        sent += await append(ledger, 10)
        assert await contents(ledger) == sent


@pytest.mark.parametrize("name", ["redis", "metadata-1"])
async def test_appends_go_on_without_a_service(cluster: Cluster, name: str) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger()
        sent = await append(ledger, 10)

        await cluster.kill(name)
        sent += await append(ledger, 10)
        if name == "metadata-1":
            await cluster.restart(name)

        closed = await until(ledger.close, "it is closed", passing=(QuorumLogError,))
        assert closed["last_entry"] == len(sent) - 1


async def test_nothing_is_lost_when_every_process_dies_at_once(cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger()
        sent = await append(ledger, 100)

    await cluster.kill_all()
    await start_again(cluster)

    async with Client(cluster.gateways[1]) as client:
        closed = await until(
            client.ledger(ledger.ledger_id).recover, "a recovery", passing=(QuorumLogError,)
        )
        assert closed["last_entry"] == len(sent) - 1
        assert await contents(client.ledger(ledger.ledger_id)) == sent


async def start_again(cluster: Cluster) -> None:
    for name in cluster.names:
        cluster.start(name)
        await cluster.until_up(name)


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
