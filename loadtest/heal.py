"""`make heal`: bookies die with their disks under load, every copy is restored, and clients notice
nothing.

Three bookies are killed (SIGKILL) one after the other, and their data deleted. During the second
repair the auditor is killed, during the third one a repair worker. Writers append and readers
compare all the time. Exit status 0 only if every fragment has all of its copies again, no append
failed, and every acknowledged entry was read back.

`--rolling` restarts every bookie in turn instead (ADR 0006): no entry is moved, no append fails.
"""

import asyncio
import contextlib
import itertools
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loadtest.cluster import Cluster, running
from loadtest.program import Teller, arguments
from loadtest.waiting import until
from quorumlog.client import Client, Ledger
from quorumlog.errors import QuorumLogError
from quorumlog.spark.http import Gateways

_BATCH: Final = 10
_ASK_S: Final = 30.0
_PASSING: Final = (QuorumLogError,)
PATIENT: Final = {
    "AUDIT_S": "0.5",
    "ABANDONED_S": "3600",
    "SILENT_S": "3600",
    "IN_RECOVERY_S": "3600",
}
"""Settings with which no slow gateway counts as gone, so that a fenced ledger is a defect."""
_RUN_BYTES: Final = 2 << 20
"""Bytes that each process may send at once beyond the rate limit: one run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of one run."""

    bookies: int = 5
    ledgers: int = 200
    entries: int = 100
    """Entries of each ledger before the first bookie is killed."""
    entry_bytes: int = 500
    writers: int = 10
    pause_s: float = 0.05
    """Pause of each writer between two appends."""
    delay_s: float = 10.0
    bytes_per_s: int = 4 << 20
    heal_s: float = 120.0
    """Deadline for all copies to be restored, after the delay."""
    seed: int = 1


@dataclass(slots=True)
class Book:
    """A ledger and the number of its acknowledged entries."""

    ledger: Ledger
    seed: int
    acknowledged: int = 0

    def payload(self, number: int, size: int) -> bytes:
        """The payload of an entry, which contains the seed, the ledger and the number."""
        text = f"{self.seed}:{self.ledger.ledger_id}:{number} ".encode()
        return (text * (size // len(text) + 1))[:size]


@dataclass(slots=True)
class Load:
    """Writers and a reader, which run until `is_over` is set."""

    plan: Plan
    books: list[Book]
    """All ledgers. The second half of the list stays open for the writers."""
    appends: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    reads: int = 0
    is_over: bool = False

    @property
    def open(self) -> list[Book]:
        """The open ledgers, to which the writers append."""
        return self.books[len(self.books) // 2 :]

    async def append(self, book: Book, count: int = _BATCH) -> None:
        """Append to a ledger. A failure is recorded, and leaves the ledger's end unknown."""
        first = book.acknowledged
        size = self.plan.entry_bytes
        batch = [book.payload(number, size) for number in range(first, first + count)]
        try:
            done = await book.ledger.append_batch(batch)
        except QuorumLogError as error:
            self.failed.append(f"ledger {book.ledger.ledger_id}: {error.code}: {error.detail}")
            return
        self.appends += 1
        book.acknowledged = done.last_entry + 1
        if done.first_entry != first:
            self.wrong.append(f"ledger {book.ledger.ledger_id}: {first} became {done.first_entry}")

    async def write(self, number: int) -> None:
        """Run one writer, which appends to its share of the open ledgers in turn."""
        mine = self.open[number :: self.plan.writers]
        for book in itertools.cycle(mine):
            if self.is_over:
                return
            await self.append(book)
            await asyncio.sleep(self.plan.pause_s)

    async def read(self) -> None:
        """Run a reader that compares random ranges of ledgers with acknowledged entries."""
        chance = random.Random(self.plan.seed)
        while not self.is_over:
            book = chance.choice(self.books)
            if book.acknowledged:
                first = chance.randrange(book.acknowledged)
                await self.compare(book, first, min(first + 50, book.acknowledged) - 1)
            await asyncio.sleep(self.plan.pause_s)

    async def compare(self, book: Book, first: int, last: int) -> None:
        """Read a range of acknowledged entries and note differences."""
        number = first
        ledger_id = book.ledger.ledger_id
        try:
            async for entry in book.ledger.entries(first, last=last):
                if entry.payload != book.payload(number, self.plan.entry_bytes):
                    self.wrong.append(f"ledger {ledger_id}: entry {number} has other bytes")
                number += 1
        except QuorumLogError as error:
            self.wrong.append(f"ledger {ledger_id}: {number} can't be read: {error.code}")
            return
        if number != last + 1:
            self.wrong.append(f"ledger {ledger_id}: the acknowledged entry {number} is missing")
        self.reads += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the writers and a reader until the end of the block."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.writers):
                group.create_task(self.write(number))
            group.create_task(self.read())
            try:
                yield
            finally:
                self.is_over = True


class Healers:
    """Requests to the running processes of autorecovery."""

    def __init__(self, cluster: Cluster) -> None:
        """`cluster` has the URLs of the processes."""
        self._cluster = cluster

    @property
    def names(self) -> list[str]:
        """The names of the running processes of autorecovery."""
        names = [name for name in self._cluster.names if name.startswith("autorecovery")]
        return [name for name in names if self._cluster.is_alive(name)]

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request to one running process."""
        return await self._ask(self.names[0], method, path, body)

    async def _ask(self, name: str, method: str, path: str, body: Any = None) -> Any:
        def send() -> Any:
            url, headers = self._cluster.url(name), self._cluster.headers
            with Gateways(url, deadline_s=_ASK_S, headers=headers) as service:
                answer = service.request(method, path, value=body, is_repeatable=True)
            return answer.json() if answer.body else None

        return await asyncio.to_thread(send)

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """The status of each running process, by name."""
        return {name: await self._ask(name, "GET", "/v1/status") for name in self.names}

    async def auditor(self) -> str | None:
        """The name of the process that is the auditor, or None."""
        for name, status in (await self.statuses()).items():
            if status["auditor"]:
                return name
        return None

    async def copied_bytes(self) -> int:
        """Bytes that the running processes have copied since they started."""
        return sum(status["copied_bytes"] for status in (await self.statuses()).values())


@dataclass(slots=True)
class Rate:
    """Samples of the copied bytes, which show whether copying ever exceeded the rate limit."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)
    """Samples: times of request and answer, and bytes copied so far (-1: no answer)."""

    async def watch(self, healers: Healers) -> None:
        """Take samples until cancelled. When a process dies, a new series begins."""
        while True:
            begun = time.monotonic()
            try:
                copied = await healers.copied_bytes()
            except (QuorumLogError, IndexError):
                copied = -1
            self.samples.append((begun, time.monotonic(), copied))
            await asyncio.sleep(0.25)

    def excess(self, bytes_per_s: int) -> int:
        """The maximum bytes beyond the limit in any period. Each process may exceed the limit by a run."""
        worst = 0
        for series in _series(self.samples):
            for index, (begun, _, before) in enumerate(series):
                for _, ended, after in series[index + 1 :]:
                    allowed = bytes_per_s * (ended - begun) + 2 * _RUN_BYTES
                    worst = max(worst, int(after - before - allowed))
        return worst


def _series(
    samples: list[tuple[float, float, int]],
) -> Iterator[list[tuple[float, float, int]]]:
    series: list[tuple[float, float, int]] = []
    for sample in samples:
        if sample[2] < 0 or (series and sample[2] < series[-1][2]):
            yield series
            series = []
        if sample[2] >= 0:
            series.append(sample)
    yield series


@dataclass(slots=True)
class Story:
    """The messages and results of one run."""

    say: Callable[[str], None]
    healed_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def line(self, plan: Plan, load: Load) -> str:
        """The summary, which is the last line of output."""
        lost = sum(book.acknowledged == 0 for book in load.books) + len(load.wrong)
        return (
            f"heal: {plan.ledgers} ledgers whole after {max(self.healed_s, default=0):.1f} s,"
            f" {load.appends} appends, {len(load.failed)} failed, {lost} lost"
        )


async def filled(plan: Plan, clients: list[Client]) -> Load:
    """Create a load whose ledgers have entries. The first half of the ledgers is closed."""
    books = [
        Book(await clients[number % len(clients)].create_ledger(), plan.seed)
        for number in range(plan.ledgers)
    ]
    load = Load(plan, books)
    for number, book in enumerate(books):
        await load.append(book, plan.entries)
        if number < plan.ledgers // 2:
            await book.ledger.close()
    load.appends = 0
    return load


async def wipe(cluster: Cluster, bookie: str) -> None:
    """Kill a bookie and delete its data."""
    await cluster.kill(bookie)
    await asyncio.to_thread(shutil.rmtree, cluster.data / bookie)


async def until_healed(cluster: Cluster, client: Client, gone: str, deadline_s: float) -> None:
    """Wait until no ledger references the member `gone`, and the repair queue is empty.

    Raises: DeadlineMissed.
    """
    healers = Healers(cluster)

    async def is_healed() -> bool:
        named = [ledger async for ledger in client.ledgers(bookie=gone)]
        queue = (await healers.ask("GET", "/v1/status"))["queue"]
        return not named and queue["items"] == 0

    await until(is_healed, f"no ledger references {gone}", deadline_s, passing=_PASSING)


async def unwhole(cluster: Cluster, load: Load) -> list[str]:
    """Reports of ledgers that lack copies, according to the digests that bookies compute."""
    healers = Healers(cluster)
    found = []
    for book in load.books:
        ledger_id = book.ledger.ledger_id

        async def report(ledger_id: int = ledger_id) -> Any:
            reported = await healers.ask("GET", f"/v1/checks/{ledger_id}")
            return None if reported["silent"] else reported

        reported = await until(report, f"ledger {ledger_id} is checked", 60, passing=_PASSING)
        if not reported["whole"]:
            found.append(str(reported))
    return found


async def heal(
    cluster: Cluster,
    load: Load,
    clients: list[Client],
    story: Story,
    bookie: str,
    *,
    killed: str = "",
) -> None:
    """Kill a bookie, delete its data, and wait until all copies are restored. `killed`: also kill
    the `auditor` or a `worker` during the repair.
    """
    plan, healers = load.plan, Healers(cluster)
    (member,) = [b["id"] for b in await clients[0].bookies() if b["id"].split("@")[0] == bookie]
    await wipe(cluster, bookie)
    begun = time.monotonic()
    story.say(f"{member} is killed and its disk deleted")
    victim = None
    if killed:

        async def is_found() -> bool:
            return any(
                member in reported["lost"] for reported in (await healers.statuses()).values()
            )

        limit_s = plan.delay_s + plan.heal_s
        await until(is_found, f"{member} counts as lost", limit_s, passing=_PASSING)
        auditor = await until(healers.auditor, "there is an auditor", limit_s, passing=_PASSING)
        others = [name for name in healers.names if name != auditor]
        victim = others[0] if killed == "worker" else str(auditor)
        await cluster.kill(victim)
        story.say(f"{victim} ({killed}) is killed during the repair")
    # A new auditor waits for the lease of the previous one, and then for the whole delay again.
    waits = plan.delay_s + 15 if killed == "auditor" else 0
    await until_healed(cluster, clients[0], member, plan.delay_s + waits + plan.heal_s)
    took_s = time.monotonic() - begun - plan.delay_s
    story.healed_s.append(took_s)
    story.say(f"{member} is replaced: {took_s:.1f} s after the delay of {plan.delay_s:g} s")
    if victim is not None:
        await cluster.restart(victim)
    story.problems += await unwhole(cluster, load)


async def settled(cluster: Cluster, load: Load, story: Story) -> None:
    """After the load: append once more to the open ledgers, close them, and read all ledgers."""
    for book in load.open:
        state = (await book.ledger.info())["state"]
        if state != "OPEN":
            story.problems.append(f"ledger {book.ledger.ledger_id} is {state}: it was fenced")
        await load.append(book, 1)
        await book.ledger.close()
    for book in load.books:
        await load.compare(book, 0, book.acknowledged - 1)
    healers = Healers(cluster)

    async def is_empty() -> bool:
        return bool((await healers.ask("GET", "/v1/status"))["queue"]["items"] == 0)

    await until(is_empty, "the queue is empty", load.plan.heal_s, passing=_PASSING)
    story.problems += await unwhole(cluster, load)


@contextlib.asynccontextmanager
async def _cluster(
    plan: Plan, delay_s: float, **settings: Any
) -> AsyncIterator[tuple[Cluster, list[Client]]]:
    """Run a cluster until the end of the block, with a client of each gateway."""
    settings |= {"environment": PATIENT, "lost_bookie_delay_s": delay_s}
    async with running(None, bookies=plan.bookies, gateways=2, **settings) as cluster:
        first, second = cluster.gateways
        async with Client(first) as one, Client(second) as other:
            yield cluster, [one, other]


async def bookies_die(plan: Plan, story: Story) -> Load:
    """Run the variant in which bookies are killed."""
    settings = {"autorecoveries": 2, "auto_fix_cookies": True}
    async with _cluster(plan, plan.delay_s, **settings) as (cluster, clients):
        healers, rate = Healers(cluster), Rate()
        await healers.ask("PATCH", "/v1/settings", {"bytes_per_s": plan.bytes_per_s})
        load = await filled(plan, clients)
        story.say(f"{plan.ledgers} ledgers are filled, half of them are closed")
        watcher = asyncio.create_task(rate.watch(healers))
        async with load.running():
            await heal(cluster, load, clients, story, "bookie-1")
            await cluster.restart("bookie-1")
            story.say("bookie-1 is back with an empty disk, as another incarnation")
            await heal(cluster, load, clients, story, "bookie-2", killed="auditor")
            await heal(cluster, load, clients, story, "bookie-3", killed="worker")
        watcher.cancel()
        await settled(cluster, load, story)
        excess = rate.excess(plan.bytes_per_s)
        if excess > 0:
            story.problems.append(f"{excess} bytes were copied beyond the limit")
    return load


async def roll(
    cluster: Cluster, load: Load, client: Client, story: Story, bookies: Sequence[str]
) -> None:
    """Restart bookies in turn, under load. The first one stays down until it counts as lost."""
    closed = load.books[: len(load.books) // 2]
    before = [await book.ledger.info() for book in closed]
    healers = Healers(cluster)
    for number, bookie in enumerate(bookies):
        seen = load.appends
        await cluster.stop(bookie)
        if number == 0:

            async def is_silent(bookie: str = bookie) -> bool:
                states = {found["id"].split("@")[0]: found for found in await client.bookies()}
                return bool(states[bookie]["state"] == "lost")

            await until(is_silent, f"{bookie} is silent", passing=_PASSING)

        def goes_on(seen: int = seen) -> bool:
            return load.appends > seen + 2 or bool(load.failed)

        await until(goes_on, "appends go on")
        await cluster.restart(bookie)
        items = (await healers.ask("GET", "/v1/repairs"))["repairs"]
        story.problems += [f"{item} would move" for item in items if item["moves"]]
        story.say(f"{bookie} was restarted; {len(items)} repairs are queued for restarted members")
    for book, row in zip(closed, before, strict=True):
        if (await book.ledger.info())["fragments"] != row["fragments"]:
            story.problems.append(f"ledger {book.ledger.ledger_id} was moved")


async def bookies_roll(plan: Plan, story: Story) -> Load:
    """Run the variant in which bookies are only restarted."""
    async with _cluster(plan, 3600) as (cluster, clients):
        load = await filled(plan, clients)
        async with load.running():
            names = [name for name in cluster.names if name.startswith("bookie")]
            await roll(cluster, load, clients[0], story, names)
        began = time.monotonic()
        await settled(cluster, load, story)
        story.healed_s.append(time.monotonic() - began)
    return load


def main() -> None:
    """Run a plan from the command line, and print a summary as the last line."""
    plan = Plan()
    options = {
        "ledgers": (plan.ledgers, "number of ledgers, of which half are closed"),
        "entries": (plan.entries, "entries of each ledger before the first bookie is killed"),
        "delay": (plan.delay_s, "seconds before the entries of a lost bookie are copied"),
        "bytes_per_s": (plan.bytes_per_s, "limit on copied bytes per second"),
        "seed": (plan.seed, "random seed of payloads and reads"),
        "rolling": (False, "restart bookies in turn, and kill none"),
    }
    given = arguments("make heal", __doc__, options)
    plan = Plan(
        ledgers=given.ledgers,
        entries=given.entries,
        delay_s=given.delay,
        bytes_per_s=given.bytes_per_s,
        seed=given.seed,
    )
    teller = Teller()
    story = Story(teller.say)
    load = asyncio.run((bookies_roll if given.rolling else bookies_die)(plan, story))
    problems = [*story.problems, *load.failed, *load.wrong]
    for problem in problems[:20]:
        teller.say(problem)
    teller.say(f"{load.reads} reads were compared")
    print(story.line(plan, load))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
