"""The logs of one gateway: their metadata and their records.

Any gateway accepts any request, and forwards it to the log's owner or becomes the owner
(`ownership.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import uuid4

import orjson

from quorumlog import errors
from quorumlog.net.timers import awake
from quorumlog.protocol.changes import check_unprotected
from quorumlog.protocol.log import (
    Expiry,
    LogMetadata,
    LogSettings,
    LogState,
    ledgers_of,
    messages,
)
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.handover import same
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Transaction
from quorumlog.wire.position_bodies import POSITIONS_LOG, QUEUES_LOG, SUBSCRIPTIONS_LOG
from services.gateway.engine import Engine
from services.gateway.engine.ledger_writes import LARGE_BYTES, packed_batch
from services.gateway.logs.accesses import Accesses
from services.gateway.logs.consumers import Consumers
from services.gateway.logs.handle import LogHandle, resolve
from services.gateway.logs.keeper import RowService
from services.gateway.logs.keys import KeyReader
from services.gateway.logs.lags import Lags
from services.gateway.logs.offsets import sizes_of
from services.gateway.logs.ownership import LogTimes, Ownership
from services.gateway.logs.peers import LogPeers
from services.gateway.logs.positions import PositionService
from services.gateway.logs.queues import QueueService
from services.gateway.logs.reading import LogReader
from services.gateway.logs.rewrites import Rewrites
from services.gateway.logs.store import LogRows, MetadataLogs, Orphans
from services.gateway.logs.subscriptions import SubscriptionService
from services.gateway.logs.views import LogView, LogViews

log = logging.getLogger(__name__)

T = TypeVar("T")

_FORK_TRIES: Final = 5
"""Maximum attempts per fork (by judgement). A takeover or truncation can undo an attempt's roll."""


class LogManager:
    """All operations on logs at this gateway."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: MetadataLogs,
        peers: LogPeers,
        times: LogTimes | None = None,
        wall_ms: Callable[[], int] | None = None,
        awake_s: Callable[[], float] | None = None,
    ) -> None:
        """`wall_ms` reads this machine's clock, and `awake_s` the time that the process was awake."""
        self._engine, self._store = engine, store
        self.times = times or LogTimes()
        loop, self._wall_ms = asyncio.get_running_loop(), wall_ms or _wall_ms
        self.ownership = Ownership(
            engine=engine,
            store=store,
            peers=peers,
            times=self.times,
            now=lambda: Now(
                self._wall_ms(),
                store.database_ms(),
                loop.time(),
                is_doubted=bool(store.clock.doubt),
            ),
        )
        self.orphans = Orphans(engine, store, self.ownership.index)
        self.rows = LogRows(store)
        self.rewrites = Rewrites(
            self.ownership,
            self.orphans,
            self.rows,
            lambda: (store.database_ms() or 0) if self.deletes_by_age else 0,
        )
        self.reader = LogReader(engine, self.rows, self.ownership)
        self.keys = KeyReader(engine, self.reader, self.ownership, self._change)

        async def bookies() -> int:
            return len((await engine.directory.refresh()).bookies)

        rows: dict[str, Any] = {
            "bookies": bookies,
            "start": self.ownership.task,
            "timeout_s": self.times.append_s,
            "wall_ms": self._wall_ms,
            "database_ms": lambda: store.database_ms() if self.deletes_by_age else None,
        }
        expiry_s = self.times.consumer_expiry_s
        self.positions = PositionService(self, self.reader.read, expiry_s=expiry_s, **rows)
        self.consumers = Consumers(engine, store, self.ownership, self.reader, self.positions)
        self.queues = QueueService(self, self.reader, self.consumers, **rows)
        self.subscriptions = SubscriptionService(
            self, self.reader, self.consumers, store.list, **rows
        )
        self.services: Mapping[str, RowService[Any]] = {
            POSITIONS_LOG: self.positions,
            QUEUES_LOG: self.queues,
            SUBSCRIPTIONS_LOG: self.subscriptions,
        }
        self.me = engine.writer
        self.accesses = Accesses(
            me=self.me,
            ask=peers.access,
            is_alive=self.ownership.is_other_alive,
            read=self.rows.row,
            appoint=self._appoint,
            remove=self._remove_expired,
            start=self.ownership.task,
            awake_s=awake_s or awake().time,
        )
        self.views = LogViews(engine, store, peers, self.ownership, self.reader)
        self.lags = Lags(
            store, self.ownership, self.views, self.positions, self.consumers, now_ms=self.now_ms
        )

    async def put(
        self,
        name: str,
        settings: LogSettings,
        *,
        deletion_protection: bool | None = None,
        once: Once | None = None,
    ) -> tuple[LogView, bool]:
        """Create a log if there is none. Returns the log, and whether this call created it. A
        `deletion_protection` of None accepts an existing log's value. `once` identifies the
        client's request, so that a late copy of it changes nothing (rule 6a).

        Raises: LogExists if the log has other settings; NoSuchLog for a late copy if the log was
        deleted since.
        """
        wanted = LogMetadata(
            name, settings, next_offset=0, deletion_protection=bool(deletion_protection)
        )
        row, is_new = await self._store.create(wanted, once=once)
        is_same = deletion_protection in (None, row.deletion_protection)
        if row.settings != settings or not is_same:
            found = row.settings.fields | {"deletion_protection": row.deletion_protection}
            given = settings.fields | {"deletion_protection": deletion_protection}
            differing = "; ".join(
                f"{field} is {orjson.dumps(found[field]).decode()}, not {orjson.dumps(value).decode()}"
                for field, value in given.items()
                if found[field] != value and value is not None
            )
            raise errors.LogExists(
                f"the log {name} exists with other settings: {differing}", log=name
            )
        return await self.views.view(row), is_new

    async def create(
        self, name: str, settings: LogSettings, *, idle_s: int | None = None
    ) -> tuple[LogMetadata, bool]:
        """Create a log if there is none. Returns the log's metadata, whatever its settings are, and
        whether this call created the log. With `idle_s`, the log expires after that many seconds
        without use.
        """
        wanted = replace(self.draft(name, settings, idle_s=idle_s), next_offset=0)
        return self._begun(*await self._store.create(wanted))

    def draft(self, name: str, settings: LogSettings, *, idle_s: int | None = None) -> LogMetadata:
        """Metadata for a new log. With `idle_s`, this process becomes its expiry keeper."""
        expiry = None if idle_s is None else Expiry(idle_s, self.me, str(uuid4()))
        return LogMetadata(name, settings, expiry=expiry)

    def _begun(self, row: LogMetadata, is_new: bool) -> tuple[LogMetadata, bool]:
        """Count the creation as an access, if this process created the log."""
        if is_new:
            self.accesses.begun(row)
        return row, is_new

    async def fork(
        self, wanted: LogMetadata, source: LogMetadata, at: int
    ) -> tuple[LogMetadata, bool]:
        """Create the fork `wanted` (from `draft`) with the records of `source` below the offset
        `at` (rule 27a). Returns the metadata of the log with this name, which may be another log,
        and whether this call created the log.

        Raises: NoSuchLog, LogReplaced or OffsetTruncated for the source; InvalidRequest beyond its
        end; the errors of a roll.
        """
        for _ in range(_FORK_TRIES):
            if at < source.first_offset:
                raise errors.OffsetTruncated(
                    f"a fork must begin at {source.first_offset} or above (got {at})",
                    log=source.name,
                    first_offset=source.first_offset,
                )
            if source.is_sealed_below(at):
                with contextlib.suppress(errors.InvalidRequest):  # the source was truncated
                    made, is_new = await self._store.fork(wanted, source, at)
                    if is_new:
                        await self.keep_fork(made)
                    return self._begun(made, is_new)
            else:
                # Only CLOSED ledgers are shared, so no append to the source can reach the fork.
                try:
                    await self.roll(source.name)
                except errors.LogClosed:
                    # A batch has ended the log. The metadata may still lack this end.
                    await self.finish(source.name, source.created_at)
            now = await self.rows.row(source.name)
            now.check_created(source.created_at)
            source = now
        end = await self.reader.end(source.name, source)
        if at > end:
            end = max(end, await self.reader.closed_end(source))
        if at > end:
            detail = f"a fork of {source.name} must begin at {end} or below (got {at})"
            raise errors.InvalidRequest(detail, log=source.name)
        raise errors.Overloaded(
            f"the log {source.name} changed at every attempt to fork it: retry", log=source.name
        )

    async def keep_fork(self, fork: LogMetadata) -> None:
        """Create a fork's first own ledger, so that a rebuild finds the ledgers which the fork
        shares (rule 18e). If this fails, a retry or the fork's first append creates the ledger.
        """
        if not fork.shared or fork.own or fork.state is LogState.CLOSED:
            return
        try:
            handle = self.ownership.handle(fork.name)
            row = await handle.force(creates=True, finish=same, created_at=fork.created_at)
            await self._engine.copy_rows([item.ledger_id for item in row.own])
        except errors.QuorumLogError as error:
            log.warning("fork-not-kept", extra={"log": fork.name, "error": repr(error)})

    def now_ms(self) -> int:
        """The database's time in ms, or this machine's time until the first read of metadata."""
        at_ms = self._store.database_ms()
        return self._wall_ms() if at_ms is None else at_ms

    @property
    def deletes_by_age(self) -> bool:
        """Whether the database's clock is trusted for deletions by age (rule 26c)."""
        return not self._store.clock.doubt

    async def get(self, name: str) -> LogView:
        """The log as clients see it. Raises: NoSuchLog."""
        while True:
            # If the log was replaced, the next read returns the new log.
            with contextlib.suppress(errors.LogReplaced):
                return await self.views.view(await self.rows.row(name))

    async def _appoint(self, name: str, term: str) -> None:
        """Make this process the log's expiry keeper if the current keeper's term is `term`."""

        async def appointed(row: LogMetadata) -> LogMetadata:
            is_same = row.expiry is not None and row.expiry.term == term
            return row.kept_by(self.me, str(uuid4())) if is_same else row

        await self._change(name, appointed)

    async def _remove_expired(self, name: str, term: str) -> bool:
        """Delete an expired log. Returns False if an expiry keeper of another term has taken over."""
        while True:
            try:
                row = await self._store.get(name)
            except errors.NoSuchLog:
                return True
            if row.expiry is None or row.expiry.term != term:
                return False
            with contextlib.suppress(errors.NoSuchLog):  # the next read shows why
                await self.delete(name, created_at=row.created_at, term=term)
                return True

    async def delete(
        self, name: str, *, created_at: str | None = None, term: str | None = None
    ) -> None:
        """Delete the log, and all of its ledgers that no fork names. Deletes only the log that was
        created at `created_at` (default: the current log), and no later log of the name (rule 27b).
        With `term`, deletes the log only while its expiry keeper has that term.

        Raises: NoSuchLog, LogProtected, RecoveryBlocked.
        """
        # The protection is checked here too, before the writer is fenced.
        found = await self._store.get(name)
        check_unprotected(found)
        try:
            row = await self.ownership.handle(name).delete(created_at or found.created_at, term)
        finally:
            self.rows.changed(name)
        for service in self.services.values():
            service.log_deleted(name, row.created_at)
        replaced: Sequence[int] = ()
        with contextlib.suppress(errors.QuorumLogError):  # the sweep deletes them later
            replaced = await self._store.placed_orphans(name)
        await self.orphans.drop([*sorted(ledgers_of(row.items)), *replaced])

    async def truncate(
        self,
        name: str,
        before: int,
        *,
        created_at: str | None = None,
        once: Once | None = None,
    ) -> LogView:
        """Release whole ledgers that end below `before`. Raises: LogProtected, LogReplaced."""

        def below(row: LogMetadata) -> int:
            row.check_created(created_at)
            check_unprotected(row)
            return before

        return await self.retain(name, below, reports_again=True, once=once)

    async def retain(
        self,
        name: str,
        begin: Callable[[LogMetadata], int],
        *,
        reports_again: bool = False,
        once: Once | None = None,
    ) -> LogView:
        """Release whole ledgers that end below the offset that `begin` returns for the current
        metadata. Also releases existing ledgers that the released ledgers had replaced (rule 27c).
        With `reports_again`, bookies of ledgers released earlier are informed again, because the
        earlier attempt may have ended before it informed them (rule 18e, clause 7).
        """
        dropped: Sequence[LedgerMetadata] = ()

        async def truncated(row: LogMetadata) -> LogMetadata:
            nonlocal dropped
            changed = row.truncated(begin(row))
            named = await self._engine.existing(_let_go(row, changed))
            dropped = [*named, *await self._engine.existing(_replaced(named))]
            return changed

        row, new = await self._change(name, truncated, once)
        named = {item.ledger_id for item in new.items}
        gone = [item for item in row.items if item.ledger_id not in named]
        # A late copy informs bookies too, as it can't tell which ledgers the first copy released.
        if reports_again or any(item.replaced for item in gone):
            by_id = {ledger.ledger_id: ledger for ledger in dropped}
            by_id |= {ledger.ledger_id: ledger for ledger in await self.orphans.released(new)}
            dropped = list(by_id.values())
        # The release of these ledgers is final, even if the sweep deletes them later (rule 18e).
        await self._engine.notify_deleted(await self._store.unshared(dropped))
        if dropped:
            await self._store.require(name, lambda now: now is None or _is_past(now, new))
        ids = dict.fromkeys(sorted(ledgers_of(gone)))
        await self.orphans.drop([*(ids | dict.fromkeys(one.ledger_id for one in dropped))])
        return await self.views.view(new)

    async def change(
        self,
        name: str,
        limits: Mapping[str, int | str],
        *,
        deletion_protection: bool | None = None,
        expect: int | None = None,
        created_at: str | None = None,
        once: Once | None = None,
    ) -> LogView:
        """Change some of the log's limits, and its protection unless that is None. Idempotent if
        `expect` is None.

        Raises: VersionConflict unless the metadata has the version `expect`; LogReplaced.
        """

        async def changed(row: LogMetadata) -> LogMetadata:
            row.check_created(created_at)
            if expect not in (None, row.version):
                detail = f"the log's version is {row.version}, but the request expects {expect}"
                raise errors.VersionConflict(detail, log=name, version=row.version)
            if deletion_protection is not None:
                is_lifted = row.deletion_protection and not deletion_protection
                row = row.protected(is_on=deletion_protection)
                if is_lifted and row.expiry is not None:
                    # Accesses under protection were not counted, so idle time restarts (ADR 40).
                    row = row.kept_by(self.me, str(uuid4()))
            return row.with_limits(limits)

        before, new = await self._change(name, changed, once)
        if new.expiry != before.expiry:
            self.accesses.begun(new)
        return await self.views.view(new)

    async def archived(
        self,
        name: str,
        through: int,
        *,
        expect: int | None,
        created_at: str | None = None,
        once: Once | None = None,
    ) -> LogView:
        """Mark all records below the offset `through` as archived elsewhere. Idempotent.

        Raises: VersionConflict unless the log is archived through `expect`; InvalidRequest beyond
        the end; LogReplaced.
        """

        async def archived(row: LogMetadata) -> LogMetadata:
            row.check_created(created_at)
            if row.archived_through == through:
                return row
            if row.archived_through != expect:
                detail = f"the log is archived through {row.archived_through}, not {expect}"
                raise errors.VersionConflict(detail, log=name)
            end, low = (await self.views.view(row)).next_offset, row.archived_through or 0
            if through > end:
                end = max(end, await self.reader.closed_end(row))
            if not low <= through <= end:
                detail = f"must be from {low}, the archived offset, to {end}, the log's end"
                found = [{"pointer": "/through", "detail": detail}]
                raise errors.InvalidRequest(f"/through: {detail}", log=name, errors=found)
            return row.archived(through)

        _, new = await self._change(name, archived, once)
        return await self.views.view(new)

    async def _change(
        self,
        name: str,
        change: Callable[[LogMetadata], Awaitable[LogMetadata]],
        once: Once | None = None,
    ) -> tuple[LogMetadata, LogMetadata]:
        """Change the log's metadata by compare-and-swap. Returns the metadata before and after the
        change. An owner in this process applies the change and stays the owner. With `once`, even
        unchanged metadata is swapped to store the request's name, so that a late copy of the
        request changes nothing (rule 6a).
        """
        while True:
            row = await self._store.get(name)
            if once is not None and await self._store.is_done(once):
                return row, row
            changed = await change(row)
            if changed == row and once is None:
                return row, row
            try:
                new = await self._store.cas(changed, once)
            finally:
                self.rows.changed(name)
            if not isinstance(new, messages.RowChanged):
                self.ownership.notify(name, messages.RowTaken(new))
                return row, new

    async def open(
        self, name: str, owner: str, *, created_at: str | None = None
    ) -> tuple[int, int]:
        """Open the log for one writer by a takeover. Returns the writer token and the next offset.

        Raises: LogReplaced.
        """
        row = await self.ownership.handle(name).force(
            creates=True, finish=lambda row: row.opened(owner), created_at=created_at
        )
        item = row.last_item
        assert item is not None, "expected a ledger after the takeover"
        return row.writer_token, item.first_offset or 0

    async def close(
        self, name: str, *, created_at: str | None = None, once: Once | None = None
    ) -> LogView:
        """Close the log for ever. Raises: LogReplaced."""
        # A late copy of the request must not cause a takeover, which would end the owner.
        if once is None or not await self._store.is_done(once):
            await self.finish(name, created_at, once=once)
        return await self.get(name)

    async def finish(self, name: str, created_at: str | None, *, once: Once | None = None) -> None:
        """Close the log for ever, as `close` does, but return nothing."""

        async def unchanged(row: LogMetadata) -> LogMetadata:
            row.check_created(created_at)
            return row

        try:
            await self.ownership.handle(name).force(
                creates=False, finish=LogMetadata.closed, created_at=created_at, once=once
            )
        except errors.LogClosed:
            if once is not None:
                await self._change(name, unchanged, once)

    async def remove(self, row: LogMetadata) -> None:
        """Delete this log, even if it has changed, but no later log of its name. Idempotent."""
        with contextlib.suppress(errors.NoSuchLog):
            await self.delete(row.name, created_at=row.created_at)

    async def roll(self, name: str) -> LogView:
        """Roll the log, which then continues in a new ledger."""
        await self._ask(name, None)
        return await self.get(name)

    async def publish(self, name: str, call: messages.Publish) -> Transaction:
        """Publish a transaction's ledgers on the log, through the log's owner (rule 28).

        Raises: LogFenced, LogClosed, InvalidRequest, and errors of the commit.
        """
        done: Transaction = await self._ask(name, call)
        return done

    async def consult(
        self, name: str, call: messages.Consult, *, is_forwarded: bool = False
    ) -> messages.Here | bytes:
        """Send `call` to the log's owner. Returns its answer, or HERE if this process is the owner.

        Raises: NotTheOwner if `is_forwarded` and this process is not the owner.
        """
        reported: messages.Here | bytes = await self._ask(name, call, is_forwarded=is_forwarded)
        return reported

    async def forwarded(
        self, name: str, call: messages.Append | messages.Publish | messages.Consult | None
    ) -> messages.RecordsAppended | Transaction | dict[str, Any] | None:
        """Perform a request that another gateway forwarded to this process as the log's owner.

        Raises: WriterLost with outcome `not-done` if this is not the owner; BadRows.
        """
        match call:
            case messages.Append():
                return await self.append(name, replace(call, is_forwarded=True))
            case messages.Consult(data):
                return await self.services[name].answer_here(data)
            case _:
                done: Transaction | None = await self._ask(name, call, is_forwarded=True)
                return done

    def is_owned(self, name: str) -> bool:
        """Whether this process owns the log."""
        return self.ownership.owner(name) is not None

    async def append(self, name: str, call: messages.Append) -> messages.RecordsAppended:
        """Append records as one batch, through the owner. A producer's retry gets the first answer.

        Raises: QuorumTimeout, and the log's errors.
        """
        handle = self.ownership.handle(name)
        call = await _packed(handle, call)
        future = handle.append(call)
        return await self._answer(handle, future, is_repeatable=call.producer is not None)

    def submit(self, name: str, call: messages.Append) -> asyncio.Future[messages.RecordsAppended]:
        """Begin an append of a small batch, as `append` does, but without compressing in a thread."""
        handle = self.ownership.handle(name)
        return self._limited(handle, handle.append(call))

    async def _ask(
        self,
        name: str,
        call: messages.Publish | messages.Consult | None,
        *,
        is_forwarded: bool = False,
    ) -> Any:
        """Send `call` to the log's owner; None rolls the log. A publication may be sent again.

        Raises: QuorumTimeout, and the log's errors.
        """
        is_repeatable = isinstance(call, messages.Publish)
        sizes = (
            await sizes_of(call.ledgers, self._engine) if isinstance(call, messages.Publish) else ()
        )
        handle = self.ownership.handle(name)
        future = handle.request(call, sizes, is_forwarded=is_forwarded)
        return await self._answer(handle, future, is_repeatable=is_repeatable)

    async def _answer(
        self, handle: LogHandle, future: asyncio.Future[T], *, is_repeatable: bool
    ) -> T:
        try:
            return await self._limited(handle, future)
        except asyncio.CancelledError:
            handle.abandon(future)
            raise
        except errors.QuorumLogError as error:
            is_unknown = error.outcome == errors.UNKNOWN and not isinstance(
                error, errors.ExpiredProducer
            )
            if is_repeatable and is_unknown:
                raise error.replace(retryable=True) from error
            raise

    def _limited(self, handle: LogHandle, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """Return `future`, which fails with QuorumTimeout if the owner does not answer in time."""

        def late() -> None:
            detail = f"the log's owner did not answer within {self.times.append_s:g} s"
            resolve(future, errors.QuorumTimeout(detail, log=handle.name))
            handle.abandon(future)

        timer = asyncio.get_running_loop().call_later(self.times.append_s, late)
        future.add_done_callback(lambda _future: timer.cancel())
        return future


async def _packed(handle: LogHandle, call: messages.Append) -> messages.Append:
    """Compress a large batch in a thread, because compression takes some milliseconds. The log's
    machine compresses batches that arrive uncompressed.
    """
    owner = handle.owner
    if owner is None or len(call.data) < LARGE_BYTES:
        return call
    if owner.log.settings.batch_compression == "none":
        return call
    return replace(call, data=await packed_batch(call.data))


def _wall_ms() -> int:
    """This machine's clock, in milliseconds since 1970."""
    return int(datetime.now(UTC).timestamp() * 1000)


def _is_past(now: LogMetadata, new: LogMetadata) -> bool:
    """Whether the log `now` begins at or after the first offset of `new`, or is another log."""
    return now.created_at != new.created_at or now.first_offset >= new.first_offset


def _replaced(ledgers: Sequence[LedgerMetadata]) -> list[int]:
    """Ids of the ledgers that `ledgers` replaced. After a rebuild, `released` may lack such ids."""
    lineages = [ledger.lineage for ledger in ledgers if ledger.lineage is not None]
    return sorted({ledger_id for lineage in lineages for ledger_id, _ in lineage.replaced})


def _let_go(before: LogMetadata, after: LogMetadata) -> list[int]:
    """Ids of ledgers that `after` no longer names, except shared ledgers (rule 27a)."""
    kept = {item.ledger_id for item in after.items}
    return [item.ledger_id for item in before.own if item.ledger_id not in kept]
