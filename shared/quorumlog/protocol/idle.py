"""How long a log is out of use: what its keeper remembers, and what other processes tell the keeper (ADR 40).

The keeper counts from what it was told, by the time in which it was awake. Whoever serves an access tells the keeper
before, unless it has told it within the slack; so the keeper's last use is at most the slack before the last access, and
it waits for so much longer. What a keeper does not remember counts as used just now: an appointment is an access.

Invariant: a log that has expired stays so for this keeper, whoever asks, until it is deleted or has another keeper.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

TERMS_MAX: Final = 100_000
"""Logs that a process remembers the last use of, and logs whose keepers it remembers to have told (taste)."""
_SLACK_S_MAX: Final = 60.0


def slack_s(idle_s: int) -> float:
    """For how long a process may serve accesses without telling the keeper, and how much later a log expires."""
    return min(idle_s / 4, _SLACK_S_MAX)


class Kept:
    """What a keeper remembers: by term, when the log was used last, in seconds awake."""

    def __init__(self) -> None:
        """Nothing is remembered."""
        self._used_s: OrderedDict[str, float] = OrderedDict()
        """The one that was used longest ago comes first."""
        self._expired: set[str] = set()
        """Those whose deletion is not settled."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Some that were deleted: who asks late, by a row from before, is not told that they live."""

    def lives(self, term: str, idle_s: int, now_s: float, *, is_access: bool) -> bool:
        """Whether a log has not expired; an access counts as a use, if it comes in time."""
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
        """Of the logs that are there, as far as this process knows."""
        return frozenset(self._used_s) | self._expired

    def deleted(self, term: str) -> None:
        """A log that has expired is gone."""
        self._expired.discard(term)
        self._gone[term] = None
        if len(self._gone) > TERMS_MAX:
            self._gone.popitem(last=False)

    def forget(self, terms: Collection[str]) -> None:
        """These logs are gone, or have other keepers: no deletion of them by this one is under way."""
        for term in terms:
            self._used_s.pop(term, None)
            self._expired.discard(term)


class Told:
    """When this process told a log's keeper last, by term, in seconds that pass while it stands still too."""

    def __init__(self) -> None:
        """Nobody was told."""
        self._told_s: OrderedDict[str, float] = OrderedDict()

    def is_due(self, term: str, idle_s: int, now_s: float) -> bool:
        """Whether the keeper must be asked before an access is served."""
        told_s = self._told_s.get(term)
        return told_s is None or now_s - told_s >= slack_s(idle_s)

    def note(self, term: str, asked_s: float) -> None:
        """The keeper took an access in time, which was told from `asked_s` on."""
        self._told_s[term] = asked_s
        self._told_s.move_to_end(term)
        if len(self._told_s) > TERMS_MAX:
            self._told_s.popitem(last=False)
