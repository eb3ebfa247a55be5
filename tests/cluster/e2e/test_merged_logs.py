"""A log of many small ledgers is merged while it is read: each record stays at its offset (rule 27c)."""

import asyncio

import aiohttp
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Log
from quorumlog.errors import NoSuchLedger
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")
LEDGERS = 200
PER_LEDGER = 3


async def read(log: Log, *, pause_s: float = 0.0) -> list[tuple[int, bytes, str]]:
    """Every record that the log has, with its offset and time."""
    found = []
    async for record in log.records():
        found.append((record.offset, record.value, str(record.timestamp)))
        await asyncio.sleep(pause_s)
    return found


async def ledgers(log: Log) -> list[int]:
    return [ledger["ledger_id"] for ledger in (await log.info())["ledgers"]]


async def test_small_ledgers_are_merged_under_readers_and_a_lost_owner(cluster: Cluster) -> None:
    async with Client(*cluster.gateways, deadline_s=120) as client:
        log = await client.create_log("merged", merge_below_bytes=0)
        values = [b"%d" % number for number in range(LEDGERS * PER_LEDGER)]
        for first in range(0, len(values) // 2, PER_LEDGER):
            await log.append(*values[first : first + PER_LEDGER])
            await log.roll()
        for first in range(len(values) // 2, len(values), 2 * PER_LEDGER):
            transaction = await client.begin(log.name)
            parts = []
            for begin in (first, first + PER_LEDGER):
                part = await transaction.ledger()
                await part.append(*values[begin : begin + PER_LEDGER])
                await part.close()
                parts.append(part.ledger_id)
            await transaction.commit(*parts)
        before = await read(log)
        many = await ledgers(log)
        assert [(offset, value) for offset, value, _ in before] == list(enumerate(values))
        assert len(many) > LEDGERS

        reader = asyncio.ensure_future(read(log, pause_s=0.01))
        await log.change(merge_below_bytes=1 << 20)
        await until(lambda: _has_fewer(log, len(many) - 8), "a merge is done")

        async def is_counted() -> bool:
            return sum([await _rewrites(cluster, url) for url in cluster.gateways]) > 0

        await until(is_counted, "the merge is counted once the old ledgers are deleted")
        owner = (await log.info())["owner"]
        assert owner is not None
        name = f"gateway-{cluster.gateways.index(owner['url']) + 1}"
        await cluster.kill(name)
        cluster.start(name)
        await cluster.until_up(name)
        assert await reader == before
        await log.append(b"later")
        await until(lambda: _has_fewer(log, 20), "the ledgers are merged")

        after = await read(log)
        assert after[:-1] == before
        assert after[-1][:2] == (len(values), b"later")
        for url in cluster.gateways:
            async with Client(url, deadline_s=120) as one:
                assert await read(one.log(log.name)) == after
        named = {*await ledgers(log)}

        async def others_are_deleted() -> bool:
            for ledger_id in {*many[:-1]} - named:
                try:
                    await client.ledger(ledger_id).info()
                except NoSuchLedger:
                    continue
                return False
            return True

        await until(others_are_deleted, "what was replaced is deleted")
        assert await read(log) == after


async def _has_fewer(log: Log, count: int) -> bool:
    return len(await ledgers(log)) < count


async def _rewrites(cluster: Cluster, url: str) -> float:
    async with cluster.session() as session, session.get(f"{url}/metrics") as answer:
        if answer.status != 200:
            raise aiohttp.ClientError(await answer.text())
        lines = (await answer.text()).splitlines()
    name = "quorumlog_log_rewrites_total "
    return next(float(line.split()[1]) for line in lines if line.startswith(name))
