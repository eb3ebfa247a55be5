"""`make bench-idle`: what open ledgers, logs and connections cost one gateway while nobody uses them.

Each ledger and log has one record. Memory is the gateway's RSS; the CPU of an idle second is of the gateway, the bookies
and the metadata service, which ask each other periodically whatever is open.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final
from urllib.parse import urlsplit

import psutil
import uvloop

from loadtest.cluster import Cluster, running
from quorumlog.client import Client

_OPENED_IN_FLIGHT: Final = 8
_SETTLE_S: Final = 3.0
_GET: Final = b"GET /v1/ledgers/%d HTTP/1.1\r\nHost: %s\r\n\r\n"


class Watch:
    """The processes of a cluster: memory and CPU of each kind."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        """`seconds`: how long an idle time is measured."""
        names = [name for name in cluster.names if name.partition("-")[0] in WATCHED]
        self._processes = {name: psutil.Process(cluster.pid(name)) for name in names}
        self._seconds = seconds

    def memory(self, kind: str = "gateway") -> int:
        """Bytes of the processes of a kind."""
        found = (each for name, each in self._processes.items() if name.startswith(kind))
        return sum(int(process.memory_info().rss) for process in found)

    async def idle(self) -> str:
        """The share of a core that each kind of process takes while nothing is asked."""
        await asyncio.sleep(_SETTLE_S)
        before = self._cpu_s()
        await asyncio.sleep(self._seconds)
        shares: dict[str, float] = {}
        for name, taken in self._cpu_s().items():
            kind = name.partition("-")[0]
            shares[kind] = shares.get(kind, 0.0) + (taken - before[name]) / self._seconds
        return ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.items())

    def _cpu_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: each.user + each.system for name, each in times.items()}


WATCHED: Final = ("gateway", "bookie", "metadata")


async def opened(count: int, begin: Callable[[int], Awaitable[object]]) -> None:
    """Call `begin` with each number below `count`, a few at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await begin(number)

    await asyncio.gather(*(work() for _ in range(_OPENED_IN_FLIGHT)))


async def _connected(url: str, count: int, ledger_id: int, stack: AsyncExitStack) -> None:
    """Connections that have asked once and stay."""
    at = urlsplit(url)
    request = _GET % (ledger_id, at.netloc.encode())

    async def connect(_number: int) -> None:
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        stack.callback(writer.close)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head

    await opened(count, connect)


async def run(ledgers: int, logs: int, connections: int, seconds: float) -> None:
    """Open them kind by kind, and say what each costs."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running(None, bookies=3, gateways=1))
        client = await stack.enter_async_context(Client(*cluster.gateways))
        watch = Watch(cluster, seconds)
        run_id = os.urandom(4).hex()

        async def ledger(_number: int) -> None:
            await (await client.create_ledger()).append(b"open")

        async def log(number: int) -> None:
            await (await client.create_log(f"{run_id}-{number}")).append(b"open")

        first = await client.create_ledger()
        await first.append(b"open")
        await log(-1)
        say(f"nothing is open: gateway {watch.memory() / 1e6:.0f} MB; idle: {await watch.idle()}")
        for count, what, opening in (
            (ledgers, "ledgers", opened(ledgers, ledger)),
            (logs, "logs", opened(logs, log)),
            (
                connections,
                "connections",
                _connected(cluster.gateways[0], connections, first.ledger_id, stack),
            ),
        ):
            before = watch.memory()
            await opening
            idle = await watch.idle()
            each = (watch.memory() - before) / max(1, count)
            say(
                f"{count:,} {what} are open: gateway {watch.memory() / 1e6:.0f} MB,"
                f" {each / 1e3:.1f} KB each; idle: {idle}"
            )
        await first.append(b"still there")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(prog="make bench-idle", description=__doc__)
    parser.add_argument("--ledgers", type=int, default=10_000)
    parser.add_argument("--logs", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--time", type=float, default=10.0, help="seconds of an idle time")
    given = parser.parse_args()
    uvloop.run(run(given.ledgers, given.logs, given.connections, given.time))


if __name__ == "__main__":
    main()
