"""The routes that operators use: a rebuild (rule 18d), the audit log, the keys' encryption, access tokens.

Bookies whose cookies are missing ask for the state of a rebuild; gateways serve tokens and the audit log to clients.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net import audit
from quorumlog.net.audit import AFTER as NUMBER
from quorumlog.net.audit import LIMIT, SINCE, TARGET
from quorumlog.net.bodies import answer
from quorumlog.net.identity import BOOKIES, GATEWAYS, OPERATORS
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, path_text, query_text
from quorumlog.protocol.values import ATTEMPT
from quorumlog.wire.audit_bodies import AuditList
from quorumlog.wire.bodies import Resealed
from quorumlog.wire.rebuild_bodies import RebuildAsk, RebuildLine, RebuildState
from quorumlog.wire.token_bodies import TOKEN_ID, TokenCreate, TokenList, TokenRevoke, TokenRow
from services.metadata.handlers import AFTER, PARTS
from services.metadata.http import parsed
from services.metadata.rebuild import Tell

log = logging.getLogger(__name__)

LINES: Final = "application/x-ndjson"
ROUTES: Final = Routes()


@ROUTES.add("GET /v1/rebuild", roles=BOOKIES | OPERATORS, gives=RebuildState)
async def get_state(request: web.Request, _given: Given) -> web.Response:
    """Whether the database is empty, or was rebuilt."""
    return answer(await request.app[PARTS].rebuilder.store.state())


@ROUTES.add(
    "POST /v1/rebuild",
    roles=OPERATORS,
    takes=RebuildAsk,
    gives=RebuildLine,
    media=LINES,
    is_audited=True,
)
async def rebuild(request: web.Request, _given: Given) -> web.StreamResponse:
    """Rebuild what bookies prove: a line of progress at a time, and at last the report or why there is none. Ends when
    the caller goes; what is written stays.
    """
    ask = await parsed(request, RebuildAsk)

    async def work(tell: Tell) -> RebuildLine:
        return RebuildLine(report=await request.app[PARTS].rebuilder.run(ask, tell))

    return await told_in_lines(request, work)


async def told_in_lines(
    request: web.Request, work: Callable[[Tell], Awaitable[RebuildLine]]
) -> web.StreamResponse:
    """A line of progress at a time, and at last what `work` returns or why it ended early."""
    response = web.StreamResponse(headers={"Content-Type": LINES})
    await response.prepare(request)

    async def tell(line: RebuildLine) -> None:
        await response.write(line.model_dump_json(exclude_defaults=True).encode() + b"\n")

    try:
        await tell(await work(tell))
    except ConnectionResetError:
        log.warning("rebuild-cancelled", extra={"path": request.path})
    except QuorumLogError as error:
        await tell(RebuildLine(error=error.detail, code=error.code))
    except Exception as error:
        log.exception("rebuild-failed", extra={"path": request.path})
        await tell(RebuildLine(error=repr(error)))
    return response


@ROUTES.add(
    "GET /v1/audit", SINCE, TARGET, NUMBER, LIMIT, roles=GATEWAYS | OPERATORS, gives=AuditList
)
async def list_audit(request: web.Request, given: Given) -> web.Response:
    """Requests of the audit log that changed something, in the order of their numbers."""
    page = await request.app[PARTS].audit.page(
        after=given[NUMBER], since=given[SINCE], target=given[TARGET], limit=given[LIMIT]
    )
    return answer(page)


@ROUTES.add("POST /v1/keys/reseal", AFTER, roles=OPERATORS, gives=Resealed, is_audited=True)
async def reseal(request: web.Request, given: Given) -> web.Response:
    """Encrypt the keys of some ledgers above `after` under the first key of the key file."""
    after = given[AFTER]
    return answer(await request.app[PARTS].sealing.reseal(after=-1 if after is None else after))


ID: Final = path_text("id", TOKEN_ID, "The token.", "0123456789abcdef")
KNOWN: Final = query_text(
    "known", ATTEMPT, "The version of the list that the caller has: the answer has no tokens then."
)


@ROUTES.add(
    "POST /v1/tokens",
    roles=GATEWAYS | OPERATORS,
    takes=TokenCreate,
    gives=TokenRow,
    status=201,
    is_audited=True,
)
async def create_token(request: web.Request, _given: Given) -> web.Response:
    """Store an access token by the hash of its secret; a repeat of the attempt gets the first answer."""
    body = await parsed(request, TokenCreate)
    audit.name_target(f"tokens/{body.token.id}")
    row = await request.app[PARTS].tokens.create(body)
    return answer(row, 201)


@ROUTES.add("GET /v1/tokens", KNOWN, roles=GATEWAYS, gives=TokenList)
async def list_tokens(request: web.Request, given: Given) -> web.Response:
    """All access tokens, or none where the caller knows them."""
    return answer(await request.app[PARTS].tokens.list(known=given[KNOWN]))


@ROUTES.add(
    "DELETE /v1/tokens/{id}", ID, roles=GATEWAYS, takes=TokenRevoke, status=204, is_audited=True
)
async def revoke_token(request: web.Request, given: Given) -> web.Response:
    """Delete an access token; a repeat of the attempt succeeds."""
    await request.app[PARTS].tokens.revoke(given[ID], await parsed(request, TokenRevoke))
    return web.Response(status=204)
