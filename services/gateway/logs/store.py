"""Reads and changes log metadata at the metadata service, and caches it for reads. Deletes orphans:
ledgers that were created for a log, but that no log or fork names (rule 22).
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import Final

from quorumlog.errors import (
    UNKNOWN,
    DatabaseWentBack,
    EntryUnavailable,
    NoSuchLedger,
    NoSuchLog,
    OwnedByLog,
    QuorumLogError,
)
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.log.messages import Committed, RowChanged
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed
from services.gateway.engine import Engine
from services.gateway.logs.offsets import OffsetIndex
from services.gateway.logs.values import STREAM_PREFIX

log = logging.getLogger(__name__)

_ROWS_MAX: Final = 2000
"""Maximum logs whose metadata is cached for reads within sealed ledgers."""

HEARD_MAX: Final = 10_000
"""Maximum announced logs between two sweeps. If there are more, the next sweep reads all logs."""
RECENT_S: Final = 0.2
"""Time for which an answer of the metadata service is reused for further pages of a read. Another
gateway's deletion or truncation may stay invisible for this long (chosen by judgement, ADR 45 and
48)."""

ORPHANS_PER_ROUND_MAX: Final = 100
"""Maximum orphans deleted per round (by judgement). A deletion may take as long as a timeout."""
_PAGE: Final = 1000
"""Orphans read per round: so many that two gateways seldom delete the same orphans."""


_KEPT_MAX: Final = 10_000
"""Maximum number of ledgers remembered in `Orphans._kept`; the set is cleared when full."""


class MetadataLogs:
    """The metadata of logs and transactions, in the types of the logs' machines.

    All methods may raise MetadataUnavailable. Methods that name a log may raise NoSuchLog.
    """

    def __init__(self, client: LogClient, transactions: TransactionClient) -> None:
        """Keeps no state."""
        self._client, self._transactions = client, transactions
        self.transaction = transactions.get
        self.database_ms, self.clock = client.database_ms, client.clock
        self.get = client.get
        self.create = client.create
        self.fork = client.fork
        self.is_done = client.is_done
        self.list = client.list
        self.orphans = client.orphans
        self.delete_unnamed = client.delete_unnamed

    async def unshared(self, let_go: Sequence[LedgerMetadata]) -> Sequence[LedgerMetadata]:
        """The released ledgers that no fork names or can ever name (rule 27a).

        Raises: the error of the request, with outcome `unknown`, because the log has released the
        ledgers and bookies were not informed.
        """
        ids = [row.ledger_id for row in let_go]
        shared: set[int] = set()
        try:
            for at in range(0, len(ids), LOG_LEDGERS_MAX):
                shared |= await self._client.shared_among(ids[at : at + LOG_LEDGERS_MAX])
        except QuorumLogError as error:
            raise error.with_outcome(UNKNOWN) from error
        return [row for row in let_go if row.ledger_id not in shared]

    async def placed_orphans(self, name: str) -> Sequence[int]:
        """Ledgers that once belonged to a log of this name, and that no log or fork names now."""
        found: list[int] = []
        while page := await self.orphans(
            older_than_s=0, after=found[-1] if found else None, limit=_PAGE, log=name
        ):
            found += page
        return found

    async def require(self, name: str, has: Callable[[LogMetadata | None], bool]) -> None:
        """Check that the database still has a change that bookies were informed of, before the
        client gets a response. The database that made the change may have been lost since (rule
        18e). `has` returns whether the log's current metadata (None: there is no log) shows the
        change.

        Raises: MetadataUnavailable and DatabaseWentBack, whose outcome is unknown.
        """
        try:
            row: LogMetadata | None = await self.get(name)
        except NoSuchLog:
            row = None
        except QuorumLogError as error:
            raise error.with_outcome(UNKNOWN) from error
        if not has(row):
            raise DatabaseWentBack(
                "the database lost an acknowledged change of the log: rebuild the metadata",
                log=name,
                outcome=UNKNOWN,
            )

    async def cas(self, log: LogMetadata, once: Once | None = None) -> LogMetadata | RowChanged:
        """Replace the log's metadata if it still has this version. Returns the new metadata, or
        RowChanged. For a late copy of the client's request `once`, returns the current metadata.
        """
        is_done, row = await self._client.cas(log, once=once)
        return row if is_done else RowChanged(row)

    async def delete(self, log: LogMetadata) -> RowChanged | None:
        """Delete the log if its metadata still has this version; else return RowChanged."""
        other = await self._client.delete(log)
        return None if other is None else RowChanged(other)

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> Committed | RowChanged:
        """End a transaction and publish these ledgers, by compare-and-swap of the log's metadata.

        Without `log`, or if the transaction ended before, changes no log and returns the first
        answer. Raises: the error that rejects the commit.
        """
        done, row = await self._transactions.commit(transaction_id, ledgers, log)
        if done is None:
            assert row is not None, "expected the log's metadata with a rejected change"
            return RowChanged(row)
        return Committed(done, row)


def _has_records_of(row: LogMetadata, ledger: LedgerMetadata) -> bool:
    """Whether a ledger once belonged to this log, at offsets that the log still has."""
    created_at = "" if ledger.lineage is None else ledger.lineage.log_created_at
    is_of_log = created_at in {"", row.created_at}
    return is_of_log and (ledger.first_offset or 0) >= row.first_offset


class LogRows:
    """Reads log metadata from the primary, caches it, and tracks which logs have changed."""

    def __init__(self, store: MetadataLogs) -> None:
        """Starts with an empty cache."""
        self._store = store
        self._clock = asyncio.get_running_loop().time
        self._rows: dict[str, tuple[LogMetadata, float]] = {}
        """Cached metadata, each with the time of its request."""
        self._changes = 0
        self._heard: set[str] | None = None
        """Names of changed logs; None if changes may have been missed."""

    def heard(self, name: str) -> None:
        """Note that some process has changed, created or deleted a log."""
        if self._heard is not None:
            self._heard.add(name)
            if len(self._heard) > HEARD_MAX:
                self.gap()

    def gap(self) -> None:
        """Note that changes of any log may have been missed."""
        self._heard = None

    def take_heard(self) -> set[str] | None:
        """Return and forget the names of changed logs; None if changes may have been missed."""
        taken, self._heard = self._heard, set()
        return taken

    async def row(self, name: str) -> LogMetadata:
        """The log's metadata from the primary. Raises: NoSuchLog, MetadataUnavailable."""
        at_s, changes = self._clock(), self._changes
        try:
            row = await self._store.get(name, self._rows.get(name, (None,))[0])
        except Exception:
            self._rows.pop(name, None)
            raise
        if changes == self._changes:  # otherwise `row` may be outdated
            self._rows.pop(name, None)
            self._rows[name] = row, at_s
            if len(self._rows) > _ROWS_MAX:
                del self._rows[next(iter(self._rows))]
        return row

    def recent(self, name: str) -> LogMetadata | None:
        """Metadata requested within RECENT_S, unless this process has changed it since."""
        row, at_s = self._rows.get(name, (None, 0.0))
        return row if self._clock() - at_s <= RECENT_S else None

    def known(self, name: str) -> LogMetadata | None:
        """Cached metadata of any age, or None for streams. A log's ledgers are deleted with the
        log, so a reader with old metadata notices a replaced log. A stream's ledgers may live on in
        forks while another stream has its name (rule 27a).
        """
        return None if name.startswith(STREAM_PREFIX) else self._rows.get(name, (None,))[0]

    def changed(self, name: str) -> None:
        """Forget metadata that this process has changed or deleted. Responses to earlier requests
        aren't cached either.
        """
        self._rows.pop(name, None)
        self._changes += 1


class Orphans:
    """Deletes orphaned ledgers. The metadata service rejects deletions of ledgers in use."""

    def __init__(self, engine: Engine, store: MetadataLogs, index: OffsetIndex) -> None:
        """`index` forgets the offsets of deleted ledgers."""
        self._engine, self._store, self._index = engine, store, index
        self._after: int | None = None
        """The next round begins after this ledger; None means at the first orphan."""
        self._kept: set[int] = set()
        """Ledgers that have replaced other ledgers, and whose first offsets bookies have stored."""

    async def released(self, row: LogMetadata) -> Sequence[LedgerMetadata]:
        """The existing ledgers that the log, or earlier logs of its name, have released. Ledgers
        that another ledger of the log has replaced are left out (rule 27c).

        Raises: the error of the request, with outcome `unknown`, as `unshared` does.
        """
        try:
            found = await self._engine.existing(await self._store.placed_orphans(row.name))
        except QuorumLogError as error:
            raise error.with_outcome(UNKNOWN) from error
        return [ledger for ledger in found if not _has_records_of(row, ledger)]

    async def drop(self, ledger_ids: Sequence[int]) -> None:
        """Delete the ledgers that no log or fork names. A later round retries failures."""
        for ledger_id in ledger_ids:
            self._index.drop(ledger_id)
        unkept = set[int]()
        with contextlib.suppress(QuorumLogError):
            ledgers = await self._engine.existing(ledger_ids)
            names = {ledger.log for ledger in ledgers if ledger.first_offset is not None}
            rows = {name: await self._row(name) for name in names}
            for ledger in await self._store.unshared(ledgers):
                with contextlib.suppress(QuorumLogError):
                    await self._delete(ledger, rows.get(ledger.log), unkept)

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger if it exists (rule 22). An open ledger is recovered first, so that its
        writer can't continue (rule 27).

        Raises: OwnedByLog; NoSuchLedger if another gateway deletes it meanwhile; the errors of a
        recovery; EntryUnavailable if a bookie lacks the first offset of the replacing ledger.
        """
        for ledger in await self._engine.existing([ledger_id]):
            row = None if ledger.first_offset is None else await self._row(ledger.log)
            if not await self._store.unshared([ledger]):
                detail = "a fork of the log still has the ledger: delete the fork first"
                raise OwnedByLog(detail, ledger_id=ledger_id, log=ledger.log)
            await self._delete(ledger, row, set())

    async def _row(self, name: str | None) -> LogMetadata | None:
        """The metadata of the log with this name; None if there is no such log."""
        with contextlib.suppress(NoSuchLog):
            return None if name is None else await self._store.get(name)
        return None

    async def _delete(
        self, ledger: LedgerMetadata, row: LogMetadata | None, unkept: set[int]
    ) -> None:
        """Delete a ledger. If it belonged to a log, the caller has read the ledger's metadata, then
        the log's metadata, and then the forks' ledgers. So no log or fork can name the ledger
        again. `unkept` collects ledgers whose first offsets bookies could not store.
        """
        ledger_id = ledger.ledger_id
        await self._keep_place(ledger, row, unkept)
        is_closed = ledger.state is State.CLOSED
        closed = ledger if is_closed else await self._engine.recover(ledger_id)
        if ledger.first_offset is not None:
            # Sent before the deletion, as a later truncation finds only existing ledgers (rule 18e).
            await self._engine.notify_deleted([closed])
        await self._store.delete_unnamed(ledger_id)
        if ledger.first_offset is None:
            await self._engine.notify_deleted([closed])
        log.info("orphan-deleted", extra={"ledger": ledger_id})

    async def _keep_place(
        self, ledger: LedgerMetadata, row: LogMetadata | None, unkept: set[int]
    ) -> None:
        """Make bookies store the first offset of the ledger that has replaced `ledger`, and now
        alone stores its records (rule 27c). Raises: EntryUnavailable, OwnedByLog.
        """
        if row is None or ledger.first_offset is None:
            return
        if row.item_of(ledger.ledger_id) is not None:
            detail = "the log still has the ledger: truncate the log to release it"
            raise OwnedByLog(detail, ledger_id=ledger.ledger_id, log=ledger.log)
        item = row.item_at(ledger.first_offset) if _has_records_of(row, ledger) else None
        if item is None or not item.replaced or item.ledger_id in self._kept:
            return
        if item.ledger_id in unkept:
            detail = "bookies have not stored the ledger's first offset yet: retry later"
            raise EntryUnavailable(detail, ledger_id=item.ledger_id)
        unkept.add(item.ledger_id)
        await self._engine.keep_place(item.ledger_id)
        unkept.discard(item.ledger_id)
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        self._kept.add(item.ledger_id)

    async def delete_some(self, *, older_than_s: float) -> bool:
        """Delete some ledgers that have been orphans for `older_than_s`, or that a transaction did
        not publish. Returns whether more may be left.

        A round reads a page of orphans and deletes a random ORPHANS_PER_ROUND_MAX of them. The next
        round begins after the page. So concurrent gateways delete different orphans, and orphans
        that can't be deleted now don't block others.
        """
        began = self._after
        found = await self._store.orphans(older_than_s=older_than_s, after=began, limit=_PAGE)
        self._after = found[-1] if len(found) == _PAGE else None
        taken = random.sample(found, min(len(found), ORPHANS_PER_ROUND_MAX))
        for ledger_id in taken:
            try:
                await self.delete(ledger_id)
            except NoSuchLedger:
                continue  # another gateway deleted it
            except QuorumLogError as error:
                log.warning("orphan-kept", extra={"ledger": ledger_id, "error": repr(error)})
        return began is not None or len(found) > len(taken)
