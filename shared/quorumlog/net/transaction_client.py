"""A gateway's client for transactions in the metadata service."""

from quorumlog.errors import VersionConflict
from quorumlog.net.metadata_requests import MetadataRequests, current_of, new_attempt
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionState
from quorumlog.wire.log_bodies import LogRow
from quorumlog.wire.transaction_bodies import (
    SealedBody,
    TransactionAlive,
    TransactionBeginBody,
    TransactionCommitBody,
    TransactionDone,
    TransactionRow,
)


class TransactionClient:
    """Begins, asks and ends transactions. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def begin(
        self, log: str, *, app: str | None, version: int | None, expires_in_s: int
    ) -> tuple[Transaction, bool]:
        """Begin a transaction: a new one and True, or the existing one of this app and version.

        Raises: NoSuchLog, LogClosed.
        """
        # The client draws the id, so that a retry of the request begins no second transaction.
        drawn = new_attempt()
        body = TransactionBeginBody(
            id=drawn, log=log, app=app, version=version, expires_in_s=expires_in_s
        )
        row = await self._client.ask("POST", "/v1/transactions", body, gives=TransactionRow)
        return row.to_core(), row.id == drawn and row.state is TransactionState.OPEN

    async def get(self, transaction_id: str) -> Transaction:
        """One transaction. Raises: NoSuchTransaction."""
        path = f"/v1/transactions/{transaction_id}"
        return (await self._client.ask("GET", path, gives=TransactionRow)).to_core()

    async def renew(self, transaction_id: str) -> TransactionState:
        """Extend the transaction's life, and return its state. Raises: NoSuchTransaction."""
        path = f"/v1/transactions/{transaction_id}/renew"
        return (await self._client.ask("POST", path, gives=TransactionAlive)).state

    async def abort(self, transaction_id: str) -> Transaction:
        """Abort: nothing is published. Raises: NoSuchTransaction, TransactionCommitted."""
        path = f"/v1/transactions/{transaction_id}/abort"
        return (await self._client.ask("POST", path, gives=TransactionRow)).to_core()

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> tuple[Transaction | None, LogMetadata | None]:
        """Commit with these ledgers; `log` is the log's row after the publication.

        Returns the transaction, None where the log has another version; and the log's row as it is
        then, None where this call did not change it. Returns once that is settled.
        Raises: NoSuchTransaction, TransactionAborted, TransactionCommitted, NoSuchLog,
        InvalidRequest; MetadataUnavailable only where nothing was sent.
        """
        body = TransactionCommitBody(
            ledgers=tuple(
                SealedBody(ledger_id=sealed.ledger_id, last_entry=sealed.last_entry)
                for sealed in ledgers
            ),
            row=None if log is None else LogRow.from_core(log),
            attempt=new_attempt(),
        )
        path = f"/v1/transactions/{transaction_id}/commit"
        try:
            done = await self._client.ask("POST", path, body, gives=TransactionDone, settles=True)
        except VersionConflict as error:
            return None, current_of(error, LogRow).to_core()
        return done.transaction.to_core(), None if done.row is None else done.row.to_core()
