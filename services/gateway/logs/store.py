"""The logs' rows, as the gateway asks the metadata service for them and as reads of this process have them; and orphans,
which are ledgers that were created for a log and that neither a log nor a fork names (rule 22).
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import Final

from quorumlog.errors import UNKNOWN, DatabaseWentBack, NoSuchLedger, NoSuchLog, QuorumLogError
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
"""Rows that are kept for reads within sealed ledgers."""

RECENT_S: Final = 0.2
"""For how long an answer of metadata serves the next pages of who reads on: a hundred pages and more. A deletion or
truncation by another gateway may stay invisible for this long (chosen by judgement, ADR 45 and 48).
"""

ORPHANS_PER_ROUND_MAX: Final = 100
"""Orphans that one round deletes: each may take until a timeout. Chosen by judgement."""
_PAGE: Final = 1000
"""Orphans that one round reads: so many that two gateways seldom choose the same ones to delete."""


class MetadataLogs:
    """The rows of logs and of transactions, in the words of the logs' machines.

    All methods may raise MetadataUnavailable, those that name a log NoSuchLog.
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
        self.heads = client.heads
        self.orphans = client.orphans
        self.delete_unnamed = client.delete_unnamed

    async def unshared(self, let_go: Sequence[LedgerMetadata]) -> Sequence[LedgerMetadata]:
        """Of the ledgers that a log names no more those that no fork names, nor ever will (rule 27a).

        Raises: why that can't be asked; the outcome is unknown: the log has let go of them, and bookies were not told.
        """
        ids = [row.ledger_id for row in let_go]
        shared: set[int] = set()
        try:
            for at in range(0, len(ids), LOG_LEDGERS_MAX):
                shared |= await self._client.shared_among(ids[at : at + LOG_LEDGERS_MAX])
        except QuorumLogError as error:
            raise error.with_outcome(UNKNOWN) from error
        return [row for row in let_go if row.ledger_id not in shared]

    async def require(self, name: str, has: Callable[[LogMetadata | None], bool]) -> None:
        """Look once more whether the database has a change that bookies were told of, before a client is told: the answer
        to the change may be of a database that was lost since (rule 18e). `has` judges the log's row as it is now, or
        None where there is no log.

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
                "a change of the log was made, and the database lacks it", log=name, outcome=UNKNOWN
            )

    async def cas(self, log: LogMetadata, once: Once | None = None) -> LogMetadata | RowChanged:
        """Replace the row of this version: the row with its new version, unless it changed. For a late copy of the
        client's request `once`: the row as it is.
        """
        is_done, row = await self._client.cas(log, once=once)
        return row if is_done else RowChanged(row)

    async def delete(self, log: LogMetadata) -> RowChanged | None:
        """Delete the row of this version, unless it changed."""
        other = await self._client.delete(log)
        return None if other is None else RowChanged(other)

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> Committed | RowChanged:
        """End a transaction with these ledgers published, by compare-and-swap of the log's row.

        Without `log`, or of a transaction that has ended: its answer, and no row is changed.
        Raises: why the commit is refused.
        """
        done, row = await self._transactions.commit(transaction_id, ledgers, log)
        if done is None:
            assert row is not None, "a refused compare-and-swap carries the row"
            return RowChanged(row)
        return Committed(done, row)


class LogRows:
    """Rows from the primary, and those that were read before."""

    def __init__(self, store: MetadataLogs) -> None:
        """No row is kept yet."""
        self._store = store
        self._clock = asyncio.get_running_loop().time
        self._rows: dict[str, tuple[LogMetadata, float]] = {}
        """With the time at which each was asked for."""
        self._changes = 0

    async def row(self, name: str) -> LogMetadata:
        """The row from the primary. Raises: NoSuchLog, MetadataUnavailable."""
        at_s, changes = self._clock(), self._changes
        try:
            row = await self._store.get(name)
        except Exception:
            self._rows.pop(name, None)
            raise
        if changes == self._changes:  # else the row may be that of before
            self._rows.pop(name, None)
            self._rows[name] = row, at_s
            if len(self._rows) > _ROWS_MAX:
                del self._rows[next(iter(self._rows))]
        return row

    def recent(self, name: str) -> LogMetadata | None:
        """A row that was asked for within RECENT_S, and that this process has not changed since."""
        row, at_s = self._rows.get(name, (None, 0.0))
        return row if self._clock() - at_s <= RECENT_S else None

    def known(self, name: str) -> LogMetadata | None:
        """A row from before, of a log whose ledgers are gone when the log is: a reader of the old row finds that out. A
        stream's may live on in its forks, or in what it is a fork of, while its name is another stream's (rule 27a).
        """
        return None if name.startswith(STREAM_PREFIX) else self._rows.get(name, (None,))[0]

    def changed(self, name: str) -> None:
        """This process has changed the row or deleted it: who asks here from now on is told so, also by an answer of the
        primary that is under way.
        """
        self._rows.pop(name, None)
        self._changes += 1


class Orphans:
    """Deletes orphans. The metadata service refuses to delete a ledger that a log or a fork names."""

    def __init__(self, engine: Engine, store: MetadataLogs, index: OffsetIndex) -> None:
        """`index` forgets the offsets of ledgers that are dropped."""
        self._engine, self._store, self._index = engine, store, index
        self._after: int | None = None
        """The next round reads the orphans behind this ledger; None: from the first one on."""

    async def of_log(self, name: str) -> Sequence[LedgerMetadata]:
        """The orphans that were created for logs of this name."""
        found: list[LedgerMetadata] = []
        after: int | None = None
        while ids := await self._store.orphans(older_than_s=0, after=after, log=name):
            after = ids[-1]
            found += await self._engine.existing(ids)
        return found

    async def drop(self, ledger_ids: Sequence[int]) -> None:
        """Delete those of these ledgers that no log or fork names any more. A later round deletes what can't be deleted now."""
        for ledger_id in ledger_ids:
            self._index.drop(ledger_id)
        with contextlib.suppress(QuorumLogError):
            for ledger in await self._store.unshared(await self._engine.existing(ledger_ids)):
                with contextlib.suppress(QuorumLogError):
                    await self.delete(ledger.ledger_id)

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger if it still exists (rule 22). An open ledger is recovered first (rule 27), because its writer must not
        go on.

        Raises: OwnedByLog, NoSuchLedger if another gateway deletes it at this moment, and what a recovery raises.
        """
        for ledger in await self._engine.existing([ledger_id]):
            is_closed = ledger.state is State.CLOSED
            closed = ledger if is_closed else await self._engine.recover(ledger_id)
            await self._store.delete_unnamed(ledger_id)
            await self._engine.tell_deleted([closed])
            log.info("orphan-deleted", extra={"ledger": ledger_id})

    async def delete_some(self, *, older_than_s: float) -> bool:
        """One round: delete some ledgers that have been orphans for this long, or that a transaction did not publish.
        Returns whether more may be left.

        A round reads a page, deletes a random ORPHANS_PER_ROUND_MAX of it, and the next round begins behind the page. So gateways
        that do this at once delete different orphans, and those that can't be deleted now hold up no others.
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
