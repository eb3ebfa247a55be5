"""The resources /v1/tokens and /v1/tickets: access tokens are made, listed and revoked; browsers get tickets."""

from aiohttp import web

from quorumlog.net import audit
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from quorumlog.net.token_client import TokenClient
from services.gateway.edge import body
from services.gateway.edge import token_operations as op
from services.gateway.edge.access import caller_of
from services.gateway.edge.answers import json_value, no_content
from services.gateway.edge.callers import Callers
from services.gateway.edge.room import Room
from services.gateway.edge.tickets import NO_TICKET, TICKET_S
from services.gateway.edge.token_models import AccessTokenCreate, TicketCreate, token_json


class TokenRoutes:
    """Handlers of access tokens."""

    def __init__(self, client: TokenClient, room: Room, callers: Callers | None) -> None:
        """`callers`: those who are let in; without it everyone."""
        self._client, self._callers = client, callers
        self._room = room

    async def create(self, request: web.Request, _given: Given) -> web.Response:
        """POST /v1/tokens."""
        wanted = await body.read_model(request, self._room, AccessTokenCreate)
        secret, token = wanted.drawn()
        audit.name_target(f"tokens/{token.id}")
        row = await self._client.create(token, expires_in_s=wanted.expires_in_s)
        return json_value(token_json(row) | {"token": secret}, 201)

    async def page(self, _request: web.Request, _given: Given) -> web.Response:
        """GET /v1/tokens."""
        rows = (await self._client.list()).tokens or ()
        return json_value({"tokens": [token_json(row) for row in rows]})

    async def revoke(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/tokens/{id}."""
        await self._client.revoke(given[op.ID])
        return no_content()

    async def ticket(self, request: web.Request, _given: Given) -> web.Response:
        """POST /v1/tickets."""
        wanted = await body.read_model(request, self._room, TicketCreate)
        ticket = NO_TICKET
        if self._callers is not None:
            ticket = await self._callers.ticket(caller_of(request), wanted.named)
        return json_value({"ticket": ticket, "expires_in_s": TICKET_S}, 201)

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.CREATE, self.create),
            Route(op.LIST, self.page),
            Route(op.REVOKE, self.revoke),
            Route(op.TICKET, self.ticket),
        ]
