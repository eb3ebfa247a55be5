"""Pages that are read ahead, and transactions, in the SDK without a cluster."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest
import pytest_asyncio

from loadtest.cluster import Cluster
from quorumlog.client import Client, Record, sync
from quorumlog.client.records import Paged, ahead
from quorumlog.errors import NoSuchTransaction, TransactionAborted, TransactionCommitted
from tests.support.waiting import turns

_TURNS = 20
"""Of the event loop: by then everything has come as far as it comes by itself."""


class Pages:
    """Pages of one number each, and how far they were asked for."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        self.asked = -1
        self.is_closed = False
        self._count, self._fails_at = count, fails_at
        self.hold: asyncio.Event | None = None

    async def read(self) -> AsyncGenerator[Sequence[int], None]:
        try:
            for number in range(self._count):
                self.asked = number
                if self.hold is not None:
                    await self.hold.wait()
                if number == self._fails_at:
                    raise ConnectionError(number)
                yield [number]
        finally:
            self.is_closed = True


async def test_all_pages_come_in_order() -> None:
    assert [each async for each in Paged(ahead(Pages(5).read()))] == [0, 1, 2, 3, 4]
    assert [each async for each in Paged(ahead(Pages(0).read()))] == []


async def test_nothing_is_read_before_somebody_asks_and_one_page_beyond() -> None:
    pages = Pages(5)
    items = Paged(ahead(pages.read()))
    await turns(_TURNS)
    assert pages.asked == -1

    assert await anext(items) == 0
    await turns(_TURNS)

    assert pages.asked == 1
    await items.aclose()
    assert pages.is_closed


async def test_an_error_comes_at_its_page() -> None:
    pages = Pages(5, fails_at=1)
    items = Paged(ahead(pages.read()))
    assert await anext(items) == 0
    await turns(_TURNS)

    with pytest.raises(ConnectionError):
        await anext(items)
    assert pages.is_closed


async def test_an_error_of_an_unwanted_page_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    items = Paged(ahead(Pages(5, fails_at=1).read()))
    assert await anext(items) == 0
    await turns(_TURNS)

    await items.aclose()

    assert not caplog.records


async def test_who_stops_waiting_stops_the_read() -> None:
    pages = Pages(5)
    pages.hold = asyncio.Event()
    asking = asyncio.ensure_future(anext(Paged(ahead(pages.read()))))
    await turns(_TURNS)
    assert pages.asked == 0

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert pages.is_closed


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
