"""The routes of ledgers, changes, bookies, services, logs, transactions, and unnamed ledgers."""

import asyncio
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final
from uuid import UUID

import orjson
from aiohttp import web

from quorumlog.errors import CallerRefused, CopyLost
from quorumlog.net.identity import (
    ALL,
    BOOKIES,
    GATEWAYS,
    HEALERS,
    OPERATORS,
    SERVICES,
    WRITERS,
    Role,
    caller_of,
    check_name,
    check_url,
)
from quorumlog.net.parameters import (
    Given,
    path_text,
    query_choice,
    query_integer,
    query_pairs,
    query_text,
)
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.transaction import TRANSACTION_ID
from quorumlog.protocol.values import ATTEMPT, LOG_NAME, MEMBER_OR_NAME
from quorumlog.wire import bodies
from quorumlog.wire.log_bodies import LogChange, LogListBody
from services.metadata.cookies import CookieStore, StillNamed
from services.metadata.http import (
    AFTER,
    BOOKIE,
    IF_MATCH,
    LEDGER_ID,
    LIMIT,
    LINES,
    LOG,
    PARTS,
    SHOWN,
    StoreRoutes,
    answer,
    check_changed,
    page_answer,
    parsed,
)
from services.metadata.ledgers import LedgerFilter, LedgerStore
from services.metadata.liveness import Liveness
from services.metadata.logs import LogStore
from services.metadata.losses import HeldCopies, RowUnproven
from services.metadata.transactions import TransactionStore

_SECRET: Final = ("mac_key", "access_key")
"""Fields of a row that bookies must not get, because bookies could then forge entries (rule 30)."""
_SERVICE: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"

_AGE_S_MAX: Final = 10 * 365 * 24 * 3600

STATE: Final = query_choice("state", tuple(State), "Only ledgers in this state.")
MEMBER: Final = query_text(
    "bookie",
    MEMBER_OR_NAME,
    "Only ledgers with this bookie in an ensemble: `name`, or `name@incarnation`.",
)
OF_LOG: Final = query_text("log", LOG_NAME, "Only this log's ledgers.")
METADATA: Final = query_pairs("metadata", "Only ledgers with this custom metadata.")
KIND: Final = path_text("kind", _SERVICE, "The kind of the service.", "gateway")
SERVICE_ID: Final = path_text("id", _SERVICE, "The id of the service's process.")
AFTER_LOG: Final = query_text("after", LOG_NAME, "Only logs after this name.")
PREFIX: Final = query_text("prefix", LOG_NAME, "Only logs whose name begins with this prefix.")
PLACED_IN: Final = query_text(
    "log", LOG_NAME, "Only ledgers that were once part of a log of this name."
)
TOKEN: Final = path_text("token", ATTEMPT, "The id of a client's request.", str(UUID(int=0)))
KNOWN: Final = query_text(
    "known",
    ATTEMPT,
    "The `attempt` in the caller's copy of the log. A current copy is not sent again.",
)
CREATED_AT: Final = query_text(
    "created_at", "[0-9TZ:.-]{27}", "The `created_at` in the caller's copy of the log."
)
CONTENT: Final = query_text("content", "[0-9a-f]{32}", "A digest of the request's content.")
OLDER_THAN_S: Final = query_integer(
    "older_than_s", 0, _AGE_S_MAX, "Only ledgers that no log has named for so many seconds.", 0
)
ID: Final = path_text("id", TRANSACTION_ID, "The transaction.")

_LEDGER: Final = "/v1/ledgers/{ledger_id}"
_BOOKIE: Final = "/v1/bookies/{name}"
_FILTERS: Final = (STATE, MEMBER, OF_LOG, METADATA, LIMIT, AFTER, SHOWN)
_LOG: Final = "/v1/logs/{name}"
_ONE: Final = "/v1/transactions/{id}"
ROUTES: Final = StoreRoutes()


@ROUTES.add(f"GET {_LEDGER}", LEDGER_ID, roles=ALL, gives=LedgerMetadata)
async def get_ledger(request: web.Request, given: Given) -> web.Response:
    """A ledger's row, read from the primary."""
    row = await request.app[PARTS].ledgers.get(given[LEDGER_ID])
    return answer(_shown(request, row))


@ROUTES.add(
    f"PUT {_LEDGER}",
    LEDGER_ID,
    IF_MATCH,
    roles=WRITERS,
    takes=bodies.LedgerChange,
    gives=LedgerMetadata,
    is_audited_for_clients=True,
)
async def change_ledger(request: web.Request, given: Given) -> web.Response:
    """Compare-and-swap a ledger's row. A repeat of an applied attempt succeeds."""
    parts, change = request.app[PARTS], await parsed(request, bodies.LedgerChange)
    check_changed(given, change.row, change.row.ledger_id == given[LEDGER_ID])
    try:
        return answer(await parts.ledgers.change(change))
    except RowUnproven as unproven:
        held = await parts.inquiry.copies(unproven.row)
    try:
        return answer(await parts.ledgers.change(change, held))
    except CopyLost:
        for copies in held:
            await parts.kept.note(change.row.ledger_id, copies, copies.attempts)
        raise


@ROUTES.add("GET /v1/ledgers", *_FILTERS, roles=ALL, gives=bodies.LedgerListBody)
async def list_ledgers(request: web.Request, given: Given) -> web.Response:
    """One page of ledgers by id, filtered by state, bookie, log and `metadata[key]`."""
    pairs = given[METADATA]
    wanted = LedgerFilter(
        state=given[STATE],
        bookie=given[MEMBER],
        log=given[OF_LOG],
        metadata=dict(pairs),
        shown=given[SHOWN],
    )
    rows, following = await request.app[PARTS].ledgers.list(
        wanted, after=given[AFTER], limit=given[LIMIT]
    )
    if not _sees_keys(request):
        rows = [orjson.dumps(orjson.loads(row) | dict.fromkeys(_SECRET, "")) for row in rows]
    return page_answer("ledgers", (rows, following))


def _sees_keys(request: web.Request) -> bool:
    """Whether the caller may get keys, to create or check authentication codes (rule 30)."""
    return caller_of(request).role in (None, Role.GATEWAY, Role.AUTORECOVERY)


def _shown(request: web.Request, row: LedgerMetadata) -> LedgerMetadata:
    """Return the row, without keys unless the caller may get them."""
    return row if _sees_keys(request) else replace(row, mac_key=b"", access_key=b"")


@ROUTES.add(
    "POST /v1/ledger-proofs", roles=BOOKIES, takes=bodies.LedgerProofsAsk, gives=bodies.LedgerProofs
)
async def ledger_proofs(request: web.Request, _given: Given) -> web.Response:
    """Return many ledgers' rows from one snapshot of the primary, for a bookie's garbage collector and limbo."""
    parts, asked = request.app[PARTS], await parsed(request, bodies.LedgerProofsAsk)
    check_name(request, asked.holder)
    proofs = await parts.ledgers.proofs(asked.holder, asked.ledgers)
    for proof in proofs:
        if proof.lost:
            held = HeldCopies(asked.holder, proof.lost)
            await parts.kept.note(proof.ledger_id, held, proof.lost)
    shown = (
        proof if proof.row is None else proof.model_copy(update={"row": _shown(request, proof.row)})
        for proof in proofs
    )
    return answer(bodies.LedgerProofs(ledgers=tuple(shown)))


@ROUTES.add("GET /v1/changes", roles=SERVICES, gives=bodies.Change, media=LINES)
async def follow_changes(request: web.Request, _given: Given) -> web.StreamResponse:
    """A stream of all changes of ledgers from now on, one JSON object per line."""
    parts = request.app[PARTS]
    response = web.StreamResponse(headers={"Content-Type": LINES})
    await response.prepare(request)
    async with parts.changes.follow() as queue:
        while not parts.changes.is_over:
            change = bodies.Change(kind="heartbeat")
            try:
                async with asyncio.timeout(parts.config.change_heartbeat_s):
                    change = await queue.get()
            except TimeoutError:
                pass
            await response.write(change.model_dump_json().encode() + b"\n")
    return response


@ROUTES.add("GET /v1/cluster-id", roles=ALL, gives=bodies.ClusterId)
async def get_cluster_id(request: web.Request, _given: Given) -> web.Response:
    """The cluster's id, chosen at random when the database was created."""
    return answer(bodies.ClusterId(cluster_id=await request.app[PARTS].cookies.cluster_id()))


@ROUTES.add("GET /v1/bookies", roles=ALL, gives=bodies.BookieList)
async def list_bookies(request: web.Request, _given: Given) -> web.Response:
    """Registered bookies and their liveness."""
    parts = request.app[PARTS]
    return answer(await parts.liveness.bookies(await parts.cookies.list()))


def _check_itself(request: web.Request, given: Given, _body: object) -> None:
    check_name(request, given[BOOKIE])


def _check_cookie(request: web.Request, given: Given, body: bodies.CookiePut) -> None:
    name, allowed = given[BOOKIE], request.app[PARTS].config.allowed_bookies
    check_name(request, name)
    check_url(request, body.cookie.url)
    if allowed and not any(fnmatchcase(name, pattern) for pattern in allowed):
        raise CallerRefused(f"bookie {name} is not in ALLOWED_BOOKIES: add the name")


@ROUTES.add(
    f"DELETE {_BOOKIE}/cookie", BOOKIE, roles=HEALERS | OPERATORS, status=204, is_audited=True
)
async def delete_cookie(request: web.Request, given: Given) -> web.Response:
    """Decommission a dead bookie that no ledger and no repair references."""
    parts, name = request.app[PARTS], given[BOOKIE]
    row = await parts.cookies.get(name)
    found = await parts.liveness.bookies([row])
    if found.stale:
        raise StillNamed("liveness is unknown while Redis is away: retry later", bookie=name)
    if found.bookies[0].state != "lost":
        raise StillNamed(f"bookie {name} is alive: stop the bookie first", bookie=name)
    await parts.cookies.retire(name, version=row.version)
    await parts.liveness.forget_bookie(name)
    return web.Response(status=204)


def _check_bookie(request: web.Request, given: Given, alive: bodies.BookieHeartbeat) -> None:
    check_name(request, given[BOOKIE])
    check_url(request, alive.url)


def _check_service(request: web.Request, given: Given, alive: bodies.ServiceHeartbeat) -> None:
    """Check that a heartbeat matches the caller's kind and host. Raises: CallerRefused."""
    caller = caller_of(request)
    if caller.role not in (None, given[KIND]):
        raise CallerRefused(f"a {caller.role} can't send the heartbeat of a {given[KIND]}")
    check_name(request, given[SERVICE_ID])
    # Check the internal URL, because a gateway's public URL may be a proxy's URL.
    check_url(request, alive.internal_url or alive.url)


ROUTES.serve(
    "POST /v1/ledgers",
    LedgerStore.create,
    roles=GATEWAYS,
    creates=lambda body: f"ledgers/{body.row.ledger_id}",
)
ROUTES.serve(
    f"DELETE {_LEDGER}", LedgerStore.delete, LEDGER_ID, roles=GATEWAYS, audited_as="delete_ledger"
)
ROUTES.serve("POST /v1/ledger-heads", LedgerStore.heads, roles=GATEWAYS)
ROUTES.serve(f"GET {_BOOKIE}/ledgers", LedgerStore.naming, BOOKIE, AFTER, LIMIT, roles=BOOKIES)
ROUTES.serve(f"GET {_BOOKIE}/cookie", CookieStore.get, BOOKIE, roles=BOOKIES | OPERATORS)
ROUTES.serve(f"GET {_BOOKIE}/uses", CookieStore.uses, BOOKIE, LIMIT, roles=HEALERS | OPERATORS)
ROUTES.serve("GET /v1/services", Liveness.services, roles=WRITERS | OPERATORS)
ROUTES.serve(
    f"PUT {_BOOKIE}/cookie",
    CookieStore.put,
    BOOKIE,
    roles=BOOKIES | OPERATORS,
    checks=_check_cookie,
    audited_as="put_cookie",
)
ROUTES.serve(
    f"PUT {_BOOKIE}/log-end", CookieStore.note_log_end, BOOKIE, roles=BOOKIES, checks=_check_itself
)
ROUTES.serve(
    f"PUT {_BOOKIE}/heartbeat", Liveness.bookie_lives, BOOKIE, roles=BOOKIES, checks=_check_bookie
)
ROUTES.serve(
    "PUT /v1/services/{kind}/{id}/heartbeat",
    Liveness.service_lives,
    KIND,
    SERVICE_ID,
    roles=SERVICES,
    checks=_check_service,
)

# The routes of logs, transactions, and ledgers that no log references.


@ROUTES.add("GET /v1/logs", LIMIT, AFTER_LOG, PREFIX, SHOWN, roles=GATEWAYS, gives=LogListBody)
async def list_logs(request: web.Request, given: Given) -> web.Response:
    """One page of logs, sorted by name."""
    page = await request.app[PARTS].logs.page(
        after=given[AFTER_LOG] or "",
        limit=given[LIMIT],
        prefix=given[PREFIX] or "",
        shown=given[SHOWN],
    )
    return page_answer("logs", page)


@ROUTES.add(
    f"PUT {_LOG}",
    LOG,
    IF_MATCH,
    roles=GATEWAYS,
    takes=LogChange,
    gives=LogMetadata,
    is_audited_for_clients=True,
)
async def change_log(request: web.Request, given: Given) -> web.Response:
    """Compare-and-swap a log's row. A repeat of an applied attempt succeeds."""
    change = await parsed(request, LogChange)
    check_changed(given, change.row, change.row.name == given[LOG])
    return answer(await request.app[PARTS].logs.change(change))


ROUTES.serve(
    "POST /v1/logs",
    LogStore.create,
    roles=GATEWAYS,
    creates=lambda body: f"logs/{body.row.name}",
    audited_as="create_log",
)
ROUTES.serve("POST /v1/transactions", TransactionStore.begin, roles=GATEWAYS)
ROUTES.serve("GET /v1/requests/{token}", LogStore.is_done, TOKEN, CONTENT, roles=GATEWAYS)
ROUTES.serve(f"GET {_LOG}", LogStore.get, LOG, KNOWN, CREATED_AT, roles=GATEWAYS)
ROUTES.serve(f"DELETE {_LOG}", LogStore.delete, LOG, roles=GATEWAYS, audited_as="delete_log")
ROUTES.serve(
    "GET /v1/orphans", LogStore.orphans, OLDER_THAN_S, AFTER, PLACED_IN, LIMIT, roles=GATEWAYS
)
ROUTES.serve("DELETE /v1/orphans/{ledger_id}", LogStore.delete_orphan, LEDGER_ID, roles=GATEWAYS)
ROUTES.serve("POST /v1/shared-ledgers", LogStore.shared, roles=GATEWAYS)
ROUTES.serve(f"GET {_ONE}", TransactionStore.get, ID, roles=GATEWAYS)
ROUTES.serve(
    f"POST {_ONE}/commit", TransactionStore.commit, ID, roles=GATEWAYS, is_audited_for_clients=True
)
ROUTES.serve(
    f"POST {_ONE}/abort", TransactionStore.abort, ID, roles=GATEWAYS, is_audited_for_clients=True
)
ROUTES.serve(f"POST {_ONE}/renew", TransactionStore.renew, ID, roles=GATEWAYS)
