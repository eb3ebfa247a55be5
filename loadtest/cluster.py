"""A whole cluster for tests and load: real processes under a temporary folder, on leased ports.

Methods address a process by its name (`bookie-2`), as the local cluster does.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import SecretStr

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import DeadlineMissed, until
from services.local.cluster import LOOPBACK, START_S, LocalCluster, Service, StartTimeout
from services.local.config import LocalSettings
from services.local.embedded import Postgres, Redis
from services.local.process import Process, Program, start

started = start
"""The function with which `running` starts processes. Tests replace it with `forked.start`."""


@dataclass(frozen=True, slots=True)
class ServicePlace:
    """Where a process runs, for tests that run processes in other network namespaces."""

    host: str = LOOPBACK
    prefix: tuple[str, ...] = ()
    """Arguments in front of the process's command, such as `nsenter` and a network namespace."""


class Cluster(LocalCluster):
    """A running cluster, with methods that kill, pause and restart its processes."""

    def __init__(
        self,
        settings: LocalSettings,
        environment: Mapping[str, str],
        places: Mapping[str, ServicePlace],
        reach: Callable[[str], Awaitable[str]] | None,
    ) -> None:
        """The parameters are those of `running`."""
        super().__init__(settings)
        self._environment |= environment
        self._places, self._reach = places, reach

    def _host(self, name: str) -> str:
        return self._places.get(name, ServicePlace()).host

    def _start_process(self, program: Program, log: Path) -> Process:
        return started(program, log)

    def _launch(self, program: Program, url: str, is_up: Callable[[], Awaitable[bool]]) -> Service:
        prefix = self._places.get(program.name, ServicePlace()).prefix
        return super()._launch(replace(program, argv=(*prefix, *program.argv)), url, is_up)

    async def _start_store(self, store: Postgres | Redis, url: str) -> str:
        url = await super()._start_store(store, url)
        return url if self._reach is None else await self._reach(url)

    @property
    def gateways(self) -> list[str]:
        """The URLs of the gateways, in order."""
        return [s.url for s in self.services.values() if s.kind == "gateway"]

    @property
    def names(self) -> list[str]:
        """The names of all processes, in the order in which they start."""
        return list(self.services)

    @property
    def data(self) -> Path:
        """The folder that contains all data and logs of the cluster."""
        return self.settings.data

    def url(self, name: str) -> str:
        """The URL at which a process listens."""
        return self.services[name].url

    def internal_url(self, name: str) -> str:
        """The URL of a process's internal listener."""
        return self.services[name].internal_url

    @property
    def secret_file(self) -> Path:
        """The file of the cluster's secret, with which processes and operators authenticate."""
        return self.settings.secret_file

    @property
    def certificates(self) -> Path:
        """The folder of the cluster's certificates."""
        return self.settings.certificates

    @property
    def operator_settings(self) -> dict[str, str]:
        """The environment variables that give the command line an operator's credentials."""
        if self.context is None:
            return {"CLUSTER_SECRET_FILE": str(self.secret_file)}
        folder = self.certificates
        return {
            "TLS_CERT_FILE": str(folder / "operator-local.pem"),
            "TLS_KEY_FILE": str(folder / "operator-local-key.pem"),
            "TLS_CA_FILE": str(folder / "ca.pem"),
        }

    def pid(self, name: str) -> int:
        """The process id of a process, or of its last run."""
        process = self.services[name].process
        assert process is not None
        return process.pid

    def pids(self, roles: Mapping[str, str], others: str = "") -> dict[str, list[int]]:
        """The process ids by role. `roles`: maps a kind of process (`bookie`) to a role. `others`:
        the role of all other kinds; if empty, they are left out.
        """
        found: dict[str, list[int]] = {}
        for name in self.names:
            if role := roles.get(name.partition("-")[0], others):
                found.setdefault(role, []).append(self.pid(name))
        return found

    def program(self, name: str) -> Program:
        """The command and environment with which a process starts."""
        return self.services[name].program

    def status(self, name: str) -> int | None:
        """The exit status of a process, or minus the signal that ended it; None while it runs."""
        process = self.services[name].process
        assert process is not None
        return process.poll()

    def is_alive(self, name: str) -> bool:
        """Whether a process is running."""
        return self.services[name].is_alive

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process by a signal and wait for its end. Only `start` or `restart` revive it."""
        service = self.services[name]
        service.is_expected = False
        assert service.process is not None
        service.process.send_signal(how)
        await self.ended(name)

    async def ended(self, name: str) -> None:
        """Wait until a process is gone."""
        service = self.services[name]
        await until(lambda: not service.is_alive, f"{name} is gone", 90)

    async def stop(self, name: str) -> None:
        """Shut a process down as an operator does (SIGTERM), and wait until it is gone."""
        await self.kill(name, signal.SIGTERM)

    def pause(self, name: str) -> None:
        """Suspend a process (SIGSTOP): it keeps its connections, but answers nothing."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused process continue (SIGCONT)."""
        self._signal(name, signal.SIGCONT)

    def start(self, name: str, *, prefix: tuple[str, ...] = ()) -> None:
        """Start a killed process with its settings and port. Does not wait until it is ready.

        `prefix`: a command that runs the process, for this start only.
        """
        service = self.services[name]
        program = service.program
        service.program = replace(program, argv=(*prefix, *program.argv))
        self.launch(name)
        service.program = program

    def notify(self, name: str, **settings: str) -> None:
        """Add settings to a process. They take effect at its next start."""
        service = self.services[name]
        service.program = replace(service.program, env={**service.program.env, **settings})

    def run_by(self, name: str, *prefix: str) -> None:
        """Run a process with the command `prefix` (if empty, directly), from its next start on."""
        service = self.services[name]
        argv = service.program.argv
        own = argv[argv.index(sys.executable) :]
        service.program = replace(service.program, argv=(*prefix, *own))

    async def kill_all(self) -> None:
        """Kill every process at once, as if the machine lost power but kept its disk."""
        services = list(self.services.values())
        for service in services:
            service.is_expected = False
            if service.process is not None:
                service.process.kill()
        await until(lambda: not any(s.is_alive for s in services), "every process is gone")

    async def restart(self, name: str) -> None:
        """Start a killed process, and wait until it is ready."""
        self.launch(name)
        await self.until_up(name)

    async def is_up(self, name: str) -> bool:
        """Whether a process is ready now."""
        return await self.services[name].is_up()

    def log(self, name: str) -> str:
        """The whole log of a process."""
        return self.services[name].log.read_text(errors="replace")

    def log_ends(self, lines: int = 15) -> str:
        """The last lines of every log, for a failed test's report."""
        parts = []
        for name, service in self.services.items():
            state = "runs" if service.is_alive else "is gone"
            parts.append(f"--- {name} {state}\n{service.log_end(lines)}")
        return "\n".join(parts)

    async def _until(self, service: Service, is_up: Callable[[], Awaitable[bool]]) -> None:
        """As the base class does. Raises: DeadlineMissed, because the machine may be slow."""
        try:
            await super()._until(service, is_up)
        except StartTimeout as error:
            what = f"{service.program.name} is ready"
            raise DeadlineMissed(what, str(error), START_S) from error

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self.services[name].process
        assert process is not None
        os.kill(process.pid, number)


@asynccontextmanager
async def running(
    stores: Stores | None,
    *,
    bookies: int = 4,
    gateways: int = 2,
    data: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    places: Mapping[str, ServicePlace] = MappingProxyType({}),
    reach: Callable[[str], Awaitable[str]] | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run a cluster until the end of the block. Without `stores` the cluster starts its own
    databases.

    `data`: the cluster's folder, which can be used again later; by default a temporary folder.
    `environment`: further settings of the services. `places`: the places of processes that don't
    run on 127.0.0.1, by name. `reach`: replaces the URL or DSN of an embedded database, for example
    with the URL of a proxy. If the block fails, the last lines of all logs are written to standard
    error. Raises: DeadlineMissed when the cluster is not ready in time.
    """
    with ExitStack() as stack:
        folder = data or stack.enter_context(scratch("ql-cluster-"))
        cluster = Cluster(
            LocalSettings(
                data=folder,
                port=free_ports(gateways)[0],
                bookies=bookies,
                gateways=gateways,
                postgres_dsn=SecretStr(stores.postgres_dsn) if stores else None,
                redis_url=SecretStr(stores.redis_url) if stores else None,
                **settings,
            ),
            environment,
            places,
            reach,
        )
        try:
            await cluster.begin()
            yield cluster
        except asyncio.CancelledError:  # Ctrl-C is not a failure
            raise
        except BaseException:
            sys.stderr.write(cluster.log_ends() + "\n")
            raise
        finally:
            await cluster.end()
