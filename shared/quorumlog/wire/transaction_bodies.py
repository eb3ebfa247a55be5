"""Bodies of the metadata service's API about transactions, as strict pydantic models."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.transaction import App, Sealed, Transaction, TransactionId, TransactionState
from quorumlog.protocol.values import Attempt, LogName, Number
from quorumlog.wire.bodies import Body

EXPIRES_IN_S = (1, 7 * 24 * 3600)
"""Bounds of the time for which a transaction may be idle."""

TRANSACTION_TAG = "transaction"
PARTITION_TAG = "partition"
ATTEMPT_TAG = "attempt"
PACKED_TAG = "packed"
"""Names in a ledger's `extra`: its transaction, partition and task attempt, and whether its batches are packed."""


class TransactionBeginBody(Body):
    """`POST /v1/transactions`: a new one (201), or the one of this app and version (200).

    The caller draws `id`, so that a retry of the request begins no second transaction.
    """

    id: TransactionId
    log: LogName
    app: App | None = None
    version: Number | None = None
    expires_in_s: Annotated[int, Field(ge=EXPIRES_IN_S[0], le=EXPIRES_IN_S[1])]

    @model_validator(mode="after")
    def _names_both_or_neither(self) -> Self:
        if (self.app is None) != (self.version is None):
            raise ValueError("app and version go together")
        return self


class TransactionCommitBody(Body):
    """`POST /v1/transactions/{id}/commit`: publish these ledgers and no others.

    `row` is the log's row after the commit, by compare-and-swap on `row.version`; null where there is
    nothing to publish. 412 with the log's row as `current` where the log has another version.
    """

    ledgers: tuple[Sealed, ...] = Field(max_length=LOG_LEDGERS_MAX)
    row: LogMetadata | None
    attempt: Attempt


class TransactionDone(Body):
    """The transaction after a commit, and the log's row where this commit changed it."""

    transaction: Transaction
    row: LogMetadata | None


class TransactionAlive(Body):
    """`POST /v1/transactions/{id}/renew`: extend the transaction's life."""

    state: TransactionState
