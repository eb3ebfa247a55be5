"""The time by which a log lives: the database's clock decides, not a gateway's own.

A gateway's clock may be months ahead, or jump. What is forgotten or deleted because of its age is
gone for ever, so ages are counted from and to what the database said (rule 26a): every row comes
with its time, and `database_ms` is never ahead of it. A gateway's own clock only stamps records, and
by at most SLACK_MS beside the database's: one that is behind would make what was seen just now old.
"""

from dataclasses import dataclass
from typing import Final

SLACK_MS: Final = 60_000
"""Smaller differences are ignored: they include the time that an answer spent on its way."""


@dataclass(frozen=True, slots=True)
class Now:
    """The time of one step of a log's machine."""

    wall_ms: int
    """This gateway's own clock."""
    database_ms: int | None
    """Never ahead of the database's clock; None until that was heard."""
    monotonic_s: float = 0.0
    """For durations within this process."""
    is_doubted: bool = False
    """Whether the database's clock may make nothing old (rule 26c)."""

    def stamp_ms(self, last_ms: int) -> int:
        """The append time of a batch, after one at `last_ms`: append times never go back."""
        wall_ms = self.wall_ms
        if self.database_ms is not None:
            wall_ms = min(max(wall_ms, self.database_ms - SLACK_MS), self.database_ms + SLACK_MS)
        return max(last_ms, wall_ms)

    def sealed_ms(self) -> int:
        """When a ledger is sealed: its age counts from here, by the clock that it is compared with."""
        return self.wall_ms if self.database_ms is None else self.database_ms

    def expiry_ms(self, appended_ms: int) -> int:
        """The time by which a log forgets producers: that of its last append, but not ahead of the database."""
        return 0 if self.is_doubted else min(appended_ms, self.database_ms or 0)
