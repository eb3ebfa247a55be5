"""The times that a log's machines use. Ages are computed by the database's clock only.

A gateway's clock may be months ahead, or jump. Deletions by age are final, so ages are differences
of the database's times (rule 26a). Each read of metadata returns the database's time, and
`database_ms` is never ahead of that clock. A gateway's clock only stamps records, within SLACK_MS
of the database's clock, because a clock that is behind would make new records old.
"""

from dataclasses import dataclass
from typing import Final

SLACK_MS: Final = 60_000
"""Differences between clocks up to this bound are ignored, because answers take time to arrive."""


@dataclass(frozen=True, slots=True)
class Now:
    """The time of one step of a log's machine."""

    wall_ms: int
    """This gateway's clock."""
    database_ms: int | None
    """The database's time, never ahead of its clock; None before the first answer."""
    monotonic_s: float = 0.0
    """Monotonic time, for durations within this process."""
    is_doubted: bool = False
    """Whether the database's clock is in doubt, so that nothing expires by it (rule 26c)."""

    def stamp_ms(self, last_ms: int) -> int:
        """The append time of the next batch, at least the last batch's append time `last_ms`."""
        wall_ms = self.wall_ms
        if self.database_ms is not None:
            wall_ms = min(max(wall_ms, self.database_ms - SLACK_MS), self.database_ms + SLACK_MS)
        return max(last_ms, wall_ms)

    def sealed_ms(self) -> int:
        """The time at which a ledger is sealed, by the clock that later determines its age."""
        return self.wall_ms if self.database_ms is None else self.database_ms

    def expiry_ms(self, appended_ms: int) -> int:
        """The time by which producers expire: the last append time, at most the database's time."""
        return 0 if self.is_doubted else min(appended_ms, self.database_ms or 0)
