"""What the last entry of a ledger says of all before it: each batch counts what precedes it."""

from collections.abc import Awaitable, Callable

from quorumlog.errors import EntryLost, EntryUnavailable
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log.messages import LedgerEnd
from quorumlog.protocol.metadata import LedgerMetadata
from services.gateway.logs.ports import LogEngine


async def end_of(ledger: LedgerMetadata, engine: LogEngine) -> LedgerEnd:
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
    )


async def read_head(engine: LogEngine, ledger_id: int, entry_id: int) -> BatchHead:
    """What the batch in a confirmed entry says of itself; where that is lost, the hole it left."""
    try:
        return (await _read_head(engine, ledger_id, entry_id))[0]
    except EntryLost:
        return await _hole(engine, ledger_id, entry_id)


async def _hole(engine: LogEngine, ledger_id: int, entry_id: int) -> BatchHead:
    """What the neighbours of lost entries say: these held the records between theirs (rule 31).

    At a ledger's end there is no later one. A record takes a byte at least, so the lost bytes are
    no fewer than the lost records: some offsets stay without a record, and none is given twice.
    """
    row = await engine.get(ledger_id)
    lost = row.lost_at(entry_id)
    assert lost is not None, "nobody takes back that it is"
    assert row.last_entry is not None, "only a CLOSED ledger has lost entries"
    before, bytes_before = 0, 0
    if lost[0] > 0:
        head, bytes_before = await _read_head(engine, ledger_id, lost[0] - 1)
        before = head.records_after
    if lost[1] < row.last_entry:
        after = (await _read_head(engine, ledger_id, lost[1] + 1))[0].records_before
    else:
        after = before + (row.length or 0) - bytes_before
    return BatchHead(after - before, 0, before, None, after_producer=True)


async def _read_head(engine: LogEngine, ledger_id: int, entry_id: int) -> tuple[BatchHead, int]:
    """The head of an entry's batch, and the ledger's bytes up to and including it."""
    found = await engine.read(ledger_id, entry_id, last=entry_id, limit=1)
    for run in found.runs:
        index = run.index(entry_id)
        if index is not None:
            entry = run.entry(index)
            return decode_head(ledger_id, entry_id, entry.payload), entry.length
    raise EntryUnavailable(
        "a confirmed batch of a log was not found", ledger_id=ledger_id, entry_id=entry_id
    )


def decode_head(ledger_id: int, entry_id: int, data: bytes) -> BatchHead:
    """The head of a stored batch; bytes that are none are damage, not absence."""
    try:
        return batch.decode_head(data)
    except batch.BadBatch as error:
        raise EntryUnavailable(str(error), ledger_id=ledger_id, entry_id=entry_id) from error


HeadReader = Callable[[int], Awaitable[BatchHead]]


def head_reader(engine: LogEngine, ledger_id: int) -> HeadReader:
    """`read_head` of one ledger."""

    async def read(entry_id: int) -> BatchHead:
        return await read_head(engine, ledger_id, entry_id)

    return read
