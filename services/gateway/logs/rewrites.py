"""Rewrites of logs at one gateway: merges small sealed ledgers into larger ones (rule 27c), and
compacts logs by key (rule 27d), and indexes the keys of ledgers that stay (rule 27e).
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
from services.gateway.logs.offsets import damaged
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.store import LogRows, Orphans

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 16 << 20
"""Bytes that a gateway's rewrites write per second: chosen by judgement, so that they take a small
part of a disk's bandwidth. So many bytes per second are read for indexes, too."""

_READ_BYTES: Final = 256 << 10
"""Bytes that are decoded at once: more would delay other requests."""

_SPOILED_MAX: Final = 1000
"""Logs of which ledgers that can't be rewritten are remembered."""


class Rewrites:
    """Rewrites ledgers of logs, and counts the rewrites."""

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
        self.indexed = 0
        """Ledgers whose keys were indexed."""
        self._wanted: dict[str, None] = {}
        """Names of logs with ledgers to rewrite or to index, in the order of their turns."""
        self._spoiled: dict[str, set[int]] = {}
        """Ledgers for which no rewrite can succeed, by log."""
        self._merging: asyncio.Task[None] | None = None

    def want(self, row: LogMetadata) -> None:
        """Merge, compact or index ledgers of a log in the background, if that is due. This process
        must be the log's owner, unless no ledger of the log is open.
        """
        if self._next(row) is None:
            return
        self._wanted[row.name] = None
        if self._merging is None or self._merging.done():
            self._merging = self.ownership.task(self._merge())

    def _next(self, row: LogMetadata) -> Rewrite | Pass | Indexing | None:
        """The work on a log that is due, if this process may do it. While the database's clock is
        in doubt, nothing is compacted.
        """
        owner = self.ownership.owner(row.name)
        if row.unsealed and (owner is None or not owner.is_mine(row)):
            return None
        spoiled, now_ms = self._spoiled.get(row.name, ()), self.now_ms()
        if items := next_merge(row, spoiled):
            return Rewrite(row, items, Compaction(now_ms=now_ms))
        due = next_pass(row, now_ms, spoiled) if now_ms else None
        if due is not None and due.is_due:
            return due
        item = None if row.name in OWN_LOGS else next_index(row, spoiled)
        return None if item is None else Indexing(row, item)

    async def _merge(self) -> None:
        """Do the work on the wanted logs in turn, until there is none. The next sweep retries
        failures.
        """
        while self._wanted:
            name = next(iter(self._wanted))
            del self._wanted[name]
            try:
                row = await self.rows.row(name)
                work = self._next(row)
                if work is None or not await self._is_chosen(row):
                    continue
                if isinstance(work, Pass):
                    done = await self.compact(work)
                else:
                    done = await self._run(row, work)
                if done is not None:
                    self._ended(row, done)
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
                read = await read_batches(engine, asked, _READ_BYTES)
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
                await asyncio.sleep(0)
        return due.dirty

    async def rewrite(
        self, row: LogMetadata, items: Sequence[LogItem], compaction: Compaction | None = None
    ) -> messages.RewriteDone:
        """Replace adjacent sealed ledgers of a log, as `row` names them, by one ledger. Without a
        compaction, only expired records are left out.
        """
        compaction = compaction or Compaction(now_ms=self.now_ms())
        return await self._run(row, Rewrite(row, items, compaction))

    async def index(self, row: LogMetadata, item: LogItem) -> messages.RewriteDone:
        """Index the keys of one of the log's own sealed ledgers, as `row` names it."""
        return await self._run(row, Indexing(row, item))

    async def _run(self, row: LogMetadata, machine: Rewrite | Indexing) -> messages.RewriteDone:
        done = await _RewriteDriver(self, machine, row.name).run()
        if not isinstance(done.log, LogMetadata):
            return done
        if isinstance(machine, Indexing):
            self.indexed += 1
        else:
            self.done += 1
            self.bytes += done.size
            self.removed_bytes += max(machine.size_before - done.size, 0)
        what = "ledger-indexed" if isinstance(machine, Indexing) else "ledgers-rewritten"
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
            case messages.ReadBatches():
                read = await read_batches(self._ports.engine, question, _READ_BYTES)
                if self._is_index:
                    await asyncio.sleep(sum(len(data) for _, data in read.entries) / BYTES_PER_S)
                return read
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
