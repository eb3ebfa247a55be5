"""Recoveries that nobody waits for."""

import asyncio
from typing import Any, cast

from quorumlog.errors import MetadataUnavailable
from quorumlog.net.ports import Ports
from quorumlog.net.timers import Tasks
from quorumlog.protocol.metadata import LedgerMetadata
from services.gateway.engine.ends import Ends
from tests.support.virtual import in_virtual_time
from tests.unit.metadata.support import DRAFT

OUTAGE_S = 24 * 3600


class Away:
    """Rows that can't be read for a day."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def fresh(self, _ledger_id: int) -> LedgerMetadata:
        if asyncio.get_running_loop().time() < OUTAGE_S:
            raise MetadataUnavailable
        self.read.set()
        return DRAFT.closed(last_entry=-1, length=0)


@in_virtual_time(seed=0)
async def test_a_background_recovery_is_retried_through_any_outage() -> None:
    rows, tasks = Away(), Tasks()
    none = cast(Any, None)
    ends = Ends(cast(Any, rows), Ports(none, none, none, none, tasks))
    ends.start_recovery(7)
    async with asyncio.timeout(OUTAGE_S + 3600):
        await rows.read.wait()
    await tasks.close()
