"""The metadata service: its rules on dictionaries instead of Postgres.

What may become of a row is judged by the service's own code (protocol/changes.py), and
so is what the database must contain (services/metadata/memory.py, rule 18a).
Attempts, tombstones, the repair queue and leases behave as its SQL says; tests/metadata tests that.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    LedgerExists,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchRepair,
    QuorumLogError,
    RouteNotFound,
    VersionConflict,
)
from quorumlog.protocol.changes import check_ledger, check_new_ledger
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import (
    Body,
    BookieList,
    Change,
    LedgerChange,
    LedgerCreate,
    LedgerDelete,
    LedgerHeadBody,
    LedgerHeads,
    LedgerHeadsAsk,
    LedgerList,
    LedgerRow,
    ServiceList,
    WitnessState,
)
from quorumlog.wire.repair_bodies import (
    Lease,
    LeaseTake,
    Ranges,
    Repair,
    RepairClaim,
    RepairFail,
    RepairList,
    RepairProgress,
    RepairRemaining,
    RepairsAdd,
    RepairSettings,
)
from quorumlog.wire.witnesses import HEADER, from_header, to_header, token_of
from services.metadata.memory import Memory, Presented
from tests.sim.plan import SECOND
from tests.sim.services.net import Answer, Net, Process, Request
from tests.sim.services.restores import Restores
from tests.sim.services.tables import Held, Item, Tables

URL: Final = "http://metadata:1"
CLUSTER_ID: Final = "the-cluster"
_PAUSE_S_MAX: Final = 300
_HELD_MAX: Final = 8


@dataclass(slots=True, eq=False)
class _Follower:
    """A stream of changes."""

    who: Process
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class Metadata(Process):
    """The service. `changed` judges each change of a row that was applied."""

    def __init__(
        self,
        net: Net,
        bookies: Callable[[], BookieList],
        changed: Callable[..., None],
        restores: Restores,
    ) -> None:
        super().__init__("metadata", net)
        self.tables = Tables()
        self.memory = _memory()
        self._restores = restores
        self.down_until = 0
        self._bookies = bookies
        self._changed = changed
        self._streams: list[_Follower] = []
        self.muted: dict[str, int] = {}
        """Until when nothing of the stream of changes comes to a process, though answers do."""
        net.listeners[URL] = self, self.handle
        ledger, item = r"/v1/ledgers/(?P<id>\d+)", r"/v1/repairs/(?P<id>\d+)/(?P<member>[^/]+)"
        self._routes: tuple[tuple[str, str, Callable[..., Body | Answer]], ...] = (
            ("GET", ledger, self._get),
            ("PUT", ledger, self._change),
            ("DELETE", ledger, self._delete),
            ("POST", "/v1/ledgers", self._create),
            ("GET", "/v1/ledgers", self._list),
            ("POST", "/v1/ledger-heads", self._heads),
            ("POST", "/v1/witnesses", self._confirm),
            ("GET", "/v1/bookies", lambda _request: self._bookies()),
            ("GET", "/v1/services", lambda _request: ServiceList(services=())),
            ("GET", "/v1/cluster-id", lambda _request: _document({"cluster_id": CLUSTER_ID})),
            ("GET", "/v1/repairs", self._list_repairs),
            ("POST", "/v1/repairs", self._add_repairs),
            ("POST", "/v1/repairs/claim", self._claim),
            ("POST", "/v1/repairs/hurry", self._hurry),
            ("POST", item + "/progress", self._progress),
            ("POST", item + "/fail", self._fail),
            ("GET", "/v1/repair-settings", lambda _request: RepairSettings()),
            ("PUT", r"/v1/leases/(?P<name>\w+)", self._take_lease),
        )

    async def handle(self, request: Request) -> Answer:
        """Answer a request, and what its witnesses come to (rule 18a)."""
        presented = Presented(from_header(request.headers.get(HEADER, "")), "a client")
        proves = bool(presented.witnesses) or request.method != "GET"
        if proves and self.down_until <= self.net.now and "heartbeat" not in request.path:
            self._check(presented)
        seen, before = self.memory.wanted, len(self.tables.attempts)
        try:
            told = await self._handle(request)
        except QuorumLogError as error:
            if presented.answer:
                headers = {**error.extra_headers, HEADER: to_header(presented.answer)}
                raise error.replace(extra_headers=headers) from error
            raise
        if len(self.tables.attempts) > before:
            token = next(reversed(self.tables.attempts))
            self._restores.heard((token,))
            self.memory.note_committed(token, seen)
            presented.answer = self.memory.witnesses
        if presented.answer:
            told.headers = {**told.headers, HEADER: to_header(presented.answer)}
        return told

    def _check(self, presented: Presented) -> None:
        self._restores.heard(tokens_of(presented.witnesses))
        tokens = self.memory.presented(presented)
        wanted = {*self.memory.wanted, *tokens}
        found = (token for token in sorted(wanted) if token in self.tables.attempts)
        self.memory.compare(wanted, found, holder=presented.holder)
        presented.answer = self.memory.witnesses

    def _confirm(self, _request: Request) -> WitnessState:
        if not 1 <= len(self.memory.wanted) <= _HELD_MAX:
            token = str(uuid.UUID(int=self.net.rng.getrandbits(128)))
            self.tables.attempts[token] = "mark"
        return WitnessState(held=self.memory.witnesses, missing=())

    def save(self) -> None:
        """A backup of the tables."""
        self._restores.save(self.tables)

    def go_back(self, which: int, *, is_new_process: bool) -> None:
        """Older tables are put in the place of these; the process over them may be another one."""
        older = self._restores.go_back(
            self.tables, which, self.net.now, is_new_process=is_new_process
        )
        if older is not None:
            self.net.note("database", "back by", len(self._restores.lost))
            self.tables = older
            if is_new_process:
                self.memory = _memory()
            self.break_streams()

    def put_back(self) -> None:
        """The right tables again. What the older ones took is gone with them, and an operator says
        so: such changes are known to have been answered as well.
        """
        if self._restores.is_back:
            older, self.tables = self.tables, self._restores.put_back()
            self.net.note("database", "right again")
            self.break_streams()
            strays = older.attempts.keys() - self.tables.attempts.keys()
            self.net.after(SECOND, self._accept, sorted(strays))

    def _accept(self, tokens: list[str]) -> None:
        self.tables.attempts |= dict.fromkeys(tokens, "accepted as lost")

    async def _handle(self, request: Request) -> Answer:
        """Answer a request, or say that the database is away."""
        if self.down_until > self.net.now:
            raise MetadataUnavailable("the database is away", outcome=NOT_DONE)
        if request.path == "/v1/changes":
            assert request.source is not None
            return Answer(200, content=self._stream(_Follower(request.source)))
        for method, pattern, work in self._routes:
            found = re.fullmatch(pattern, request.path)
            if method == request.method and found:
                told = work(request, **found.groupdict())
                if self.net.plan.answer_loss and self.down_until > self.net.now:
                    raise MetadataUnavailable("the answer of the database is lost", outcome=UNKNOWN)
                if isinstance(told, Answer):
                    return told
                return Answer(200, told.model_dump_json().encode())
        raise RouteNotFound(f"{request.method} {request.path}")

    # --- ledgers -----------------------------------------------------------------------------

    def _row(self, ledger_id: int) -> LedgerRow:
        row = self.tables.rows.get(ledger_id)
        if row is None:
            raise NoSuchLedger(ledger_id=ledger_id, deleted=ledger_id in self.tables.rows)
        return row

    def row(self, ledger_id: int) -> LedgerMetadata | None:
        """The row as it is, None where there is a tombstone."""
        row = self.tables.rows[ledger_id]
        return None if row is None else row.to_core()

    def _get(self, _request: Request, id: str) -> LedgerRow:  # noqa: A002
        return self._row(int(id))

    def _put(self, row: LedgerRow) -> LedgerRow:
        self.tables.rows[row.ledger_id] = row
        self.tables.versions[row.ledger_id] = row.version
        self._tell(
            Change(kind="change", ledger_id=row.ledger_id, version=row.version, state=row.state)
        )
        return row

    def _create(self, request: Request) -> LedgerRow:
        body = LedgerCreate.model_validate_json(request.body)
        done = self.tables.attempts.get(body.attempt)
        if done is not None:
            return self._row(int(done))
        if body.idempotency_key in self.tables.keys:
            return self._row(self.tables.keys[body.idempotency_key])
        check_new_ledger(body.row.core(ledger_id=0, version=1, created_at=""))
        ledger_id = body.row.ledger_id
        if ledger_id is None:
            ledger_id = len(self.tables.rows) + 1
            while ledger_id in self.tables.rows:
                ledger_id += 1
        if ledger_id in self.tables.rows:
            raise LedgerExists(ledger_id=ledger_id)
        core = body.row.core(ledger_id=ledger_id, version=1, created_at="")
        self.tables.attempts[body.attempt] = str(ledger_id)
        if body.idempotency_key is not None:
            self.tables.keys[body.idempotency_key] = ledger_id
        self._changed(None, core, now=self.net.now)
        return self._put(LedgerRow.from_core(core))

    def _change(self, request: Request, id: str) -> LedgerRow:  # noqa: A002
        body = LedgerChange.model_validate_json(request.body)
        old = self._row(int(id))
        if body.attempt in self.tables.attempts:
            return old
        if old.version != body.row.version:
            current = old.model_dump(mode="json")
            raise VersionConflict(ledger_id=old.ledger_id, current=current)
        try:
            check_ledger(old.to_core(), body.row.to_core())
        except InvalidRequest as error:
            raise AssertionError(f"an illegal change was asked for: {error.detail}") from error
        new = body.row.model_copy(update={"version": old.version + 1})
        self.tables.attempts[body.attempt] = id
        self.net.note("row", id, f"v{new.version}", new.state)
        self._changed(old.to_core(), new.to_core(), now=self.net.now)
        for missed in body.missed:
            self._queue(old.ledger_id, missed.member, ((missed.first, missed.last),))
        return self._put(new)

    def _delete(self, request: Request, id: str) -> Answer:  # noqa: A002
        body, ledger_id = LedgerDelete.model_validate_json(request.body), int(id)
        if body.attempt in self.tables.attempts:
            return Answer(204)
        old = self._row(ledger_id)
        if old.version != body.version:
            raise VersionConflict(ledger_id=ledger_id, current=old.model_dump(mode="json"))
        if old.state is not State.CLOSED:
            raise InvalidRequest("only a CLOSED ledger is deleted", ledger_id=ledger_id)
        self.tables.attempts[body.attempt] = id
        self.tables.rows[ledger_id] = None
        self.tables.versions[ledger_id] = old.version + 1
        for key in [key for key in self.tables.repairs if key[0] == ledger_id]:
            del self.tables.repairs[key]
        self.net.note("row", id, "deleted")
        self._changed(old.to_core(), None, now=self.net.now)
        self._tell(
            Change(kind="change", ledger_id=ledger_id, version=old.version + 1, deleted=True)
        )
        return Answer(204)

    def _list(self, request: Request) -> LedgerList:
        query = request.query
        after, limit = int(query.get("after", -1)), int(query["limit"])
        found = []
        for ledger_id in sorted(self.tables.rows):
            row = self.tables.rows[ledger_id]
            if row is None or ledger_id <= after or query.get("state", row.state) != row.state:
                continue
            wanted = query.get("bookie")
            if wanted is None or wanted in _names_of(row):
                found.append(row)
        page = found[:limit]
        return LedgerList(
            ledgers=tuple(page), next=page[-1].ledger_id if len(found) > limit else None
        )

    def _heads(self, request: Request) -> LedgerHeads:
        found = []
        for ledger_id in LedgerHeadsAsk.model_validate_json(request.body).ledgers:
            if ledger_id not in self.tables.rows:
                continue
            row = self.tables.rows[ledger_id]
            found.append(
                LedgerHeadBody(
                    ledger_id=ledger_id,
                    version=self.tables.versions[ledger_id],
                    state=None if row is None else row.state,
                    writer_id=None if row is None or row.writer is None else row.writer.id,
                )
            )
        return LedgerHeads(ledgers=tuple(found))

    # --- the stream of changes ---------------------------------------------------------------

    async def _stream(self, follower: "_Follower") -> AsyncIterator[bytes]:
        self._streams.append(follower)
        try:
            yield b'{"kind":"hello"}'
            while (line := await follower.lines.get()) is not None:
                yield line
        finally:
            if follower in self._streams:
                self._streams.remove(follower)

    def _tell(self, change: Change) -> None:
        line = change.model_dump_json().encode()
        for follower in self._streams:
            delay = self.net.rng.randint(*self.net.plan.delay)
            self.net.after(delay, self._pass, follower, line)

    def _pass(self, follower: "_Follower", line: bytes | None) -> None:
        """A line comes late over a link that is cut: it is sent again, as TCP does."""
        until = self.silent_until(follower.who)
        if until > self.net.now:
            self.net.after(until - self.net.now, self._pass, follower, line)
        else:
            follower.lines.put_nowait(line)

    def silent_until(self, who: Process) -> int:
        """Until when a process hears nothing of the stream."""
        return max(
            self.net.cut.get((self.name, who.name), 0),
            self.muted.get(who.name, 0),
            who.paused_until,
        )

    def break_streams(self, who: Process | None = None) -> None:
        """Whoever follows has to begin anew."""
        for follower in self._streams:
            if who is None or follower.who is who:
                follower.lines.put_nowait(None)

    def end_if_silent(self, who: Process) -> None:
        """Who heard nothing for as long as three heartbeats take begins anew."""
        if self.silent_until(who) > self.net.now:
            self.break_streams(who)

    # --- repairs and leases --------------------------------------------------------------------

    def _queue(
        self,
        ledger_id: int,
        member: str,
        ranges: Ranges,
        *,
        survivors: int | None = None,
        moves: bool = False,
    ) -> None:
        if self.tables.rows.get(ledger_id) is None:
            return
        item = self.tables.repairs.setdefault((ledger_id, member), Item([], version=0))
        item.ranges = _joined([*item.ranges, *ranges])
        item.version = self._new_version()
        item.moves |= moves
        if item.worker is not None:
            item.worker, item.next_try_at = None, self.net.now
        if survivors is not None:
            item.survivors = survivors

    def _new_version(self) -> int:
        self.tables.repair_version += 1
        return self.tables.repair_version

    def _list_repairs(self, _request: Request) -> RepairList:
        return RepairList(repairs=tuple(self._repair(*key) for key in sorted(self.tables.repairs)))

    def _repair(self, ledger_id: int, member: str) -> Repair:
        item = self.tables.repairs[ledger_id, member]
        return _known_fields(
            Repair,
            ledger_id=ledger_id,
            member=member,
            ranges=tuple(item.ranges),
            version=item.version,
            survivors=item.survivors,
            moves=item.moves,
            failures=item.failures,
            detail=item.detail,
            worker=item.worker,
        )

    def _add_repairs(self, request: Request) -> Answer:
        for item in RepairsAdd.model_validate_json(request.body).items:
            self._queue(
                item.ledger_id,
                item.member,
                item.ranges,
                survivors=item.survivors,
                moves=bool(getattr(item, "moves", False)),
            )
        return Answer(204)

    def _claim(self, request: Request) -> RepairList:
        body = RepairClaim.model_validate_json(request.body)
        due = sorted(
            (99 if item.survivors is None else item.survivors, item.next_try_at, *key)
            for key, item in self.tables.repairs.items()
            if item.next_try_at <= self.net.now
        )
        keys = [(ledger_id, member) for _, _, ledger_id, member in due[: body.limit]]
        for key in keys:
            item = self.tables.repairs[key]
            item.worker, item.version = body.worker, self._new_version()
            item.next_try_at = self.net.now + round(body.lease_s * SECOND)
        return RepairList(repairs=tuple(self._repair(*key) for key in keys))

    def _hurry(self, _request: Request) -> Answer:
        for item in self.tables.repairs.values():
            if item.worker is None:
                item.next_try_at = self.net.now
        return Answer(204)

    def _mine(self, ledger_id: int, member: str, worker: str, version: int) -> Item:
        item = self.tables.repairs.get((ledger_id, member))
        if item is None:
            raise NoSuchRepair("no such item", ledger_id=ledger_id, bookie=member)
        if (item.version, item.worker) != (version, worker):
            current = self._repair(ledger_id, member).model_dump(mode="json")
            raise VersionConflict("the claim is over", ledger_id=ledger_id, current=current)
        return item

    def _progress(self, request: Request, id: str, member: str) -> RepairRemaining:  # noqa: A002
        body = RepairProgress.model_validate_json(request.body)
        item = self._mine(int(id), member, body.worker, body.version)
        item.ranges = _without(item.ranges, body.ranges)
        item.failures = 0
        item.next_try_at = self.net.now + round(body.lease_s * SECOND)
        if not item.ranges:
            del self.tables.repairs[int(id), member]
            self.net.note("repaired", id, member)
        return RepairRemaining(ranges=tuple(item.ranges))

    def _fail(self, request: Request, id: str, member: str) -> Answer:  # noqa: A002
        body = RepairFail.model_validate_json(request.body)
        item = self._mine(int(id), member, body.worker, body.version)
        pause_s = min(_PAUSE_S_MAX, 2 ** min(item.failures, 20))
        item.worker, item.version, item.failures = None, self._new_version(), item.failures + 1
        item.detail, item.next_try_at = body.detail, self.net.now + pause_s * SECOND
        self.net.note("repair-put-off", id, member, body.detail)
        return Answer(204)

    def _take_lease(self, request: Request, name: str) -> Lease:
        body = LeaseTake.model_validate_json(request.body)
        now, ttl = self.net.now, round(body.ttl_s * SECOND)
        held = self.tables.leases.get(name)
        if held is None or held.expires_at <= now or held.holder == body.holder:
            token = 1 if held is None else held.token + (held.holder != body.holder)
            held = self.tables.leases[name] = Held(body.holder, token, now + ttl)
        left_s = (held.expires_at - now) / SECOND
        return Lease(name=name, holder=held.holder, token=held.token, expires_in_s=left_s)


def tokens_of(witnesses: Iterable[str]) -> set[str]:
    """The tokens that sound witnesses stand for."""
    return {token for w in witnesses if (token := token_of(CLUSTER_ID, w)) is not None}


def _names_of(row: LedgerRow) -> set[str]:
    """The bookies that a row names, with their incarnations and without."""
    members = {member for fragment in row.fragments for member in fragment.bookies}
    members |= {repair.target for repair in row.repairs}
    return members | set(map(member_name, members))


def _memory() -> Memory:
    """Of a process that starts."""
    memory = Memory()
    memory.cluster_id = CLUSTER_ID
    return memory


def _document(document: dict[str, Any]) -> Answer:
    return Answer(200, orjson.dumps(document))


def _known_fields(model: type[Repair], **fields: Any) -> Repair:
    return model(**{name: value for name, value in fields.items() if name in model.model_fields})


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ids in disjoint ranges, ascending."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(last, out[-1][1])
        else:
            out.append((first, last))
    return out


def _without(ranges: list[tuple[int, int]], gone: Ranges) -> list[tuple[int, int]]:
    for low, high in gone:
        kept = []
        for first, last in ranges:
            kept += [(first, min(last, low - 1)), (max(first, high + 1), last)]
        ranges = [(first, last) for first, last in kept if first <= last]
    return ranges


def outcome_of(error: QuorumLogError) -> str:
    """For the trace."""
    return f"{error.code} ({error.outcome})"
