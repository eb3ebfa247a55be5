"""The resource /v1/transactions: publish closed ledgers to a log atomically."""

from typing import Annotated, Any, Final, Literal

from aiohttp import web
from pydantic import AfterValidator, FailFast, Field, WithJsonSchema

from quorumlog import errors
from quorumlog.net import audit
from quorumlog.net.parameters import Given, path_text
from quorumlog.protocol.log import LOG_LEDGERS_MAX
from quorumlog.protocol.transaction import APP_CHARS_MAX, TRANSACTION_ID, Sealed, Transaction
from quorumlog.protocol.values import LogName
from quorumlog.wire.log_bodies import EXPIRES_IN_S
from quorumlog.wire.position_bodies import OWN_LOGS
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Kind, Named, Scope, caller_of, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_value
from services.gateway.edge.models import DATE_TIME, Id, IdOrNone, Model, Text, members_of
from services.gateway.logs.transactions import EXPIRES_IN_S as EXPIRES_IN_S_DEFAULT
from services.gateway.logs.transactions import Transactions


def _a_clients(name: str) -> str:
    if name in OWN_LOGS:
        raise ValueError("is reserved for the cluster: choose another name")
    return name


_TargetLog = Annotated[
    LogName,
    AfterValidator(_a_clients),
    Field(description="The log to which the transaction's records will be published."),
]
_ExpiresInS = Annotated[
    int,
    Field(
        ge=EXPIRES_IN_S[0],
        le=EXPIRES_IN_S[1],
        description="The transaction expires after this many seconds without a begin, a new ledger "
        "or an append.",
    ),
]


class TransactionBegin(Model):
    """A transaction to begin."""

    log: _TargetLog
    app: None = None
    version: None = None
    expires_in_s: _ExpiresInS = EXPIRES_IN_S_DEFAULT


class VersionBegin(Model):
    """A transaction to begin for one version of an app. Each version is published only once."""

    log: _TargetLog
    app: Annotated[
        Text, Field(min_length=1, max_length=APP_CHARS_MAX, description="The app that writes.")
    ]
    version: Annotated[Id, Field(description="The number of the app's commit; must ascend.")]
    expires_in_s: _ExpiresInS = EXPIRES_IN_S_DEFAULT


class SealedLedger(Model):
    """A closed ledger to publish. `last_entry` is the ledger's expected end (-1 if empty)."""

    ledger_id: Id
    last_entry: IdOrNone | None = None


class TransactionCommit(Model):
    """Request to publish ledgers in this order. The transaction's other ledgers are deleted."""

    ledgers: Annotated[list[Id | SealedLedger], FailFast()] = Field(max_length=LOG_LEDGERS_MAX)
    overwrite: bool = False
    """Whether to drop the log's earlier records. Offsets are not reused."""

    def sealed(self) -> tuple[Sealed, ...]:
        """Convert the ledgers to the protocol's values."""
        return tuple(
            Sealed(ledger)
            if isinstance(ledger, int)
            else Sealed(ledger.ledger_id, ledger.last_entry)
            for ledger in self.ledgers
        )


class LedgerOfTransaction(Model):
    """A ledger of a transaction. Published ledgers have offsets."""

    ledger_id: Id
    partition: Id | None
    attempt: Id | None
    first_offset: Id | None
    last_offset: Id | None


class TransactionModel(Model):
    """The current state of a transaction."""

    transaction: str
    """The transaction's id."""
    log: str
    app: str | None
    version: Id | None
    state: Literal["OPEN", "COMMITTED", "ABORTED"]
    duplicate: bool
    """Whether this transaction published nothing because another committed the version first."""
    first_offset: Id | None
    """The offset of the first record that the transaction published."""
    last_offset: Id | None
    ledgers: list[LedgerOfTransaction]
    """The ledgers created in an OPEN, or published (in log order) by a COMMITTED transaction."""
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)]


def transaction_json(found: Transaction) -> dict[str, Any]:
    """Build the JSON object of a transaction."""
    return members_of(TransactionModel, found, transaction=found.id, duplicate=found.is_duplicate)


TRANSACTION: Final = path_text(
    "transaction", TRANSACTION_ID, "The transaction.", "5a0d1f6e-6c1c-4f0e-9d0e-1c7f3b0f2a11"
)

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


_AS_OPEN: Final = (TransactionModel, {"a transaction": _OPEN})
_LOCATION: Final = {"Location": "The transaction's path."}


class TransactionRoutes(op.Handlers, tag="Transactions"):
    """HTTP handlers for transactions."""

    def __init__(self, transactions: Transactions, room: Room) -> None:
        self._transactions = transactions
        self._room = room

    @op.operation(
        "POST /v1/transactions",
        body=op.takes(
            {"anyOf": [TransactionBegin, VersionBegin]},
            {"plain": {"log": "events"}, "once": {"log": "events", "app": "nightly", "version": 7}},
        ),
        replies={
            **op.gives("The new transaction.", *_AS_OPEN, _LOCATION, status=201),
            **op.gives("The existing transaction of this version.", *_AS_OPEN, _LOCATION),
        },
        errors=(errors.NoSuchLog, errors.LogClosed),
        scope=on(Named.SOME, Scope.APPEND),
        needs_body=True,
    )
    async def begin_transaction(self, request: web.Request, _given: Given) -> web.Response:
        """Begin a transaction on a log.

        With the same `app` and `version`, all callers get the same OPEN transaction. If this or a
        later version is already on the log, the returned transaction is COMMITTED, and nothing is
        left to do. `POST /v1/ledgers` with `transaction` creates a ledger of the transaction.
        """
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

    @op.operation(
        "GET /v1/transactions/{transaction}",
        (TRANSACTION,),
        replies=op.gives("The transaction.", *_AS_OPEN),
        errors=(errors.NoSuchTransaction,),
        scope=on(Named.TRANSACTION, Scope.READ, Scope.APPEND),
    )
    async def get_transaction(self, _request: web.Request, given: Given) -> web.Response:
        """Get a transaction."""
        return json_value(transaction_json(await self._transactions.get(given[TRANSACTION])))

    @op.operation(
        "POST /v1/transactions/{transaction}/commit",
        (TRANSACTION, op.WRITER_TOKEN),
        body=op.takes(
            TransactionCommit,
            {
                "ids": {"ledgers": [8, 9]},
                "ends": {"ledgers": [{"ledger_id": 8, "last_entry": 99}], "overwrite": True},
            },
        ),
        replies=op.gives("The committed transaction.", TransactionModel, {"a transaction": _DONE}),
        errors=(
            *op.OF_TRANSACTION,
            errors.NoSuchLog,
            errors.LogClosed,
            errors.LogFenced,
            errors.LogFull,
            errors.LogProtected,
            errors.NotEnoughBookies,
            errors.EntryUnavailable,
            errors.RecoveryBlocked,
            errors.QuorumTimeout,
            errors.NotTheOwner,
            errors.WriterLost,
        ),
        # A commit with `overwrite` also requires the scope `manage`.
        scope=on(Named.TRANSACTION, Scope.APPEND),
        needs_body=True,
        is_audited=True,
    )
    async def commit_transaction(self, request: web.Request, given: Given) -> web.Response:
        """Publish a transaction's closed ledgers to its log, atomically.

        The records get contiguous offsets after the log's last record, ledger by ledger. A retry
        through any gateway gets the same response, so retry until a response arrives. If the log is
        open for one writer, `Writer-Token` is required.
        """
        wanted = await body.read_model(request, self._room, TransactionCommit)
        if wanted.overwrite:
            found = await self._transactions.get(given[TRANSACTION])
            caller_of(request).check(Scope.MANAGE, Kind.LOGS, found.log)
            audit.name_target(f"logs/{found.log}")
        else:
            audit.leave_out()
        done = await self._transactions.commit(
            given[TRANSACTION],
            wanted.sealed(),
            overwrite=wanted.overwrite,
            token=given[op.WRITER_TOKEN],
        )
        return json_value(transaction_json(done))

    @op.operation(
        "POST /v1/transactions/{transaction}/abort",
        (TRANSACTION,),
        body=op.NOTHING,
        replies=op.gives(
            "The aborted transaction.",
            TransactionModel,
            {"a transaction": _OPEN | {"state": "ABORTED", "ledgers": []}},
        ),
        errors=(errors.NoSuchTransaction, errors.TransactionCommitted),
        scope=on(Named.TRANSACTION, Scope.APPEND),
        is_audited=True,
    )
    async def abort_transaction(self, _request: web.Request, given: Given) -> web.Response:
        """Abort a transaction.

        The transaction's ledgers are fenced and deleted. If the transaction is already COMMITTED,
        the response is 409, and nothing changes.
        """
        return json_value(transaction_json(await self._transactions.abort(given[TRANSACTION])))
