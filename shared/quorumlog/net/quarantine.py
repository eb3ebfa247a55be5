"""Bookies that fail though they are called live: not chosen for new places for a while.

Each process judges by what it met itself. It is advice, as liveness is: where too few others live,
a bookie in quarantine is chosen all the same.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

_BOOKIES_MAX: Final = 10_000
"""More than any cluster has; names come from metadata."""


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """So many failures within a window, and it is out for a time (BookKeeper: bookieQuarantineTime). The numbers are
    taste: a restart of some seconds, with a try a second, is not meant.
    """

    failures: int = 10
    """0: nobody is ever out."""
    window_s: float = 60.0
    for_s: float = 300.0


class Quarantine:
    """Who is out, and until when. Invariant: at most `rule.failures` times are kept of a bookie."""

    def __init__(
        self, rule: QuarantineRule | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nobody is out."""
        self._rule = rule or QuarantineRule()
        self._clock = clock
        self._failed_at: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def failed(self, name: str) -> None:
        """A bookie's connection broke, or it was silent, or its answer was not to be believed."""
        rule, now = self._rule, self._clock()
        if not rule.failures or len(self._failed_at) >= _BOOKIES_MAX:
            return
        times = self._failed_at.setdefault(name, deque(maxlen=rule.failures))
        times.append(now)
        if len(times) == rule.failures and now - times[0] <= rule.window_s:
            if not self.holds(name):
                log.warning("bookie-quarantined", extra={"bookie": name, "for_s": rule.for_s})
            self._until[name] = now + rule.for_s
            times.clear()

    def forget(self, name: str) -> None:
        """A bookie is gone: what comes back begins anew."""
        self._failed_at.pop(name, None)
        self._until.pop(name, None)

    def holds(self, name: str) -> bool:
        """Whether a bookie is out."""
        return self._clock() < self._until.get(name, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are out now, in order."""
        return tuple(sorted(name for name in self._until if self.holds(name)))
