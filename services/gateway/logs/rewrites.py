"""Rewrites of logs at one gateway: merges small sealed ledgers into larger ones (rule 27c), and
indexes the keys of those that stay (rule 27e).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from zlib import crc32

from quorumlog.errors import QuorumLogError, WriterLost
from quorumlog.protocol.batch import plain_size
from quorumlog.protocol.log import LogItem, LogMetadata, messages
from quorumlog.protocol.log.indexing import Indexing, next_index
from quorumlog.protocol.log.merge import next_merge
from quorumlog.protocol.log.rewrite import Rewrite
from quorumlog.wire.log_bodies import INDEX_TAG, REWRITE_TAG
from quorumlog.wire.position_bodies import OWN_LOGS
from services.gateway.logs.driver import (
    SUBMIT_BYTES,
    Broke,
    LogDriver,
    LogOutcome,
    cut,
    options_of,
    read_batches,
)
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import LogRows, Orphans

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 16 << 20
"""Bytes that a gateway's rewrites write per second: chosen by judgement, so that they take a small
part of a disk's bandwidth. So many bytes per second are read for indexes, too."""

_INDEXED_AT_ONCE: Final = 256 << 10
"""Bytes, uncompressed, that are decoded at once for an index: more would delay other requests."""

_SPOILED_MAX: Final = 1000
"""Logs of which ledgers that can't be rewritten are remembered."""


class Rewrites:
    """Rewrites ledgers of logs, and counts the rewrites."""

    def __init__(self, ownership: Ownership, orphans: Orphans, rows: LogRows) -> None:
        """Starts without a rewrite."""
        self.ownership, self.orphans, self.rows = ownership, orphans, rows
        self.done = 0
        """Rewrites that took the place of ledgers."""
        self.bytes = 0
        """Bytes of the ledgers that they wrote."""
        self.indexed = 0
        """Ledgers whose keys were indexed."""
        self._wanted: dict[str, None] = {}
        """Names of logs with ledgers to merge or to index, in the order of their turns."""
        self._spoiled: dict[str, set[int]] = {}
        """Ledgers for which no rewrite can succeed, by log."""
        self._merging: asyncio.Task[None] | None = None

    def want(self, row: LogMetadata) -> None:
        """Merge and index ledgers of a log in the background, if that is due. This process must be
        the log's owner, unless no ledger of the log is open.
        """
        if self._next(row) is None:
            return
        self._wanted[row.name] = None
        if self._merging is None or self._merging.done():
            self._merging = self.ownership.task(self._merge())

    def _next(self, row: LogMetadata) -> Rewrite | Indexing | None:
        """The work on a log that is due, if this process may do it."""
        owner = self.ownership.owner(row.name)
        if row.unsealed and (owner is None or not owner.is_mine(row)):
            return None
        spoiled = self._spoiled.get(row.name, ())
        if items := next_merge(row, spoiled):
            return Rewrite(row, items)
        item = None if row.name in OWN_LOGS else next_index(row, spoiled)
        return None if item is None else Indexing(row, item)

    async def _merge(self) -> None:
        """Merge and index ledgers of the wanted logs in turn, until there are none. The next sweep
        retries failures.
        """
        while self._wanted:
            name = next(iter(self._wanted))
            del self._wanted[name]
            try:
                row = await self.rows.row(name)
                machine = self._next(row)
                if machine is not None and await self._is_chosen(row):
                    self._ended(row, await self._run(row, machine))
            except QuorumLogError as error:
                log.warning("ledgers-not-rewritten", extra={"log": name, "error": repr(error)})

    async def _is_chosen(self, row: LogMetadata) -> bool:
        """Whether this process merges the ledgers of a log. If no ledger of the log is open, one
        gateway that is known to live merges them: of several, all but one would work in vain.
        """
        if row.unsealed:
            return True
        engine = self.ownership.ports.engine
        ids = [gateway.id for gateway in await engine.gateways()] or [engine.writer.id]
        return engine.writer.id == max(ids, key=lambda one: crc32(f"{row.name} {one}".encode()))

    def _ended(self, row: LogMetadata, done: messages.RewriteDone) -> None:
        if isinstance(done.log, LogMetadata):
            self.want(done.log)
        elif isinstance(done.log, QuorumLogError):
            log.warning("ledgers-not-rewritten", extra={"log": row.name, "error": repr(done.log)})
        if done.spoiled is not None:
            if len(self._spoiled) >= _SPOILED_MAX:
                self._spoiled.clear()
            named = {item.ledger_id for item in row.items}
            self._spoiled[row.name] = self._spoiled.get(row.name, set()) & named | {done.spoiled}

    async def rewrite(self, row: LogMetadata, items: Sequence[LogItem]) -> messages.RewriteDone:
        """Replace adjacent sealed ledgers of a log, as `row` names them, by one ledger."""
        return await self._run(row, Rewrite(row, items))

    async def index(self, row: LogMetadata, item: LogItem) -> messages.RewriteDone:
        """Index the keys of one of the log's own sealed ledgers, as `row` names it."""
        return await self._run(row, Indexing(row, item))

    async def _run(self, row: LogMetadata, machine: Rewrite | Indexing) -> messages.RewriteDone:
        done = await _RewriteDriver(self, machine, row.name).run()
        is_done, is_index = isinstance(done.log, LogMetadata), isinstance(machine, Indexing)
        if is_done:
            self.indexed += is_index
            self.done += not is_index
            self.bytes += 0 if is_index else done.size
            what = "ledger-indexed" if is_index else "ledgers-rewritten"
            log.info(what, extra={"log": row.name, "bytes": done.size})
        return done


class _RewriteDriver(LogDriver):
    """The driver of a rewrite or an indexing."""

    def __init__(self, rewrites: Rewrites, machine: Rewrite | Indexing, name: str) -> None:
        self._rewrites, self._is_index = rewrites, isinstance(machine, Indexing)
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
                tag = INDEX_TAG if self._is_index else REWRITE_TAG
                tags = (*options.tags, (tag, "true"))
                # The old ledgers, which have all their copies, are deleted (rule 29).
                return await self._ports.engine.create(
                    replace(options, tags=tags, allow_degraded=False)
                )
            case messages.ReadBatches() if self._is_index:
                read = await read_batches(self._ports.engine, question, _INDEXED_AT_ONCE)
                return await self._paced(read)
            case messages.WriteBatches():
                return await self._write(question)
            case messages.SwapLog(row):
                return await self._swap(row)
            case messages.ReleaseLedgers(ledger_ids):
                return await self._rewrites.orphans.drop(ledger_ids)
            case _:
                return await super()._ask(question)

    async def _paced(self, read: messages.BatchesRead) -> messages.BatchesRead:
        """As many of these batches as a step may decode, at the pace of rewrites."""
        size = count = 0
        for _, data in read.entries:
            size, count = size + plain_size(data), count + 1
            if size >= _INDEXED_AT_ONCE:
                break
        await asyncio.sleep(size / BYTES_PER_S)
        if count == len(read.entries):
            return read
        return replace(read, entries=read.entries[:count], next=read.entries[count][0])

    async def _write(self, asked: messages.WriteBatches) -> None:
        """Append entries, at the pace of rewrites. Raises: the errors of appends."""
        handle, first = self._ports.engine.handles.get(asked.ledger_id), asked.first
        for payloads in cut(asked.payloads, SUBMIT_BYTES):
            done = await handle.append(payloads, first)
            if done.first != first:
                raise WriterLost("an entry did not get the expected id")
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
