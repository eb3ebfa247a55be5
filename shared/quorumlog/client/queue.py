"""Work queues: workers share a log's records, and each record has one worker at a time."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from quorumlog import errors
from quorumlog.client import checks
from quorumlog.client.records import LogRecord, Paged, record_of
from quorumlog.client.shown import QueueInfo
from quorumlog.client.transport import Transport

_WAIT_S: Final = 30.0
"""How long one claim request waits for records in a loop over jobs."""


@dataclass(frozen=True, slots=True)
class Job:
    """A record that this worker has claimed."""

    record: LogRecord
    attempt: int
    """Number of deliveries of the record, including this one."""
    claim: int
    """The token of the claim, which settles the record."""


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that was not settled. `reason`: `acknowledged` if the record is done (perhaps by an
    earlier attempt of the request); `claim-ended` if another worker may have the record.
    """

    offset: int
    claim: int
    reason: str


class Queue:
    """A handle of a log's work queue."""

    name: str

    def __init__(self, transport: Transport, path: str, name: str) -> None:
        """Use `Log.queue`. `path`: the queue's path in the API."""
        self.name = checks.text("a queue's name", name)
        self._transport, self._path = transport, path

    def __repr__(self) -> str:
        """The class and the name, for log lines."""
        return f"Queue({self.name!r})"

    async def create(
        self,
        *,
        lease_s: float = 30.0,
        max_attempts: int | None = None,
        dead_letter_log: str | None = None,
        order: str = "none",
        max_in_flight: int = 1000,
        start: int | str = "earliest",
    ) -> QueueInfo:
        """Create the queue, or change its settings. A new queue begins with the record at `start`.

        `max_attempts`: deliveries of a record before it moves to `dead_letter_log`, which must
        exist. `order`: with `key`, the records of a key are delivered in order, one at a time.
        Raises: QueueExists if a setting can't be changed; NoSuchLog.
        """
        wanted = {
            "lease_ms": round(checks.seconds("lease_s", lease_s) * 1000),
            "max_attempts": checks.maybe_offset("max_attempts", max_attempts),
            "dead_letter_log": checks.maybe_text("dead_letter_log", dead_letter_log),
            "order": checks.text("order", order),
            "max_in_flight": checks.offset("max_in_flight", max_in_flight),
            "from": start,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return cast("QueueInfo", await self._transport.call("PUT", self._path, given))

    async def info(self) -> QueueInfo:
        """The queue as the API shows it: settings and progress. Raises: NoSuchQueue."""
        return cast("QueueInfo", await self._transport.call("GET", self._path))

    async def delete(self, *, version: int | None = None) -> None:
        """Delete the queue and its progress. Raises: VersionConflict if the settings do not have the
        given `version`; NoSuchQueue.
        """
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        await self._transport.call("DELETE", self._path, headers=headers, is_repeatable=False)

    async def claim(
        self, count: int = 1, *, wait_s: float = 0.0, done: Sequence[Job] = ()
    ) -> list[Job]:
        """Claim up to `count` records, and wait up to `wait_s` while there are none. The request
        first acknowledges the jobs in `done`, but unlike `ack` it does not return refused jobs.

        If the response is lost, the records are delivered again after the lease. Raises: NoSuchQueue.
        """
        wanted = {"max": checks.offset("count", count), "wait_ms": round(wait_s * 1000)}
        body = checks.json_of(wanted | {"ack": _parts(done)})
        answer = await self._transport.request(
            "POST", f"{self._path}/claim", body=body, is_repeatable=True, wait_s=wait_s
        )
        return [
            Job(record_of(one), int(one["attempt"]), int(one["claim"]))
            for one in answer.json()["records"]
        ]

    async def ack(self, *jobs: Job) -> list[RefusedJob]:
        """Acknowledge jobs: no worker gets their records again. Returns the refused jobs."""
        return await self._settle("ack", jobs, {})

    async def nak(self, *jobs: Job, delay_s: float = 0.0, reason: str = "") -> list[RefusedJob]:
        """Return jobs to the queue. Workers may get the records again after `delay_s`. If a record
        has used all its attempts, its dead letter contains `reason`. Returns the refused jobs.
        """
        more = {"delay_ms": round(delay_s * 1000), "reason": reason[:500].replace("\0", "")}
        return await self._settle("nak", jobs, more)

    async def extend(self, *jobs: Job) -> list[RefusedJob]:
        """Extend the claims of jobs to a full lease from now on. Returns the refused jobs."""
        return await self._settle("extend", jobs, {})

    async def redrive(self, count: int = 100) -> int:
        """Append up to `count` dead letters to the log again, oldest first. Returns the number."""
        wanted = {"max": checks.offset("count", count)}
        shown = await self._transport.call("POST", f"{self._path}/redrive", wanted)
        return int(shown["redriven"])

    async def _settle(
        self, how: str, jobs: Iterable[Job], more: Mapping[str, Any]
    ) -> list[RefusedJob]:
        if not (claims := _parts(jobs)):
            return []
        shown = await self._transport.call(
            "POST", f"{self._path}/{how}", {"claims": claims, **more}
        )
        return [
            RefusedJob(int(at), int(one["claim"]), str(one["reason"]))
            for one in shown["refused"]
            for at in one["offsets"]
        ]

    def jobs(self, concurrency: int = 1, *, wait_s: float | None = None) -> Paged[Job]:
        """Yield jobs forever, or until no job arrives for `wait_s`. The loop acknowledges each job when
        it takes the next one, unless the job is settled already. If an exception or `break` ends the
        loop, the current job and the jobs that were claimed ahead return to the queue. Claims are
        extended while the loop runs.

        `concurrency`: how many records are claimed at a time. Each task or thread may run its own
        loop.
        """
        return Paged(self._jobs(Worker(self, concurrency, wait_s)))

    async def _jobs(self, worker: "Worker") -> AsyncGenerator[Sequence[Job], None]:
        try:
            while (job := await worker.next()) is not None:
                yield (job,)
        finally:
            await worker.close()


def _parts(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Group jobs by claim, as the API expects."""
    parts: dict[int, list[int]] = {}
    for job in jobs:
        parts.setdefault(job.claim, []).append(job.record.offset)
    return [{"claim": claim, "offsets": offsets} for claim, offsets in parts.items()]


class Worker:
    """Claims the jobs of one loop, extends their claims, and acknowledges each job when the loop
    takes the next one.
    """

    def __init__(self, queue: Queue, concurrency: int, wait_s: float | None) -> None:
        """`wait_s`: how long to wait for a job; None waits forever."""
        self._queue, self._count = queue, checks.offset("concurrency", concurrency)
        self._wait_s = wait_s
        self._ahead: deque[Job] = deque()
        self._job: Job | None = None
        self._extending: asyncio.Task[None] | None = None

    async def next(self) -> Job | None:
        """Acknowledge the previous job, and return the next one, or None if no job arrives for `wait_s`."""
        done, self._job = [] if self._job is None else [self._job], None
        if self._ahead:
            await self._queue.ack(*done)
        loop = asyncio.get_running_loop()
        end = None if self._wait_s is None else loop.time() + self._wait_s
        while not self._ahead:
            left_s = _WAIT_S if end is None else min(_WAIT_S, end - loop.time())
            claimed = await self._queue.claim(self._count, wait_s=max(left_s, 0.0), done=done)
            self._ahead.extend(claimed)
            done = []
            if not self._ahead and end is not None and loop.time() >= end:
                return None
        if self._extending is None:
            lease_s = (await self._queue.info())["lease_ms"] / 1000
            self._extending = loop.create_task(self._extend(lease_s / 3))
        self._job = self._ahead.popleft()
        return self._job

    async def _extend(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            jobs = [*self._ahead, *(() if self._job is None else (self._job,))]
            with contextlib.suppress(errors.QuorumLogError):  # the next round retries
                lost = {one.offset for one in await self._queue.extend(*jobs)}
                for job in [each for each in self._ahead if each.record.offset in lost]:
                    self._ahead.remove(job)

    async def close(self) -> None:
        """Return the current job, and all jobs that were claimed ahead, to the queue."""
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)
        left = [*(() if self._job is None else (self._job,)), *self._ahead]
        self._job, self._ahead = None, deque()
        with contextlib.suppress(errors.QuorumLogError):  # their leases end by themselves
            await self._queue.nak(*left, reason="the worker has left its loop")
