"""A worker of a consumer in its own process, which `make produce` kills, pauses and replaces.

The worker follows the log, writes each record to its journal (`consumed.py`), and commits. A worker
that has lost its lease still sends one more commit, to every gateway, and writes the outcome to its
journal.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import aiohttp

from loadtest.consumed import TAKEN, Journal
from quorumlog import header
from quorumlog.client import Client, Consumer
from quorumlog.errors import UNKNOWN, LeaseLost, QuorumLogError

_PAUSE_S: Final = 0.1
_DEADLINE_S: Final = 30.0
"""Deadline of one request, after which the worker sends it again."""
_INSIST_S: Final = 5.0
_COMMITS: Final = (20, 200)
"""Minimum and maximum commits after which a worker voluntarily releases its lease."""


@dataclass(frozen=True, slots=True)
class Task:
    """The parameters of a worker."""

    gateways: Sequence[str]
    log: str
    consumer: str
    holder: str
    journal: Path
    lease_s: float
    commit_every: int

    @property
    def argument(self) -> str:
        """The task as the only argument of the process."""
        return json.dumps(asdict(self) | {"journal": str(self.journal)})

    @classmethod
    def of(cls, argument: str) -> Self:
        """Parse the argument of the process."""
        reported = json.loads(argument)
        return cls(**reported | {"journal": Path(reported["journal"])})


async def work(task: Task) -> None:
    """Acquire the lease and process records, again and again until the process is killed."""
    async with Client(*task.gateways, deadline_s=_DEADLINE_S) as client:
        journal = Journal(task.journal)
        while True:
            consumer = client.log(task.log).consumer(
                task.consumer, holder=task.holder, lease_s=task.lease_s
            )
            try:
                await _hold(consumer, task, journal)
            except LeaseLost:
                await _insist(consumer, task, journal)
            except QuorumLogError as error:
                _require_temporary(error)
            await asyncio.sleep(_PAUSE_S)


async def _hold(consumer: Consumer, task: Task, journal: Journal) -> None:
    """Hold the lease once, and process records. Raises: LeaseLost."""
    asked_ns = time.monotonic_ns()
    async with consumer:
        journal.held(consumer.fencing_token, asked_ns, consumer.position)
        left = random.randint(*_COMMITS)
        while left > 0:
            try:
                # First commit the records that were processed before an error.
                await _commit(consumer, journal)
                left = await _process(consumer, task, journal, left)
            except LeaseLost:
                raise
            except QuorumLogError as error:
                _require_temporary(error)
                await asyncio.sleep(_PAUSE_S)
    journal.left(consumer.fencing_token)
    await asyncio.sleep(task.lease_s)  # let another worker acquire the lease


async def _process(consumer: Consumer, task: Task, journal: Journal, left: int) -> int:
    """Process records until `left` commits are acknowledged. Returns the remaining commits."""
    async with aclosing(consumer.records().pages()) as pages:
        async for page in pages:
            for at in range(0, len(page), task.commit_every):
                for record in page[at : at + task.commit_every]:
                    if not consumer.is_held:
                        await consumer.check()
                    journal.done(consumer.fencing_token, record.offset, record.value)
                    consumer.taken(record)
                await _commit(consumer, journal)
                left -= 1
            if left <= 0:
                break
    return left


async def _commit(consumer: Consumer, journal: Journal) -> None:
    asked_ns = time.monotonic_ns()
    journal.reported(consumer.fencing_token, asked_ns, await consumer.commit())


async def _insist(consumer: Consumer, task: Task, journal: Journal) -> None:
    """Send a commit without the lease to each gateway, until one rejects or accepts it."""
    token, offset = consumer.fencing_token, max(consumer.position, journal.next)
    path = f"/v1/logs/{task.log}/consumers/{task.consumer}"
    headers = {header.FENCING_TOKEN: str(token)}
    timeout = aiohttp.ClientTimeout(_INSIST_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            for gateway in task.gateways:
                try:
                    async with session.put(
                        gateway + path, json={"offset": offset}, headers=headers
                    ) as answer:
                        reported = await answer.json()
                except (aiohttp.ClientError, TimeoutError, ValueError):
                    continue
                if answer.ok:
                    journal.zombie(token, TAKEN)
                    return
                if not reported["retryable"] and reported["outcome"] != UNKNOWN:
                    journal.zombie(token, reported["code"])
                    return
            await asyncio.sleep(_PAUSE_S)


def _require_temporary(error: QuorumLogError) -> None:
    """Raise the error if a retry would fail with it too."""
    if not error.retryable and error.outcome != UNKNOWN:
        raise error


if __name__ == "__main__":
    asyncio.run(work(Task.of(sys.argv[1])))
