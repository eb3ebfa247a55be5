"""What a commit needs to know of a transaction's ledgers before they come onto the log."""

import asyncio
from collections.abc import Sequence
from typing import Final

from quorumlog.errors import InvalidRequest, NoSuchLedger
from quorumlog.protocol.metadata import State
from quorumlog.protocol.transaction import Sealed
from services.gateway.logs.ends import end_of
from services.gateway.logs.ports import LogEngine

_AT_ONCE: Final = 32
"""Ledgers whose ends are read at once."""


async def sizes_of(
    ledgers: Sequence[Sealed], engine: LogEngine
) -> tuple[tuple[int, int, int], ...]:
    """(ledger, records, bytes) of each. What is CLOSED never changes, so this may be asked early.

    Raises: InvalidRequest where one is not closed, ends elsewhere, or does not hold records.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def size(index: int, sealed: Sealed) -> tuple[int, int, int]:
        async with room:
            pointer = f"/ledgers/{index}"
            try:
                row = await engine.get(sealed.ledger_id)
                if row.state is not State.CLOSED:
                    raise _invalid(pointer, f"ledger {sealed.ledger_id} is not closed")
                if sealed.last_entry not in (None, row.last_entry):
                    detail = f"ledger {sealed.ledger_id} ends at {row.last_entry}"
                    raise _invalid(pointer, detail)
                end = await end_of(row, engine)
            except NoSuchLedger as error:
                raise _invalid(pointer, f"there is no ledger {sealed.ledger_id}") from error
            return sealed.ledger_id, end.records, end.bytes

    return tuple(
        await asyncio.gather(*(size(index, sealed) for index, sealed in enumerate(ledgers)))
    )


def _invalid(pointer: str, detail: str) -> InvalidRequest:
    return InvalidRequest(detail, errors=[{"pointer": pointer, "detail": detail}])
