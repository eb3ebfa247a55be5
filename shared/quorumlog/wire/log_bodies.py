"""Bodies of the metadata service's API for logs and transactions, as strict pydantic models. A
log's metadata changes by compare-and-swap, like a ledger's (`bodies.py`).
"""

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import App, Sealed, Transaction, TransactionId, TransactionState
from quorumlog.protocol.values import Attempt, LedgerId, LogName, Number, Text
from quorumlog.wire.bodies import Body


class ForkBody(Body):
    """The source of a fork, and the offset where the fork begins. `created_at`: the source's
    creation, so that no later log with the same name is forked instead.
    """

    source: LogName
    created_at: Text
    at: Number


class LogCreateBody(Body):
    """`POST /v1/logs`: 201 with the metadata; 409 `log-exists` with the existing metadata as
    `current`. A copy of an attempt gets the same metadata. A copy of the client's request gets
    `log-exists`, or 404 if the log was deleted.

    With `fork`, the log (empty in `row`) begins with the source's records below an offset. These
    records must be in CLOSED ledgers. 404 `no-such-log` if the source does not exist; 422 `invalid`
    if one of these ledgers is open.
    """

    row: LogMetadata
    attempt: Attempt
    fork: ForkBody | None = None
    once: Once | None = None


class LogChange(Body):
    """`PUT /v1/logs/{name}`: replace the metadata if the stored version is `row.version`. A ledger
    that is new in `row` must exist and have been created for this log (rule 22). 409
    `already-done`, with the metadata as `current`, if the client's request was already carried out.
    """

    row: LogMetadata
    attempt: Attempt
    once: Once | None = None


class LogRead(Body):
    """`GET /v1/logs/{name}?known=&created_at=`: the log's metadata at the database's time `read_ms`,
    in ms since 1970. `row` is None if the caller has the current version: the version that the
    change `known` made of the log that was created at `created_at`.
    """

    row: LogMetadata | None
    read_ms: Number


class Done(Body):
    """`GET /v1/requests/{token}?content=`: whether a client's request was carried out."""

    done: bool


DELETED_WITH_LOG_MAX: Final = 1000
"""Maximum number of ledgers that one transaction deletes with their log, because more could
miss the statement's deadline. Gateways delete further ledgers later (chosen by judgement)."""


class LogListBody(Body):
    """`GET /v1/logs?limit=&after=`; `next` is the `after` of the next page, null at the end."""

    logs: tuple[LogMetadata, ...]
    next: LogName | None


class SharedAsk(Body):
    """`POST /v1/shared-ledgers`: requests the ledgers that forks name. Forks get only ledgers of
    their source. So if neither its own log nor a fork names a ledger, no later fork can (rule 27a).
    """

    ledgers: tuple[LedgerId, ...] = Field(max_length=LOG_LEDGERS_MAX)


class LedgerIds(Body):
    """`GET /v1/orphans?older_than_s=&log=&limit=`: ledgers created for logs, but named by no log.

    `DELETE /v1/orphans/{ledger_id}` deletes a ledger if no log names it in the same transaction
    (rule 22): 204; 409 `owned-by-log` if a log names it; 404 if there is no such ledger.
    """

    ledgers: tuple[LedgerId, ...]


EXPIRES_IN_S = (1, 7 * 24 * 3600)
"""Minimum and maximum time, in seconds, for which a transaction may be idle."""

TRANSACTION_TAG = "transaction"
PARTITION_TAG = "partition"
ATTEMPT_TAG = "attempt"
PACKED_TAG = "packed"
REWRITE_TAG = "rewrite"
INDEX_TAG = "index"
"""Keys in a ledger's `extra`: transaction, partition, task attempt, whether batches are packed, and
the purpose of a ledger that no append wrote."""


class TransactionBeginBody(Body):
    """`POST /v1/transactions`: begins a transaction, or returns the existing transaction of this
    app and version. The caller chooses a random `id`, so that a retry begins no second transaction.
    """

    id: TransactionId
    log: LogName
    app: App | None = None
    version: Number | None = None
    expires_in_s: Annotated[int, Field(ge=EXPIRES_IN_S[0], le=EXPIRES_IN_S[1])]

    @model_validator(mode="after")
    def _names_both_or_neither(self) -> Self:
        if (self.app is None) != (self.version is None):
            raise ValueError("app and version go together: send both or none")
        return self


class TransactionCommitBody(Body):
    """`POST /v1/transactions/{id}/commit`: publish these ledgers and no others.

    `row`: the log's metadata after the commit, for a compare-and-swap on `row.version`; null if
    there is nothing to publish. 412 with the current metadata as `current` if the version differs.
    """

    ledgers: tuple[Sealed, ...] = Field(max_length=LOG_LEDGERS_MAX)
    row: LogMetadata | None
    attempt: Attempt


class TransactionDone(Body):
    """The transaction after a commit, and the log's metadata if this commit changed it."""

    transaction: Transaction
    row: LogMetadata | None


class TransactionAlive(Body):
    """The answer to `POST /v1/transactions/{id}/renew`, which extends the transaction's life."""

    state: TransactionState
