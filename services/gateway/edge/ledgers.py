"""The resource /v1/ledgers: create, get, list, close, recover and delete ledgers."""

from contextlib import nullcontext
from typing import Any, Final

from aiohttp import web

from quorumlog import errors
from quorumlog.net.operations import Reply
from quorumlog.net.parameters import Given, query_choice, query_integer, query_pairs, query_text
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.values import LOG_NAME, MEMBER_OR_NAME
from quorumlog.wire.position_bodies import OWN_LOGS
from quorumlog.wire.token_bodies import NAMESPACE
from services.gateway.edge import models
from services.gateway.edge import operations as op
from services.gateway.edge.access import scopes
from services.gateway.edge.access.guard import log_of_transaction
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, Room
from services.gateway.edge.http.media import json_value, no_content
from services.gateway.engine import Engine
from services.gateway.logs.transactions import TransactionAttempt, Transactions

STATE: Final = query_choice("state", tuple(State), "List only ledgers in this state.")
BOOKIE: Final = query_text(
    "bookie",
    MEMBER_OR_NAME,
    "List only ledgers with this bookie in an ensemble: a name, or a name and incarnation.",
)
LOG: Final = query_text("log", LOG_NAME, "List only this log's ledgers.")
METADATA: Final = query_pairs(
    "metadata", "List only ledgers with this custom metadata: `metadata[key]=value`."
)
LIMIT: Final = query_integer("limit", 1, BATCH_ENTRIES_MAX, "Maximum ledgers of a page.", 100)
AFTER: Final = query_integer("after", 0, ID_MAX, "List ledgers above this id.")

_EXAMPLE: Final[dict[str, Any]] = {
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
    "writer": models.WRITER_EXAMPLE,
}
_CLOSED: Final = _EXAMPLE | {"state": "CLOSED", "last_entry": 7, "length": 40, "version": 2}
_LACKING: Final = _CLOSED | {"may_lack_entries": True, "lost_entries": [{"first": 3, "last": 5}]}


_ENDING: Final = (
    errors.CopyLost,
    errors.WrongPassword,
    errors.NoSuchLedger,
    errors.OwnedByLog,
    errors.RecoveryBlocked,
)


class LedgerRoutes(op.Handlers, tag="Ledgers"):
    """HTTP handlers for whole ledgers."""

    def __init__(
        self, engine: Engine, room: Room, transactions: Transactions | None = None
    ) -> None:
        self._engine = engine
        self._room = room
        self._transactions = transactions

    @op.operation(
        "POST /v1/ledgers",
        (op.IDEMPOTENCY_KEY,),
        body=op.takes(
            {"anyOf": [models.LedgerCreate, models.TransactionLedgerCreate]},
            {
                "default": {},
                "three copies": {"ensemble_size": 3, "metadata": {"k": "v"}},
                "of a transaction": {"transaction": "b1946ac9", "partition": 3, "attempt": 0},
            },
        ),
        replies=op.gives(
            "The ledger.",
            models.Ledger,
            {"new": _EXAMPLE},
            {"Location": "The ledger's path.", **op.ETAG},
            status=201,
        ),
        errors=(errors.LedgerExists, errors.NotEnoughBookies, *op.OF_TRANSACTION, errors.NoSuchLog),
        scope=scopes.on(scopes.Named.SOME, scopes.Scope.APPEND),
    )
    async def create_ledger(self, request: web.Request, given: Given) -> web.Response:
        """Create a ledger.

        The gateway that creates a ledger is the ledger's writer. Other gateways forward appends to
        the writer. In a transaction's ledger, as in the ledgers of logs, each append is one entry
        with a batch of records. Close the ledger before a commit that publishes it.
        """
        value = await body.read_object(request, self._room)
        once = op.once_of(request, given, value)
        caller, writes = scopes.caller_of(request), self._engine.writes
        usage = caller.usage
        with nullcontext(set[int]()) if usage is None else usage.new_ledger(writes) as counted:
            ledger = await self._create(caller, value, once)
            counted.add(ledger.ledger_id)
        response = _shown(ledger, 201)
        response.headers["Location"] = f"/v1/ledgers/{ledger.ledger_id}"
        return response

    async def _create(
        self, caller: scopes.Caller, value: dict[str, Any], once: Once | None
    ) -> LedgerMetadata:
        if "transaction" in value:
            wanted = body.parsed(value, models.TransactionLedgerCreate)
            ledger = await self._create_of_log(caller, wanted, once)
        else:
            options = body.parsed(value, models.LedgerCreate).options(once)
            namespace = dict(options.custom).get(NAMESPACE, "")
            caller.check(scopes.Scope.APPEND, scopes.Kind.LEDGERS, namespace)
            ledger = await self._engine.create(options)
        return ledger

    async def _create_of_log(
        self, caller: scopes.Caller, wanted: models.TransactionLedgerCreate, once: Once | None
    ) -> LedgerMetadata:
        if self._transactions is None:
            raise errors.NoSuchTransaction
        if scopes.Scope.APPEND not in caller.everywhere:
            log = await log_of_transaction(self._transactions, wanted.transaction)
            absent = scopes.no_transaction(wanted.transaction)
            caller.check_found((scopes.Scope.APPEND,), scopes.Kind.LOGS, log, absent)
        whose = TransactionAttempt(wanted.transaction, wanted.partition, wanted.attempt)
        custom = tuple(sorted(wanted.metadata.items()))
        return await self._transactions.create_ledger(whose, custom=custom, once=once)

    @op.operation(
        "GET /v1/ledgers",
        (STATE, BOOKIE, LOG, METADATA, LIMIT, AFTER),
        replies=op.gives(
            "A page of ledgers.",
            models.LedgerList,
            {"last page": {"ledgers": [_EXAMPLE], "next": None}},
        ),
        scope=scopes.on(scopes.Named.SOME, scopes.Scope.READ),
    )
    async def list_ledgers(self, request: web.Request, given: Given) -> web.Response:
        """List ledgers.

        The ledgers are sorted by id and match all conditions. `next`: the next `after`, or null.
        """
        custom = given[METADATA]
        rows, following = await self._engine.metadata.list(
            state=given[STATE],
            bookie=given[BOOKIE],
            log=given[LOG],
            metadata=dict(custom),
            limit=given[LIMIT],
            after=given[AFTER],
            shown=scopes.caller_of(request).listed(scopes.Scope.READ),
        )
        shown = [models.ledger_json(row) for row in rows if row.log not in OWN_LOGS]
        return json_value({"ledgers": shown, "next": following})

    @op.operation(
        "GET /v1/ledgers/{ledger_id}",
        (op.LEDGER_ID,),
        replies=op.gives("The ledger.", models.Ledger, {"open": _EXAMPLE}, op.ETAG),
        errors=(errors.NoSuchLedger,),
        scope=scopes.on(scopes.Named.LEDGER, *scopes.LOOK),
    )
    async def get_ledger(self, _request: web.Request, given: Given) -> web.Response:
        """Get a ledger."""
        return _shown(await self._engine.get(given[op.LEDGER_ID]))

    @op.operation(
        "POST /v1/ledgers/{ledger_id}/close",
        (op.LEDGER_ID, op.PASSWORD),
        body=op.NOTHING,
        replies=op.gives("The closed ledger.", models.Ledger, {"closed": _CLOSED}, op.ETAG),
        errors=(*_ENDING, errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost),
        scope=scopes.on(scopes.Named.LEDGER, scopes.Scope.APPEND),
    )
    async def close_ledger(self, _request: web.Request, given: Given) -> web.Response:
        """Close a ledger as its writer.

        The ledger ends at the writer's last acknowledged entry. If another process has closed the
        ledger, the response is 200 for the same end, and otherwise 409 with the `last_entry`.
        """
        ledger = await self._engine.close(given[op.LEDGER_ID], password=given[op.PASSWORD])
        return _shown(ledger)

    @op.operation(
        "POST /v1/ledgers/{ledger_id}/recover",
        (op.LEDGER_ID, op.PASSWORD),
        body=op.takes(
            models.Recover, {"usual": {}, "without a bookie": {"declare_lost": ["bookie-1@1"]}}
        ),
        replies=op.gives("The closed ledger.", models.Ledger, {"closed": _CLOSED}, op.ETAG),
        errors=(*_ENDING, errors.NotEnoughBookies),
        # A recovery with `declare_lost` requires the scope `admin`.
        scope=scopes.on(scopes.Named.LEDGER, scopes.Scope.APPEND, scopes.Scope.MANAGE),
        is_audited=True,
    )
    async def recover_ledger(self, request: web.Request, given: Given) -> web.Response:
        """Recover a ledger: fence the writer, find the end, and close the ledger.

        All recoveries return the same end, and keep all acknowledged entries.
        """
        wanted = await body.read_model(request, self._room, models.Recover)
        caller = scopes.caller_of(request)
        if wanted.declare_lost and scopes.Scope.ADMIN not in caller.everywhere:
            kind, name = scopes.place_of(await self._engine.rows.row(given[op.LEDGER_ID]))
            caller.check(scopes.Scope.ADMIN, kind, name)
        ledger = await self._engine.recover(
            given[op.LEDGER_ID], password=given[op.PASSWORD], declare_lost=wanted.declare_lost
        )
        return _shown(ledger)

    @op.operation(
        "PUT /v1/ledgers/{ledger_id}/password",
        (op.LEDGER_ID, op.PASSWORD, op.IDEMPOTENCY_KEY),
        body=op.takes(models.PasswordChange, {"another": {"password": "a new secret"}}),
        replies=op.gives("The ledger.", models.Ledger, {"closed": _CLOSED}, op.ETAG),
        errors=(errors.WrongPassword, errors.NoSuchLedger, errors.CopyLost),
        scope=scopes.on(scopes.Named.LEDGER, scopes.Scope.APPEND, scopes.Scope.MANAGE),
        needs_body=True,
        is_audited=True,
    )
    async def change_password(self, request: web.Request, given: Given) -> web.Response:
        """Change a ledger's password.

        The request must have the current password. Within seconds all gateways refuse the old
        password. Entries that were added before the change stay readable. A retry succeeds.
        """
        wanted = await body.read_model(request, self._room, models.PasswordChange)
        ledger = await self._engine.change_password(
            given[op.LEDGER_ID],
            wanted.password,
            password=given[op.PASSWORD],
            once=op.once_of(request, given, wanted),
        )
        return _shown(ledger)

    @op.operation(
        "POST /v1/ledgers/{ledger_id}/accept-loss",
        (op.LEDGER_ID, op.PASSWORD),
        body=op.takes(
            models.AcceptLoss,
            {
                "proven": {"first": 3, "last": 5},
                "without a bookie": {"first": 3, "last": 5, "declare_lost": ["bookie-1@1"]},
            },
        ),
        replies=op.gives("The ledger.", models.Ledger, {"with a loss": _LACKING}, op.ETAG),
        errors=(errors.WrongPassword, errors.NoSuchLedger, errors.LossNotProven),
        scope=scopes.on(scopes.Named.LEDGER, scopes.Scope.ADMIN),
        is_audited=True,
    )
    async def accept_loss(self, request: web.Request, given: Given) -> web.Response:
        """Accept the loss of entries that no bookie has any more.

        For operators. Can't be undone. The ledger must be CLOSED, and all bookies that could have
        the entries must report their absence. Afterwards, reads get 410 `entry-lost`.
        """
        wanted = await body.read_model(request, self._room, models.AcceptLoss)
        ledger = await self._engine.accept_loss(
            given[op.LEDGER_ID],
            wanted.first,
            wanted.last,
            password=given[op.PASSWORD],
            declare_lost=wanted.declare_lost,
        )
        return _shown(ledger)

    @op.operation(
        "DELETE /v1/ledgers/{ledger_id}",
        (op.LEDGER_ID, op.PASSWORD),
        replies={204: Reply("The ledger is deleted.")},
        errors=_ENDING,
        scope=scopes.on(scopes.Named.LEDGER, scopes.Scope.MANAGE),
        is_audited=True,
    )
    async def delete_ledger(self, _request: web.Request, given: Given) -> web.Response:
        """Delete a ledger.

        An open ledger is recovered first. The id of a deleted ledger is never reused.
        """
        await self._engine.delete(given[op.LEDGER_ID], password=given[op.PASSWORD])
        return no_content()


def _shown(ledger: LedgerMetadata, status: int = 200) -> web.Response:
    return json_value(models.ledger_json(ledger), status, {"ETag": f'"{ledger.version}"'})
