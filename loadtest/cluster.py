"""A whole cluster for tests and load: real processes under a temporary folder, on leased ports.

Methods address a process by its name (`bookie-2`), as the local cluster does.
"""

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from pydantic import SecretStr

from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import DeadlineMissed, until
from services.local.cluster import START_S, LocalCluster, Service, StartTimeout, Surroundings
from services.local.config import LocalSettings
from services.local.process import Program, Start, start

started: Start = start
"""The function with which `running` starts processes. Tests replace it by `forked.start`."""


class Cluster:
    """A running cluster, with methods that kill, pause and restart its processes."""

    def __init__(self, local: LocalCluster) -> None:
        self._local = local

    @property
    def gateways(self) -> list[str]:
        """The URLs of the gateways, in order."""
        return [s.url for s in self._local.services.values() if s.kind == "gateway"]

    @property
    def names(self) -> list[str]:
        """The names of all processes, in the order in which they start."""
        return list(self._local.services)

    @property
    def data(self) -> Path:
        """The folder that contains all data and logs of the cluster."""
        return self._local.settings.data

    def url(self, name: str) -> str:
        """The URL at which a process listens."""
        return self._service(name).url

    def internal_url(self, name: str) -> str:
        """The URL of a process's internal listener."""
        return self._service(name).internal_url

    @property
    def secret_file(self) -> Path:
        """The file of the cluster's secret, with which processes and operators authenticate."""
        return self._local.settings.secret_file

    @property
    def headers(self) -> dict[str, str]:
        """The headers that requests to internal listeners need."""
        return self._local.headers

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for internal listeners; None without certificates."""
        return self._local.context

    def session(self) -> aiohttp.ClientSession:
        """A session for requests to internal listeners, with an operator's credentials."""
        return self._local.session(None)

    @property
    def certificates(self) -> Path:
        """The folder of the cluster's certificates."""
        return self._local.settings.certificates

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
        process = self._service(name).process
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
        return self._service(name).program

    def status(self, name: str) -> int | None:
        """The exit status of a process, or minus the signal that ended it; None while it runs."""
        process = self._service(name).process
        assert process is not None
        return process.poll()

    def is_alive(self, name: str) -> bool:
        """Whether a process is running."""
        return self._service(name).is_alive

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process by a signal and wait for its end. Only `start` or `restart` revive it."""
        service = self._service(name)
        service.is_expected = False
        assert service.process is not None
        service.process.send_signal(how)
        await self.ended(name)

    async def ended(self, name: str) -> None:
        """Wait until a process is gone."""
        service = self._service(name)
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
        self._local.launch(name, prefix=prefix)

    def notify(self, name: str, **settings: str) -> None:
        """Add settings to a process. They take effect at its next start."""
        service = self._service(name)
        service.program = replace(service.program, env={**service.program.env, **settings})

    def run_by(self, name: str, *prefix: str) -> None:
        """Run a process by the command `prefix` (none: directly), from its next start on."""
        service = self._service(name)
        argv = service.program.argv
        own = argv[argv.index(sys.executable) :]
        service.program = replace(service.program, argv=(*prefix, *own))

    async def kill_all(self) -> None:
        """Kill every process at once, as if the machine lost power but kept its disk."""
        services = list(self._local.services.values())
        for service in services:
            service.is_expected = False
            if service.process is not None:
                service.process.kill()
        await until(lambda: not any(s.is_alive for s in services), "every process is gone")

    async def restart(self, name: str) -> None:
        """Start a killed process, and wait until it is ready."""
        self._local.launch(name)
        await self._local.until_up(name)

    async def is_up(self, name: str) -> bool:
        """Whether a process is ready now."""
        return await self._service(name).is_up()

    async def until_up(self, name: str) -> None:
        """Wait until a process is ready. The databases are processes too."""
        await self._local.until_up(name)

    def log(self, name: str) -> str:
        """The whole log of a process."""
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
    stores: Stores | None,
    *,
    bookies: int = 4,
    gateways: int = 2,
    data: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    around: Surroundings | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run a cluster until the end of the block. Without `stores` the cluster starts its own
    databases.

    `data`: the cluster's folder, which can be used again later; by default a temporary folder.
    `environment`: further settings of the services. `around`: further surroundings, whose settings
    replace `environment`. If the block fails, the last lines of all logs are written to standard
    error. Raises: DeadlineMissed when the cluster is not ready in time.
    """
    with ExitStack() as stack:
        folder = data or stack.enter_context(scratch("ql-cluster-"))
        local = LocalCluster(
            LocalSettings(
                data=folder,
                port=free_ports(gateways)[0],
                bookies=bookies,
                gateways=gateways,
                postgres_dsn=SecretStr(stores.postgres_dsn) if stores else None,
                redis_url=SecretStr(stores.redis_url) if stores else None,
                **settings,
            ),
            around=replace(around or Surroundings(environment), start=started),
        )
        cluster = Cluster(local)
        try:
            try:
                await local.start()
            except StartTimeout as error:
                raise DeadlineMissed("the cluster is ready", str(error), START_S) from error
            yield cluster
        except asyncio.CancelledError:  # Ctrl-C is not a failure
            raise
        except BaseException:
            sys.stderr.write(cluster.log_ends() + "\n")
            raise
        finally:
            await local.stop()
