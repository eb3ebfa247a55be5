"""A whole cluster for tests and load: real processes under a temporary folder, on leased ports.

What happens to a process is asked by its name (`bookie-2`), as in the local cluster.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import until
from services.local.cluster import LocalCluster, Service
from services.local.config import LocalSettings


class Cluster:
    """A running cluster, and the hands that hurt it."""

    def __init__(self, local: LocalCluster) -> None:
        self._local = local

    @property
    def gateways(self) -> list[str]:
        """The URLs of the gateways, in order."""
        return [s.url for s in self._local.services.values() if s.kind == "gateway"]

    @property
    def data(self) -> Path:
        """The folder that holds everything."""
        return self._local.settings.data

    def url(self, name: str) -> str:
        """Where a process listens."""
        return self._service(name).url

    def is_alive(self, name: str) -> bool:
        """Whether a process runs."""
        return self._service(name).is_alive

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and wait until it is gone. Nobody starts it again but `restart`."""
        service = self._service(name)
        service.is_expected = False
        assert service.process is not None
        service.process.send_signal(how)
        await until(lambda: not service.is_alive, f"{name} is gone")

    def pause(self, name: str) -> None:
        """Stop a process in its tracks: it keeps its connections and answers nothing."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused process go on."""
        self._signal(name, signal.SIGCONT)

    def start(self, name: str) -> None:
        """Start a process that was killed, with its settings and port; does not wait."""
        self._local.launch(name)

    async def restart(self, name: str) -> None:
        """Start a process that was killed, and wait until it is ready."""
        self._local.launch(name)
        await self._local.until_ready(name)

    async def until_ready(self, name: str) -> None:
        """Wait until a process can do its work."""
        await self._local.until_ready(name)

    def log(self, name: str) -> str:
        """All that a process has written."""
        return self._service(name).log.read_text(errors="replace")

    def log_ends(self, lines: int = 15) -> str:
        """The last lines of every log, for a failed test's report."""
        parts = []
        for name, service in self._local.services.items():
            state = "runs" if service.is_alive else "is gone"
            parts.append(f"--- {name} {state}\n{service.log_end(lines)}")
        return "\n".join(parts)

    def _service(self, name: str) -> Service:
        return self._local.services[name]

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._service(name).process
        assert process is not None
        os.kill(process.pid, number)


@asynccontextmanager
async def running(
    stores: Stores | None, *, bookies: int = 4, gateways: int = 2, **settings: Any
) -> AsyncIterator[Cluster]:
    """Run a cluster until the end of the block. Without `stores` it starts its own.

    A block that fails has the ends of all logs written to standard error.
    """
    with scratch("ql-cluster-") as folder:
        local = LocalCluster(
            LocalSettings(
                data=folder,
                port=free_ports(gateways)[0],
                bookies=bookies,
                gateways=gateways,
                postgres_dsn=stores.postgres_dsn if stores else "",
                redis_url=stores.redis_url if stores else "",
                **settings,
            )
        )
        cluster = Cluster(local)
        try:
            await local.start()
            yield cluster
        except BaseException:
            sys.stderr.write(cluster.log_ends() + "\n")
            raise
        finally:
            await local.stop()
