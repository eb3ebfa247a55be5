"""The SDK's transactions, async and sync, on the cluster of the SDK's tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from loadtest.cluster import Cluster
from quorumlog.client import Client, Record, sync
from quorumlog.errors import NoSuchTransaction, TransactionAborted, TransactionCommitted

IN_PACKAGE = pytest.mark.asyncio(loop_scope="package")


@pytest_asyncio.fixture(loop_scope="package")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(*cluster.gateways) as made:
        yield made


@IN_PACKAGE
async def test_a_transaction_is_written_sealed_and_committed_once(client: Client) -> None:
    log = await client.create_log("once")
    begun = await client.begin("once", app="nightly", version=1)
    ledger = await begun.ledger(partition=0, attempt=0)
    assert [await ledger.append(b"a", b"b"), await ledger.append(Record(b"c", b"key"))] == [0, 1]
    ledger.entries = 1  # as after an answer that got lost
    assert await ledger.append(Record(b"c", b"key")) == 1
    assert (await ledger.close())["last_entry"] == 1

    done = await begun.commit(ledger.ledger_id)
    again = await begun.commit(ledger.ledger_id)

    assert (done["first_offset"], done["last_offset"]) == (0, 2)
    assert again == done == await begun.info()
    assert [(r.value, r.key) async for r in log.records()] == [
        (b"a", None),
        (b"b", None),
        (b"c", b"key"),
    ]
    later = await client.begin("once", app="nightly", version=1)
    assert (await later.info())["state"] == "COMMITTED"
    with pytest.raises(TransactionCommitted):
        await begun.abort()
    with pytest.raises(TransactionCommitted):
        await begun.ledger()


@IN_PACKAGE
async def test_an_aborted_one_leaves_nothing(client: Client) -> None:
    log = await client.create_log("aborted")
    begun = await client.begin("aborted", expires_in_s=3600)
    ledger = await begun.ledger()
    await ledger.append(b"a")
    await ledger.close()

    assert (await begun.abort())["state"] == "ABORTED"

    with pytest.raises(TransactionAborted):
        await begun.commit(ledger.ledger_id)
    assert [record async for record in log.records()] == []
    with pytest.raises(NoSuchTransaction):
        await client.transaction("nothing").info()


def test_the_sync_face_does_the_same(cluster: Cluster) -> None:
    with sync.Client(*cluster.gateways) as client:
        log = client.create_log("sync-transactions")
        log.append(b"old")
        begun = client.begin("sync-transactions")
        ledger = begun.ledger(partition=1)
        ledger.append(b"new")
        ledger.close()

        done = begun.commit(ledger.ledger_id, overwrite=True)

        assert (ledger.entries, done["first_offset"]) == (1, 1)
        assert [record.value for record in log.records()] == [b"new"]
        assert client.transaction(begun.transaction_id).info()["ledgers"][0]["partition"] == 1
