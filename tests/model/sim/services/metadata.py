"""The metadata service: its rules on dictionaries instead of Postgres.

What may become of a row or a cookie is judged by the service's own code (protocol/changes.py), and
so is what the database must contain (services/metadata/memory.py, rule 18a).
All else behaves as its SQL says: one contract holds both (tests/model/sim/test_contract.py).
"""

import re
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, cast

from quorumlog import header
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    LedgerExists,
    MetadataUnavailable,
    NoSuchLedger,
    QuorumLogError,
    RouteNotFound,
    VersionConflict,
)
from quorumlog.protocol.changes import (
    added_members,
    check_ledger,
    check_new_ledger,
    is_made_from,
    is_row,
)
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import (
    BookieList,
    Change,
    ClusterId,
    CopyWitnesses,
    HeldBody,
    LedgerChange,
    LedgerCreateBody,
    LedgerHeads,
    LedgerHeadsAsk,
    LedgerListBody,
    LedgerProof,
    LedgerProofs,
    LedgerProofsAsk,
    MissingWitness,
    RowDelete,
    ServiceList,
    WitnessAccept,
    WitnessState,
    document_of,
    json_of,
    token_of,
    witness_of,
    witnesses_from_header,
    witnesses_to_header,
)
from quorumlog.wire.log_bodies import LedgerIds
from services.metadata.attempts import ACCEPTED
from services.metadata.inquiry import Inquiry
from services.metadata.memory import Memory, Presented
from tests.model.sim.services.cookies import Cookies
from tests.model.sim.services.database import AskingDatabase, Database, Registered
from tests.model.sim.services.net import Answer, Net, Process, Request
from tests.model.sim.services.plan import ServicePlan
from tests.model.sim.services.repairs import CHANGES, READS, RUNS, ModelRoute, RepairQueue
from tests.model.sim.services.stream import ChangeStream
from tests.model.sim.services.tables import Tables

CLUSTER_ID: Final = "the-cluster"
_HELD_MAX: Final = 8
ASKING: Final[ContextVar["Metadata"]] = ContextVar("asking")
"""The process whose inquiry runs."""
_COPIES: Final = "/v1/witnesses/copies"
_CREATE: Final = "create ledger "
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Metadata(Process):
    """One process of the service. `changed` judges each change of a row that was applied."""

    def __init__(
        self,
        number: int,
        database: Database,
        net: Net,
        bookies: Callable[[], BookieList],
        changed: Callable[..., None],
    ) -> None:
        super().__init__(f"metadata-{number}", net)
        self.database = database
        self.url = url_of(number)
        self.stream = ChangeStream(self)
        self.away_until = 0
        """It has not found the server that took over."""
        self._bookies = bookies
        self._changed = changed
        self.heartbeats: Callable[[], dict[str, str]] = dict
        """The URL of each bookie's last heartbeat, by name."""
        database.processes.append(self)
        self._start()
        net.listeners[self.url] = self, self.handle
        ledger = r"/v1/ledgers/(?P<id>\d+)"
        self.queue, self.cookies = RepairQueue(self), Cookies(self)
        routes: tuple[ModelRoute, ...] = (
            ("GET", ledger, self._get, READS),
            ("PUT", ledger, self._change, CHANGES),
            ("DELETE", ledger, self._delete, CHANGES),
            ("POST", "/v1/ledgers", self._create, CHANGES),
            ("GET", "/v1/ledgers", self._list, READS),
            ("POST", "/v1/ledger-heads", self._heads, READS),
            ("POST", "/v1/ledger-proofs", self._proofs, READS),
            ("POST", "/v1/witnesses", self._confirm, CHANGES),
            ("POST", _COPIES, self._confirm, CHANGES),
            ("GET", "/v1/witnesses", lambda _request: self._witnesses(), RUNS),
            ("POST", "/v1/witnesses/accept", self._accept_lost, RUNS),
            ("GET", "/v1/bookies", lambda _request: self._bookies(), RUNS),
            ("GET", r"/v1/bookies/(?P<name>[^/]+)/ledgers", self._naming, READS),
            ("GET", "/v1/services", lambda _request: ServiceList(services=()), RUNS),
            ("GET", "/v1/cluster-id", lambda _request: ClusterId(cluster_id=CLUSTER_ID), RUNS),
            ("GET", "/health/ready", lambda _request: self._ready(), RUNS),
            *self.queue.routes,
            *self.cookies.routes,
        )
        self._plain = {(m, path): (work, how) for m, path, work, how in routes if "(" not in path}
        self._with_names = [
            (m, re.compile(path), work, how) for m, path, work, how in routes if "(" in path
        ]

    # --- the process -------------------------------------------------------------------------

    def _start(self) -> None:
        """Without any memory; what the bookies know it asks first (rule 18a)."""
        self.memory = Memory()
        self.memory.cluster_id = CLUSTER_ID
        self.heard: set[str] = set()
        """Tokens that it has answered or was presented, since it began."""
        self.asking = AskingDatabase(self)
        self.asking.asked_about = str(self.database.server)

    def restart(self) -> None:
        """It dies, and another one begins at its address."""
        self.net.note(self.name, "dies")
        self.stream.end()
        self.kill()
        self.is_alive, self.born_at = True, self.net.now
        self._start()
        self.asking.asked_about = None
        self.ask_bookies()

    def ask_bookies(self) -> None:
        """Ask the bookies that are registered, for as long as the process lives."""
        registered = cast("Any", Registered(self.database, self.heartbeats))
        inquiry = Inquiry(cast("Any", self.asking), registered, registered)
        _ = self.spawn(self._ask(inquiry))

    async def _ask(self, inquiry: Inquiry) -> None:
        ASKING.set(self)
        await inquiry.run()

    def check_database(self) -> None:
        """Raises: MetadataUnavailable while the database is away."""
        if max(self.database.down_until, self.away_until) > self.net.now:
            raise MetadataUnavailable("the database is away", outcome=NOT_DONE)

    @property
    def tables(self) -> Tables:
        """Those of the database."""
        return self.database.tables

    @property
    def utc(self) -> str:
        """The database's clock."""
        at = _EPOCH + timedelta(microseconds=self.net.now)
        return at.isoformat(timespec="microseconds").replace("+00:00", "Z")

    async def handle(self, request: Request) -> Answer:
        """Answer a request, and what its witnesses come to (rule 18a)."""
        self.check_database()
        given = request.headers.get(header.WITNESSES)
        # A list that can't be read is one witness that counts for nothing, and so is refused.
        witnesses = () if not given else witnesses_from_header(given) or (given,)
        presented = Presented(witnesses, "a client")
        if request.path == _COPIES:
            presented.witnesses += CopyWitnesses.model_validate_json(request.body).witnesses
        work, how = self._routed(request)
        if how is CHANGES or (how is READS and witnesses):
            self._check(presented)
        seen, before = self.memory.wanted, next(reversed(self.tables.attempts), None)
        try:
            reported = self._answered(work())
        except QuorumLogError as error:
            if presented.answer:
                headers = {
                    **error.extra_headers,
                    header.WITNESSES: witnesses_to_header(presented.answer),
                }
                raise error.replace(extra_headers=headers) from error
            raise
        token = next(reversed(self.tables.attempts), None)
        if token is not None and token != before:
            self.heard.add(token)
            self.memory.note_committed(token, seen)
            self.database.committed()
            presented.answer = self.memory.witnesses
        if presented.answer:
            reported.headers = {
                **reported.headers,
                header.WITNESSES: witnesses_to_header(presented.answer),
            }
        return reported

    def _check(self, presented: Presented) -> None:
        self.compare(presented)
        if not self.asking.has_asked:
            raise MetadataUnavailable("the bookies are asked what they know of the database")
        presented.answer = self.memory.witnesses

    def compare(self, presented: Presented) -> None:
        """Compare what somebody knows of the database with it. Raises: DatabaseWentBack."""
        self.heard.update(tokens_of(presented.witnesses))
        tokens = self.memory.presented(presented)
        wanted = {*self.memory.wanted, *tokens}
        found = (token for token in sorted(wanted) if token in self.tables.attempts)
        self.memory.compare(wanted, found, holder=presented.holder)

    def _witnesses(self) -> WitnessState:
        missing = sorted(self.memory.missing.items())
        return WitnessState(
            held=self.memory.witnesses,
            missing=tuple(
                MissingWitness(witness=witness_of(CLUSTER_ID, token), holder=holder)
                for token, holder in missing
            ),
        )

    def _accept_lost(self, request: Request) -> WitnessState:
        witnesses = WitnessAccept.model_validate_json(request.body).witnesses
        if len(tokens := tokens_of(witnesses)) < len(set(witnesses)):
            raise InvalidRequest("no witness of this cluster")
        self.tables.accept(tokens)
        self._check(Presented((), "a client"))
        return self._witnesses()

    def _confirm(self, _request: Request) -> WitnessState:
        if not 1 <= len(self.memory.wanted) <= _HELD_MAX:
            token = str(uuid.UUID(int=self.net.rng.getrandbits(128)))
            self.tables.record(token, "mark")
        return self._witnesses()

    def _routed(self, request: Request) -> tuple[Callable[[], object], str]:
        """The work that a request asks for, and what the service's database does of it."""
        if request.path == "/v1/changes":
            assert request.source is not None
            lines = self.stream.lines(request.source)
            return lambda: Answer(200, content=lines), RUNS
        asked = request.method, request.path
        if asked in self._plain:
            work, how = self._plain[asked]
            return partial(work, request), how
        for method, pattern, work, how in self._with_names:
            if method == request.method and (found := pattern.fullmatch(request.path)):
                return partial(work, request, **found.groupdict()), how
        raise RouteNotFound(f"{request.method} {request.path}")

    def _answered(self, reported: object) -> Answer:
        if self.net.plan.answer_loss and self.database.down_until > self.net.now:
            raise MetadataUnavailable("the answer of the database is lost", outcome=UNKNOWN)
        return reported if isinstance(reported, Answer) else Answer(200, json_of(reported))

    def _ready(self) -> Answer:
        if self.memory.missing:
            raise self.memory.error(self.memory.missing)
        return Answer(200, b"{}")

    # --- ledgers -----------------------------------------------------------------------------

    def _row(self, ledger_id: int) -> LedgerMetadata:
        row = self.tables.rows.get(ledger_id)
        if row is None:
            raise NoSuchLedger(ledger_id=ledger_id, deleted=ledger_id in self.tables.rows)
        return row

    def row(self, ledger_id: int) -> LedgerMetadata | None:
        """The row as it is, None where there is a tombstone."""
        return self.tables.rows[ledger_id]

    def _get(self, _request: Request, id: str) -> LedgerMetadata:  # noqa: A002
        return self._row(int(id))

    def _proofs(self, request: Request) -> LedgerProofs:
        body = LedgerProofsAsk.model_validate_json(request.body)
        lost = set(self._lost([a for held in body.ledgers for a in held.attempts], body.holder))
        return LedgerProofs(
            ledgers=tuple(
                self._proof(held, lost.intersection(held.attempts)) for held in body.ledgers
            )
        )

    def _proof(self, held: HeldBody, lost: set[str]) -> LedgerProof:
        rows, ledger_id = self.tables.rows, held.ledger_id
        row = None if lost else rows.get(ledger_id)
        is_deleted = not lost and ledger_id in rows and row is None
        return LedgerProof(
            ledger_id=ledger_id, row=row, deleted=is_deleted, lost=tuple(sorted(lost))
        )

    def _lost(self, held: list[str], holder: str) -> list[str]:
        attempts = self.tables.attempts
        lost = [token for token in held if attempts.get(token, ACCEPTED) == ACCEPTED]
        if lost and not self.tables.accepted:
            self.heard.update(lost)
            self.memory.compare(lost, [], holder=holder)
        return lost

    def _put(self, row: LedgerMetadata) -> LedgerMetadata:
        self.tables.rows[row.ledger_id] = row
        self.tables.versions[row.ledger_id] = row.version
        self.notify(
            Change(kind="change", ledger_id=row.ledger_id, version=row.version, state=row.state)
        )
        return row

    def notify(self, change: Change) -> None:
        """Announce a change to all who follow: all processes hear of it."""
        for process in self.database.processes:
            process.stream.notify(change)

    def _create(self, request: Request) -> LedgerMetadata:
        body = LedgerCreateBody.model_validate_json(request.body)
        tables, ledger_id = self.tables, body.row.ledger_id
        self._legal(check_new_ledger, body.row)
        done = tables.attempts.get(body.attempt)
        if done not in (None, ACCEPTED):
            if not done.startswith(_CREATE):
                raise InvalidRequest(f"this attempt was used for another change ({done})")
            return self._row(int(done.removeprefix(_CREATE)))
        if body.once is not None and body.once.token in tables.once:
            return self._row(tables.once[body.once.token])
        self.cookies.hold(added_members(None, body.row))
        while ledger_id < 0:
            tables.last_id += 1
            ledger_id = -1 if tables.last_id in tables.rows else tables.last_id
        if ledger_id in tables.rows:
            raise LedgerExists(ledger_id=ledger_id)
        tables.record(body.attempt, f"{_CREATE}{ledger_id}")
        if body.once is not None:
            tables.once[body.once.token] = ledger_id
        row = replace(
            body.row,
            ledger_id=ledger_id,
            version=1,
            attempt=body.attempt,
            ancestors=(),
            first_offset=None,
            lineage=None,
            created_at=self.utc,
            deletion=None,
        )
        self._judge(None, row)
        return self._put(row)

    def _change(self, request: Request, id: str) -> LedgerMetadata:  # noqa: A002
        body, target = LedgerChange.model_validate_json(request.body), f"ledger {id}"
        if body.row.ledger_id != int(id):
            raise InvalidRequest("the path and the row name different ledgers")
        old = self._row(int(id))
        if self.is_settled(body.attempt, target):
            return old
        if not is_made_from(old, body.row):
            current = document_of(old)
            raise VersionConflict(ledger_id=old.ledger_id, current=current)
        self._legal(check_ledger, old, body.row)
        self.cookies.hold(added_members(old, body.row), ledger_id=old.ledger_id)
        new = replace(
            body.row.changed_by(body.attempt, old),
            first_offset=old.first_offset,
            lineage=old.lineage,
            created_at=old.created_at,
            deletion=None,
        )
        self.tables.record(body.attempt, target)
        self.net.note("row", id, f"v{new.version}", new.state)
        self._judge(old, new)
        for missed in body.missed:
            self.queue.add(old.ledger_id, missed.member, ((missed.first, missed.last),))
        return self._put(new)

    def _delete(self, request: Request, id: str) -> Answer:  # noqa: A002
        body, ledger_id = RowDelete.model_validate_json(request.body), int(id)
        target = f"delete ledger {id}"
        if ledger_id in self.tables.rows and self.is_settled(body.attempt, target):
            return Answer(204)
        old = self._row(ledger_id)
        if not is_row(old, version=body.version, attempt=body.row_attempt):
            raise VersionConflict(ledger_id=ledger_id, current=document_of(old))
        if old.state is not State.CLOSED:
            raise InvalidRequest("only a CLOSED ledger is deleted", ledger_id=ledger_id)
        self.tables.record(body.attempt, target)
        self.tables.rows[ledger_id] = None
        self.tables.versions[ledger_id] = old.version + 1
        for key in [key for key in self.tables.repairs if key[0] == ledger_id]:
            del self.tables.repairs[key]
        self.net.note("row", id, "deleted")
        self._judge(old, None)
        self.notify(
            Change(kind="change", ledger_id=ledger_id, version=old.version + 1, deleted=True)
        )
        return Answer(204)

    def _judge(self, before: LedgerMetadata | None, after: LedgerMetadata | None) -> None:
        """`is_known`: this process knew that the database lacks changes."""
        is_known = bool(self.heard & self.database.restores.lost)
        self._changed(before, after, now=self.net.now, is_known=is_known)

    def is_settled(self, attempt: str, target: str) -> bool:
        """Whether this attempt was applied already (rule 6); one whose loss was accepted was not."""
        found = self.tables.attempts.get(attempt)
        if found not in (None, ACCEPTED, target):
            raise InvalidRequest(f"this attempt was used for another change ({found})")
        return found == target

    def _legal(self, check: Callable[..., None], *rows: LedgerMetadata) -> None:
        """What the service refuses. No client of ours asks for it: that is a defect as well."""
        try:
            check(*rows)
        except InvalidRequest as error:
            self.net.loop.failures.append(f"an illegal change was asked for: {error.detail}")
            raise

    def _list(self, request: Request) -> LedgerListBody:
        query = request.query
        after, limit = int(query.get("after", -1)), int(query.get("limit", 100))
        tags = {k[9:-1]: value for k, value in query.items() if k.startswith("metadata[")}
        found = [
            row
            for _, row in sorted(self.tables.rows.items())
            if row is not None
            and row.ledger_id > after
            and query.get("state", row.state) == row.state
            and query.get("log", row.log) == row.log
            and tags.items() <= set(row.custom)
            and ("bookie" not in query or query["bookie"] in _names_of(row))
        ]
        page = found[:limit]
        return LedgerListBody(
            ledgers=tuple(page), next=page[-1].ledger_id if len(found) > limit else None
        )

    def _naming(self, request: Request, name: str) -> LedgerIds:
        after, limit = int(request.query.get("after", -1)), int(request.query["limit"])
        rows = (row for _, row in sorted(self.tables.rows.items()) if row is not None)
        found = (row.ledger_id for row in rows if row.ledger_id > after and name in _names_of(row))
        return LedgerIds(ledgers=tuple(islice(found, limit)))

    def _heads(self, request: Request) -> LedgerHeads:
        found = []
        for ledger_id in sorted(set(LedgerHeadsAsk.model_validate_json(request.body).ledgers)):
            if ledger_id not in self.tables.rows:
                continue
            row = self.tables.rows[ledger_id]
            found.append(
                LedgerHead(
                    ledger_id=ledger_id,
                    version=self.tables.versions[ledger_id],
                    state=None if row is None else row.state,
                    writer_id=None if row is None or row.writer is None else row.writer.id,
                )
            )
        return LedgerHeads(ledgers=tuple(found))


def url_of(number: int) -> str:
    """The address of a process."""
    return f"http://metadata-{number}:1"


def urls_of(plan: ServicePlan) -> tuple[str, ...]:
    """The addresses of all processes."""
    return tuple(url_of(number + 1) for number in range(plan.metadatas))


def tokens_of(witnesses: Iterable[str]) -> set[str]:
    """The tokens that sound witnesses stand for."""
    return {token for w in witnesses if (token := token_of(CLUSTER_ID, w)) is not None}


def _names_of(row: LedgerMetadata) -> set[str]:
    """The bookies that a row names, with their incarnations and without."""
    return {*row.all_members, *map(member_name, row.all_members)}


def outcome_of(error: QuorumLogError) -> str:
    """For the trace."""
    return f"{error.code} ({error.outcome})"
