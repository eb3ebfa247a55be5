"""`make bench`: appends and reads of a local cluster, beside JetStream in the same run.

A time in seconds says little on a shared machine, so what counts are the ratios: three copies,
acknowledged by a majority after fsync, client and servers on one machine, 1 KiB entries. The data
lies in the repository's build folder, on the disk that the clone is on, and not in memory.

The CPU that the gateway and the bookies take for each entry is disturbed least by what else the machine does: compare
two versions of the code by it.
"""

import asyncio
import base64
import os
import shutil
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter as clock
from typing import Final

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.jetstream import JetStream
from loadtest.ports import free_ports
from services.local.cluster import LocalCluster
from services.local.config import ROOT, LocalSettings

_PAYLOAD: Final = os.urandom(1024)
_SECONDS: Final = float(os.environ.get("TIME") or 5)
_TLS: Final = os.environ.get("TLS", "") not in ("", "0")
"""Whether the gateway and the bookies talk over mutual TLS; this program talks to the gateway without."""
_FRAMES: Final = "application/vnd.quorumlog.frames"


@dataclass(frozen=True, slots=True)
class Result:
    """How one workload went."""

    name: str
    entries_per_s: float
    p50_ms: float
    p99_ms: float
    gateway_us: float = 0
    """CPU of the gateway for each entry, in microseconds."""
    bookies_us: float = 0
    """CPU of all bookies together for each entry."""


class Cpu:
    """The CPU that a cluster's processes have taken."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._processes = {
            kind: [s.process for s in cluster.services.values() if s.process and s.kind == kind]
            for kind in ("gateway", "bookie")
        }

    def of(self, kind: str) -> float:
        """In seconds: of all processes of a kind, with their threads."""
        ticks = 0
        for process in self._processes[kind]:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
            user, system = stat.rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
        return ticks / os.sysconf("SC_CLK_TCK")


Append = Callable[[], Awaitable[int]]
"""Appends something and returns how many entries it was."""


async def measure(name: str, append: Append, *, in_flight: int) -> Result:
    """Append for some seconds with so many requests in flight."""
    await append()
    times: list[float] = []
    count = 0
    start = clock()
    end = start + _SECONDS

    async def work() -> None:
        nonlocal count
        while (began := clock()) < end:
            appended = await append()
            count += appended
            times.append(clock() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(work())
    return _result(name, count, clock() - start, times)


def _result(name: str, count: int, seconds: float, times: list[float]) -> Result:
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [times[0]] * 99
    return Result(name, count / seconds, cuts[49] * 1000, cuts[98] * 1000)


class Ours:
    """The workloads against a gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, cpu: Cpu) -> None:
        self._session = session
        self._url = url
        self._cpu = cpu

    async def _with_cpu(self, run: Awaitable[Result]) -> Result:
        before = self._cpu.of("gateway"), self._cpu.of("bookie")
        start = clock()
        result = await run
        count = result.entries_per_s * (clock() - start)
        return replace(
            result,
            gateway_us=(self._cpu.of("gateway") - before[0]) / count * 1e6,
            bookies_us=(self._cpu.of("bookie") - before[1]) / count * 1e6,
        )

    async def run(self) -> list[Result]:
        """All of them, each on a ledger of its own."""
        one = len(_PAYLOAD).to_bytes(4, "big") + _PAYLOAD
        data = {"data": base64.b64encode(_PAYLOAD).decode()}
        octets = "application/octet-stream"
        results = [
            await self._appends("one at a time", 1, _PAYLOAD, octets, 1),
            await self._appends("64 in flight", 64, _PAYLOAD, octets, 1),
            await self._appends("256 in flight", 256, _PAYLOAD, octets, 1),
        ]
        for size in (100, 1000):
            body = orjson.dumps({"entries": [data] * size})
            name = f"JSON batches of {size}, 4 in flight"
            results.append(await self._appends(name, 4, body, "application/json", size))
        for size in (100, 1000):
            name = f"raw batches of {size}, 4 in flight"
            results.append(await self._appends(name, 4, one * size, _FRAMES, size))
        results += await self._reads(one * 1000)
        return results

    async def _create(self) -> str:
        async with self._session.post(f"{self._url}/v1/ledgers", json={}) as answer:
            answer.raise_for_status()
            return f"{self._url}/v1/ledgers/{(await answer.json())['ledger_id']}/entries"

    async def _appends(
        self, name: str, in_flight: int, body: bytes, content_type: str, count: int
    ) -> Result:
        url = await self._create()
        headers = {"Content-Type": content_type}

        async def append() -> int:
            async with self._session.post(url, data=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()
            return count

        return await self._with_cpu(measure(name, append, in_flight=in_flight))

    async def _reads(self, body: bytes) -> list[Result]:
        url = await self._create()
        for _ in range(50):
            async with self._session.post(
                url, data=body, headers={"Content-Type": _FRAMES}
            ) as answer:
                answer.raise_for_status()
        results = []
        for name, accept in (
            ("read in order, JSON", "application/json"),
            ("read in order, raw", _FRAMES),
        ):
            results.append(await self._with_cpu(self._read(name, url, accept, 50_000)))
        return results

    async def _read(self, name: str, url: str, accept: str, total: int) -> Result:
        """Read a ledger from its start, again and again."""
        times = []
        count = 0
        start = clock()
        while clock() < start + _SECONDS:
            first = 0
            while first < total:
                began = clock()
                params = {"from": first, "limit": 1000, "max_bytes": 4 << 20}
                async with self._session.get(
                    url, params=params, headers={"Accept": accept}
                ) as answer:
                    answer.raise_for_status()
                    body = await answer.read()
                got = len(orjson.loads(body)["entries"]) if accept != _FRAMES else len(body) // 1036
                first += got
                count += got
                times.append(clock() - began)
        return _result(name, count, clock() - start, times)


async def _bench(folder: Path, console: Console) -> None:
    settings = LocalSettings(
        data=folder / "ours", port=free_ports(2)[0], bookies=3, gateways=1, tls=_TLS
    )
    cluster = LocalCluster(settings)
    inside = "mutual TLS" if _TLS else "no TLS"
    console.print(
        f"{_SECONDS:g} s for each workload; 3 bookies, 1 gateway, fsync, {inside}, in {folder}"
    )
    try:
        await cluster.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            gateway = cluster.services["gateway-1"].url
            ours = await Ours(session, gateway, Cpu(cluster)).run()
    finally:
        await cluster.stop()
    async with JetStream.running(folder / "jetstream") as peer:
        theirs = [
            await measure("one at a time", lambda: peer.publish(_PAYLOAD), in_flight=1),
            await measure("64 in flight", lambda: peer.publish(_PAYLOAD), in_flight=64),
            await measure("256 in flight", lambda: peer.publish(_PAYLOAD), in_flight=256),
        ]
        count, seconds = await peer.read_all()
        theirs.append(Result("read in order", count / seconds, 0, 0))
    _print(console, ours, theirs)
    out = ROOT / "build" / "bench.json"
    out.write_bytes(
        orjson.dumps(
            {"quorumlog": [asdict(r) for r in ours], "jetstream": [asdict(r) for r in theirs]},
            option=orjson.OPT_INDENT_2,
        )
    )
    console.print(f"as data: {out}")


def _print(console: Console, ours: list[Result], theirs: list[Result]) -> None:
    same = {result.name: result for result in theirs}
    best = max(r.entries_per_s for r in theirs if not r.name.startswith("read"))
    reading = same["read in order"]
    cpu = ("gateway us", "bookies us")
    table = Table("", "entries/s", "p50 ms", "p99 ms", *cpu, "of JetStream's", box=None)
    for result in ours:
        if result.name.startswith("read"):
            ratio = f"{result.entries_per_s / reading.entries_per_s:.2f} x reading"
        elif peer := same.get(result.name):
            ratio = (
                f"{result.entries_per_s / peer.entries_per_s:.2f} x entries/s, "
                f"{result.p50_ms / peer.p50_ms:.2f} x p50"
            )
        else:
            ratio = f"{result.entries_per_s / best:.2f} x its best"
        table.add_row(
            result.name,
            f"{result.entries_per_s:,.0f}",
            f"{result.p50_ms:.2f}",
            f"{result.p99_ms:.2f}",
            f"{result.gateway_us:.1f}",
            f"{result.bookies_us:.1f}",
            ratio,
        )
    table.add_section()
    for result in theirs:
        times = (f"{result.p50_ms:.2f}", f"{result.p99_ms:.2f}") if result.p50_ms else ("", "")
        table.add_row(f"JetStream R3: {result.name}", f"{result.entries_per_s:,.0f}", *times)
    console.print(table)


def main() -> None:
    """Run all workloads and print the table."""
    folder = ROOT / "build" / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = clock()
    console = Console(highlight=False)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_bench(folder, console))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"took {clock() - started:.0f} s")


if __name__ == "__main__":
    main()
