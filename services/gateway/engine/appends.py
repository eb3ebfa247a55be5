"""Appends to ledgers, by this process's write handle or through the gateway that is the writer.

A transaction's ledger stores record batches, in the form of the log that may publish the ledger: one
request is one entry (rule 25), and the writer counts the records before it.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import orjson

from quorumlog import errors
from quorumlog.protocol import batch, packed
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.log_bodies import PACKED_TAG, TRANSACTION_TAG
from services.gateway.engine.handles import Handles
from services.gateway.engine.peers import Peers
from services.gateway.engine.rows import is_closed
from services.gateway.interface import FRAMES, EntriesAppended

LARGE_BYTES: Final = 512 << 10
"""A batch that is compressed in a millisecond (docs/performance.md); a thread costs a tenth of that."""

_U32: Final = struct.Struct(">I")


def transaction_of(row: LedgerMetadata) -> str | None:
    """The transaction that a ledger belongs to, if any."""
    return dict(row.extra).get(TRANSACTION_TAG) if row.extra else None


def check_not_of_log(row: LedgerMetadata, instead: str) -> None:
    """Raise OwnedByLog if only a log may write and close the ledger (rule 27). A transaction's ledger
    is written and sealed by a task attempt instead.
    """
    if row.log is not None and transaction_of(row) is None:
        raise errors.OwnedByLog(instead, ledger_id=row.ledger_id, log=row.log)


async def packed_batch(data: bytes) -> bytes:
    """The batch with compressed columns where that is shorter; a thread compresses a large one, so that the event loop goes on."""
    if len(data) < LARGE_BYTES:
        return packed.pack(data)
    return await asyncio.to_thread(packed.pack, data)


class Appends:
    """The appends that this gateway takes. Keeps no state."""

    def __init__(self, handles: Handles, peers: Peers) -> None:
        """`handles` are the ledgers of this process, `peers` the other gateways."""
        self._handles, self._peers = handles, peers
        self._rows, self._gatekeeper = handles.rows, handles.gatekeeper

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> EntriesAppended:
        """Append payloads as contiguous entries; returns when they are acknowledged."""
        handle = self._handles.by_ledger.get(ledger_id)
        row = await self._row(ledger_id) if handle is None else handle.row
        if row.log is not None:
            raise errors.OwnedByLog("append to the log", ledger_id=ledger_id, log=row.log)
        if handle is None:
            frames = b"".join([part for p in payloads for part in (_U32.pack(len(p)), p)])
            told = orjson.loads(
                await self.forward(ledger_id, FRAMES, frames, password=password, expect=expect)
            )
            return EntriesAppended(
                told["first_entry"], told["last_entry"], told["last_add_confirmed"]
            )
        self._gatekeeper.check(row, password)
        try:
            submitted = handle.append(payloads, expect)
        except (errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost) as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error
        return await submitted

    async def forward(
        self,
        ledger_id: int,
        media: str,
        data: bytes,
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> bytes:
        """Pass a client's append, whose body is `data`, to the ledger's writer, another gateway: the JSON of its response."""
        row = await self._row(ledger_id)
        check_not_of_log(row, "append to the log")
        self._gatekeeper.check(row, password)
        writer, peers = self._handles.writer_of(row), self._peers
        query = "" if expect is None else f"?expect={expect}"
        path = f"/v1/ledgers/{ledger_id}/entries{query}"
        try:
            return await peers.send(
                writer, "POST", path, peers.append_s, data, media=media, password=password
            )
        except TimeoutError as error:
            raise errors.QuorumTimeout("the writer did not answer", ledger_id=ledger_id) from error
        except errors.WriterLost as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error

    def at_hand(
        self, ledger_id: int
    ) -> Callable[[Sequence[bytes]], asyncio.Future[EntriesAppended]] | None:
        """A function that begins an append without waiting, with the result of `append`. Returns None unless this process
        writes the ledger and any caller may append to it: the ledger has no password, and belongs to no log and no
        transaction. The function raises the errors of `WriteHandle.append` at once; then nothing is appended.
        """
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is None or not handle.takes_appends:
            return None
        row, own = handle.access_row, handle.row
        if own.log is not None or own.access_key or row.access_key or transaction_of(row):
            return None
        return handle.append

    async def append_batch(
        self, ledger_id: int, data: bytes, *, expect: int | None = None
    ) -> EntriesAppended:
        """Append a batch without time and place as one entry of a ledger that this process writes; returns when it is
        acknowledged.
        """
        try:
            handle = self._handles.get(ledger_id)
            if transaction_of(handle.access_row) is None:
                raise errors.OwnedByLog("it is of no transaction", ledger_id=ledger_id)
            if (PACKED_TAG, "true") in handle.access_row.extra:
                data = await packed_batch(data)
            if len(data) > batch.BATCH_BYTES_MAX:
                raise errors.TooLarge(f"a record batch has at most {batch.BATCH_BYTES_MAX} bytes")
            now_ms, count = int(datetime.now(UTC).timestamp() * 1000), handle.records
            entry = batch.placed(data, append_time_ms=now_ms, records_before=count)
            # No await since they were counted: records and entry ids have one order.
            submitted = handle.append((entry,), expect)
            handle.records += batch.decode_head(data).count
        except (errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost) as error:
            raise await self._handles.prefer_ledger_state(error, ledger_id) from error
        return await submitted

    async def transaction_of(self, ledger_id: int) -> str | None:
        """The transaction that a ledger belongs to, if any; None for an unknown ledger too.

        Raises: MetadataUnavailable.
        """
        handle = self._handles.by_ledger.get(ledger_id)
        if handle is not None:
            return transaction_of(handle.access_row)
        try:
            return transaction_of(await self._rows.row(ledger_id))
        except errors.NoSuchLedger:
            return None  # the following append reports it

    async def _row(self, ledger_id: int) -> LedgerMetadata:
        """The row; a CLOSED one from the primary, with an end that may be told, since the append is refused then."""
        row = await self._rows.row(ledger_id)
        if is_closed(row):
            row = await self._rows.fresh(ledger_id)
        return await self._handles.ends.told(row)
