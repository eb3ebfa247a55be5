"""A process with workers of queues, which `make produce` kills, suspends and replaces.

Each worker claims records and settles them: it acknowledges most records, gives some back, extends
some claims, and exceeds the lease of others. It writes each event to the process's journal
(`worked.py`).
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from loadtest.worked import ANY, KEY
from quorumlog.client import Client, Job, Queue
from quorumlog.errors import UNKNOWN, QuorumLogError

_DEADLINE_S: Final = 30.0
"""Deadline of one request. Afterwards, the worker continues with its next round."""
_PAUSE_S: Final = 0.1
_CLAIM_MAX: Final = {ANY: 100, KEY: 20}
POISON: Final = b"77"
"""The suffix of values of records that no worker of the queue `any` acknowledges."""


@dataclass(frozen=True, slots=True)
class Task:
    """The parameters of a process."""

    gateways: Sequence[str]
    log: str
    queues: Sequence[str]
    """The name of each worker's queue."""
    journal: Path
    lease_s: float

    @property
    def argument(self) -> str:
        """Encode the task as the process's only argument."""
        return json.dumps(asdict(self) | {"journal": str(self.journal)})

    @classmethod
    def of(cls, argument: str) -> Self:
        """Parse the process's argument."""
        reported = json.loads(argument)
        return cls(**reported | {"journal": Path(reported["journal"])})


class Worker:
    """One worker of a queue."""

    def __init__(self, queue: Queue, name: str, journal: Path, lease_s: float) -> None:
        self._queue, self._name, self._lease_s = queue, name, lease_s
        self._file = journal.open("ab", buffering=0)

    async def work(self) -> None:
        """Claim and settle records until the process is killed."""
        while True:
            try:
                await self._round()
            except QuorumLogError as error:
                if not error.retryable and error.outcome != UNKNOWN:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _round(self) -> None:
        asked_ns = time.monotonic_ns()
        jobs = await self._queue.claim(random.randint(1, _CLAIM_MAX[self._name]), wait_s=1.0)
        for token in {job.claim for job in jobs}:
            mine = [(job.record.offset, job.attempt) for job in jobs if job.claim == token]
            self._write("given", token, asked_ns, mine)
        draw = random.random()
        if draw < 0.05:  # late: other workers get some of the records meanwhile
            await asyncio.sleep(random.uniform(0.5, 2) * self._lease_s)
        elif draw < 0.2:
            await asyncio.sleep(self._lease_s / 4)
            await self._extend(jobs)
        back = [job for job in jobs if self._is_refused(job)]
        await self._settle("nak", back)
        done = [job for job in jobs if job not in back]
        await self._settle("ack", done)
        if draw > 0.95:  # a copy of the request, which the queue refuses
            await self._settle("ack", done)

    def _is_refused(self, job: Job) -> bool:
        if self._name == ANY:
            return job.record.value.endswith(POISON)
        return random.random() < 0.01

    async def _extend(self, jobs: Iterable[Job]) -> None:
        asked_ns = time.monotonic_ns()
        refused = {(one.claim, one.offset) for one in await self._queue.extend(*jobs)}
        pairs = {(job.claim, job.record.offset) for job in jobs}
        self._write("extended", "", asked_ns, list(pairs - refused))

    async def _settle(self, how: str, jobs: Sequence[Job]) -> None:
        """Send a settlement. Writes it to the journal before, and the result after the response."""
        asked_ns = time.monotonic_ns()
        pairs = [(job.claim, job.record.offset) for job in jobs]
        self._write("sent", how, asked_ns, pairs)
        settle = self._queue.ack if how == "ack" else self._queue.nak
        refused = {(one.claim, one.offset): one.reason for one in await settle(*jobs)}
        self._write("done", how, asked_ns, [pair for pair in pairs if pair not in refused])
        self._write("refused", how, asked_ns, [(*pair, why) for pair, why in refused.items()])

    def _write(self, *words: object) -> None:
        self._file.write(json.dumps([time.monotonic_ns(), self._name, *words]).encode() + b"\n")


async def work(task: Task) -> None:
    """Run all workers of a process."""
    async with (
        Client(*task.gateways, deadline_s=_DEADLINE_S) as client,
        asyncio.TaskGroup() as all_,
    ):
        for name in task.queues:
            worker = Worker(client.log(task.log).queue(name), name, task.journal, task.lease_s)
            all_.create_task(worker.work())


if __name__ == "__main__":
    asyncio.run(work(Task.of(sys.argv[1])))
