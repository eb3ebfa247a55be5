"""A transaction: sealed ledgers that come onto a log together, or not at all.

The metadata service decides in one database transaction; what it may decide is here, so that the
model of the tests decides the same.

Invariants:
  - COMMITTED and ABORTED are final;
  - a ledger of a transaction is on the log if and only if the commit that won names it;
  - of one app, each version is committed once, and versions only grow (as Delta's `txnVersion`).
Source: the exactly-once design for Spark; rule 28.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from quorumlog.protocol.log import LogItem, LogMetadata, LogState


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

    ledger_id: int
    last_entry: int | None = None


@dataclass(frozen=True, slots=True)
class TransactionLedger:
    """A ledger of a transaction: of a task attempt, then of the log with its offsets."""

    ledger_id: int
    partition: int | None = None
    attempt: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction's row. `ledgers`: while OPEN those that were created in it, by id; once
    COMMITTED those that it published, in the log's order.
    """

    id: str
    log: str
    app: str | None = None
    version: int | None = None
    state: TransactionState = TransactionState.OPEN
    is_duplicate: bool = False
    """COMMITTED because the app's version was so already: nothing of this one was published."""
    ledgers: tuple[TransactionLedger, ...] = ()
    requested: tuple[int, ...] = ()
    """What the commit asked for, in its order: a repeat is told by it."""
    created_at: str = ""
    expires_at: str = ""

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


class BadPublication(ValueError):
    """A log's row that publishes something else, or in another way, than rule 28 says."""


def published_by(
    old: LogMetadata, new: LogMetadata, requested: Sequence[Sealed]
) -> tuple[LogItem, ...]:
    """What `new` publishes of what a commit asks for, in order.

    Ledgers without records are left out. The caller sees to it that all but the last ledger of
    `new` are CLOSED. Raises: BadPublication.
    """
    new.check()
    known = {item.ledger_id for item in old.items}
    added = tuple(item for item in new.items if item.ledger_id not in known)
    wanted = [sealed.ledger_id for sealed in requested]
    if new.state is not LogState.OPEN or old.state is not LogState.OPEN:
        raise BadPublication("the log is not open")
    if not added or added[-1] is not new.last_item:
        raise BadPublication("the last ledger is no new one")
    if added[-1].last_offset is not None or added[-1].ledger_id in wanted:
        raise BadPublication("the last ledger is not one to go on in")
    published = added[:-1]
    if new.items[len(new.items) - len(added) :] != added:
        raise BadPublication("what is published comes after what was there")
    if any(item.last_offset is None for item in new.items[:-1]):
        raise BadPublication("an earlier ledger has no end")
    places = [wanted.index(item.ledger_id) for item in published if item.ledger_id in wanted]
    if len(places) != len(published) or places != sorted(places):
        raise BadPublication("other ledgers are published than were asked for, or in another order")
    return published
