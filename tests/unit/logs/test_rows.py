"""Rows that reads of logs begin with."""

import asyncio

from quorumlog.protocol.log import LogMetadata
from tests.model.logs.model import Cluster
from tests.support.waiting import within
from tests.unit.logs.test_manager import SETTINGS

LOG = "a"


async def test_a_row_that_this_process_changes_while_it_is_asked_for_is_not_recent() -> None:
    async with within("the row is asked for"):
        gateway = Cluster(0).gateway()
        rows, store = gateway.logs.rows, gateway.logs.rows._store
        await gateway.logs.create(LOG, SETTINGS)
        assert await rows.row(LOG) == rows.recent(LOG)
        asked, reported = asyncio.Event(), asyncio.Event()
        get = store.get

        async def slow(name: str, known: LogMetadata | None) -> object:
            row = await get(name, known)
            asked.set()
            await reported.wait()
            return row

        store.get = slow  # type: ignore[assignment]
        asking = asyncio.create_task(rows.row(LOG))
        await asked.wait()
        store.get = get
        await gateway.logs.delete(LOG)
        reported.set()

        assert (await asking).name == LOG
        assert rows.recent(LOG) is None
        await gateway.end()
