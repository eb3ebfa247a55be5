"""Workers of consumers as processes, which are killed, or suspended beyond their lease."""

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
from time import monotonic_ns
from typing import Final

from loadtest import cluster
from loadtest.consumed import Consumed, Known, Lease, judge_consumer, read_leases
from loadtest.consuming import Task
from loadtest.waiting import until
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError
from services.local.config import ROOT
from services.local.process import Process, Program

_PATIENCE_S: Final = 300.0
_LOOK_S: Final = 0.5
_PASSING: Final = (QuorumLogError,)


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    """The consumers of one run."""

    consumers: int = 2
    workers: int = 3
    """Workers of each consumer: at least two, so that one can take over."""
    lease_s: float = 2.0
    commit_every: int = 50
    """Maximum records that a worker processes before it commits."""
    every_s: float = 2.0
    """Seconds between the recovery of one worker and the next kill or suspension."""


@dataclass(slots=True)
class _Worker:
    task: Task
    process: Process


@dataclass(slots=True)
class Crowd:
    """All workers of a log's consumers, and the committed offsets that were observed."""

    plan: CrowdPlan
    gateways: Sequence[str]
    log: str
    folder: Path
    say: Callable[[str], None]
    replaced: int = 0
    stopped: int = 0
    problems: list[str] = field(default_factory=list)
    _workers: dict[str, _Worker] = field(default_factory=dict)
    """The running workers by holder."""
    _looks: dict[str, list[Known]] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _dice: random.Random = field(default_factory=random.Random)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _hurting: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def at_work(self, client: Client) -> AsyncIterator[None]:
        """Run, kill and suspend workers until the end of the block, which calls `settle` last."""
        try:
            for name in self.names:
                self._looks[name] = []
                for _ in range(self.plan.workers):
                    self._start(name)
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look(client))
                self._hurting = group.create_task(self._hurt(client))
                yield
                looking.cancel()
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.wait()

    async def settle(self, client: Client, end: int) -> None:
        """End the kills and suspensions, once there was at least one of each. Then wait until every
        consumer has committed all records below the offset `end`.
        """
        assert self._hurting is not None, "the workers must be at work"
        self._over.set()
        await self._hurting
        for name in self.names:

            async def is_there(name: str = name) -> bool:
                self._check_alive()
                return await self._position(client, name) == end

            await until(is_there, f"{name} is at {end}", _PATIENCE_S, passing=_PASSING)

    @property
    def names(self) -> list[str]:
        """The names of the consumers."""
        return [f"consumer-{number}" for number in range(self.plan.consumers)]

    def judged(self, records: Sequence[bytes]) -> Consumed:
        """The result of all consumers, from their workers' journals."""
        total = Consumed(problems=tuple(self.problems))
        for name in self.names:
            leases: list[Lease] = []
            for path in sorted(self.folder.glob(f"{name}.*.journal")):
                leases += read_leases(path)
            every = self.plan.commit_every
            looks = self._looks[name]
            total += judge_consumer(name, leases, looks, records, commit_every=every)
        return total

    # --- workers ---------------------------------------------------------------------------------

    def _start(self, consumer: str) -> None:
        holder = f"{consumer}.{next(self._numbers)}"
        task = Task(
            tuple(self._dice.sample(self.gateways, len(self.gateways))),
            self.log,
            consumer,
            holder,
            self.folder / f"{holder}.journal",
            self.plan.lease_s,
            self.plan.commit_every,
        )
        argv = (sys.executable, "-m", "loadtest.consuming", task.argument)
        program = Program(holder, argv, env=dict(os.environ), cwd=ROOT)
        process = cluster.started(program, self.folder / f"{holder}.log")
        self._workers[holder] = _Worker(task, process)

    def _check_alive(self) -> None:
        """Note workers that ended without being killed as problems, and replace them."""
        for holder, worker in list(self._workers.items()):
            if (status := worker.process.poll()) is not None:
                del self._workers[holder]
                text = (self.folder / f"{holder}.log").read_text(errors="replace")
                self.problems.append(f"{holder} ended with {status}: {text[-500:]}")
                self._start(worker.task.consumer)

    async def _hurt(self, client: Client) -> None:
        """Repeatedly kill a worker, or suspend one beyond its lease; both at least once."""
        while not (self._over.is_set() and self.replaced and self.stopped):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.plan.every_s):
                    await self._over.wait()
            consumer = self._dice.choice(self.names)
            is_kill = self._dice.random() < 0.5 if self.stopped else not self.replaced
            await (self._kill if is_kill else self._stop)(client, consumer)

    async def _kill(self, client: Client, consumer: str) -> None:
        """Kill the active worker (SIGKILL), and start another process in its place."""
        holder, worker = await self._active(client, consumer)
        worker.process.kill()
        await until(lambda: worker.process.poll() is not None, f"{holder} is gone")
        del self._workers[holder]
        self._start(consumer)
        self.replaced += 1
        self.say(f"{holder} was killed")

    async def _stop(self, client: Client, consumer: str) -> None:
        """Suspend the active worker (SIGSTOP) until another one is active, and then resume it."""
        holder, worker = await self._active(client, consumer)
        journal = worker.task.journal
        zombies, ends = _counted(journal)
        worker.process.send_signal(signal.SIGSTOP)
        try:

            async def is_another() -> bool:
                return await self._holder(client, consumer) not in (None, holder)

            await until(is_another, f"{holder} loses its lease", _PATIENCE_S, passing=_PASSING)
        finally:
            worker.process.send_signal(signal.SIGCONT)
        await until(
            lambda: _counted(journal)[1] > ends,
            f"{holder} notices that it has lost its lease",
            _PATIENCE_S,
        )
        # Not counted if the worker was about to release its lease.
        if _counted(journal)[0] > zombies:
            self.stopped += 1
            self.say(f"{holder} was suspended for longer than its lease")

    async def _active(self, client: Client, consumer: str) -> tuple[str, _Worker]:
        """The worker that the API shows as the lease's holder, which may change any time."""

        async def active() -> tuple[str, _Worker] | None:
            self._check_alive()
            holder = await self._holder(client, consumer)
            worker = None if holder is None else self._workers.get(holder)
            return None if worker is None or holder is None else (holder, worker)

        found = await until(active, f"{consumer} has a worker", _PATIENCE_S, passing=_PASSING)
        assert found is not None
        return found

    # --- looks -----------------------------------------------------------------------------------

    async def _holder(self, client: Client, consumer: str) -> str | None:
        lease = (await client.log(self.log).consumer_info(consumer))["lease"]
        return None if lease is None else str(lease["holder"])

    async def _position(self, client: Client, consumer: str) -> int:
        asked_ns = monotonic_ns()
        shown = await client.log(self.log).consumer_info(consumer)
        offset = int(shown["offset"])
        self._looks[consumer].append(Known(asked_ns, monotonic_ns(), offset))
        return offset

    async def _look(self, client: Client) -> None:
        """Observe the committed offsets until cancelled, as a monitor does."""
        while True:
            for name in self.names:
                with contextlib.suppress(*_PASSING):
                    await self._position(client, name)
            await asyncio.sleep(_LOOK_S)


def _counted(journal: Path) -> tuple[int, int]:
    """Count a worker's leases that were lost, and those that have ended in any way."""
    if not journal.exists():
        return 0, 0
    text = journal.read_bytes()
    zombies = text.count(b"\nzombie ")
    return zombies, zombies + text.count(b"\nleft ")
