"""The service as a process: it may be killed in the midst of changes, and it ends in order."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.forked import start
from loadtest.ports import free_ports
from loadtest.stores import Stores
from loadtest.waiting import stop
from quorumlog.net.metadata_client import MetadataClient
from services.local.process import Process, Program
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, PATIENT_S, imagine_bookies, swapped

ROOT = Path(__file__).parents[3]
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A service's process."""

    process: Process
    url: str
    log: Path


@contextmanager
def running(stores: Stores, folder: Path) -> Iterator[Running]:
    port = free_ports(1)[0]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "shared"), str(ROOT))),
        "PORT": str(port),
        "POSTGRES_DSN": stores.postgres_dsn,
        "REDIS_URL": stores.redis_url,
    }
    argv = (sys.executable, "-m", "services.metadata")
    log = folder / f"metadata-{port}.log"
    process = start(Program(name="metadata", argv=argv, env=environment), log)
    try:
        yield Running(process, f"http://127.0.0.1:{port}", log)
    finally:
        stop(process, signal.SIGTERM, STOP_S)


async def is_ready(service: Running, session: aiohttp.ClientSession) -> bool:
    assert service.process.poll() is None, service.log.read_text()
    async with session.get(f"{service.url}/health/ready") as response:
        return response.status == 200


async def test_changes_survive_a_service_killed_amid_them(stores: Stores, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        with ExitStack() as stack:
            one, two = (stack.enter_context(running(stores, tmp_path)) for _ in range(2))
            for service in (one, two):
                await until(
                    lambda service=service: is_ready(service, session),  # type: ignore[misc]
                    "the service is ready",
                    passing=(aiohttp.ClientError,),
                )
            await imagine_bookies(stores)
            client = MetadataClient([one.url, two.url], session, deadline_s=PATIENT_S)
            rows = [await client.create(DRAFT) for _ in range(8)]
            killed = asyncio.Event()

            async def change(index: int) -> None:
                """Change one row until the service is dead, and some more."""
                more = 5
                while more:
                    more -= killed.is_set()
                    row = rows[index]
                    border = row.last_fragment.first_entry + 10
                    wanted = row.with_ensemble(border, ("b1@1", "b2@1", f"b{border}@1"))
                    now = await swapped(client, wanted)
                    assert (now.version, now.fragments) == (row.version + 1, wanted.fragments)
                    rows[index] = now

            async with asyncio.TaskGroup() as tasks:
                for index in range(len(rows)):
                    tasks.create_task(change(index))
                await until(lambda: min(row.version for row in rows) > 3, "changes are under way")
                one.process.kill()
                killed.set()

            assert [await client.get(row.ledger_id) for row in rows] == rows


async def test_sigterm_ends_streams_and_process_in_order(stores: Stores, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        with running(stores, tmp_path) as service:
            await until(
                lambda: is_ready(service, session),
                "the service is ready",
                passing=(aiohttp.ClientError,),
            )
            async with session.get(f"{service.url}/v1/changes") as stream:
                await stream.content.readline()

                service.process.send_signal(signal.SIGTERM)

                async for _ in stream.content:
                    pass
            await until(lambda: service.process.poll() is not None, "the process ends")
            assert service.process.returncode == 0, service.log.read_text()
