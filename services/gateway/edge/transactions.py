"""The resource /v1/transactions: sealed ledgers that are published onto a log together."""

from aiohttp import web

from quorumlog.net import audit
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from services.gateway.edge import body
from services.gateway.edge import transaction_operations as op
from services.gateway.edge.access import Kind, Scope, caller_of
from services.gateway.edge.answers import json_value
from services.gateway.edge.operations import WRITER_TOKEN
from services.gateway.edge.room import Room
from services.gateway.edge.transaction_models import (
    TransactionBegin,
    TransactionCommit,
    VersionBegin,
    transaction_json,
)
from services.gateway.logs.transactions import Transactions


class TransactionRoutes:
    """Handlers of transactions."""

    def __init__(self, transactions: Transactions, room: Room) -> None:
        self._transactions = transactions
        self._room = room

    async def begin(self, request: web.Request, _given: Given) -> web.Response:
        """POST /v1/transactions."""
        value = await body.read_object(request, self._room)
        wanted: TransactionBegin | VersionBegin
        if value.get("app") is None and value.get("version") is None:
            wanted = body.parsed(value, TransactionBegin)
        else:
            wanted = body.parsed(value, VersionBegin)
        caller_of(request).check(Scope.APPEND, Kind.LOGS, wanted.log)
        found, is_new = await self._transactions.begin(
            wanted.log, app=wanted.app, version=wanted.version, expires_in_s=wanted.expires_in_s
        )
        headers = {"Location": f"/v1/transactions/{found.id}"}
        return json_value(transaction_json(found), 201 if is_new else 200, headers)

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/transactions/{transaction}."""
        return json_value(transaction_json(await self._transactions.get(given[op.TRANSACTION])))

    async def commit(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/transactions/{transaction}/commit."""
        wanted = await body.read_model(request, self._room, TransactionCommit)
        if wanted.overwrite:
            found = await self._transactions.get(given[op.TRANSACTION])
            caller_of(request).check(Scope.MANAGE, Kind.LOGS, found.log)
            audit.name_target(f"logs/{found.log}")
        else:
            audit.leave_out()
        done = await self._transactions.commit(
            given[op.TRANSACTION],
            wanted.sealed(),
            overwrite=wanted.overwrite,
            token=given[WRITER_TOKEN],
        )
        return json_value(transaction_json(done))

    async def abort(self, _request: web.Request, given: Given) -> web.Response:
        """POST /v1/transactions/{transaction}/abort."""
        return json_value(transaction_json(await self._transactions.abort(given[op.TRANSACTION])))

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.BEGIN, self.begin),
            Route(op.GET, self.get),
            Route(op.COMMIT, self.commit),
            Route(op.ABORT, self.abort),
        ]
