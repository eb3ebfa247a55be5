"""A bookie as a process: killed and started again, refused with a wrong directory, stopped."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from typer.testing import CliRunner

from loadtest.forked import start
from loadtest.ports import free_ports
from loadtest.stores import Stores, scratch
from loadtest.waiting import stop
from quorumlog.cli.commands import app as cli
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from services.local.config import inherited_environment
from services.local.process import Process as Running
from services.local.process import Program
from tests.support.proxy import proxy_to
from tests.support.waiting import DEADLINE_S, until
from tests.unit.bookie.support import KEY, run_of
from tests.unit.metadata.support import Service, serving, swapped

PATIENT = ChannelLimits(connect_s=DEADLINE_S, quick_s=DEADLINE_S, slow_s=DEADLINE_S)
"""Where a test speaks of an answer: a slow bookie is no silent one."""
ROOT = Path(__file__).resolve().parents[3]


class Process:
    """One bookie's process on a port and directory that stay."""

    def __init__(
        self, service: Service, folder: Path, session: aiohttp.ClientSession, name: str = "b1"
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log"
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = session
        self.settings = {"METADATA_URLS": service.url, "BOOKIE_NAME": name}
        self.process: Running | None = None

    def start(self, **settings: str) -> None:
        environment = inherited_environment() | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}",
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "DATA_DIR": str(self.data),
            "SEGMENT_BYTES": str(1 << 20),
            "READ_ONLY_BELOW_BYTES": "0",
            "RESERVE_BYTES": "4096",
        }
        program = Program(
            self.settings["BOOKIE_NAME"],
            (sys.executable, "-m", "services.bookie"),
            environment | self.settings | settings,
            ROOT,
        )
        self.process = start(program, self.log)

    async def ready(self) -> dict[str, Any]:
        """Its /v1/info, once it is ready."""

        async def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            async with self.session.get(f"{self.url}/health/ready") as answer:
                return answer.status == 200

        await until(is_ready, "the bookie is ready", passing=(aiohttp.ClientError,))
        async with self.session.get(f"{self.url}/v1/info") as answer:
            info: dict[str, Any] = await answer.json()
            return info

    async def ended(self) -> int:
        """Its exit status."""
        process = self.process
        assert process is not None
        await until(lambda: process.poll() is not None, "the process ends")
        assert process.returncode is not None
        return process.returncode

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return await self.ended()


@asynccontextmanager
async def bookie_of(stores: Stores) -> AsyncIterator[Process]:
    with scratch("ql-bookie-") as folder:
        async with serving(stores) as service, aiohttp.ClientSession() as session:
            process = Process(service, folder, session)
            try:
                yield process
            finally:
                if process.process is not None:
                    stop(process.process, signal.SIGKILL, 30)


@pytest.fixture
async def bookie(stores: Stores) -> AsyncIterator[Process]:
    async with bookie_of(stores) as process:
        yield process


CHOSEN: Final = ASSIGNED_ID_END


async def add(client: BookieClient, entry: int, ledger_id: int = 7) -> Status:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    client.add("b1@1", KEY, run_of(ledger_id, [entry]), answered.set_result)
    return await answered


async def test_what_was_acknowledged_survives_a_kill_at_any_moment(bookie: Process) -> None:
    bookie.start()
    assert (await bookie.ready())["bookie"] == "b1@1"
    acknowledged: set[int] = set()
    entry = 0
    for _ in range(2):
        client = BookieClient(lambda _: bookie.url, bookie.session, ChannelLimits())
        adding = []
        for _ in range(300):
            adding.append((entry, asyncio.create_task(add(client, entry))))
            entry += 1
        done, _ = await asyncio.wait(
            [task for _, task in adding], return_when=asyncio.FIRST_COMPLETED
        )
        assert done
        await bookie.kill()
        await asyncio.gather(*[task for _, task in adding])
        acknowledged |= {e for e, task in adding if task.result() is Status.OK}
        await client.close()

        bookie.start()
        info = await bookie.ready()

        assert info["bookie"] == "b1@1"
        assert not info["was_clean"]
        async with bookie.session.get(f"{bookie.url}/v1/ledgers/7") as answer:
            ranges = (await answer.json()).get("ranges", [])
        held = {e for first, last in ranges for e in range(first, last + 1)}
        assert acknowledged <= held


async def test_a_wiped_directory_needs_permission_for_a_new_incarnation(bookie: Process) -> None:
    bookie.start()
    await bookie.ready()
    await bookie.kill()
    shutil.rmtree(bookie.data)

    bookie.start()
    assert await bookie.ended() == 78
    assert "AUTO_FIX_COOKIES=1" in bookie.log.read_text()

    bookie.start(AUTO_FIX_COOKIES="1")
    assert (await bookie.ready())["bookie"] == "b1@2"

    # X18: what an old writer sends beyond a closed ledger's end is not taken under the old name.
    client = BookieClient(lambda _: bookie.url, bookie.session, PATIENT)
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    fenced: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    client.fence("b1@1", 7, KEY, lambda status, _: fenced.set_result(status))
    client.add("b1@1", KEY, run_of(8, [50]), answered.set_result)
    assert await answered is Status.NOT_MINE
    assert await fenced is Status.NOT_MINE
    await client.close()

    # An operator's word is good for one start.
    await bookie.kill()
    shutil.rmtree(bookie.data)
    command = ["bookie", "cookie", "fix", "b1", "--metadata", bookie.settings["METADATA_URLS"]]
    done = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert (done.exit_code, done.output) == (
        0,
        "b1 may start once without the entries that it lost, as incarnation 3 or later\n",
    )
    # It counts as alive for minutes, however slow it is: see the last lines.
    bookie.start(HEARTBEAT_S="60")
    assert (await bookie.ready())["bookie"] == "b1@3"
    show = ["bookie", "cookie", "show", *command[3:], "--data-dir", str(bookie.data), "--json"]
    shown = json.loads((await asyncio.to_thread(CliRunner().invoke, cli, show)).stdout)
    assert (shown["incarnation"], shown["may_fix"], shown["matches"]) == (3, False, True)
    refused = await asyncio.to_thread(
        CliRunner().invoke, cli, ["bookie", "cookie", "delete", *command[3:]]
    )
    assert refused.exit_code == 1
    assert "is alive" in refused.output


async def test_garbage_collection_waits_while_the_metadata_service_is_away(bookie: Process) -> None:
    async with proxy_to(bookie.settings["METADATA_URLS"]) as metadata:
        url = metadata.url(bookie.settings["METADATA_URLS"])
        bookie.start(METADATA_URLS=url, COLLECT_S="0.1")
        await bookie.ready()

        metadata.is_down = True
        metadata.cut_all()

        await until(lambda: '"collect-put-off"' in bookie.log.read_text(), "a look is put off")
        metadata.is_down = False
    assert await bookie.kill(signal.SIGTERM) == 0
    assert '"ERROR"' not in bookie.log.read_text()


async def test_a_deleted_ledger_takes_no_add_of_a_late_writer(bookie: Process) -> None:
    """Issue 13, hole 1: nobody fenced here, and metadata's tombstone is all that the bookie knew."""
    bookie.settings |= {"COLLECT_S": "0.1", "COLLECT_GRACE_S": "0"}
    bookie.start()
    await bookie.ready()
    metadata = MetadataClient((bookie.settings["METADATA_URLS"],))
    client = BookieClient(lambda _: bookie.url, bookie.session, PATIENT)
    row = await metadata.create(
        LedgerMetadata(
            ledger_id=CHOSEN,
            quorum=Quorum(1, 1, 1),
            digest=DigestKind.CRC32C,
            fragments=(Fragment(0, ("b1@1",)),),
            ledger_key=KEY,
        )
    )
    assert await add(client, 0, CHOSEN) is Status.OK
    closed = await swapped(metadata, row.closed(last_entry=0, length=10))
    await metadata.delete(CHOSEN, version=closed.version)

    async def is_dropped() -> bool:
        async with bookie.session.get(f"{bookie.url}/v1/info") as answer:
            return bool((await answer.json())["counters"].get("dropped_ledgers"))

    await until(is_dropped, "the ledger is dropped")

    assert await add(client, 1, CHOSEN) is Status.FENCED
    await bookie.kill()
    bookie.start()
    await bookie.ready()
    await client.close()
    client = BookieClient(lambda _: bookie.url, bookie.session, PATIENT)
    assert await add(client, 1, CHOSEN) is Status.FENCED
    # Copies are compared by digests: what is not held of the ledger proves nothing.
    url, ranges = f"{bookie.url}/v1/ledgers/{CHOSEN}", {"ranges": [[0, 9]]}
    for asked in (bookie.session.get(url), bookie.session.post(f"{url}/digests", json=ranges)):
        async with asked as answer:
            reported = await answer.json()
        assert (answer.status, reported["code"]) == (404, "no-such-ledger")
        assert reported["deleted"] is True
    await client.close()
    await metadata.close()


async def test_a_kill_while_syncs_are_deferred_makes_a_new_incarnation(bookie: Process) -> None:
    bookie.start(DURABILITY="deferred")
    assert (await bookie.ready())["bookie"] == "b1@1"
    assert await bookie.kill(signal.SIGTERM) == 0
    bookie.start(DURABILITY="deferred")
    info = await bookie.ready()
    assert (info["bookie"], info["was_clean"]) == ("b1@1", True)

    await bookie.kill()
    bookie.start(DURABILITY="fsync")

    assert (await bookie.ready())["bookie"] == "b1@2"


async def test_read_only_mode_survives_restarts(bookie: Process) -> None:
    async def reported(state: str) -> int:
        async with bookie.session.put(f"{bookie.url}/v1/state", json={"state": state}) as answer:
            return answer.status

    async def added(entry: int) -> Status:
        client = BookieClient(lambda _: bookie.url, bookie.session, PATIENT)
        try:
            return await add(client, entry)
        finally:
            await client.close()

    bookie.start()
    await bookie.ready()
    assert await added(0) is Status.OK
    assert await reported("asleep") == 422

    for state in ("read-only", "draining"):
        assert await reported(state) == 200
        assert await added(1) is Status.READ_ONLY
        assert await added(0) is Status.OK  # it has that one

    await bookie.kill()
    bookie.start()

    assert (await bookie.ready())["state"] == "draining"
    assert await added(1) is Status.READ_ONLY
    assert await reported("writable") == 200
    assert await added(1) is Status.OK
