"""The logs' rows, as the gateway asks the metadata service for them."""

from collections.abc import Callable, Sequence

from quorumlog.errors import UNKNOWN, DatabaseWentBack, NoSuchLog, QuorumLogError
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.log.messages import Committed, RowChanged
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed


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
