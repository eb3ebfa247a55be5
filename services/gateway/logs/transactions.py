"""Transactions at this gateway: begin, write, commit and abort.

Attempts of tasks write and close a transaction's ledgers; one process writes each ledger. The
ledgers store record batches, as a log does. Readers see the ledgers once a commit has published
them through the log's owner (rule 28). Unpublished ledgers are fenced and deleted.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from quorumlog import errors
from quorumlog.net.gateway_clients import TransactionClient
from quorumlog.protocol.changes import check_unprotected
from quorumlog.protocol.log.messages import Publish, RowChanged
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionState
from quorumlog.wire.log_bodies import ATTEMPT_TAG, PARTITION_TAG, TRANSACTION_TAG
from services.gateway.engine import Engine
from services.gateway.interface import EntriesAppended
from services.gateway.logs.driver import options_of
from services.gateway.logs.manager import LogManager
from services.gateway.logs.store import MetadataLogs

log = logging.getLogger(__name__)

_COPIES_S: Final = 5.0
"""Maximum time for which a commit waits until copies of its ledgers' metadata are sent (chosen by
judgement). Sending continues afterwards (rule 18f, clause 3)."""

EXPIRES_IN_S: Final = 3600
"""Default lifetime, longer than a Spark stage runs before its first append (by judgement)."""


@dataclass(frozen=True, slots=True)
class TransactionAttempt:
    """One attempt of a task to write one partition of a transaction."""

    transaction: str
    partition: int | None = None
    attempt: int | None = None


class Transactions:
    """The transactions of a gateway."""

    def __init__(
        self,
        *,
        engine: Engine,
        logs: LogManager,
        store: MetadataLogs,
        client: TransactionClient,
    ) -> None:
        """Starts without published ledgers."""
        self._engine, self._logs, self._store, self._client = engine, logs, store, client
        self._checks = _Checks(client)
        self.begin = client.begin
        self.get = client.get
        self.check = self._checks.check
        self._clearing: asyncio.Task[bool] | None = None
        self.published_ledgers = 0
        """Ledgers published by commits that this gateway answered."""

    async def create_ledger(
        self,
        whose: TransactionAttempt,
        *,
        custom: tuple[tuple[str, str], ...] = (),
        once: Once | None = None,
    ) -> LedgerMetadata:
        """Create a ledger with the log's settings. This process is the ledger's only writer.

        Raises: NoSuchTransaction, TransactionAborted, TransactionCommitted, NoSuchLog,
        NotEnoughBookies.
        """
        found = await self._client.get(whose.transaction)
        if not found.is_open:
            raise _ended(found.state)
        options = options_of(await self._store.get(found.log))
        return await self._engine.create(
            replace(
                options,
                custom=tuple(sorted({**dict(options.custom), **dict(custom)}.items())),
                once=once,
                tags=(*options.tags, *tags_of(whose)),
            )
        )

    async def append(
        self,
        transaction_id: str,
        ledger_id: int,
        data: bytes,
        *,
        expect: int | None = None,
    ) -> EntriesAppended:
        """Append a record batch as one entry of a transaction's ledger that this process writes.

        The transaction's state is read after the call began, so that a transaction that has ended
        rejects the append. Raises: TransactionAborted, TransactionCommitted, and the errors of
        appends.
        """
        check = asyncio.ensure_future(self._checks.check(transaction_id))
        try:
            done = await self._engine.appends.append_batch(ledger_id, data, expect=expect)
        except errors.QuorumLogError:
            # The append may have failed because the transaction has ended, which `check` reports.
            await check
            raise
        finally:
            check.add_done_callback(_retrieved)
        await check
        return done

    async def commit(
        self,
        transaction_id: str,
        ledgers: tuple[Sealed, ...],
        *,
        overwrite: bool = False,
        token: int | None = None,
    ) -> Transaction:
        """Publish these ledgers on the log exactly once; delete the transaction's other ledgers.

        A retry gets the first answer. Raises: NoSuchTransaction, TransactionAborted, LogFenced,
        InvalidRequest, NoSuchLog, LogClosed; TransactionCommitted if other ledgers were published.
        """
        found = await self._client.get(transaction_id)
        if found.is_open:
            _check_names(found, ledgers)
        if found.is_open and (ledgers or overwrite):
            if overwrite:
                # Checked first, because a rejection by the metadata service would end the owner.
                check_unprotected(await self._store.get(found.log))
            try:
                call = Publish(transaction_id, ledgers, overwrite, token)
                done = await self._logs.publish(found.log, call)
                self.published_ledgers += len(done.ledgers)
            except errors.InvalidRequest:
                if (await self._client.get(transaction_id)).is_open:
                    raise
                # The transaction ended meanwhile, and its ledgers were deleted.
                done = await self._commit_nothing(transaction_id, ledgers)
        else:
            done = await self._commit_nothing(transaction_id, ledgers)
        self.clear()
        await self._copy_places(done)
        return done

    async def _copy_places(self, done: Transaction) -> None:
        """Send bookies copies of the published ledgers' first offsets (rule 18f). A retry sends the
        copies again, because the first gateway may have ended before it sent them.
        """
        if done.ledgers:
            work = self._engine.copy_rows([ledger.ledger_id for ledger in done.ledgers])
            await asyncio.wait({self._logs.ownership.task(work)}, timeout=_COPIES_S)

    async def _commit_nothing(
        self, transaction_id: str, ledgers: tuple[Sealed, ...]
    ) -> Transaction:
        """End a transaction without publishing ledgers, or get the first answer if it has ended."""
        done = await self._store.commit(transaction_id, ledgers, None)
        assert not isinstance(done, RowChanged), "expected a commit that changes no log"
        return done.transaction

    async def abort(self, transaction_id: str) -> Transaction:
        """Abort the transaction. No ledger is published. Idempotent.

        Raises: NoSuchTransaction; TransactionCommitted if it was committed before.
        """
        done = await self._client.abort(transaction_id)
        self.clear()
        return done

    def clear(self) -> None:
        """Delete unpublished ledgers in one background task. The sweep deletes further ledgers."""
        if self._clearing is None or self._clearing.done():
            work = self._logs.orphans.delete_some(older_than_s=self._logs.times.orphan_age_s)
            self._clearing = self._logs.ownership.task(work)


class _Checks:
    """Checks that transactions are OPEN, with one request for all appends that wait for it."""

    def __init__(self, client: TransactionClient) -> None:
        self._client = client
        self._running: dict[str, asyncio.Task[TransactionState]] = {}
        self._next: dict[str, asyncio.Task[TransactionState]] = {}

    async def check(self, transaction_id: str) -> None:
        """Raise unless the transaction is OPEN. The state is from a request that
        is sent after this call begins, never from a request in flight.
        """
        following = self._next.get(transaction_id)
        if following is None:
            following = asyncio.create_task(self._ask(transaction_id))
            self._next[transaction_id] = following
        try:
            state = await asyncio.shield(following)
        except errors.MetadataUnavailable as error:
            # The records may be in the ledger, but the transaction may have ended.
            raise errors.MetadataUnavailable(error.detail, outcome=errors.UNKNOWN) from error
        if state is not TransactionState.OPEN:
            raise _ended(state)

    async def _ask(self, transaction_id: str) -> TransactionState:
        running = self._running.get(transaction_id)
        if running is not None:
            await asyncio.wait({running})
        # Later callers share the next request.
        task = self._next.pop(transaction_id)
        task.add_done_callback(_retrieved)
        self._running[transaction_id] = task
        try:
            return await self._client.renew(transaction_id)
        finally:
            if self._running.get(transaction_id) is task:
                del self._running[transaction_id]


def tags_of(whose: TransactionAttempt) -> tuple[tuple[str, str], ...]:
    """The tags by which a ledger's metadata names its transaction."""
    tags = [(TRANSACTION_TAG, whose.transaction)]
    if whose.partition is not None:
        tags.append((PARTITION_TAG, str(whose.partition)))
    if whose.attempt is not None:
        tags.append((ATTEMPT_TAG, str(whose.attempt)))
    return tuple(tags)


def _check_names(found: Transaction, ledgers: Sequence[Sealed]) -> None:
    """Raise InvalidRequest if a commit names another transaction's ledger, or one ledger twice. The
    owner would find this too, but only after it has drained its appends for the commit.
    """
    known = {ledger.ledger_id for ledger in found.ledgers}
    seen: set[int] = set()
    wrong = []
    for index, sealed in enumerate(ledgers):
        detail = ""
        if sealed.ledger_id not in known:
            detail = f"ledger {sealed.ledger_id} does not belong to this transaction"
        elif sealed.ledger_id in seen:
            detail = f"ledger {sealed.ledger_id} is named twice"
        seen.add(sealed.ledger_id)
        if detail:
            wrong.append({"pointer": f"/ledgers/{index}", "detail": detail})
    if wrong:
        raise errors.InvalidRequest(wrong[0]["detail"], errors=wrong)


def _ended(state: TransactionState) -> errors.QuorumLogError:
    if state is TransactionState.COMMITTED:
        return errors.TransactionCommitted()
    return errors.TransactionAborted()


def _retrieved(task: "asyncio.Future[None] | asyncio.Task[TransactionState]") -> None:
    """Retrieve a task's error, so that asyncio doesn't log the error if its waiter is gone."""
    if not task.cancelled():
        task.exception()
