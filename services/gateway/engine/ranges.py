"""Reading a range of confirmed entries from the bookies that store them."""

import asyncio
from dataclasses import replace
from typing import Final

from quorumlog.net.driver import Driver, Told, error_of
from quorumlog.net.ports import Ports
from quorumlog.protocol.messages import Begin, EntriesRead, Failed
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Run

_SLACK_BYTES: Final = 64 << 10
"""Added to the wanted payload bytes: columns and digests of many small entries."""


async def read_range(
    ports: Ports, row: LedgerMetadata, first: int, last: int, bytes_max: int
) -> list[Run]:
    """Contiguous entries from `first` on, at least one, about `bytes_max` of payload.

    Raises: EntryUnavailable for the first entry; a later unavailable entry only ends the list.
    """
    runs: list[Run] = []
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_outcome(news: Told) -> None:
        if end.done():
            return
        if isinstance(news, EntriesRead):
            runs.append(news.run)
            if news.is_last:
                end.set_result(None)
        elif isinstance(news, Failed):
            if runs:
                end.set_result(None)
            else:
                end.set_exception(error_of(news, row.ledger_id))

    reader = RangeReader(
        row, first=first, last=last, max_bytes=max(bytes_max, 1), turn=row.ledger_id
    )
    asked_bytes = min(ports.read_bytes_max, bytes_max + _SLACK_BYTES)
    driver = Driver(reader, row.ledger_id, replace(ports, read_bytes_max=asked_bytes), on_outcome)
    try:
        driver.post(Begin())
        await end
    finally:
        driver.stop()
    return runs
