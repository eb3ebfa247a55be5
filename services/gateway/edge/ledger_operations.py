"""The operations of /v1/ledgers."""

from typing import Any, Final

from quorumlog import errors
from quorumlog.net.operations import JSON, Content, Operation, Reply
from quorumlog.net.parameters import (
    query_choice,
    query_integer,
    query_pairs,
    query_text,
)
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import LOG_NAME, MEMBER_OR_NAME
from services.gateway.edge import models
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.once import IDEMPOTENCY_KEY
from services.gateway.edge.operations import (
    ALWAYS,
    ETAG,
    LEDGER_ID,
    NOTHING,
    OF_TRANSACTION,
    PASSWORD,
    USUAL,
    WITH_BODY,
    WITH_METADATA,
    gives,
)

STATE: Final = query_choice("state", tuple(State), "Only ledgers in this state.")
BOOKIE: Final = query_text(
    "bookie",
    MEMBER_OR_NAME,
    "Only ledgers with this bookie in an ensemble: a name, or a name and incarnation.",
)
LOG: Final = query_text("log", LOG_NAME, "Only this log's ledgers.")
METADATA: Final = query_pairs(
    "metadata", "Only ledgers with these custom metadata: `metadata[key]=value`."
)
LIMIT: Final = query_integer("limit", 1, BATCH_ENTRIES_MAX, "Ledgers of a page.", 100)
AFTER: Final = query_integer("after", 0, ID_MAX, "Ledgers above this id.")

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
    "writer": {
        "id": "b1946ac9",
        "url": "http://127.0.0.1:8080",
        "internal_url": "http://127.0.0.1:34567",
    },
}
_CLOSED: Final = _EXAMPLE | {"state": "CLOSED", "last_entry": 7, "length": 40, "version": 2}
_LACKING: Final = _CLOSED | {"may_lack_entries": True, "lost_entries": [{"first": 3, "last": 5}]}


_ENDING: Final = (
    *USUAL,
    *WITH_BODY,
    errors.CopyLost,
    errors.WrongPassword,
    errors.NoSuchLedger,
    errors.OwnedByLog,
    errors.RecoveryBlocked,
)

CREATE: Final = Operation(
    "POST",
    "/v1/ledgers",
    "createLedger",
    "Ledgers",
    "Create a ledger",
    "The gateway that answers is the ledger's writer. Any gateway takes appends and forwards them. A "
    "transaction's ledger is like the ledgers of its log: each append is one entry, a batch of records in "
    "the log's forms; `close` seals the ledger, and the commit names it.",
    (IDEMPOTENCY_KEY,),
    {
        JSON: Content(
            {"anyOf": [models.LedgerCreate, models.TransactionLedgerCreate]},
            {
                "default": {},
                "three copies": {"ensemble_size": 3, "metadata": {"k": "v"}},
                "of a transaction": {"transaction": "b1946ac9", "partition": 3, "attempt": 0},
            },
        )
    },
    gives(
        "The ledger.",
        models.Ledger,
        {"new": _EXAMPLE},
        {"Location": "The ledger's path.", **ETAG},
        status=201,
    ),
    (
        *USUAL,
        *WITH_BODY,
        errors.LedgerExists,
        errors.NotEnoughBookies,
        *OF_TRANSACTION,
        errors.NoSuchLog,
    ),
)
LIST: Final = Operation(
    "GET",
    "/v1/ledgers",
    "listLedgers",
    "Ledgers",
    "List ledgers",
    "Ascending by id; all conditions hold. `next` is the next `after`, null at the end.",
    (STATE, BOOKIE, LOG, METADATA, LIMIT, AFTER),
    replies=gives(
        "A page of ledgers.",
        models.LedgerList,
        {"last page": {"ledgers": [_EXAMPLE], "next": None}},
    ),
    errors=USUAL,
)
GET: Final = Operation(
    "GET",
    "/v1/ledgers/{ledger_id}",
    "getLedger",
    "Ledgers",
    "Look at a ledger",
    parameters=(LEDGER_ID,),
    replies=gives("The ledger.", models.Ledger, {"open": _EXAMPLE}, ETAG),
    errors=(*USUAL, errors.NoSuchLedger),
)
CLOSE: Final = Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/close",
    "closeLedger",
    "Ledgers",
    "Close a ledger as its writer",
    "The end is the writer's last acknowledged entry. If another process closed the ledger: 200 if "
    "the end is the same, else 409 with the real end (`last_entry`).",
    (LEDGER_ID, PASSWORD),
    NOTHING,
    gives("The closed ledger.", models.Ledger, {"closed": _CLOSED}, ETAG),
    (*_ENDING, errors.LedgerClosed, errors.LedgerFenced, errors.WriterLost),
)
RECOVER: Final = Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/recover",
    "recoverLedger",
    "Ledgers",
    "Close a ledger as a reader: fence it, find its end, close it",
    "All who ask get the same end. Every acknowledged entry is kept; the writer can't go on.",
    (LEDGER_ID, PASSWORD),
    {
        JSON: Content(
            models.Recover, {"usual": {}, "without a bookie": {"declare_lost": ["bookie-1@1"]}}
        )
    },
    gives("The closed ledger.", models.Ledger, {"closed": _CLOSED}, ETAG),
    (*_ENDING, errors.NotEnoughBookies),
    is_audited=True,
)
CHANGE_PASSWORD: Final = Operation(
    "PUT",
    "/v1/ledgers/{ledger_id}/password",
    "changePassword",
    "Ledgers",
    "Change a ledger's password",
    "Whoever has the present one sets another. Within seconds all gateways refuse the old one; entries of before verify"
    " as before. A repeat succeeds.",
    (LEDGER_ID, PASSWORD, IDEMPOTENCY_KEY),
    {JSON: Content(models.PasswordChange, {"another": {"password": "a new secret"}})},
    gives("The ledger.", models.Ledger, {"closed": _CLOSED}, ETAG),
    (*USUAL, *WITH_BODY, errors.WrongPassword, errors.NoSuchLedger, errors.CopyLost),
    needs_body=True,
    is_audited=True,
)
ACCEPT_LOSS: Final = Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/accept-loss",
    "acceptLoss",
    "Ledgers",
    "Give up entries that no bookie can serve any more",
    "Irrevocable, and for operators. Only for a CLOSED ledger, and only if all bookies that could hold "
    "the entries answer that they do not; from then on the entries are 410 `entry-lost`.",
    (LEDGER_ID, PASSWORD),
    {
        JSON: Content(
            models.AcceptLoss,
            {
                "proven": {"first": 3, "last": 5},
                "without a bookie": {"first": 3, "last": 5, "declare_lost": ["bookie-1@1"]},
            },
        )
    },
    gives("The ledger.", models.Ledger, {"with a loss": _LACKING}, ETAG),
    (*USUAL, *WITH_BODY, errors.WrongPassword, errors.NoSuchLedger, errors.LossNotProven),
    is_audited=True,
)
DELETE: Final = Operation(
    "DELETE",
    "/v1/ledgers/{ledger_id}",
    "deleteLedger",
    "Ledgers",
    "Delete a ledger",
    "An open one is recovered first. Its id is never used again.",
    (LEDGER_ID, PASSWORD),
    replies={204: Reply("It is deleted.")},
    errors=(
        *ALWAYS,
        *WITH_METADATA,
        errors.CopyLost,
        errors.WrongPassword,
        errors.NoSuchLedger,
        errors.OwnedByLog,
        errors.RecoveryBlocked,
    ),
    is_audited=True,
)
