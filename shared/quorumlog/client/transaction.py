"""Transactions: records that are published to a log together and exactly once, or not at all."""

from typing import Any
from urllib.parse import quote

from quorumlog import header
from quorumlog.client import checks
from quorumlog.client.ledger import created
from quorumlog.client.records import Record, encoded, size_of
from quorumlog.client.transport import Transport
from quorumlog.errors import UnexpectedEntryId


class TransactionLedger:
    """A ledger of a transaction. One task attempt writes and closes the ledger.

    Invariant: one append is under way at a time, and `entries` is the id of the next entry. So the
    server recognizes a retried append by `expect`, and stores the entry only once.
    """

    ledger_id: int
    entries: int

    def __init__(self, transport: Transport, ledger_id: int) -> None:
        """Use `Transaction.ledger`."""
        self.ledger_id = checks.offset("ledger_id", ledger_id)
        self.entries = 0
        self._transport = transport
        self._path = f"/v1/ledgers/{ledger_id}"

    def __repr__(self) -> str:
        """The class and the id, for log lines."""
        return f"TransactionLedger({self.ledger_id})"

    async def append(self, *records: bytes | Record) -> int:
        """Append records as one entry and return the entry's id once the entry is durable.

        Raises: TransactionAborted, TransactionCommitted, LedgerClosed, LedgerFenced, WriterLost.
        After these errors the task attempt has failed, and the next attempt needs a new ledger.
        """
        for record in records:
            size_of(record)
        content_type, body = encoded(records, "entries")
        entry_id = self.entries
        try:
            await self._transport.request(
                "POST",
                f"{self._path}/entries",
                body=body,
                content_type=content_type,
                params={"expect": entry_id},
                is_repeatable=True,
            )
        except UnexpectedEntryId as error:
            # An earlier attempt of this call appended the entry, because no other writer exists.
            if error.members.get("next_entry_id") != entry_id + 1:
                raise
        self.entries = entry_id + 1
        return entry_id

    async def close(self) -> dict[str, Any]:
        """Close the ledger, so that a commit can include it."""
        return await self._transport.call("POST", f"{self._path}/close")


class Transaction:
    """A handle of a transaction on a log. It keeps only the transaction's id."""

    transaction_id: str

    def __init__(self, transport: Transport, transaction_id: str) -> None:
        """Use `Client.begin` or `Client.transaction`."""
        self.transaction_id = checks.text("a transaction's id", transaction_id)
        self._transport = transport
        self._path = f"/v1/transactions/{quote(transaction_id, safe='')}"

    def __repr__(self) -> str:
        """The class and the id, for log lines."""
        return f"Transaction({self.transaction_id!r})"

    async def info(self) -> dict[str, Any]:
        """The transaction as the API shows it: state, ledgers, offsets."""
        return await self._transport.call("GET", self._path)

    async def ledger(
        self, *, partition: int | None = None, attempt: int | None = None
    ) -> TransactionLedger:
        """Create a ledger to write to. Ledgers that the commit does not include are deleted."""
        wanted = {"transaction": self.transaction_id, "partition": partition, "attempt": attempt}
        return TransactionLedger(self._transport, await created(self._transport, wanted))

    async def commit(
        self, *ledger_ids: int, overwrite: bool = False, writer_token: int | None = None
    ) -> dict[str, Any]:
        """Publish these closed ledgers to the log in this order, atomically and once.

        `overwrite`: drop the log's earlier records. `writer_token`: required for a log that was
        opened. Raises: TransactionAborted; TransactionCommitted if other ledgers were published;
        InvalidRequest.
        """
        for ledger_id in ledger_ids:
            checks.offset("a ledger's id", ledger_id)
        token = {}
        if writer_token is not None:
            token[header.WRITER_TOKEN] = str(checks.offset("writer_token", writer_token))
        wanted = {"ledgers": ledger_ids, "overwrite": overwrite}
        return await self._transport.call("POST", f"{self._path}/commit", wanted, headers=token)

    async def abort(self) -> dict[str, Any]:
        """Abort the transaction without publishing anything. Raises: TransactionCommitted."""
        return await self._transport.call("POST", f"{self._path}/abort")
