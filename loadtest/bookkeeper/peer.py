"""A system to compare with: Apache BookKeeper, with ZooKeeper, three bookies and its own client in
Java.

Each process is a JVM. BookKeeper is as durable here as quorumlog: three copies, and a bookie syncs
its journal before it answers. The other settings are the ones that gave BookKeeper the best
results. `make bench` builds the client, and fetches BookKeeper with Maven.
"""

import asyncio
import shutil
import signal
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as AsyncProcess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

import orjson

from loadtest.bench.measure import KIB, Absent, Failed, Figures, Meter, Pids, to_read
from loadtest.ports import free_ports
from loadtest.waiting import stop, until
from services.local.config import ROOT
from services.local.process import Become, Process, Program, in_child, start

_BUILT: Final = ROOT / "build" / "bookkeeper"
_OPENED: Final = (
    "java.base/java.io",
    "java.base/java.nio",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
)
"""Packages of the JDK that netty and the checksums need for their fast implementations."""
_STOP_S: Final = 20.0
_ANSWER_S: Final = 60.0
"""Deadline for an answer of the client, in addition to the time of the measurement."""
_WARM_UP: Final = 2.0
"""Duration of the first appends, in which the JVMs compile their code, in measurements."""

_ZOOKEEPER: Final = """
tickTime=1000
dataDir={folder}
clientPort={port}
clientPortAddress=127.0.0.1
admin.enableServer=false
maxClientCnxns=0
"""
_BOOKIE: Final = {
    "allowLoopback": "true",
    "advertisedAddress": "127.0.0.1",
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    "dbStorage_writeCacheMaxSizeMb": "128",
    "dbStorage_readAheadCacheMaxSizeMb": "64",
    "journalSyncData": "true",
    "journalFlushWhenQueueEmpty": "true",
    "zkTimeout": "4000",
    "autoRecoveryDaemonEnabled": "false",
    "httpServerEnabled": "false",
    "enableStatistics": "false",
    "diskUsageThreshold": "0.99",
    "diskUsageWarnThreshold": "0.98",
    # Collect deleted ledgers soon. Otherwise the rounds would fill the disk.
    "gcWaitTime": "10000",
    "logSizeLimit": str(128 << 20),
    "journalMaxSizeMB": "256",
    "journalMaxBackups": "0",
}


class BookKeeper:
    """The servers of BookKeeper, and a client that makes load."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """Starts no process; use `running`. `seconds`: the duration of a measurement."""
        self._folder = folder
        self._seconds = seconds
        self._classpath = f"{_BUILT}/classes:{_BUILT}/lib/*"
        self._zookeeper, *self._ports = free_ports(5)
        self._metadata = f"zk+hierarchical://127.0.0.1:{self._zookeeper}/ledgers"
        self._servers: dict[str, Process] = {}
        self._client: AsyncProcess | None = None
        self._filled: int | None = None
        """The id of the ledger for read measurements, once it is filled."""

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run ZooKeeper, three bookies and a client until the end of the block. Raises: Absent."""
        if shutil.which("java") is None:
            raise Absent("Java is not installed")
        if not (_BUILT / "classes" / "Load.class").exists():
            raise Absent("BookKeeper's client is not built: `make bench` builds it with Maven")
        peer = cls(folder / "bookkeeper", seconds)
        try:
            await peer._start()
            yield peer
        finally:
            await peer._stop()

    async def _start(self) -> None:
        self._start_zookeeper()
        await until(
            self._zookeeper_listens, "ZooKeeper takes connections", passing=(ConnectionError,)
        )
        await self._ask("bookies")  # the client initializes the cluster's metadata
        for number in (1, 2, 3):
            self._start_bookie(number)
        await self._until_bookies(3)
        ledger = await self._create()
        await self._ask("append", ledger, 256, _WARM_UP * self._seconds, KIB)
        await self._ask("delete", ledger)

    async def _stop(self) -> None:
        await self._end_client()
        for name in sorted(self._servers):  # bookies first, because each unregisters in ZooKeeper
            await asyncio.to_thread(stop, self._servers[name], signal.SIGTERM, _STOP_S)

    # Measurements.

    async def append(self, in_flight: int, size: int = KIB) -> Figures:
        """Measure `asyncAddEntry` with `in_flight` concurrent calls."""
        ledger = await self._create()
        figures = await self._measure(size, "append", ledger, in_flight, self._seconds, size)
        await self._ask("delete", ledger)
        return figures

    async def read(self, how: str, limit: int) -> Figures:
        """Measure reads in order. `how`: `batched` or `ranges`; `limit`: entries per request."""
        if self._filled is None:
            self._filled = await self._create()
            await self._ask("fill", self._filled, to_read(self._seconds))
        return await self._measure(KIB, "read", self._filled, how, limit, self._seconds)

    async def recovery(self, count: int) -> Figures:
        """Measure the recovery of a ledger that another client still writes."""
        ledger = await self._create()
        await self._ask("fill", ledger, count)
        reported = await self._ask("recover", ledger)
        assert reported["entries"] == count, reported
        await self._ask("delete", ledger)
        return {"ms": reported["s"] * 1e3}

    async def death(self) -> Figures:
        """Measure 64 concurrent appends while a bookie is killed, and a fourth one replaces it."""
        ledger = await self._create()
        self._start_bookie(4)
        try:
            await self._until_bookies(4)
            return await self._kill_under_load(ledger)
        finally:
            await self._restore_bookies()

    async def _kill_under_load(self, ledger: int) -> Figures:
        async def kill() -> None:
            await asyncio.sleep(self._seconds / 2)
            killed = self._servers.pop("bookie-1")
            killed.kill()
            killed.wait()

        killing = asyncio.ensure_future(kill())
        try:
            reported = await self._ask("append", ledger, 64, self._seconds, KIB)
        finally:
            await killing
        await self._ask("delete", ledger)
        through = {name: reported[name] for name in ("gap ms", "failed")}
        return _figures(Meter({}), reported) | through

    async def _restore_bookies(self) -> None:
        if "bookie-1" not in self._servers:
            # The killed bookie stays registered until its session expires, and can't start before.
            await self._until_bookies(3)
            self._start_bookie(1)
            await self._until_bookies(4)
        await asyncio.to_thread(stop, self._servers.pop("bookie-4"), signal.SIGTERM, _STOP_S)
        await self._until_bookies(3)

    async def _measure(self, size: int, *words: object) -> Figures:
        await self._ask("bookies")  # starts the client if necessary, before its CPU is measured
        with Meter(self._pids()) as meter:
            reported = await self._ask(*words)
        return _figures(meter, reported, size)

    # Processes.

    @property
    def client_pid(self) -> int:
        """The process id of the current client."""
        assert self._client is not None
        return self._client.pid

    def _pids(self) -> Pids:
        bookies = [each.pid for name, each in self._servers.items() if name != "zookeeper"]
        return {
            "client": [self.client_pid],
            "servers": bookies,
            "others": [self._servers["zookeeper"].pid],
        }

    def _java(self, heap_mb: int, main: str, *arguments: str) -> tuple[str, ...]:
        java = shutil.which("java")
        assert java is not None
        opened = [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
        return (
            java, f"-Xmx{heap_mb}m", f"-XX:MaxDirectMemorySize={heap_mb}m", *opened,
            "-Dio.netty.tryReflectionSetAccessible=true", "-cp", self._classpath, main, *arguments,
        )  # fmt: skip

    def _start_zookeeper(self) -> None:
        folder = self._folder / "zookeeper"
        folder.mkdir(parents=True)
        settings = self._folder / "zookeeper.cfg"
        settings.write_text(_ZOOKEEPER.format(folder=folder, port=self._zookeeper))
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        self._run("zookeeper", self._java(128, main, str(settings)))

    async def _zookeeper_listens(self) -> bool:
        self._check_servers()
        _, writer = await asyncio.open_connection("127.0.0.1", self._zookeeper)
        writer.close()
        return True

    def _start_bookie(self, number: int) -> None:
        folder = self._folder / f"bookie-{number}"
        settings = self._folder / f"bookie-{number}.conf"
        own = {
            "metadataServiceUri": self._metadata,
            "bookiePort": self._ports[number - 1],
            **{f"{kind}Directories": folder / kind for kind in ("journal", "ledger", "index")},
        }
        lines = [f"{name}={value}" for name, value in {**_BOOKIE, **own}.items()]
        settings.write_text("\n".join(lines))
        main = "org.apache.bookkeeper.server.Main"
        self._run(f"bookie-{number}", self._java(512, main, "--conf", str(settings)))

    def _check_servers(self) -> None:
        for name, server in self._servers.items():
            if server.poll() is not None:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                raise ChildProcessError(f"{name} ended:\n{log[-4000:]}")

    def _run(self, name: str, argv: tuple[str, ...]) -> None:
        self._servers[name] = start(Program(name, argv), self._folder / f"{name}.log")

    async def _start_client(self) -> None:
        with (self._folder / "client.log").open("ab") as log:
            self._client = await asyncio.create_subprocess_exec(
                *self._java(512, "Load", self._metadata),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=in_child(Become.SELF, signal.SIGKILL),
            )
        await self._answer(self._client)

    async def _end_client(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        assert client.stdin is not None
        client.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await client.wait()
        except TimeoutError:
            client.kill()
            await client.wait()

    async def _create(self) -> int:
        return int((await self._ask("create"))["ledger"])

    async def _until_bookies(self, count: int) -> None:
        async def are_there() -> bool:
            self._check_servers()
            return (await self._ask("bookies"))["bookies"] == count

        await until(are_there, f"{count} bookies are registered")

    async def _ask(self, *words: object) -> Figures:
        """Send a command to the client and return its answer. If the client does not answer, it is
        killed, and the next command starts another client. Raises: Failed.
        """
        question = " ".join(map(str, words))
        deadline_s = _ANSWER_S + _WARM_UP * self._seconds
        reported = None
        try:
            async with asyncio.timeout(deadline_s):
                if self._client is None:
                    await self._start_client()
                assert self._client is not None
                assert self._client.stdin is not None
                self._client.stdin.write(f"{question}\n".encode())
                reported = await self._answer(self._client)
        except TimeoutError as error:
            raise Failed(
                f"BookKeeper's client gave no answer to `{question}` within {deadline_s:g} s"
            ) from error
        finally:
            if reported is None and self._client is not None:
                # A late answer would be mistaken for the answer to the next command.
                self._client.kill()
                await self._end_client()
        if (why := reported.pop("error", None)) is not None:
            raise Failed(f"BookKeeper's client answered `{question}` with {why}")
        return reported

    async def _answer(self, client: AsyncProcess) -> Figures:
        assert client.stdout is not None
        line = await client.stdout.readline()
        if not line:
            log = (self._folder / "client.log").read_text(errors="replace")
            raise Failed(f"BookKeeper's client ended:\n{log[-4000:]}")
        answer: Figures = orjson.loads(line)
        return answer


def _figures(meter: Meter, reported: Figures, size: int = KIB) -> Figures:
    """The figures of a measurement, for the client's own time, which excludes communication."""
    meter.seconds = reported["s"]
    latencies = {name: value for name, value in reported.items() if name.startswith("p")}
    return meter.figures(round(reported["entries"]), size) | latencies
