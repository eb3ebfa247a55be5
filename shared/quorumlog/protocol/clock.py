"""Whether the database's clock may decide what is deleted for good (rule 26c). Pure decisions, no clock.

Each process judges for itself, by each time that it hears from the database: against the time that passed here since the
last one, and against this machine's own clock.
"""

from typing import Final

CLOCK_DIFFERENCE_S: Final = 60.0
"""Larger differences are doubted. An answer may spend some seconds on its way. Chosen by judgement."""

STEADY_S: Final = 600.0
"""How long a clock that jumped must go on as it does. Chosen by judgement: most wrong clocks are found sooner."""


class DatabaseClock:
    """What one process heard of the database's clock.

    Invariant: while `doubt` is empty, the last time that was heard is within the bound of the time that has passed
    since the one before.
    """

    def __init__(self, difference_s: float = CLOCK_DIFFERENCE_S) -> None:
        """Nothing was heard: nothing is deleted."""
        self._difference_ms = difference_s * 1000
        self._trusted_ms: float | None = None
        """The database's clock ahead of monotonic time, as it is trusted."""
        self._heard_ms: float | None = None
        """The same by the last answer."""
        self._since_s = 0.0
        """When the clock was first heard as it is in doubt now."""
        self.doubt = "the database's clock was not heard yet"
        """Why nothing may be deleted by age; empty: it may."""

    def hear(self, database_ms: float, *, wall_ms: float, monotonic_s: float) -> str:
        """Judge by a time of the database that was heard now, and return `doubt`."""
        ahead_ms, before_ms = database_ms - monotonic_s * 1000, self._heard_ms
        self._heard_ms = ahead_ms
        if self._is_near(ahead_ms, self._trusted_ms):
            self._trusted_ms, self.doubt = ahead_ms, ""
            return ""
        if not self.doubt or not self._is_near(ahead_ms, before_ms):
            self._since_s = monotonic_s
        trusted_ms = self._trusted_ms
        is_steady = trusted_ms is None or monotonic_s >= self._since_s + STEADY_S
        if is_steady and self._is_near(database_ms, wall_ms):
            self._trusted_ms, self.doubt = ahead_ms, ""
        else:
            off_s = (database_ms - wall_ms) / 1000
            jump_s = 0.0 if trusted_ms is None else (ahead_ms - trusted_ms) / 1000
            jumped = f"jumped by {jump_s:+.0f} s, and " if jump_s else ""
            self.doubt = f"the database's clock {jumped}is {off_s:+.0f} s from this machine's"
        return self.doubt

    def now_ms(self, monotonic_s: float) -> int | None:
        """The database's time now as it was before it jumped; None before the first one was heard."""
        ahead_ms = self._heard_ms if self._trusted_ms is None else self._trusted_ms
        return None if ahead_ms is None else int(ahead_ms + monotonic_s * 1000)

    def _is_near(self, one_ms: float, other_ms: float | None) -> bool:
        return other_ms is not None and abs(one_ms - other_ms) <= self._difference_ms
