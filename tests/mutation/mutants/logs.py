"""Mutants of logs: the guards of rules 22 to 29, which seeds of the log simulation must miss."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, Final, cast

from quorumlog.errors import LogClosed, MetadataUnavailable, Overloaded, OwnedByLog
from quorumlog.net import directory
from quorumlog.net.directory import Directory
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import BatchHead, Columns, ProducerSeq, Record
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, job, takeover
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.compaction import Compaction, Pass, PassState
from quorumlog.protocol.log.handover import Handover, HandoverNext, HandoverStep
from quorumlog.protocol.log.indexing import Indexing
from quorumlog.protocol.log.job import Empty, Fate, Job, JobEnded, JobKind, JobNext
from quorumlog.protocol.log.messages import (
    Append,
    Ask,
    BatchesRead,
    Committed,
    DeleteLog,
    Resolve,
    RowChanged,
    SubmitRefused,
    WriteBatches,
)
from quorumlog.protocol.log.owner import Owner, OwnerPhase
from quorumlog.protocol.log.pipeline import Pipeline
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.rewrite import Rewrite
from quorumlog.protocol.log.route import LogRoute
from quorumlog.protocol.log.takeover import Takeover
from quorumlog.protocol.log.tenancy import Tenancy
from quorumlog.protocol.metadata import Deletion, DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import BookieInfo, BookieList, BookieState
from services.gateway.engine import ledger_writes
from services.gateway.engine.ledger_writes import Appends
from services.gateway.logs import manager, reading, values
from services.gateway.logs.driver import LogDriver
from services.gateway.logs.handle import LogHandle
from services.gateway.logs.manager import LogManager
from services.gateway.logs.reading import LogReader
from services.gateway.logs.store import MetadataLogs, Orphans
from services.gateway.logs.values import LogBatches
from tests.model.explore.scopes import (
    LOG_DELETION,
    LOG_FORGOTTEN,
    LOG_LOST,
    LOG_NAMESAKE,
    LOG_OVERWRITE,
    LOG_PUBLICATION,
    LOG_REFUSALS,
    LOG_REPEAT,
    LOG_REPEAT_ROLL,
    LOG_ROLL,
    LOG_TWICE,
    LOG_TWO,
    REWRITE_EXPIRY,
    REWRITE_FAILED_PASS,
    REWRITE_FORK,
    REWRITE_INDEX,
    REWRITE_LOST,
    REWRITE_PARTS,
    REWRITE_PASS,
    REWRITE_ROLL,
    REWRITE_TOMBSTONE,
)
from tests.model.logs.endings import no_seed_goes_on
from tests.model.logs.model import Cluster
from tests.model.logs.simulation import run_seed
from tests.mutation.mutants.gateway import GATEWAY_CLAIMS, GATEWAY_MUTANTS
from tests.mutation.mutants.guards import always
from tests.mutation.mutants.hunt import BROKEN, Find, Mutant, Patch, applied, stand_in
from tests.support.virtual import run_virtual
from tests.unit.logs.test_manager import a_cluster, call

LOG_SEEDS: Final = range(1, 401)
"""Tried against a mutant: at most about 40 s."""


@stand_in
def over_others(original: Any, self: Rewrite, value: LogMetadata | RowChanged) -> None:
    """A rewrite swaps the row that it knows, whatever that has become."""
    if isinstance(value, RowChanged):
        now = value.current
        self._swap(replace(self._log, version=now.version, attempt=now.attempt))
    else:
        original(self, value)


@stand_in
def one_left_out(original: Any, self: Rewrite, read: BatchesRead) -> None:
    """Of several batches that were read together, the last one is not written."""
    original(self, read)
    asked = self._out[-1]
    if isinstance(asked, Ask) and isinstance(asked.question, WriteBatches):
        payloads = asked.question.payloads
        if len(payloads) > 1:
            fewer = replace(asked.question, payloads=payloads[:-1])
            self._out[-1] = replace(asked, question=fewer)
            self._written -= 1


@stand_in
def index_over_others(original: Any, self: Indexing, log: LogMetadata) -> None:
    """An index is swapped into the row that its machine knows, whatever that has become."""
    original(self, replace(self._log, version=log.version, attempt=log.attempt))


@stand_in
def last_batch_unseen(original: Any, self: Indexing, read: BatchesRead) -> None:
    """Of several batches that were read together, the last one's keys are not indexed."""
    entries = read.entries
    if len(entries) > 1:
        last_id, _ = entries[-1]
        entries = (*entries[:-1], (last_id, batch.encode([Record(b"")])))
    original(self, replace(read, entries=entries))


@stand_in
def as_they_were_written(
    original: Any, self: Rewrite, item: LogItem, *batch_of_it: Any
) -> list[bytes]:
    """A batch keeps its own time."""
    moved: list[bytes] = original(self, replace(item, published_ms=0), *batch_of_it)
    return moved


@stand_in
def one_too_many(
    original: Any, self: Compaction, item: LogItem, first: int, columns: Columns
) -> list[int] | None:
    """The newest record of a key goes, too, if its batch is read again in the pass."""
    at = first + columns.indexes[0] if columns.count else 0
    if columns.key_sizes and at in self.newest.values():
        return [*range(1, columns.count)]
    kept: list[int] | None = original(self, item, first, columns)
    return kept


@stand_in
def with_its_neighbour(
    original: Any, self: Columns, time_ms: int, now_ms: int
) -> list[int] | range:
    """The record before an expired one expires, too."""
    lasting = original(self, time_ms, now_ms)
    return [number for number in lasting if number + 1 in lasting or number + 1 == self.count]


def without_a_gap(original: Any) -> Any:
    """A batch does not cover the removed records before it."""

    def thinned(self: Columns, head: BatchHead, kept: list[int], gap: int) -> bytes:
        del gap
        data: bytes = original(self, head, kept, 0)
        return data

    return thinned


def all_of_them(_original: Any) -> Any:
    """Tombstones go at once, also where ledgers stay that the pass can't rewrite."""
    return property(lambda self: {item.ledger_id for item in (*self.clean, *self.dirty)})


@stand_in
def clean_at_once(original: Any, self: PassState, row: LogMetadata) -> Any:
    """Ledgers are clean after the first part of the keys."""
    found = original(self, row)
    return found and (found[0], replace(found[1], makes_clean=True))


@stand_in
def whatever_failed(original: Any, self: PassState, row: LogMetadata | None) -> None:
    """A group that could not be rewritten is passed over."""
    original(self, row or self._due.row)


@stand_in
async def all_released(_original: Any, _self: MetadataLogs, let_go: Any) -> Any:
    """Nobody asks which ledgers forks name."""
    return let_go


@stand_in
def clean_as_its_parts(_original: Any, _self: Compaction, items: Any, now_ms: int) -> int:
    """A ledger that replaces clean and dirty ones is clean, also after a merge."""
    return max(item.compacted_ms for item in items) or now_ms


def where_it_was(_original: Any) -> Any:
    """A batch counts the records before it in its old ledger."""
    return lambda data, **_place: data


@stand_in
def unfenced(_original: Any, self: Handover) -> HandoverNext:
    """A log is deleted at once."""
    assert self.row is not None
    return self._ask(HandoverStep.DELETING, DeleteLog(self.row))


def by_logs(mutant: Mutant, seeds: range = LOG_SEEDS) -> Find | None:
    """Seeds of the log simulation against a mutant until one shows it; or the claim that the rule
    makes of the gateway's engine, where its guard is not the logs'.
    """
    claim = CLAIMS.get(mutant.name)
    with applied(mutant):
        if claim is not None:
            said = run_virtual(claim, seed=0)
            return None if said is None else Find("claim", said, "one call")
        for count, seed in enumerate(seeds, 1):
            violation = run_seed(seed).violation
            if violation is not None:
                assert not violation.startswith(BROKEN), violation
                return Find("logs", violation, f"seed {seed}, {count} tried")
    return None


def the_last_of_all(_original: Any) -> Any:
    """A takeover rebuilds the producers from the last ledger, whatever log that was made for."""
    return property(
        lambda log: next((i for i in reversed(log.items) if i.first_offset is not None), None)
    )


async def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """No step at all."""


@stand_in
def waiting_at_once(original: Any, self: LogRoute, asked: Any, now: Now) -> None:
    """A request waits for whatever row a search has asked for."""
    original(self, asked, now)
    self._waiting, self._late = [*self._waiting, *self._late], []


@stand_in
async def told_untold(_original: Any, self: LogDriver, row: LogMetadata) -> RowChanged | None:
    """A log is deleted, and whether its ledgers' members can be told of that is nobody's concern."""
    engine, store = self._ports.engine, self._ports.store
    ledgers = await engine.existing([item.ledger_id for item in row.own])
    other = await store.delete(row)
    if other is None:
        with contextlib.suppress(MetadataUnavailable):
            await engine.notify_deleted(await store.unshared(ledgers), Deletion.WITH_LOG)
    return other


@stand_in
async def forks_untold(_original: Any, self: LogDriver, row: LogMetadata) -> RowChanged | None:
    """The members of ledgers that forks name hear nothing when the ledgers' log is deleted."""
    engine, store = self._ports.engine, self._ports.store
    ledgers = await engine.existing([item.ledger_id for item in row.own])
    other = await store.delete(row)
    if other is None:
        await engine.notify_deleted(await store.unshared(ledgers), Deletion.WITH_LOG)
    return other


async def a_deletion_is_known_though_forks_keep_its_ledgers() -> str | None:
    """Rule 18e: the members of all that the log named know that it is deleted."""
    async with a_cluster() as (cluster, (one, _)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        source = await one.logs.rows.row("log")
        await one.logs.fork(one.logs.draft("fork", source.settings), source, 1)
        await one.logs.delete("log")
        if source.items[0].ledger_id in cluster.told_of_log:
            return None
        return "rule 18e: a log is deleted, and no member of a ledger that a fork names knows it"


@stand_in
def of_all_items(_original: Any, before: LogMetadata, after: LogMetadata) -> list[int]:
    """What a log names is its own, whoever it was made for."""
    kept = {item.ledger_id for item in after.items}
    return [item.ledger_id for item in before.items if item.ledger_id not in kept]


async def a_fork_lets_go_of_its_own_alone() -> str | None:
    """Rule 27a: a fork's truncation deletes nothing of its source."""
    async with a_cluster() as (cluster, (one, _)):
        await one.logs.append("log", call("a"))
        await one.logs.roll("log")
        source = await one.logs.rows.row("log")
        await one.logs.fork(one.logs.draft("fork", source.settings), source, 1)
        await one.logs.append("fork", call("b"))
        await one.logs.truncate("fork", 1)
        if source.items[0].ledger_id in cluster.told_deleted:
            return "rule 27a: a fork is truncated, and its source's ledger is told as deleted"
        return None


async def _none(*_args: Any, **_kwargs: Any) -> tuple[()]:
    """No ledger."""
    return ()


def nothing_done(original: Any) -> Any:
    """A request that finds nothing to change is answered, and leaves no name."""

    async def change(
        self: LogManager, name: str, change: Any, once: Once | None = None
    ) -> tuple[LogMetadata, LogMetadata]:
        row = await self.rows.row(name)
        needless = await change(row) == row
        done: tuple[LogMetadata, LogMetadata] = await original(
            self, name, change, None if needless else once
        )
        return done

    return change


@stand_in
async def closed_without_a_name(
    _original: Any, self: LogManager, name: str, created_at: str | None, *, once: Once | None = None
) -> None:
    """A request that finds a log closed is answered, and leaves no name."""
    with contextlib.suppress(LogClosed):
        await self.ownership.handle(name).force(
            creates=False, finish=LogMetadata.closed, created_at=created_at, once=once
        )


def skipped(_original: Any) -> Any:
    """A step that is left out."""
    return _nothing


def the_last_one(original: Any) -> Any:
    """A takeover closes the last ledger only."""
    return property(lambda self: original.fget(self)[-1:])


@stand_in
def closing_at_once(original: Any, self: Owner, following: JobNext, now: Now) -> None:
    """What is in flight does not hold up the close."""
    original(self, following, now)
    if isinstance(following, Empty) and self._job is not None:
        original(self, self._job.close(self.tenancy, now), now)


@stand_in
def not_closing(original: Any, self: Job, held: Tenancy, now: Now) -> JobNext:
    """The ledger before is left open."""
    if self.kind is JobKind.RELEASE:
        closing: JobNext = original(self, held, now)
        return closing
    self.end = (held.ledger_id, held.pipe.records, 0)
    return self._swap(held, now)


@stand_in
def acknowledged_anyway(original: Any, self: Owner, now: Any) -> None:
    """What was in flight when an owner ended counts as done."""
    for pending in self._pipe.in_flight:
        self._out.append(Resolve(pending.request, pending.answer(self.ledger_id)))
    original(self, now)


@stand_in
def appended_again(original: Any, self: Owner) -> None:
    """All that was in flight is appended again, also what the ledger has kept."""
    self._durable_to = NO_ENTRY
    original(self)


def counting_nothing(original: Any) -> Any:
    """A batch does not say how many records precede it."""
    return lambda data, **kwargs: original(data, **(kwargs | {"records_before": 0}))


@stand_in
def taken_for_ours(original: Any, self: Job, value: Any, held: Tenancy, now: Now) -> JobNext:
    """A commit that another owner did counts as this one's."""
    if not isinstance(value, Committed):
        following: JobNext = original(self, value, held, now)
        return following
    assert self.new is not None
    ended = held.with_ends(held.log, {self.end[0]: self.end[1:]}, now)
    held.log = value.log or held.with_ends(ended.with_ledger(self.new), {}, now)
    return JobEnded(value.transaction, Fate.MOVES_ON)


@stand_in
def from_memory(original: Any, self: Job, held: Tenancy) -> JobNext:
    """A check asks nobody."""
    following: JobNext = JobEnded() if self.kind is JobKind.CHECK else original(self, held)
    return following


@stand_in
async def counted_as_one(original: Any, *args: Any) -> Any:
    """How many records a published ledger has is not asked."""
    return tuple((ledger, min(records, 1), size) for ledger, records, size in await original(*args))


@stand_in
def from_zero(
    original: Any, self: LogMetadata, sealed: Any, *, is_new_start: bool = False, **times: int
) -> Any:
    """A new generation's offsets begin anew."""
    row = self
    if is_new_start:
        row = LogMetadata(self.name, self.settings, version=self.version, next_offset=0)
    return original(row, sealed, is_new_start=is_new_start, **times)


def as_written(original: Any) -> Any:
    """The records of a published ledger keep the times at which a task wrote them."""
    return lambda self, sealed, **kwargs: original(self, sealed, **(kwargs | {"published_ms": 0}))


def unreported(_original: Any) -> Any:
    """A takeover does not learn when its predecessor appended last."""
    return property(lambda self: self._log.appended_ms)


@stand_in
async def one_late(original: Any, row: LogMetadata, ms: int, **kwargs: Any) -> int:
    """A search passes over the record that it looks for."""
    at: int = await original(row, ms, **kwargs)
    return at if row.end_offset == at else at + 1


@stand_in
def with_its_settings(original: Any, self: Job, value: Any, held: Tenancy, now: Now) -> JobNext:
    """A roll or a publication that meets another change of the row writes the settings that it knew before."""
    met = value
    if isinstance(value, RowChanged):
        met = RowChanged(replace(value.current, settings=held.log.settings))
    following: JobNext = original(self, met, held, now)
    return following


@stand_in
def in_its_own_order(_original: Any, self: Tenancy, now: Now) -> None:
    """A roll forgets when the log was appended to last."""
    self.pipe = self._pipeline(self.pipe.producers, 0, now, self.pipe.seq)
    self.ahead = self.ledger_id


def since_ever(original: Any) -> Any:
    """Who is not known is new, as it was before rule 26a."""
    return lambda self, request, content, **_: original(self, request, content, since=2**62)


@stand_in
def since_any(original: Any, self: Any, request: Any, content: Any, *, since: int = 0) -> Any:
    """Who says since when it is counts as new, whatever it says."""
    return original(self, request, content, since=2**62 if since else 0)


def forgetting_whom(original: Any) -> Any:
    """The row is not told what was forgotten."""
    return lambda self, ends, **reported: original(self, ends, **(reported | {"forgotten_end": 0}))


def one_less(original: Any) -> Any:
    """The last offset of who is forgotten stands for the end."""
    return lambda self, end: original(self, end - 1)


def by_its_own(_original: Any) -> Any:
    """A gateway's own clock says what is old."""
    return lambda self, *_: self.wall_ms


@stand_in
async def believing(_original: Any, self: LogReader, _name: str, item: Any) -> Any:
    """What bookies know of the LAC is good enough for a read."""
    return await self._reads.last_add_confirmed(item.ledger_id)


@stand_in
async def any_row(original: Any, self: LogReader, page: values.Page) -> None:
    """A row that is old may say where the log ends."""
    page.is_fresh = True
    await original(self, page)


@stand_in
async def of_any_size(
    _original: Any, self: LogReader, row: LogMetadata, start: int, *, limit: int, max_bytes: int
) -> LogBatches:
    """A row of a moment before tells a page, whatever it lacks."""
    page = values.Page(row, limit, max_bytes, at=start, is_recent=True)
    await self._fill(page)
    return page.done()


def any_absent(_original: Any) -> Any:
    """Absent bookies fill an ensemble up, however few live."""
    return lambda live, absent, size, *_: ((*live, *absent)[:size], True)


def while_it_lives(_original: Any) -> Any:
    """Only a roll holds appends up."""
    return lambda self: self.phase is not OwnerPhase.LIVE


async def ledger_of_a_log_is_refused() -> str | None:
    """Rule 27: the ledger API appends to no ledger of a log, whoever holds its handle."""
    row = LedgerMetadata(
        7, Quorum(3, 3, 2), DigestKind.CRC32C, (Fragment(0, ("b1@1", "b2@1", "b3@1")),), log="log"
    )
    handle = {7: SimpleNamespace(access_row=row, row=row, records=0)}
    handles = SimpleNamespace(get=handle.get, rows=None, gatekeeper=None)
    here = Appends(cast(Any, handles), cast(Any, None))
    try:
        await here.append_batch(7, batch.encode([Record(b"x")]))
    except OwnedByLog:
        return None
    except AttributeError:
        return "rule 27: an append to a log's ledger was handed to its handle"
    return "rule 27: an append to a log's ledger was taken"


async def too_few_live_bookies_are_refused() -> str | None:
    """Rule 29: every write set of a degraded ensemble reaches Qa with bookies that live."""

    async def fetch() -> BookieList:
        states: tuple[BookieState, ...] = ("writable", "lost", "lost", "lost")
        return BookieList(
            bookies=tuple(
                BookieInfo(id=f"b{n}@1", state=state, url="") for n, state in enumerate(states)
            )
        )

    known = Directory(fetch)
    await known.refresh()
    found = known.new_ensemble(3, degraded_ack=(3, 2))
    return None if found is None else f"rule 29: {found[0]} with one bookie that lives"


@stand_in
def digest_of_what_is_stored(original: Any, data: bytes) -> str:
    """A packed batch's content is the digest of its bytes."""
    return sha256(data).hexdigest()[:32] if batch.is_packed(data) else str(original(data))


async def a_packed_repeat_is_known() -> str | None:
    """Rule 26: a request's digest is that of its records, whichever release of zstd has packed them."""
    plain = batch.encode([Record(b"x" * 1000)], ProducerSeq("p", 0, 0))
    if batch.content(packed.pack(plain)) != batch.content(plain):
        return "rule 26: a repeat of a packed batch has another digest"
    return None


CLAIMS: Final[dict[str, Callable[[], Coroutine[Any, Any, str | None]]]] = {
    "the ledger API writes to a log's ledgers": ledger_of_a_log_is_refused,
    "a compressed batch's digest covers the stored bytes, not the records": a_packed_repeat_is_known,
    "a degraded ensemble has fewer than Qa live bookies": too_few_live_bookies_are_refused,
    "an owner appends after the batch that ends the log": no_seed_goes_on,
    "a takeover continues after the batch that ended the log": no_seed_goes_on,
    "an owner accepts any stream sequence": no_seed_goes_on,
    "a takeover forgets the last stream sequence": no_seed_goes_on,
    "a log's deletion does not notify members of ledgers that forks name": a_deletion_is_known_though_forks_keep_its_ledgers,
    "a fork's truncation reports its source's ledgers as deleted": a_fork_lets_go_of_its_own_alone,
    **GATEWAY_CLAIMS,
}


@stand_in
def without_repeats(original: Any, self: Owner, event: SubmitRefused, now: Now) -> None:
    """What a ledger that is over refused goes to the next owner, and its repeats go nowhere."""
    if not isinstance(event.error, Overloaded):
        for pending in self._pipe.in_flight:
            pending.repeats.clear()
    original(self, event, now)


def all_refusals(original: Any) -> Any:
    """A refusal counts whatever the owner has done about an earlier one."""
    return lambda self, event, now: original(self, replace(event, number=self._refusals), now)


def of_any(original: Any) -> Any:
    """A request to append says nothing of the log that it was judged by."""

    def of(
        cls: type[Append], /, *given: Any, created_at: str | None = None, **named: Any
    ) -> Append:
        del created_at
        made: Append = original.__func__(cls, *given, **named)
        return made

    return classmethod(of)


@stand_in
def forced_by_name(
    original: Any, self: LogHandle, *, created_at: str | None = None, **how: Any
) -> asyncio.Future[LogMetadata]:
    """A log is taken over by its name."""
    del created_at
    taken: asyncio.Future[LogMetadata] = original(self, **how)
    return taken


@stand_in
async def whichever(_original: Any, self: LogReader, page: values.Page) -> None:
    """A read goes on in whichever log has the name."""
    row = await self.rows.row(page.row.name)
    if row.created_at != page.row.created_at and page.count:
        page.is_cut = True
        return
    page.row, page.is_fresh = row, True


@stand_in
async def fresh_of_any(
    _original: Any, self: LogReader, name: str, _created_at: str | None
) -> LogMetadata:
    """A row is read for whichever log has the name."""
    return await self.rows.row(name)


LOG_MUTANTS: Final = (
    *GATEWAY_MUTANTS,
    Patch(Owner, "_refused", without_repeats).mutant(
        "an owner hands a refused request on without its retries", "rule 24a", LOG_REPEAT
    ),
    Patch(Owner, "_refused", all_refusals).mutant(
        "an owner acts on a refusal of entries that it already withdrew", "rule 24a", LOG_REFUSALS
    ),
    Patch(Append, "of", of_any).mutant(
        "an append goes to a later log of the same name", "rule 27b"
    ),
    Patch(LogHandle, "force", forced_by_name).mutant(
        "a close closes a later log of the same name", "rule 27b"
    ),
    Patch(LogReader, "_look", whichever).mutant(
        "a read continues in a later log of the same name", "rule 27b"
    ),
    Patch(LogReader, "fresh", fresh_of_any).mutant(
        "a returning reader is served from a later log of the same name", "rule 27b"
    ),
    Patch(reading, "RECENT_S", lambda _original: float("inf")).mutant(
        "a deleted log stays readable while its ledgers' metadata is cached", "rule 27b"
    ),
    Patch(LogReader, "_check_within", lambda _original: _nothing).mutant(
        "a read beyond the end is answered as one at the end", "rule 27b"
    ),
    Patch(Cluster, "is_late", always(False)).mutant(
        "a late copy of a request is carried out", "rule 6a"
    ),
    Patch(LogManager, "_change", nothing_done).mutant(
        "a request that changes nothing does not store its name", "rule 6a"
    ),
    Patch(LogManager, "finish", closed_without_a_name).mutant(
        "a request that finds a log closed does not store its name", "rule 6a"
    ),
    Patch(takeover, "SwapLog", lambda swap: lambda row, _once=None: swap(row)).mutant(
        "a takeover changes the metadata without storing the request's name", "rule 6a"
    ),
    Mutant(
        "an ended owner's requests go to a later log of the same name",
        "rule 27b",
        (
            Patch(LogRoute, "_refuse_for", always(None)),
            # Alone it is seldom seen: what nobody waits for goes nowhere anyway.
            Patch(LogRoute, "_is_awaited", always(True)),
        ),
    ),
    Patch(LogRoute, "_go", waiting_at_once).mutant(
        "a request is refused because of metadata read before the request arrived",
        "rule 27b",
        scope=LOG_NAMESAKE,
    ),
    Patch(LogRoute, "_is_awaited", always(True)).mutant(
        "an append that its client abandoned goes to a later log", "rule 27b"
    ),
    Patch(LogDriver, "_delete", forks_untold).mutant(
        "a log's deletion does not notify members of ledgers that forks name", "rule 18e"
    ),
    Patch(manager, "_let_go", of_all_items).mutant(
        "a fork's truncation reports its source's ledgers as deleted", "rule 27a"
    ),
    Patch(LogDriver, "_delete", told_untold).mutant(
        "a log's deletion is reported although its members were not notified", "rule 18e"
    ),
    Patch(Orphans, "released", lambda _original: _none).mutant(
        "a repeated truncation notifies no member", "rule 18e"
    ),
    Patch(Owner, "_must_wait", while_it_lives).mutant(
        "an owner appends after the batch that ends the log", "rule 25b"
    ),
    Patch(Takeover, "_has_ended", always(False)).mutant(
        "a takeover continues after the batch that ended the log", "rule 25b"
    ),
    Patch(Pipeline, "_check_seq", always(None)).mutant(
        "an owner accepts any stream sequence", "rule 25a"
    ),
    Patch(Takeover, "_stream_seq", always(None)).mutant(
        "a takeover forgets the last stream sequence", "rule 25a"
    ),
    Patch(LogMetadata, "unsealed", the_last_one).mutant(
        "a takeover closes only the last of several open ledgers", "rule 22", scope=LOG_ROLL
    ),
    Mutant(
        "an owner continues although its log's metadata names another last ledger",
        "rule 22",
        (Patch(job, "is_written", always(True)), Patch(takeover, "is_written", always(True))),
        scope=LOG_REPEAT,
    ),
    Patch(Tenancy, "is_mine", always(True)).mutant(
        "an owner takes every change of its log's metadata for harmless", "rule 22", scope=LOG_ROLL
    ),
    Patch(Cluster, "forgets_deleted", lambda _original: True).mutant(
        "bookies forget which ledgers were deleted", "rule 16a"
    ),
    Patch(Tenancy, "check_token", always(None)).mutant(
        "an owner does not check the writer token", "rule 22"
    ),
    Patch(LogDriver, "_place_last", always(None)).mutant(
        "a ledger's writer does not learn the ledger's place in its log", "rule 18f"
    ),
    Patch(Owner, "_proceed", closing_at_once).mutant(
        "a roll does not wait for entries in flight", "rule 23", scope=LOG_ROLL
    ),
    Patch(Job, "close", not_closing).mutant(
        "an owner switches ledgers before the old ledger is closed",
        "rules 23 and 28",
        scope=LOG_ROLL,
    ),
    Patch(Job, "_swapped", with_its_settings).mutant(
        "a roll undoes a concurrent change of the log's settings", "rule 23"
    ),
    Patch(Owner, "_retire", acknowledged_anyway).mutant(
        "an ending owner acknowledges appends that are still in flight", "rule 24", scope=LOG_REPEAT
    ),
    Patch(Owner, "_settle", appended_again).mutant(
        "an owner appends entries again that the ended ledger contains",
        "rule 24",
        scope=LOG_PUBLICATION,
    ),
    Patch(batch, "content", digest_of_what_is_stored).mutant(
        "a compressed batch's digest covers the stored bytes, not the records", "rule 26"
    ),
    Patch(batch, "placed", counting_nothing).mutant(
        "a batch does not state how many records precede it", "rule 25", scope=LOG_TWO
    ),
    Mutant(
        "a producer's retry is appended again",
        "rule 26",
        (Patch(ProducerTable, "find", always(None)), Patch(ProducerTable, "begin", always(None))),
        scope=LOG_REPEAT,
    ),
    Patch(Takeover, "_learn", always(None)).mutant(
        "a takeover does not learn the latest appends of producers", "rule 26", scope=LOG_REPEAT
    ),
    Patch(ProducerTable, "snapshot", always(())).mutant(
        "a new ledger's item does not contain the producers", "rule 26", scope=LOG_REPEAT_ROLL
    ),
    Patch(ProducerTable, "find", since_ever).mutant(
        "an owner takes an unknown producer for a new one", "rule 26a", scope=LOG_FORGOTTEN
    ),
    Patch(ProducerTable, "find", since_any).mutant(
        "an owner does not compare Producer-Since with the forgotten end", "rule 26a"
    ),
    Patch(LogMetadata, "with_ends", forgetting_whom).mutant(
        "a takeover loses the forgotten end", "rule 26a"
    ),
    Patch(ProducerTable, "lost", one_less).mutant(
        "the forgotten end is one offset too low",
        "rule 26a",
        scope=LOG_FORGOTTEN,
    ),
    Patch(Pipeline, "_check_since", always(None)).mutant(
        "an owner accepts a Producer-Since above the log's end", "rule 26a"
    ),
    Patch(Now, "expiry_ms", by_its_own).mutant(
        "an owner forgets producers by its own clock", "rule 26a"
    ),
    Patch(Now, "stamp_ms", by_its_own).mutant(
        "an owner stamps records with its own clock", "rule 26a"
    ),
    Patch(Takeover, "_appended_ms", unreported).mutant(
        "a takeover stamps records with times before those of its predecessor", "rule 26b"
    ),
    Patch(Tenancy, "next_ledger", in_its_own_order).mutant(
        "a roll stamps records with times before those of the old ledger", "rule 26b"
    ),
    Patch(LogMetadata, "with_published", as_written).mutant(
        "a transaction's published records keep the times of their writing", "rule 26b"
    ),
    Patch(reading, "find_time", one_late).mutant(
        "a search by time ends one record late", "rule 26b"
    ),
    Patch(Job, "_swapped", taken_for_ours).mutant(
        "an owner takes another owner's commit for its own", "rule 28", scope=LOG_TWICE
    ),
    Patch(manager, "sizes_of", counted_as_one).mutant(
        "a commit does not count the records of a published ledger", "rule 28"
    ),
    Patch(LogMetadata, "with_published", from_zero).mutant(
        "a new generation begins at offset 0", "rule 28", scope=LOG_OVERWRITE
    ),
    Patch(LogReader, "_confirmed", believing).mutant(
        "a read relies on the LAC that bookies know", "I32"
    ),
    Patch(LogReader, "_fill", any_row).mutant(
        "a read takes the end in outdated metadata for the log's end", "I33"
    ),
    Patch(LogReader, "full_page", of_any_size).mutant(
        "a page that is not full relies on cached metadata", "I33"
    ),
    Patch(Job, "_look", from_memory).mutant(
        "an owner does not check whether its log was deleted", "rule 26"
    ),
    Patch(Owner, "_names", always(True)).mutant(
        "an owner does not check that metadata still names its new ledger",
        "rule 18f",
        scope=LOG_LOST,
    ),
    Patch(Handover, "_fence", unfenced).mutant(
        "a deleted log's name is free before its writer has ended", "rule 27", scope=LOG_DELETION
    ),
    Patch(ledger_writes, "transaction_of", always("one")).mutant(
        "the ledger API writes to a log's ledgers", "rule 27"
    ),
    Patch(values.Page, "own", lambda _original: lambda _page, count: count).mutant(
        "a read of a fork continues beyond the fork's part of a ledger", "rule 27a"
    ),
    Patch(LogMetadata, "base", the_last_of_all).mutant(
        "a takeover of a fork learns producers from the source's ledger", "rule 27a"
    ),
    Patch(LogMetadata, "is_sealed_below", always(True)).mutant(
        "a fork begins within an open ledger without a roll", "rule 27a"
    ),
    Patch(Rewrite, "_swapped", over_others).mutant(
        "a rewrite undoes concurrent changes of the log's metadata", "rule 27c", REWRITE_ROLL
    ),
    Patch(Rewrite, "_read", one_left_out).mutant(
        "a rewrite omits a batch", "rule 27c", REWRITE_ROLL
    ),
    Patch(Rewrite, "_moved", as_they_were_written).mutant(
        "a rewrite gives published records the times of their writing", "rule 27c", REWRITE_ROLL
    ),
    Patch(batch, "moved", where_it_was).mutant(
        "a rewrite moves records to other offsets", "rule 27c", REWRITE_ROLL
    ),
    Patch(Indexing, "_swap", index_over_others).mutant(
        "an index undoes concurrent changes of the log's metadata", "rule 27e", REWRITE_INDEX
    ),
    Patch(Indexing, "_read", last_batch_unseen).mutant(
        "an index omits a batch", "rule 27e", REWRITE_INDEX
    ),
    Patch(Compaction, "survivors", one_too_many).mutant(
        "compaction removes the newest record of a key", "rule 27d", REWRITE_PASS
    ),
    Patch(Columns, "thinned", without_a_gap).mutant(
        "compaction leaves offsets that no batch covers", "rule 27d", REWRITE_PASS
    ),
    Patch(Compaction, "compacted", lambda _original: lambda *_: 1).mutant(
        "compaction removes tombstones before readers have seen them", "rule 27d", REWRITE_PASS
    ),
    Patch(Compaction, "compacted", clean_as_its_parts).mutant(
        "a merge marks dirty ledgers as clean", "rule 27d", REWRITE_ROLL
    ),
    Patch(PassState, "group", clean_at_once).mutant(
        "compaction marks ledgers as clean before it compacted all keys", "rule 27d", REWRITE_PARTS
    ),
    Patch(Columns, "lasting", lambda _original: lambda self, *_: range(self.count)).mutant(
        "a read returns expired records", "rule 27f", REWRITE_EXPIRY
    ),
    Patch(Columns, "lasting", with_its_neighbour).mutant(
        "a read omits records that have not expired", "rule 27f", REWRITE_EXPIRY
    ),
    Patch(Pass, "expired", all_of_them).mutant(
        "compaction removes tombstones before the older records of their keys",
        "rule 27d",
        REWRITE_TOMBSTONE,
    ),
    Patch(Orphans, "_keep_place", lambda _original: _nothing).mutant(
        "replaced ledgers are deleted before bookies know their replacement",
        "rule 27c",
        REWRITE_LOST,
    ),
    Patch(MetadataLogs, "unshared", all_released).mutant(
        "replaced ledgers are deleted although forks name them", "rules 27a and 27c", REWRITE_FORK
    ),
    Patch(PassState, "rewritten", whatever_failed).mutant(
        "a compaction continues after ledgers that it could not rewrite",
        "rule 27d",
        REWRITE_FAILED_PASS,
    ),
    Patch(directory, "_mixed", any_absent).mutant(
        "a degraded ensemble has fewer than Qa live bookies", "rule 29"
    ),
)
