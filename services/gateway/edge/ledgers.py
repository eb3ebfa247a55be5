"""The resource /v1/ledgers: create, look, list, close, recover, delete."""

import re
from typing import Any, Final

from aiohttp import web
from pydantic import ValidationError

from quorumlog.errors import (
    BadRequest,
    InvalidRequest,
    LedgerClosed,
    LedgerExists,
    LedgerFenced,
    LossNotProven,
    NoSuchLedger,
    NoSuchLog,
    NoSuchTransaction,
    NotEnoughBookies,
    OwnedByLog,
    RecoveryBlocked,
    TransactionAborted,
    TransactionCommitted,
    WriterLost,
    WrongPassword,
)
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.wire.bodies import BOOKIE_NAME, LOG_NAME
from services.gateway.edge import operations as op
from services.gateway.edge import params
from services.gateway.edge.answers import json_value
from services.gateway.edge.body import Room, expect_nothing, read_object
from services.gateway.edge.limits import (
    BATCH_ENTRIES_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    PASSWORD_CHARS_MAX,
)
from services.gateway.edge.models import (
    AcceptLoss,
    Ledger,
    LedgerCreate,
    LedgerList,
    Recover,
    TransactionLedgerCreate,
    ledger_json,
)
from services.gateway.edge.params import JSON
from services.gateway.edge.payloads import escaped
from services.gateway.interface import EngineInterface, LedgerQuery
from services.gateway.logs.transactions import Attempt, Transactions

_STATES: Final = tuple(state.value for state in State)
_LIST: Final = frozenset(("state", "bookie", "log", "limit", "after"))
_BOOKIE: Final = re.compile(rf"{BOOKIE_NAME}(@(0|[1-9][0-9]{{0,17}}))?", re.ASCII)
_LOG: Final = re.compile(LOG_NAME, re.ASCII)
_IDEMPOTENCY_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")

EXAMPLE: Final[dict[str, Any]] = {
    "ledger_id": 1,
    "state": "OPEN",
    "ensemble_size": 3,
    "write_quorum": 3,
    "ack_quorum": 2,
    "digest": "crc32c",
    "last_entry": None,
    "length": None,
    "fragments": [{"first_entry": 0, "bookies": ["bookie-1@1", "bookie-2@1", "bookie-3@1"]}],
    "metadata": {},
    "log": None,
    "created_at": "2026-01-02T03:04:05.678901Z",
    "version": 1,
    "writer": {"id": "b1946ac9", "url": "http://127.0.0.1:8080"},
}
_CLOSED: Final = EXAMPLE | {"state": "CLOSED", "last_entry": 7, "length": 40, "version": 2}


def invalid_of(error: ValidationError) -> InvalidRequest:
    """A 422 that lists all that pydantic found."""
    errors = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        pointer = "".join(f"/{escaped(str(part))}" for part in fault["loc"])
        detail = fault["msg"].removeprefix("Value error, ")
        errors.append({"pointer": pointer, "detail": detail})
    first = errors[0]
    return InvalidRequest(f"{first['pointer'] or 'the body'}: {first['detail']}", errors=errors)


def password_of(request: web.Request) -> str | None:
    """The header `Ledger-Password`."""
    return params.header_text(request, "Ledger-Password", PASSWORD_CHARS_MAX)


class Ledgers:
    """Handlers of ledgers as a whole."""

    def __init__(
        self, engine: EngineInterface, room: Room, transactions: Transactions | None = None
    ) -> None:
        self._engine = engine
        self._room = room
        self._transactions = transactions

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/ledgers."""
        params.query(request)
        params.accepted(request)
        key = params.header_text(request, "Idempotency-Key", IDEMPOTENCY_KEY_CHARS_MAX)
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise params.invalid("/header/Idempotency-Key", "must be printable ASCII")
        body = await read_object(request, self._room)
        try:
            if "transaction" in body:
                ledger = await self._create(TransactionLedgerCreate.model_validate(body), key)
            else:
                wanted = LedgerCreate.model_validate(body)
                ledger = await self._engine.create(wanted.options(key))
        except ValidationError as error:
            raise invalid_of(error) from error
        return json_value(
            ledger_json(ledger),
            201,
            {"Location": f"/v1/ledgers/{ledger.ledger_id}", "ETag": f'"{ledger.version}"'},
        )

    async def _create(self, wanted: TransactionLedgerCreate, key: str | None) -> LedgerMetadata:
        if self._transactions is None:
            raise NoSuchTransaction
        whose = Attempt(wanted.transaction, wanted.partition, wanted.attempt)
        custom = tuple(sorted(wanted.metadata.items()))
        return await self._transactions.create_ledger(whose, custom=custom, idempotency_key=key)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/ledgers/{ledger_id}."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        params.accepted(request)
        ledger = await self._engine.get(ledger_id)
        return json_value(ledger_json(ledger), headers={"ETag": f'"{ledger.version}"'})

    async def page(self, request: web.Request) -> web.Response:
        """GET /v1/ledgers."""
        query = params.query(request, _LIST, prefix="metadata[")
        params.accepted(request)
        state = params.query_choice(query, "state", _STATES)
        for name, pattern in (("bookie", _BOOKIE), ("log", _LOG)):
            if name in query and not pattern.fullmatch(query[name]):
                raise params.invalid(f"/query/{name}", "is not a name")
        custom = [(k[len("metadata[") : -1], v) for k, v in query.items() if k[-1] == "]"]
        if any("][" in key for key, _ in custom):
            raise params.invalid("/query/metadata", "must be written metadata[key]=value")
        if any("\0" in text for pair in custom for text in pair):
            raise params.invalid("/query/metadata", "must not contain NUL")
        page = await self._engine.list(
            LedgerQuery(
                state=None if state is None else State(state),
                bookie=query.get("bookie"),
                log=query.get("log"),
                custom=tuple(custom),
                limit=params.query_integer(query, "limit", low=1, high=BATCH_ENTRIES_MAX) or 100,
                after=params.query_integer(query, "after", low=0, high=ID_MAX),
            )
        )
        return json_value(
            {"ledgers": [ledger_json(ledger) for ledger in page.ledgers], "next": page.next}
        )

    async def close(self, request: web.Request) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/close."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        params.accepted(request)
        await expect_nothing(request, self._room)
        ledger = await self._engine.close(ledger_id, password=password_of(request))
        return json_value(ledger_json(ledger), headers={"ETag": f'"{ledger.version}"'})

    async def recover(self, request: web.Request) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/recover."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        params.accepted(request)
        body = await read_object(request, self._room)
        try:
            wanted = Recover.model_validate(body)
        except ValidationError as error:
            raise invalid_of(error) from error
        ledger = await self._engine.recover(
            ledger_id, password=password_of(request), declare_lost=wanted.declare_lost
        )
        return json_value(ledger_json(ledger), headers={"ETag": f'"{ledger.version}"'})

    async def accept_loss(self, request: web.Request) -> web.Response:
        """POST /v1/ledgers/{ledger_id}/accept-loss."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        params.accepted(request)
        body = await read_object(request, self._room)
        try:
            wanted = AcceptLoss.model_validate(body)
        except ValidationError as error:
            raise invalid_of(error) from error
        ledger = await self._engine.accept_loss(
            ledger_id,
            wanted.first,
            wanted.last,
            password=password_of(request),
            declare_lost=wanted.declare_lost,
        )
        return json_value(ledger_json(ledger), headers={"ETag": f'"{ledger.version}"'})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/ledgers/{ledger_id}."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        if request.body_exists:
            raise BadRequest("DELETE takes no body")
        await self._engine.delete(ledger_id, password=password_of(request))
        return web.Response(status=204, headers={"Cache-Control": "no-store"})

    def routes(self) -> list[op.Route]:
        """The operations with their handlers."""
        return [
            (CREATE, self.create),
            (LIST, self.page),
            (GET, self.get),
            (CLOSE, self.close),
            (RECOVER, self.recover),
            (ACCEPT_LOSS, self.accept_loss),
            (DELETE, self.delete),
        ]


OF_TRANSACTION: Final = (NoSuchTransaction, TransactionAborted, TransactionCommitted)
"""What else a ledger of a transaction may be answered with."""

_ETAG: Final = {"ETag": "The row's version, in quotes."}
_EMPTY: Final[dict[str, Any]] = {"type": "object", "additionalProperties": False}
_ERRORS: Final = (*op.ALWAYS, *op.ANSWERING, *op.WITH_METADATA)
_ENDING: Final = (*_ERRORS, *op.WITH_BODY, WrongPassword, NoSuchLedger, OwnedByLog, RecoveryBlocked)

CREATE: Final = op.Operation(
    "POST",
    "/v1/ledgers",
    "createLedger",
    "Ledgers",
    "Create a ledger",
    "The gateway that answers is its writer. Any gateway takes appends and hands them on. One of a "
    "transaction is like the ledgers of its log: each append is one entry, a batch of records in "
    "the log's forms; it is sealed by `close` and named by the commit.",
    (
        op.Parameter(
            "Idempotency-Key",
            "header",
            {"type": "string", "pattern": "^[!-~]{1,255}$"},
            "A repeat with the same key gets the same ledger.",
        ),
    ),
    {
        JSON: op.Content(
            {"anyOf": [LedgerCreate, TransactionLedgerCreate]},
            {
                "default": {},
                "three copies": {"ensemble_size": 3, "metadata": {"k": "v"}},
                "of a transaction": {"transaction": "b1946ac9", "partition": 3, "attempt": 0},
            },
        )
    },
    {
        201: op.Answer(
            "The ledger.",
            {JSON: op.Content(Ledger, {"new": EXAMPLE})},
            {"Location": "The ledger's path.", **_ETAG},
        )
    },
    (*_ERRORS, *op.WITH_BODY, LedgerExists, NotEnoughBookies, *OF_TRANSACTION, NoSuchLog),
)
LIST: Final = op.Operation(
    "GET",
    "/v1/ledgers",
    "listLedgers",
    "Ledgers",
    "List ledgers",
    "Ascending by id; all conditions hold. `next` is the next `after`, null at the end.",
    (
        op.Parameter("state", "query", {"enum": list(_STATES)}, "Only ledgers in this state."),
        op.Parameter(
            "bookie",
            "query",
            {"type": "string", "pattern": f"^{_BOOKIE.pattern}$"},
            "Only ledgers with this bookie in an ensemble: a name, or a name and incarnation.",
        ),
        op.Parameter(
            "log",
            "query",
            {"type": "string", "pattern": f"^{LOG_NAME}$"},
            "Only this log's ledgers.",
        ),
        op.Parameter(
            "metadata",
            "query",
            {
                "type": "object",
                "additionalProperties": {"type": "string", "pattern": "^[^\\x00]*$"},
            },
            "Only ledgers with these custom metadata: `metadata[key]=value`.",
            style="deepObject",
        ),
        op.query_integer("limit", 1, BATCH_ENTRIES_MAX, "Ledgers of a page.", 100),
        op.query_integer("after", 0, ID_MAX, "Ledgers above this id."),
    ),
    answers={
        200: op.Answer(
            "A page of ledgers.",
            {JSON: op.Content(LedgerList, {"last page": {"ledgers": [EXAMPLE], "next": None}})},
        )
    },
    errors=_ERRORS,
)
GET: Final = op.Operation(
    "GET",
    "/v1/ledgers/{ledger_id}",
    "getLedger",
    "Ledgers",
    "Look at a ledger",
    parameters=(op.LEDGER_ID,),
    answers={200: op.Answer("The ledger.", {JSON: op.Content(Ledger, {"open": EXAMPLE})}, _ETAG)},
    errors=(*_ERRORS, NoSuchLedger),
)
CLOSE: Final = op.Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/close",
    "closeLedger",
    "Ledgers",
    "Close a ledger as its writer",
    "The end is the writer's last acknowledged entry. Where somebody else closed the ledger: 200 if "
    "the end is the same, else 409 with the real one (`last_entry`).",
    (op.LEDGER_ID, op.PASSWORD),
    {JSON: op.Content(_EMPTY, {"nothing": {}})},
    {200: op.Answer("The closed ledger.", {JSON: op.Content(Ledger, {"closed": _CLOSED})}, _ETAG)},
    (*_ENDING, LedgerClosed, LedgerFenced, WriterLost),
)
RECOVER: Final = op.Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/recover",
    "recoverLedger",
    "Ledgers",
    "Close a ledger as a reader: fence it, find its end, close it",
    "The same end for all who ask. What was acknowledged is in it; its writer can't go on.",
    (op.LEDGER_ID, op.PASSWORD),
    {
        JSON: op.Content(
            Recover, {"usual": {}, "without a bookie": {"declare_lost": ["bookie-1@1"]}}
        )
    },
    {200: op.Answer("The closed ledger.", {JSON: op.Content(Ledger, {"closed": _CLOSED})}, _ETAG)},
    (*_ENDING, NotEnoughBookies),
)
ACCEPT_LOSS: Final = op.Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/accept-loss",
    "acceptLoss",
    "Ledgers",
    "Give up entries that nobody can serve any more",
    "An operator's last word, for ever. Only of a CLOSED ledger, and only where all who could hold "
    "the entries answer that they do not; from then on these are 410 `entry-lost`.",
    (op.LEDGER_ID, op.PASSWORD),
    {
        JSON: op.Content(
            AcceptLoss,
            {
                "proven": {"first": 3, "last": 5},
                "without a bookie": {"first": 3, "last": 5, "declare_lost": ["bookie-1@1"]},
            },
        )
    },
    {
        200: op.Answer(
            "The ledger.",
            {
                JSON: op.Content(
                    Ledger,
                    {
                        "with a loss": _CLOSED
                        | {"may_lack_entries": True, "lost_entries": [{"first": 3, "last": 5}]}
                    },
                )
            },
            _ETAG,
        )
    },
    (*_ERRORS, *op.WITH_BODY, WrongPassword, NoSuchLedger, LossNotProven),
)
DELETE: Final = op.Operation(
    "DELETE",
    "/v1/ledgers/{ledger_id}",
    "deleteLedger",
    "Ledgers",
    "Delete a ledger",
    "An open one is recovered first. Its id is never used again.",
    (op.LEDGER_ID, op.PASSWORD),
    answers={204: op.Answer("It is deleted.")},
    errors=(
        *op.ALWAYS,
        *op.WITH_METADATA,
        WrongPassword,
        NoSuchLedger,
        OwnedByLog,
        RecoveryBlocked,
    ),
)
