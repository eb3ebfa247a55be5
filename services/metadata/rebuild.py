"""Rebuilds the database's rows from what bookies hold (rule 18d).

Two passes over all ledgers. The first one finds out which bookies the rows name, so that it is known who is silent,
and which ids are taken. The second one decides on some ledgers at a time and writes them in one transaction, by
ascending id: a rebuild that ended early continues behind the last one, and one that is repeated changes nothing.
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
from quorumlog.protocol.rebuild_log import LedgerPlace, LogDecision
from quorumlog.wire import row_copies
from quorumlog.wire.log_bodies import PACKED_TAG, TRANSACTION_TAG
from quorumlog.wire.rebuild_bodies import (
    NOT_REBUILT,
    AskedBookie,
    HeldRows,
    RebuildAsk,
    RebuildFinding,
    RebuildLine,
    RebuildReport,
)
from services.metadata.cookies import CookieStore
from services.metadata.inquiry import Source, SourceAway, find_sources, merged
from services.metadata.liveness import Liveness
from services.metadata.rebuild_store import Judged, RebuildStore, RebuildTables, StandIn

log = logging.getLogger(__name__)

_AT_ONCE: Final = 200
"""Ledgers of one transaction: some 50 ms, in which nobody else changes these (taste)."""
_PROGRESS_EVERY: Final = 1000
_FINDINGS_KEPT: Final = 1000
"""Findings in a report; the others are counted (taste)."""

Tell = Callable[[RebuildLine], Awaitable[None]]


@dataclass(slots=True)
class Survey:
    """What the first pass found."""

    ledgers: int = 0
    highest: int = -1
    named: set[str] = field(default_factory=set)
    """Bookies that the newest copies name."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """By name: the highest incarnation that any copy names."""

    def note(self, rows: Sequence[LedgerMetadata]) -> None:
        """Remember whom the copies of one ledger's rows name."""
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
    """What the second pass did."""

    ledgers: Counter[Action] = field(default_factory=Counter)
    logs: Counter[Action] = field(default_factory=Counter)
    open_ledgers: int = 0
    may_be_deleted: int = 0
    sealed_passwords: int = 0
    holes: int = 0
    findings: list[RebuildFinding] = field(default_factory=list)
    left_out: int = 0
    buried: set[int] = field(default_factory=set)
    freed: int = 0
    """Deleted ledgers whose ids the database would give to others, which a later rebuild would bury."""
    by_log: dict[str, list[LedgerPlace]] = field(default_factory=dict)
    deleted_logs: dict[str, int] = field(default_factory=dict)
    """By name: the last ledger of a log of this name that was deleted."""
    forked: set[int] = field(default_factory=set)
    """Ledgers that stayed when their log was deleted, since forks named them."""

    def find(self, finding: RebuildFinding) -> None:
        """Remember what people should know."""
        if len(self.findings) < _FINDINGS_KEPT:
            self.findings.append(finding)
        else:
            self.left_out += 1

    def note_deleted_logs(self, rows: Iterable[LedgerMetadata]) -> None:
        """Remember logs that were deleted with these ledgers, or without them."""
        for row in rows:
            if row.deletion in {Deletion.WITH_LOG, Deletion.OF_LOG} and row.log is not None:
                known = self.deleted_logs.get(row.log, -1)
                self.deleted_logs[row.log] = max(known, row.ledger_id)
                if row.deletion is Deletion.OF_LOG:
                    self.forked.add(row.ledger_id)

    def count(self, judged: Judged, bookies: Bookies) -> None:
        """Count a ledger."""
        decision, row = judged.decision, judged.row
        self.ledgers[decision.action] += 1
        if decision.why:
            self.find(
                RebuildFinding(ledger_id=judged.ledger_id, action=decision.action, why=decision.why)
            )
        if decision.action is Action.TOMBSTONE:
            self.buried.add(judged.ledger_id)
            self.freed += judged.is_free
        elif row is not None and row.log is not None:
            hides_next = row.state is State.CLOSED and bookies.may_hide_later(row)
            place = _place_of(row, has_row=judged.has_row, hides_next=hides_next)
            self.by_log.setdefault(row.log, []).append(place)
        if decision.row is not None:
            is_open = decision.row.state is not State.CLOSED
            self.open_ledgers += is_open
            self.may_be_deleted += not is_open and bookies.may_hide_later(decision.row)
            self.sealed_passwords += is_sealed(decision.row.access_key)


@dataclass(eq=False)
class Rebuilder:
    """Rebuilds one service's database."""

    store: RebuildStore
    _cookies: CookieStore
    _liveness: Liveness
    _credentials: Credentials = ANONYMOUS

    async def run(self, ask: RebuildAsk, tell: Tell) -> RebuildReport:
        """Rebuild; `tell` gets the progress. Raises: InvalidRequest, SourceAway, MetadataUnavailable."""
        async with self._begun(ask, tell) as work:
            return await work.run()

    async def count_behind(self, lost: Collection[str], tell: Tell) -> int:
        """How many rows a rebuild would write, since bookies know of later ones, or of deleted ids that are free. `lost`: bookies that
        never return; `tell` gets the progress. Raises: InvalidRequest while a rebuild runs, SourceAway, MetadataUnavailable.
        """
        ask = RebuildAsk(dry_run=True, without=tuple(lost))
        async with self._begun(ask, tell) as work:
            return await work.count_behind()

    @asynccontextmanager
    async def _begun(self, ask: RebuildAsk, tell: Tell) -> AsyncIterator["_Work"]:
        """A rebuild, which asks all bookies whose URLs are known."""
        async with self.store.begin() as tables, service_session(self._credentials) as session:
            rows = await self._cookies.list()
            listed = await self._liveness.bookies(rows)
            services = await self._liveness.services()
            urls = {row.cookie.url for row in rows} | {bookie.url for bookie in listed.bookies}
            urls |= {found.url for found in services.services if found.kind == "bookie"}
            urls |= set((await self._liveness.bookie_urls()).values())
            urls |= {url.rstrip("/") for url in ask.bookies}
            registered = {row.name for row in rows}
            yield _Work(tables, session, ask, tell, urls - {""}, registered)


@dataclass(eq=False)
class _Work:
    """One rebuild."""

    _tables: RebuildTables
    _session: aiohttp.ClientSession
    _ask: RebuildAsk
    _tell: Tell
    _urls: set[str]
    """Whom to ask."""
    _registered: set[str]
    """The names of bookies."""
    _tally: _Tally = field(default_factory=_Tally)

    async def run(self) -> RebuildReport:
        """All passes."""
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
        await self._decide_logs()
        if writes and self._ask.take_over:
            # Not before the rows are written: over older rows a recovery would cut off what was acknowledged.
            witnesses = {one for source in sources for one in source.head.witnesses}
            await self._tables.accept_lost(cluster_id, witnesses, self._ask.without)
        # Last: with its cookie a bookie that waits begins to serve.
        cookies = await self._put_cookies(sources) if writes else []
        return self._report(cluster_id, sources, bookies, cookies, next_id)

    async def count_behind(self) -> int:
        """How many rows would be written, and tombstones of ids that are free. Each registered bookie is heard: one that answers other questions only may
        hold the copy.
        """
        cluster_id = await self._tables.cluster_id()
        sources = [
            source
            for source in await find_sources(self._session, self._urls)
            if _cluster_of(source) == cluster_id
        ]
        untold = self._registered - {source.name for source in sources} - set(self._ask.without)
        if untold:
            raise SourceAway(f"{', '.join(sorted(untold))}: no answer to what rows it holds")
        survey = await self._survey(sources)
        added = await self._stand_ins(sources, survey)
        bookies = await self._bookies(sources, survey, added)
        await self._decide_ledgers(sources, bookies, survey)
        # Also where nothing is behind: copies of an accepted loss stay, and a later rebuild may write them.
        await self._tables.put_stand_ins(cluster_id, added)
        return self._tally.ledgers[Action.WRITE] + self._tally.freed

    async def _cluster(self, sources: Sequence[Source]) -> str:
        """The cluster that all bookies are of, which an empty database may take over. Raises: InvalidRequest."""
        if not sources:
            raise InvalidRequest("no bookie answers: name their URLs, or start them")
        clusters = {
            source.head.cookie.cluster_id for source in sources if source.head.cookie is not None
        }
        cluster_id = await self._tables.cluster_id()
        if clusters == {cluster_id}:
            return cluster_id
        if len(clusters) > 1 or not await self._tables.is_empty():
            told = ", ".join(f"{source.name}: {_cluster_of(source)}" for source in sources)
            raise InvalidRequest(
                f"the database is of cluster {cluster_id}, and the bookies say {told}. Only an empty"
                " database can take a cluster over, and only of one cluster"
            )
        found = clusters.pop()
        if not (self._ask.dry_run or self._ask.take_over):
            raise InvalidRequest(
                f"the database is empty, and the bookies are of cluster {found}: to make it that"
                " cluster's database, ask for `take_over`"
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
            # Higher ids were chosen by callers, and the sequence of ids never comes there.
            if ledger_id < ASSIGNED_ID_END:
                found.highest = ledger_id
            texts = {copy for _, held in holding for copy in held.copies}
            found.note([row_copies.decode(text) for text in texts])
            if found.ledgers % _PROGRESS_EVERY == 0:
                await self._tell(RebuildLine(phase="survey", done=found.ledgers))
        return found

    async def _stand_ins(self, sources: Sequence[Source], survey: Survey) -> dict[str, StandIn]:
        """The cookies to be written before the first ledger, by name (rule 15b)."""
        present = {name: one.incarnation for name, one in (await self._tables.registered()).items()}
        for source in sources:
            present[source.name] = max(source.incarnation, present.get(source.name, 0))
        added = stand_ins(survey.incarnations, present)
        return {name: StandIn(one, name not in survey.named) for name, one in added.items()}

    async def _bookies(
        self, sources: Sequence[Source], survey: Survey, added: Mapping[str, StandIn]
    ) -> Bookies:
        """`added`: cookies that are written, or would be."""
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
            line = RebuildLine(
                phase="ledgers",
                done=done,
                of=survey.ledgers,
                through=page[-1][0] if is_due else None,
            )
            await self._tell(line)

    async def _judge(
        self, held: Mapping[int, Sequence[Held]], bookies: Bookies, *, writes: bool
    ) -> list[Judged]:
        try:
            return await self._tables.judge(held, bookies, writes=writes)
        except asyncpg.UniqueViolationError:
            # Somebody created one of these ledgers just now: its row is seen and locked the next time.
            return await self._tables.judge(held, bookies, writes=writes)

    async def _decide_logs(self) -> None:
        tally = self._tally
        placed = [place for places in tally.by_log.values() for place in places]
        shared = {ledger_id for place in placed for ledger_id, _ in place.shared} | tally.forked
        existing = await self._tables.log_names()
        unsure: list[RebuildFinding] = []
        for name in sorted(existing | tally.by_log.keys()):
            through = tally.deleted_logs.get(name, -1)
            found = tally.by_log.get(name, [])
            ledgers = [one for one in found if one.ledger_id > through]
            if name not in existing and not ledgers and shared >= {one.ledger_id for one in found}:
                continue  # the log is deleted, and forks of it have these ledgers
            decision = await self._tables.judge_log(
                name,
                ledgers,
                tally.buried,
                writes=not self._ask.dry_run,
                deleted_through=through,
                shared=shared,
            )
            tally.logs[decision.action] += 1
            tally.holes += len(decision.holes)
            if why := _log_finding(decision):
                finding = RebuildFinding(log=name, action=decision.action, why=why)
                if decision.action is Action.SAME and decision.why:
                    unsure.append(finding)
                else:
                    tally.find(finding)
        # Last: there may be as many as logs without records, and a report has room for some findings only.
        for finding in unsure:
            tally.find(finding)

    def _report(
        self,
        cluster_id: str,
        sources: Sequence[Source],
        bookies: Bookies,
        cookies: Sequence[str],
        next_id: int,
    ) -> RebuildReport:
        tally = self._tally
        return RebuildReport(
            cluster_id=cluster_id,
            dry_run=self._ask.dry_run,
            bookies=tuple(
                AskedBookie(
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
            not_rebuilt=NOT_REBUILT,
            findings_left_out=tally.left_out,
        )


async def _pages(
    ledgers: AsyncIterator[tuple[int, list[tuple[Source, HeldRows]]]],
) -> AsyncIterator[list[tuple[int, list[tuple[Source, HeldRows]]]]]:
    page = []
    async for ledger in ledgers:
        page.append(ledger)
        if len(page) == _AT_ONCE:
            yield page
            page = []
    if page:
        yield page


def _held(holding: Sequence[tuple[Source, HeldRows]]) -> list[Held]:
    # Members hold equal copies: each text is read once.
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
    """What people should know of a log, or ""."""
    told = [decision.why] if decision.why else []
    if decision.holes:
        told.append(
            f"holes, where reads fail until a rebuild finds the rows: ledgers {shown(decision.holes)}"
        )
    if not decision.why and decision.action is Action.WRITE and decision.unplaced:
        told.append(f"ledgers without a place in the log: {shown(decision.unplaced)}")
    return "; ".join(told)


def _cluster_of(source: Source) -> str:
    return "" if source.head.cookie is None else source.head.cookie.cluster_id
