"""The SDK's work queues on real processes, async and sync, and the commands."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest
import pytest_asyncio

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client, Log, Queue, sync
from quorumlog.errors import NoSuchQueue
from tests.support.waiting import SETTLED_S, until
from tests.unit.positions.test_sdk import command

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    async with running(servers.fresh(), bookies=3) as started:
        yield started


async def a_queue(client: Client, name: str, count: int) -> tuple[Log, Queue]:
    log = await client.create_log(name)
    await log.append(*(b"%d" % at for at in range(count)))
    await client.create_log(f"{name}.dead")
    queue = log.queue("mail")
    await queue.create(lease_s=2, max_attempts=2, dead_letter_log=f"{name}.dead")
    return log, queue


async def test_a_loop_acknowledges_each_job_when_it_asks_for_the_next(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log, queue = await a_queue(client, "loops", 7)
        found: list[int] = []
        async for job in queue.jobs(concurrency=3, wait_s=0.2):
            assert (await queue.info())["floor"] == len(found)
            found.append(job.record.offset)
        shown = await queue.info()
        assert (found, shown["depth"], shown["redelivered"]) == ([*range(7)], 0, 0)
        assert [one["queue"] async for one in log.queues()] == ["mail"]
        await queue.delete()
        with pytest.raises(NoSuchQueue):
            await queue.info()


async def test_a_loop_that_fails_gives_its_jobs_back(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        _, queue = await a_queue(client, "fails", 4)

        async def work() -> None:
            async for job in queue.jobs(concurrency=4):
                if job.record.offset == 1:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()
        again = await queue.claim(10, wait_s=5)
        assert [(one.record.offset, one.attempt) for one in again] == [(1, 2), (2, 2), (3, 2)]
        assert await queue.nak(again[0], reason="no") == []
        assert await queue.ack(*again[1:]) == []
        refused = await queue.ack(*again)
        assert [(one.offset, one.reason) for one in refused] == [
            (2, "acknowledged"),
            (3, "acknowledged"),
            (1, "claim-ended"),
        ]

        async def dead_one() -> bool:
            return (await queue.info())["dead"] == 1

        await until(dead_one, "a dead letter", SETTLED_S)
        dead = [record async for record in client.log("fails.dead").records()]
        assert [(one.value, one.headers["Dead-Letter-Reason"]) for one in dead] == [(b"1", "no")]

        async def shown(name: str) -> float:
            start = f'quorumlog_queue_{name}{{log="fails",queue="mail"}} '
            for gateway in ("gateway-1", "gateway-2"):
                metrics = f"{cluster.url(gateway)}/metrics"
                async with session.get(metrics, headers=cluster.headers) as answer:
                    for line in (await answer.text()).splitlines():
                        if line.startswith(start):
                            return float(line.removeprefix(start))
            return -1

        async def is_done() -> bool:
            return await shown("dead_letters_total") == 1 and await shown("oldest_seconds") == 0

        async def is_old() -> bool:
            return await shown("depth") == 1 and await shown("oldest_seconds") > 0

        async with aiohttp.ClientSession() as session:
            await until(
                is_done, "metrics show a dead letter, and nothing that is not done", SETTLED_S
            )
            assert await queue.redrive() == 1
            (back,) = await queue.claim(10, wait_s=5)
            assert (back.record.value, back.attempt) == (b"1", 1)
            await until(is_old, "metrics show the age of the record", SETTLED_S)


async def test_a_job_is_extended_while_it_takes_longer_than_the_lease(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        _, queue = await a_queue(client, "slow", 2)
        async for job in queue.jobs(wait_s=0.2):
            assert [one.record.offset for one in await queue.claim(10)] == [1]
            # That claim is younger and nobody extends it: once it has ended, a lease has passed.
            again = await queue.claim(10, wait_s=30)
            assert [(one.record.offset, one.attempt) for one in again] == [(1, 2)]
            assert await queue.ack(job) == []
            break
        assert (await queue.info())["floor"] == 1


async def test_the_sync_sdk_has_the_same_loop(cluster: Cluster) -> None:
    def work() -> tuple[list[bytes], int]:
        with sync.Client(*cluster.gateways) as client:
            log = client.create_log("sync")
            log.append(b"a", b"b", b"c")
            queue = log.queue("mail")
            queue.create()
            found = [job.record.value for job in queue.jobs(concurrency=2, wait_s=0.2)]
            assert [one["queue"] for one in log.queues()] == ["mail"]
            return found, queue.info()["depth"]

    assert await asyncio.to_thread(work) == ([b"a", b"b", b"c"], 0)


def by_commands(cluster: Cluster) -> None:
    command(cluster, "log", "create", "shell")
    command(cluster, "log", "create", "shell.dead")
    dead = ("--max-attempts", "1", "--dead-letter-log", "shell.dead")
    shown = command(cluster, "queue", "create", "shell", "mail", *dead, "--json")
    assert orjson.loads(shown)["max_attempts"] == 1
    command(cluster, "log", "append", "shell", "a", "b", "bad", "c")
    claimed = command(cluster, "queue", "claim", "shell", "mail", "--max", "2", "--json")
    jobs = [orjson.loads(line) for line in claimed.splitlines()]
    assert [(job["value"], job["attempt"]) for job in jobs] == [("a", 1), ("b", 1)]
    assert command(cluster, "queue", "ack", "shell", "mail", jobs[0]["job"], "--json") == ""
    refused = command(cluster, "queue", "ack", "shell", "mail", jobs[0]["job"], "--json")
    assert orjson.loads(refused)["reason"] == "acknowledged"
    run = ("work", "shell", "mail", "--exec", "test {} != bad", "--concurrency", "2", "--wait", "1")
    command(cluster, "queue", *run)
    command(cluster, "queue", "ack", "shell", "mail", jobs[1]["job"])
    until_dead = ("queue", "dead", "shell", "mail", "--json")
    while not (letters := command(cluster, *until_dead)):
        pass
    letter = orjson.loads(letters)
    assert (letter["value"], letter["of"]) == ("bad", "2")
    assert letter["reason"] == "the command ended with status 1"
    assert '"redriven":1' in command(cluster, "queue", "redrive", "shell", "mail", "--json")
    (row,) = command(cluster, "queue", "list", "shell", "--json").splitlines()
    assert orjson.loads(row)["depth"] == 1
    assert orjson.loads(command(cluster, "queue", "show", "shell", "mail", "--json"))["dead"] == 1
    command(cluster, "queue", "delete", "shell", "mail", "--yes")
    assert command(cluster, "queue", "list", "shell", "--json") == ""


async def test_the_commands_work_on_a_queue(cluster: Cluster) -> None:
    await asyncio.to_thread(by_commands, cluster)
