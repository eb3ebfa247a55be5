"""What audits and checks find: conclusions from rows and liveness, without a clock or requests; and lost entries
(rule 31), which are remembered until a loss is accepted or a copy turns up.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from quorumlog.net.holdings import HoldingsClient
from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.loss import Answers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, union
from quorumlog.wire.bodies import BookieInfo

log = logging.getLogger(__name__)

_RECHECKS_AT_ONCE: Final = 10
"""How many ledgers are checked again per round (taste)."""
_LEDGERS_MAX: Final = 1000
"""How many ledgers are remembered; the one checked longest ago is dropped first (taste)."""

V = TypeVar("V")


def survivors_of(row: LedgerMetadata, gone: Iterable[str]) -> int:
    """The fewest members left in any fragment: ledgers with the fewest are repaired first."""
    lost = frozenset(gone)
    return min(sum(member not in lost for member in fragment.bookies) for fragment in row.fragments)


def missing_zones(row: LedgerMetadata, bookies: Iterable[BookieInfo]) -> int:
    """How many zones a ledger's worst fragment misses, of those it could span. A lost bookie counts
    as a zone of its own: it is a matter of repair, not of placement.
    """
    zones = {bookie.id: bookie.zone for bookie in bookies if bookie.state != "lost"}
    possible = min(len(set(zones.values())), row.quorum.ensemble_size)
    worst = 0
    for fragment in row.fragments:
        used = len({zones.get(member, member) for member in fragment.bookies})
        worst = max(worst, possible - used)
    return worst


def is_believable(bookies: Iterable[BookieInfo], *, share_max: float) -> bool:
    """Whether so few bookies are away that liveness itself is probably right (I31)."""
    states = [bookie.state for bookie in bookies]
    return bool(states) and states.count("lost") <= share_max * len(states)


@dataclass(slots=True)
class GracePeriod:
    """How long each key has been observed without a break."""

    grace_s: float
    since: dict[Hashable, float] = field(default_factory=dict)
    unobserved_since: float | None = None

    def note_unobserved(self, now: float) -> None:
        """Nothing is observed from now on; after `grace_s` of that, observations expire."""
        self.unobserved_since = now if self.unobserved_since is None else self.unobserved_since

    def expired(self, seen: Mapping[Hashable, V], now: float) -> list[V]:
        """The values of keys observed for the grace period; absent keys are forgotten."""
        if self.unobserved_since is not None and now - self.unobserved_since >= self.grace_s:
            self.since = {}
        self.unobserved_since = None
        self.since = {key: self.since.get(key, now) for key in seen}
        return [value for key, value in seen.items() if now - self.since[key] >= self.grace_s]


class LostMembers(GracePeriod):
    """The members that count as lost, by how long each has been away.

    Invariant: a member is lost only after this auditor itself observed `grace_s` without a sign of
    life, or beside another absent member; a bookie's earlier incarnations are lost as soon as a
    later one lives.
    """

    __slots__ = ()

    def update(self, bookies: Iterable[BookieInfo], now: float) -> tuple[str, ...]:
        """The lost members at a time (monotonic seconds)."""
        away: dict[Hashable, str] = {}
        earlier: list[str] = []
        for bookie in bookies:
            if bookie.state == "lost":
                away[bookie.id] = bookie.id
            else:
                name, incarnation = member_name(bookie.id), member_incarnation(bookie.id)
                earlier += [member_of(name, number) for number in range(1, incarnation)]
        expired = self.expired(away, now)
        # A second loss during the grace period of a first: waiting longer would risk the third
        # (BookKeeper: lostBookieRecoveryDelay).
        return (*(expired if len(away) < 2 else away.values()), *earlier)


class KnownLosses:
    """Lost entries by ledger. Invariant: all possible holders have denied each of them."""

    def __init__(self, holdings: HoldingsClient) -> None:
        """No loss is known yet."""
        self._holdings = holdings
        self._found: OrderedDict[int, tuple[Answers, ...]] = OrderedDict()

    @property
    def entries(self) -> int:
        """How many entries are known to be lost."""
        return sum(f.last - f.first + 1 for found in self._found.values() for f in found)

    @property
    def oldest(self) -> list[int]:
        """The ledgers checked longest ago, to be checked again."""
        return list(islice(self._found, _RECHECKS_AT_ONCE))

    async def recheck(self, row: LedgerMetadata, suspects: Ranges) -> tuple[Answers, ...]:
        """Which of these entries, and of those lost at the last check, are lost."""
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
        """The ledger has all its entries, or is deleted."""
        self._found.pop(ledger_id, None)

    def json(self) -> list[dict[str, Any]]:
        """The losses as JSON for operators."""
        return [
            {"ledger_id": ledger_id, **answers_json(lost)}
            for ledger_id, found in self._found.items()
            for lost in found
        ]


def answers_json(found: Answers) -> dict[str, Any]:
    """A range, and the answer of each possible holder."""
    return {"first": found.first, "last": found.last, "answers": dict(found.words)}
