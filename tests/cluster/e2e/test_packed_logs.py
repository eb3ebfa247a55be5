"""A log that stores its batches compressed: its readers, its producers and its takeovers see no difference."""

import base64
import json
from typing import Any

import aiohttp
import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client, Record
from quorumlog.protocol import batch
from tests.support.waiting import until

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
