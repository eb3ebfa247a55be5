"""Three bookies and two gateways as processes: C1 writes through the first gateway, whose way to
the metadata service can be cut, and C2 recovers through the second.
"""

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.forked import start
from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import stop
from quorumlog.net.metadata_client import MetadataClient
from services.local.config import ROOT, inherited_environment
from services.local.process import Process as Running
from services.local.process import Program
from tests.cluster.bp46.build import hold_path
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.metadata.support import serving


@dataclass(slots=True)
class Process:
    """A process on a port that stays."""

    name: str
    module: str
    folder: Path
    settings: dict[str, str]
    session: aiohttp.ClientSession
    port: int = field(default_factory=lambda: free_ports(1)[0])
    running: Running | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self.folder / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, **settings: str) -> None:
        """Start it; does not wait."""
        own = {"HOST": "127.0.0.1", "PORT": str(self.port), "ADVERTISED_URL": ""}
        environment = inherited_environment() | own | self.settings | settings
        argv = (sys.executable, "-m", self.module)
        self.running = start(Program(self.name, argv, environment, ROOT), self.log)

    async def ready(self) -> None:
        """Wait until it can do its work."""

        async def is_ready() -> bool:
            assert self.running is not None
            assert self.running.poll() is None, self.log.read_text()
            async with self.session.get(f"{self.url}/health/ready") as answer:
                return answer.status == 200

        await until(is_ready, f"{self.name} is ready", passing=(aiohttp.ClientError,))

    async def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it (in order, by default) and wait for that."""
        process = self.running
        assert process is not None
        process.send_signal(how)
        await until(lambda: process.poll() is not None, f"{self.name} is gone")

    async def get(self, path: str) -> dict[str, Any]:
        """What it answers to a GET, as JSON; {} where it says that there is none."""
        async with self.session.get(self.url + path) as answer:
            found: dict[str, Any] = await answer.json()
            return found if answer.status == 200 else {}

    # --- a bookie's disk -------------------------------------------------------------------------

    async def hold_disk(self) -> None:
        """From now on nothing that it writes is synced. What is there now is: see `cut_power`.
        Nobody may be asking it to write meanwhile.
        """
        hold = hold_path(self.data)

        async def is_quiet() -> bool:
            hold.touch()
            if (await self.get("/v1/info"))["pending_bytes"] == 0:
                return True
            hold.unlink()
            return False

        await until(is_quiet, "all is synced")
        shutil.copytree(self.data / "log", self.folder / f"{self.name}.synced")

    async def cut_power(self) -> None:
        """End it, and discard what it wrote and did not sync."""
        await self.end(signal.SIGKILL)
        hold_path(self.data).unlink()
        shutil.rmtree(self.data / "log")
        (self.folder / f"{self.name}.synced").rename(self.data / "log")

    async def lose_disk(self) -> None:
        """End it, and take all that it kept."""
        await self.end(signal.SIGKILL)
        shutil.rmtree(self.data)


@dataclass(slots=True)
class World:
    """The processes, and what C1 was told."""

    bookies: tuple[Process, ...]
    gateways: tuple[Process, ...]
    proxy: Proxy
    """Between the first gateway and the metadata service."""
    metadata: MetadataClient
    session: aiohttp.ClientSession
    acknowledged: dict[int, dict[int, str]] = field(default_factory=dict)
    """By ledger: entry and text."""

    def is_cut(self, *, cut: bool) -> None:
        """Whether C1's gateway hears of the metadata service."""
        self.proxy.is_down = cut
        if cut:
            self.proxy.cut_all()

    async def post(
        self, gateway: int, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        url = self.gateways[gateway].url + path
        timeout = aiohttp.ClientTimeout(total=SETTLED_S)
        async with self.session.post(url, json=body or {}, timeout=timeout) as answer:
            return answer.status, await answer.json()

    async def create(self) -> int:
        """C1 creates a ledger on all three bookies: E=3, Qw=3, Qa=2."""
        members = {(await bookie.get("/v1/info"))["bookie"] for bookie in self.bookies}

        async def created() -> int:
            status, body = await self.post(0, "/v1/ledgers")
            is_theirs = status == 201 and set(body["fragments"][0]["bookies"]) == members
            return int(body["ledger_id"]) if is_theirs else 0

        # Its gateway may still learn who is there, and in which incarnation.
        ledger_id = await until(created, "a ledger is created")
        self.acknowledged[ledger_id] = {}
        return ledger_id

    async def append(self, ledger_id: int, text: str) -> dict[str, Any]:
        """C1 appends; an acknowledgement is written down."""
        body = {"entries": [{"text": text}]}
        status, reported = await self.post(0, f"/v1/ledgers/{ledger_id}/entries", body)
        if status < 300:
            self.acknowledged[ledger_id][reported["first_entry"]] = text
        return reported

    async def recovered(self, ledger_id: int) -> dict[str, Any]:
        """C2 recovers, again if need be, until the ledger is closed; gives its row."""

        async def is_closed() -> dict[str, Any]:
            status, body = await self.post(1, f"/v1/ledgers/{ledger_id}/recover")
            return body if status == 200 else {}

        return await until(is_closed, "the ledger is closed", SETTLED_S)

    async def lost(self, ledger_id: int) -> dict[int, str]:
        """What was acknowledged to C1, and is denied to C2 for good, with the code that says so."""
        denied = {}
        for entry_id, text in self.acknowledged[ledger_id].items():
            url = f"{self.gateways[1].url}/v1/ledgers/{ledger_id}/entries/{entry_id}?encoding=text"

            async def reported(url: str = url) -> dict[str, Any]:
                async with self.session.get(url) as answer:
                    body: dict[str, Any] = await answer.json()
                    return body if answer.status in (200, 404) else {}

            found = await until(reported, f"entry {entry_id} is there, or denied")
            if "code" in found:
                denied[entry_id] = found["code"]
            else:
                assert found["text"] == text
        return denied

    async def holds(self, bookie: int, ledger_id: int, last: int, *, lac: int = -1) -> None:
        """Wait until a bookie holds an entry, and knows a LAC."""

        async def is_held() -> bool:
            held = await self.bookies[bookie].get(f"/v1/ledgers/{ledger_id}")
            return bool(held) and (
                held["highest_entry"] >= last and held["last_add_confirmed"] >= lac
            )

        await until(is_held, f"b{bookie + 1} holds entry {last}")


@asynccontextmanager
async def world_of(stores: Stores) -> AsyncIterator[World]:
    """All processes, ready."""
    with scratch("ql-bp46-") as folder:
        async with (
            serving(stores) as service,
            proxy_to(service.url) as proxy,
            aiohttp.ClientSession() as session,
        ):
            bookies = tuple(
                Process(
                    name,
                    "tests.cluster.bp46.build",
                    folder,
                    {
                        "METADATA_URLS": service.url,
                        "BOOKIE_NAME": name,
                        "DATA_DIR": str(folder / name),
                        "DURABILITY": "deferred",
                        "AUTO_FIX_COOKIES": "1",
                        "READ_ONLY_BELOW_BYTES": "0",
                        "RESERVE_BYTES": "4096",
                        "SEGMENT_BYTES": str(1 << 20),
                    },
                    session,
                )
                for name in ("b1", "b2", "b3")
            )
            gateways = tuple(
                Process(
                    name, "services.gateway", folder, {"METADATA_URLS": url, **UNHURRIED}, session
                )
                for name, url in (("c1", proxy.url(service.url)), ("c2", service.url))
            )
            processes = (*bookies, *gateways)
            try:
                for process in processes:
                    process.start()
                await asyncio.gather(*[process.ready() for process in processes])
                yield World(bookies, gateways, proxy, service.client, session)
            except BaseException:
                for process in processes:
                    sys.stderr.write(f"--- {process.name}\n{process.log.read_text()[-4000:]}\n")
                raise
            finally:
                for process in processes:
                    if process.running is not None:
                        stop(process.running, signal.SIGKILL, 30)
