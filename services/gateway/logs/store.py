"""The logs' rows, as the gateway asks the metadata service for them."""

from collections.abc import Sequence

from quorumlog.errors import QuorumLogError
from quorumlog.net.log_client import LogClient
from quorumlog.net.transaction_client import TransactionClient
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import Committed, RowChanged
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.transaction import Sealed


class MetadataLogs:
    """The rows of logs and of transactions, in the words of the logs' machines.

    All methods may raise MetadataUnavailable, those that name a log NoSuchLog.
    """

    def __init__(self, client: LogClient, transactions: TransactionClient) -> None:
        """Keeps no state."""
        self._client, self._transactions = client, transactions
        self.transaction = transactions.get
        self.database_ms = client.database_ms
        self.get = client.get
        self.create = client.create
        self.fork = client.fork
        self.list = client.list
        self.heads = client.heads
        self.orphans = client.orphans
        self.delete_unnamed = client.delete_unnamed

    async def unshared(self, let_go: Sequence[LedgerMetadata]) -> Sequence[LedgerMetadata]:
        """Of the ledgers that a log names no more those that no fork names, nor ever will (rule 27a). None where that can't
        be asked now: what their log did is done, and the sweep deletes and tells of them later.
        """
        if not let_go:
            return ()
        try:
            shared = await self._client.shared_among([row.ledger_id for row in let_go])
        except QuorumLogError:
            return ()
        return [row for row in let_go if row.ledger_id not in shared]

    async def cas(self, log: LogMetadata) -> LogMetadata | RowChanged:
        """Replace the row of this version: the row with its new version, unless it changed."""
        is_done, row = await self._client.cas(log)
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
