"""The operations of /v1/transactions."""

from typing import Any, Final

from quorumlog import errors
from quorumlog.net.operations import JSON, Content, Operation
from quorumlog.net.parameters import path_text
from quorumlog.wire.transaction_bodies import TRANSACTION_ID
from services.gateway.edge import transaction_models as models
from services.gateway.edge.operations import NOTHING, USUAL, WITH_BODY, WRITER_TOKEN, gives

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


_AS_OPEN: Final = (models.TransactionModel, {"a transaction": _OPEN})
_LOCATION: Final = {"Location": "The transaction's path."}

BEGIN: Final = Operation(
    "POST",
    "/v1/transactions",
    "beginTransaction",
    "Transactions",
    "Begin a transaction on a log",
    "With the same `app` and `version` all callers get the same transaction while it is OPEN; if this "
    "version, or a later one, is on the log, it is COMMITTED and there is nothing to do. Its ledgers "
    "are created by `POST /v1/ledgers` with `transaction`.",
    body={
        JSON: Content(
            {"anyOf": [models.TransactionBegin, models.VersionBegin]},
            {"plain": {"log": "events"}, "once": {"log": "events", "app": "nightly", "version": 7}},
        )
    },
    replies={
        **gives("It is new.", *_AS_OPEN, _LOCATION, status=201),
        **gives("There was a transaction of this app and version.", *_AS_OPEN, _LOCATION),
    },
    errors=(*USUAL, *WITH_BODY, errors.NoSuchLog, errors.LogClosed),
    needs_body=True,
)
GET: Final = Operation(
    "GET",
    "/v1/transactions/{transaction}",
    "getTransaction",
    "Transactions",
    "Look at a transaction",
    parameters=(TRANSACTION,),
    replies=gives("The transaction.", *_AS_OPEN),
    errors=(*USUAL, errors.NoSuchTransaction),
)
COMMIT: Final = Operation(
    "POST",
    "/v1/transactions/{transaction}/commit",
    "commitTransaction",
    "Transactions",
    "Put its closed ledgers onto the log, all at once",
    "The records get dense offsets after those of the log, ledger by ledger. The same request again "
    "gets the same answer, through any gateway: repeat it until there is one. Where the log was "
    "opened for one writer, `Writer-Token` is needed.",
    (TRANSACTION, WRITER_TOKEN),
    {
        JSON: Content(
            models.TransactionCommit,
            {
                "ids": {"ledgers": [8, 9]},
                "ends": {"ledgers": [{"ledger_id": 8, "last_entry": 99}], "overwrite": True},
            },
        )
    },
    gives("It is committed.", models.TransactionModel, {"a transaction": _DONE}),
    (
        *USUAL,
        *WITH_BODY,
        errors.NoSuchTransaction,
        errors.TransactionAborted,
        errors.TransactionCommitted,
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
    needs_body=True,
    is_audited=True,
)
ABORT: Final = Operation(
    "POST",
    "/v1/transactions/{transaction}/abort",
    "abortTransaction",
    "Transactions",
    "End a transaction without a trace",
    "Its ledgers are fenced and deleted. A COMMITTED transaction stays so: 409, nothing is changed.",
    (TRANSACTION,),
    NOTHING,
    gives(
        "It is aborted.",
        models.TransactionModel,
        {"a transaction": _OPEN | {"state": "ABORTED", "ledgers": []}},
    ),
    (*USUAL, *WITH_BODY, errors.NoSuchTransaction, errors.TransactionCommitted),
    is_audited=True,
)
