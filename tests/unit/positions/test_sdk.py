"""The SDK's consumers on real processes, async and sync, and the commands."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import orjson
import pytest
import pytest_asyncio

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client, LogRecord, sync
from quorumlog.errors import LeaseHeld, LeaseLost, LogReplaced, PositionBehind
from tests.support.waiting import within

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    async with running(servers.fresh(), bookies=3) as started:
        yield started


async def taken(client: Client, log: str, name: str, count: int, **more: float) -> list[bytes]:
    """What a worker processes and commits, record by record, until it has had so many."""
    found: list[bytes] = []
    async with client.log(log).consumer(name, **more) as consumer:  # type: ignore[arg-type]
        async for record in consumer:
            found.append(record.value)
            assert await consumer.commit() == record.offset + 1
            if len(found) == count:
                break
    return found


async def test_consumers_go_on_where_the_last_worker_has_committed(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log("events")
        await log.append(*(b"%d" % at for at in range(10)))

        assert await taken(client, "events", "a", 4) == [b"0", b"1", b"2", b"3"]
        assert await taken(client, "events", "a", 2) == [b"4", b"5"]

        # What was not committed comes again; a worker that has let go commits nothing.
        async with log.consumer("a", holder="w1") as dropped:
            first = await anext(aiter(dropped))
        assert first.value == b"6"
        with pytest.raises(LeaseLost):
            await dropped.commit()

        # A worker that vanishes keeps its lease until the lease ends.
        async with log.consumer("held", lease_s=600) as held:
            assert held._renewing is not None
            held._renewing.cancel()
            with pytest.raises(LeaseHeld):
                await log.consumer("held", wait_s=0).__aenter__()
        await log.delete_consumer("held")

        # Then the next worker gets the lease and fences the first worker.
        vanished = log.consumer("a", lease_s=2)
        await vanished.__aenter__()
        assert vanished._renewing is not None
        vanished._renewing.cancel()
        assert await taken(client, "events", "a", 3) == [b"6", b"7", b"8"]
        with pytest.raises(LeaseLost):
            await vanished.commit()

        # A worker that waits becomes the active one as soon as the other one lets go.
        async with log.consumer("a", lease_s=600) as active:
            waits = asyncio.ensure_future(taken(client, "events", "a", 1))
            lease = (await log.consumer_info("a"))["lease"]
            assert lease is not None
            assert lease["holder"] == active.holder
            with pytest.raises(LeaseHeld):  # also another one of this process with the same name
                await log.consumer("a", holder=active.holder, wait_s=0).__aenter__()
        assert await waits == [b"9"]

        # The lease is renewed while a record takes longer than the lease. A renewal begins after 3 s,
        # so it has 6 s, which is enough on a slow machine.
        async with log.consumer("slow", lease_s=9) as slow:
            async for record in slow:
                if record.offset == 1:
                    break
                await asyncio.sleep(10)
            assert await slow.commit() == 2
            with pytest.raises(PositionBehind):
                await slow.commit(1)
            reset = await log.reset_consumer("slow", "latest")
            assert (reset["offset"], reset["lag"]["records"]) == (10, 0)
            with pytest.raises(LeaseLost):
                await slow.commit(5)

        names = [(shown["consumer"], shown["offset"]) async for shown in log.consumers()]
        assert names == [("a", 10), ("slow", 10)]
        assert [shown["consumer"] async for shown in log.consumers(prefix="sl")] == ["slow"]
        everywhere = [(one["log"], one["consumer"]) async for one in client.consumers()]
        assert [one for one in everywhere if one[0] == "events"] == [
            ("events", "a"),
            ("events", "slow"),
        ]
        assert [one["consumer"] async for one in client.consumers(prefix="sl")] == ["slow"]
        assert [one async for one in client.consumers(log="other")] == []
        await log.delete_consumer("slow")
        await log.delete()
        again = await client.create_log("events")
        with pytest.raises(LogReplaced):
            await again.consumer("a").__aenter__()
        await again.reset_consumer("a", "earliest")
        await again.append(b"new")
        assert await taken(client, "events", "a", 1) == [b"new"]
        await asyncio.to_thread(by_threads, cluster)
        await asyncio.to_thread(by_commands, cluster)


def by_threads(cluster: Cluster) -> None:
    with sync.Client(*cluster.gateways) as client:
        log = client.create_log("threads")
        log.append(*(b"%d" % at for at in range(5)))
        with log.consumer("a") as consumer:
            for record in consumer:
                if record.offset == 2:
                    break
                consumer.commit()
        with log.consumer("a") as consumer:
            records: Iterator[LogRecord] = iter(consumer)
            assert next(records).value == b"2"
            assert consumer.commit() == 3
        assert [shown["offset"] for shown in log.consumers()] == [3]
        lag = log.consumer_info("a")["lag"]
        assert lag is not None
        assert lag["records"] == 2
        assert log.reset_consumer("a", "earliest")["offset"] == 0
        assert log.reset_consumer("a", -2)["offset"] == 3
        assert log.reset_consumer("a", datetime(1999, 1, 1, tzinfo=UTC))["offset"] == 0
        log.delete_consumer("a")
        assert list(log.consumers()) == []


def command(cluster: Cluster, *words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "quorumlog.cli", *words, "--gateway", cluster.gateways[0]],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_commands(cluster: Cluster) -> None:
    command(cluster, "log", "create", "shell")
    command(cluster, "log", "append", "shell", "a", "b", "c")
    assert command(cluster, "log", "consume", "shell", "me") == "a\nb\nc\n"
    assert command(cluster, "log", "consume", "shell", "me") == ""
    listed = orjson.loads(command(cluster, "log", "consumers", "shell", "--json"))
    assert (listed["consumer"], listed["offset"], listed["lag"]["records"]) == ("me", 3, 0)
    command(cluster, "log", "reset", "shell", "me", "--to", "1")
    assert command(cluster, "log", "consume", "shell", "me") == "b\nc\n"
    for start in ("earliest", "1999-01-01T00:00:00+02:00"):
        command(cluster, "log", "reset", "shell", "me", "--to", start)
        assert command(cluster, "log", "consume", "shell", "me") == "a\nb\nc\n"
    listed = orjson.loads(command(cluster, "log", "consumers", "--prefix", "me", "--json"))
    assert (listed["log"], listed["consumer"], listed["offset"]) == ("shell", "me", 3)
    listed = orjson.loads(command(cluster, "log", "consumers", "shell", "--prefix", "m", "--json"))
    assert listed["consumer"] == "me"
    assert command(cluster, "log", "consumers", "shell", "--prefix", "x", "--json") == ""


WORKER = """
import asyncio, logging, sys
from quorumlog.client import Client, consumer
from quorumlog.errors import LeaseLost

consumer.WAIT_MS = 500  # a worker that waits for records learns at the next request that its lease is lost
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)

async def main():
    async with Client(*sys.argv[1:]) as client:
        while True:
            try:
                async with client.log("shared").consumer("c", holder="w", lease_s=10) as mine:
                    print("holds", flush=True)
                    async for record in mine:
                        await mine.commit()
                        print("did", record.value.decode(), flush=True)
            except LeaseLost:
                print("lost", flush=True)

asyncio.run(main())
"""


async def test_the_older_process_of_a_holder_waits_for_the_later(cluster: Cluster) -> None:
    """As in a rolling update: they must not take the lease from each other in turn."""

    async def line(process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async with within("the worker says what it does"):
            return (await process.stdout.readline()).decode().strip()

    async with Client(*cluster.gateways) as client:
        log = await client.create_log("shared")
        workers: list[asyncio.subprocess.Process] = []

        async def start() -> asyncio.subprocess.Process:
            words = (sys.executable, "-c", WORKER, *cluster.gateways)
            workers.append(
                await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            )
            return workers[-1]

        try:
            old = await start()
            assert await line(old) == "holds"
            new = await start()
            assert await line(new) == "holds"
            assert [await line(old), await line(old)] == [
                "lost",
                "c waits for its lease, which w holds",
            ]
            for at in range(5):
                await log.append(b"%d" % at)
                assert await line(new) == f"did {at}"
            new.kill()
            assert await line(old) == "holds"
        finally:
            for process in workers:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
