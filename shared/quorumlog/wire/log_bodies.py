"""Bodies of the metadata service's API about logs and transactions, as strict pydantic models.

A log is one row that changes by compare-and-swap, as a ledger is (`bodies.py`).
"""

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import App, Sealed, Transaction, TransactionId, TransactionState
from quorumlog.protocol.values import Attempt, LedgerId, LogName, Number, Text
from quorumlog.wire.bodies import HEADS_MAX, Body


class ForkBody(Body):
    """The log that a fork begins with, and where the fork begins. `created_at` of the log, so that a namesake is not
    forked in its place.
    """

    source: LogName
    created_at: Text
    at: Number


class LogCreateBody(Body):
    """`POST /v1/logs`: 201 with the row; 409 `log-exists` with the existing row as `current`. A repeat of
    an attempt gets the same row. A repeat of the client's request gets `log-exists`, or 404 where the log was deleted.

    With `fork` the log, which is empty in `row`, begins with the records of another one below an offset, which are in CLOSED
    ledgers. 404 `no-such-log` of the source, 422 `invalid` where the source has an open ledger there.
    """

    row: LogMetadata
    attempt: Attempt
    fork: ForkBody | None = None
    once: Once | None = None


class LogChange(Body):
    """`PUT /v1/logs/{name}`: replace the row if its version still is `row.version`. A ledger that is new in
    the row must exist and be made for this log (rule 22). 409 `already-done`, with the row as `current`, if a change
    for the client's request was made before.
    """

    row: LogMetadata
    attempt: Attempt
    once: Once | None = None


class Done(Body):
    """`GET /v1/requests/{token}?content=`: whether a client's request was carried out."""

    done: bool


DELETED_WITH_LOG_MAX: Final = 1000
"""Ledgers deleted in one transaction with their log, so that it ends within the statement's
deadline. Gateways delete the older ledgers of a longer log afterwards (taste)."""


class LogListBody(Body):
    """`GET /v1/logs?limit=&after=`; `next` is the `after` of the next page, null at the end."""

    logs: tuple[LogMetadata, ...]
    next: LogName | None


class LogHeadsAsk(Body):
    """`POST /v1/log-heads`: the logs whose heads are wanted. Changes nothing."""

    logs: tuple[LogName, ...] = Field(max_length=HEADS_MAX)


class LogHeads(Body):
    """The answer: a head for each log that exists or existed, by name. A log that is left out was never
    created, or is lost: its absence is no verdict (rule 18).
    """

    logs: tuple[LogHead, ...]


class SharedAsk(Body):
    """`POST /v1/shared-ledgers`: which of these ledgers forks name. Changes nothing. Of a ledger that its own log names no
    more "no" is for ever: only a log that names a ledger is forked (rule 27a).
    """

    ledgers: tuple[LedgerId, ...] = Field(max_length=LOG_LEDGERS_MAX)


class LedgerIds(Body):
    """`GET /v1/orphans?older_than_s=&log=&limit=`: ledgers made for a log that no log names.

    `DELETE /v1/orphans/{ledger_id}` deletes one, if in that very transaction no log names it
    (rule 22): 204, 409 `owned-by-log` when one does, 404 when there is no such ledger.
    """

    ledgers: tuple[LedgerId, ...]


EXPIRES_IN_S = (1, 7 * 24 * 3600)
"""Bounds of the time for which a transaction may be idle."""

TRANSACTION_TAG = "transaction"
PARTITION_TAG = "partition"
ATTEMPT_TAG = "attempt"
PACKED_TAG = "packed"
"""Names in a ledger's `extra`: its transaction, partition and task attempt, and whether its batches are packed."""


class TransactionBeginBody(Body):
    """`POST /v1/transactions`: a new one, or the one of this app and version.

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
