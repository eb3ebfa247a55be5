"""Bodies of the metadata service's API about transactions, as strict pydantic models."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from quorumlog.protocol.log import LOG_LEDGERS_MAX
from quorumlog.protocol.transaction import (
    Sealed,
    Transaction,
    TransactionLedger,
    TransactionState,
)
from quorumlog.wire.bodies import Attempt, Body, EntryIdOrNone, LedgerId, LogName, Text, body_of
from quorumlog.wire.log_bodies import LogRow, Number

TRANSACTION_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A transaction's id; it is part of URLs."""

APP_CHARS_MAX = 255
EXPIRES_IN_S = (1, 7 * 24 * 3600)
"""Bounds of the time for which a transaction may be idle."""

TRANSACTION_TAG = "transaction"
PARTITION_TAG = "partition"
ATTEMPT_TAG = "attempt"
PACKED_TAG = "packed"
"""Names in a ledger's `extra`: its transaction, partition and task attempt, and whether its batches are packed."""

TransactionId = Annotated[str, StringConstraints(pattern=rf"^{TRANSACTION_ID}$")]
App = Annotated[Text, StringConstraints(min_length=1, max_length=APP_CHARS_MAX)]


class SealedBody(Body):
    """A ledger that a commit publishes."""

    ledger_id: LedgerId
    last_entry: EntryIdOrNone | None = None

    def to_core(self) -> Sealed:
        """The protocol's value."""
        return Sealed(**dict(self))


class TransactionLedgerBody(Body):
    """A ledger of a transaction."""

    ledger_id: LedgerId
    partition: Number | None = None
    attempt: Number | None = None
    first_offset: Number | None = None
    last_offset: Number | None = None


class TransactionRow(Body):
    """One transaction as the metadata service stores it."""

    id: TransactionId
    log: LogName
    app: App | None = None
    version: Number | None = None
    state: TransactionState = TransactionState.OPEN
    is_duplicate: bool = False
    ledgers: tuple[TransactionLedgerBody, ...] = ()
    requested: tuple[LedgerId, ...] = ()
    created_at: Text = ""
    expires_at: Text = ""

    def to_core(self) -> Transaction:
        """The protocol's value."""
        ledgers = tuple(TransactionLedger(**dict(ledger)) for ledger in self.ledgers)
        return Transaction(**dict(self) | {"ledgers": ledgers})

    @classmethod
    def from_core(cls, core: Transaction) -> "TransactionRow":
        """The body that carries a protocol value."""
        return body_of(cls, core)


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

    ledgers: tuple[SealedBody, ...] = Field(max_length=LOG_LEDGERS_MAX)
    row: LogRow | None
    attempt: Attempt


class TransactionDone(Body):
    """The transaction after a commit, and the log's row where this commit changed it."""

    transaction: TransactionRow
    row: LogRow | None


class TransactionAlive(Body):
    """`POST /v1/transactions/{id}/renew`: extend the transaction's life."""

    state: TransactionState
