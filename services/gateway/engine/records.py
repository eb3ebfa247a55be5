"""Appends to transactions' ledgers: record batches, in the form of the log that may publish them.

One request is one entry (rule 25). The writer counts the records before it.
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
    """The transaction that a ledger belongs to, if any."""
    return dict(row.extra).get(TRANSACTION_TAG) if row.extra else None


def is_of_log(row: LedgerMetadata) -> bool:
    """Whether only a log may write and close the ledger (rule 27). A transaction's ledger is
    written and sealed by a task attempt instead.
    """
    return row.log is not None and transaction_of(row) is None


class RecordAppends:
    """Appends of records, through a handle of this process or the writer's gateway."""

    def __init__(
        self,
        handles: Mapping[int, WriteHandle],
        rows: Rows,
        peers: Peers,
        *,
        writer_of: Callable[[LedgerMetadata], Writer],
        prefer_ledger_state: Callable[[QuorumLogError, int], Awaitable[QuorumLogError]],
    ) -> None:
        """`writer_of` finds the writer to forward to; `prefer_ledger_state` replaces the error of a
        lost writer by the ledger's state.
        """
        self._handles, self._rows, self._peers = handles, rows, peers
        self._writer_of, self._prefer_ledger_state = writer_of, prefer_ledger_state

    async def transaction_of(self, ledger_id: int) -> str | None:
        """The transaction that a ledger belongs to, if any; None for an unknown ledger too.

        Raises: MetadataUnavailable.
        """
        handle = self._handles.get(ledger_id)
        if handle is not None:
            return transaction_of(handle.access_row)
        try:
            return transaction_of(await self._rows.row(ledger_id))
        except NoSuchLedger:
            return None  # the following append reports it

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
            raise await self._prefer_ledger_state(error, ledger_id) from error

    async def append_here(
        self, ledger_id: int, records: Sequence[Record], *, expect: int | None = None
    ) -> Appended:
        """Append to a ledger of this process, for its own clients and other gateways."""
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
            # No await between counting and assigning the id, so that both have one order.
            submitted = handle.append((data,), len(data), expect)
        except (LedgerFenced, WriterLost) as error:
            raise await self._prefer_ledger_state(error, ledger_id) from error
        handle.records += len(records)
        return await submitted
