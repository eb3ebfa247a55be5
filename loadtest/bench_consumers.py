"""`make bench-consumers`: what a commit and an idle consumer cost, beside JetStream's durable pull consumers.

In rounds by turns: one consumer commits one position after another, then 64 and 1,000 consumers at once. A commit is
answered once it is synced by two of three bookies; a double ack of JetStream once it is synced by two of three servers
(R3, `sync_interval: always`). Both clients are libraries in Python, one call for each commit. Then, of ours alone: what
10,000 consumers cost that hold a lease, and that commit once a second, with what the metadata service and Postgres do
meanwhile. All of it, clients and servers, shares one machine and the disk that the clone is on.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter as clock
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.bench.measure import Figures, Meter, Pids, Step, percentiles, repeated
from loadtest.bench.report import facts
from loadtest.cluster import Cluster, running
from loadtest.jetstream import JetStream
from quorumlog import header
from quorumlog.client import Client
from services.local.config import ROOT

_LOG: Final = "bench"
_RECORDS: Final = 100_000
"""More than one consumer commits in a round."""
_LEASE_MS: Final = 600_000
_IDLE_LEASE_MS: Final = 30_000
_AT_ONCE: Final = 64
_JSON: Final = {"Content-Type": "application/json"}
_COUNTS: Final = (1, 64, 1000)
_FETCHED_S: Final = {1: 3000.0, 64: 150.0, 1000: 10.0}
"""Messages that a consumer of JetStream fetches for each second of a round."""
_ROLES: Final = ("client", "gateway", "bookies", "metadata", "postgres", "servers")


@dataclass(slots=True)
class Ours:
    """A cluster with one gateway, and a log to consume."""

    cluster: Cluster
    session: aiohttp.ClientSession
    seconds: float
    _numbers: int = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run one until the end of the block."""
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
        """So many consumers, each of which commits one position after another."""
        self._numbers += 1
        names = [f"c{self._numbers}-{number}" for number in range(count)]
        tokens = await self.leases(names, _LEASE_MS)
        steps = [self._step(name, tokens[name]) for name in names]
        figures = await repeated(Meter(self.pids), steps, self.seconds)
        await self._at_once(lambda name: self._forget(name, tokens[name]), names)
        return figures

    def _step(self, name: str, token: str) -> Step:
        """Commit the next offset."""
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

    async def leases(self, names: Sequence[str], lease_ms: int) -> Mapping[str, str]:
        """Fencing tokens of leases of new consumers, by name."""
        tokens: dict[str, str] = {}

        async def acquire(name: str) -> None:
            wanted = {"holder": "bench", "lease_ms": lease_ms}
            async with self.session.post(f"{self.url(name)}/lease", json=wanted) as answer:
                told = await answer.json()
                answer.raise_for_status()
            tokens[name] = str(told["lease"]["fencing_token"])

        await self._at_once(acquire, names)
        return tokens

    async def _forget(self, name: str, token: str) -> None:
        headers = {header.FENCING_TOKEN: token}
        async with self.session.delete(f"{self.url(name)}/lease", headers=headers) as answer:
            answer.raise_for_status()
        async with self.session.delete(self.url(name)) as answer:
            answer.raise_for_status()

    async def _at_once(self, ask: Callable[[str], Awaitable[None]], names: Sequence[str]) -> None:
        left = iter(names)

        async def work() -> None:
            for name in left:
                await ask(name)

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))

    def url(self, name: str) -> str:
        """Of a consumer."""
        return f"{self.cluster.gateways[0]}/v1/logs/{_LOG}/consumers/{name}"

    @property
    def pids(self) -> Pids:
        """The processes by role, as of now."""
        cluster = self.cluster
        pids: dict[str, list[int]] = {"client": [os.getpid()]}
        for name in cluster.names:
            role = {"bookie": "bookies"}.get(kind := name.partition("-")[0], kind)
            if role in _ROLES:
                pids.setdefault(role, []).append(cluster.pid(name))
        own = psutil.Process(cluster.pid("postgres"))
        pids["postgres"] = [own.pid, *(child.pid for child in own.children(recursive=True))]
        return pids

    async def metadata_requests(self) -> float:
        """How many requests the metadata service has had."""
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


class _Connection(asyncio.Protocol):
    """HTTP/1.1 for load: one request after another, whose answer has a length."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiter: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error or ConnectionResetError())

    def close(self) -> None:
        """No request follows."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator or self._waiter is None:
            return
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
        if len(body) >= length:
            waiter, self._waiter = self._waiter, None
            self._buffer.clear()
            waiter.set_result(bytes(head[9:12]))

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        """Send a request; its status."""
        assert self._transport is not None, "it is connected"
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._waiter


@dataclass(slots=True)
class Load:
    """What some seconds with 10,000 consumers cost: seconds of CPU by role, for each second."""

    rate: float
    shares: Mapping[str, float]
    metadata_rate: float
    """Requests to the metadata service in a second."""
    times: Figures = field(default_factory=dict)

    def __str__(self) -> str:
        """For people."""
        shares = ", ".join(f"{role} {100 * share:.1f} %" for role, share in self.shares.items())
        times = "".join(
            f", {name.removesuffix(' ms')} {ms:.0f} ms" for name, ms in self.times.items()
        )
        return (
            f"{self.rate:,.0f} requests/s{times}; of a core: {shares};"
            f" {self.metadata_rate:.1f} requests/s to metadata"
        )


class Crowd:
    """Many consumers that ask periodically, over few connections."""

    def __init__(self, ours: Ours, tokens: Mapping[str, str], connections: int) -> None:
        self._ours, self._tokens, self._connections = ours, tokens, connections

    async def renew(self, every_s: float, seconds: float) -> Load:
        """Each renews its lease so often."""
        return await self._load("PUT", "/lease", lambda: b"", every_s, seconds)

    async def commit(self, every_s: float, seconds: float) -> Load:
        """Each commits so often."""
        offset = 0

        def body() -> bytes:
            nonlocal offset
            offset += 1
            return b'{"offset":%d}' % (offset // len(self._tokens))

        return await self._load("PUT", "", body, every_s, seconds)

    async def _load(
        self, method: str, below: str, body: Callable[[], bytes], every_s: float, seconds: float
    ) -> Load:
        at = urlsplit(self._ours.cluster.gateways[0])
        host, port = at.hostname, at.port
        assert host is not None
        assert port is not None
        heads = [
            (
                f"{method} /v1/logs/{_LOG}/consumers/{name}{below} HTTP/1.1\r\nHost: {at.netloc}\r\n"
                f"Content-Type: application/json\r\n{header.FENCING_TOKEN}: {token}\r\nContent-Length: "
            ).encode()
            for name, token in self._tokens.items()
        ]
        times_s: list[float] = []
        began = clock()

        async def work(number: int) -> None:
            mine = heads[number :: self._connections]
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, host, port
            )
            beat = every_s / len(mine)
            due = began + beat * number / self._connections
            while True:
                for head in mine:
                    await asyncio.sleep(max(0.0, due - clock()))
                    if (now := clock()) - began >= seconds:
                        connection.close()
                        return
                    due = max(due + beat, now - beat)  # what is late is not made up for
                    data = body()
                    status = await connection.ask(b"%b%d\r\n\r\n%b" % (head, len(data), data))
                    assert status == b"200", status
                    times_s.append(clock() - now)

        before = await self._ours.metadata_requests()
        with (meter := Meter(self._ours.pids)):
            await asyncio.gather(*(work(number) for number in range(self._connections)))
        after = await self._ours.metadata_requests()
        return _load_of(len(times_s), meter, after - before, percentiles(times_s))


def _load_of(count: int, meter: Meter, metadata: float, times: Figures) -> Load:
    shares = {role: taken / meter.seconds for role, taken in meter.cpu_s.items()}
    shown = {name: ms for name, ms in times.items() if name in ("p50 ms", "p99 ms")}
    return Load(count / meter.seconds, shares, metadata / meter.seconds, shown)


async def _many(ours: Ours, count: int, connections: int, seconds: float) -> None:
    """What so many consumers cost, idle and at work."""
    before = await ours.metadata_requests()
    with (meter := Meter(ours.pids)):
        await asyncio.sleep(seconds)
    after = await ours.metadata_requests()
    _say(f"without: {_load_of(0, meter, after - before, {})}")
    gateway = psutil.Process(ours.cluster.pid("gateway-1"))
    rss = gateway.memory_info().rss
    tokens = await ours.leases([f"many-{number}" for number in range(count)], _IDLE_LEASE_MS)
    each = (gateway.memory_info().rss - rss) / count
    _say(f"{count:,} consumers: {each / 1e3:.2f} KB of the gateway each")
    crowd = Crowd(ours, tokens, connections)
    _say(f"each renews its lease every 10 s: {await crowd.renew(10, max(10.0, seconds))}")
    rss = gateway.memory_info().rss
    _say(f"each commits every second: {await crowd.commit(1, max(10.0, seconds))}")
    _say(f"{(gateway.memory_info().rss - rss) / 1e6:.1f} MB more in the gateway")


async def _rounds(
    ours: Ours, peer: JetStream | None, counts: Sequence[int], rounds: int, seconds: float
) -> Mapping[str, Sequence[Figures]]:
    found: dict[str, list[Figures]] = {}
    for number in range(rounds):
        for count in counts:
            works: list[tuple[str, Callable[[], Awaitable[Figures]]]] = [
                (f"quorumlog, {count}", lambda count=count: ours.commits(count))  # type: ignore[misc]
            ]
            if peer is not None:
                each = max(10, round(_FETCHED_S.get(count, 10.0) * seconds))
                works.append((f"JetStream, {count}", lambda c=count, e=each: peer.acks(c, e)))  # type: ignore[misc]
            for name, work in works:
                try:
                    figures = await work()
                except Exception as error:
                    if not name.startswith("JetStream"):
                        raise
                    _say(f"round {number + 1}: {name} failed: {error!r} {error}")
                    continue
                found.setdefault(name, []).append(figures)
                _say(f"round {number + 1}: {name}: {_line(figures)}")
    return found


def _line(figures: Mapping[str, float]) -> str:
    roles = [role for role in _ROLES if f"{role} us" in figures]
    spent = ", ".join(f"{role} {figures[f'{role} us']:.0f}" for role in roles)
    return (
        f"{figures['entries/s']:,.0f} commits/s, p50 {figures['p50 ms']:.2f} ms, p99 {figures['p99 ms']:.2f} ms;"
        f" CPU, us a commit: {spent}, all {figures['all us']:.0f}"
    )


def _medians(rounds: Sequence[Figures]) -> Mapping[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _conclude(found: Mapping[str, Sequence[Figures]], counts: Sequence[int]) -> None:
    for name, rounds in found.items():
        _say(f"median: {name}: {_line(_medians(rounds))}")
    for count in counts:
        mine, peers = found.get(f"quorumlog, {count}", ()), found.get(f"JetStream, {count}", ())
        pairs = list(zip(mine, peers, strict=False))
        if pairs:
            ratio = statistics.median(a["entries/s"] / b["entries/s"] for a, b in pairs)
            word = "reached" if ratio >= 1 else "not reached"
            _say(
                f"bench-consumers: {count} consumers: {ratio:.2f} x JetStream's commits/s: goal >= 1 {word}"
            )


async def run(asked: argparse.Namespace, folder: Path) -> Mapping[str, Sequence[Figures]]:
    """Measure."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(Ours.running(folder, asked.time))
        peer = None
        if not asked.alone:
            peer = await stack.enter_async_context(JetStream.running(folder, asked.time))
        found = await _rounds(ours, peer, asked.counts, asked.rounds, asked.time)
        if peer is not None:
            idle = await peer.idle()
            share = idle["servers us"] / 1e6 / asked.time
            _say(f"JetStream, {sum(asked.counts):,} idle consumers: {100 * share:.1f} % of a core,"
                 f" {idle['servers RSS']:.0f} MB the largest server")  # fmt: skip
        if asked.many:
            await _many(ours, asked.many, asked.connections, asked.time)
    return found


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def _folder() -> Any:
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="consumers-", dir=build, ignore_cleanup_errors=True) as name:
        yield Path(name)


def main(given: list[str] | None = None) -> int:
    """Measure; the last lines compare. Status 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make bench-consumers", description=__doc__)
    parser.add_argument("--time", type=float, default=3.0, help="seconds of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="*", default=list(_COUNTS), help="consumers")
    parser.add_argument("--many", type=int, default=10_000, help="consumers that ask periodically")
    parser.add_argument("--connections", type=int, default=100, help="of these")
    parser.add_argument("--alone", action="store_true", help="without JetStream")
    asked = parser.parse_args(given)
    found: Mapping[str, Sequence[Figures]] = {}
    try:
        with _folder() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _say(", ".join(f"{name}: {text}" for name, text in facts(folder).items()))
            found = runner.run(run(asked, folder))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    _conclude(found, asked.counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
