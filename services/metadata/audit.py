"""Keeps audited requests beside their changes: the row of a request is of the first transaction that changes something
for the request, so there is no change without its row, and no row without a change (docs/adr/0022-audit-log.md).
"""

from contextvars import ContextVar
from typing import Final

import asyncpg
from aiohttp import web
from aiohttp.typedefs import Handler

from quorumlog import header
from quorumlog.net import audit
from quorumlog.net.identity import Role, caller_of
from quorumlog.wire.token_bodies import AuditedRequest

FOR_CLIENTS: Final = web.AppKey("for_clients", frozenset[str])
"""The operations (method and path) that are kept with the request of a client for which another service asks for them."""

_TRUSTED: Final = (None, Role.GATEWAY, Role.AUTORECOVERY)
"""Who asks for clients and operators, and tells for whom."""

_LOCK: Final = 0x71756F74
"""Any number that no other application of this database uses; migrations and rebuilds have others."""
_INSERT: Final = (
    # Rows are committed in the order of their numbers: who reads on after a number misses none.
    "INSERT INTO audit (id, who, remote, operation, target, via)"
    f" SELECT $1::uuid, $2::text, $3::text, $4::text, $5::text, $6::text FROM pg_advisory_xact_lock({_LOCK})"
    # A later step of the request uses up no number: the rows to delete are counted by numbers.
    " WHERE NOT EXISTS (SELECT FROM audit WHERE id = $1::uuid) ON CONFLICT (id) DO NOTHING"
)


_ASKED: Final[ContextVar[tuple[AuditedRequest | audit.Audited, str] | None]] = ContextVar(
    "asked", default=None
)
"""The audited request that the work in this context is for, and the service that asks for its client, if any."""


@web.middleware
async def keeps_audited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: have the transactions of an audited request keep it."""
    _ASKED.set(_asked_by(request))
    return await handler(request)


async def keep(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Keep the request that the present transaction has changed something for, if it is audited; once. Last in the
    transaction, since those of other audited requests wait for its end.
    """
    if (asked := _ASKED.get()) is None:
        return
    request, via = asked
    of = request.body if isinstance(request, audit.Audited) else request
    values = (of.id, of.who, of.remote, of.operation, of.target, via)
    # Postgres has no text with NUL in it.
    await connection.execute(_INSERT, *(value.replace("\x00", "") for value in values))


def _asked_by(request: web.Request) -> tuple[AuditedRequest | audit.Audited, str] | None:
    told = request.headers.get(header.AUDITED)
    resource = request.match_info.route.resource
    is_for_others = (
        resource is not None
        and f"{request.method} {resource.canonical}" in request.app[FOR_CLIENTS]
    )
    if told is not None and caller_of(request).role in _TRUSTED and is_for_others:
        asked = AuditedRequest.from_header(told)
        if asked is not None:
            return asked, audit.who_is(caller_of(request))
    own = audit.current()
    return None if own is None else (own, "")
