"""The resource /v1/transactions: sealed ledgers that come onto a log together."""

import re
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import (
    EntryUnavailable,
    LogClosed,
    LogFenced,
    NoSuchLog,
    NoSuchTransaction,
    NotEnoughBookies,
    NotTheOwner,
    QuorumTimeout,
    RecoveryBlocked,
    TransactionAborted,
    TransactionCommitted,
    WriterLost,
)
from quorumlog.wire.transaction_bodies import TRANSACTION_ID
from services.gateway.edge import body, params
from services.gateway.edge import operations as op
from services.gateway.edge.answers import json_value
from services.gateway.edge.ledgers import invalid_of
from services.gateway.edge.logs import token_of
from services.gateway.edge.params import JSON
from services.gateway.edge.transaction_models import (
    TransactionBegin,
    TransactionCommit,
    TransactionModel,
    VersionBegin,
    transaction_json,
)
from services.gateway.logs.transactions import Transactions

M = TypeVar("M", bound=BaseModel)

_ID: Final = re.compile(TRANSACTION_ID, re.ASCII)


class TransactionRoutes:
    """Handlers of transactions."""

    def __init__(self, transactions: Transactions, room: body.Room) -> None:
        self._transactions = transactions
        self._room = room

    async def begin(self, request: web.Request) -> web.Response:
        """POST /v1/transactions."""
        params.query(request)
        params.accepted(request)
        value = await body.read_object(request, self._room)
        wanted: TransactionBegin | VersionBegin
        if value.get("app") is None and value.get("version") is None:
            wanted = _parsed(value, TransactionBegin)
        else:
            wanted = _parsed(value, VersionBegin)
        found, is_new = await self._transactions.begin(
            wanted.log, app=wanted.app, version=wanted.version, expires_in_s=wanted.expires_in_s
        )
        headers = {"Location": f"/v1/transactions/{found.id}"}
        return json_value(transaction_json(found), 201 if is_new else 200, headers)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/transactions/{transaction}."""
        return json_value(transaction_json(await self._transactions.get(self._plain(request))))

    async def commit(self, request: web.Request) -> web.Response:
        """POST /v1/transactions/{transaction}/commit."""
        transaction = self._plain(request)
        token = token_of(request)
        wanted = _parsed(await body.read_object(request, self._room), TransactionCommit)
        done = await self._transactions.commit(
            transaction, wanted.sealed(), overwrite=wanted.overwrite, token=token
        )
        return json_value(transaction_json(done))

    async def abort(self, request: web.Request) -> web.Response:
        """POST /v1/transactions/{transaction}/abort."""
        transaction = self._plain(request)
        await body.expect_nothing(request, self._room)
        return json_value(transaction_json(await self._transactions.abort(transaction)))

    def _plain(self, request: web.Request) -> str:
        """The id of a request without parameters that is answered with JSON."""
        params.query(request)
        params.accepted(request)
        transaction = request.match_info["transaction"]
        if not _ID.fullmatch(transaction):
            raise params.invalid("/path/transaction", f"must match {TRANSACTION_ID}")
        return transaction

    def routes(self) -> list[op.Route]:
        """The operations with their handlers."""
        return [
            (BEGIN, self.begin),
            (GET, self.get),
            (COMMIT, self.commit),
            (ABORT, self.abort),
        ]


def _parsed(value: object, model: type[M]) -> M:
    """The body as a model. Raises: InvalidRequest."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_of(error) from error


_OPEN: Final[dict[str, Any]] = {
    "transaction": "5a0d1f6e-6c1c-4f0e-9d0e-1c7f3b0f2a11",
    "log": "events",
    "app": "nightly",
    "version": 7,
    "state": "OPEN",
    "duplicate": False,
    "first_offset": None,
    "last_offset": None,
    "ledgers": [
        {"ledger_id": 8, "partition": 0, "attempt": 0, "first_offset": None, "last_offset": None}
    ],
    "created_at": "2026-01-02T03:04:05.678901Z",
    "expires_at": "2026-01-02T04:04:05.678901Z",
}
_DONE: Final = _OPEN | {
    "state": "COMMITTED",
    "first_offset": 100,
    "last_offset": 199,
    "ledgers": [
        {"ledger_id": 8, "partition": 0, "attempt": 0, "first_offset": 100, "last_offset": 199}
    ],
}
_NOTHING: Final = {
    JSON: op.Content({"type": "object", "additionalProperties": False}, {"nothing": {}})
}
_NAME: Final = op.Parameter(
    "transaction",
    "path",
    {"type": "string", "pattern": f"^{TRANSACTION_ID}$"},
    "The transaction.",
    "5a0d1f6e-6c1c-4f0e-9d0e-1c7f3b0f2a11",
)
_ERRORS: Final = (*op.ALWAYS, *op.ANSWERING, *op.WITH_METADATA)


def _content(example: dict[str, Any]) -> dict[str, op.Content]:
    return {JSON: op.Content(TransactionModel, {"a transaction": example})}


BEGIN: Final = op.Operation(
    "POST",
    "/v1/transactions",
    "beginTransaction",
    "Transactions",
    "Begin a transaction on a log",
    "With `app` and `version` all who begin the same get the same one while it is OPEN; where this "
    "version, or a later one, is on the log it is COMMITTED and there is nothing to do. Its ledgers "
    "are made by `POST /v1/ledgers` with `transaction`.",
    body={
        JSON: op.Content(
            {"anyOf": [TransactionBegin, VersionBegin]},
            {"plain": {"log": "events"}, "once": {"log": "events", "app": "nightly", "version": 7}},
        )
    },
    answers={
        201: op.Answer("It is new.", _content(_OPEN), {"Location": "The transaction's path."}),
        200: op.Answer(
            "There was one of this app and version.",
            _content(_OPEN),
            {"Location": "The transaction's path."},
        ),
    },
    errors=(*_ERRORS, *op.WITH_BODY, NoSuchLog, LogClosed),
    needs_body=True,
)
GET: Final = op.Operation(
    "GET",
    "/v1/transactions/{transaction}",
    "getTransaction",
    "Transactions",
    "Look at a transaction",
    parameters=(_NAME,),
    answers={200: op.Answer("The transaction.", _content(_OPEN))},
    errors=(*_ERRORS, NoSuchTransaction),
)
COMMIT: Final = op.Operation(
    "POST",
    "/v1/transactions/{transaction}/commit",
    "commitTransaction",
    "Transactions",
    "Put its closed ledgers onto the log, all at once",
    "The records get dense offsets after those of the log, ledger by ledger. The same request again "
    "gets the same answer, through any gateway: repeat it until there is one. Where the log was "
    "opened for one writer, `Writer-Token` is needed.",
    (
        _NAME,
        op.Parameter("Writer-Token", "header", op.int64(0), "Of a log that was opened."),
    ),
    {
        JSON: op.Content(
            TransactionCommit,
            {
                "ids": {"ledgers": [8, 9]},
                "ends": {"ledgers": [{"ledger_id": 8, "last_entry": 99}], "overwrite": True},
            },
        )
    },
    {200: op.Answer("It is committed.", _content(_DONE))},
    (
        *_ERRORS,
        *op.WITH_BODY,
        NoSuchTransaction,
        TransactionAborted,
        TransactionCommitted,
        NoSuchLog,
        LogClosed,
        LogFenced,
        NotEnoughBookies,
        EntryUnavailable,
        RecoveryBlocked,
        QuorumTimeout,
        NotTheOwner,
        WriterLost,
    ),
    needs_body=True,
)
ABORT: Final = op.Operation(
    "POST",
    "/v1/transactions/{transaction}/abort",
    "abortTransaction",
    "Transactions",
    "End a transaction without a trace",
    "Its ledgers are fenced and deleted. One that is COMMITTED stays so: 409, nothing is changed.",
    (_NAME,),
    _NOTHING,
    {200: op.Answer("It is aborted.", _content(_OPEN | {"state": "ABORTED", "ledgers": []}))},
    (*_ERRORS, *op.WITH_BODY, NoSuchTransaction, TransactionCommitted),
)
