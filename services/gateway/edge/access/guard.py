"""Authenticate and authorize each public request before any byte of its body is read."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import hdrs, web

from quorumlog.errors import NoSuchLedger, NoSuchTransaction, QuorumLogError, Unauthenticated
from quorumlog.net import audit
from quorumlog.protocol.metadata import LedgerMetadata
from services.gateway.edge.access import scopes
from services.gateway.edge.access.callers import Callers
from services.gateway.edge.access.quotas import Flow
from services.gateway.edge.operations import LEDGER_ID, NAME, TICKET, PublicOperation
from services.gateway.edge.transactions import TRANSACTION
from services.gateway.logs.transactions import Transactions

_BEARER: Final = "bearer"
_CONNECTION: Final = web.RequestKey("connection", asyncio.Transport)
"""Request key: the connection, which aiohttp removes from the request on disconnection."""
_FLOW: Final = web.RequestKey("flow", Flow)
"""Request key: the request's byte counter. Set only if the token has quotas."""


class Unguarded(Exception):
    """A route has no declared operation, so the route's required access is unknown."""


def table_of(
    app: web.Application, operations: Iterable[PublicOperation]
) -> Mapping[tuple[str, str], scopes.Access]:
    """Map each route's method and path to its required access. Raises: Unguarded."""
    declared = {(operation.method, operation.path): operation.scope for operation in operations}
    table = {}
    for route in app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        method = hdrs.METH_GET if route.method == hdrs.METH_HEAD else route.method
        if (method, path) not in declared:
            raise Unguarded(f"{method} {path} has no scope: declare it as a PublicOperation")
        table[route.method, path] = declared[method, path]
    return table


@dataclass(frozen=True, slots=True)
class Guard:
    """Rejects each request whose token lacks the scope that the route requires."""

    table: Mapping[tuple[str, str], scopes.Access]
    callers: Callers
    ledger: Callable[[int], Awaitable[LedgerMetadata]]
    """Returns a ledger's metadata. Only its immutable fields are used."""
    transactions: Transactions | None
    stream_log: Callable[[str], str]
    """Returns the name of the log for a stream's path."""
    body_bytes_max: int
    """Maximum size of a body that is read as a whole. Longer bodies are refused or streamed."""

    async def admit(self, request: web.Request, path: str) -> None:
        """Identify and check the caller of a request to the route with the declared `path`.

        Raises: Unauthenticated, Forbidden, NoSuchLedger, NoSuchTransaction, MetadataUnavailable,
        Overloaded, ConnectionError.
        """
        access = self.table.get((request.method, path))
        if access is None or access.named is scopes.Named.NOTHING:
            return  # no such route, or a route without access control
        caller = await self._identify(request)
        request[scopes.CALLER] = caller
        audit.identified(caller.who)
        if (connection := request.transport) is None:
            raise ConnectionResetError  # the client has disconnected
        announced = min(request.content_length or 0, self.body_bytes_max)
        if caller.usage is not None:
            caller.usage.begin(announced)
        request[_CONNECTION] = connection
        caller.connections.add(connection)
        if caller.usage is not None:
            flow = request[_FLOW] = Flow(request, connection, announced)
            caller.usage.flows.add(flow)
        may_be_hidden = (
            access.named is scopes.Named.LEDGER and scopes.Scope.ADMIN not in caller.everywhere
        )
        if access.scopes <= caller.everywhere and not may_be_hidden:
            request[scopes.SCOPES] = caller.everywhere
        elif access.scopes.isdisjoint(caller.somewhere):
            raise caller.lacks(access.scopes, "anything")
        else:
            if (place := await self._place(request, access)) is not None:
                request[scopes.SCOPES] = caller.check_found(access.scopes, *place)
            if connection.is_closing():
                raise ConnectionResetError  # the client has disconnected, or its token has ended

    async def _identify(self, request: web.Request) -> scopes.Caller:
        """Find the caller by token or ticket. Raises: Unauthenticated, MetadataUnavailable."""
        given = request.headers.get(hdrs.AUTHORIZATION)
        ticket = request.query.get(TICKET.name) if request.method == hdrs.METH_GET else None
        if given is None and ticket is not None:
            return await self.callers.identify_by_ticket(ticket, request.path)
        scheme, _, secret = (given or "").partition(" ")
        if scheme.lower() != _BEARER or not secret:
            raise Unauthenticated("an access token is required: send Authorization: Bearer …")
        return await self.callers.identify(secret.strip())

    def leave(self, request: web.Request, response: web.StreamResponse | None) -> None:
        """Charge and forget a request that has ended. The response may still be unsent."""
        if (connection := request.get(_CONNECTION)) is None:
            return
        caller = request[scopes.CALLER]
        caller.connections.discard(connection)
        if caller.usage is not None:
            flow = request[_FLOW]
            caller.usage.flows.discard(flow)
            caller.usage.charge(flow.more() + _unsent_bytes(request, response))

    async def _place(
        self, request: web.Request, access: scopes.Access
    ) -> tuple[scopes.Kind, str, QuorumLogError | None] | None:
        """Return the kind and name of the request's resource, and the error for a caller without
        any scope on the resource. Returns None if the handler checks access itself.
        """
        given, logs = request.match_info, scopes.Kind.LOGS
        match access.named:
            case scopes.Named.LOG:
                return logs, given[NAME.name], None
            case scopes.Named.STREAM:
                return logs, self.stream_log(given["path"]), None
            case scopes.Named.LEDGER:
                ledger_id = LEDGER_ID.parse(given[LEDGER_ID.name], LEDGER_ID.pointer)
                # The error must be the same whether or not the ledger exists.
                detail = f"there is no ledger {ledger_id} for this token"
                absent = NoSuchLedger(detail, ledger_id=ledger_id)
                try:
                    return *scopes.place_of(await self.ledger(ledger_id)), absent
                except NoSuchLedger as error:
                    raise absent from error
            case scopes.Named.TRANSACTION:
                assert self.transactions is not None, "transaction routes need `transactions`"
                asked = TRANSACTION.parse(given[TRANSACTION.name], TRANSACTION.pointer)
                log = await log_of_transaction(self.transactions, asked)
                return logs, log, scopes.no_transaction(asked)
            case scopes.Named.CLUSTER:
                return scopes.Kind.CLUSTER, "", None
            case scopes.Named.EVERYTHING:
                raise request[scopes.CALLER].lacks(access.scopes, "everything")
            case scopes.Named.SOME | scopes.Named.NOTHING:
                return None


async def log_of_transaction(transactions: Transactions, asked: str) -> str:
    """Return the name of a transaction's log. Raises: NoSuchTransaction, MetadataUnavailable."""
    try:
        return (await transactions.get(asked)).log
    except NoSuchTransaction as error:
        raise scopes.no_transaction(asked) from error


def _unsent_bytes(request: web.Request, response: web.StreamResponse | None) -> int:
    """The size of the body of an unsent response; 0 for a streamed response."""
    if not isinstance(response, web.Response) or request.method == hdrs.METH_HEAD:
        return 0
    return len(response.body) if isinstance(response.body, bytes) else 0
