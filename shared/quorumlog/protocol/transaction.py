"""A transaction: sealed ledgers that come onto a log together, or not at all.

The metadata service decides in one database transaction; what it may decide is in `changes.py`.

Invariants:
  - COMMITTED and ABORTED are final;
  - a ledger of a transaction is on the log if and only if the commit that won names it;
  - of one app, each version is committed once, and versions only grow (as Delta's `txnVersion`).
Source: the exactly-once design for Spark; rule 28.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from quorumlog.protocol.values import Bounds, IdOrNone, LedgerId, LogName, Number, Text, Value

TRANSACTION_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A transaction's id; it is part of URLs."""

APP_CHARS_MAX: Final = 255

TransactionId = Annotated[str, Bounds(pattern=rf"^{TRANSACTION_ID}$")]
App = Annotated[Text, Bounds(min_length=1, max_length=APP_CHARS_MAX)]


class TransactionState(StrEnum):
    """A transaction begins OPEN; the others are final."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A ledger that a commit asks to publish; `last_entry` is where its writer closed it, where
    the caller says so.
    """

    ledger_id: LedgerId
    last_entry: IdOrNone | None = None


@dataclass(frozen=True, slots=True)
class TransactionLedger:
    """A ledger of a transaction: of a task attempt, then of the log with its offsets."""

    ledger_id: LedgerId
    partition: Number | None = None
    attempt: Number | None = None
    first_offset: Number | None = None
    last_offset: Number | None = None


@dataclass(frozen=True, slots=True)
class Transaction(Value):
    """One transaction's row. `ledgers`: while OPEN those that were created in it, by id; once
    COMMITTED those that it published, in the log's order.
    """

    id: TransactionId
    log: LogName
    app: App | None = None
    version: Number | None = None
    state: TransactionState = TransactionState.OPEN
    is_duplicate: bool = False
    """COMMITTED because the app's version was so already: nothing of this one was published."""
    ledgers: tuple[TransactionLedger, ...] = ()
    requested: tuple[LedgerId, ...] = ()
    """What the commit asked for, in its order: a repeat is told by it."""
    created_at: Text = ""
    expires_at: Text = ""

    @property
    def is_open(self) -> bool:
        """Whether it still takes ledgers and can be ended."""
        return self.state is TransactionState.OPEN

    @property
    def first_offset(self) -> int | None:
        """The offset of the first record that it published, if any."""
        return self.ledgers[0].first_offset if self._has_published else None

    @property
    def last_offset(self) -> int | None:
        """The offset of the last record that it published, if any."""
        return self.ledgers[-1].last_offset if self._has_published else None

    @property
    def _has_published(self) -> bool:
        return self.state is TransactionState.COMMITTED and bool(self.ledgers)
