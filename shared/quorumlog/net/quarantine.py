"""Quarantine: a bookie that fails though it is listed as live is not chosen for new places for a while.

Each process judges by the failures that it met itself. Quarantine is advice, as liveness is: where too
few other bookies are live, a bookie in quarantine is chosen nevertheless.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

_BOOKIES_MAX: Final = 10_000
"""More bookies than any cluster has; names come from metadata. Of more, those that failed first are
counted from zero again.
"""


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """When a bookie enters quarantine, and for how long (BookKeeper: bookieQuarantineTime). The numbers
    are taste: a restart of some seconds, with a try per second, must not be enough.
    """

    failures: int = 10
    """0: quarantine is off."""
    window_s: float = 60.0
    for_s: float = 300.0


class Quarantine:
    """The bookies in quarantine. Invariant: at most `rule.failures` times are kept per bookie."""

    def __init__(
        self, rule: QuarantineRule | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with no bookie in quarantine."""
        self._rule = rule or QuarantineRule()
        self._clock = clock
        self._failed_at: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def failed(self, name: str) -> None:
        """Count a failure: a broken connection, silence, or an answer without a request."""
        rule, now = self._rule, self._clock()
        if not rule.failures:
            return
        if name not in self._failed_at and len(self._failed_at) >= _BOOKIES_MAX:
            self.forget(next(iter(self._failed_at)))
        times = self._failed_at.setdefault(name, deque(maxlen=rule.failures))
        times.append(now)
        if len(times) == rule.failures and now - times[0] <= rule.window_s:
            if not self.contains(name):
                log.warning("bookie-quarantined", extra={"bookie": name, "for_s": rule.for_s})
            self._until[name] = now + rule.for_s
            times.clear()

    def forget(self, name: str) -> None:
        """Forget a bookie that is gone: when it comes back, its failures count from zero."""
        self._failed_at.pop(name, None)
        self._until.pop(name, None)

    def contains(self, name: str) -> bool:
        """Whether a bookie is in quarantine."""
        return self._clock() < self._until.get(name, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The bookies that are in quarantine now, sorted."""
        return tuple(sorted(name for name in self._until if self.contains(name)))
