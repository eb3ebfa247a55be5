"""The goals of a benchmark, and their outcomes in a run.

A goal relative to another system is the ratio of two figures of the same round. The median of the
ratios over the rounds is compared with the bound. So a machine that is slow for a minute affects
both systems.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.bench.measure import Figures

Rounds = Mapping[str, Sequence[Figures]]
"""The figures of each measurement, round by round; empty for a round that failed."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound for a figure: a number, or a multiple of the best figure of other measurements."""

    work: str
    figure: str
    sign: str
    """The comparison with the bound: `<=` or `>=`."""
    bound: float
    beside: tuple[str, ...] = ()
    """Measurements to compare with; the best one is used. If empty, `bound` is absolute."""
    beside_figure: str = ""
    """The figure of these measurements, if it is not `figure`."""
    per: float = 1
    """Divisor of the figure, such as the number of copies."""

    def __str__(self) -> str:
        """The goal as text."""
        beside = f" x {_common(self.beside)}" if self.beside else ""
        return f"{self.sign} {self.bound:g}{beside}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a goal in a run."""

    goal: Goal
    ours: float
    """The median of the goal's figure."""
    theirs: float | None
    """The median of the figure of the other measurements, if any."""
    value: float
    """The value that is compared with the bound: the figure, or the median ratio."""

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached."""
        return (
            self.value <= self.goal.bound
            if self.goal.sign == "<="
            else self.value >= self.goal.bound
        )


def outcome(goal: Goal, rounds: Rounds) -> Outcome | None:
    """Compute the outcome of a goal, or None if one of its figures was not measured."""
    ours = [
        each[goal.figure] / goal.per if each else None for each in rounds.get(goal.work, ())
    ]  # fmt: skip
    if not goal.beside:
        found = [each for each in ours if each is not None]
        return Outcome(goal, m := statistics.median(found), None, m) if found else None
    best = min if goal.sign == "<=" else max
    figure = goal.beside_figure or goal.figure
    peers = [rounds[name] for name in goal.beside if name in rounds]
    pairs = [
        (mine, best(each[figure] for each in beside if each))
        for mine, *beside in zip(ours, *peers, strict=False)
        if mine is not None and any(beside)
    ]
    if not pairs:
        return None
    median = statistics.median
    return Outcome(
        goal,
        median(mine for mine, _ in pairs),
        median(other for _, other in pairs),
        median(mine / other for mine, other in pairs),
    )


def _common(names: Sequence[str]) -> str:
    """A single name as it is; for several names, their common system."""
    system = names[0].partition(":")[0]
    return names[0] if len(names) == 1 else f"the best of {system}"


def _ours(work: str) -> str:
    return f"quorumlog: {work}"


LOAD: Final = _ours("the largest load")
"""The measurement during which memory must not grow."""
FLAT: Final = 1.1
"""Highest growth of memory during the load, as a ratio. Allocators' noise is below a tenth."""
_JETSTREAM: Final = {
    count: (f"JetStream: publish, {count}", f"JetStream: nats bench, {count}")
    for count in (1, 64, 256, 2000)
}
"""JetStream's clients by the number of messages in flight: nats-py, and its own load generator in Go."""
_JETSTREAM_BEST: Final = (
    *(name for names in _JETSTREAM.values() for name in names),
    *(f"JetStream: nats bench {how}" for how in ("4 x 500", "atomic, 4 x 1000", "fast, 1000")),
)
_TAIL: Final = _ours("tail of one reader")
_NATS_READS: Final = tuple(f"JetStream: read in order{how}" for how in ("", ", nats bench"))
_ADD_ENTRY: Final = "BookKeeper: asyncAddEntry, "
_BATCHED: Final = "BookKeeper: read in order, batched"

# Goals relative to a peer use the peer's best client, and were set on 2026-11-30.
GOALS: Final = (
    Goal(_ours("Ledger.append, 1"), "p50 ms", "<=", 0.8, _JETSTREAM[1]),
    Goal(_ours("Ledger.append, 1"), "p50 ms", "<=", 1.3, (f"{_ADD_ENTRY}1",)),
    *(
        Goal(_ours(f"Ledger.append, {count}"), "entries/s", ">=", 2.5, _JETSTREAM[count])
        for count in (64, 256, 2000)
    ),
    Goal(_ours("Ledger.append, 2000"), "entries/s", ">=", 1.3, (f"{_ADD_ENTRY}2000",)),
    Goal(_ours("wrk, 64"), "entries/s", ">=", 0.8, _JETSTREAM[64]),
    Goal(_ours("wrk, 64"), "gateway us", "<=", 70),
    *(
        Goal(_ours(f"{kind} batches of {count}"), "entries/s", ">=", bound, _JETSTREAM_BEST)
        for kind, count, bound in (
            ("JSON", 100, 3.5),
            ("JSON", 1000, 5),
            ("raw", 100, 4),
            ("raw", 1000, 7),
        )
    ),
    Goal(_ours("raw batches of 1000"), "MB/s", ">=", 0.7, ("disk: three writers of 128 KiB",)),
    Goal(_ours("raw batches of 1000"), "gateway ms/MB", "<=", 1.5),
    Goal(_ours("raw batches of 1000"), "servers ms/MB", "<=", 1.0, per=3),
    Goal(_ours("read in order, JSON"), "entries/s", ">=", 2.5, _NATS_READS),
    Goal(_ours("read in order, raw"), "entries/s", ">=", 5, _NATS_READS),
    Goal(_ours("read in order, raw"), "entries/s", ">=", 3, (_BATCHED,)),
    Goal(_ours("raw batches of 1000"), "entries/s", ">=", 4, (f"{_ADD_ENTRY}2000",)),
    Goal(_ours("raw batches of 1000"), "all us", "<=", 0.2, (f"{_ADD_ENTRY}2000",)),
    Goal(_ours("a bookie is killed"), "gap ms", "<=", 1, ("BookKeeper: a bookie is killed",)),
    Goal(_ours("a bookie is killed"), "p99.9 ms", "<=", 1000),
    Goal(_ours("a bookie is killed"), "failed", "<=", 0),
    Goal(_ours("recovery of 100000"), "ms", "<=", 1, ("BookKeeper: recovery of 100000",)),
    Goal(_ours("recovery of 100000"), "ms", "<=", 1000),
    *(
        Goal(LOAD, f"{role} RSS", "<=", FLAT, (LOAD,), f"{role} RSS before")
        for role in ("gateway", "servers")
    ),
    # Compared with the same appends: at 100 appends per second each process sleeps in between, so an
    # append takes longer than in `HTTP, 1`.
    Goal(_TAIL, "p50 ms", "<=", 1.2, (_TAIL,), "append p50 ms"),
    Goal(_ours("10000 open ledgers"), "p99 ms", "<=", 1.3, (_ours("1 open ledger"),)),
)  # fmt: skip
