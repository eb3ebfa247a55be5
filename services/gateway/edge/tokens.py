"""The resources /v1/tokens and /v1/tickets: access tokens are made, listed and revoked; browsers get tickets."""

from typing import Annotated, Any, Final

from aiohttp import web
from pydantic import FailFast, Field, StringConstraints, WithJsonSchema
from yarl import URL

from quorumlog import errors
from quorumlog.net import audit
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.net.operations import Reply
from quorumlog.net.parameters import Given, path_text
from quorumlog.wire import token_bodies
from quorumlog.wire.secret import draw_token
from services.gateway.edge import operations as op
from services.gateway.edge.access.callers import NO_TICKET, TICKET_S, Callers
from services.gateway.edge.access.scopes import Named, Scope, caller_of, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_value, no_content
from services.gateway.edge.models import DATE_TIME, Model

Grant = Annotated[str, StringConstraints(pattern=rf"^{token_bodies.GRANT}$")]


class AccessTokenCreate(Model):
    """A token to make."""

    name: token_bodies.TokenName
    """For people: who has it, or what for."""
    grants: Annotated[list[Grant], FailFast()] = Field(
        min_length=1,
        max_length=token_bodies.GRANTS_MAX,
        description="`read`, `append`, `manage` or `admin`, then `:`, and what for: `logs/NAME`, `ledgers/NAMESPACE`"
        " (each with `*` for any rest), `cluster`, or `*` for everything.",
    )
    quotas: token_bodies.TokenQuotas = Field(
        default=token_bodies.TokenQuotas(),
        description="What the token may use of each gateway, in requests and bytes per second, connections with"
        " requests under way, and open ledgers; beyond: 429 overloaded.",
    )
    expires_in_s: int | None = Field(default=None, ge=1, le=token_bodies.EXPIRES_IN_S_MAX)
    """Without it: valid until revoked."""

    def drawn(self) -> tuple[str, token_bodies.TokenFields]:
        """A new secret, and what is stored of it."""
        drawn = draw_token()
        return drawn.secret, token_bodies.TokenFields(
            id=drawn.id,
            hash=drawn.hash,
            name=self.name,
            grants=tuple(self.grants),
            quotas=self.quotas,
        )


class AccessToken(Model):
    """A token without its secret."""

    id: Annotated[str, StringConstraints(pattern=rf"^{token_bodies.TOKEN_ID}$")]
    name: str
    grants: list[str]
    quotas: token_bodies.TokenQuotas
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None


class NewAccessToken(AccessToken):
    """A token with its secret, which is shown this once."""

    token: str


class AccessTokenList(Model):
    """All tokens, by creation."""

    tokens: list[AccessToken]


class TicketCreate(Model):
    """A ticket to make."""

    path: Annotated[
        str,
        StringConstraints(
            pattern=r"^/v1/(logs/[A-Za-z0-9._-]{1,200}/(records|ws)|ledgers/[A-Za-z0-9._-]{1,200}/(entries|ws)|"
            r"stream/[!-\"$->@-~]{1,600})$"
        ),
    ]
    """The path of what is read, as its URL has it, without a query."""

    @property
    def named(self) -> str:
        """The path as a request names it, however the URL was escaped."""
        return URL(self.path, encoded=True).path


class NewTicket(Model):
    """A ticket."""

    ticket: str
    """Goes into the query: `?ticket=…`."""
    expires_in_s: int


def token_json(row: token_bodies.TokenRow) -> dict[str, Any]:
    """A token as clients see it."""
    return row.model_dump(mode="json", exclude={"hash"})


ID: Final = path_text("id", token_bodies.TOKEN_ID, "The token.", "5f0c2a9d41be7786")

_EXAMPLE: Final[dict[str, Any]] = {
    "id": "5f0c2a9d41be7786",
    "name": "orders service",
    "grants": ["append:logs/orders-*", "read:logs/orders-*"],
    "quotas": {"requests_per_s": 100, "bytes_per_s": None, "connections": 10, "open_ledgers": None},
    "created_at": "2026-01-02T03:04:05.678901Z",
    "expires_at": None,
}


class TokenRoutes(op.Handlers, tag="Tokens"):
    """Handlers of access tokens."""

    def __init__(self, client: TokenClient, room: Room, callers: Callers | None) -> None:
        """`callers`: those who are let in; without it everyone."""
        self._client, self._callers = client, callers
        self._room = room

    @op.operation(
        "POST /v1/tokens",
        body=op.takes(
            AccessTokenCreate,
            {"producer": {"name": "orders service", "grants": _EXAMPLE["grants"]}},
        ),
        replies=op.gives(
            "The token.", NewAccessToken, {"new": _EXAMPLE | {"token": "qlt_…"}}, status=201
        ),
        scope=on(Named.EVERYTHING, Scope.ADMIN),
        needs_body=True,
        is_audited=True,
    )
    async def create_token(self, request: web.Request, _given: Given) -> web.Response:
        """Make an access token.

        The answer has the secret, which nobody can show again: only its hash is stored.
        """
        wanted = await body.read_model(request, self._room, AccessTokenCreate)
        secret, token = wanted.drawn()
        audit.name_target(f"tokens/{token.id}")
        row = await self._client.create(token, expires_in_s=wanted.expires_in_s)
        return json_value(token_json(row) | {"token": secret}, 201)

    @op.operation(
        "GET /v1/tokens",
        replies=op.gives("The tokens.", AccessTokenList, {"one": {"tokens": [_EXAMPLE]}}),
        scope=on(Named.EVERYTHING, Scope.ADMIN),
    )
    async def list_tokens(self, _request: web.Request, _given: Given) -> web.Response:
        """List access tokens.

        By creation, without their secrets; an expired one for a week after its end.
        """
        rows = (await self._client.list()).tokens or ()
        return json_value({"tokens": [token_json(row) for row in rows]})

    @op.operation(
        "DELETE /v1/tokens/{id}",
        (ID,),
        replies={204: Reply("It is gone.")},
        errors=(errors.NoSuchToken,),
        scope=on(Named.EVERYTHING, Scope.ADMIN),
        is_audited=True,
    )
    async def revoke_token(self, _request: web.Request, given: Given) -> web.Response:
        """Revoke an access token.

        Within seconds all gateways refuse it, and cut its requests that are under way.
        """
        await self._client.revoke(given[ID])
        return no_content()

    @op.operation(
        "POST /v1/tickets",
        body=op.takes(TicketCreate, {"of a log": {"path": "/v1/logs/orders/records"}}),
        replies=op.gives(
            "The ticket.",
            NewTicket,
            {"new": {"ticket": "5f0c2a9d41be7786.1767323045.9b…", "expires_in_s": 30}},
            status=201,
        ),
        scope=on(Named.SOME, Scope.READ, Scope.APPEND),
        needs_body=True,
    )
    async def create_ticket(self, request: web.Request, _given: Given) -> web.Response:
        """Make a ticket for a page in a browser.

        `EventSource` and `WebSocket` of browsers send no headers: they open the path with the
        ticket in its query, within half a minute, through any gateway. The ticket allows what the
        token allows there.
        """
        wanted = await body.read_model(request, self._room, TicketCreate)
        ticket = NO_TICKET
        if self._callers is not None:
            ticket = await self._callers.ticket(caller_of(request), wanted.named)
        return json_value({"ticket": ticket, "expires_in_s": TICKET_S}, 201)
