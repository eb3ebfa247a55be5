"""The resources /v1/tokens, /v1/caller and /v1/tickets: access tokens, and tickets for browsers."""

from typing import Annotated, Any, Final

from aiohttp import web
from pydantic import FailFast, Field, StringConstraints, WithJsonSchema
from yarl import URL

from quorumlog import errors
from quorumlog.net import audit
from quorumlog.net.gateway_clients import TokenClient
from quorumlog.net.operations import Reply
from quorumlog.net.parameters import Given, path_text
from quorumlog.net.timers import time_text
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
    """An access token to create."""

    name: token_bodies.TokenName
    """Label for people, such as the token's user or purpose."""
    grants: Annotated[list[Grant], FailFast()] = Field(
        min_length=1,
        max_length=token_bodies.GRANTS_MAX,
        description="`read`, `append`, `manage` or `admin`, then `:`, then the resource:"
        " `logs/NAME` or `ledgers/NAMESPACE` (`*` matches any rest), `cluster`, or `*` for all.",
    )
    quotas: token_bodies.TokenQuotas = Field(
        default=token_bodies.TokenQuotas(),
        description="Limits at each gateway: requests and bytes per second, connections with "
        "requests in progress, and open ledgers. Beyond a limit the error is 429 overloaded.",
    )
    expires_in_s: int | None = Field(default=None, ge=1, le=token_bodies.EXPIRES_IN_S_MAX)
    """Lifetime of the token in seconds. By default, the token is valid until revoked."""

    def drawn(self) -> tuple[str, token_bodies.TokenFields]:
        """Draw a new secret. Returns the secret, and the fields to store, which have its hash."""
        drawn = draw_token()
        return drawn.secret, token_bodies.TokenFields(
            id=drawn.id,
            hash=drawn.hash,
            name=self.name,
            grants=tuple(self.grants),
            quotas=self.quotas,
        )


class AccessToken(Model):
    """An access token without its secret."""

    id: Annotated[str, StringConstraints(pattern=rf"^{token_bodies.TOKEN_ID}$")]
    name: str
    grants: list[str]
    quotas: token_bodies.TokenQuotas
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None


class NewAccessToken(AccessToken):
    """A new access token with its secret, which no later response contains."""

    token: str


class AccessTokenList(Model):
    """All access tokens, sorted by creation time."""

    tokens: list[AccessToken]


class CallerShown(Model):
    """The caller of a request."""

    who: str
    requires_tokens: bool
    """Whether this gateway requires tokens. If not, `who` is `everyone`, with all permissions."""
    grants: list[str]
    quotas: token_bodies.TokenQuotas | None = None
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)] | None


class TicketCreate(Model):
    """A ticket to create."""

    path: Annotated[
        str,
        StringConstraints(
            pattern=r"^/v1/(logs/[A-Za-z0-9._-]{1,200}/(records|ws)|ledgers/[A-Za-z0-9._-]{1,200}/(entries|ws)|"
            r"stream/[!-\"$->@-~]{1,600})$"
        ),
    ]
    """The path that the browser will open, escaped as in its URL, without a query."""

    @property
    def named(self) -> str:
        """The unescaped path, as in `request.path`."""
        return URL(self.path, encoded=True).path


class NewTicket(Model):
    """A new ticket and its lifetime in seconds."""

    ticket: str
    """The ticket, which must be sent in the query as `?ticket=…`."""
    expires_in_s: int


def token_json(row: token_bodies.TokenRow) -> dict[str, Any]:
    """Build the JSON object of a token, without its hash."""
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
    """HTTP handlers for access tokens and tickets."""

    def __init__(self, client: TokenClient, room: Room, callers: Callers | None) -> None:
        """`callers` authenticates requests. If None, every request is allowed."""
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
        """Create an access token.

        The response has the secret. The secret can't be shown again, because only its hash is stored.
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

        The tokens are sorted by creation time, without secrets. Expired tokens are listed for a week.
        """
        rows = (await self._client.list()).tokens or ()
        return json_value({"tokens": [token_json(row) for row in rows]})

    @op.operation(
        "DELETE /v1/tokens/{id}",
        (ID,),
        replies={204: Reply("The token is revoked.")},
        errors=(errors.NoSuchToken,),
        scope=on(Named.EVERYTHING, Scope.ADMIN),
        is_audited=True,
    )
    async def revoke_token(self, _request: web.Request, given: Given) -> web.Response:
        """Revoke an access token.

        Within seconds all gateways refuse the token and end its requests in progress.
        """
        await self._client.revoke(given[ID])
        return no_content()

    @op.operation(
        "GET /v1/caller",
        replies=op.gives(
            "The caller.",
            CallerShown,
            {
                "a token": {
                    "who": "the token orders service (5f0c2a9d41be7786)",
                    "requires_tokens": True,
                    **{name: _EXAMPLE[name] for name in ("grants", "quotas", "expires_at")},
                }
            },
        ),
        scope=on(Named.SOME, *Scope),
    )
    async def get_caller(self, request: web.Request, _given: Given) -> web.Response:
        """Get the caller's name, and the permissions of the caller's token."""
        caller = caller_of(request)
        ends_at = caller.ends_at
        shown: dict[str, Any] = {
            "who": caller.who,
            "requires_tokens": self._callers is not None,
            "grants": caller.granted,
            "expires_at": None if ends_at is None else time_text(ends_at),
        }
        if caller.usage is not None:
            shown["quotas"] = caller.usage.quotas.model_dump(mode="json")
        return json_value(shown)

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
        """Create a ticket for a page in a browser.

        `EventSource` and `WebSocket` in browsers can't send headers. Instead, a page opens the path
        with the ticket in the query, within half a minute, through any gateway. On this path, the
        ticket has the permissions of the caller's token.
        """
        wanted = await body.read_model(request, self._room, TicketCreate)
        ticket = NO_TICKET
        if self._callers is not None:
            ticket = await self._callers.ticket(caller_of(request), wanted.named)
        return json_value({"ticket": ticket, "expires_in_s": TICKET_S}, 201)
