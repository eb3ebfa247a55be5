"""The ends of ledgers that clients may be told of: those that bookies keep (rule 18b)."""

import asyncio
from collections import OrderedDict
from typing import Final

from quorumlog.errors import UNKNOWN, MetadataUnavailable, NoSuchLedger
from quorumlog.net.ports import Ports
from quorumlog.net.spread import spread
from quorumlog.protocol.ends import End, end_after
from quorumlog.protocol.metadata import LedgerMetadata
from services.gateway.engine.rows import LedgerRows, went_back

_KEPT_MAX: Final = 100_000
"""As many as rows are cached (`rows.py`)."""


class Ends:
    """What this gateway knows of ends that are kept.

    Between the change that closes a ledger and the copies of its row, the end is in the database alone. Whoever closes
    a ledger waits for the copies; whoever reads the row meanwhile does not know whether they are kept, so each gateway
    sends them once before it tells the end of a ledger that another one closed.

    Invariant: an end is known as kept only if the database had it after an ack quorum of bookies confirmed copies. An end
    with fewer copies is told too, since nobody can wait for bookies for ever; copies are sent again for the next reader.
    """

    def __init__(self, rows: LedgerRows, ports: Ports) -> None:
        """No end is known as kept."""
        self._rows, self._ports = rows, ports
        self._kept: OrderedDict[int, int | None] = OrderedDict()
        self._asking: dict[int, asyncio.Task[LedgerMetadata]] = {}

    async def told(self, row: LedgerMetadata) -> LedgerMetadata:
        """The row of a CLOSED ledger, or a later one, once its end may be told. Callers share one look at it.

        Raises: NoSuchLedger, MetadataUnavailable, DatabaseWentBack.
        """
        ledger_id = row.ledger_id
        if ledger_id in self._kept and self._kept[ledger_id] == row.last_entry:
            return row
        task = self._asking.get(ledger_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._keep(row))
            self._asking[ledger_id] = task
            task.add_done_callback(lambda done: self._asked(ledger_id, done))
        return await asyncio.shield(task)

    async def copied(self, row: LedgerMetadata) -> LedgerMetadata:
        """`kept` for a row of which no copies may have been sent."""
        return await self.kept(row, await spread(row, self._ports))

    async def kept(self, closed: LedgerMetadata, copies: int = 0) -> LedgerMetadata:
        """The row of an end that a client is about to be told, from the primary. Members keep copies of the end now, so
        that a later loss of the row leaves the end as it is; the answer that told of it may be of a database that was
        lost before, and this process may have stood still since (rule 18b). `copies`: how many bookies confirmed one.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        try:
            return await self._read(closed, copies)
        except NoSuchLedger:
            return closed  # deleted since, which only a CLOSED ledger is
        except MetadataUnavailable as error:
            raise error.with_outcome(UNKNOWN) from error

    async def close(self) -> None:
        """Cancel what is under way."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _keep(self, row: LedgerMetadata) -> LedgerMetadata:
        return await self._read(row, await spread(row, self._ports))

    async def _read(self, closed: LedgerMetadata, copies: int) -> LedgerMetadata:
        """The row as the database has it now that copies were sent. Raises: NoSuchLedger and as `kept`."""
        row = await self._rows.fresh_closed(closed.ledger_id)
        end = end_after(closed, copies, row)
        if end is End.MOVED:
            raise went_back(row.ledger_id, "closed", f"the end {row.last_entry}")
        if end is End.UNSURE:
            return row
        self._kept[row.ledger_id] = row.last_entry
        self._kept.move_to_end(row.ledger_id)
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return row

    def _asked(self, ledger_id: int, task: asyncio.Task[LedgerMetadata]) -> None:
        del self._asking[ledger_id]
        if not task.cancelled():
            task.exception()  # perhaps nobody awaits the task any more
