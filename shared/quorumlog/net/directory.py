"""The last list of bookies from the metadata service, with their addresses and states.

The list is advice (I31): a stale list may cost time, but never entries. An address is never
forgotten, because a bookie that is listed as lost may still answer.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import placement
from quorumlog.protocol.ids import member_name
from quorumlog.wire.bodies import BookieInfo, BookieList

_BOOKIES_MAX: Final = 10_000
"""Maximum number of bookies whose failures are remembered, more than any cluster has."""


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """Conditions and duration of quarantine (BookKeeper: bookieQuarantineTime). Chosen by
    judgement: a restart of some seconds, with one attempt per second, must not cause quarantine.
    """

    failures: int = 10
    """Number of failures within `window_s` that cause quarantine; 0 disables quarantine."""
    window_s: float = 60.0
    for_s: float = 300.0


@dataclass(eq=False)
class Quarantine:
    """The bookies in quarantine: bookies that failed while listed as live, and are now avoided.

    Each process counts only its own failed requests. Like liveness, quarantine is only advice: if
    too few other bookies are live, a bookie in quarantine is chosen too. Invariant: at most
    `rule.failures` failures are stored per bookie.
    """

    _rule: QuarantineRule = QuarantineRule()
    _clock: Callable[[], float] = time.monotonic
    _failed_at: dict[str, deque[float]] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def failed(self, name: str) -> None:
        """Count a failure: a broken connection, silence, or an answer that matches no request."""
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
        """Forget a bookie that is lost, so that its failures count from zero when it returns."""
        self._failed_at.pop(name, None)
        self._until.pop(name, None)

    def contains(self, name: str) -> bool:
        """Whether a bookie is in quarantine."""
        return self._clock() < self._until.get(name, 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The bookies that are in quarantine now, sorted."""
        return tuple(sorted(name for name in self._until if self.contains(name)))


log = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""Interval of refreshes, equal to the interval of heartbeats (docs/protocol.md, Times)."""


@dataclass(eq=False)
class Directory:
    """The last known list of bookies. Implements `ports.PlacementPort`."""

    _fetch: Callable[[], Awaitable[BookieList]]
    """Reads the list from the metadata service."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    chance: random.Random = field(default_factory=random.SystemRandom)
    _addresses: dict[str, str] = field(default_factory=dict)
    bookies: tuple[BookieInfo, ...] = ()
    """The bookies in the list that was read last."""
    _lost: frozenset[str] = frozenset()
    is_known: bool = False
    """Whether the list was ever read."""

    async def follow(self) -> None:
        """Refresh the list periodically, for ever."""
        while True:
            try:
                await self.refresh()
            except QuorumLogError as error:
                log.info("bookies-unknown", extra={"why": error.detail})
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> BookieList:
        """Read the list now. Raises: MetadataUnavailable."""
        found = await self._fetch()
        self.bookies = found.bookies
        self._lost = frozenset(member_name(b.id) for b in found.bookies if b.state == "lost")
        for bookie in found.bookies:
            if bookie.url:
                self._addresses[member_name(bookie.id)] = bookie.url
        for name in self._lost:
            self.quarantine.forget(name)
        self.is_known = True
        return found

    def address(self, name: str) -> str | None:
        """A bookie's last known URL."""
        return self._addresses.get(name)

    def writable(self) -> tuple[str, ...]:
        """Live members that accept entries, in a new random order each time, to spread the load.
        Members with more free space come first more often, and members in quarantine come last.
        """
        rooms = {b.id: b.free_bytes for b in self.bookies if b.state == "writable"}
        order = {
            member: (self.quarantine.contains(member_name(member)), self._weighted_draw(weight))
            for member, weight in placement.weights(rooms).items()
        }
        return tuple(sorted(order, key=lambda member: order[member]))

    def census(self) -> str:
        """The number of bookies in each state, for errors: live bookies need not accept entries."""
        states = Counter(bookie.state for bookie in self.bookies)
        lost = states.pop("lost", 0)
        live = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        reported = f"{states.total()} of {len(self.bookies)} bookies live" + (live and f" ({live})")
        suspected = len(self.quarantine.names)
        reported += f", {lost} lost" if lost else ""
        return reported + (f", {suspected} suspected here (in quarantine)" if suspected else "")

    def _weighted_draw(self, weight: int) -> float:
        """Draw a random number for a bookie. The probability that a bookie gets the lowest number
        is proportional to its weight (Efraimidis and Spirakis).
        """
        return -math.log(1.0 - self.chance.random()) / weight

    def zone_count(self, members: tuple[str, ...]) -> int:
        """The number of zones of members; all unknown zones count as one."""
        zones = self._zones()
        return len({zones.get(member, "") for member in members})

    def candidates(self, ensemble: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
        """Live writable members that are not in `exclude`, best first. Members in zones that the
        ensemble lacks come first.
        """
        staying = [member for member in ensemble if member in exclude]
        free = [member for member in self.writable() if member not in exclude]
        spread = placement.spread(staying, free, self._zones())
        return tuple(sorted(spread, key=lambda m: self.quarantine.contains(member_name(m))))

    def is_down(self, member: str) -> bool:
        """Whether a member's bookie is lost or in quarantine. The bookie may still answer (I31)."""
        name = member_name(member)
        return name in self._lost or self.quarantine.contains(name)

    def new_ensemble(
        self, size: int, *, degraded_ack: tuple[int, int] | None = None
    ) -> tuple[tuple[str, ...], bool] | None:
        """An ensemble for a new ledger, and whether it is degraded; None if too few bookies are live.

        With `degraded_ack` (write quorum, ack quorum), absent members may complete the ensemble if
        every write set reaches its ack quorum with live members (rule 29).
        """
        zones = self._zones()
        live = self.writable()
        healthy = [m for m in live if not self.quarantine.contains(member_name(m))]
        # Try without quarantined members first, so that no such member is chosen only for its zone.
        for members in (healthy, live):
            chosen = placement.ensemble(size, members, zones)
            if chosen is not None:
                return chosen, False
        if degraded_ack is None:
            return None
        live = placement.spread((), live, zones)
        write_quorum, ack_quorum = degraded_ack
        absent = [bookie.id for bookie in self.bookies if bookie.state != "writable"]
        self.chance.shuffle(absent)
        # Members are taken from the end, so draining bookies, which come first, are chosen last.
        drained = {bookie.id for bookie in self.bookies if bookie.state == "draining"}
        absent.sort(key=lambda member: member not in drained)
        if len(live) + len(absent) < size:
            return None
        return _mixed(list(live), absent, size, write_quorum, ack_quorum)

    def _zones(self) -> dict[str, str]:
        return {bookie.id: bookie.zone for bookie in self.bookies}


def _mixed(
    live: list[str], absent: list[str], size: int, write_quorum: int, ack_quorum: int
) -> tuple[tuple[str, ...], bool] | None:
    """An ensemble of live and absent members; None if a write set has too few live members."""
    lacking = size - len(live)
    gaps = {position * size // lacking for position in range(lacking)}
    members = tuple(absent.pop() if position in gaps else live.pop() for position in range(size))
    for start in range(size):
        missing = sum((start + step) % size in gaps for step in range(write_quorum))
        if write_quorum - missing < ack_quorum:
            return None
    return members, True
