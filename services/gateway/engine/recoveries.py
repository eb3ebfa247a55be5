"""The recoveries that this gateway runs: one at a time per ledger, shared by all callers."""

import asyncio
import itertools
import logging
from typing import Final

from quorumlog.errors import LedgerClosed, NoSuchLedger, QuorumLogError
from quorumlog.net.driver import conclude
from quorumlog.net.ports import Ports
from quorumlog.net.spread import spread
from quorumlog.protocol.messages import RecoverRequested
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.recovery import Recovery
from services.gateway.engine.rows import LedgerRows, is_closed

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 30.0
"""After this time callers get recovery-blocked; they may retry."""
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries of a background recovery (rule 10)."""


class Recoveries:
    """Runs recoveries. Invariant: at most one machine per ledger."""

    def __init__(self, rows: LedgerRows, ports: Ports) -> None:
        """No recovery runs yet."""
        self._rows = rows
        self._ports = ports
        self._running: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._in_background: set[int] = set()

    async def run(self, ledger_id: int, *, declare_lost: tuple[str, ...] = ()) -> LedgerMetadata:
        """Recover a ledger, or join the running recovery; returns the closed row. Members declared
        lost (rule 14) need a recovery of their own.

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

    def start_background(self, ledger_id: int) -> None:
        """Recover a ledger in the background, with retries until it is closed (rule 10)."""
        if ledger_id not in self._in_background:
            self._in_background.add(ledger_id)
            self._ports.tasks.start(self._retry_until_closed(ledger_id))

    async def close(self) -> None:
        """Cancel running recoveries: a recovery may stop at any point."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, ledger_id: int, task: asyncio.Task[LedgerMetadata]) -> None:
        self._running.pop(ledger_id, None)
        if not task.cancelled():
            task.exception()  # perhaps nobody awaits the task

    async def _retry_until_closed(self, ledger_id: int) -> None:
        try:
            for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
                try:
                    await self.run(ledger_id)
                    return
                except NoSuchLedger:
                    return
                except QuorumLogError as error:
                    log.warning("recovery-failed", extra={"ledger": ledger_id, "why": error.detail})
                except Exception:
                    # A defect: an open ledger without a writer must end all the same.
                    log.exception("recovery-broke", extra={"ledger": ledger_id})
                await asyncio.sleep(pause_s)
        finally:
            self._in_background.discard(ledger_id)

    async def _recover(self, ledger_id: int, declare_lost: tuple[str, ...]) -> LedgerMetadata:
        row = await self._rows.fresh(ledger_id)
        if not is_closed(row):
            row = await self._closed(row, declare_lost)
        await spread(row, self._ports)  # rule 18b; an earlier recovery may have ended before
        return row

    async def _closed(self, row: LedgerMetadata, declare_lost: tuple[str, ...]) -> LedgerMetadata:
        ledger_id = row.ledger_id
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
            return await self._rows.fresh_closed(ledger_id)
        log.info("recovered", extra={"ledger": ledger_id, "last_entry": closed.last_entry})
        self._rows.put(closed)
        return closed
