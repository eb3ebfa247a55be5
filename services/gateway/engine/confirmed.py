"""The LAC as told by bookies, if the writer cannot be asked (rules 5 and 13)."""

import asyncio
from functools import partial

from quorumlog.net.ports import BookiesPort
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import LedgerMetadata


async def confirmed_by_bookies(row: LedgerMetadata, bookies: BookiesPort) -> int | None:
    """The highest LAC known to a covering set of the last fragment's bookies; None if too few
    answered. Entries below the last fragment are always confirmed.
    """
    members = row.last_fragment.bookies
    answered: set[int] = set()
    waiting = set(range(len(members)))
    highest = row.last_fragment.first_entry - 1
    is_settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def on_lac(position: int, status: Status, lac: int) -> None:
        nonlocal highest
        waiting.discard(position)
        if status in (Status.OK, Status.NO_ENTRY):
            answered.add(position)
            if status is Status.OK and lac > NO_ENTRY:
                highest = max(highest, lac)
        if not is_settled.done():
            if row.quorum.is_covered(answered):
                is_settled.set_result(True)
            elif not waiting:
                is_settled.set_result(False)

    for position, member in enumerate(members):
        bookies.read_lac(member, row.ledger_id, partial(on_lac, position))
    return highest if await is_settled else None
