"""Transactions as this gateway serves them: begin, write, end.

A transaction's ledgers are written by task attempts, each by one process, and sealed. They hold
record batches, as the log will. Nobody sees them before the commit has put them onto the log, which
the log's owner does (rule 28); what is not published is fenced and deleted.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import (
    UNKNOWN,
    InvalidRequest,
    MetadataUnavailable,
    QuorumLogError,
    TransactionAborted,
    TransactionCommitted,
)
from quorumlog.net.transaction_client import TransactionClient
from quorumlog.protocol.batch import Record
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionState
from quorumlog.wire.transaction_bodies import ATTEMPT_TAG, PARTITION_TAG, TRANSACTION_TAG
from services.gateway.engine import Engine
from services.gateway.interface import Appended, LedgerOptions
from services.gateway.logs.driver import options_of
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ports import LogStore, Publish
from services.gateway.logs.sweep import ORPHAN_AGE_S

log = logging.getLogger(__name__)

EXPIRES_IN_S: Final = 3600
"""Longer than a stage computes before its first append (taste)."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose ledger it is: a transaction's, for one attempt at one partition."""

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
        store: LogStore,
        client: TransactionClient,
        orphan_age_s: float = ORPHAN_AGE_S,
    ) -> None:
        """`orphan_age_s`: as the sweep's, for ledgers that no log names."""
        self._engine, self._logs, self._store, self._client = engine, logs, store, client
        self._orphan_age_s = orphan_age_s
        self._checks = _Checks(client)
        self._clearing: asyncio.Task[None] | None = None
        self.published_ledgers = 0
        """Ledgers that came onto a log by commits that were answered here."""

    async def begin(
        self, name: str, *, app: str | None, version: int | None, expires_in_s: int
    ) -> tuple[Transaction, bool]:
        """A new transaction on a log, and True; or the one there is of this app and version.

        Raises: NoSuchLog, LogClosed.
        """
        return await self._client.begin(name, app=app, version=version, expires_in_s=expires_in_s)

    async def get(self, transaction_id: str) -> Transaction:
        """One transaction. Raises: NoSuchTransaction."""
        return await self._client.get(transaction_id)

    async def create_ledger(
        self,
        whose: Attempt,
        *,
        custom: tuple[tuple[str, str], ...] = (),
        idempotency_key: str | None = None,
    ) -> LedgerMetadata:
        """A ledger like the log's own ones, whose only writer is this process.

        Raises: NoSuchTransaction, TransactionAborted, TransactionCommitted, NoSuchLog,
        NotEnoughBookies.
        """
        found = await self._client.get(whose.transaction)
        if not found.is_open:
            raise _ended(found.state)
        options = options_of(await self._store.get(found.log))
        return await self._engine.create(
            LedgerOptions(
                ensemble_size=options.ensemble_size,
                write_quorum=options.write_quorum,
                ack_quorum=options.ack_quorum,
                digest=options.digest,
                custom=tuple(sorted({**dict(options.custom), **dict(custom)}.items())),
                allow_degraded=options.allow_degraded,
                idempotency_key=idempotency_key,
                tags=tags_of(whose),
                log=found.log,
            )
        )

    async def append(
        self,
        transaction_id: str,
        ledger_id: int,
        records: Sequence[Record],
        *,
        expect: int | None = None,
    ) -> Appended:
        """Append records as one entry of a transaction's ledger.

        Whether the transaction is OPEN is asked after the call began, so what was ended before
        refuses it. Raises: TransactionAborted, TransactionCommitted, and what appends raise.
        """
        check = asyncio.ensure_future(self._checks.check(transaction_id))
        try:
            done = await self._engine.append_records(ledger_id, records, expect=expect)
        except QuorumLogError:
            # That it was ended says more: its ledgers are fenced and deleted then.
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
        """Put these ledgers onto the log, once, and drop the other ones of the transaction.

        A repeat gets the first answer. Raises: NoSuchTransaction, TransactionAborted, LogFenced,
        InvalidRequest, NoSuchLog, LogClosed; TransactionCommitted when others were published.
        """
        found = await self._client.get(transaction_id)
        if found.is_open:
            _check_names(found, ledgers)
            call = Publish(transaction_id, ledgers, overwrite, token)
            try:
                done = await self._commit_open(found.log, call)
            except InvalidRequest:
                if (await self._client.get(transaction_id)).is_open:
                    raise
                # It was ended meanwhile, and its ledgers went.
                done, _ = await self._store.commit(transaction_id, ledgers, None)
        else:
            done, _ = await self._store.commit(transaction_id, ledgers, None)
        self.clear()
        return done

    async def _commit_open(self, name: str, call: Publish) -> Transaction:
        if not call.ledgers and not call.overwrite:
            done, _ = await self._store.commit(call.transaction, (), None)
            return done
        done = await self._logs.publish(name, call)
        self.published_ledgers += len(done.ledgers)
        return done

    async def abort(self, transaction_id: str) -> Transaction:
        """End it; nothing of it is published. Again is the same.

        Raises: NoSuchTransaction; TransactionCommitted, and nothing is changed.
        """
        done = await self._client.abort(transaction_id)
        self.clear()
        return done

    def clear(self) -> None:
        """Delete what was not published soon; the sweep does what this does not reach."""
        if self._clearing is None or self._clearing.done():
            self._clearing = self._logs.ownership.task(self._clear())

    async def _clear(self) -> None:
        await self._logs.delete_orphans(older_than_s=self._orphan_age_s)


class _Checks:
    """Asks whether transactions are OPEN, once for all appends that came before the question."""

    def __init__(self, client: TransactionClient) -> None:
        self._client = client
        self._running: dict[str, asyncio.Task[TransactionState]] = {}
        self._next: dict[str, asyncio.Task[TransactionState]] = {}

    async def check(self, transaction_id: str) -> None:
        """Raise unless it is OPEN, by a question that is asked after this call began."""
        following = self._next.get(transaction_id)
        if following is None:
            following = asyncio.create_task(self._ask(transaction_id))
            self._next[transaction_id] = following
        try:
            state = await asyncio.shield(following)
        except MetadataUnavailable as error:
            # The records may be in the ledger; whether that counts, nobody can say now.
            raise MetadataUnavailable(error.detail, outcome=UNKNOWN) from error
        if state is not TransactionState.OPEN:
            raise _ended(state)

    async def _ask(self, transaction_id: str) -> TransactionState:
        running = self._running.get(transaction_id)
        if running is not None:
            await asyncio.wait({running})
        # Who comes from here on shares the next question.
        task = self._next.pop(transaction_id)
        task.add_done_callback(_retrieved)
        self._running[transaction_id] = task
        try:
            return await self._client.renew(transaction_id)
        finally:
            if self._running.get(transaction_id) is task:
                del self._running[transaction_id]


def tags_of(whose: Attempt) -> tuple[tuple[str, str], ...]:
    """How a ledger's row names its transaction."""
    tags = [(TRANSACTION_TAG, whose.transaction)]
    if whose.partition is not None:
        tags.append((PARTITION_TAG, str(whose.partition)))
    if whose.attempt is not None:
        tags.append((ATTEMPT_TAG, str(whose.attempt)))
    return tuple(tags)


def _check_names(found: Transaction, ledgers: Sequence[Sealed]) -> None:
    """Raise InvalidRequest where a commit names what is none of its ledgers, before the log's
    owner drains for it.
    """
    known = {ledger.ledger_id for ledger in found.ledgers}
    seen: set[int] = set()
    errors = []
    for index, sealed in enumerate(ledgers):
        detail = ""
        if sealed.ledger_id not in known:
            detail = f"ledger {sealed.ledger_id} is none of this transaction"
        elif sealed.ledger_id in seen:
            detail = f"ledger {sealed.ledger_id} is named twice"
        seen.add(sealed.ledger_id)
        if detail:
            errors.append({"pointer": f"/ledgers/{index}", "detail": detail})
    if errors:
        raise InvalidRequest(errors[0]["detail"], errors=errors)


def _ended(state: TransactionState) -> QuorumLogError:
    if state is TransactionState.COMMITTED:
        return TransactionCommitted()
    return TransactionAborted()


def _retrieved(task: "asyncio.Future[None] | asyncio.Task[TransactionState]") -> None:
    """An error that nobody waits for any more is not told as forgotten."""
    if not task.cancelled():
        task.exception()
