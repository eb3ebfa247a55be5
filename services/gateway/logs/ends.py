"""What the last entry of a ledger says of all before it: each batch counts the records before it."""

import asyncio
from collections.abc import Sequence
from typing import Final

from quorumlog.errors import EntryLost, EntryUnavailable, InvalidRequest, NoSuchLedger
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log.messages import LedgerEnd, Sizes
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.transaction import Sealed
from services.gateway.engine import Engine
from services.gateway.interface import LedgerView

_AT_ONCE: Final = 32
"""Ledgers of a commit whose ends are read at once."""


async def end_of(ledger: LedgerMetadata, engine: Engine) -> LedgerEnd:
    """The end of a CLOSED ledger of a log, from its last entry alone."""
    assert ledger.last_entry is not None, "it is CLOSED"
    if ledger.last_entry == NO_ENTRY:
        return LedgerEnd(0, 0, NO_ENTRY, has_producers=False)
    head = await read_head(engine, ledger.ledger_id, ledger.last_entry)
    return LedgerEnd(
        head.records_after,
        ledger.length or 0,
        ledger.last_entry,
        head.producer is not None or head.after_producer,
        head.append_time_ms,
        head.seq,
        head.is_end,
    )


async def sizes_of(ledgers: Sequence[Sealed], engine: Engine) -> Sizes:
    """The records and bytes of each ledger of a commit. A CLOSED ledger never changes, so the sizes
    may be read before the log's owner is asked.

    Raises: InvalidRequest where a ledger is not closed, ends elsewhere, or stores no records.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def size(index: int, sealed: Sealed) -> tuple[int, int, int]:
        async with room:
            pointer = f"/ledgers/{index}"
            try:
                row = await engine.get(sealed.ledger_id)
                if row.state is not State.CLOSED:
                    raise _invalid(pointer, f"ledger {sealed.ledger_id} is not closed")
                if sealed.last_entry not in (None, row.last_entry):
                    detail = f"ledger {sealed.ledger_id} ends at {row.last_entry}"
                    raise _invalid(pointer, detail)
                end = await end_of(row, engine)
            except NoSuchLedger as error:
                raise _invalid(pointer, f"there is no ledger {sealed.ledger_id}") from error
            return sealed.ledger_id, end.records, end.bytes

    return tuple(
        await asyncio.gather(*(size(index, sealed) for index, sealed in enumerate(ledgers)))
    )


def _invalid(pointer: str, detail: str) -> InvalidRequest:
    return InvalidRequest(detail, errors=[{"pointer": pointer, "detail": detail}])


async def read_head(
    engine: Engine, ledger_id: int, entry_id: int, view: LedgerView | None = None
) -> BatchHead:
    """The head of a confirmed entry's batch; for a lost entry, the head of the hole. `view`: of the ledger, as the caller
    has it.
    """
    try:
        return (await read_sized_head(engine, ledger_id, entry_id, view))[0]
    except EntryLost:
        return await _hole(engine, ledger_id, entry_id)


async def _hole(engine: Engine, ledger_id: int, entry_id: int) -> BatchHead:
    """What the neighbours of lost entries say: the lost entries held the records between (rule 31).

    At a ledger's end there is no later neighbour. A record takes at least one byte, so there are at
    least as many lost bytes as lost records: some offsets stay without a record, and none is given
    twice.
    """
    row = await engine.get(ledger_id)
    lost = row.lost_at(entry_id)
    assert lost is not None, "a loss is never taken back"
    assert row.last_entry is not None, "only a CLOSED ledger has lost entries"
    before, bytes_before, appended_ms = 0, 0, 0
    if lost[0] > 0:
        head, bytes_before = await read_sized_head(engine, ledger_id, lost[0] - 1)
        before, appended_ms = head.records_after, head.append_time_ms
    if lost[1] < row.last_entry:
        after = (await read_sized_head(engine, ledger_id, lost[1] + 1))[0].records_before
    else:
        after = before + (row.length or 0) - bytes_before
    # Append times never go back, so what was lost has at least the time of what precedes it.
    return BatchHead(after - before, appended_ms, before, None, after_producer=True)


async def read_sized_head(
    engine: Engine, ledger_id: int, entry_id: int, view: LedgerView | None = None
) -> tuple[BatchHead, int]:
    """The head of an entry's batch, and the ledger's bytes up to and including the entry."""
    found = await engine.read(ledger_id, entry_id, last=entry_id, limit=1, view=view)
    for run in found.runs:
        index = run.index(entry_id)
        if index is not None:
            entry = run.entry(index)
            try:
                return batch.decode_head(entry.payload), entry.length
            except batch.BadBatch as error:
                raise damaged(error, ledger_id, entry_id) from error
    raise EntryUnavailable(
        "a confirmed batch of a log was not found", ledger_id=ledger_id, entry_id=entry_id
    )


def damaged(error: batch.BadBatch, ledger_id: int, entry_id: int) -> EntryUnavailable:
    """The error for an entry whose bytes are no batch: damage, not absence."""
    return EntryUnavailable(str(error), ledger_id=ledger_id, entry_id=entry_id)
