"""Background work for logs: rolls by time, retention, logs of lost owners, and orphans.

Every gateway sweeps all logs. The owner rolls by time and applies the retention. If the owner is
gone, the log is sealed, so that its records are readable (docs/guides/logs.md); the retention
applies to sealed logs too. A separate task deletes orphans, because there may be thousands, and
logs must not wait for them. Concurrent sweeps do no harm, because the compare-and-swap decides. The
owner of the committed offsets measures consumer lag from the metadata that its sweep reads.
"""

import asyncio
import logging
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from quorumlog.protocol.metadata import Writer
from services.gateway.logs.manager import LogManager
from services.gateway.logs.store import MetadataLogs

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAGE: Final = 1000


class Sweep:
    """The background work on logs at one gateway."""

    def __init__(self, logs: LogManager, store: MetadataLogs) -> None:
        """`run` sweeps the logs, and `run_orphans` deletes ledgers that no log names."""
        self._logs, self._store, self._times = logs, store, logs.times

    async def run(self) -> None:
        """Sweep the logs for ever. The next round retries failures."""
        while True:
            await self._pause(self._times.sweep_every_s)
            await self._round(self.sweep_logs())

    async def run_orphans(self) -> None:
        """Delete ledgers that no log names, some in each round, for ever."""
        has_more: bool | None = False
        while True:
            await self._pause(
                self._times.sweep_every_s if has_more else self._times.orphans_every_s
            )
            older_than_s = self._times.orphan_age_s
            has_more = await self._round(self._logs.orphans.delete_some(older_than_s=older_than_s))

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))  # noqa: S311

    async def _round(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run one round. Returns its result, or None if the round failed and is retried later."""
        try:
            return await work
        except QuorumLogError as error:
            log.warning("log-sweep-failed", extra={"error": repr(error)})
        except Exception:
            # A defect in one round must not end the later rounds.
            log.exception("log-sweep-broke")
        return None

    async def sweep_logs(self) -> None:
        """Sweep every log once."""
        after: str | None = None
        alive: dict[str, bool] = {}
        accesses = self._logs.accesses
        unnamed, named = accesses.terms(), set[str | None]()
        self._logs.lags.begin()
        positions = self._logs.positions
        deleted = positions.take_deleted()
        while True:
            rows, after = await self._store.list(after=after, limit=_PAGE)
            self._logs.lags.see(rows)
            for row in rows:
                # A new log has the name, so the old log's consumers stay, and get `log-replaced`.
                deleted.pop(row.name, None)
                if row.expiry is not None:
                    named.add(row.expiry.term)
                try:
                    await self._sweep_log(row, alive)
                except QuorumLogError as error:
                    log.warning("log-not-swept", extra={"log": row.name, "error": repr(error)})
            if after is None:
                accesses.forget(unnamed - named)
                self._logs.lags.end()
                await positions.free(deleted)
                await positions.expire()
                return

    async def _is_alive(self, writer: Writer, alive: dict[str, bool]) -> bool:
        """Whether another process is alive. Each process is asked once per sweep."""
        if writer.id not in alive:
            alive[writer.id] = await self._logs.ownership.is_other_alive(writer)
        return alive[writer.id]

    async def _sweep_log(self, row: LogMetadata, alive: dict[str, bool]) -> None:
        if not await self._logs.accesses.sweep(row, partial(self._is_alive, alive=alive)):
            return
        ownership = self._logs.ownership
        is_owned = ownership.tick(row)
        last = row.last_item
        if not is_owned and row.state is LogState.OPEN and last and last.last_offset is None:
            writer = await ownership.writer_of(last.ledger_id)
            if writer is None or not await self._is_alive(writer, alive):
                await ownership.handle(row.name).heal(last.ledger_id)
        # Ages count by the database's clock, which dated the seals, because a deletion is final.
        now_ms = (self._store.database_ms() or 0) if self._logs.deletes_by_age else 0
        begin = partial(retained_from, now_ms=now_ms)
        if begin(row) > row.first_offset and (is_owned or not row.unsealed):
            await self._logs.retain(row.name, begin)


def retained_from(row: LogMetadata, *, now_ms: int) -> int:
    """The offset below which the settings release records: whole sealed ledgers, oldest first, that
    are too old or exceed the log's bytes. An archived log releases archived records only.
    """
    sealed = [item for item in row.items[:-1] if item.last_offset is not None]
    kept_bytes = sum(item.bytes for item in row.items)
    before = row.first_offset
    for item in sealed:
        end = (item.last_offset or 0) + 1
        is_archived = row.archived_through is None or end <= row.archived_through
        if not is_archived or not _is_over(item, kept_bytes, row, now_ms):
            break
        kept_bytes -= item.bytes
        before = end
    return before


def _is_over(item: LogItem, kept_bytes: int, row: LogMetadata, now_ms: int) -> bool:
    age_s, size = row.settings.retention_seconds, row.settings.retention_bytes
    is_old = 0 < age_s <= (now_ms - item.sealed_ms) / 1000
    return is_old or (size > 0 and kept_bytes - item.bytes >= size)
