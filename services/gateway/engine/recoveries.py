"""The recoveries that this gateway runs: one per ledger at a time, shared by all who ask."""

import asyncio
import itertools
import logging
from typing import Final

from quorumlog.errors import LedgerClosed, NoSuchLedger, QuorumLogError
from quorumlog.net.conclude import conclude
from quorumlog.net.ports import Ports
from quorumlog.protocol.messages import RecoverRequested
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.recovery import Recovery
from services.gateway.engine.rows import Rows, is_closed

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 30.0
"""Then whoever asked is told that it is blocked; it may be asked for again."""
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between the tries of a recovery that nobody waits for (rule 10)."""


class Recoveries:
    """Runs recoveries. Invariant: at most one machine per ledger."""

    def __init__(self, rows: Rows, ports: Ports) -> None:
        """Nothing runs yet."""
        self._rows = rows
        self._ports = ports
        self._running: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._wanted: set[int] = set()

    async def run(self, ledger_id: int, *, declare_lost: tuple[str, ...] = ()) -> LedgerMetadata:
        """Recover a ledger, or take part in the recovery that runs; gives the closed row. What is
        declared lost (rule 14) takes a recovery of its own.

        Raises: RecoveryBlocked, NoSuchLedger, MetadataUnavailable.
        """
        while declare_lost and ledger_id in self._running:
            await asyncio.wait([self._running[ledger_id]])
        task = self._running.get(ledger_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._recover(ledger_id, declare_lost))
            self._running[ledger_id] = task
            task.add_done_callback(lambda done: self._ended(ledger_id, done))
        return await asyncio.shield(task)

    def want(self, ledger_id: int) -> None:
        """Recover a ledger in the background, again and again until it is closed (rule 10)."""
        if ledger_id not in self._wanted:
            self._wanted.add(ledger_id)
            self._ports.tasks.start(self._insist(ledger_id))

    async def close(self) -> None:
        """End what runs: a recovery can be left at any point."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, ledger_id: int, task: asyncio.Task[LedgerMetadata]) -> None:
        self._running.pop(ledger_id, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; maybe nobody does

    async def _insist(self, ledger_id: int) -> None:
        try:
            for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
                try:
                    await self.run(ledger_id)
                    return
                except NoSuchLedger:
                    return
                except QuorumLogError as error:
                    log.warning("recovery-failed", extra={"ledger": ledger_id, "why": error.detail})
                await asyncio.sleep(pause_s)
        finally:
            self._wanted.discard(ledger_id)

    async def _recover(self, ledger_id: int, declare_lost: tuple[str, ...]) -> LedgerMetadata:
        row = await self._rows.fresh(ledger_id)
        if is_closed(row):
            return row
        log.info("recovery-begun", extra={"ledger": ledger_id, "version": row.version})
        try:
            closed = await conclude(
                Recovery(declare_lost=declare_lost),
                ledger_id,
                self._ports,
                RecoverRequested(row),
                deadline_s=_DEADLINE_S,
            )
        except LedgerClosed:
            return await self._rows.fresh(ledger_id)
        log.info("recovered", extra={"ledger": ledger_id, "last_entry": closed.last_entry})
        self._rows.put(closed)
        return closed
