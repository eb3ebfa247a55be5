"""Take a log over: recover what is not closed, learn the ends, rebuild the producers, CAS.

These are the seeds' steps for opening a log. Two gateways may do this at once: both recoveries find
the same ends, and one compare-and-swap wins; the other one deletes the ledger that it made, in a
transaction that sees no log naming it, and yields (rule 22).
"""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from quorumlog.errors import EntryLost, EntryUnavailable, QuorumLogError
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BatchHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import Answer, LogItem, LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata
from services.gateway.logs.clock import Clock
from services.gateway.logs.owner import check_room, is_last, options_of
from services.gateway.logs.pending import Pending
from services.gateway.logs.ports import LogChanged, LogEngine, LogStore
from services.gateway.logs.producers import ProducerTable

_REPLAY_BYTES: Final = 4 << 20
"""What a replay reads at once."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A log after a takeover; `producers` as of its end."""

    log: LogMetadata
    producers: ProducerTable[Pending]


@dataclass(frozen=True, slots=True)
class _End:
    """Where a closed ledger of a log ends."""

    records: int
    bytes: int
    last_entry: int
    has_producers: bool
    appended_ms: int = 0


Finish = Callable[[LogMetadata], LogMetadata]


async def take_over(
    log: LogMetadata,
    *,
    engine: LogEngine,
    store: LogStore,
    clock: Clock,
    create: bool,
    finish: Finish = lambda log: log,
) -> Taken | None:
    """All ledgers of `log` are CLOSED afterwards, but for the new last one with `create`.

    `finish` may change the row further, in the same step. None: the row was changed by another;
    look again. Raises what recovery, creation or metadata raise, with the row as it was.
    """
    ends: dict[int, _End] = {}
    for item in log.unsealed:
        ends[item.ledger_id] = await end_of(await engine.recover(item.ledger_id), engine)
    base = log.base
    if base is not None and base.ledger_id not in ends:
        ends[base.ledger_id] = await end_of(await engine.get(base.ledger_id), engine)
    appended_ms = max((log.appended_ms, *(end.appended_ms for end in ends.values())))
    producers = await rebuild(log, ends, engine, now_ms=clock.expiry_ms(appended_ms))
    table = producers.snapshot()
    now = clock.sealed_ms()
    changed = log.with_ends(
        {ledger_id: (end.records, end.bytes) for ledger_id, end in ends.items()},
        producers=table,
        now_ms=now,
        forgotten_end=producers.forgotten_end,
        appended_ms=appended_ms,
    )
    if not create:
        new = None
    else:
        check_room(changed)
        new = await engine.create(options_of(log))
        changed = changed.with_ledger(new.ledger_id).with_ends({}, producers=table, now_ms=now)
    done: LogMetadata | None = None
    try:
        done = await store.cas(finish(changed))
    except LogChanged:
        pass  # another one won: yield to it (rule 22)
    except Exception:
        await _discard(new, store)
        raise
    if done is None or (new is not None and not is_last(done, new.ledger_id)):
        # Or it was done, and another one has taken over before that was known here.
        await _discard(new, store)
        return None
    return Taken(done, producers)


async def _discard(ledger: LedgerMetadata | None, store: LogStore) -> None:
    """Delete a ledger that was made for nothing, in a transaction that sees no log naming it."""
    if ledger is not None:
        with contextlib.suppress(QuorumLogError):
            await store.delete_unnamed(ledger.ledger_id)


async def end_of(ledger: LedgerMetadata, engine: LogEngine) -> _End:
    """The end of a CLOSED ledger of a log, from its last entry alone."""
    assert ledger.last_entry is not None, "it is CLOSED"
    if ledger.last_entry == NO_ENTRY:
        return _End(0, 0, NO_ENTRY, has_producers=False)
    head = await read_head(engine, ledger.ledger_id, ledger.last_entry)
    return _End(
        head.records_after,
        ledger.length or 0,
        ledger.last_entry,
        head.producer is not None or head.after_producer,
        head.append_time_ms,
    )


async def rebuild(
    log: LogMetadata, ends: dict[int, _End], engine: LogEngine, *, now_ms: int
) -> ProducerTable[Pending]:
    """The producers as of the end of the log, and of what it has forgotten: the table of its last
    known start, and what was appended since. All of its ledgers are CLOSED.

    Whom the owner before had forgotten since that start is known again, or is forgotten here.
    """
    base = log.base
    if base is None:
        return ProducerTable(forgotten_end=log.forgotten_end)
    table = ProducerTable[Pending](base.producers, forgotten_end=log.forgotten_end)
    end = ends[base.ledger_id]
    if end.has_producers:
        await _replay(table, base, end, engine)
    table.forget(now_ms=now_ms)
    return table


async def _replay(
    table: ProducerTable[Pending], item: LogItem, end: _End, engine: LogEngine
) -> None:
    assert item.first_offset is not None

    def learn(entry_id: int, data: bytes) -> None:
        head = decode_head(item.ledger_id, entry_id, data)
        if head.producer is None:
            return
        first = item.first_offset or 0
        answer = Answer(
            head.producer.seq,
            first + head.records_before,
            first + head.records_after - 1,
            item.ledger_id,
            entry_id,
            batch.content(data),
        )
        table.done(head.producer, answer, now_ms=head.append_time_ms)

    has_all = await each_entry(engine, item.ledger_id, end.last_entry, learn)
    if not has_all:
        # Of whom only lost entries told nothing is known: to such a producer nobody can say what is
        # a repeat.
        table.lost(item.first_offset + end.records)


async def each_entry(
    engine: LogEngine, ledger_id: int, last: int, learn: Callable[[int, bytes], None]
) -> bool:
    """Every entry of a ledger up to `last`, in order; False where some are lost (rule 31)."""
    at, has_all = 0, True
    while at <= last:
        try:
            found = await engine.read(
                ledger_id, at, last=last, limit=10_000, max_bytes=_REPLAY_BYTES
            )
        except EntryLost as error:
            at, has_all = error.members["next"], False
            continue
        if found.next <= at:
            raise EntryUnavailable("an entry of a closed ledger", ledger_id=ledger_id, entry_id=at)
        for run in found.runs:
            for index, entry_id in enumerate(run.ids):
                learn(entry_id, bytes(run.payload(index)))
        at = found.next
    return has_all


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
        "a confirmed entry of a log was not found", ledger_id=ledger_id, entry_id=entry_id
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
