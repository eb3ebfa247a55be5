"""Decides whether the database's clock may be trusted for deletions by age (rule 26c).

Each process judges the clock whenever the database returns its time. It compares that time with the
last trusted time plus the monotonic time since, and with its own machine's clock.
"""

from typing import Final

CLOCK_DIFFERENCE_S: Final = 60.0
"""Two clocks agree up to this difference, because answers take time. Chosen by judgement."""

STEADY_S: Final = 600.0
"""How long a clock must run steadily after a jump to be trusted again. Chosen by judgement."""


class DatabaseClock:
    """One process's judgement of the database's clock.

    Invariant: while `doubt` is empty, the last two times that the database returned differ by the
    monotonic time between them, up to `difference_s`.
    """

    def __init__(self, difference_s: float = CLOCK_DIFFERENCE_S) -> None:
        """Start without a time from the database: nothing may be deleted by age yet."""
        self._difference_ms = difference_s * 1000
        self._trusted_ms: float | None = None
        """Database time minus monotonic time in the last trusted answer."""
        self._heard_ms: float | None = None
        """Database time minus monotonic time in the last answer."""
        self._since_s = 0.0
        """Monotonic time of the first of the answers that agree with each other but aren't
        trusted."""
        self.doubt = "the database's clock has not been read yet"
        """The reason why nothing may be deleted by age; empty if such deletions are allowed."""

    def hear(self, database_ms: float, *, wall_ms: float, monotonic_s: float) -> str:
        """Judge the clock by a time that the database just returned, and return `doubt`."""
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
            self.doubt = f"the database's clock {jumped}is {off_s:+.0f} s from this machine's clock"
        return self.doubt

    def now_ms(self, monotonic_s: float) -> int | None:
        """The database's current time, ignoring untrusted jumps; None before its first answer."""
        ahead_ms = self._heard_ms if self._trusted_ms is None else self._trusted_ms
        return None if ahead_ms is None else int(ahead_ms + monotonic_s * 1000)

    def _is_near(self, one_ms: float, other_ms: float | None) -> bool:
        return other_ms is not None and abs(one_ms - other_ms) <= self._difference_ms
