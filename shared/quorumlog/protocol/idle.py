"""Expiry of unused logs: a keeper's memory of last uses, and other processes' reports (ADR 40).

The expiry keeper of a log is one gateway. A keeper's *term* is the id of its appointment for one
log. The keeper decides whether the log has expired, from the time that its process was awake since
the last use. Before a process serves an access, it reports the access to the keeper, unless its
previous report is younger than the slack. So the last known use may precede the last access by the
slack, and the keeper adds the slack to the log's time to live. A log without a known last use
counts as used now.

Invariant: once a keeper has found a log expired, the log stays expired for that keeper until the
log is deleted or another keeper is appointed.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

TERMS_MAX: Final = 100_000
"""Maximum logs in a keeper's memory, and reports in a process's memory. Chosen by judgement."""
_SLACK_S_MAX: Final = 60.0


def slack_s(idle_s: int) -> float:
    """Seconds for which one report covers further accesses. Expiry is delayed by the same time."""
    return min(idle_s / 4, _SLACK_S_MAX)


class Kept:
    """A keeper's memory of the last use of each log, by the keeper's term, in time awake."""

    def __init__(self) -> None:
        """Start with an empty memory."""
        self._used_s: OrderedDict[str, float] = OrderedDict()
        """The last use by term, least recent first."""
        self._expired: set[str] = set()
        """Terms of expired logs whose deletion is not settled yet."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Terms of deleted logs, which a late request with older metadata must not revive."""

    def lives(self, term: str, idle_s: int, now_s: float, *, is_access: bool) -> bool:
        """Whether a log has not expired. An access counts as a use unless the log has expired."""
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
        """The terms of the logs that are not known to be deleted."""
        return frozenset(self._used_s) | self._expired

    def deleted(self, term: str) -> None:
        """Record that an expired log was deleted."""
        self._expired.discard(term)
        self._gone[term] = None
        if len(self._gone) > TERMS_MAX:
            self._gone.popitem(last=False)

    def forget(self, terms: Collection[str]) -> None:
        """Forget logs that no longer exist or have another keeper. No deletion may be running."""
        for term in terms:
            self._used_s.pop(term, None)
            self._expired.discard(term)


class Reported:
    """The times of this process's last report of each log's use, by the keeper's term.

    Times are in seconds of a clock that also advances while the process stands still.
    """

    def __init__(self) -> None:
        """Start without reports."""
        self._reported_s: OrderedDict[str, float] = OrderedDict()

    def is_due(self, term: str, idle_s: int, now_s: float) -> bool:
        """Whether a use must be reported to the keeper before the access is served."""
        reported_s = self._reported_s.get(term)
        return reported_s is None or now_s - reported_s >= slack_s(idle_s)

    def note(self, term: str, asked_s: float) -> None:
        """Record that the keeper accepted in time the report that was sent at `asked_s`."""
        self._reported_s[term] = asked_s
        self._reported_s.move_to_end(term)
        if len(self._reported_s) > TERMS_MAX:
            self._reported_s.popitem(last=False)
