"""Consumer lag for metrics. The owner of the log of committed offsets measures lag with each sweep.
A scrape returns the last measurement and sends no requests.

A measurement appends nothing. Committed offsets come from this process's memory, and metadata of logs
from the sweeps. The ends of logs come from their owners, with one request to each gateway per
thousand logs. The append time of each shown consumer's next record is read once.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Literal

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.positions import Position
from quorumlog.protocol.rows import Key
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.logs.consumers import Consumers, StateOf
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.positions import PositionService
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.views import LogViews, head_to_ask

CONSUMERS_SHOWN_MAX: Final = 100
"""Maximum number of consumers with metric labels of their own. The bound is needed because clients
choose the names (chosen by judgement)."""

OTHER_CONSUMERS: Final = "_other"
"""Labels of the consumer that is furthest behind, of all consumers without labels of their own. No
log has this name."""

_HEADS: Final = 1000
"""Maximum number of logs in a request for their ends."""
_AT_ONCE: Final = 16
"""Maximum entries that are read concurrently."""

State = StateOf | Literal["no-such-log"]


@dataclass(frozen=True, slots=True)
class ShownLag:
    """One consumer's lag. `seconds` is the age of the first unprocessed record; None if unknown."""

    log: str
    consumer: str
    records: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """All consumers' lags at one time."""

    lags: Sequence[ShownLag]
    states: Mapping[State, int]
    """The number of consumers in each state."""
    at_s: float
    """The time of the measurement, by the event loop's clock."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The parts of a log's metadata that a measurement needs."""

    created: str
    first_offset: int
    end: int | None
    head: LogHead | None
    """The head to send to the log's owner, if only the owner has the log's end."""

    @classmethod
    def of(cls, row: LogMetadata) -> "_Seen":
        return cls(row.created_at, row.first_offset, row.end_offset, head_to_ask(row))


@dataclass(frozen=True, slots=True)
class _Behind:
    position: Position
    at: int
    records: int

    @property
    def key(self) -> Key:
        return self.position.key


class Lags:
    """Measures consumer lag while this gateway owns the log of committed offsets."""

    def __init__(
        self,
        store: MetadataLogs,
        ownership: Ownership,
        views: LogViews,
        positions: PositionService,
        consumers: Consumers,
        *,
        now_ms: Callable[[], int],
    ) -> None:
        """`now_ms` is the clock of append times."""
        self._store, self._ownership, self._views = store, ownership, views
        self._positions, self._consumers, self._now_ms = positions, consumers, now_ms
        self._measured: Measured | None = None
        self._named: dict[Key, None] = {}
        self._stranded: frozenset[Key] = frozenset()
        """Consumers without lag and labels, because their log was deleted or replaced."""
        self._ends: dict[str, tuple[str, int]] = {}
        """Each log's creation time and last known end, used while its owner does not answer."""
        self._came_ms: dict[Key, tuple[str, int, int]] = {}
        """The log's creation time, the next offset and its append time, for each shown consumer."""
        self._logs: dict[str, _Seen | None] = {}
        """The logs that have consumers, as read by the sweeps. None: the log does not exist."""
        self._is_sealed = False
        """Whether the log of committed offsets has only sealed ledgers, so it may have no owner."""
        self._task: asyncio.Task[None] | None = None

    @property
    def measured(self) -> Measured | None:
        """The last measurement. None if this gateway isn't the owner or hasn't measured yet."""
        return self._measured if self._is_owner else None

    @property
    def _is_owner(self) -> bool:
        return self._ownership.owner(POSITIONS_LOG) is not None

    # --- the sweep -------------------------------------------------------------------------------

    def begin(self) -> set[str]:
        """Begin a measurement at the start of a sweep. Returns the names of the logs whose metadata
        the measurement needs and earlier sweeps have not read.
        """
        if not self._is_owner:
            self._measured, self._logs = None, {}
            return set()
        kept = self._positions.kept
        self._named = {
            key: None for key in self._named if key in kept and key not in self._stranded
        }
        if len(self._named) < min(CONSUMERS_SHOWN_MAX, len(kept)):
            taken = {*self._named, *self._stranded}
            free = (key for key in sorted(kept) if key not in taken)
            self._named |= dict.fromkeys(islice(free, CONSUMERS_SHOWN_MAX - len(self._named)))
        wanted = {log for log, _ in kept}
        before, self._logs = self._logs, {name: self._logs.get(name) for name in wanted}
        return wanted - before.keys()

    def see(self, name: str, row: LogMetadata | None) -> None:
        """Record a log's metadata, which the sweep read from the primary; None if deleted."""
        if name in self._logs:
            self._logs[name] = None if row is None else _Seen.of(row)
        elif name == POSITIONS_LOG:
            self._is_sealed = row is not None and row.state is LogState.OPEN and not row.unsealed

    def end(self) -> None:
        """Measure in the background after the sweep, unless a measurement is still running."""
        if not (self._is_owner or self._is_sealed):
            return
        if self._task is None or self._task.done():
            self._task = self._ownership.task(self._measure(dict(self._logs)))

    # --- the measurement -------------------------------------------------------------------------

    async def _measure(self, seen: Mapping[str, _Seen | None]) -> None:
        if not self._is_owner:
            # A request for a page gives the log an owner. Without an owner no lag is measured, and
            # lost workers would go unnoticed.
            with contextlib.suppress(QuorumLogError):
                await self._positions.page(POSITIONS_LOG, after="", limit=1)
            return
        await self._learn_ends(seen)
        states: Counter[State] = Counter()
        named: list[_Behind] = []
        worst: _Behind | None = None
        stranded: set[Key] = set()
        for key, position in list(self._positions.kept.items()):
            if position.log not in seen:
                continue  # created since the sweep began
            log = seen[position.log]
            state = _state(position, log)
            states[state] += 1
            if state in ("no-such-log", "log-replaced"):
                stranded.add(key)
            behind = self._behind(position, log)
            if behind is None:
                continue
            if key in self._named:
                named.append(behind)
            elif worst is None or behind.records > worst.records:
                worst = behind
        self._stranded = frozenset(stranded)
        room = asyncio.Semaphore(_AT_ONCE)
        lags = await asyncio.gather(*(self._shown(behind, room) for behind in named))
        if worst is not None:
            other = await self._shown(worst, room)
            lags.append(replace(other, log=OTHER_CONSUMERS, consumer=OTHER_CONSUMERS))
        self._came_ms = {key: came for key, came in self._came_ms.items() if key in self._named}
        self._measured = Measured(lags, states, asyncio.get_running_loop().time())

    async def _learn_ends(self, seen: Mapping[str, _Seen | None]) -> None:
        """Read the logs' ends, after the metadata, so that no end is older than the metadata."""
        logs = {name: log for name, log in seen.items() if log is not None}
        heads = [log.head for log in logs.values() if log.head is not None]
        known = {name: (log.created, log.end) for name, log in logs.items() if log.end is not None}
        for at in range(0, len(heads), _HEADS):
            for name, (end, _) in (await self._views.ends(heads[at : at + _HEADS])).items():
                known[name] = logs[name].created, end
        self._ends = {name: ended for name, ended in self._ends.items() if name in logs} | known

    def _behind(self, position: Position, log: _Seen | None) -> _Behind | None:
        """A consumer's unprocessed records; None if its log was replaced or the end is unknown."""
        created, end = self._ends.get(position.log, ("", 0))
        if log is None or not position.created == log.created == created:
            return None
        at = max(position.offset, log.first_offset)
        return _Behind(position, at, max(0, end - at))

    async def _shown(self, behind: _Behind, room: asyncio.Semaphore) -> ShownLag:
        seconds: float | None = 0.0
        if behind.records:
            async with room:
                seconds = await self._age_s(behind)
        return ShownLag(behind.position.log, behind.position.consumer, behind.records, seconds)

    async def _age_s(self, behind: _Behind) -> float | None:
        """The age in seconds of the first unprocessed record."""
        place = (behind.position.created, behind.at)
        known = self._came_ms.get(behind.key)
        if known is not None and known[:2] == place:
            return self._since_s(known[2])
        try:
            row = await self._store.get(behind.position.log)
            if row.created_at != behind.position.created:
                return None
            came_ms = await self._consumers.appended_ms(row, behind.at)
        except QuorumLogError:
            return None
        if came_ms is None:
            return None
        self._came_ms[behind.key] = (*place, came_ms)
        return self._since_s(came_ms)

    def _since_s(self, ms: int) -> float:
        return max(0, self._now_ms() - ms) / 1000


def _state(position: Position, log: _Seen | None) -> State:
    if log is None:
        return "no-such-log"
    if position.created != log.created:
        return "log-replaced"
    return "offset-truncated" if position.offset < log.first_offset else "ok"
