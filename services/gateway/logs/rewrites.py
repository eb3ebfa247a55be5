"""Rewrites of logs at one gateway: merges small sealed ledgers into larger ones (rule 27c), and
compacts logs by key (rule 27d).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from zlib import crc32

from quorumlog.errors import EntryUnavailable, QuorumLogError, WriterLost
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log import LogItem, LogMetadata, messages
from quorumlog.protocol.log.compaction import Compaction, NewestOffsets, Pass, next_pass
from quorumlog.protocol.log.merge import next_merge
from quorumlog.protocol.log.rewrite import Rewrite
from quorumlog.wire.log_bodies import REWRITE_TAG
from services.gateway.engine import Engine
from services.gateway.logs.driver import (
    SUBMIT_BYTES,
    Broke,
    LogDriver,
    LogOutcome,
    cut,
    options_of,
    read_batches,
)
from services.gateway.logs.offsets import damaged
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import LogRows, Orphans

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 16 << 20
"""Bytes that a gateway's rewrites write per second: chosen by judgement, so that they take a small
part of a disk's bandwidth."""

READ_BYTES_PER_S: Final = 64 << 20
"""Bytes that a gateway's rewrites read per second: chosen by judgement, a quarter of a core."""

_READ_BYTES: Final = 512 << 10
"""Bytes that a compaction decodes at once: chosen by judgement. Records of 20 bytes keep the event
loop busy for about 20 ms."""

_SPOILED_MAX: Final = 1000
"""Logs of which ledgers that can't be rewritten are remembered."""


class Rewrites:
    """Rewrites ledgers of logs, and counts."""

    def __init__(
        self, ownership: Ownership, orphans: Orphans, rows: LogRows, now_ms: Callable[[], int]
    ) -> None:
        """Starts without a rewrite. `now_ms`: the database's time; 0 if it is in doubt."""
        self.ownership, self.orphans, self.rows = ownership, orphans, rows
        self.now_ms = now_ms
        self.done = 0
        """Rewrites that took the place of ledgers."""
        self.bytes = 0
        """Bytes of the ledgers that they wrote."""
        self.removed_bytes = 0
        """Bytes by which compacted ledgers were smaller than those that they replaced."""
        self._wanted: dict[str, None] = {}
        """Names of logs with ledgers to rewrite, in the order of their turns."""
        self._spoiled: dict[str, set[int]] = {}
        """Ledgers for which no rewrite can succeed, by log."""
        self._merging: asyncio.Task[None] | None = None

    def want(self, row: LogMetadata) -> None:
        """Merge or compact ledgers of a log in the background, if that is due. This process must be
        the log's owner, unless no ledger of the log is open.
        """
        if not self._next(row) and self._pass(row) is None:
            return
        self._wanted[row.name] = None
        if self._merging is None or self._merging.done():
            self._merging = self.ownership.task(self._merge())

    def _may_rewrite(self, row: LogMetadata) -> bool:
        owner = self.ownership.owner(row.name)
        return not row.unsealed or (owner is not None and owner.is_mine(row))

    def _next(self, row: LogMetadata) -> Sequence[LogItem]:
        spoiled = self._spoiled.get(row.name, ())
        return next_merge(row, spoiled) if self._may_rewrite(row) else ()

    def _pass(self, row: LogMetadata) -> Pass | None:
        """The compaction that is due, if any; none while the database's clock is in doubt."""
        now_ms = self.now_ms()
        if not now_ms or not self._may_rewrite(row):
            return None
        found = next_pass(row, now_ms, self._spoiled.get(row.name, ()))
        return found if found is not None and found.is_due else None

    async def _merge(self) -> None:
        """Rewrite ledgers of the wanted logs in turn, until there are none. The next sweep retries
        failures.
        """
        while self._wanted:
            name = next(iter(self._wanted))
            del self._wanted[name]
            try:
                row = await self.rows.row(name)
                items, due = self._next(row), self._pass(row)
                if not (items or due) or not await self._is_chosen(row):
                    continue
                if items:
                    done: messages.RewriteDone | None = await self.rewrite(row, items)
                else:
                    done = await self.compact(due) if due else None
                if done is not None:
                    self._ended(row, done)
            except QuorumLogError as error:
                log.warning("ledgers-not-rewritten", extra={"log": name, "error": repr(error)})

    async def _is_chosen(self, row: LogMetadata) -> bool:
        """Whether this process merges the ledgers of a log. Of a log without an open ledger, one of
        the gateways that are known to live does so: if several do, all but one work in vain.
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

    async def compact(self, due: Pass) -> messages.RewriteDone | None:
        """Rewrite the ledgers of a pass without the records that have a newer one of their key.
        Returns the last rewrite; None if the log changed meanwhile. The first failure ends the
        pass: a ledger is clean only if all earlier ones are.

        Raises: EntryUnavailable, and as the engine.
        """
        done, part, parts = None, 0, 1
        end = (due.dirty[-1].last_offset or 0) + 1
        while part < parts:
            newest = NewestOffsets(part, parts)
            read = await self._learn(due, newest)
            if newest.is_full and (part or not read):
                # The ledger that ended the pass has too many keys for one.
                part, parts = 0, 2 * parts
                continue
            if newest.is_full:
                end = (read[-1].last_offset or 0) + 1
                due = replace(due, dirty=read)
            part += 1
            made_ms = due.now_ms if part == parts else 0
            compaction = Compaction(newest.offsets, due.expired, made_ms, due.now_ms)
            for items in due.groups:
                row = due.row if done is None else done.log
                if not isinstance(row, LogMetadata) or not row.names_sealed(items):
                    return None
                done = await self.rewrite(row, items, compaction)
                if not isinstance(done.log, LogMetadata):
                    return done
            if part < parts and done is not None and isinstance(done.log, LogMetadata):
                again = next_pass(done.log, due.now_ms, end=end)
                if again is None:
                    return None
                due = again
        return done

    async def _learn(self, due: Pass, newest: NewestOffsets) -> tuple[LogItem, ...]:
        """Note the keys of a pass's dirty ledgers. Returns the first ledgers whose keys all fit."""
        engine = self.ownership.ports.engine
        for count, item in enumerate(due.dirty):
            last, entry_id = (await engine.get(item.ledger_id)).last_entry or 0, 0
            while entry_id <= last:
                asked = messages.ReadBatches(item.ledger_id, entry_id, last)
                read = await _read(engine, asked)
                if read.is_lost:
                    raise EntryUnavailable("entries are lost", ledger_id=item.ledger_id)
                for at, data in read.entries:
                    try:
                        columns = batch.opened(packed.unpack(data))
                    except batch.BadBatch as error:
                        raise damaged(error, item.ledger_id, at) from error
                    newest.learn((item.first_offset or 0) + columns.head.records_before, columns)
                entry_id = read.next
                if newest.is_full:
                    return due.dirty[:count]
        return due.dirty

    async def rewrite(
        self, row: LogMetadata, items: Sequence[LogItem], compaction: Compaction | None = None
    ) -> messages.RewriteDone:
        """Replace adjacent sealed ledgers of a log, as `row` names them, by one ledger. Without a
        compaction, only expired records are left out.
        """
        decides = compaction or Compaction(now_ms=self.now_ms())
        driver = _RewriteDriver(self, Rewrite(row, items, decides), row.name)
        done = await driver.run()
        if isinstance(done.log, LogMetadata):
            self.done += 1
            self.bytes += done.size
            self.removed_bytes += max(sum(item.bytes for item in items) - done.size, 0)
            log.info("ledgers-rewritten", extra={"log": row.name, "ledgers": len(items)})
        return done


async def _read(engine: Engine, asked: messages.ReadBatches) -> messages.BatchesRead:
    """Read entries at the pace of rewrites. Raises: as `read_batches`."""
    read = await read_batches(engine, asked, _READ_BYTES)
    await asyncio.sleep(sum(len(data) for _, data in read.entries) / READ_BYTES_PER_S)
    return read


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
                tags = (*options.tags, (REWRITE_TAG, "true"))
                # The old ledgers, which have all their copies, are deleted (rule 29).
                return await self._ports.engine.create(
                    replace(options, tags=tags, allow_degraded=False)
                )
            case messages.ReadBatches():
                return await _read(self._ports.engine, question)
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
