"""Logs on a cluster whose gateways are killed: compressed batches, merged ledgers, and appends by a socket."""

import asyncio
import base64
import json
import uuid
from collections import Counter
from itertools import count
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Log, Record
from quorumlog.errors import NOT_DONE, NoSuchLedger, QuorumLogError
from quorumlog.protocol import batch
from tests.support.waiting import SETTLED_S, until, within

pytestmark = pytest.mark.asyncio(loop_scope="package")
COUNT = 40
FORMS = ("application/json", "application/x-ndjson", "application/vnd.quorumlog.frames")


def orders(number: int) -> list[Record]:
    """The records of one request."""
    return [
        Record(
            json.dumps({"order": at, "customer": at % 97, "state": "accepted"}).encode(),
            key=b"k%d" % at,
            headers={"number": str(number)},
        )
        for at in range(number * 50, number * 50 + 50)
    ]


async def test_clients_of_a_packed_log_see_what_those_of_a_plain_one_see(cluster: Cluster) -> None:
    stored: dict[str, int] = {}
    sent = [record for number in range(COUNT) for record in orders(number)]
    async with Client(*cluster.gateways, deadline_s=120) as client:
        for name, coding in (("plain-orders", None), ("packed-orders", "zstd")):
            log = await client.create_log(name, batch_compression=coding)
            producer = log.producer("shop", epoch=1, since=0)
            first = [await producer.append(*orders(number)) for number in range(COUNT)]
            assert [done.first_offset for done in first] == list(range(0, 50 * COUNT, 50))
            writer = (await log.info())["owner"]
            assert writer is not None
            owner = writer["url"]
            await cluster.kill(f"gateway-{cluster.gateways.index(owner) + 1}")

            # The owner's memory is gone: who takes over knows the requests by what is stored.
            again = client.log(name).producer("shop", epoch=1, since=0)
            repeated = [await again.append(*orders(number)) for number in range(COUNT)]
            assert all(done.is_duplicate for done in repeated)
            assert [done.first_offset for done in repeated] == [done.first_offset for done in first]
            read = [record async for record in log.records()]
            assert [(each.value, each.key, dict(each.headers)) for each in read] == [
                (each.value, each.key, dict(each.headers or {})) for each in sent
            ]
            info = await log.info()
            ledger = client.ledger(info["ledgers"][0]["ledger_id"])
            stored[name] = (await ledger.info())["length"] or 0
            entries = [entry.payload async for entry in ledger.entries()]
            assert {batch.is_packed(entry) for entry in entries} == {coding == "zstd"}
            cluster.start(f"gateway-{cluster.gateways.index(owner) + 1}")
            await cluster.until_up(f"gateway-{cluster.gateways.index(owner) + 1}")
    assert stored["packed-orders"] < stored["plain-orders"] / 3


async def test_a_packed_log_is_read_alike_in_every_form_and_page_size(cluster: Cluster) -> None:
    async with Client(*cluster.gateways, deadline_s=120) as client:
        for name, coding in (("plain-forms", "none"), ("packed-forms", "zstd")):
            log = await client.create_log(name, batch_compression=coding)
            for number in range(COUNT):
                await log.append(*orders(number))
            await log.append(b"too short to shrink")
            assert (await log.info())["settings"]["batch_compression"] == coding
    async with cluster.session() as session:
        url = cluster.gateways[0]

        async def read(name: str, query: str, accept: str) -> bytes:
            async def ask() -> bytes | None:
                async with session.get(
                    f"{url}/v1/logs/{name}/records?{query}", headers={"Accept": accept}
                ) as answer:
                    return await answer.read() if answer.status == 200 else None

            found = await until(ask, f"{name} is read", passing=(aiohttp.ClientError,))
            assert found is not None
            return found

        for query in (
            "limit=10000&max_bytes=60000000&encoding=text",
            "limit=73&from=31&encoding=json",
            "limit=10000&max_bytes=1",
            "limit=10000&max_bytes=9000&from=99",
        ):
            for accept in FORMS:
                plain, packed = [
                    await read(name, query, accept) for name in ("plain-forms", "packed-forms")
                ]
                assert _said(plain, accept) == _said(packed, accept), (query, accept)
        pyarrow = pytest.importorskip("pyarrow")
        tables = [
            pyarrow.ipc.open_stream(
                await read(name, "limit=10000", "application/vnd.apache.arrow.stream")
            ).read_all()
            for name in ("plain-forms", "packed-forms")
        ]
        for column in ("offset", "key", "headers", "value"):
            assert tables[0].column(column).to_pylist() == tables[1].column(column).to_pylist()


def _said(body: bytes, accept: str) -> Any:
    """What a read says, without its ledger and its times."""
    if accept == FORMS[2]:
        return body
    lines = body.splitlines() if accept == FORMS[1] else [body]
    found = [json.loads(line) for line in lines]
    records = found if accept == FORMS[1] else found[0]["records"]
    assert records
    rest = {} if accept == FORMS[1] else {"next": found[0]["next"], "closed": found[0]["closed"]}
    shown = [
        {name: each[name] for name in each.keys() - {"ledger_id", "entry_id", "timestamp"}}
        for each in records
    ]
    assert all("data" not in each or base64.b64decode(each["data"]) for each in shown)
    return shown, rest


async def test_what_a_transaction_brings_to_a_packed_log_is_packed_too(cluster: Cluster) -> None:
    async with Client(*cluster.gateways, deadline_s=120) as client:
        log = await client.create_log("packed-transactions", batch_compression="zstd")
        transaction = await client.begin(log.name)
        part = await transaction.ledger()
        large = [Record(b'{"order":%d}' % number * 20) for number in range(2200)]
        await part.append(*orders(0))
        await part.append(*large)
        await part.close()
        await transaction.commit(part.ledger_id)
        assert [record.value async for record in log.records()] == [
            record.value for record in (*orders(0), *large)
        ]
        stored = [entry.payload async for entry in client.ledger(part.ledger_id).entries()]
        assert len(stored) == 2
        assert all(map(batch.is_packed, stored))


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


class Load:
    """Callers that append numbers, one at a time each, and note what became of each number."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.offsets: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.is_over = False
        self._numbers = count()

    async def work(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            try:
                done = await self.log.append(b"%d" % number)
            except QuorumLogError as error:
                self.failed[number] = error.outcome
            else:
                self.offsets[number] = done.first_offset

    async def go_on(self, more: int) -> None:
        enough = len(self.offsets) + more
        await until(
            lambda: len(self.offsets) >= enough, f"{more} more are there", deadline_s=SETTLED_S
        )


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_what_a_busy_handle_was_told_outlives_its_gateway(cluster: Cluster, how: str) -> None:
    async with Client(*cluster.gateways) as client:
        load = Load(await client.create_log(f"busy-{uuid.uuid4().hex}"))
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(load.work())
            async with within("a socket is open"):
                while load.log._stream._socket is None:
                    await load.go_on(1)
            await load.go_on(100)
            await (cluster.kill if how == "kill" else cluster.stop)("gateway-1")
            await load.go_on(500)
            load.is_over = True

        found = {record.offset: int(record.value) async for record in load.log.records()}
    times = Counter(found.values())
    assert {number: found.get(at) for number, at in load.offsets.items()} == {
        number: number for number in load.offsets
    }
    assert max(times.values()) == 1
    assert not [
        number for number, what in load.failed.items() if what == NOT_DONE and number in times
    ]
