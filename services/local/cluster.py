"""Starts, watches and stops all processes of a cluster on one machine.

`python -m services.local` runs a cluster for users; `loadtest/cluster.py` runs clusters for tests.

Invariants:
- `DATA/run/lock` is locked while a process of the cluster runs, so two clusters never share DATA;
- each process in `services` has a pid file, and `end` stops every process that was started.
"""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from pydantic import SecretStr

from quorumlog.certificates import replace_file
from quorumlog.wire.secret import LOCAL_GATEWAYS, headers_of, read_secret
from services.local.config import ROOT, LocalSettings, inherited_environment
from services.local.credentials import LocalCertificates, kept_secret
from services.local.embedded import EmbeddedError, Postgres, Redis, set_up_postgres, set_up_redis
from services.local.process import Process, Program, free_ports, is_free, start

START_S: Final = 120.0
"""Timeout of each step when a cluster starts. A step takes about a second on an idle machine."""
_POLL_S: Final = 0.05
_RESTART_S: Final = 1.0
"""Minimum time between two starts of a process, so that repeated starts do not use up the CPU. A
process that dies once is back within 2 s."""
_NEW_BYTES: Final = 80 << 20
"""Disk space of a new bookie by default: its first segment and its reserve. Postgres needs less."""
_LOG_BYTES_MAX: Final = 16 << 20
_SERVICES: Final = ("gateway", "autorecovery", "bookie", "metadata")
_CREDENTIALS: Final = (
    *("CLUSTER_SECRET", "CLUSTER_SECRET_FILE", "TLS_CERT_FILE", "TLS_KEY_FILE", "TLS_CA_FILE"),
    *("TLS_KEY_PASSWORD", "TLS_KEY_PASSWORD_FILE"),
)
_STOP_ORDER: Final = (*_SERVICES, "redis", "postgres")


_PATHS: Final = (ROOT / "shared", ROOT) if (ROOT / "shared").is_dir() else ()
"""PYTHONPATH of the services in a source checkout. An installed package needs none."""


LOOPBACK: Final = "127.0.0.1"


def _reached_at(listen: str) -> str:
    """The host in a URL of a listener at this address; loopback if it listens on all addresses."""
    address = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(listen, listen)  # noqa: S104
    return f"[{address}]" if ":" in address else address


class ClusterError(Exception):
    """The cluster can't start or continue. The message has the reason, often with a log's end."""


class StartTimeout(ClusterError):
    """A process was not ready in time. The process may be healthy on a slow machine."""


@dataclass(slots=True)
class Service:
    """A process of the cluster, with the program to start and the current state."""

    program: Program
    log: Path
    url: str
    is_up: Callable[[], Awaitable[bool]]
    """Returns whether the process is ready to serve requests."""
    process: Process | None = None
    started_at: float = 0.0
    is_expected: bool = field(default=False)
    """Whether the process should be running. False after a test has killed it."""
    internal_url: str = ""
    """The URL for the other services, if it differs from `url`."""

    @property
    def kind(self) -> str:
        """The kind of the process: `bookie` for the process `bookie-1`."""
        return self.program.name.partition("-")[0]

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def log_end(self, lines: int = 20) -> str:
        """The last lines of the process's log file."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


class LocalCluster:
    """All processes of the cluster in one DATA folder."""

    def __init__(
        self,
        settings: LocalSettings,
        *,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """`say`: called with each message for the user."""
        self.settings = settings
        self.services: dict[str, Service] = {}
        self._environment = inherited_environment()
        self._gateway_ports = range(settings.port, settings.port + settings.gateways)
        self._say = say
        self._data = settings.data.resolve()
        self._run = self._data / "run"
        self._logs = self._data / "log"
        self._lock: int | None = None
        self._writable_count = 0
        self.credentials: LocalCertificates | None = None

    async def begin(self) -> None:
        """Starts all processes, each after the processes that it needs are ready. Raises:
        ClusterError. The caller must call `end` even if `begin` fails.
        """
        self._lock_folder()
        for port in self._gateway_ports:
            try:
                is_usable = is_free(port, "127.0.0.1")
            except OSError as error:
                raise ClusterError(f"port {port} is unusable: {error.strerror}; set PORT") from None
            if not is_usable:
                raise ClusterError(f"port {port} is in use: stop its server, or set PORT")
        kept_secret(self.settings.secret_file)
        if self.settings.tls:
            self.credentials = LocalCertificates(self.settings.certificates)
        self._report_room()
        dsn, redis_url = await self._start_stores()
        await self._start_services(dsn, redis_url)
        self._write_targets()

    def _write_targets(self) -> None:
        """Writes the files with Prometheus' targets and the gateways' URLs."""
        services = [s for s in self.services.values() if s.kind in _SERVICES]
        targets = [
            {
                "targets": [urlsplit(service.internal_url or service.url).netloc],
                "labels": {"process": service.program.name, "kind": service.kind},
            }
            for service in services
        ]
        # Replace the file atomically, because Prometheus may read it at any time.
        text = json.dumps(targets, indent=1) + "\n"
        replace_file(self._run / "prometheus.json", text.encode(), 0o644)
        gateways = [service.url for service in services if service.kind == "gateway"]
        self._gateways_file.write_text("".join(f"{url}\n" for url in gateways))

    @property
    def _gateways_file(self) -> Path:
        """The file with the gateways' URLs, for the command line; in the folder of the secret."""
        return self.settings.secret_file.with_name(LOCAL_GATEWAYS.name)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authenticate a request to an internal listener."""
        return headers_of(read_secret(self.settings.secret_file))

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for requests to internal listeners; None without TLS."""
        return None if self.credentials is None else self.credentials.context()

    def session(self, timeout_s: float | None = None, **more: Any) -> aiohttp.ClientSession:
        """Returns an HTTP session for requests to internal listeners as an operator."""
        return aiohttp.ClientSession(
            headers=self.headers,
            connector=aiohttp.TCPConnector(ssl=self.context or True),
            timeout=aiohttp.ClientTimeout(timeout_s),
            **more,
        )

    async def _answers(self, url: str) -> bool:
        """Whether a GET of `url` returns status 200."""
        try:
            async with self.session(10) as session, session.get(url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _fetch_info(self, url: str) -> dict[str, Any]:
        """Requests a bookie's state (`GET /v1/info`). Raises: ClusterError."""
        try:
            async with self.session(10) as session, session.get(f"{url}/v1/info") as answer:
                answer.raise_for_status()
                info: dict[str, Any] = await answer.json()
                return info
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterError(f"no reply from bookie {url}, see {self._logs}: {error!r}") from None

    def _lock_folder(self) -> None:
        for folder in (self._data, self._run, self._logs):
            folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ClusterError(f"another cluster uses {self._data}: stop it, or set DATA") from None
        self._lock = lock
        _await_orphans(self._run)

    def _report_room(self) -> None:
        """Warns if the disk has too little room for new bookies and a new database."""
        names = _names("bookie", self.settings.bookies)
        if not self.settings.postgres_dsn:
            names.append("postgres")
        new = [name for name in names if not (self._data / name).exists()]
        free, needed = shutil.disk_usage(self._data).free, len(new) * _NEW_BYTES
        if free < needed:
            self._say(
                f"{self._data} has {free >> 20} MiB of room; {', '.join(new)} need about"
                f" {needed >> 20} MiB (SEGMENT_BYTES and RESERVE_BYTES of each bookie):"
                " make room, or set DATA to a folder on a larger disk"
            )

    async def _start_stores(self) -> tuple[str, str]:
        dsn, redis_url = _text(self.settings.postgres_dsn), _text(self.settings.redis_url)
        ports = free_ports(2, avoid=self._gateway_ports)
        try:
            if not dsn:
                postgres = await asyncio.to_thread(
                    set_up_postgres, self._data / "postgres", ports[0]
                )
                dsn = await self._start_store(postgres, postgres.dsn())
            if not redis_url:
                redis = set_up_redis(self._data / "redis", ports[1])
                redis_url = await self._start_store(redis, redis.url())
        except EmbeddedError as error:
            raise ClusterError(str(error)) from None
        return dsn, redis_url

    async def _start_store(self, store: Postgres | Redis, url: str) -> str:
        """Starts an embedded server and waits until it is ready; returns `url`."""
        place, is_up = f"127.0.0.1:{store.port}", partial(asyncio.to_thread, store.is_ready)
        self._launch(store.program, place, is_up)
        await self.until_up(store.program.name)
        return url

    async def _start_services(self, dsn: str, redis_url: str) -> None:
        settings = self.settings
        count = settings.bookies + settings.metadata_services + settings.autorecoveries
        count += settings.gateways
        ports = iter(free_ports(count, avoid=self._gateway_ports))
        metadata = dict(zip(_names("metadata", settings.metadata_services), ports, strict=False))
        urls = [f"{self._scheme}://{self._host(name)}:{port}" for name, port in metadata.items()]
        shared = {"METADATA_URLS": ",".join(urls)}
        own = self._in_file("POSTGRES_DSN", dsn) | self._in_file("REDIS_URL", redis_url)
        own |= self._embedded_passwords()
        for name, port in metadata.items():
            self._launch_service(name, "metadata", port, own)
        await self.until_up(*metadata)

        bookies = _names("bookie", settings.bookies)
        new: list[Callable[[], None]] = []
        for number, name in enumerate(bookies):
            zone = settings.zones[number % len(settings.zones)] if settings.zones else ""
            own = {"BOOKIE_NAME": name, "DATA_DIR": str(self._data / name), "ZONE": zone}
            own["DURABILITY"] = settings.durability
            own["AUTO_FIX_COOKIES"] = str(int(settings.auto_fix_cookies))
            launched = partial(self._launch_service, name, "bookie", next(ports), shared | own)
            if settings.rebuild_metadata and not (self._data / name / "cookie.json").exists():
                new.append(launched)
            else:
                launched()
        if settings.rebuild_metadata:
            await self._rebuild(urls[0])
        # New bookies start after the rebuild: if they registered before, they would make a new
        # cluster of the empty database.
        for launch in new:
            launch()
        await self.until_up(*bookies)
        self._writable_count = await self._count_writable(bookies)

        gateways = _names("gateway", settings.gateways)
        for name, port in zip(gateways, self._gateway_ports, strict=True):
            self._launch_service(name, "gateway", port, shared, internal_port=next(ports))
        await self.until_up(*gateways)

        own = {"LOST_BOOKIE_DELAY_S": str(settings.lost_bookie_delay_s)}
        healers = _names("autorecovery", settings.autorecoveries)
        for name in healers:
            self._launch_service(name, "autorecovery", next(ports), shared | own)
        await self.until_up(*healers)

    async def _rebuild(self, metadata_url: str) -> None:
        """Rebuilds the metadata from copies on bookies (rule 18d). Raises: ClusterError."""
        bookies = [service for service in self.services.values() if service.kind == "bookie"]
        for service in bookies:
            url = f"{service.url}/v1/rows?limit=1"
            await self._until(service, partial(self._answers, url))
        ask = {"take_over": True, "bookies": [service.url for service in bookies]}
        report: dict[str, Any] = {}
        async with (
            self.session(read_bufsize=1 << 22) as session,
            session.post(f"{metadata_url}/v1/rebuild", json=ask) as answer,
        ):
            answer.raise_for_status()
            async for text in answer.content:
                line = json.loads(text)
                if "error" in line:
                    raise ClusterError(f"the metadata can't be rebuilt: {line['error']}")
                report = line.get("report", report)
        self._say(
            f"rebuilt the metadata of cluster {report['cluster_id']} from {len(bookies)} bookies"
        )
        for kind in ("ledgers", "logs"):
            found = ", ".join(f"{count} {action}" for action, count in report[kind].items())
            self._say(f"  {kind}: {found or 'none'}")
        if report["open_ledgers"]:
            self._say(f"  {report['open_ledgers']} ledgers are open: autorecovery recovers them")
        for found in report["findings"]:
            subject = f"ledger {found['ledger_id']}" if "ledger_id" in found else found["log"]
            self._say(f"  {found['action']}: {subject}: {found['why']}")

    async def _count_writable(self, bookies: Sequence[str]) -> int:
        """Returns the number of bookies that accept entries. Prints why other bookies don't,
        because gateways wait for three bookies.
        """
        found = [await self._fetch_info(self.services[name].url) for name in bookies]
        full = [info for info in found if info["free_bytes"] < info["read_only_below_bytes"]]
        put = [info for info in found if info not in full and info["state"] != "writable"]
        if full:
            free, least = full[0]["free_bytes"], full[0]["read_only_below_bytes"]
            self._say(
                f"{len(full)} of {len(found)} bookies accept no entries: {self._data} has"
                f" {free >> 20} MiB of room, and below {least >> 20} MiB"
                f" (READ_ONLY_BELOW_BYTES={least}) a bookie is read-only."
                f" Make room for {(least + least // 4 - free >> 20) + 1} MiB more, or set DATA to a"
                " folder on a larger disk, or READ_ONLY_BELOW_BYTES to less."
            )
        for info in put:
            self._say(
                f"{info['bookie']} accepts no entries, because an operator set it to {info['state']}:"
                f" run `quorumlog bookie writable {info['bookie']}`"
            )
        return len(found) - len(full) - len(put)

    def _launch_service(
        self,
        name: str,
        module: str,
        port: int,
        own: dict[str, str],
        *,
        internal_port: int | None = None,
    ) -> None:
        """Launches a service. `internal_port`: the port of its internal listener, if separate."""
        own_host = host = self._host(name)
        env = self._environment | {
            "HOST": own_host,
            "PORT": str(port),
            "ADVERTISED_URL": "",
            "LOG_LEVEL": self.settings.log_level,
            "DRAIN_S": str(self.settings.drain_s),
            **self._credentials(name, module, own_host),
            "PYTHONPATH": os.pathsep.join(map(str, _PATHS)),
            "PYTHONSAFEPATH": "1",
        }
        if internal_port is not None:
            # A restarted gateway keeps this port; its response shows that the old process is gone.
            listen = self.settings.listen if own_host == LOOPBACK else own_host
            host = _reached_at(listen)
            env |= {
                "HOST": listen,
                "ADVERTISED_URL": f"http://{host}:{port}",
                "INTERNAL_HOST": own_host,
                "INTERNAL_PORT": str(internal_port),
                "INTERNAL_ADVERTISED_URL": "",
            }
        argv = (sys.executable, "-m", f"services.{module}")
        # A gateway's public listener has no TLS, because clients lack the cluster's certificates.
        scheme = "http" if internal_port is not None else self._scheme
        url = f"{scheme}://{host}:{port}"
        # A gateway is ready only if a ledger with the default quorum (E=3) could be created.
        health = "live" if module == "gateway" and self._writable_count < 3 else "ready"
        is_up = partial(self._answers, f"{url}/health/{health}")
        service = self._launch(Program(name, argv, env | own, ROOT), url, is_up)
        if internal_port is not None:
            service.internal_url = f"{self._scheme}://{own_host}:{internal_port}"

    @property
    def _scheme(self) -> str:
        """The URL scheme of the internal listeners."""
        return "http" if self.credentials is None else "https"

    def _credentials(self, name: str, role: str, host: str) -> dict[str, str]:
        """Returns the settings with a service's credentials; other credentials are empty."""
        none = dict.fromkeys(_CREDENTIALS, "")
        if self.credentials is None:
            return none | {"CLUSTER_SECRET_FILE": str(self.settings.secret_file)}
        return none | self.credentials.settings(role, name, host)

    def _in_file(self, name: str, secret: str) -> dict[str, str]:
        """Writes a secret to a file, and returns the setting with the file's path. A file is safer
        than an environment variable, because more tools show variables.
        """
        file = self._run / name.lower()
        replace_file(file, secret.encode(), 0o600)
        return {f"{name}_FILE": str(file.resolve())}

    def _embedded_passwords(self) -> dict[str, str]:
        """Returns empty passwords for embedded servers, whose URLs contain the passwords."""
        given = {"POSTGRES": self.settings.postgres_dsn, "REDIS": self.settings.redis_url}
        return {
            f"{store}_PASSWORD{end}": ""
            for store, url in given.items()
            if url is None
            for end in ("", "_FILE")
        }

    def _host(self, _name: str) -> str:
        """The address at which a process listens to other services."""
        return LOOPBACK

    def _launch(self, program: Program, url: str, is_up: Callable[[], Awaitable[bool]]) -> Service:
        service = Service(program, self._logs / f"{program.name}.log", url, is_up)
        self.services[program.name] = service
        self._say(f"starting {program.name}")
        self.launch(program.name)
        return service

    def launch(self, name: str) -> None:
        """Starts a process, or restarts it with the same settings and port."""
        service = self.services[name]
        assert not service.is_alive, f"{name} runs already"
        if service.log.exists() and service.log.stat().st_size > _LOG_BYTES_MAX:
            service.log.replace(service.log.with_suffix(".1.log"))
        service.process = self._start_process(service.program, service.log)
        service.started_at = time.monotonic()
        service.is_expected = True
        (self._run / f"{name}.pid").write_text(f"{service.process.pid}\n")

    def _start_process(self, program: Program, log: Path) -> Process:
        return start(program, log)

    async def until_up(self, *names: str) -> None:
        """Waits until the named processes are ready.

        Raises: ClusterError if a process ends instead, StartTimeout if it takes too long.
        """
        for service in map(self.services.__getitem__, names):
            await self._until(service, service.is_up)

    async def _until(self, service: Service, is_up: Callable[[], Awaitable[bool]]) -> None:
        name, loop = service.program.name, asyncio.get_running_loop()
        end = loop.time() + START_S
        while not await is_up():
            if not service.is_alive:
                raise ClusterError(f"{name} ended during its start. Its log:\n{service.log_end()}")
            if loop.time() > end:
                raise StartTimeout(f"{name} is not ready after {START_S:g} s:\n{service.log_end()}")
            await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Reports processes that die, and restarts them if RESTART is set. Never returns."""
        while True:
            for name, service in self.services.items():
                if service.is_alive or not service.is_expected:
                    continue
                age_s = time.monotonic() - service.started_at
                if not self.settings.restart:
                    service.is_expected = False
                    self._say(f"{name} died ({_exit_reason(service)}); its log is {service.log}")
                elif age_s >= _RESTART_S:
                    self._say(f"{name} died ({_exit_reason(service)}) and is started again")
                    self.launch(name)
            await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        """Stops all processes, each after the processes that need it have ended."""
        for kind in _STOP_ORDER:
            group = [service for service in self.services.values() if service.kind == kind]
            for service in group:
                service.is_expected = False
                if service.is_alive and service.process:
                    # First resume the process, because a paused process handles no signals.
                    service.process.send_signal(signal.SIGCONT)
                    service.process.send_signal(service.program.stop_signal)
            loop = asyncio.get_running_loop()
            # Allow for one drain, and the same time again for the work after the drain.
            end = loop.time() + 2 * self.settings.drain_s + 10
            for service in group:
                await self._await_end(service, end)
        if self._lock is not None:
            self._gateways_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    async def _await_end(self, service: Service, end: float) -> None:
        loop = asyncio.get_running_loop()
        while service.is_alive and service.process:
            if loop.time() > end:
                self._say(f"{service.program.name} does not end and is killed")
                service.process.kill()
                service.process.wait()
            await asyncio.sleep(_POLL_S / 5)
        (self._run / f"{service.program.name}.pid").unlink(missing_ok=True)


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(1, count + 1)]


def _text(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""


def _exit_reason(service: Service) -> str:
    status = (service.process.returncode or 0) if service.process else 0
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _await_orphans(run: Path) -> None:
    """Waits for processes of an earlier cluster whose supervisor was killed. The kernel has sent
    them a signal, but they use files that this cluster needs until they end.

    Raises: ClusterError after 30 s.
    """
    end = time.monotonic() + 30
    for file in run.glob("*.pid"):
        pid = file.read_text().strip()
        while file.stem != "postgres" and _is_service(pid):  # embedded.py handles Postgres
            if time.monotonic() > end:
                raise ClusterError(f"process {pid} of an earlier cluster does not end: kill it")
            time.sleep(_POLL_S)


def _is_service(pid: str) -> bool:
    try:
        return pid.isdecimal() and b"services." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
