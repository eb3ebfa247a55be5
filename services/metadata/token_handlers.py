"""The routes of access tokens."""

from typing import Final

from aiohttp import web

from quorumlog.net import audit
from quorumlog.net.identity import GATEWAYS, OPERATORS
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, path_text, query_text
from quorumlog.wire.bodies import ATTEMPT
from quorumlog.wire.token_bodies import TOKEN_ID, TokenCreate, TokenList, TokenRevoke, TokenRow
from services.metadata.handlers import PARTS
from services.metadata.http import parsed

ID: Final = path_text("id", TOKEN_ID, "The token.", "0123456789abcdef")
KNOWN: Final = query_text(
    "known", ATTEMPT, "The version of the list that the caller has: the answer has no tokens then."
)


ROUTES: Final = Routes()


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
