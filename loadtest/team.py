"""Processes with workers of queues, which are killed, or suspended beyond their leases."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loadtest import cluster
from loadtest.waiting import until
from loadtest.worked import ANY, ATTEMPTS, KEY, NAMES, Worked, judge_queues, read_journals
from loadtest.working import Task
from quorumlog.client import Client, LogRecord
from quorumlog.errors import QuorumLogError
from services.local.config import ROOT
from services.local.process import Process, Program

_PATIENCE_S: Final = 3600.0
_PASSING: Final = (QuorumLogError,)
_DEAD: Final = "produce.dead"


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """The parameters of the workers of one run."""

    workers: int = 8
    """Number of workers, half of them for each queue; 0: no queues."""
    processes: int = 2
    lease_s: float = 2.0
    every_s: float = 3.0
    """Seconds between the kill or suspension of a process and the next one."""


@dataclass(slots=True)
class Team:
    """All workers of a log's two queues, one of them with the order `key`."""

    plan: TeamPlan
    gateways: Sequence[str]
    log: str
    folder: Path
    say: Callable[[str], None]
    hurt: int = 0
    """How often a process was killed or suspended."""
    _processes: list[Process] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def at_work(self, client: Client) -> AsyncIterator[None]:
        """Run, kill and suspend workers until the block ends. The block must call `settle` last."""
        if not self.plan.workers:
            yield
            return
        log = client.log(self.log)
        await client.create_log(_DEAD)
        lease_s = self.plan.lease_s
        await log.queue(ANY).create(
            lease_s=lease_s, max_attempts=ATTEMPTS, dead_letter_log=_DEAD, max_in_flight=10_000
        )
        await log.queue(KEY).create(lease_s=lease_s, order="key")
        try:
            self._processes = [self._start() for _ in range(self.plan.processes)]
            hurting = asyncio.create_task(self._hurt())
            yield
            hurting.cancel()
            await asyncio.gather(hurting, return_exceptions=True)
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()

    def _start(self) -> Process:
        number = next(self._numbers)
        mine = range(number % self.plan.processes, self.plan.workers, self.plan.processes)
        task = Task(
            tuple(random.sample(self.gateways, len(self.gateways))),
            self.log,
            [NAMES[worker // self.plan.processes % 2] for worker in mine],
            self.folder / f"queue.{number}.journal",
            self.plan.lease_s,
        )
        argv = (sys.executable, "-m", "loadtest.working", task.argument)
        program = Program(f"queue-{number}", argv, env=dict(os.environ), cwd=ROOT)
        return cluster.started(program, self.folder / f"queue.{number}.log")

    async def _hurt(self) -> None:
        """Repeatedly replace a killed process, or suspend a process, perhaps beyond its leases."""
        while True:
            await asyncio.sleep(self.plan.every_s)
            at = random.randrange(len(self._processes))
            process = self._processes[at]
            if random.random() < 0.5:
                process.kill()
                process.wait()
                self._processes[at] = self._start()
            else:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(random.uniform(0.5, 2) * self.plan.lease_s)
                process.send_signal(signal.SIGCONT)
            self.hurt += 1

    async def settle(self, client: Client, end: int) -> None:
        """Wait until all records below `end` are done in both queues."""
        for name in NAMES if self.plan.workers else ():

            async def is_done(name: str = name) -> bool:
                for process in self._processes:
                    assert process.poll() is None, f"a worker ended, see {self.folder}"
                shown = await client.log(self.log).queue(name).info()
                return shown["next"] >= end and not shown["depth"]

            await until(
                is_done, f"all records of the queue {name} are done", _PATIENCE_S, passing=_PASSING
            )

    async def judged(self, client: Client, records: Sequence[LogRecord]) -> Worked:
        """Check both queues, by the journals and the dead-letter log."""
        if not self.plan.workers:
            return Worked()
        journals = read_journals(sorted(self.folder.glob("queue.*.journal")), self.plan.lease_s)
        letters = [
            int(letter.headers["Dead-Letter-Offset"])
            async for letter in client.log(_DEAD).records()
        ]
        worked = judge_queues(journals, [record.key for record in records], letters)
        for name in NAMES:
            shown = await client.log(self.log).queue(name).info()
            if shown["lost"]:
                worked = worked.with_problem(f"the queue {name} counts {shown['lost']} as lost")
        return worked
