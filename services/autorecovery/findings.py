"""Decides from metadata and liveness which bookies are lost and which ledgers are at risk. Stores
known lost entries (rule 31) until the loss is accepted or a copy is found.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from quorumlog.net.holdings import HoldingsClient, answers_json
from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, union
from quorumlog.wire.bodies import BookieInfo

log = logging.getLogger(__name__)

_RECHECKS_AT_ONCE: Final = 10
"""Maximum number of ledgers with lost entries that one round rechecks (chosen by judgement)."""
_LEDGERS_MAX: Final = 1000
"""Maximum number of ledgers whose lost entries are remembered (chosen by judgement)."""

V = TypeVar("V")


def survivors_of(row: LedgerMetadata, gone: Iterable[str]) -> int:
    """The lowest number of surviving members in any fragment; low numbers are repaired first."""
    lost = frozenset(gone)
    return min(sum(member not in lost for member in fragment.bookies) for fragment in row.fragments)


def missing_zones(row: LedgerMetadata, bookies: Iterable[BookieInfo]) -> int:
    """Number of additional zones that a ledger's worst fragment could span. A lost bookie counts as
    a separate zone, because its entries will be placed anew by a repair.
    """
    zones = {bookie.id: bookie.zone for bookie in bookies if bookie.state != "lost"}
    possible = min(len(set(zones.values())), row.quorum.ensemble_size)
    worst = 0
    for fragment in row.fragments:
        used = len({zones.get(member, member) for member in fragment.bookies})
        worst = max(worst, possible - used)
    return worst


def is_believable(bookies: Iterable[BookieInfo], *, share_max: float) -> bool:
    """Whether liveness is believable: at most `share_max` of the bookies are absent (I31)."""
    states = [bookie.state for bookie in bookies]
    return bool(states) and states.count("lost") <= share_max * len(states)


@dataclass(slots=True)
class GracePeriod:
    """Measures how long a condition has been continuously true, by key (ledger or member)."""

    grace_s: float
    since: dict[Hashable, float] = field(default_factory=dict)
    unobserved_since: float | None = None

    def note_unobserved(self, now: float) -> None:
        """Records that nothing can be observed now. After `grace_s`, all grace periods restart."""
        self.unobserved_since = now if self.unobserved_since is None else self.unobserved_since

    def expired(self, seen: Mapping[Hashable, V], now: float) -> list[V]:
        """Returns the values of keys that were in `seen` for `grace_s`; removes other keys."""
        if self.unobserved_since is not None and now - self.unobserved_since >= self.grace_s:
            self.since = {}
        self.unobserved_since = None
        self.since = {key: self.since.get(key, now) for key in seen}
        return [value for key, value in seen.items() if now - self.since[key] >= self.grace_s]


class LostMembers(GracePeriod):
    """Decides which members count as lost.

    Invariant: a member is lost only if this auditor itself observed its absence for `grace_s`, or
    if another member is absent too. Earlier incarnations of a live bookie are lost at once.
    """

    __slots__ = ()

    def update(self, bookies: Iterable[BookieInfo], now: float) -> tuple[str, ...]:
        """Returns the lost members. `now`: monotonic seconds."""
        away: dict[Hashable, str] = {}
        earlier: list[str] = []
        for bookie in bookies:
            if bookie.state == "lost":
                away[bookie.id] = bookie.id
            else:
                name, incarnation = member_name(bookie.id), member_incarnation(bookie.id)
                earlier += [member_of(name, number) for number in range(1, incarnation)]
        expired = self.expired(away, now)
        # If a second member is absent during the grace period, waiting longer would risk a third
        # loss (as in BookKeeper's lostBookieRecoveryDelay).
        return (*(expired if len(away) < 2 else away.values()), *earlier)


class KnownLosses:
    """Known lost entries by ledger: each bookie that could have them reported them as absent."""

    def __init__(self, holdings: HoldingsClient) -> None:
        """`holdings`: the client that queries bookies for their stored entries."""
        self._holdings = holdings
        self._found: OrderedDict[int, tuple[Answers, ...]] = OrderedDict()

    @property
    def entries(self) -> int:
        """The number of known lost entries."""
        return sum(f.last - f.first + 1 for found in self._found.values() for f in found)

    @property
    def oldest(self) -> list[int]:
        """Ids of the `_RECHECKS_AT_ONCE` least recently checked ledgers."""
        return list(islice(self._found, _RECHECKS_AT_ONCE))

    async def recheck(self, row: LedgerMetadata, suspects: Ranges) -> tuple[Answers, ...]:
        """Queries bookies about `suspects` and the known losses; returns the lost ranges."""
        known = {(found.first, found.last) for found in self._found.get(row.ledger_id, ())}
        found = await self._holdings.lost(row, union((*suspects, *known)))
        self.forget(row.ledger_id)
        if found:
            self._found[row.ledger_id] = found
            if len(self._found) > _LEDGERS_MAX:
                self._found.popitem(last=False)
        for lost in found:
            if (lost.first, lost.last) not in known:
                extra = {"ledger": row.ledger_id, "first": lost.first, "last": lost.last}
                log.error("entries-lost", extra={**extra, "answers": dict(lost.words)})
        return found

    def forget(self, ledger_id: int) -> None:
        """Forgets the losses of a ledger that has all its entries, or was deleted."""
        self._found.pop(ledger_id, None)

    def json(self) -> list[dict[str, Any]]:
        """The known losses as JSON objects, for operators."""
        return [
            {"ledger_id": ledger_id, **answers_json(lost)}
            for ledger_id, found in self._found.items()
            for lost in found
        ]
