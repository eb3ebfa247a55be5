"""Rewrites of logs at one gateway: merges small sealed ledgers into larger ones (rule 27c)."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from quorumlog.errors import WriterLost
from quorumlog.protocol.log import LogItem, LogMetadata, messages
from quorumlog.protocol.log.rewrite import Rewrite
from quorumlog.wire.log_bodies import REWRITE_TAG
from services.gateway.logs.driver import SUBMIT_BYTES, Broke, LogDriver, LogOutcome, cut, options_of
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import LogRows, Orphans

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 16 << 20
"""Bytes that a gateway's rewrites write per second: chosen by judgement, so that they take a small
part of a disk's bandwidth."""


class Rewrites:
    """Rewrites ledgers of logs, and counts."""

    def __init__(self, ownership: Ownership, orphans: Orphans, rows: LogRows) -> None:
        """Starts without a rewrite."""
        self.ownership, self.orphans, self.rows = ownership, orphans, rows
        self.done = 0
        """Rewrites that took the place of ledgers."""
        self.bytes = 0
        """Bytes of the ledgers that they wrote."""

    async def rewrite(self, row: LogMetadata, items: Sequence[LogItem]) -> messages.RewriteDone:
        """Replace adjacent sealed ledgers of a log, as `row` names them, by one ledger."""
        driver = _RewriteDriver(self, Rewrite(row, items), row.name)
        done = await driver.run()
        if isinstance(done.log, LogMetadata):
            self.done += 1
            self.bytes += done.size
            log.info("ledgers-rewritten", extra={"log": row.name, "ledgers": len(items)})
        return done


class _RewriteDriver(LogDriver):
    """The driver of a rewrite."""

    def __init__(self, rewrites: Rewrites, machine: Rewrite, name: str) -> None:
        self._rewrites = rewrites
        self._done: asyncio.Future[messages.RewriteDone] = (
            asyncio.get_running_loop().create_future()
        )
        super().__init__(machine, name, rewrites.ownership.ports, self._reported)

    async def run(self) -> messages.RewriteDone:
        """Run the machine to its end. If the caller is cancelled, the machine stops."""
        self.post(messages.BeginRewrite())
        try:
            return await self._done
        finally:
            self.post(messages.Stopped())

    def _reported(self, outcome: LogOutcome) -> None:
        """Note the end."""
        if self._done.done():
            return
        if isinstance(outcome, messages.RewriteDone):
            self._done.set_result(outcome)
        elif isinstance(outcome, Broke):
            self._done.set_exception(outcome.error)

    async def _ask(self, question: messages.Question) -> Any:
        match question:
            case messages.CreateLedger(row):
                options = options_of(row)
                options = replace(options, tags=(*options.tags, (REWRITE_TAG, "true")))
                return await self._ports.engine.create(options)
            case messages.WriteBatches():
                return await self._write(question)
            case messages.SwapLog(row):
                return await self._swap(row)
            case messages.ReleaseLedgers(ledger_ids):
                return await self._rewrites.orphans.drop(ledger_ids)
            case _:
                return await super()._ask(question)

    async def _write(self, asked: messages.WriteBatches) -> None:
        """Append entries, at the pace of rewrites. Raises: the errors of appends."""
        handle, first = self._ports.engine.handles.get(asked.ledger_id), asked.first
        for payloads in cut(asked.payloads, SUBMIT_BYTES):
            done = await handle.append(payloads, first)
            if done.first != first:
                raise WriterLost("an entry got another id than the one it was meant for")
            first += len(payloads)
            await asyncio.sleep(sum(map(len, payloads)) / BYTES_PER_S)

    async def _swap(self, row: LogMetadata) -> LogMetadata | messages.RowChanged:
        """Change the metadata. The last ledger's writer keeps the place that it has: copies of one
        version must not differ (rule 18f).
        """
        rewrites = self._rewrites
        try:
            new = await self._ports.store.cas(row)
        finally:
            rewrites.rows.changed(row.name)
        if isinstance(new, LogMetadata):
            rewrites.ownership.notify(row.name, messages.RowTaken(new))
        return new
