"""The routes of repairs and leases, and the routes for operators: witnesses (rule 18a), rebuilds
(rule 18d), the audit log, the encryption of keys, access tokens.

Bookies without a cookie request the state of a rebuild. Gateways serve tokens and the audit log to
clients, and forward operators' requests about witnesses and rebuilds.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from quorumlog import header
from quorumlog.errors import QuorumLogError
from quorumlog.net.audit import AFTER as NUMBER
from quorumlog.net.audit import LIMIT as ROWS
from quorumlog.net.audit import SINCE, TARGET
from quorumlog.net.identity import (
    BOOKIES,
    GATEWAYS,
    HEALERS,
    OPERATORS,
    SERVICES,
    WRITERS,
    check_name,
)
from quorumlog.net.parameters import Given, Parameter, integer, matching, path_text, query_text
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.values import ATTEMPT, LOG_NAME, MEMBER
from quorumlog.wire.bodies import (
    CopyWitnesses,
    WitnessAccept,
    WitnessState,
    witnesses_from_header,
    witnesses_to_header,
)
from quorumlog.wire.rebuild_bodies import RebuildAsk, RebuildLine
from quorumlog.wire.repair_bodies import REPAIR_PLACE, RepairsAdd, RepairSettings
from quorumlog.wire.token_bodies import TOKEN_ID
from services.metadata import http
from services.metadata.losses import KeptStore
from services.metadata.memory import PRESENTED, Presented
from services.metadata.migrate import SealingStore
from services.metadata.rebuild import Notify
from services.metadata.rebuild_store import RebuildStore
from services.metadata.repairs import LeaseStore, RepairSettingsStore, RepairStore
from services.metadata.tokens import AuditStore, TokenStore
from services.metadata.witnesses import WitnessStore

log = logging.getLogger(__name__)


def _item(text: str, pointer: str) -> tuple[int, str]:
    ledger_id, _, member = matching(text, pointer, REPAIR_PLACE).partition(":")
    return integer(ledger_id, pointer), member


AFTER_ITEM: Final = Parameter(
    "after",
    "query",
    _item,
    {"type": "string", "pattern": f"^{REPAIR_PLACE}$"},
    "Only items after this item, given as `ledger_id:member`.",
    (-1, ""),
)
MEMBER_ID: Final = path_text("member", MEMBER, "The member.", "bookie-1@1")
LEASE: Final = path_text("name", LOG_NAME, "The lease.", "auditor")
TOKEN: Final = path_text("id", TOKEN_ID, "The token.", "0123456789abcdef")
KNOWN: Final = query_text(
    "known", ATTEMPT, "The version of the caller's list. If it is current, no tokens are returned."
)

_ITEM: Final = "/v1/repairs/{ledger_id}/{member}"
_OF_ITEM: Final = (http.LEDGER_ID, MEMBER_ID)
ROUTES: Final = http.StoreRoutes()

# The routes of the repair queue and of leases.

ROUTES.serve("GET /v1/repairs", RepairStore.page, http.LIMIT, AFTER_ITEM, roles=WRITERS | OPERATORS)


def _check_members(request: web.Request, _given: Given, body: RepairsAdd) -> None:
    for item in body.items:
        check_name(request, member_name(item.member))


ROUTES.serve("POST /v1/repairs", RepairStore.add, roles=SERVICES, checks=_check_members)
ROUTES.serve("POST /v1/repairs/claim", RepairStore.claim, roles=HEALERS)
ROUTES.serve(f"POST {_ITEM}/progress", RepairStore.progress, *_OF_ITEM, roles=HEALERS)
ROUTES.serve(f"POST {_ITEM}/fail", RepairStore.fail, *_OF_ITEM, roles=HEALERS)
ROUTES.serve("GET /v1/repairs/summary", RepairStore.summary, roles=WRITERS | OPERATORS)
ROUTES.serve("POST /v1/repairs/hurry", RepairStore.hurry, roles=HEALERS)


@ROUTES.add("POST /v1/repairs/trigger", roles=HEALERS, gives=RepairSettings)
async def trigger_repairs(request: web.Request, _given: Given) -> web.Response:
    """Request a full audit, and make all items that wait after a failure due now."""
    parts = request.app[http.PARTS]
    await parts.repairs.hurry()
    return http.answer(await parts.repair_settings.trigger())


ROUTES.serve("GET /v1/repair-settings", RepairSettingsStore.get, roles=HEALERS | OPERATORS)
ROUTES.serve(
    "PATCH /v1/repair-settings",
    RepairSettingsStore.change,
    roles=HEALERS,
    audited_as="patch_repair_settings",
)
ROUTES.serve("PUT /v1/leases/{name}", LeaseStore.take, LEASE, roles=HEALERS)

# The routes of a rebuild, the audit log, keys and access tokens.

ROUTES.serve("GET /v1/rebuild", RebuildStore.state, roles=BOOKIES | GATEWAYS | OPERATORS)


@ROUTES.add(
    "POST /v1/rebuild",
    roles=GATEWAYS | OPERATORS,
    takes=RebuildAsk,
    gives=RebuildLine,
    media=http.LINES,
    is_audited=True,
)
async def rebuild(request: web.Request, _given: Given) -> web.StreamResponse:
    """Rebuild the metadata from the bookies' copies.

    The response has lines of progress, and finally the report or an error. If the caller
    disconnects, the rebuild ends, and the rows written so far are kept.
    """
    ask = await http.parsed(request, RebuildAsk)

    async def work(notify: Notify) -> RebuildLine:
        return RebuildLine(report=await request.app[http.PARTS].rebuilder.run(ask, notify))

    return await _reported_in_lines(request, work)


async def _reported_in_lines(
    request: web.Request, work: Callable[[Notify], Awaitable[RebuildLine]]
) -> web.StreamResponse:
    """Run `work`, and respond with lines of progress, and finally with the result or an error."""
    response = web.StreamResponse(headers={"Content-Type": http.LINES})
    await response.prepare(request)

    async def notify(line: RebuildLine) -> None:
        await response.write(line.model_dump_json(exclude_defaults=True).encode() + b"\n")

    try:
        await notify(await work(notify))
    except ConnectionResetError:
        log.warning("rebuild-cancelled", extra={"path": request.path})
    except QuorumLogError as error:
        await notify(RebuildLine(error=error.detail, code=error.code))
    except Exception as error:
        log.exception("rebuild-failed", extra={"path": request.path})
        await notify(RebuildLine(error=repr(error)))
    return response


ROUTES.serve(
    "GET /v1/audit", AuditStore.page, SINCE, TARGET, NUMBER, ROWS, roles=GATEWAYS | OPERATORS
)
ROUTES.serve(
    "POST /v1/keys/reseal", SealingStore.reseal, http.AFTER, roles=OPERATORS, audited_as="reseal"
)


ROUTES.serve(
    "POST /v1/tokens",
    TokenStore.create,
    roles=GATEWAYS | OPERATORS,
    creates=lambda body: f"tokens/{body.token.id}",
    audited_as="create_token",
)
ROUTES.serve("GET /v1/tokens", TokenStore.list, KNOWN, roles=GATEWAYS)
ROUTES.serve(
    "DELETE /v1/tokens/{id}", TokenStore.revoke, TOKEN, roles=GATEWAYS, audited_as="revoke_token"
)

# The routes of witnesses.


@web.middleware
async def presents_witnesses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that stores a request's witnesses for the check, and returns replacements."""
    given = request.headers.get(header.WITNESSES)
    # Treat an unreadable list as one invalid witness, so that the request is refused.
    witnesses = () if not given else witnesses_from_header(given) or (given,)
    presented = Presented(witnesses, holder=request.remote or "an unknown caller")
    PRESENTED.set(presented)
    response = await handler(request)
    if presented.answer and not response.prepared:
        response.headers[header.WITNESSES] = witnesses_to_header(presented.answer)
    return response


ROUTES.serve("POST /v1/witnesses", WitnessStore.confirm, roles=SERVICES)


@ROUTES.add("POST /v1/witnesses/copies", roles=BOOKIES, takes=CopyWitnesses, gives=WitnessState)
async def confirm_copies(request: web.Request, _given: Given) -> web.Response:
    """Check that the database has the caller's witnesses, and the changes of the caller's copies."""
    body = await http.parsed(request, CopyWitnesses)
    check_name(request, body.holder)
    presented = PRESENTED.get()
    assert presented is not None, "`presents_witnesses` must set PRESENTED"
    presented.witnesses += body.witnesses
    presented.holder = body.holder
    return http.answer(await request.app[http.PARTS].witnesses.confirm())


@ROUTES.add("GET /v1/witnesses", roles=GATEWAYS | OPERATORS, gives=WitnessState)
async def get_witnesses(request: web.Request, _given: Given) -> web.Response:
    """Return this process's witnesses, and the witnesses that the database lacked when checked."""
    return http.answer(request.app[http.PARTS].witnesses.state())


ROUTES.serve(
    "GET /v1/kept-ledgers", KeptStore.list, http.AFTER, http.LIMIT, roles=GATEWAYS | OPERATORS
)


@ROUTES.add(
    "POST /v1/witnesses/accept",
    roles=GATEWAYS | OPERATORS,
    takes=WitnessAccept,
    gives=WitnessState,
    is_audited=True,
)
async def accept_lost(request: web.Request, _given: Given) -> web.StreamResponse:
    """Accept the loss of these witnesses' changes, as an operator decided (see the runbook).

    First, the service reads the copies of all bookies. A caller that accepts `application/x-ndjson`
    gets lines of progress.
    """
    body = await http.parsed(request, WitnessAccept)
    accept = partial(
        request.app[http.PARTS].witnesses.accept,
        body.witnesses,
        lost=body.lost,
        ledgers=body.ledgers,
    )
    if request.headers.get("Accept") != http.LINES:
        return http.answer(await accept(notify=_quiet))

    async def work(notify: Notify) -> RebuildLine:
        return RebuildLine(state=await accept(notify=notify))

    return await _reported_in_lines(request, work)


async def _quiet(_line: RebuildLine) -> None:
    """Discard a line of progress."""
