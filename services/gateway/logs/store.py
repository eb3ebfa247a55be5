"""The logs' rows, as the log manager asks for them."""

from collections.abc import Sequence

from quorumlog.net.log_client import LogClient
from quorumlog.net.transaction_client import TransactionClient
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.transaction import Sealed, Transaction
from services.gateway.logs.ports import LogChanged


class MetadataLogs:
    """The metadata service's rows (`ports.LogStore`)."""

    def __init__(self, client: LogClient, transactions: TransactionClient) -> None:
        self._client, self._transactions = client, transactions
        self.transaction = transactions.get
        self.database_ms = client.database_ms
        self.get = client.get
        self.create = client.create
        self.heads = client.heads
        self.delete_unnamed = client.delete_unnamed

    async def cas(self, log: LogMetadata) -> LogMetadata:
        """The row with its new version. Raises LogChanged, NoSuchLog."""
        is_done, row = await self._client.cas(log)
        if not is_done:
            raise LogChanged(row)
        return row

    async def delete(self, log: LogMetadata) -> None:
        """Delete the row of this version. Raises LogChanged, NoSuchLog."""
        other = await self._client.delete(log)
        if other is not None:
            raise LogChanged(other)

    async def list(
        self, *, after: str | None, limit: int
    ) -> tuple[Sequence[LogMetadata], str | None]:
        """One page by name."""
        return await self._client.list(after=after, limit=limit)

    async def orphans(self, *, older_than_s: float, after: int | None) -> Sequence[int]:
        """Some ledgers above an id that were made for a log and that no log names."""
        return await self._client.orphans(older_than_s=older_than_s, after=after)

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> tuple[Transaction, LogMetadata | None]:
        """End a transaction with these ledgers published (`ports.LogStore`). Raises LogChanged."""
        done, row = await self._transactions.commit(transaction_id, ledgers, log)
        if done is None:
            assert row is not None
            raise LogChanged(row)
        return done, row
