"""Expiry of unused logs: what a log's keeper remembers, and what other processes report (ADR 40).

A keeper decides whether a log has expired, by the time in which it was awake since the last use.
Processes report an access before they serve it, unless they reported one within the slack. So the
last known use is at most the slack before the last access, and the keeper waits that much longer. A
log that a keeper does not remember counts as used now: appointing a keeper is an access.

Invariant: an expired log stays expired for this keeper until it is deleted or changes keepers.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

TERMS_MAX: Final = 100_000
"""Maximum remembered last uses of logs, and remembered reports to keepers. Chosen by judgement."""
_SLACK_S_MAX: Final = 60.0


def slack_s(idle_s: int) -> float:
    """How long accesses may be served without another report, and how much later a log expires."""
    return min(idle_s / 4, _SLACK_S_MAX)


class Kept:
    """A keeper's memory: by term, the log's last use, in seconds that the keeper was awake."""

    def __init__(self) -> None:
        """Start with an empty memory."""
        self._used_s: OrderedDict[str, float] = OrderedDict()
        """By term, the last use, oldest first."""
        self._expired: set[str] = set()
        """Terms of expired logs whose deletion is not settled yet."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Terms of deleted logs, so that late requests with older metadata do not revive them."""

    def lives(self, term: str, idle_s: int, now_s: float, *, is_access: bool) -> bool:
        """Whether a log has not expired. An access counts as a use unless the log had expired."""
        if term in self._expired or term in self._gone:
            return False
        used_s = self._used_s.get(term)
        if used_s is not None and now_s - used_s >= idle_s + slack_s(idle_s):
            del self._used_s[term]
            self._expired.add(term)
            return False
        if is_access or used_s is None:
            self._used_s[term] = now_s
            self._used_s.move_to_end(term)
            if len(self._used_s) > TERMS_MAX:
                self._used_s.popitem(last=False)
        return True

    def terms(self) -> frozenset[str]:
        """The terms of the logs that exist, as far as this process knows."""
        return frozenset(self._used_s) | self._expired

    def deleted(self, term: str) -> None:
        """Record that an expired log was deleted."""
        self._expired.discard(term)
        self._gone[term] = None
        if len(self._gone) > TERMS_MAX:
            self._gone.popitem(last=False)

    def forget(self, terms: Collection[str]) -> None:
        """Forget logs that are gone or have other keepers, and that this keeper is not deleting."""
        for term in terms:
            self._used_s.pop(term, None)
            self._expired.discard(term)


class Reported:
    """When this process last reported a log's use to its expiry keeper, by the keeper's term.

    Times are in seconds, and the clock runs on while the process stands still.
    """

    def __init__(self) -> None:
        """Start without reports."""
        self._reported_s: OrderedDict[str, float] = OrderedDict()

    def is_due(self, term: str, idle_s: int, now_s: float) -> bool:
        """Whether a use must be reported to the keeper before the access is served."""
        reported_s = self._reported_s.get(term)
        return reported_s is None or now_s - reported_s >= slack_s(idle_s)

    def note(self, term: str, asked_s: float) -> None:
        """Record that the keeper accepted, in time, a report that was sent at `asked_s`."""
        self._reported_s[term] = asked_s
        self._reported_s.move_to_end(term)
        if len(self._reported_s) > TERMS_MAX:
            self._reported_s.popitem(last=False)
