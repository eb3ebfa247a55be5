"""The resource /v1/ledgers: create, look, list, close, recover, delete."""

from typing import Any

from aiohttp import web

from quorumlog.errors import NoSuchTransaction
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.wire.position_bodies import POSITIONS_LOG
from quorumlog.wire.token_bodies import NAMESPACE
from services.gateway.edge import body
from services.gateway.edge import ledger_operations as op
from services.gateway.edge.access import (
    Caller,
    Kind,
    Scope,
    caller_of,
    no_transaction,
    place_of,
)
from services.gateway.edge.answers import json_value, no_content
from services.gateway.edge.guard import log_of_transaction
from services.gateway.edge.models import (
    AcceptLoss,
    LedgerCreate,
    PasswordChange,
    Recover,
    TransactionLedgerCreate,
    ledger_json,
)
from services.gateway.edge.once import once_of
from services.gateway.edge.operations import LEDGER_ID, PASSWORD
from services.gateway.edge.room import Room
from services.gateway.interface import EngineInterface, LedgerQuery
from services.gateway.logs.transactions import TransactionAttempt, Transactions


class LedgerRoutes:
    """Handlers of ledgers as a whole."""

    def __init__(
        self, engine: EngineInterface, room: Room, transactions: Transactions | None = None
    ) -> None:
        self._engine = engine
        self._room = room
        self._transactions = transactions

    async def create(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/ledgers."""
        value = await body.read_object(request, self._room)
        once = once_of(request, given, value)
        caller = caller_of(request)
        if caller.usage is None:
            ledger = await self._create(caller, value, once)
        else:
            with caller.usage.new_ledger(self._engine.writes) as counted:
                ledger = await self._create(caller, value, once)
                counted.add(ledger.ledger_id)
        return json_value(
            ledger_json(ledger),
            201,
            {"Location": f"/v1/ledgers/{ledger.ledger_id}", "ETag": f'"{ledger.version}"'},
        )

    async def _create(
        self, caller: Caller, value: dict[str, Any], once: Once | None
    ) -> LedgerMetadata:
        if "transaction" in value:
            wanted = body.parsed(value, TransactionLedgerCreate)
            ledger = await self._create_of_log(caller, wanted, once)
        else:
            options = body.parsed(value, LedgerCreate).options(once)
            namespace = dict(options.custom).get(NAMESPACE, "")
            caller.check(Scope.APPEND, Kind.LEDGERS, namespace)
            ledger = await self._engine.create(options)
        return ledger

    async def _create_of_log(
        self, caller: Caller, wanted: TransactionLedgerCreate, once: Once | None
    ) -> LedgerMetadata:
        if self._transactions is None:
            raise NoSuchTransaction
        if Scope.APPEND not in caller.everywhere:
            log = await log_of_transaction(self._transactions, wanted.transaction)
            absent = no_transaction(wanted.transaction)
            caller.check_found((Scope.APPEND,), Kind.LOGS, log, absent)
        whose = TransactionAttempt(wanted.transaction, wanted.partition, wanted.attempt)
        custom = tuple(sorted(wanted.metadata.items()))
        return await self._transactions.create_ledger(whose, custom=custom, once=once)

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/ledgers/{ledger_id}."""
        ledger = await self._engine.get(given[LEDGER_ID])
        return _shown(ledger)

    async def page(self, request: web.Request, given: Given) -> web.Response:
        """GET /v1/ledgers."""
        page = await self._engine.list(
            LedgerQuery(
                state=given[op.STATE],
                bookie=given[op.BOOKIE],
                log=given[op.LOG],
                custom=given[op.METADATA],
                limit=given[op.LIMIT],
                after=given[op.AFTER],
                shown=caller_of(request).listed(Scope.READ),
            )
        )
        shown = [ledger_json(ledger) for ledger in page.ledgers if ledger.log != POSITIONS_LOG]
        return json_value({"ledgers": shown, "next": page.next})

    async def close(self, _request: web.Request, given: Given) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/close."""
        ledger = await self._engine.close(given[LEDGER_ID], password=given[PASSWORD])
        return _shown(ledger)

    async def recover(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/recover."""
        wanted = await body.read_model(request, self._room, Recover)
        if Scope.ADMIN not in (caller := caller_of(request)).everywhere:
            kind, name = place_of(await self._engine.row(given[LEDGER_ID]))
            # A recovery fences the ledger's writer: of the log of positions, the writer for all consumers.
            if wanted.declare_lost or name == POSITIONS_LOG:
                caller.check(Scope.ADMIN, kind, name)
        ledger = await self._engine.recover(
            given[LEDGER_ID], password=given[PASSWORD], declare_lost=wanted.declare_lost
        )
        return _shown(ledger)

    async def change_password(self, request: web.Request, given: Given) -> web.Response:
        """PUT /v1/ledgers/{ledger_id}/password."""
        wanted = await body.read_model(request, self._room, PasswordChange)
        ledger = await self._engine.change_password(
            given[LEDGER_ID],
            wanted.password,
            password=given[PASSWORD],
            once=once_of(request, given, wanted),
        )
        return _shown(ledger)

    async def accept_loss(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/accept-loss."""
        wanted = await body.read_model(request, self._room, AcceptLoss)
        ledger = await self._engine.accept_loss(
            given[LEDGER_ID],
            wanted.first,
            wanted.last,
            password=given[PASSWORD],
            declare_lost=wanted.declare_lost,
        )
        return _shown(ledger)

    async def delete(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/ledgers/{ledger_id}."""
        await self._engine.delete(given[LEDGER_ID], password=given[PASSWORD])
        return no_content()

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.CREATE, self.create),
            Route(op.LIST, self.page),
            Route(op.GET, self.get),
            Route(op.CLOSE, self.close),
            Route(op.RECOVER, self.recover),
            Route(op.CHANGE_PASSWORD, self.change_password),
            Route(op.ACCEPT_LOSS, self.accept_loss),
            Route(op.DELETE, self.delete),
        ]


def _shown(ledger: LedgerMetadata) -> web.Response:
    return json_value(ledger_json(ledger), headers={"ETag": f'"{ledger.version}"'})
