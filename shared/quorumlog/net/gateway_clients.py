"""A gateway's clients of the metadata service, for logs, transactions, tokens and the audit log."""

from collections.abc import Sequence
from datetime import datetime

from quorumlog.errors import (
    AlreadyDone,
    LogExists,
    MetadataUnavailable,
    NoSuchLedger,
    VersionConflict,
)
from quorumlog.net.metadata_requests import (
    MetadataRequests,
    current_of,
    new_attempt,
    query_of,
    shown_in,
)
from quorumlog.net.timers import HeardClock
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionState
from quorumlog.wire import log_bodies, token_bodies
from quorumlog.wire.bodies import Body, RowDelete


class LogClient:
    """Reads and changes log metadata. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests, clock: HeardClock | None = None) -> None:
        """`clock`: updated with the database's time from each answer."""
        self._client = client
        self.clock = clock or HeardClock()
        self.database_ms = self.clock.now_ms

    def _heard(self, row: LogMetadata) -> LogMetadata:
        """Update the clock with the time of `row`, and return `row`."""
        if row.read_ms:
            self.clock.hear(row.read_ms)
        return row

    async def get(self, name: str, known: LogMetadata | None = None) -> LogMetadata:
        """A log's metadata, from the primary. If `known` is current, the service does not send the
        metadata again, which is large if the log has many ledgers, and this method returns `known`.

        Raises: NoSuchLog.
        """
        query = None
        if known is not None and known.attempt:
            query = query_of(known=known.attempt, created_at=known.created_at)
        path = f"/v1/logs/{name}"
        found = await self._client.ask("GET", path, gives=log_bodies.LogRead, query=query)
        row = known if found.row is None and query is not None else found.row
        if row is None:
            raise MetadataUnavailable("the metadata service sent no metadata: retry", log=name)
        self.clock.hear(found.read_ms)
        return row

    async def is_done(self, once: Once) -> bool:
        """Whether the request `once` was carried out. Raises: InvalidRequest if its content differs."""
        path, query = f"/v1/requests/{once.token}", query_of(content=once.content)
        return (await self._client.ask("GET", path, gives=log_bodies.Done, query=query)).done

    async def create(
        self, log: LogMetadata, *, once: Once | None = None
    ) -> tuple[LogMetadata, bool]:
        """Create a log. Returns the metadata of the log with this name, and whether this call
        created it. A late copy of the client's request `once` creates nothing.

        Raises: NoSuchLog if an earlier copy created the log, and the log has been deleted since.
        """
        return await self._create(
            log_bodies.LogCreateBody(row=log, attempt=new_attempt(), once=once)
        )

    async def fork(
        self, log: LogMetadata, source: LogMetadata, at: int
    ) -> tuple[LogMetadata, bool]:
        """Create a log as a fork of `source`. Returns the metadata of the log with this name, and
        whether this call created it. The fork shares the ledgers that the source then has below
        the offset `at`. All other fields are those of `log`, which has no ledgers.

        Raises: NoSuchLog for the source, LogDeleted; InvalidRequest if the source begins after
        `at`, or has unsealed ledgers below `at`.
        """
        fork = log_bodies.ForkBody(source=source.name, created_at=source.created_at, at=at)
        return await self._create(
            log_bodies.LogCreateBody(row=log, attempt=new_attempt(), fork=fork)
        )

    async def _create(self, body: log_bodies.LogCreateBody) -> tuple[LogMetadata, bool]:
        try:
            row = await self._client.ask("POST", "/v1/logs", body, gives=LogMetadata, settles=True)
        except LogExists as error:
            return self._heard(current_of(error, LogMetadata)), False
        return self._heard(row), True

    async def cas(self, log: LogMetadata, *, once: Once | None = None) -> tuple[bool, LogMetadata]:
        """Replace a log's metadata. Returns, once the outcome is certain, whether this call
        replaced it, and the current metadata. A late copy of the request `once` replaces nothing.

        Raises: NoSuchLog, InvalidRequest; MetadataUnavailable only if nothing was sent.
        """
        body = log_bodies.LogChange(row=log, attempt=new_attempt(), once=once)
        path = f"/v1/logs/{log.name}"
        try:
            new = await self._client.ask("PUT", path, body, gives=LogMetadata, settles=True)
        except VersionConflict as error:
            return False, self._heard(current_of(error, LogMetadata))
        except AlreadyDone as error:
            return True, self._heard(current_of(error, LogMetadata))
        return True, self._heard(new)

    async def delete(self, log: LogMetadata) -> LogMetadata | None:
        """Delete a log, and free its name. Returns None once the outcome is certain, or the current
        metadata if the log has another version. Raises: NoSuchLog.
        """
        body = RowDelete(version=log.version, row_attempt=log.attempt, attempt=new_attempt())
        path = f"/v1/logs/{log.name}"
        try:
            await self._client.ask("DELETE", path, body, gives=Body, settles=True)
        except VersionConflict as error:
            return current_of(error, LogMetadata)
        return None

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        prefix: str = "",
        shown: Sequence[str] | None = None,
    ) -> tuple[list[LogMetadata], str | None]:
        """One page of the logs whose names begin with `prefix`, by name, and the `after` of the
        next page (None at the end). `shown` limits the logs (`wire/bodies.py`, SHOWN).
        """
        query = query_of(limit=limit, after=after, prefix=prefix or None) | shown_in(shown)
        page = await self._client.ask("GET", "/v1/logs", gives=log_bodies.LogListBody, query=query)
        return [self._heard(row) for row in page.logs], page.next

    async def shared_among(self, ledger_ids: Sequence[int]) -> frozenset[int]:
        """Those of the given ledgers (at most LOG_LEDGERS_MAX) that forks reference, from the primary."""
        body = log_bodies.SharedAsk(ledgers=tuple(ledger_ids))
        # The caller deletes ledgers based on this answer, so it needs proof (rule 18a).
        found = await self._client.ask(
            "POST", "/v1/shared-ledgers", body, gives=log_bodies.LedgerIds, proof=True
        )
        return frozenset(found.ledgers)

    async def orphans(
        self,
        *,
        older_than_s: float,
        after: int | None = None,
        limit: int = 100,
        log: str | None = None,
    ) -> tuple[int, ...]:
        """Ledgers with ids above `after`, ascending, that were created for a log, but that no log
        has named for `older_than_s`. With `log`: only ledgers that were in a log of this name.
        """
        query = query_of(older_than_s=int(older_than_s), limit=limit, after=after, log=log)
        # The caller fences and deletes these ledgers, so the answer needs proof (rule 18a).
        found = await self._client.ask(
            "GET", "/v1/orphans", gives=log_bodies.LedgerIds, query=query, proof=True
        )
        return found.ledgers

    async def delete_unnamed(self, ledger_id: int) -> None:
        """Delete a ledger that was created for a log, unless a log names it in the same transaction.

        Raises: OwnedByLog; NoSuchLedger if the ledger never existed. Deleting twice is harmless.
        """
        try:
            await self._client.ask("DELETE", f"/v1/orphans/{ledger_id}", gives=Body, settles=True)
        except NoSuchLedger as error:
            if error.members.get("deleted") is not True:
                raise


class TransactionClient:
    """Begins, reads and ends transactions. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def begin(
        self, log: str, *, app: str | None, version: int | None, expires_in_s: int
    ) -> tuple[Transaction, bool]:
        """Begin a transaction (True), or return the existing transaction of this app and version (False).

        Raises: NoSuchLog, LogClosed.
        """
        # The id is chosen here, so that a retry of the request begins no second transaction.
        drawn = new_attempt()
        body = log_bodies.TransactionBeginBody(
            id=drawn, log=log, app=app, version=version, expires_in_s=expires_in_s
        )
        row = await self._client.ask("POST", "/v1/transactions", body, gives=Transaction)
        return row, row.id == drawn and row.state is TransactionState.OPEN

    async def get(self, transaction_id: str) -> Transaction:
        """One transaction. Raises: NoSuchTransaction."""
        path = f"/v1/transactions/{transaction_id}"
        return await self._client.ask("GET", path, gives=Transaction)

    async def renew(self, transaction_id: str) -> TransactionState:
        """Extend the transaction's life, and return its state. Raises: NoSuchTransaction."""
        path = f"/v1/transactions/{transaction_id}/renew"
        return (await self._client.ask("POST", path, gives=log_bodies.TransactionAlive)).state

    async def abort(self, transaction_id: str) -> Transaction:
        """Abort a transaction. Raises: NoSuchTransaction, TransactionCommitted."""
        path = f"/v1/transactions/{transaction_id}/abort"
        return await self._client.ask("POST", path, gives=Transaction)

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> tuple[Transaction | None, LogMetadata | None]:
        """Commit with these ledgers; `log` is the log's metadata after the commit.

        Returns, once the outcome is certain, the transaction (None if the log has another version),
        and the log's current metadata (None if this call did not change it). Raises:
        NoSuchTransaction, TransactionAborted, TransactionCommitted, NoSuchLog, InvalidRequest;
        MetadataUnavailable only if nothing was sent.
        """
        body = log_bodies.TransactionCommitBody(ledgers=ledgers, row=log, attempt=new_attempt())
        path = f"/v1/transactions/{transaction_id}/commit"
        try:
            done = await self._client.ask(
                "POST", path, body, gives=log_bodies.TransactionDone, settles=True
            )
        except VersionConflict as error:
            return None, current_of(error, LogMetadata)
        return done.transaction, done.row


class AuditClient:
    """Reads the audit log. Raises MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def page(
        self, *, after: int, since: datetime | None, target: str | None, limit: int
    ) -> token_bodies.AuditList:
        """A page of records with numbers above `after`, in ascending order."""
        when = None if since is None else since.isoformat()
        query = query_of(after=after, since=when, target=target, limit=limit)
        return await self._client.ask("GET", "/v1/audit", gives=token_bodies.AuditList, query=query)


class TokenClient:
    """Reads and changes access tokens. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def create(
        self, token: token_bodies.TokenFields, *, expires_in_s: int | None
    ) -> token_bodies.TokenRow:
        """Store a token. Raises: InvalidRequest."""
        body = token_bodies.TokenCreate(
            token=token, expires_in_s=expires_in_s, attempt=new_attempt()
        )
        return await self._client.ask(
            "POST", "/v1/tokens", body, gives=token_bodies.TokenRow, settles=True
        )

    async def revoke(self, token_id: str) -> None:
        """Delete a token. Raises: NoSuchToken."""
        body = token_bodies.TokenRevoke(attempt=new_attempt())
        path = f"/v1/tokens/{token_id}"
        await self._client.ask("DELETE", path, body, gives=Body, settles=True)

    async def list(self, known: str | None = None) -> token_bodies.TokenList:
        """All tokens, unless `known` is the list's current version. Requires proof that the
        database did not go back, because a restored database may list revoked tokens (rule 18a).
        """
        query = query_of(known=known)
        return await self._client.ask(
            "GET", "/v1/tokens", gives=token_bodies.TokenList, query=query, proof=True
        )
