"""Background work for logs: rolls by time, retention, merges, logs of lost owners, and orphans.

Every gateway watches all logs. A sweep reads the metadata of logs that have changed, and of logs
with due work. Some sweeps read all logs. The owner rolls by time and applies the retention. If the
owner is gone, the log's last ledger is sealed, so that its records are readable
(docs/guides/logs.md); the retention applies to such logs too. A separate task deletes orphans,
because there may be thousands, and logs must not wait for them. Concurrent sweeps do no harm,
because only one compare-and-swap succeeds. The owner of the committed offsets measures consumer lag
from the metadata that its sweep reads.
"""

import asyncio
import logging
import math
import random
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from quorumlog.errors import NoSuchLog, QuorumLogError
from quorumlog.protocol.log import Expiry, LogItem, LogMetadata, LogState
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
        self._watched: dict[str, _Watch] = {}
        self._alive: dict[str, bool] = {}
        self._all_at_s = 0.0
        """The time of the next sweep that reads all logs, by the event loop's clock."""

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
        """Sweep the logs that have changed or are due; all logs if changes may have been missed."""
        heard = self._logs.rows.take_heard()
        freed = [(one, one.take_deleted()) for one in self._logs.services.values()]
        self._alive.clear()
        try:
            wanted = {
                *(name for _, gone in freed for name in gone),
                *(heard or ()),
                *self._logs.lags.begin(),
                *await self._due(),
            }
            is_late = asyncio.get_running_loop().time() >= self._all_at_s
            # A read of a single log costs about as much as a list of ten logs.
            if heard is None or is_late or 10 * len(wanted) > len(self._watched):
                await self._sweep_all()
            elif not wanted:
                await self._store.list(limit=1)  # for the database's time (rule 26c)
            else:
                for name in sorted(wanted):
                    await self._sweep_one(name)
        except Exception:
            self._logs.rows.gap()
            raise
        self._logs.lags.end()
        # If a new log has the name, the old log's consumers stay, and get `log-replaced`.
        for service, gone in freed:
            await service.free({name: at for name, at in gone.items() if name not in self._watched})
        await self._logs.positions.expire()
        await self._logs.queues.sweep(self._watched)

    async def _sweep_all(self) -> None:
        """Sweep every log, and forget the logs that no longer exist."""
        after: str | None = None
        unnamed, found = self._logs.accesses.terms(), set[str]()
        while True:
            rows, after = await self._store.list(after=after, limit=_PAGE)
            found.update(row.name for row in rows)
            for row in rows:
                await self._sweep_log(row)
            if after is None:
                break
        for name in self._watched.keys() - found:
            self._forget(name)
        named = {one.expiry.term for one in self._watched.values() if one.expiry is not None}
        self._logs.accesses.forget(unnamed - named)
        every_s = self._times.sweep_all_every_s
        self._all_at_s = asyncio.get_running_loop().time() + every_s * random.uniform(0.5, 1.0)  # noqa: S311

    async def _sweep_one(self, name: str) -> None:
        try:
            row = await self._store.get(name)
        except NoSuchLog:
            self._forget(name)
        else:
            await self._sweep_log(row)

    def _forget(self, name: str) -> None:
        self._watched.pop(name, None)
        self._logs.lags.see(name, None)

    async def _due(self) -> Sequence[str]:
        """Return the logs whose writer is gone, or whose oldest records are too old. Also deletes
        expired logs, replaces expiry keepers that are gone, and rolls logs by time.
        """
        ownership, now_ms, due = self._logs.ownership, self._now_ms(), []
        now = ownership.now()
        for count, (name, watch) in enumerate(list(self._watched.items())):
            if count % _PAGE == 0:
                await asyncio.sleep(0)  # let other tasks run
            is_here = watch.ledger_id is None or ownership.roll_if_due(name, now)
            try:
                if (
                    watch.release_ms <= now_ms
                    or not (is_here or await self._is_alive(watch.writer))
                    or not await self._is_used(name, watch)
                ):
                    due.append(name)
            except QuorumLogError as error:
                self._failed(name, error)
        return due

    def _now_ms(self) -> int:
        """The database's time, comparable with seal times; 0 if it must not decide deletions."""
        return (self._store.database_ms() or 0) if self._logs.deletes_by_age else 0

    async def _is_alive(self, writer: Writer | None) -> bool:
        """Whether another process is alive. Each process is checked once per sweep."""
        if writer is None:
            return False
        if writer.id not in self._alive:
            self._alive[writer.id] = await self._logs.ownership.is_other_alive(writer)
        return self._alive[writer.id]

    async def _is_used(self, name: str, watch: "_Watch") -> bool:
        sweep, expiry = self._logs.accesses.sweep, watch.expiry
        return expiry is None or await sweep(name, expiry, self._is_alive)

    async def _sweep_log(self, row: LogMetadata) -> None:
        """Do the due work for a log whose metadata was just read, and watch the log."""
        self._logs.lags.see(row.name, row)
        try:
            await self._work_on(row, self._watched.setdefault(row.name, _Watch()))
        except QuorumLogError as error:
            self._failed(row.name, error)

    def _failed(self, name: str, error: QuorumLogError) -> None:
        """Log an error, and sweep the log again in the next round."""
        log.warning("log-not-swept", extra={"log": name, "error": repr(error)})
        self._logs.rows.heard(name)

    async def _work_on(self, row: LogMetadata, watch: "_Watch") -> None:
        watch.expiry = None if row.deletion_protection else row.expiry
        if not await self._is_used(row.name, watch):
            return
        ownership = self._logs.ownership
        is_owned, last = ownership.tick(row), row.last_item
        is_open = row.state is LogState.OPEN and last is not None and last.last_offset is None
        ledger_id = last.ledger_id if is_open and last is not None else None
        if ledger_id is None:
            watch.writer = None
        elif is_owned:
            watch.writer = self._logs.me
        elif watch.ledger_id != ledger_id:
            watch.writer = await ownership.writer_of(ledger_id)
        watch.ledger_id = ledger_id
        if not is_owned and ledger_id is not None and not await self._is_alive(watch.writer):
            await ownership.handle(row.name).heal(ledger_id)
        watch.release_ms = _release_ms(row)
        begin = partial(retained_from, now_ms=self._now_ms())
        if begin(row) > row.first_offset and (is_owned or not row.unsealed):
            await self._logs.retain(row.name, begin)
        self._logs.rewrites.want(row)


@dataclass(slots=True)
class _Watch:
    """The parts of a log's metadata that decide when a sweep reads the metadata again."""

    ledger_id: int | None = None
    """The last ledger, if it is open."""
    writer: Writer | None = None
    """The writer of the ledger `ledger_id`."""
    expiry: Expiry | None = None
    release_ms: float = math.inf
    """The time at which retention by age releases the oldest ledger, by the database's clock."""


def _release_ms(row: LogMetadata) -> float:
    """The time at which retention by age next releases a ledger."""
    age_s = row.settings.retention_seconds
    if not age_s or retained_from(row, now_ms=sys.maxsize) == row.first_offset:
        return math.inf
    return row.items[0].sealed_ms + age_s * 1000


def retained_from(row: LogMetadata, *, now_ms: int) -> int:
    """The offset below which the settings release records: whole sealed ledgers, oldest first, that
    are too old or exceed the log's size limit. An archived log releases only archived records.
    """
    sealed = [item for item in row.items[:-1] if item.last_offset is not None]
    if row.settings.cleanup_policy == "compact":
        sealed = []  # the newest record of each key stays (rule 27d)
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
