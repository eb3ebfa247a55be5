"""The public bodies of transactions as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, WithJsonSchema

from quorumlog.protocol.log import LOG_LEDGERS_MAX
from quorumlog.protocol.transaction import Sealed, Transaction
from quorumlog.wire.bodies import LogName
from quorumlog.wire.position_bodies import POSITIONS_LOG
from quorumlog.wire.transaction_bodies import APP_CHARS_MAX, EXPIRES_IN_S
from services.gateway.edge.models import DATE_TIME, Id, IdOrNone, Model, Text
from services.gateway.logs.transactions import EXPIRES_IN_S as EXPIRES_IN_S_DEFAULT


def _a_clients(name: str) -> str:
    if name == POSITIONS_LOG:
        raise ValueError("is a name of the cluster's own")
    return name


_TargetLog = Annotated[
    LogName,
    AfterValidator(_a_clients),
    Field(description="The log on which its records will be published."),
]
_ExpiresInS = Annotated[
    int,
    Field(
        ge=EXPIRES_IN_S[0],
        le=EXPIRES_IN_S[1],
        description="The transaction ends after so many seconds without a begin, a new ledger or an append.",
    ),
]


class TransactionBegin(Model):
    """A transaction to begin."""

    log: _TargetLog
    app: None = None
    version: None = None
    expires_in_s: _ExpiresInS = EXPIRES_IN_S_DEFAULT


class VersionBegin(Model):
    """A transaction to begin for one commit of an app, which must come onto the log once."""

    log: _TargetLog
    app: Annotated[
        Text, Field(min_length=1, max_length=APP_CHARS_MAX, description="The app that writes.")
    ]
    version: Annotated[Id, Field(description="The number of the app's commit; numbers ascend.")]
    expires_in_s: _ExpiresInS = EXPIRES_IN_S_DEFAULT


class SealedLedger(Model):
    """A closed ledger to publish; with `last_entry` only if it ends there (-1: it is empty)."""

    ledger_id: Id
    last_entry: IdOrNone | None = None


class TransactionCommit(Model):
    """What to publish, in this order. Ledgers that are not named are deleted."""

    ledgers: Annotated[list[Id | SealedLedger], FailFast()] = Field(max_length=LOG_LEDGERS_MAX)
    overwrite: bool = Field(
        default=False, description="Drop what was on the log before; offsets go on."
    )

    def sealed(self) -> tuple[Sealed, ...]:
        """The protocol's values."""
        return tuple(
            Sealed(ledger)
            if isinstance(ledger, int)
            else Sealed(ledger.ledger_id, ledger.last_entry)
            for ledger in self.ledgers
        )


class LedgerOfTransaction(Model):
    """A ledger that was created in a transaction; with offsets once it is on the log."""

    ledger_id: Id
    partition: Id | None
    attempt: Id | None
    first_offset: Id | None
    last_offset: Id | None


class TransactionModel(Model):
    """A transaction as it is now."""

    transaction: str = Field(description="Its id.")
    log: str
    app: str | None
    version: Id | None
    state: Literal["OPEN", "COMMITTED", "ABORTED"]
    duplicate: bool = Field(
        description="COMMITTED, but by another commit of this version: nothing new was published."
    )
    first_offset: Id | None = Field(description="The offset of the first record that it published.")
    last_offset: Id | None
    ledgers: list[LedgerOfTransaction] = Field(
        description="While OPEN those created in it; once COMMITTED those published, in the log's order."
    )
    created_at: Annotated[str, WithJsonSchema(DATE_TIME)]
    expires_at: Annotated[str, WithJsonSchema(DATE_TIME)]


def transaction_json(found: Transaction) -> dict[str, Any]:
    """A transaction as the API shows it."""
    return {
        "transaction": found.id,
        "log": found.log,
        "app": found.app,
        "version": found.version,
        "state": found.state,
        "duplicate": found.is_duplicate,
        "first_offset": found.first_offset,
        "last_offset": found.last_offset,
        "ledgers": found.ledgers,
        "created_at": found.created_at,
        "expires_at": found.expires_at,
    }
