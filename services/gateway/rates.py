"""Rates of requests and appends over the last hour. Each gateway samples its own counters.

A gateway collects the rates of all gateways when a client requests them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Never

from quorumlog.errors import QuorumLogError
from quorumlog.net.timers import time_text, wall_s
from quorumlog.protocol.metadata import Writer
from services.gateway.engine import Engine

INTERVAL_S: Final = 15
SAMPLES_MAX: Final = 240
"""An hour."""
_PEER_S: Final = 2.0


class Counts(NamedTuple):
    """Totals since the process started. `errors` are responses of status 500 or higher. `append_s`
    is the total latency of append requests.
    """

    requests: float = 0
    errors: float = 0
    appends: float = 0
    append_s: float = 0
    reads: float = 0
    records: float = 0
    append_bytes: float = 0


NAMES: Final = tuple(name.replace("append_s", "append_ms") for name in Counts._fields)
Sample = tuple[float | None, ...]
"""Rates per second in one interval, in the order of NAMES. None: unknown, or no appends to time."""
UNKNOWN: Final[Sample] = (None,) * len(NAMES)


class Rates:
    """Samples this gateway's rates (`run`), and collects the rates of all gateways."""

    def __init__(self, engine: Engine, read: Callable[[], Counts]) -> None:
        """`read` returns the current counts. All counts must still be 0."""
        self._engine, self._read = engine, read
        self._samples = deque([UNKNOWN] * SAMPLES_MAX, SAMPLES_MAX)
        self._last = Counts()
        self._awake_s, self._ends_s = time.monotonic(), wall_s()

    async def run(self) -> Never:
        """Take a sample at each multiple of 15 s, so that all gateways sample at the same times."""
        while True:
            await asyncio.sleep(INTERVAL_S - wall_s() % INTERVAL_S)
            self.sample(time.monotonic(), wall_s())

    def sample(self, monotonic_s: float, wall_s: float) -> None:
        """Add the rates since the last sample. If the process or its machine was suspended, the
        missed intervals and the current interval are unknown.
        """
        elapsed_s = monotonic_s - self._awake_s
        if elapsed_s < INTERVAL_S / 2:
            return  # the timer fired a little early, or the process has just started
        counts = self._read()
        # The monotonic clock stands still while the machine is suspended.
        count = round(max(elapsed_s, wall_s - self._ends_s) / INTERVAL_S)
        if count > 1:
            self._samples.extend([UNKNOWN] * min(count, SAMPLES_MAX))
        else:
            done = Counts(*(new - old for old, new in zip(self._last, counts, strict=True)))
            self._samples.append(_sample(done, elapsed_s))
        self._last, self._awake_s, self._ends_s = counts, monotonic_s, wall_s

    def own(self) -> dict[str, Any]:
        """This gateway's series, by name."""
        me, columns = self._engine.writer, zip(*self._samples, strict=True)
        series = dict(zip(NAMES, map(list, columns), strict=True))
        return {"id": me.id, "url": me.url, "series": series}

    async def collected(self) -> dict[str, Any]:
        """The series of all gateways and their total. Raises: MetadataUnavailable."""
        peers = [one for one in await self._engine.gateways() if one.id != self._engine.writer.id]
        found = await asyncio.gather(*map(self._ask, peers))
        gateways = [self.own(), *(one for one in found if one is not None)]
        return {
            "interval_s": INTERVAL_S,
            "ends_at": time_text(self._ends_s),
            "gateways": gateways,
            "missing": [peer.url for peer, one in zip(peers, found, strict=True) if one is None],
            "total": _total([one["series"] for one in gateways]),
        }

    async def _ask(self, peer: Writer) -> dict[str, Any] | None:
        try:
            return await self._engine.peers.ask(peer, "GET", "/rates", _PEER_S)
        except (QuorumLogError, TimeoutError):
            return None


def _sample(done: Counts, elapsed_s: float) -> Sample:
    """Convert the counts of an interval to rates."""
    latency_ms = round(1000 * done.append_s / done.appends, 3) if done.appends else None
    rates = zip(NAMES, done, strict=True)
    return tuple(
        latency_ms if name == "append_ms" else round(n / elapsed_s, 3) for name, n in rates
    )


def _total(found: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, list[float | None]]:
    """Add up the series of gateways. The total latency is the mean over all appends."""
    spent = [
        [None if ms is None or n is None else ms * n for ms, n in zip(*pair, strict=False)]
        for pair in ((one["append_ms"], one["appends"]) for one in found)
    ]
    total = {name: _sums([one[name] for one in found]) for name in NAMES}
    weighted = zip(_sums(spent), total["appends"], strict=True)
    total["append_ms"] = [round(ms / n, 3) if ms is not None and n else None for ms, n in weighted]
    return total


def _sums(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    known = ([one for one in column if one is not None] for column in zip(*rows, strict=False))
    return [round(sum(column), 3) if column else None for column in known]
