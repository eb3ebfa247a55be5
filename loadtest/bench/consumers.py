"""The cost of a commit and of an idle consumer, compared with JetStream's durable pull consumers.

Each round measures both systems in turn: one consumer commits one offset after another, then 64 and
1,000 consumers concurrently. A commit is acknowledged when two of three bookies have synced it, and
a double ack of JetStream when two of three servers have (R3, `sync_interval: always`). Both clients
are Python libraries, with one call for each commit. Then quorumlog alone is measured with 10,000
consumers that hold a lease, and that commit once per second, including the metadata service and
Postgres. All clients and servers share one machine and the clone's disk.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures, Meter, Step, for_each, percentiles, repeated
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.jetstream import JetStream
from loadtest.program import Teller
from quorumlog import header
from quorumlog.client import Client

_OURS, _PEER = "quorumlog", "JetStream"
_LOG: Final = "bench"
_RECORDS: Final = 100_000
"""Number of records in the log: more than a single consumer can commit in a round."""
_LEASE_MS: Final = 600_000
_IDLE_LEASE_MS: Final = 30_000
_AT_ONCE: Final = 64
_JSON: Final = {"Content-Type": "application/json"}
_FETCHED_S: Final = {1: 3000.0, 64: 150.0, 1000: 10.0}
"""Messages that a JetStream consumer fetches per second of a round, by the number of consumers."""
_ROLES: Final = ("client", "gateway", "bookies", "metadata", "postgres", "servers")
_KINDS: Final = {
    "gateway": "gateway",
    "bookie": "bookies",
    "metadata": "metadata",
    "postgres": "postgres",
}
_RENEW_S: Final = 10.0
_COMMIT_S: Final = 1.0
_LEAST_S: Final = 10.0
"""Shortest measurement of consumers with periodic requests, in seconds."""


@dataclass(slots=True)
class Ours:
    """A cluster with one gateway, and a log to consume."""

    cluster: Cluster
    session: aiohttp.ClientSession
    seconds: float
    _numbers: int = 0
    _many: dict[str, str] = field(default_factory=dict)
    """Fencing tokens of the consumers with periodic requests, by name."""

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
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            async with Client(*cluster.gateways) as client:
                log = await client.create_log(_LOG)
                for _ in range(_RECORDS // 1000):
                    await log.append(*[b"x"] * 1000)
            yield cls(cluster, session, seconds)

    async def commits(self, count: int) -> Figures:
        """Measure `count` concurrent consumers, each of which commits one offset after another."""
        self._numbers += 1
        names = [f"c{self._numbers}-{number}" for number in range(count)]
        tokens = await self.leases(names, _LEASE_MS)
        steps = [self._step(name, tokens[name]) for name in names]
        figures = await repeated(self._meter(), steps, self.seconds)
        await for_each(names, lambda name: self._forget(name, tokens[name]), _AT_ONCE)
        return figures

    def _step(self, name: str, token: str) -> Step:
        """A step that commits the next offset of a consumer."""
        url, headers = self.url(name), {**_JSON, header.FENCING_TOKEN: token}
        offset = 0

        async def commit() -> None:
            data = b'{"offset":%d}' % offset
            async with self.session.put(url, data=data, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()

        def step() -> Awaitable[None]:
            nonlocal offset
            offset += 1
            return commit()

        return step

    async def leases(self, names: Sequence[str], lease_ms: int) -> dict[str, str]:
        """Acquire leases for new consumers, and return their fencing tokens by name."""
        tokens: dict[str, str] = {}

        async def acquire(name: str) -> None:
            wanted = {"holder": "bench", "lease_ms": lease_ms}
            async with self.session.post(f"{self.url(name)}/lease", json=wanted) as answer:
                reported = await answer.json()
                answer.raise_for_status()
            tokens[name] = str(reported["lease"]["fencing_token"])

        await for_each(names, acquire, _AT_ONCE)
        return tokens

    async def _forget(self, name: str, token: str) -> None:
        headers = {header.FENCING_TOKEN: token}
        async with self.session.delete(f"{self.url(name)}/lease", headers=headers) as answer:
            answer.raise_for_status()
        async with self.session.delete(self.url(name)) as answer:
            answer.raise_for_status()

    def url(self, name: str) -> str:
        """The URL of a consumer."""
        return f"{self.cluster.gateways[0]}/v1/logs/{_LOG}/consumers/{name}"

    def _meter(self) -> Meter:
        """A meter of the current processes of the cluster."""
        pids = {"client": [os.getpid()], **self.cluster.pids(_KINDS)}
        return Meter(pids, families=("postgres",))

    # Measurements of consumers with periodic requests, and without requests.

    async def idle(self) -> Figures:
        """Measure the cluster without any requests."""
        return await self._load(lambda: asyncio.sleep(self.seconds))

    async def open(self, count: int) -> Figures:
        """Measure the memory of the gateway for `count` consumers with a lease."""
        before = self._gateway_mb()
        self._many = await self.leases([f"many-{n}" for n in range(count)], _IDLE_LEASE_MS)
        return {"gateway KB each": (self._gateway_mb() - before) / count * 1e3}

    async def renew(self, connections: int) -> Figures:
        """Measure the load when each consumer renews its lease every ten seconds."""
        return await self._periodic("/lease", lambda: b"", _RENEW_S, connections)

    async def commit(self, connections: int) -> Figures:
        """Measure the load when each consumer commits every second."""
        offset, before = 0, self._gateway_mb()

        def body() -> bytes:
            nonlocal offset
            offset += 1
            return b'{"offset":%d}' % (offset // len(self._many))

        figures = await self._periodic("", body, _COMMIT_S, connections)
        return figures | {"gateway MB more": self._gateway_mb() - before}

    def _gateway_mb(self) -> float:
        return Meter(self.cluster.pids({"gateway": "gateway"})).memory(max)["gateway"]

    async def _periodic(
        self, below: str, body: Callable[[], bytes], every_s: float, connections: int
    ) -> Figures:
        """Send each consumer's request every `every_s` seconds, and measure the load."""
        at = urlsplit(self.cluster.gateways[0])
        heads = [
            (
                f"PUT /v1/logs/{_LOG}/consumers/{name}{below} HTTP/1.1\r\nHost: {at.netloc}\r\n"
                f"Content-Type: application/json\r\n{header.FENCING_TOKEN}: {token}\r\nContent-Length: "
            ).encode()
            for name, token in self._many.items()
        ]
        times_s: list[float] = []
        seconds, began = max(_LEAST_S, self.seconds), clock()

        async def work(number: int) -> None:
            mine = heads[number::connections]
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            beat = every_s / len(mine)
            due = began + beat * number / connections
            while True:
                for head in mine:
                    await asyncio.sleep(max(0.0, due - clock()))
                    if (now := clock()) - began >= seconds:
                        writer.close()
                        return
                    due = max(due + beat, now - beat)  # late requests are skipped
                    data = body()
                    writer.write(b"%b%d\r\n\r\n%b" % (head, len(data), data))
                    status = await _status(reader)
                    assert status == b"200", status
                    times_s.append(clock() - now)

        async def all_work() -> None:
            nonlocal began
            began = clock()
            await asyncio.gather(*map(work, range(connections)))

        figures = await self._load(all_work)
        answers = {f"answer {name}": ms for name, ms in percentiles(times_s).items()}
        return figures | answers | {"requests/s": len(times_s) / figures["s"]}

    async def _load(self, work: Callable[[], Awaitable[None]]) -> Figures:
        """Run `work`, and measure each role's share of a core, and the metadata requests."""
        before = await self._metadata_requests()
        with (meter := self._meter()):
            await work()
        requests = await self._metadata_requests() - before
        return {
            "s": meter.seconds,
            "metadata requests/s": requests / meter.seconds,
            **meter.shares(),
        }

    async def _metadata_requests(self) -> float:
        """The number of requests that the metadata service has received."""
        url = f"{self.cluster.url('metadata-1')}/metrics"
        async with self.cluster.session() as session, session.get(url) as answer:
            answer.raise_for_status()
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "quorumlog_metadata_requests_total"
        )


async def _status(reader: asyncio.StreamReader) -> bytes:
    """Read a response, which must have a Content-Length, and return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
    await reader.readexactly(length)
    return head[9:12]


OPTIONS: Final = {
    "time": TIME,
    "rounds": ROUNDS,
    "counts": ((1, 64, 1000), "numbers of consumers that commit one offset after another"),
    "many": (10_000, "number of consumers that renew leases or commit periodically"),
    "connections": (100, "connections of the periodic consumers"),
    "alone": (False, "measure quorumlog without JetStream"),
}
_COMMITS: Final = ("entries/s", "p50 ms", "p99 ms", *(f"{role} us" for role in (*_ROLES, "all")))
_SHARES: Final = (
    *("requests/s", "answer p50 ms", "answer p99 ms", *(f"{role} %" for role in _ROLES)),
    *("metadata requests/s", "gateway KB each", "gateway MB more", "servers MB"),
)


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan rounds of commits and acks, then consumers with periodic requests and without any."""
    commits = []
    for count in asked.counts:
        commits.append(Work(_OURS, f"{count} commit", Ours.commits, (count,)))
        each = max(10, round(_FETCHED_S.get(count, 10.0) * asked.time))
        if not asked.alone:
            commits.append(Work(_PEER, f"{count} acknowledge", JetStream.acks, (count, each)))
    once = []
    if not asked.alone:
        idle = f"{sum(asked.counts):,} are idle"
        once.append(Work(_PEER, idle, JetStream.idle, is_once=True))
    if asked.many:
        many, over = f"{asked.many:,}", (asked.connections,)
        once += [
            Work(_OURS, "nobody asks", Ours.idle, is_once=True),
            Work(_OURS, f"{many} get a lease", Ours.open, (asked.many,), is_once=True),
            Work(_OURS, f"{many} renew every 10 s", Ours.renew, over, is_once=True),
            Work(_OURS, f"{many} commit every second", Ours.commit, over, is_once=True),
        ]
    goals = [
        Goal(f"{_OURS}: {count} commit", "entries/s", ">=", 1, (f"{_PEER}: {count} acknowledge",))
        for count in asked.counts
    ]
    return Plan(
        [*commits, *once],
        {_OURS: Ours.running, _PEER: JetStream.running},
        (
            Columns("commits and double acks, medians of the rounds", _COMMITS),
            Columns("% of a core", _SHARES),
        ),
        asked.time,
        asked.rounds,
        goals=() if asked.alone else goals,
        may_fail=(_PEER,),
    )
