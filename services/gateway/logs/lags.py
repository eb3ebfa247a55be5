"""How far consumers are behind, for metrics. The owner of the positions' log measures it with each sweep; a scrape reads
what was measured last, and asks nobody.

A measurement appends nothing, and reads no row that the sweep has not read anyway (but one, where there are more consumers
than are shown by name). Positions are in the keeper's memory; the ends of logs come from their owners, by one request to
each gateway for a thousand logs; the time at which a record came is read from its entry, once for each record that a
consumer stands at.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata, LogState
from quorumlog.protocol.positions import Key, Position
from quorumlog.wire.position_bodies import POSITIONS_LOG
from services.gateway.logs.consumers import Consumers, StateOf
from services.gateway.logs.ownership import Ownership
from services.gateway.logs.positions import PositionService
from services.gateway.logs.store import MetadataLogs
from services.gateway.logs.views import LogViews, head_to_ask

CONSUMERS_SHOWN_MAX: Final = 100
"""Consumers whose lag has labels of their own: the first ones that this gateway knows of. Metrics must have a bounded
number of labels, whatever names clients give (taste)."""

OTHER_CONSUMERS: Final = "_other"
"""Log and consumer of the one that is most records behind among those beyond. No log has this name."""

_HEADS: Final = 1000
"""Logs of one request for ends."""
_AT_ONCE: Final = 16
"""Entries that are read at once."""

State = StateOf | Literal["no-such-log"]


@dataclass(frozen=True, slots=True)
class ShownLag:
    """What one consumer has not processed; `seconds`: the age of the first record, None where it can't be read now."""

    log: str
    consumer: str
    records: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The lags at one time."""

    lags: Sequence[ShownLag]
    states: Mapping[State, int]
    """How many consumers are in each state."""
    at_s: float
    """By the clock of the event loop."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a row says that is needed of each log."""

    created: str
    first_offset: int
    end: int | None
    head: LogHead | None
    """Of a log whose owner knows the end."""


@dataclass(slots=True)
class _Round:
    """What a sweep has seen so far."""

    wanted: frozenset[str]
    """The logs that have consumers."""
    logs: dict[str, _Seen] = field(default_factory=dict)
    rows: dict[str, LogMetadata] = field(default_factory=dict)
    """Of the logs of consumers that are shown by name."""
    has_no_owner: bool = False
    """Whether nobody owns the log of positions: it is sealed."""


@dataclass(frozen=True, slots=True)
class _Behind:
    position: Position
    at: int
    records: int

    @property
    def key(self) -> Key:
        return self.position.key


class Lags:
    """The lag of consumers, in this gateway; nothing while it does not own their positions."""

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
        """`now_ms`: the clock of append times."""
        self._store, self._ownership, self._views = store, ownership, views
        self._positions, self._consumers, self._now_ms = positions, consumers, now_ms
        self._measured: Measured | None = None
        self._named: dict[Key, None] = {}
        self._stranded: frozenset[Key] = frozenset()
        """Consumers of logs that are no more: they have no lag, and take no place of a label."""
        self._ends: dict[str, tuple[str, int]] = {}
        """Creation and last known end of logs: one whose owner does not answer has it for the time being."""
        self._came_ms: dict[Key, tuple[str, int, int]] = {}
        """Of consumers that are shown: creation, offset, and when that record came."""
        self._round = _Round(frozenset())
        self._task: asyncio.Task[None] | None = None

    @property
    def measured(self) -> Measured | None:
        """What was measured last; None: this gateway does not own the positions, or has not measured yet."""
        return self._measured if self._is_owner else None

    @property
    def _is_owner(self) -> bool:
        return self._ownership.owner(POSITIONS_LOG) is not None

    # --- the sweep -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A sweep over all rows begins."""
        if not self._is_owner:
            self._measured = None
            self._round = _Round(frozenset())
            return
        kept = self._positions.kept
        self._named = {
            key: None for key in self._named if key in kept and key not in self._stranded
        }
        if len(self._named) < min(CONSUMERS_SHOWN_MAX, len(kept)):
            free = (key for key in sorted(kept) if key not in self._stranded)
            for key in free:
                if len(self._named) >= CONSUMERS_SHOWN_MAX:
                    break
                self._named[key] = None
        self._round = _Round(frozenset(log for log, _ in kept))

    def see(self, rows: Sequence[LogMetadata]) -> None:
        """Some rows of the sweep, as the primary has them."""
        named = {log for log, _ in self._named}
        for row in rows:
            if row.name in self._round.wanted:
                seen = _Seen(row.created_at, row.first_offset, row.end_offset, head_to_ask(row))
                self._round.logs[row.name] = seen
                if row.name in named:
                    self._round.rows[row.name] = row
            elif row.name == POSITIONS_LOG:
                is_sealed = row.state is LogState.OPEN and not row.unsealed
                self._round.has_no_owner = is_sealed and not self._is_owner

    def end(self) -> None:
        """The sweep has seen all rows: measure, in the background, unless that is still going on."""
        if not (self._is_owner or self._round.has_no_owner):
            return
        if self._task is None or self._task.done():
            self._task = self._ownership.task(self._measure(self._round))

    # --- the measurement -------------------------------------------------------------------------

    async def _measure(self, seen: _Round) -> None:
        if seen.has_no_owner:
            # After a restart nobody may ask for a position for long, and a worker that is gone must show.
            with contextlib.suppress(QuorumLogError):
                await self._positions.page(POSITIONS_LOG, after="", limit=1)
            return
        if not self._is_owner:
            return
        await self._learn_ends(seen)
        states: Counter[State] = Counter()
        named: list[_Behind] = []
        worst: _Behind | None = None
        stranded: set[Key] = set()
        for key, position in list(self._positions.kept.items()):
            if position.log not in seen.wanted:
                continue  # it was made since the sweep began
            log = seen.logs.get(position.log)
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
        lags = await asyncio.gather(*(self._shown(behind, seen, room) for behind in named))
        if worst is not None:
            with contextlib.suppress(QuorumLogError):
                if worst.records:
                    seen.rows[worst.position.log] = await self._store.get(worst.position.log)
            other = await self._shown(worst, seen, room)
            lags.append(replace(other, log=OTHER_CONSUMERS, consumer=OTHER_CONSUMERS))
        self._came_ms = {key: came for key, came in self._came_ms.items() if key in self._named}
        self._measured = Measured(lags, states, asyncio.get_running_loop().time())

    async def _learn_ends(self, seen: _Round) -> None:
        """Where the logs end, as well as that is known; read after the rows, so that no end is too low for its row."""
        heads = [log.head for log in seen.logs.values() if log.head is not None]
        known = {
            name: (log.created, log.end) for name, log in seen.logs.items() if log.end is not None
        }
        for at in range(0, len(heads), _HEADS):
            for name, (end, _) in (await self._views.ends(heads[at : at + _HEADS])).items():
                known[name] = seen.logs[name].created, end
        self._ends = {
            name: ended for name, ended in self._ends.items() if name in seen.logs
        } | known

    def _behind(self, position: Position, log: _Seen | None) -> _Behind | None:
        """What lies before a consumer; None of another log than the one of this name now, or where nobody says its end."""
        created, end = self._ends.get(position.log, ("", 0))
        if log is None or not position.created == log.created == created:
            return None
        at = max(position.offset, log.first_offset)
        return _Behind(position, at, max(0, end - at))

    async def _shown(self, behind: _Behind, seen: _Round, room: asyncio.Semaphore) -> ShownLag:
        seconds: float | None = 0.0
        if behind.records:
            row = seen.rows.get(behind.position.log)
            async with room:
                seconds = await self._age_s(behind, row)
        return ShownLag(behind.position.log, behind.position.consumer, behind.records, seconds)

    async def _age_s(self, behind: _Behind, row: LogMetadata | None) -> float | None:
        """How long ago the first record came that is not processed."""
        place = (behind.position.created, behind.at)
        known = self._came_ms.get(behind.key)
        if known is not None and known[:2] == place:
            return self._since_s(known[2])
        if row is None or row.created_at != behind.position.created:
            return None
        try:
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
