"""Compaction of a log by key: its speed, and its effect on the latency of appends.

Each round fills a log with records of 1 KiB, ten of each key, switches compaction on, and waits
until all closed ledgers were rewritten. The gateway's sweep starts compaction only after up to five
seconds, so the rate is bytes (before compaction) per second of the gateway's CPU, not per elapsed
time. A second measurement appends to another log before and during a compaction.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from loadtest.bench.measure import KIB, Figures, Meter, during, payload_of, percentiles
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.program import Teller
from loadtest.waiting import until
from quorumlog.client import Client, Log, Record

_BATCH: Final = 500
_OF_A_KEY: Final = 10
_LEDGERS: Final = 8
"""Number of closed ledgers of a log that is compacted."""
_DEADLINE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Compacting:
    """A cluster with one gateway that compacts logs."""

    cluster: Cluster
    client: Client
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, _folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run a cluster until the end of the block."""
        async with (
            running(None, bookies=3, gateways=1) as cluster,
            Client(*cluster.gateways) as client,
        ):
            yield cls(cluster, client, seconds)

    @property
    def count(self) -> int:
        """The number of records to compact: fewer for a short trial run."""
        return _LEDGERS * _BATCH * max(1, min(100, round(20 * self.seconds)))

    async def _log(self) -> Log:
        return await self.client.create_log(
            f"compaction-{os.urandom(4).hex()}", roll_bytes=0, merge_below_bytes=0
        )

    async def _filled(self) -> Log:
        log, keys = await self._log(), self.count // _OF_A_KEY
        for begin in range(0, self.count, _BATCH):
            numbers = range(begin, begin + _BATCH)
            await log.append(*[Record(payload_of(KIB), b"key %d" % (n % keys)) for n in numbers])
            if (begin + _BATCH) % (self.count // _LEDGERS) == 0:
                await log.roll()
        return log

    async def _compacted(self, log: Log) -> None:
        """Switch compaction on, and wait until all ledgers that are closed now were replaced."""
        ledgers = (await log.info())["ledgers"]
        old = {one["ledger_id"] for one in ledgers if one["last_offset"] is not None}
        await log.change(cleanup_policy="compact", max_dirty_percent=0)

        async def is_done() -> bool:
            now = (await log.info())["ledgers"]
            return not old & {one["ledger_id"] for one in now}

        await until(is_done, "the log is compacted", _DEADLINE_S)

    async def compact(self) -> Figures:
        """Measure one compaction."""
        log = await self._filled()
        meter = Meter({"gateway": [self.cluster.pid("gateway-1")]})
        with meter:
            await self._compacted(log)
        megabytes = self.count * KIB / 1e6
        return {"MB": megabytes, "MB/s of a core": megabytes / meter.cpu_s["gateway"]}

    async def append(self) -> Figures:
        """Measure appends to another log, alone and during a compaction."""
        other, log = await self._log(), await self._filled()
        alone = percentiles([await self._append(other) for _ in during(self.seconds)])
        compaction = asyncio.ensure_future(self._compacted(log))
        meanwhile = [await self._append(other)]
        while not compaction.done():
            meanwhile.append(await self._append(other))
        await compaction
        found = percentiles(meanwhile)
        return {f"alone {name}": value for name, value in alone.items()} | {
            f"compacting {name}": value for name, value in found.items()
        }

    async def _append(self, log: Log) -> float:
        began = asyncio.get_running_loop().time()
        await log.append(payload_of(KIB))
        return asyncio.get_running_loop().time() - began


OPTIONS: Final = {"time": TIME, "rounds": ROUNDS}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan a compaction by itself, and one under appends."""
    works = [
        Work("quorumlog", "compact a log", Compacting.compact),
        Work("quorumlog", "append while another log is compacted", Compacting.append),
    ]
    starts = {"quorumlog": Compacting.running}
    return Plan(works, starts, (Columns("medians of the rounds"),), asked.time, asked.rounds)
