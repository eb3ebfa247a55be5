"""What the judge of a storm found, and how it asks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from quorumlog.errors import NoSuchLedger, NoSuchLog, QuorumLogError
from tests.support.waiting import until

T = TypeVar("T")

PAUSE_S: Final = 0.02
"""Between the requests of one client: the storm wants losses of databases, not entries."""


@dataclass(slots=True)
class Found:
    """What the judge found."""

    ledgers: int = 0
    lost: int = 0
    """Acknowledged entries and records that cannot be read, or are others."""
    truncated: int = 0
    """Ledgers and logs that end before something acknowledged."""
    resurrected: int = 0
    """What was deleted, truncated or aborted, and is there; and records that are there twice."""
    details: list[str] = field(default_factory=list)

    def note_lost(self, what: str, count: int, first: int) -> None:
        """Note that acknowledged entries or records are missing."""
        self.lost += count
        self.details.append(f"lost: {what}, {count} entries, {first} is the first")

    def note_truncated(self, what: str, last: int, acknowledged: int) -> None:
        """Note an end that is too early."""
        self.truncated += 1
        self.details.append(f"truncated: {what} at {last}, {acknowledged} was acknowledged")

    def note_resurrected(self, what: str) -> None:
        """Note something that is there again."""
        self.resurrected += 1
        self.details.append(f"resurrected: {what}")


async def answered(ask: Callable[[], Awaitable[T]], what: str) -> T | None:
    """What is answered in the end; None where there is no such ledger or log."""

    async def asked() -> tuple[T | None]:
        try:
            return (await ask(),)
        except (NoSuchLedger, NoSuchLog):
            return (None,)

    return (await until(asked, what, passing=(QuorumLogError,)))[0]
