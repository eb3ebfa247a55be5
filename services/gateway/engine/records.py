"""Appends to ledgers of transactions: record batches, as the log holds them that they may come onto.

One request is one entry (rule 25). How many records precede it, its writer counts.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

from quorumlog.errors import (
    NOT_DONE,
    LedgerFenced,
    NoSuchLedger,
    OwnedByLog,
    QuorumLogError,
    TooLarge,
    WriterLost,
)
from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from quorumlog.protocol.metadata import LedgerMetadata, Writer
from quorumlog.wire.transaction_bodies import TRANSACTION_TAG
from services.gateway.engine.handle import WriteHandle
from services.gateway.engine.peers import Peers
from services.gateway.engine.rows import Rows, is_closed
from services.gateway.interface import Appended


def transaction_of(row: LedgerMetadata) -> str | None:
    """The transaction that a ledger was written in, if any."""
    return dict(row.extra).get(TRANSACTION_TAG) if row.extra else None


def is_of_log(row: LedgerMetadata) -> bool:
    """Whether only a log may write and close a ledger (rule 27): not that of a transaction, which a
    task attempt writes and seals.
    """
    return row.log is not None and transaction_of(row) is None


class RecordAppends:
    """Appends of records, to a handle of this process or through the writer's gateway."""

    def __init__(
        self,
        handles: Mapping[int, WriteHandle],
        rows: Rows,
        peers: Peers,
        *,
        writer_of: Callable[[LedgerMetadata], Writer],
        end_or: Callable[[QuorumLogError, int], Awaitable[QuorumLogError]],
    ) -> None:
        """`writer_of` finds the writer to forward to, `end_or` says more of one that is lost."""
        self._handles, self._rows, self._peers = handles, rows, peers
        self._writer_of, self._end_or = writer_of, end_or

    async def transaction_of(self, ledger_id: int) -> str | None:
        """The transaction that a ledger is of, if any; None too where there is no such ledger.

        Raises: MetadataUnavailable where nobody can say now.
        """
        handle = self._handles.get(ledger_id)
        if handle is not None:
            return transaction_of(handle.access_row)
        try:
            return transaction_of(await self._rows.row(ledger_id))
        except NoSuchLedger:
            return None  # who goes on meets it again

    async def append(
        self, ledger_id: int, records: Sequence[Record], *, expect: int | None = None
    ) -> Appended:
        """Append records as one entry; returns when it is acknowledged."""
        if ledger_id in self._handles:
            return await self.append_here(ledger_id, records, expect=expect)
        row = await self._rows.row(ledger_id)
        if is_closed(row):
            row = await self._rows.fresh(ledger_id)
        writer = self._writer_of(row)
        data = batch.encode(records, append_time_ms=0, records_before=0)
        try:
            return await self._peers.append_records(writer, ledger_id, data, expect=expect)
        except WriterLost as error:
            raise await self._end_or(error, ledger_id) from error

    async def append_here(
        self, ledger_id: int, records: Sequence[Record], *, expect: int | None = None
    ) -> Appended:
        """Append to a ledger of this process, for its own clients and other gateways'."""
        handle = self._handles.get(ledger_id)
        if handle is None:
            raise WriterLost(
                "this process has no write handle", ledger_id=ledger_id, outcome=NOT_DONE
            )
        if transaction_of(handle.access_row) is None:
            raise OwnedByLog("it is of no transaction", ledger_id=ledger_id)
        data = batch.encode(
            records,
            append_time_ms=int(datetime.now(UTC).timestamp() * 1000),
            records_before=handle.records,
        )
        if len(data) > batch.BATCH_BYTES_MAX:
            raise TooLarge(f"a record batch has at most {batch.BATCH_BYTES_MAX} bytes")
        try:
            # No wait between the count and the id: they follow each other's order.
            submitted = handle.append((data,), len(data), expect)
        except (LedgerFenced, WriterLost) as error:
            raise await self._end_or(error, ledger_id) from error
        handle.records += len(records)
        return await submitted
