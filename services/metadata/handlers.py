"""The routes of ledgers, changes, bookies and services."""

import asyncio
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import (
    BOOKIE_NAME,
    BookieHeartbeat,
    BookieList,
    BookieUses,
    Change,
    ClusterId,
    CookiePut,
    CookieRow,
    HeartbeatTaken,
    LedgerChange,
    LedgerCreate,
    LedgerDelete,
    LedgerHeads,
    LedgerHeadsAsk,
    LedgerList,
    LedgerRow,
    LogEnd,
    ServiceHeartbeat,
    ServiceList,
)
from services.metadata.changes import ChangeHub
from services.metadata.cookies import CookieStore, StillNamed
from services.metadata.http import (
    answer,
    header_version,
    ledger_id_of,
    limit_of,
    matching,
    page_of,
    parsed,
    query_of,
)
from services.metadata.leases import LeaseStore
from services.metadata.ledgers import LedgerFilter, LedgerStore
from services.metadata.liveness import Liveness
from services.metadata.logs import LogStore
from services.metadata.repair_settings import RepairSettingsStore
from services.metadata.repairs import RepairStore
from services.metadata.routes import Route
from services.metadata.transactions import TransactionStore
from services.metadata.witnesses import WitnessStore

_MEMBER: Final = rf"{BOOKIE_NAME}(@(0|[1-9][0-9]{{0,17}}))?"
_SERVICE: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the handlers work on; built once by `app.py`."""

    ledgers: LedgerStore
    cookies: CookieStore
    liveness: Liveness
    changes: ChangeHub
    logs: LogStore
    repairs: RepairStore
    repair_settings: RepairSettingsStore
    leases: LeaseStore
    transactions: TransactionStore
    witnesses: WitnessStore
    change_heartbeat_s: float


PARTS: Final = web.AppKey("parts", Parts)


async def create_ledger(request: web.Request) -> web.Response:
    """Create a ledger; the same attempt or idempotency key again gets the same one."""
    query_of(request, ())
    row = await request.app[PARTS].ledgers.create(await parsed(request, LedgerCreate))
    return answer(row, 201, Location=f"/v1/ledgers/{row.ledger_id}", ETag=f'"{row.version}"')


async def get_ledger(request: web.Request) -> web.Response:
    """A ledger's row as the primary has it."""
    query_of(request, ())
    row = await request.app[PARTS].ledgers.get(ledger_id_of(request))
    return answer(row, ETag=f'"{row.version}"')


async def change_ledger(request: web.Request) -> web.Response:
    """Compare-and-swap a ledger's row; the same attempt again is answered as done."""
    query_of(request, ())
    change = await parsed(request, LedgerChange)
    if change.row.ledger_id != ledger_id_of(request):
        raise InvalidRequest("the row is of another ledger than the path")
    if header_version(request) not in {None, change.row.version}:
        raise InvalidRequest("If-Match names another version than the row")
    row = await request.app[PARTS].ledgers.change(
        change.row, attempt=change.attempt, missed=change.missed
    )
    return answer(row, ETag=f'"{row.version}"')


async def delete_ledger(request: web.Request) -> web.Response:
    """Leave a tombstone in a CLOSED ledger's place."""
    query_of(request, ())
    body = await parsed(request, LedgerDelete)
    await request.app[PARTS].ledgers.delete(
        ledger_id_of(request), version=body.version, attempt=body.attempt
    )
    return web.Response(status=204)


async def list_ledgers(request: web.Request) -> web.Response:
    """Ledgers in the order of ids, filtered by state, bookie, log, `metadata[key]`."""
    query = query_of(request, ("state", "bookie", "log", "limit", "after"), prefix="metadata")
    after, limit = page_of(query)
    state = query.get("state")
    if state is not None and state not in set(State):
        raise InvalidRequest(f"state is none of {', '.join(State)}")
    bookie = query.get("bookie")
    if bookie is not None:
        matching(bookie, "bookie", _MEMBER)
    wanted = LedgerFilter(
        state=None if state is None else State(state),
        bookie=bookie,
        log=query.get("log"),
        metadata={
            name[len("metadata[") : -1]: value
            for name, value in query.items()
            if name.startswith("metadata[")
        },
    )
    rows, following = await request.app[PARTS].ledgers.list(wanted, after=after, limit=limit)
    return answer(LedgerList(ledgers=tuple(rows), next=following))


async def ledger_heads(request: web.Request) -> web.Response:
    """Of many ledgers at once, who may write to them, as the primary has it."""
    query_of(request, ())
    asked = await parsed(request, LedgerHeadsAsk)
    found = await request.app[PARTS].ledgers.heads(asked.ledgers)
    return answer(LedgerHeads(ledgers=tuple(found)))


async def follow_changes(request: web.Request) -> web.StreamResponse:
    """Every change of a ledger from now on, one JSON object a line."""
    query_of(request, ())
    parts = request.app[PARTS]
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async with parts.changes.follow() as queue:
        while not parts.changes.is_over:
            change = Change(kind="heartbeat")
            try:
                async with asyncio.timeout(parts.change_heartbeat_s):
                    change = await queue.get()
            except TimeoutError:
                pass
            await response.write(change.model_dump_json().encode() + b"\n")
    return response


async def get_cluster_id(request: web.Request) -> web.Response:
    """The cluster's id, drawn when the database was made."""
    query_of(request, ())
    return answer(ClusterId(cluster_id=await request.app[PARTS].cookies.cluster_id()))


async def list_bookies(request: web.Request) -> web.Response:
    """Registered bookies with what is known of their liveness."""
    query_of(request, ())
    parts = request.app[PARTS]
    return answer(await parts.liveness.bookies(await parts.cookies.list()))


async def get_cookie(request: web.Request) -> web.Response:
    """A bookie's cookie."""
    query_of(request, ())
    row = await request.app[PARTS].cookies.get(_name(request))
    return answer(row, ETag=f'"{row.version}"')


async def put_cookie(request: web.Request) -> web.Response:
    """Register a bookie (no version) or compare-and-swap its cookie."""
    query_of(request, ())
    body = await parsed(request, CookiePut)
    row = await request.app[PARTS].cookies.put(_name(request), body)
    return answer(row, ETag=f'"{row.version}"')


async def put_log_end(request: web.Request) -> web.Response:
    """Note how far the log of a bookie's registered process is on disk; it never goes back."""
    query_of(request, ())
    row = await request.app[PARTS].cookies.note_log_end(
        _name(request), await parsed(request, LogEnd)
    )
    return answer(row, ETag=f'"{row.version}"')


async def get_uses(request: web.Request) -> web.Response:
    """What names a bookie: how many ledgers, and the first of them with what keeps it there."""
    limit = limit_of(query_of(request, ("limit",)))
    return answer(await request.app[PARTS].cookies.uses(_name(request), limit=limit))


async def delete_cookie(request: web.Request) -> web.Response:
    """Decommission a bookie that is dead and that nothing names."""
    query_of(request, ())
    parts, name = request.app[PARTS], _name(request)
    row = await parts.cookies.get(name)
    found = await parts.liveness.bookies([row])
    if found.stale:
        raise StillNamed("who lives can't be learned now", bookie=name)
    if found.bookies[0].state != "lost":
        raise StillNamed(f"{name} lives: stop it first", bookie=name)
    await parts.cookies.retire(name, version=row.version)
    return web.Response(status=204)


async def bookie_lives(request: web.Request) -> web.Response:
    """A bookie's heartbeat; it succeeds while Redis is away too."""
    query_of(request, ())
    body = await parsed(request, BookieHeartbeat)
    recorded = await request.app[PARTS].liveness.bookie_lives(_name(request), body)
    return answer(HeartbeatTaken(recorded=recorded))


async def service_lives(request: web.Request) -> web.Response:
    """Any other service's heartbeat."""
    query_of(request, ())
    kind = matching(request.match_info["kind"], "kind", _SERVICE)
    name = matching(request.match_info["id"], "id", _SERVICE)
    body = await parsed(request, ServiceHeartbeat)
    recorded = await request.app[PARTS].liveness.service_lives(kind, name, body)
    return answer(HeartbeatTaken(recorded=recorded))


async def list_services(request: web.Request) -> web.Response:
    """Services whose heartbeat came in time."""
    query_of(request, ())
    return answer(await request.app[PARTS].liveness.services())


def _name(request: web.Request) -> str:
    return matching(request.match_info["name"], "name", BOOKIE_NAME)


_LIST: Final = ("state", "bookie", "log", "metadata[key]", "limit", "after")

ROUTES: Final = (
    Route("POST", "/v1/ledgers", create_ledger, LedgerCreate, LedgerRow, 201),
    Route("GET", "/v1/ledgers", list_ledgers, None, LedgerList, query=_LIST),
    Route("GET", "/v1/ledgers/{ledger_id}", get_ledger, None, LedgerRow),
    Route("PUT", "/v1/ledgers/{ledger_id}", change_ledger, LedgerChange, LedgerRow),
    Route("DELETE", "/v1/ledgers/{ledger_id}", delete_ledger, LedgerDelete, None, 204),
    Route("POST", "/v1/ledger-heads", ledger_heads, LedgerHeadsAsk, LedgerHeads),
    Route("GET", "/v1/changes", follow_changes, None, Change),
    Route("GET", "/v1/cluster-id", get_cluster_id, None, ClusterId),
    Route("GET", "/v1/bookies", list_bookies, None, BookieList),
    Route("GET", "/v1/bookies/{name}/cookie", get_cookie, None, CookieRow),
    Route("PUT", "/v1/bookies/{name}/cookie", put_cookie, CookiePut, CookieRow),
    Route("DELETE", "/v1/bookies/{name}/cookie", delete_cookie, None, None, 204),
    Route("GET", "/v1/bookies/{name}/uses", get_uses, None, BookieUses, query=("limit",)),
    Route("PUT", "/v1/bookies/{name}/log-end", put_log_end, LogEnd, CookieRow),
    Route("PUT", "/v1/bookies/{name}/heartbeat", bookie_lives, BookieHeartbeat, HeartbeatTaken),
    Route("GET", "/v1/services", list_services, None, ServiceList),
    Route(
        "PUT", "/v1/services/{kind}/{id}/heartbeat", service_lives, ServiceHeartbeat, HeartbeatTaken
    ),
)
