"""The operations of /v1/tokens and /v1/tickets."""

from typing import Any, Final

from quorumlog import errors
from quorumlog.net.operations import JSON, Content, Operation, Reply
from quorumlog.net.parameters import path_text
from quorumlog.wire.token_bodies import TOKEN_ID
from services.gateway.edge import token_models as models
from services.gateway.edge.operations import ALWAYS, USUAL, WITH_BODY, WITH_METADATA, gives

ID: Final = path_text("id", TOKEN_ID, "The token.", "5f0c2a9d41be7786")

_EXAMPLE: Final[dict[str, Any]] = {
    "id": "5f0c2a9d41be7786",
    "name": "orders service",
    "grants": ["append:logs/orders-*", "read:logs/orders-*"],
    "quotas": {
        "requests_per_s": 100,
        "bytes_per_s": None,
        "connections": 10,
        "open_ledgers": None,
    },
    "created_at": "2026-01-02T03:04:05.678901Z",
    "expires_at": None,
}

CREATE: Final = Operation(
    "POST",
    "/v1/tokens",
    "createToken",
    "Tokens",
    "Make an access token",
    "The answer has the secret, which nobody can show again: only its hash is stored.",
    body={
        JSON: Content(
            models.AccessTokenCreate,
            {"producer": {"name": "orders service", "grants": _EXAMPLE["grants"]}},
        )
    },
    replies=gives(
        "The token.",
        models.NewAccessToken,
        {"new": _EXAMPLE | {"token": "qlt_…"}},
        status=201,
    ),
    errors=(*USUAL, *WITH_BODY),
    needs_body=True,
    is_audited=True,
)
LIST: Final = Operation(
    "GET",
    "/v1/tokens",
    "listTokens",
    "Tokens",
    "List access tokens",
    "By creation, without their secrets; an expired one for a week after its end.",
    replies=gives("The tokens.", models.AccessTokenList, {"one": {"tokens": [_EXAMPLE]}}),
    errors=USUAL,
)
REVOKE: Final = Operation(
    "DELETE",
    "/v1/tokens/{id}",
    "revokeToken",
    "Tokens",
    "Revoke an access token",
    "Within seconds all gateways refuse it, and cut its requests that are under way.",
    (ID,),
    replies={204: Reply("It is gone.")},
    errors=(*ALWAYS, *WITH_METADATA, errors.NoSuchToken),
    is_audited=True,
)
TICKET: Final = Operation(
    "POST",
    "/v1/tickets",
    "createTicket",
    "Tokens",
    "Make a ticket for a page in a browser",
    "`EventSource` and `WebSocket` of browsers send no headers: they open the path with the ticket in its query,"
    " within half a minute, through any gateway. The ticket allows what the token allows there.",
    body={
        JSON: Content(models.TicketCreate, {"of a log": {"path": "/v1/logs/orders/entries"}}),
    },
    replies=gives(
        "The ticket.",
        models.NewTicket,
        {"new": {"ticket": "5f0c2a9d41be7786.1767323045.9b…", "expires_in_s": 30}},
        status=201,
    ),
    errors=(*USUAL, *WITH_BODY),
    needs_body=True,
)
