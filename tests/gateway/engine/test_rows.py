"""Rows as a gateway knows them, on a real metadata service whose answers come late."""

import asyncio

import pytest

from loadtest.stores import Stores
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import LedgerMetadata, State
from services.gateway.engine.rows import Rows
from tests.metadata.support import DRAFT, Service, serving
from tests.support.waiting import until


class LateAnswers(MetadataClient):
    """Its answers to reads wait until they may come."""

    def __init__(self, url: str) -> None:
        super().__init__([url])
        self.read_at: list[int] = []
        self.comes = asyncio.Event()

    async def get(self, ledger_id: int, *, proof: bool = False) -> LedgerMetadata:
        """The row as it was when it was asked for."""
        row = await super().get(ledger_id, proof=proof)
        self.read_at.append(row.version)
        await self.comes.wait()
        return row


async def closed(service: Service, row: LedgerMetadata) -> None:
    """The ledger ends, in two changes."""
    _, recovering = await service.client.cas(row.in_recovery())
    assert recovering is not None
    await service.client.cas(recovering.closed(last_entry=-1, length=0))


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_change_that_overtakes_a_rows_answer_makes_the_row_stale(
    stores: Stores, *, is_known: bool
) -> None:
    async with serving(stores) as service:
        row = await service.client.create(DRAFT)
        late = LateAnswers(service.url)
        ended: set[int] = set()
        rows = Rows(late, lambda _ledger: None, ended.add)
        if is_known:
            late.comes.set()
            await rows.fresh(row.ledger_id)
            late.comes.clear()
        following = asyncio.ensure_future(rows.follow())

        async def is_followed() -> bool:
            await closed(service, await service.client.create(DRAFT))
            return bool(ended)

        await until(is_followed, "the changes are followed")
        asked = asyncio.ensure_future(rows.fresh(row.ledger_id))
        await until(lambda: len(late.read_at) > is_known, "the row is read")

        await closed(service, row)
        await until(lambda: row.ledger_id in ended, "the news has come")
        following.cancel()
        late.comes.set()

        try:
            assert (await asked).state is State.OPEN
            assert (await rows.row(row.ledger_id)).state is State.CLOSED
        finally:
            await late.close()
