"""What an audit concludes from rows and liveness. Pure: no clock, no requests."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from quorumlog.protocol.ids import member_incarnation, member_name, member_of
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.wire.bodies import BookieInfo


def survivors_of(row: LedgerMetadata, gone: Iterable[str]) -> int:
    """The fewest members that are left in a fragment: the least are mended first."""
    lost = frozenset(gone)
    return min(sum(member not in lost for member in fragment.bookies) for fragment in row.fragments)


def missing_zones(row: LedgerMetadata, bookies: Iterable[BookieInfo]) -> int:
    """In how many zones fewer than they could a ledger's copies lie, at its worst fragment. What
    is not known of a lost bookie counts as a zone of its own: it is repair's, not placement's.
    """
    zones = {bookie.id: bookie.zone for bookie in bookies if bookie.state != "lost"}
    possible = min(len(set(zones.values())), row.quorum.ensemble_size)
    worst = 0
    for fragment in row.fragments:
        used = len({zones.get(member, member) for member in fragment.bookies})
        worst = max(worst, possible - used)
    return worst


@dataclass(slots=True)
class LostMembers:
    """Which members count as lost, and since when each has been away.

    Invariant: a member is lost only after `delay_s` without a sign of life that this auditor
    itself has seen pass, or beside another one; a bookie's earlier incarnations are lost as soon as a later one lives.
    """

    delay_s: float
    away_since: dict[str, float] = field(default_factory=dict)
    unseen_since: float | None = None

    def unseen(self, now: float) -> None:
        """Nobody could look: for the delay or longer, and who was away may have been there since."""
        self.unseen_since = now if self.unseen_since is None else self.unseen_since

    def look(self, bookies: Iterable[BookieInfo], now: float) -> tuple[str, ...]:
        """The lost members at a time (monotonic seconds), in order."""
        lost: list[str] = []
        away = {}
        if self.unseen_since is not None and now - self.unseen_since >= self.delay_s:
            self.away_since = {}
        self.unseen_since = None
        for bookie in bookies:
            name, incarnation = member_name(bookie.id), member_incarnation(bookie.id)
            if bookie.state == "lost":
                since = away[bookie.id] = self.away_since.get(bookie.id, now)
                if now - since >= self.delay_s:
                    lost.append(bookie.id)
            else:
                lost += [member_of(name, earlier) for earlier in range(1, incarnation)]
        if len(away) > 1:
            # A second loss while one is being waited for: waiting on would risk the third
            # (BookKeeper: lostBookieRecoveryDelay).
            lost = [*dict.fromkeys((*lost, *away))]
        self.away_since = away
        return tuple(lost)


def is_believable(bookies: Iterable[BookieInfo], *, share_max: float) -> bool:
    """Whether so few bookies are away that it is not liveness itself that is broken (I31)."""
    states = [bookie.state for bookie in bookies]
    return bool(states) and states.count("lost") <= share_max * len(states)


@dataclass(slots=True)
class Patience:
    """For how long each of some things has been seen without a break."""

    grace_s: float
    since: dict[Hashable, float] = field(default_factory=dict)
    unseen_since: float | None = None

    def unseen(self, now: float) -> None:
        """Nobody could look: for the grace or longer, and what was seen before counts no more."""
        self.unseen_since = now if self.unseen_since is None else self.unseen_since

    def over(self, seen: Mapping[Hashable, int], now: float) -> Iterator[int]:
        """The values of those that have been seen for the grace; what is not seen is forgotten."""
        if self.unseen_since is not None and now - self.unseen_since >= self.grace_s:
            self.since = {}
        self.unseen_since = None
        self.since = {key: self.since.get(key, now) for key in seen}
        for key, value in seen.items():
            if now - self.since[key] >= self.grace_s:
                yield value
