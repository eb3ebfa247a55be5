"""A transaction: closed ledgers that are added to a log together, or not at all.

The metadata service decides about a commit in one database transaction (`changes.py`).

Invariants:
  - COMMITTED and ABORTED are final;
  - a ledger of a transaction is in the log if and only if the successful commit published it;
  - each version of an app is committed once, and versions only grow (like Delta's `txnVersion`).
    Sources: the exactly-once design for Spark; rule 28.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from quorumlog.protocol.values import Bounds, IdOrNone, LedgerId, LogName, Number, Text, Value

TRANSACTION_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""The pattern of a transaction's id, which is part of URLs."""

APP_CHARS_MAX: Final = 255

TransactionId = Annotated[str, Bounds(pattern=rf"^{TRANSACTION_ID}$")]
App = Annotated[Text, Bounds(min_length=1, max_length=APP_CHARS_MAX)]


class TransactionState(StrEnum):
    """The state of a transaction. COMMITTED and ABORTED are final."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A ledger that a commit publishes. `last_entry`: the end that the client expects, or None."""

    ledger_id: LedgerId
    last_entry: IdOrNone | None = None


@dataclass(frozen=True, slots=True)
class TransactionLedger:
    """A ledger of a transaction, written by one task attempt. It gets offsets when published."""

    ledger_id: LedgerId
    partition: Number | None = None
    attempt: Number | None = None
    first_offset: Number | None = None
    last_offset: Number | None = None


@dataclass(frozen=True, slots=True)
class Transaction(Value):
    """The state of one transaction. `ledgers`: all ledgers of an OPEN transaction, by id, or the
    published ledgers of a COMMITTED transaction, in the log's order.
    """

    id: TransactionId
    log: LogName
    app: App | None = None
    version: Number | None = None
    state: TransactionState = TransactionState.OPEN
    is_duplicate: bool = False
    """Whether another transaction had committed the app's version, so nothing was published."""
    ledgers: tuple[TransactionLedger, ...] = ()
    requested: tuple[LedgerId, ...] = ()
    """The ledgers that the commit named, in order. A retry must name the same ledgers."""
    created_at: Text = ""
    expires_at: Text = ""

    @property
    def is_open(self) -> bool:
        """Whether the transaction is OPEN: it can get ledgers, and be committed or aborted."""
        return self.state is TransactionState.OPEN

    @property
    def first_offset(self) -> int | None:
        """The offset of the first published record; None if the transaction published none."""
        return self.ledgers[0].first_offset if self._has_published else None

    @property
    def last_offset(self) -> int | None:
        """The offset of the last published record; None if the transaction published none."""
        return self.ledgers[-1].last_offset if self._has_published else None

    @property
    def _has_published(self) -> bool:
        return self.state is TransactionState.COMMITTED and bool(self.ledgers)
