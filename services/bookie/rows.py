"""Pages of what a rebuild of the metadata's database needs: copies of rows, ledger keys, deleted ids (rule 18d).

Read from the index and from what is above the last checkpoint. A copy that is not on disk yet is told too: it is of a
committed row all the same.
"""

import asyncio
from typing import Final

from quorumlog.wire.rebuild_bodies import HeldRows
from services.bookie.store import Store

PAGE_BYTES_MAX: Final = 1 << 20
"""Copies of one page; a page has one ledger at least."""
_AT_ONCE: Final = 50
"""Ledgers between two turns of the event loop: about a millisecond."""


async def rows_page(store: Store, after: int, limit: int) -> tuple[list[HeldRows], int | None]:
    """Ledgers with ids above `after`, deleted ones included, and the `after` of the next page."""
    found: list[HeldRows] = []
    size = 0
    for ledger_id, row in store.holdings.remembered(after):
        if len(found) == limit or size >= PAGE_BYTES_MAX:
            return found, found[-1].ledger_id
        if row is None:
            found.append(HeldRows(ledger_id=ledger_id, deleted=True))
        else:
            copies = tuple(copy.body.decode() for copy in store.holdings.row_copies(ledger_id))
            size += sum(map(len, copies))
            found.append(
                HeldRows(
                    ledger_id=ledger_id,
                    ledger_key=row.ledger_key or b"",
                    highest_entry=row.highest,
                    limbo=row.is_limbo,
                    copies=copies,
                )
            )
        if len(found) % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return found, None
