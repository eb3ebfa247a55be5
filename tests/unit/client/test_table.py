"""Reads by key in the SDK and on the command line: the newest record, the keys, and a log as a table."""

import asyncio
from typing import Any
from uuid import uuid4

import orjson
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Record, sync
from quorumlog.client.log import Log
from quorumlog.errors import KeyScanLimit, LogReplaced, NoSuchLog
from tests.support.waiting import until
from tests.unit.client.test_cli import run

pytestmark = pytest.mark.asyncio(loop_scope="package")


def new_name() -> str:
    return f"table-{uuid4().hex[:8]}"


async def filled(log: Log) -> None:
    """Keys with several records, in two ledgers, and records without a key."""
    await log.append(Record(b"1", b"a"), Record(b"2", b"b"), b"3")
    await log.roll()
    await log.append(Record(b"4", b"a"), Record(b"5", b"c/\xff"), Record(b"6", "ключ".encode()))


async def test_the_newest_record_and_the_keys(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        assert await log.get("a") is None
        assert [key async for key in log.keys("")] == []
        await filled(log)

        found = await log.get("a")
        assert found is not None
        assert (found.offset, found.value, found.key) == (3, b"4", b"a")
        russian = await log.get("ключ")
        assert russian is not None
        assert await log.get("none") is None
        keys = [key async for key in log.keys("")]
        assert sorted(keys) == [b"a", b"b", b"c/\xff", "ключ".encode()]
        assert [key async for key in log.keys("b")] == [b"b"]
        with pytest.raises(NoSuchLog):
            await client.log("none").get("a")
        for key in ("", ".", ".."):
            with pytest.raises(ValueError, match="URL"):
                await log.get(key)


async def test_a_table_follows_its_log(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        await filled(log)
        async with log.table() as table:
            await table.caught_up()
            assert (len(table), table["a"].value, table[b"b"].offset) == (4, b"4", 1)
            assert ("c" in table, b"c/\xff" in table) == (False, True)
            assert sorted(table) == sorted(table.snapshot())
            assert table.get("none") is None
            with pytest.raises(KeyError):
                table["none"]

            await log.append(Record(b"7", b"c"), Record(b"8", b"a"))
            await table.caught_up()
            assert (table["c"].value, table["a"].value) == (b"7", b"8")
            await log.roll()
            await log.truncate(8)
            await log.append(Record(b"9", b"d"))
            await table.caught_up()
            assert sorted(table) == [b"d"], "the others are released"
            await log.close()
            await table.caught_up()
        assert table["d"].value == b"9"
        for outside in (table, log.table()):
            with pytest.raises(ValueError, match="with"):
                await outside.caught_up()


async def test_a_table_of_a_log_without_records_is_caught_up_at_once(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        for _ in range(2):
            async with asyncio.timeout(10), log.table() as table:
                await table.caught_up()
                assert len(table) == 0
            await filled(log)
            await log.roll()
            await log.truncate(6)


async def test_a_search_that_takes_several_requests_has_one_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request names the log that the first one found."""
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        await log.append(Record(b"1", b"a"))
        request, sent = client._transport.request, list[Any]()

        async def limited(method: str, path: str, **given: Any) -> Any:
            sent.append((given["end"], given["params"]))
            if len(sent) < 3:
                raise KeyScanLimit(before=9 - len(sent), created_at="once")
            if len(sent) == 3:
                given["params"] = {}
            return await request(method, path, **given)

        monkeypatch.setattr(client._transport, "request", limited)
        found = await log.get("a")
        assert found is not None
        assert len({end for end, _ in sent}) == 1
        assert [params for _, params in sent] == [
            {},
            {"before": 8, "created": "once"},
            {"before": 7, "created": "once"},
        ]
        with pytest.raises(LogReplaced):
            await request(
                "GET",
                f"/v1/logs/{log.name}/keys/a",
                is_repeatable=True,
                params={"created": "2026-01-02T03:04:05.678901Z"},
            )


async def test_a_table_of_a_log_that_is_deleted_raises(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        await filled(log)
        async with log.table() as table:
            await table.caught_up()
            await log.delete()
            task = table._task
            assert task is not None
            await until(task.done, "the table learns of it")
            with pytest.raises(NoSuchLog):
                table.get("a")


async def test_a_table_is_never_caught_up_with_another_log(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name())
        await filled(log)
        await log.close()
        async with log.table() as table:
            await table.caught_up()
            await log.delete()
            for count in (1, 9):
                await client.create_log(log.name)
                await log.append(*[Record(b"1", b"a")] * count)
                with pytest.raises(LogReplaced):
                    await table.caught_up()
                await log.delete()


async def test_a_table_for_threads(cluster: Cluster) -> None:
    def work() -> None:
        with sync.Client(*cluster.gateways) as client:
            log = client.create_log(new_name())
            log.append(Record(b"1", b"a"), Record(b"2", b"b"))
            found = log.get("a")
            assert found is not None
            assert found.offset == 0
            assert sorted(log.keys()) == [b"a", b"b"]
            with log.table() as table:
                table.caught_up()
                assert (len(table), table["b"].value, "c" in table) == (2, b"2", False)
                assert sorted(table) == [b"a", b"b"]

    await asyncio.to_thread(work)


async def test_keys_on_the_command_line(cluster: Cluster) -> None:
    name = new_name()
    async with Client(*cluster.gateways) as client:
        await filled(await client.create_log(name))

    assert await run(cluster, "log", "get", name, "a") == (0, b"4\n", "")
    status, output, problem = await run(cluster, "log", "get", name, "none")
    assert (status, output, problem.split(":")[0]) == (4, b"", "no-such-key")
    status, output, _ = await run(cluster, "--json", "log", "keys", name, "--prefix", "b")
    assert [orjson.loads(line) for line in output.splitlines()] == [{"key": "b"}]


async def test_sealed_ledgers_are_indexed_and_the_indexes_used(cluster: Cluster) -> None:
    async def counted(name: str) -> float:
        total = 0.0
        async with cluster.session() as session:
            for service in ("gateway-1", "gateway-2"):
                url = f"{cluster.internal_url(service)}/metrics"
                async with session.get(url) as answer:
                    for line in (await answer.text()).splitlines():
                        if line.startswith(f"quorumlog_log_{name}_total "):
                            total += float(line.split()[1])
        return total

    async with Client(*cluster.gateways) as client:
        log = await client.create_log(new_name(), merge_below_bytes=0)
        before = await counted("key_indexes")
        for number in range(4):
            for _ in range(3):
                await log.append(*(Record(b"x" * 1000, b"%d-%d" % (number, n)) for n in range(90)))
            await log.roll()
        deadline = asyncio.get_running_loop().time() + 60
        while await counted("key_indexes") < before + 4:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.2)
        lookups = await counted("key_lookups")
        found = [record.offset async for record in log.records(key="2-7")]
        assert found == [540 + 7, 630 + 7, 720 + 7]
        newest = await log.get("1-5")
        assert newest is not None
        assert newest.offset == 455
        assert await counted("key_lookups") >= lookups + 4
        assert await counted("key_indexes_damaged") == 0
