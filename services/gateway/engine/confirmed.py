"""The LAC as told by bookies, if the writer cannot be asked (rules 5 and 13)."""

import asyncio
from functools import partial

from quorumlog.net.ports import BookiesPort
from quorumlog.protocol.ends import LacByCoverage
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata


async def confirmed_by_bookies(row: LedgerMetadata, bookies: BookiesPort) -> int | None:
    """The highest LAC known to a covering set of the last fragment's bookies; None if too few
    answered. Entries below the last fragment are always confirmed.
    """
    machine = LacByCoverage(row)
    end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def on_lac(position: int, status: Status, lac: int) -> None:
        machine.answered(position, status, lac)
        if machine.is_over and not end.done():
            end.set_result(machine.confirmed)

    for position, member in enumerate(row.last_fragment.bookies):
        bookies.read_lac(member, row.ledger_id, partial(on_lac, position))
    return await end
