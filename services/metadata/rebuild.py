"""Rebuilds the database's rows from the bookies' copies (rule 18d).

A rebuild reads all ledgers twice. The first pass collects the ids in use, and the bookies that are
referenced but silent. The second pass decides on batches of ledgers by ascending id, and writes each
batch in one transaction. An interrupted rebuild can continue after the last batch. Repeating a
complete rebuild changes nothing.
"""

import logging
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import asyncpg

from quorumlog.errors import InvalidRequest
from quorumlog.net.identity import ANONYMOUS, Credentials
from quorumlog.net.sessions import service_session
from quorumlog.protocol.access_key import is_sealed
from quorumlog.protocol.ids import ASSIGNED_ID_END, member_incarnation, member_name
from quorumlog.protocol.metadata import Deletion, LedgerMetadata, State
from quorumlog.protocol.rebuild import Action, Bookies, Held, Registered, shown, stand_ins
from quorumlog.protocol.rebuild_log import DeletedLogs, LedgerPlace, LogDecision
from quorumlog.wire import rebuild_bodies, row_copies
from quorumlog.wire.log_bodies import PACKED_TAG, TRANSACTION_TAG
from services.metadata.cookies import CookieStore
from services.metadata.inquiry import Source, SourceAway, find_sources, merged
from services.metadata.liveness import Liveness
from services.metadata.rebuild_store import Judged, RebuildStore, RebuildTables, StandIn

log = logging.getLogger(__name__)

_AT_ONCE: Final = 200
"""Ledgers per transaction, which locks their rows for about 50 ms (chosen by judgement)."""
_PROGRESS_EVERY: Final = 1000
_FINDINGS_KEPT: Final = 1000
"""Maximum findings in a report (chosen by judgement). Further findings are only counted."""

Notify = Callable[[rebuild_bodies.RebuildLine], Awaitable[None]]


@dataclass(slots=True)
class Survey:
    """The result of the first pass."""

    ledgers: int = 0
    highest: int = -1
    named: set[str] = field(default_factory=set)
    """Bookies that the newest copies reference."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """The highest incarnation in any copy, by the bookie's name."""

    def note(self, rows: Sequence[LedgerMetadata]) -> None:
        """Remember the bookies in the copies of one ledger's row."""
        newest = max((row.version for row in rows), default=0)
        for row in rows:
            for member in row.all_members:
                name, incarnation = member_name(member), member_incarnation(member)
                known = self.incarnations.get(name, 0)
                self.incarnations[name] = max(known, incarnation)
            if row.version == newest:
                self.named |= {member_name(b) for f in row.fragments for b in f.bookies}


@dataclass(slots=True)
class _Tally:
    """Counts and findings of the second pass."""

    ledgers: Counter[Action] = field(default_factory=Counter)
    logs: Counter[Action] = field(default_factory=Counter)
    open_ledgers: int = 0
    may_be_deleted: int = 0
    sealed_passwords: int = 0
    holes: int = 0
    findings: list[rebuild_bodies.RebuildFinding] = field(default_factory=list)
    left_out: int = 0
    buried: set[int] = field(default_factory=set)
    freed: int = 0
    """Deleted ledgers whose ids may be assigned again. A later rebuild would delete the new ledgers."""
    by_log: dict[str, list[LedgerPlace]] = field(default_factory=dict)
    deleted_logs: dict[str, int] = field(default_factory=dict)
    """The highest ledger id of the deleted logs, by log name."""
    deleted_at: dict[str, set[str]] = field(default_factory=dict)
    """The creation times of the deleted logs, by log name. The ids of a log's ledgers need not
    ascend, because some ledgers replaced others (rule 27c)."""
    forked: set[int] = field(default_factory=set)
    """Ledgers that were kept when their log was deleted, because forks referenced them."""

    def find(self, finding: rebuild_bodies.RebuildFinding) -> None:
        """Add a finding to the report, or only count it if the report is full."""
        if len(self.findings) < _FINDINGS_KEPT:
            self.findings.append(finding)
        else:
            self.left_out += 1

    def note_deleted_logs(self, rows: Iterable[LedgerMetadata]) -> None:
        """Remember the deleted logs in these rows, whether or not the ledgers were deleted."""
        for row in rows:
            if row.deletion in {Deletion.WITH_LOG, Deletion.OF_LOG} and row.log is not None:
                known = self.deleted_logs.get(row.log, -1)
                self.deleted_logs[row.log] = max(known, row.ledger_id)
                if row.lineage is not None and row.lineage.log_created_at:
                    self.deleted_at.setdefault(row.log, set()).add(row.lineage.log_created_at)
                if row.deletion is Deletion.OF_LOG:
                    self.forked.add(row.ledger_id)

    def deletions(self, name: str) -> DeletedLogs:
        """The deleted logs of this name."""
        return DeletedLogs(
            self.deleted_logs.get(name, -1), frozenset(self.deleted_at.get(name, ()))
        )

    def count(self, judged: Judged, bookies: Bookies) -> None:
        """Count the decision on a ledger, and remember the ledger's position in its log."""
        decision, row = judged.decision, judged.row
        self.ledgers[decision.action] += 1
        if decision.why:
            self.find(
                rebuild_bodies.RebuildFinding(
                    ledger_id=judged.ledger_id, action=decision.action, why=decision.why
                )
            )
        if decision.action is Action.TOMBSTONE:
            self.buried.add(judged.ledger_id)
            self.freed += judged.is_free
        elif row is not None and row.log is not None:
            hides_next = bookies.may_hide_later(row)
            place = _place_of(row, has_row=judged.has_row, hides_next=hides_next)
            self.by_log.setdefault(row.log, []).append(place)
        if decision.row is not None:
            is_open = decision.row.state is not State.CLOSED
            self.open_ledgers += is_open
            self.may_be_deleted += not is_open and bookies.may_hide_later(decision.row)
            self.sealed_passwords += is_sealed(decision.row.access_key)


@dataclass(eq=False)
class Rebuilder:
    """Runs rebuilds of this service's database."""

    store: RebuildStore
    _cookies: CookieStore
    _liveness: Liveness
    _credentials: Credentials = ANONYMOUS

    async def run(
        self, ask: rebuild_bodies.RebuildAsk, notify: Notify
    ) -> rebuild_bodies.RebuildReport:
        """Run a rebuild. `notify` receives lines of progress.

        Raises: InvalidRequest, SourceAway, MetadataUnavailable.
        """
        async with self._begun(ask, notify) as work:
            return await work.run()

    async def count_behind(self, lost: Collection[str], notify: Notify) -> int:
        """Count the rows, and the tombstones for reusable ids, that a rebuild would write.

        `lost` has the bookies that never return. `notify` receives lines of progress. Raises:
        InvalidRequest while another rebuild runs, SourceAway, MetadataUnavailable.
        """
        ask = rebuild_bodies.RebuildAsk(dry_run=True, without=tuple(lost))
        async with self._begun(ask, notify) as work:
            return await work.count_behind()

    @asynccontextmanager
    async def _begun(
        self, ask: rebuild_bodies.RebuildAsk, notify: Notify
    ) -> AsyncIterator["_Work"]:
        """Begin a rebuild from all bookies with known URLs."""
        async with self.store.begin() as tables, service_session(self._credentials) as session:
            rows = await self._cookies.list()
            listed = await self._liveness.bookies(rows)
            services = await self._liveness.services()
            urls = {row.cookie.url for row in rows} | {bookie.url for bookie in listed.bookies}
            urls |= {found.url for found in services.services if found.kind == "bookie"}
            urls |= set((await self._liveness.bookie_urls()).values())
            urls |= {url.rstrip("/") for url in ask.bookies}
            registered = {row.name for row in rows}
            yield _Work(tables, session, ask, notify, urls - {""}, registered)


@dataclass(eq=False)
class _Work:
    """One run of a rebuild."""

    _tables: RebuildTables
    _session: aiohttp.ClientSession
    _ask: rebuild_bodies.RebuildAsk
    _notify: Notify
    _urls: set[str]
    """The URLs of the bookies to read."""
    _registered: set[str]
    """The names of the registered bookies."""
    _tally: _Tally = field(default_factory=_Tally)

    async def run(self) -> rebuild_bodies.RebuildReport:
        """Run all passes, and return the report."""
        sources = await find_sources(self._session, self._urls)
        cluster_id = await self._cluster(sources)
        survey = await self._survey(sources)
        writes = not self._ask.dry_run
        taken = cluster_id if writes and cluster_id != await self._tables.cluster_id() else None
        next_id = survey.highest + 1
        added = await self._stand_ins(sources, survey)
        if writes:
            next_id = await self._tables.begin_writing(survey.highest, cluster_id, taken, added)
        bookies = await self._bookies(sources, survey, added)
        await self._decide_ledgers(sources, bookies, survey)
        await self._decide_logs(bookies)
        if writes and self._ask.take_over:
            # First write the rows, because a recovery by older rows would lose acknowledged entries.
            witnesses = {one for source in sources for one in source.head.witnesses}
            await self._tables.accept_lost(cluster_id, witnesses, self._ask.without)
        # Write the cookies last, because a waiting bookie starts serving once its cookie exists.
        cookies = await self._put_cookies(sources) if writes else []
        return self._report(cluster_id, sources, bookies, cookies, next_id)

    async def count_behind(self) -> int:
        """Count the rows, and the tombstones for reusable ids, that a rebuild would write.

        Raises: SourceAway if a registered bookie, which may have a copy, does not report its rows.
        """
        cluster_id = await self._tables.cluster_id()
        sources = [
            source
            for source in await find_sources(self._session, self._urls)
            if _cluster_of(source) == cluster_id
        ]
        unreported = self._registered - {source.name for source in sources} - set(self._ask.without)
        if unreported:
            names = ", ".join(sorted(unreported))
            detail = f"bookies {names} did not return their rows: start them, or name them as lost"
            raise SourceAway(detail)
        survey = await self._survey(sources)
        added = await self._stand_ins(sources, survey)
        bookies = await self._bookies(sources, survey, added)
        await self._decide_ledgers(sources, bookies, survey)
        # Write these cookies even if no row would be written, because a later rebuild may write
        # copies whose loss was accepted.
        await self._tables.put_stand_ins(cluster_id, added)
        return self._tally.ledgers[Action.WRITE] + self._tally.freed

    async def _cluster(self, sources: Sequence[Source]) -> str:
        """Return the id of the cluster to which all bookies belong. Raises: InvalidRequest."""
        if not sources:
            raise InvalidRequest("no bookie responds: send the bookies' URLs, or start the bookies")
        clusters = {
            source.head.cookie.cluster_id for source in sources if source.head.cookie is not None
        }
        cluster_id = await self._tables.cluster_id()
        if clusters == {cluster_id}:
            return cluster_id
        if len(clusters) > 1 or not await self._tables.is_empty():
            reported = ", ".join(f"{source.name}: {_cluster_of(source)}" for source in sources)
            raise InvalidRequest(
                f"the database belongs to cluster {cluster_id}, but the bookies report {reported}. Only an empty"
                " database can take over a cluster, and all bookies must belong to the same cluster"
            )
        found = clusters.pop()
        if not (self._ask.dry_run or self._ask.take_over):
            raise InvalidRequest(
                f"the database is empty, but the bookies belong to cluster {found}: send `take_over` to"
                " make it the database of this cluster"
            )
        return found

    async def _put_cookies(self, sources: Sequence[Source]) -> list[str]:
        return await self._tables.put_cookies(
            {
                source.name: (cookie.model_copy(update={"url": source.url}), source.head.log_end)
                for source in sources
                if (cookie := source.head.cookie) is not None
            }
        )

    async def _survey(self, sources: Sequence[Source]) -> Survey:
        found = Survey()
        async for ledger_id, holding in merged(self._session, sources, -1):
            found.ledgers += 1
            # Callers chose the higher ids, which the database never assigns.
            if ledger_id < ASSIGNED_ID_END:
                found.highest = ledger_id
            texts = {copy for _, held in holding for copy in held.copies}
            found.note([row_copies.decode(text) for text in texts])
            if found.ledgers % _PROGRESS_EVERY == 0:
                await self._notify(rebuild_bodies.RebuildLine(phase="survey", done=found.ledgers))
        return found

    async def _stand_ins(self, sources: Sequence[Source], survey: Survey) -> dict[str, StandIn]:
        """Return the stand-in cookies to write before the first ledger, by bookie name (rule 15b)."""
        present = {name: one.incarnation for name, one in (await self._tables.registered()).items()}
        for source in sources:
            present[source.name] = max(source.incarnation, present.get(source.name, 0))
        added = stand_ins(survey.incarnations, present)
        return {name: StandIn(one, name not in survey.named) for name, one in added.items()}

    async def _bookies(
        self, sources: Sequence[Source], survey: Survey, added: Mapping[str, StandIn]
    ) -> Bookies:
        """Return the bookies' state for decisions. `added` has all stand-in cookies, written or not."""
        registered = await self._tables.registered()
        registered |= {name: Registered(one.incarnation) for name, one in added.items()}
        answering = {source.name: source.incarnation for source in sources}
        lacking = {source.name for source in sources if source.head.may_lack}
        silent = ((self._registered | survey.named) - answering.keys()) | lacking
        given_up = frozenset(self._ask.without)
        return Bookies(answering, frozenset(silent - given_up), registered, given_up=given_up)

    async def _decide_ledgers(
        self, sources: Sequence[Source], bookies: Bookies, survey: Survey
    ) -> None:
        done = 0
        after = -1 if self._ask.after is None else self._ask.after
        async for page in _pages(merged(self._session, sources, -1)):
            held = {ledger_id: _held(holding) for ledger_id, holding in page}
            self._tally.note_deleted_logs(
                row for each in held.values() for one in each for row in one.rows
            )
            is_due = not self._ask.dry_run and page[-1][0] > after
            for judged in await self._judge(held, bookies, writes=is_due):
                self._tally.count(judged, bookies)
            done += len(page)
            line = rebuild_bodies.RebuildLine(
                phase="ledgers",
                done=done,
                of=survey.ledgers,
                through=page[-1][0] if is_due else None,
            )
            await self._notify(line)

    async def _judge(
        self, held: Mapping[int, Sequence[Held]], bookies: Bookies, *, writes: bool
    ) -> list[Judged]:
        try:
            return await self._tables.judge(held, bookies, writes=writes)
        except asyncpg.UniqueViolationError:
            # One of these ledgers was created just now. The second attempt sees and locks its row.
            return await self._tables.judge(held, bookies, writes=writes)

    async def _decide_logs(self, bookies: Bookies) -> None:
        tally = self._tally
        placed = [place for places in tally.by_log.values() for place in places]
        shared = {ledger_id for place in placed for ledger_id, _ in place.shared} | tally.forked
        existing = await self._tables.log_names()
        unsure: list[rebuild_bodies.RebuildFinding] = []
        for name in sorted(existing | tally.by_log.keys()):
            deletions = tally.deletions(name)
            found = tally.by_log.get(name, [])
            ledgers = [one for one in found if not deletions.include(one)]
            if name not in existing and not ledgers and shared >= {one.ledger_id for one in found}:
                continue  # the log is deleted, and only forks reference these ledgers
            decision = await self._tables.judge_log(
                name,
                ledgers,
                tally.buried,
                writes=not self._ask.dry_run,
                deletions=deletions,
                shared=shared,
                silent=len(bookies.silent),
            )
            tally.logs[decision.action] += 1
            tally.holes += len(decision.holes)
            if why := _log_finding(decision):
                finding = rebuild_bodies.RebuildFinding(log=name, action=decision.action, why=why)
                if decision.action is Action.SAME and decision.why:
                    unsure.append(finding)
                else:
                    tally.find(finding)
        # Add these findings last: any log without records may cause one, and a report is limited.
        for finding in unsure:
            tally.find(finding)

    def _report(
        self,
        cluster_id: str,
        sources: Sequence[Source],
        bookies: Bookies,
        cookies: Sequence[str],
        next_id: int,
    ) -> rebuild_bodies.RebuildReport:
        tally = self._tally
        return rebuild_bodies.RebuildReport(
            cluster_id=cluster_id,
            dry_run=self._ask.dry_run,
            bookies=tuple(
                rebuild_bodies.AskedBookie(
                    bookie=source.head.bookie, url=source.url, may_lack=source.head.may_lack
                )
                for source in sources
            ),
            silent=tuple(sorted(bookies.silent)),
            ledgers=dict(tally.ledgers),
            logs=dict(tally.logs),
            open_ledgers=tally.open_ledgers,
            may_be_deleted=tally.may_be_deleted,
            sealed_passwords=tally.sealed_passwords,
            holes=tally.holes,
            cookies=tuple(cookies),
            next_ledger_id=next_id,
            findings=tuple(tally.findings),
            not_rebuilt=rebuild_bodies.NOT_REBUILT,
            findings_left_out=tally.left_out,
        )


async def _pages(
    ledgers: AsyncIterator[tuple[int, list[tuple[Source, rebuild_bodies.HeldRows]]]],
) -> AsyncIterator[list[tuple[int, list[tuple[Source, rebuild_bodies.HeldRows]]]]]:
    page = []
    async for ledger in ledgers:
        page.append(ledger)
        if len(page) == _AT_ONCE:
            yield page
            page = []
    if page:
        yield page


def _held(holding: Sequence[tuple[Source, rebuild_bodies.HeldRows]]) -> list[Held]:
    # Members have equal copies, so decode each text only once.
    rows: dict[str, LedgerMetadata] = {}
    for _, held in holding:
        for copy in held.copies:
            if copy not in rows:
                rows[copy] = row_copies.decode(copy)
    return [
        Held(
            source.head.bookie,
            held.ledger_key,
            held.deleted,
            tuple(rows[copy] for copy in held.copies),
            is_limbo=held.limbo,
        )
        for source, held in holding
    ]


def _place_of(row: LedgerMetadata, *, has_row: bool, hides_next: bool) -> LedgerPlace:
    tags = dict(row.extra)
    return LedgerPlace(
        row.ledger_id,
        row.first_offset,
        row.last_entry,
        row.length or 0,
        row.quorum,
        row.digest,
        row.lineage,
        has_row,
        custom=None if TRANSACTION_TAG in tags else row.custom,
        is_packed=tags.get(PACKED_TAG) == "true",
        hides_next=hides_next,
    )


def _log_finding(decision: LogDecision) -> str:
    """Return the report's finding about a log, or "" if there is none."""
    reported = [decision.why] if decision.why else []
    if decision.holes:
        reported.append(
            f"holes, where reads fail until a rebuild finds the rows: ledgers {shown(decision.holes)}"
        )
    if not decision.why and decision.action is Action.WRITE and decision.unplaced:
        reported.append(f"ledgers without a place in the log: {shown(decision.unplaced)}")
    return "; ".join(reported)


def _cluster_of(source: Source) -> str:
    return "" if source.head.cookie is None else source.head.cookie.cluster_id
