"""Stores audited requests with their changes (docs/adr/0022-audit-log.md). The first transaction
that changes data for a request also writes the request's row. Thus the audit log has a row for each
request with changes, and for no other request.
"""

from contextvars import ContextVar
from typing import Final

import asyncpg
from aiohttp import web
from aiohttp.typedefs import Handler

from quorumlog.net import audit
from quorumlog.net.identity import caller_of
from quorumlog.wire.token_bodies import AuditedRequest

FOR_CLIENTS: Final = web.AppKey("for_clients", frozenset[str])
"""Operations (method and path) audited under the identity of the client that caused them."""

_LOCK: Final = 0x71756F74
"""The number of an advisory lock, which no other code uses in this database."""
_INSERT: Final = (
    # The lock makes rows commit in the order of their numbers, so paging by number misses no row.
    "INSERT INTO audit (id, who, remote, operation, target, via)"
    f" SELECT $1::uuid, $2::text, $3::text, $4::text, $5::text, $6::text FROM pg_advisory_xact_lock({_LOCK})"
    # Later transactions of the request must use up no numbers: trimming counts rows by number.
    " WHERE NOT EXISTS (SELECT FROM audit WHERE id = $1::uuid) ON CONFLICT (id) DO NOTHING"
)


_ASKED: Final[ContextVar[tuple[AuditedRequest | audit.Audited, str] | None]] = ContextVar(
    "asked", default=None
)
"""The current context's audited request, and the service that forwarded it ("" if none did)."""


@web.middleware
async def keeps_audited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that remembers an audited request for the request's first transaction."""
    _ASKED.set(_asked_by(request))
    return await handler(request)


async def keep(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Store the audited request, if any, for which this transaction changed data. Idempotent. Call
    this function last, because other audited requests then wait for the end of the transaction.
    """
    if (asked := _ASKED.get()) is None:
        return
    request, via = asked
    of = request.body if isinstance(request, audit.Audited) else request
    values = (of.id, of.who, of.remote, of.operation, of.target, via)
    # Postgres can't store a NUL character in a text.
    await connection.execute(_INSERT, *(value.replace("\x00", "") for value in values))


def _asked_by(request: web.Request) -> tuple[AuditedRequest | audit.Audited, str] | None:
    resource = request.match_info.route.resource
    is_for_others = (
        resource is not None
        and f"{request.method} {resource.canonical}" in request.app[FOR_CLIENTS]
    )
    if is_for_others and (asked := audit.asked_by(request)) is not None:
        return asked, audit.who_is(caller_of(request))
    own = audit.current()
    return None if own is None else (own, "")
