"""What time it is for a log: the database's clock decides, whatever a gateway's own one says.

A gateway's clock may be months ahead, or jump. What is forgotten or deleted because of its age is
gone for ever, so ages are counted from and to what the database said (rule 26a): every row comes
with its time, and `database_ms` is never ahead of it. A gateway's own clock only stamps records, and
by at most SLACK_MS beside the database's: one that is behind would make what was seen just now old.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

SLACK_MS: Final = 60_000
"""Clocks that differ by less are let be: a stamp must not lag by what an answer was on its way."""


def wall_ms() -> int:
    """The clock of this machine."""
    return int(datetime.now(UTC).timestamp() * 1000)


class Clock:
    """The time for the logs of one gateway."""

    def __init__(
        self, database_ms: Callable[[], int | None], wall_ms: Callable[[], int] = wall_ms
    ) -> None:
        """`database_ms`: never ahead of the database's clock; None until that was heard."""
        self.database_ms = database_ms
        self._wall_ms = wall_ms

    def stamp_ms(self, last_ms: int) -> int:
        """The append time of a batch, after one at `last_ms`: append times never go back."""
        wall_ms, database_ms = self._wall_ms(), self.database_ms()
        if database_ms is not None:
            wall_ms = min(max(wall_ms, database_ms - SLACK_MS), database_ms + SLACK_MS)
        return max(last_ms, wall_ms)

    def sealed_ms(self) -> int:
        """When a ledger is sealed: its age counts from here, by the clock that it is compared with."""
        database_ms = self.database_ms()
        return self._wall_ms() if database_ms is None else database_ms

    def expiry_ms(self, appended_ms: int) -> int:
        """The time by which a log forgets: that of its last append, if it has come."""
        return min(appended_ms, self.database_ms() or 0)
