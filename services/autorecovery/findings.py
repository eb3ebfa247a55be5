"""Conclusions of an audit from rows and liveness. Pure: no clock, no requests."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.bodies import BookieInfo

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
