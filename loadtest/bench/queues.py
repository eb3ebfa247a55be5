"""Claims and acknowledgements of work queues, compared with JetStream's pull consumers.

All workers share one queue, or one durable pull consumer with explicit acks. Each worker repeatedly
claims records and acknowledges them. quorumlog answers an acknowledgement when two of three bookies
have synced it, and JetStream answers a double ack when two of three servers have (R3,
`sync_interval: always`). With JetStream, only the last ack of a batch is a double ack, because the
server handles the acks of a connection in order. Each claim of quorumlog acknowledges the records
of the previous claim in the same request, as the SDK's loop over jobs does. Both clients are Python
libraries, in one process.
"""

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures, Meter, Step, repeated
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.jetstream import JetStream
from loadtest.program import Teller
from quorumlog.client import Client, Job, Log, Queue

_OURS, _PEER = "quorumlog", "JetStream"
_KINDS: Final = {"gateway": "gateway", "bookie": "bookies", "metadata": "metadata"}
_ROLES: Final = ("client", "gateway", "bookies", "servers", "all")
_LOADS: Final = ((1, 1), (64, 100))
"""Loads: the number of workers, and the number of records that a worker claims at once."""
_RATES: Final = {1: 1500.0, 64: 60_000.0}
"""Maximum records per second for which a round is prepared, by the number of workers."""


@dataclass(slots=True)
class Ours:
    """A cluster with one gateway, and a log with a queue."""

    cluster: Cluster
    log: Log
    queue: Queue
    seconds: float
    _left: int = 0
    """How many records of the log are not done."""

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run a cluster until the end of the block."""
        async with AsyncExitStack() as stack:
            data = folder / "cluster"
            data.mkdir()
            cluster = await stack.enter_async_context(
                running(None, bookies=3, gateways=1, data=data)
            )
            client = await stack.enter_async_context(Client(*cluster.gateways))
            log = await client.create_log("bench")
            queue = log.queue("bench")
            await queue.create(max_in_flight=10_000, lease_s=600)
            yield cls(cluster, log, queue, seconds)

    async def work(self, workers: int, count: int) -> Figures:
        """Measure `workers` that each claim and acknowledge `count` records at a time."""
        while self._left < _RATES[workers] * self.seconds:
            await self.log.append(*[b"x"] * 1000)
            self._left += 1000

        pids = {"client": [os.getpid()], **self.cluster.pids(_KINDS)}
        held: list[list[Job]] = [[] for _ in range(workers)]
        steps = [self._step(jobs, count, 2 * workers * count) for jobs in held]
        figures = await repeated(Meter(pids), steps, self.seconds, count=count)
        await self.queue.ack(*(job for jobs in held for job in jobs))
        return figures

    def _step(self, jobs: list[Job], count: int, least: int) -> Step:
        """A worker's step, which acknowledges the worker's last jobs and claims the next ones."""

        async def step() -> None:
            jobs[:] = await self.queue.claim(count, done=jobs)
            assert len(jobs) == count, f"{len(jobs)} records are left"
            self._left -= count

        return lambda: step() if self._left >= least else None


OPTIONS: Final = {
    "time": TIME,
    "rounds": ROUNDS,
    "alone": (False, "measure quorumlog without JetStream"),
}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan rounds of workers that claim and acknowledge records."""
    works, goals = [], []
    for (workers, count), least in zip(_LOADS, (1, 2), strict=True):
        what = f"{workers} workers, {count} at a time"
        works.append(Work(_OURS, what, Ours.work, (workers, count)))
        if not asked.alone:
            each = round(_RATES[workers] * asked.time)
            works.append(Work(_PEER, what, JetStream.work, (workers, count, each)))
            goals.append(Goal(f"{_OURS}: {what}", "entries/s", ">=", least, (f"{_PEER}: {what}",)))
    figures = ("entries/s", "p50 ms", "p99 ms", *(f"{role} us" for role in _ROLES))
    return Plan(
        works,
        {_OURS: Ours.running, _PEER: JetStream.running},
        (Columns("records that were claimed and acknowledged, medians of the rounds", figures),),
        asked.time,
        asked.rounds,
        goals=goals,
        may_fail=(_PEER,),
    )
