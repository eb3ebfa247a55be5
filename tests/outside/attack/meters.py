"""What an attack costs the processes: memory, descriptors, connections that stay, lines in their logs."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Final

import orjson
import psutil

from loadtest.cluster import Cluster

_EVERY_S: Final = 0.25
_STORES: Final = ("postgres", "redis")
_TRACE: Final = "Traceback (most recent call last)"
ROW_MISSING: Final = "row-missing"
"""A bookie's alarm: it holds a ledger that the metadata service does not know."""


class Meters:
    """Looks at the processes of a cluster from outside."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._processes = {name: psutil.Process(cluster.pid(name)) for name in self.services}
        self._read = dict.fromkeys(self.services, 0)
        """How far each log was looked at."""

    @property
    def services(self) -> list[str]:
        """All processes but the databases, which are not ours."""
        return [name for name in self._cluster.names if name not in _STORES]

    def rss_mib(self) -> dict[str, int]:
        """Memory of each process that runs."""
        return {
            name: process.memory_info().rss >> 20
            for name, process in self._processes.items()
            if self._cluster.is_alive(name)
        }

    def descriptors(self) -> dict[str, int]:
        """Open files and sockets of each process that runs."""
        return {
            name: process.num_fds()
            for name, process in self._processes.items()
            if self._cluster.is_alive(name)
        }

    def dead(self) -> list[str]:
        """Processes that ended under the attack."""
        return [name for name in self._cluster.names if not self._cluster.is_alive(name)]

    def held(self, peers: Iterable[str]) -> Counter[str]:
        """How many connections from these addresses each process still holds."""
        wanted = set(peers)
        return Counter(
            name
            for name, process in self._processes.items()
            if self._cluster.is_alive(name)
            for connection in process.net_connections("inet")
            # A socket that listens has no address there: an empty tuple.
            if (*connection.raddr, "")[0] in wanted
        )

    @contextlib.asynccontextmanager
    async def peaks(self) -> AsyncIterator[dict[str, int]]:
        """The most memory of each process in MiB, in a dictionary that is filled until the block ends."""
        most = self.rss_mib()

        async def look() -> None:
            while True:
                for name, now in self.rss_mib().items():
                    most[name] = max(most.get(name, 0), now)
                await asyncio.sleep(_EVERY_S)

        looking = asyncio.create_task(look())
        try:
            yield most
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    def errors(self, forged: Collection[tuple[str, int]] = ()) -> list[str]:
        """What the services' logs have had since the last call that a person must look at, but for
        alarms of forged ledgers.
        """
        return [fault for name in self.services for fault in self._errors_of(name, forged)]

    def _errors_of(self, name: str, forged: Collection[tuple[str, int]]) -> list[str]:
        text = self._cluster.log(name)
        new, self._read[name] = text[self._read[name] :], len(text)
        ids = {ledger_id for bookie, ledger_id in forged if bookie == name}
        return [
            f"{name}: {fault}"
            for line in new.splitlines()
            if (fault := fault_of_line(line, ids)) is not None
        ]


def fault_of_line(line: str, forged: Collection[int] = ()) -> str | None:
    """What is wrong in a line of a service's log; None where nothing is.

    `forged`: of these ledgers a bookie rightly says that they have no row.
    """
    try:
        reported = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line if _TRACE in line else None
    if not isinstance(reported, dict) or (reported.get("level") != "ERROR" and _TRACE not in line):
        return None
    if reported.get("event") == ROW_MISSING and reported.get("ledger") in forged:
        return None
    trace = str(reported.get("error") or "").strip()
    return f"{reported.get('event')}: {trace.splitlines()[-1][:300] if trace else line[:300]}"
