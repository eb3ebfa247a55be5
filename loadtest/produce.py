"""`make produce`: numbered records go to a log and through its consumers while all kinds of
processes are killed.

Producers append with retries. Gateways and bookies are killed (SIGKILL) and restarted in turn,
while a reader follows the log. The workers of consumers are processes too (`crowd.py`): the active
one is killed and replaced, or suspended for longer than its lease. So are the workers of two queues
(`team.py`). In the end the log is read back through every gateway. Exit status 0 requires that each
sent record is in the log once, in its producer's order and at the acknowledged offset. The follower
must have seen the same records, and the checks of the consumers (`consumed.py`) and queues
(`worked.py`) must succeed.
"""

import asyncio
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from loadtest.cluster import Cluster, running
from loadtest.consumed import Consumed
from loadtest.crowd import Crowd, CrowdPlan
from loadtest.program import Teller, arguments
from loadtest.stores import Stores, scratch
from loadtest.team import Team, TeamPlan
from loadtest.waiting import until
from loadtest.worked import Worked
from quorumlog.client import Client, LogAppended, LogRecord, Producer, Record
from quorumlog.errors import ExpiredProducer, QuorumLogError

_NAME: Final = "produce"
_PATIENCE_S: Final = 120.0
"""Deadline of one request, including kills and takeovers, after which the producer retries."""
_CAUGHT_UP_S: Final = 300.0
_SHOWN_EVERY_S: Final = 0.5
_KEYS: Final = 200
"""Keys of each producer's records."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of one run."""

    records: int = 100_000
    producers: int = 8
    batch: int = 10
    """Records of one request."""
    every_s: float = 3.0
    """Seconds between the restart of a process and the next kill."""
    down_s: float = 1.0
    pause_s: float = 0.0
    """Pause of each producer between two requests."""
    bookies: int = 4
    gateways: int = 2
    crowd: CrowdPlan = field(default_factory=CrowdPlan)
    team: TeamPlan = field(default_factory=TeamPlan)


@dataclass(slots=True)
class Sent:
    """The records that one producer sends, and their acknowledged offsets."""

    name: str
    count: int
    offsets: dict[int, int] = field(default_factory=dict)
    """The offset of each acknowledged record, by the record's number."""
    duplicates: int = 0
    """Requests that were acknowledged as duplicates."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    records: int
    kills: int
    repeats: int
    lost: int
    duplicated: int
    misplaced: int
    problems: tuple[str, ...]
    replaced: int = 0
    """Workers of consumers that were killed and replaced."""
    consumed: Consumed = field(default_factory=Consumed)
    worked: Worked = field(default_factory=Worked)

    @property
    def is_good(self) -> bool:
        """Whether all records are in place, and consumers and queues processed them correctly."""
        is_there = not (self.lost or self.duplicated or self.misplaced or self.problems)
        return is_there and self.consumed.is_good and self.worked.is_good

    def line(self) -> str:
        """The summary, which is the last line of output."""
        found = self.consumed
        return (
            f"produce: {self.records} records, {self.kills} deaths, {self.replaced} consumers replaced,"
            f" {found.zombies} zombies refused, {self.lost + found.lost} lost,"
            f" {self.duplicated} duplicated, {self.misplaced} misplaced,"
            f" {found.again} processed again (bound {found.bound}), {found.back} commits back"
        )


def value_of(name: str, number: int) -> bytes:
    """The value of a record, which names its producer and its number."""
    return f"{name}:{number}".encode()


def _record(name: str, number: int) -> Record:
    return Record(value_of(name, number), f"{name}:{number % _KEYS}".encode())


async def _settled(producer: Producer, values: Sequence[Record]) -> LogAppended:
    """Retry an append until it is acknowledged. A producer's repeated request is harmless."""
    while True:
        try:
            return await producer.append(*values)
        except ExpiredProducer:
            raise  # a retry can't succeed
        except QuorumLogError as error:
            if not error.retryable and error.outcome != "unknown":
                raise
            await asyncio.sleep(0.1)


async def _produce(urls: Sequence[str], sent: Sent, plan: Plan) -> None:
    async with Client(*urls, deadline_s=_PATIENCE_S) as client:
        producer = client.log(_NAME).producer(sent.name)
        for first in range(0, sent.count, plan.batch):
            numbers = range(first, min(first + plan.batch, sent.count))
            done = await _settled(producer, [_record(sent.name, number) for number in numbers])
            sent.duplicates += done.is_duplicate
            for offset, number in enumerate(numbers, done.first_offset):
                sent.offsets[number] = offset
            await asyncio.sleep(plan.pause_s)


async def _follow(client: Client, seen: list[tuple[int, bytes]]) -> None:
    """Follow the log from its first record on, and continue after errors."""
    while True:
        start = seen[-1][0] + 1 if seen else 0
        try:
            async for record in client.log(_NAME).tail(start):
                seen.append((record.offset, record.value))  # noqa: PERF401
        except QuorumLogError:
            await asyncio.sleep(0.1)


async def kill_in_turn(
    cluster: Cluster, plan: Plan, say: Callable[[str], None], kills: list[str], over: asyncio.Event
) -> None:
    """Kill and restart processes in turn until `over` is set. Returns after the last restart."""
    names = [name for name in cluster.names if name.startswith(("gateway", "bookie"))]
    gateways = [name for name in names if name.startswith("gateway")]
    bookies = [name for name in names if name.startswith("bookie")]
    # Every other victim is a gateway: there are fewer of them, and a log depends on one of them.
    turns = zip(itertools.cycle(gateways), itertools.cycle(bookies), strict=False)
    for name in itertools.chain.from_iterable(turns):
        await asyncio.sleep(plan.every_s)
        if over.is_set():
            return
        await cluster.kill(name)
        kills.append(name)
        say(f"{name} was killed")
        await asyncio.sleep(plan.down_s)
        await cluster.restart(name)


async def _read_back(url: str) -> list[LogRecord]:
    found: list[LogRecord] = []

    async def is_read() -> bool:
        found.clear()
        async with Client(url, deadline_s=_PATIENCE_S) as client:
            found.extend([record async for record in client.log(_NAME).records()])
        return True

    await until(is_read, "the log is read back", _CAUGHT_UP_S, passing=(QuorumLogError,))
    return found


def judge(
    sent: Sequence[Sent],
    found: Sequence[tuple[int, bytes]],
    kills: int,
    problems: Sequence[str] = (),
) -> Result:
    """Compare the acknowledged records with the records that were read back."""
    reported = list(problems)
    if [offset for offset, _ in found] != list(range(len(found))):
        reported.append("offsets are not dense")
    counts = Counter(value for _, value in found)
    at = {value: offset for offset, value in found}
    lost = misplaced = 0
    for one in sent:
        places = []
        for number in range(one.count):
            value = value_of(one.name, number)
            offset = one.offsets.get(number)
            if value not in at:
                lost += 1
            elif at[value] != offset:
                misplaced += 1
            places.append(at.get(value, -1))
        known = [place for place in places if place >= 0]
        if known != sorted(known):
            reported.append(f"{one.name} is out of order")
    strangers = counts.keys() - {
        value_of(one.name, number) for one in sent for number in range(one.count)
    }
    if strangers:
        reported.append(f"{len(strangers)} records were never sent")
    duplicated = sum(count - 1 for count in counts.values())
    repeats = sum(one.duplicates for one in sent)
    return Result(len(found), kills, repeats, lost, duplicated, misplaced, tuple(reported))


Say = Callable[[str], None]
Show = Callable[[int], None]


async def produce(
    plan: Plan,
    *,
    stores: Stores | None = None,
    say: Say = lambda _line: None,
    show: Show = lambda _done: None,
) -> Result:
    """Run a plan on a new cluster. `show` is called with the number of acknowledged records.

    Raises: DeadlineMissed when something hangs.
    """
    with scratch("ql-journals-") as folder:
        async with running(stores, bookies=plan.bookies, gateways=plan.gateways) as cluster:
            crowd = Crowd(plan.crowd, cluster.gateways, _NAME, folder, say)
            team = Team(plan.team, cluster.gateways, _NAME, folder, say)
            return await _run(plan, cluster, crowd, team, say, show)


async def _run(
    plan: Plan, cluster: Cluster, crowd: Crowd, team: Team, say: Say, show: Show
) -> Result:
    urls = cluster.gateways
    sent = [
        Sent(f"p{n}", len(range(n, plan.records, plan.producers))) for n in range(plan.producers)
    ]
    kills: list[str] = []
    seen: list[tuple[int, bytes]] = []
    async with Client(*urls, deadline_s=_PATIENCE_S) as client:
        await client.create_log(_NAME)
        began = time.monotonic()
        follower = asyncio.create_task(_follow(client, seen))
        over = asyncio.Event()
        killer = asyncio.create_task(kill_in_turn(cluster, plan, say, kills, over))
        async with crowd.at_work(client), team.at_work(client):
            async with asyncio.TaskGroup() as group:
                for n, one in enumerate(sent):
                    # Half of the producers begin at each gateway.
                    turned = urls[n % len(urls) :] + urls[: n % len(urls)]
                    group.create_task(_produce(turned, one, plan))
                group.create_task(_notify(sent, plan, show))
            say(f"all were answered after {time.monotonic() - began:.1f} s")
            await team.settle(client, plan.records)
            # The killer is not cancelled: a victim that has not ended yet would count as alive.
            over.set()
            await killer
            await crowd.settle(client, plan.records)
            say(f"all were processed after {time.monotonic() - began:.1f} s")
        await until(lambda: len(seen) >= plan.records, "the follower has seen all", _CAUGHT_UP_S)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
    problems = []
    records = await _read_back(urls[0])
    found = [(record.offset, record.value) for record in records]
    if any([await _read_back(url) != records for url in urls[1:]]):
        problems.append("two gateways read different logs")
    if seen != found:
        problems.append("the follower saw other records than the ones that were read back")
    consumed = crowd.judged([value for _, value in found])
    async with Client(*urls, deadline_s=_PATIENCE_S) as client:
        worked = await team.judged(client, records)
    result = judge(sent, found, len(kills), problems)
    return replace(result, replaced=crowd.replaced, consumed=consumed, worked=worked)


async def _notify(sent: Sequence[Sent], plan: Plan, show: Show) -> None:
    """Show the progress until all records are acknowledged."""
    while (done := sum(len(one.offsets) for one in sent)) < plan.records:
        show(done)
        await asyncio.sleep(_SHOWN_EVERY_S)
    show(done)


def _plan(given: list[str] | None) -> Plan:
    plan, crowd, team = Plan(), CrowdPlan(), TeamPlan()
    options = {
        "records": (plan.records, "records of all producers together"),
        "producers": (plan.producers, "number of producers"),
        "batch": (plan.batch, "records of one request"),
        "every": (plan.every_s, "seconds between a restart and the next kill"),
        "consumers": (crowd.consumers, "number of consumers; at least 1"),
        "workers": (crowd.workers, "workers of each consumer; at least 2"),
        "queue_workers": (
            team.workers,
            "workers of two queues, half of them for each; 0 for no queues",
        ),
        "queue_processes": (team.processes, "processes of these workers"),
    }
    asked = arguments("make produce", __doc__, options, given)
    if asked.consumers < 1 or asked.workers < 2:
        sys.stderr.write(
            "make produce: give at least one consumer, and two workers for each, so that one can take over\n"
        )
        raise SystemExit(2)
    crowd = replace(crowd, consumers=asked.consumers, workers=asked.workers, every_s=asked.every)
    team = replace(team, workers=asked.queue_workers, processes=asked.queue_processes)
    return Plan(asked.records, asked.producers, asked.batch, asked.every, crowd=crowd, team=team)


def main(given: list[str] | None = None) -> int:
    """Run a plan from the command line, and print a summary. Returns 130 after Ctrl-C."""
    plan = _plan(given)
    teller = Teller()
    try:
        with teller:
            show = partial(teller.show, "acknowledged", total=plan.records)
            result = asyncio.run(produce(plan, say=teller.say, show=show))
    except KeyboardInterrupt:
        teller.say("ended before the records were checked")
        return 128 + signal.SIGINT
    for problem in (*result.problems, *result.consumed.problems, *result.worked.problems):
        teller.say(problem)
    teller.say(
        f"{result.repeats} requests were acknowledged as duplicates, {result.consumed.leases} leases"
    )
    sys.stdout.write(f"{result.worked.line()}\n{result.line()}\n")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
