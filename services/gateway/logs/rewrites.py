"""Rewrites the ledgers of logs at one gateway: merges small sealed ledgers (rule 27c), compacts
logs by key (rule 27d), and indexes the keys of large ledgers (rule 27e).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final
from zlib import crc32

from quorumlog.errors import NoSuchLedger, QuorumLogError, WriterLost
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log import LogItem, LogMetadata, messages
from quorumlog.protocol.log.compaction import Compaction, PassState, next_pass
from quorumlog.protocol.log.indexing import Indexing, next_index
from quorumlog.protocol.log.merge import next_merge
from quorumlog.protocol.log.rewrite import Rewrite, unfit
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
from services.gateway.logs.handle import LOGS_COUNTED_MAX
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.scans import cost_of
from services.gateway.logs.store import LogRows, Orphans

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 16 << 20
"""Maximum bytes per second that a gateway's rewrites write and its indexing reads: a small part of
a disk's bandwidth (chosen by judgement)."""

READ_BYTES_PER_S: Final = 64 << 20
"""Maximum bytes per second that a compaction reads to collect keys or to find records to remove.
At this rate a compaction uses about a quarter of a core (chosen by judgement)."""

_READ_BYTES: Final = 256 << 10
"""Maximum bytes of one read of a ledger."""

_STEP_COST: Final = 256 << 10
"""Maximum decoding cost of one step (see `steps`), during which other requests wait: 20 ms for
records without values (measured). A batch of 10,000 such records takes up to 100 ms."""

_SPOILED_MAX: Final = 1000
"""Maximum number of logs in `_spoiled`, which is cleared when full."""


class Rewrites:
    """Rewrites and indexes ledgers of logs in the background, and counts this work."""

    def __init__(
        self, ownership: Ownership, orphans: Orphans, rows: LogRows, now_ms: Callable[[], int]
    ) -> None:
        """`now_ms` returns the database's time, or 0 if the time is in doubt."""
        self.ownership, self.orphans, self.rows = ownership, orphans, rows
        self.now_ms = now_ms
        self.done = 0
        """Rewrites whose new ledger replaced old ledgers."""
        self.bytes = 0
        """Bytes of the new ledgers that rewrites wrote."""
        self.removed_bytes = 0
        """Bytes that rewrites saved: old ledgers' bytes minus new ledgers' bytes."""
        self.indexed = 0
        """Ledgers whose keys this gateway has indexed."""
        self.failed = 0
        """Rewrites, indexing runs and key reads that failed. The next sweep retries most of them."""
        self.dirty_shares: dict[str, float] = {}
        """The `dirty_share` of the first LOGS_COUNTED_MAX compacted logs that this process owns."""
        self._wanted: dict[str, None] = {}
        """Names of logs with ledgers to rewrite or to index, in the order of processing."""
        self._spoiled: dict[str, set[int]] = {}
        """The ledgers of each log that can never be rewritten."""
        self._pass: PassState | None = None
        """The compaction in progress. Only one compaction runs, because its keys take memory."""
        self._merging: asyncio.Task[None] | None = None

    def want(self, row: LogMetadata) -> None:
        """Start to merge, compact or index a log's ledgers in the background, if work is due. Does
        nothing if the log has an open ledger and another process owns the log.
        """
        self._note_dirty(row)
        if self._next(row) is None:
            return
        self._wanted[row.name] = None
        if self._merging is None or self._merging.done():
            self._merging = self.ownership.task(self._merge())

    def _note_dirty(self, row: LogMetadata) -> None:
        """Note the share of a log's bytes that no pass has compacted yet."""
        owner, shares = self.ownership.owner(row.name), self.dirty_shares
        is_mine = row.settings.compacts and owner is not None and owner.is_mine(row)
        if is_mine and row.name not in shares and len(shares) >= LOGS_COUNTED_MAX:
            for gone in shares.keys() - {*self.ownership.owned}:  # deleted logs, for example
                del shares[gone]
        if not is_mine:
            shares.pop(row.name, None)
        elif row.name in shares or len(shares) < LOGS_COUNTED_MAX:
            due = next_pass(row, self.now_ms())
            shares[row.name] = 0.0 if due is None else due.dirty_share

    def _next(self, row: LogMetadata) -> Rewrite | PassState | Indexing | None:
        """Return the next work on a log, if this process may do it. Merges of ledgers beyond a
        compaction pass come first. While the database's clock is in doubt, nothing is compacted.
        """
        owner = self.ownership.owner(row.name)
        if row.unsealed and (owner is None or not owner.is_mine(row)):
            return None
        spoiled, now_ms, state = self._spoiled.get(row.name, ()), self.now_ms(), self._pass
        mine = state if now_ms and state is not None and state.name == row.name else None
        items = next_merge(row, spoiled)
        if items and (mine is None or (items[0].first_offset or 0) >= mine.end):
            return Rewrite(row, items, Compaction(now_ms=now_ms))
        if mine is not None:
            return mine
        due = next_pass(row, now_ms, spoiled) if now_ms and state is None else None
        if due is not None and due.is_due:
            return PassState(due)
        item = None if row.name in OWN_LOGS else next_index(row, spoiled)
        return None if item is None else Indexing(row, item)

    async def _merge(self) -> None:
        """Work on the wanted logs in turn, one ledger or one rewrite at a time, until no work
        remains. The next sweep retries failures.
        """
        while self._wanted:
            name = next(iter(self._wanted))
            del self._wanted[name]
            try:
                row = await self.rows.row(name)
                await self._do(row, self._next(row) if await self._is_chosen(row) else None)
            except QuorumLogError as error:
                self._leave(name)
                self.failed += 1
                log.warning("ledgers-not-rewritten", extra={"log": name, "error": repr(error)})
        self._pass = None

    def _leave(self, name: str) -> None:
        """End the compaction pass over a log, if one is in progress."""
        if self._pass is not None and self._pass.name == name:
            self._pass = None

    async def _do(self, row: LogMetadata, work: Rewrite | PassState | Indexing | None) -> None:
        """Do one piece of work on a log, and queue the log again if more work may remain."""
        if isinstance(work, PassState):
            self._pass = work
            done = await self.step(work, row)
            if not work.is_over:
                self._wanted[row.name] = None
                return
            self._leave(row.name)
            if done is not None:
                self._ended(row, done)
            return
        if not isinstance(work, Rewrite):
            self._leave(row.name)
        if work is not None:
            self._ended(row, await self._run(row, work))
        if self._pass is not None and self._pass.name == row.name:
            self._wanted[row.name] = None

    async def _is_chosen(self, row: LogMetadata) -> bool:
        """Whether this process rewrites a log's ledgers. If no ledger of the log is open, a hash of
        the log's name chooses one live gateway, so that no two gateways do the same work.
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
            self.failed += 1
            log.warning("ledgers-not-rewritten", extra={"log": row.name, "error": repr(done.log)})
        self._note_spoiled(row, done.spoiled)

    def _note_spoiled(self, row: LogMetadata, ledger_id: int | None) -> None:
        """Note a ledger that can never be rewritten."""
        if ledger_id is None:
            return
        if len(self._spoiled) >= _SPOILED_MAX:
            self._spoiled.clear()
        named = {item.ledger_id for item in row.items}
        self._spoiled[row.name] = self._spoiled.get(row.name, set()) & named | {ledger_id}

    async def step(self, state: PassState, row: LogMetadata) -> messages.RewriteDone | None:
        """Take one step of a pass over the log `row`: read the keys of a dirty ledger, or rewrite
        some ledgers. Returns the result of the rewrite, or None.

        Raises: the errors of the engine.
        """
        if state.to_learn is not None:
            await self._learn(state, row, state.to_learn)
            return None
        found = state.group(row)
        if found is None:
            return None
        done = await self.rewrite(row, *found)
        state.rewritten(done.log if isinstance(done.log, LogMetadata) else None)
        self._note_spoiled(row, done.spoiled)
        return done

    async def _learn(self, state: PassState, row: LogMetadata, item: LogItem) -> None:
        """Add the keys of a dirty ledger to the pass. If the ledger can't be read, the pass covers
        only the earlier ledgers (rule 27d, clause 5).
        """
        error: Exception | None = None
        try:
            await self._read_keys(state, item)
        except (batch.BadBatch, NoSuchLedger) as found:
            self._note_spoiled(row, item.ledger_id)
            error = found
        except QuorumLogError as found:
            error = found
        if error is not None:
            self.failed += 1
            log.warning("ledger-not-compacted", extra={"log": row.name, "error": repr(error)})
        state.learned(is_readable=error is None)

    async def _read_keys(self, state: PassState, item: LogItem) -> None:
        """Read a ledger's keys at READ_BYTES_PER_S, until the pass accepts no more keys. Raises:
        BadBatch if the ledger is incomplete, and the errors of the engine.
        """
        engine = self.ownership.ports.engine
        ledger, entry_id = await engine.get(item.ledger_id), 0
        if why := unfit(ledger):
            raise batch.BadBatch(why)
        while entry_id <= (ledger.last_entry or 0):
            asked = messages.ReadBatches(item.ledger_id, entry_id, ledger.last_entry or 0)
            read = await read_batches(engine, asked, _READ_BYTES)
            if read.is_lost:
                raise batch.BadBatch(f"entries of ledger {item.ledger_id} are lost")
            for entries in steps(read.entries):
                for _, data in entries:
                    columns = batch.opened(packed.unpack(data))
                    first = (item.first_offset or 0) + columns.head.records_before
                    if not state.learn(first, columns):
                        return
                await asyncio.sleep(sum(cost_of(data) for _, data in entries) / READ_BYTES_PER_S)
            entry_id = read.next

    async def rewrite(
        self, row: LogMetadata, items: Sequence[LogItem], compaction: Compaction | None = None
    ) -> messages.RewriteDone:
        """Replace adjacent sealed ledgers of the log `row` by one ledger. Without a compaction, the
        rewrite leaves out only expired records.
        """
        compaction = compaction or Compaction(now_ms=self.now_ms())
        return await self._run(row, Rewrite(row, items, compaction))

    async def index(self, row: LogMetadata, item: LogItem) -> messages.RewriteDone:
        """Index the keys of a sealed ledger that was created for the log `row`."""
        return await self._run(row, Indexing(row, item))

    async def _run(self, row: LogMetadata, machine: Rewrite | Indexing) -> messages.RewriteDone:
        done = await _RewriteDriver(self, machine, row.name).run()
        if not isinstance(done.log, LogMetadata):
            return done
        if isinstance(machine, Indexing):
            self.indexed += 1
        elif done.size:  # otherwise no record was removed, and no ledger was written
            self.done += 1
            self.bytes += done.size
            self.removed_bytes += max(machine.size_before - done.size, 0)
        what = "ledger-indexed" if isinstance(machine, Indexing) else "ledgers-rewritten"
        log.info(what, extra={"log": row.name, "bytes": done.size})
        return done


def steps(entries: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Split entries into parts that are decoded at once, at a cost of about _STEP_COST each. A
    compressed batch may unpack to a thousand times its size.
    """
    part, cost = list[tuple[int, bytes]](), 0
    for entry_id, data in entries:
        more = cost_of(data)
        if part and cost + more > _STEP_COST:
            yield part
            part, cost = [], 0
        part.append((entry_id, data))
        cost += more
    if part:
        yield part


class _RewriteDriver(LogDriver):
    """The driver of one rewrite or one indexing."""

    def __init__(self, rewrites: Rewrites, machine: Rewrite | Indexing, name: str) -> None:
        self._rewrites, self._is_index = rewrites, isinstance(machine, Indexing)
        self._ahead = deque[list[tuple[int, bytes]]]()
        """Entries that were read but not decoded yet, in parts made by `steps`."""
        self._place = -1, -1
        """The ledger id and the first entry id of `_ahead`."""
        self._creates = False
        """Whether the creation of the new ledger was requested."""
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
        """Pass the machine's result or error to `run`."""
        if self._done.done():
            return
        if isinstance(outcome, messages.RewriteDone):
            self._done.set_result(outcome)
        elif isinstance(outcome, Broke):
            self._done.set_exception(outcome.error)

    async def _ask(self, question: messages.Question) -> Any:
        match question:
            case messages.CreateLedger(row):
                self._creates = True
                options = options_of(row)
                tag = INDEX_TAG if self._is_index else REWRITE_TAG
                tags = (*options.tags, (tag, "true"))
                # A degraded ledger must not replace ledgers that have all their copies (rule 29).
                return await self._ports.engine.create(
                    replace(options, tags=tags, allow_degraded=False)
                )
            case messages.ReadBatches():
                return await self._read(question)
            case messages.WriteBatches():
                return await self._write(question)
            case messages.SwapLog(row):
                return await self._swap(row)
            case messages.ReleaseLedgers(ledger_ids):
                return await self._rewrites.orphans.drop(ledger_ids)
            case _:
                return await super()._ask(question)

    async def _read(self, asked: messages.ReadBatches) -> messages.BatchesRead:
        """Read the entries that the machine's next step decodes. Reads are rate-limited until the
        new ledger is created. After that, writes are rate-limited instead.
        """
        if self._place != (asked.ledger_id, asked.first):
            self._ahead.clear()
        if not self._ahead:
            read = await read_batches(self._ports.engine, asked, _READ_BYTES)
            if read.is_lost:
                return read
            self._ahead.extend(steps(read.entries))
        entries = tuple(self._ahead.popleft())
        self._place = asked.ledger_id, entries[-1][0] + 1
        if not self._creates:
            pace = BYTES_PER_S if self._is_index else READ_BYTES_PER_S
            await asyncio.sleep(sum(cost_of(data) for _, data in entries) / pace)
        return messages.BatchesRead(entries, entries[-1][0] + 1)

    async def _write(self, asked: messages.WriteBatches) -> None:
        """Append entries at BYTES_PER_S. Raises: the errors of appends."""
        handle, first = self._ports.engine.handles.get(asked.ledger_id), asked.first
        for payloads in cut(asked.payloads, SUBMIT_BYTES):
            done = await handle.append(payloads, first)
            if done.first != first:
                raise WriterLost(f"the new ledger stored entry {first} as entry {done.first}")
            first += len(payloads)
            await asyncio.sleep(sum(map(len, payloads)) / BYTES_PER_S)

    async def _swap(self, row: LogMetadata) -> LogMetadata | messages.RowChanged:
        """Change the log's metadata. Unlike after a roll, the last ledger's writer gets no first
        offset and lineage, because copies of one version must not differ (rule 18f).
        """
        rewrites = self._rewrites
        try:
            new = await self._ports.store.cas(row)
        finally:
            rewrites.rows.changed(row.name)
        if isinstance(new, LogMetadata):
            rewrites.ownership.notify(row.name, messages.RowTaken(new))
        return new
