"""The commands of docs/guides/database.md do what the page says."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from loadtest.ports import free_ports
from loadtest.stores import Stores, quick_postgres, scratch
from quorumlog import header
from quorumlog.protocol.messages import CasStatus
from quorumlog.wire.bodies import witnesses_to_header
from services.local.embedded import _environment
from tests.support.standby import Server, dsn_of
from tests.support.tools import needs
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, Service, is_ready, serving
from tests.unit.metadata.test_went_back import is_reported

PAGE = Path(__file__).resolve().parents[3] / "docs/guides/database.md"
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DUMPS = ("A dump", "Restore drill", "Restore a dump")
LOG = ("Point in time",)
STANDBY = ("A standby", "Failover")


def commands() -> dict[str, list[str]]:
    """By heading."""
    text = PAGE.read_text()
    found = {heading: BLOCK.findall(body) for heading, body in SECTION.findall(text)}
    assert sum(map(len, found.values())) == len(BLOCK.findall(text)), "one above all headings"
    return {heading: blocks for heading, blocks in found.items() if blocks}


@dataclass
class Machine:
    """A server with the database `quorumlog`, and an operator's shell."""

    server: Server
    folder: Path
    environment: dict[str, str]
    left: dict[str, list[str]] = field(default_factory=commands)
    others: list[Server] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.server.postgres.dsn("quorumlog")

    def stores(self, stores: Stores, dsn: str = "") -> Stores:
        return replace(stores, postgres_dsn=dsn or self.dsn)

    async def run(self, heading: str, **environment: str) -> str:
        """Run the next commands below a heading; returns what they print."""
        process = await asyncio.create_subprocess_exec(
            "sh", "-euc", self.left[heading].pop(0),
            env={**self.environment, **environment},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode().strip()

    def has_run(self, *headings: str) -> None:
        """Assert that no command below these headings is left."""
        assert not any(self.left[heading] for heading in headings)

    async def another(self, data: Path) -> Server:
        """A server that an operator starts on this data."""
        (port,) = free_ports(1)
        password = data.parent / "password"
        password.touch(mode=0o600)
        password.write_text(self.server.postgres.password)
        postgres = await asyncio.to_thread(quick_postgres, data.parent, port)
        other = Server(postgres, data.parent)
        self.others.append(other)
        await other.start()
        return other


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    with scratch("ql-guide-") as folder:
        (port,) = free_ports(1)
        home = folder / "one"
        postgres = await asyncio.to_thread(quick_postgres, home, port)
        for name in ("backup", "archive", "new", "standby"):
            (folder / name).mkdir()
        owner = (home / "data").stat()
        os.chown(folder / "archive", owner.st_uid, owner.st_gid)
        server = Server(postgres, home)
        environment = {
            **_environment(),
            "PATH": f"{postgres.binaries}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "POSTGRES_DSN": postgres.dsn("quorumlog"),
            "DRILL_DSN": postgres.dsn("drill"),
            "ADMIN_DSN": postgres.dsn(),
            "BACKUP": str(folder / "backup"),
            "ARCHIVE": str(folder / "archive"),
            "NEW_DATA": str(folder / "new" / "data"),
            "STANDBY_DATA": str(folder / "standby" / "data"),
        }
        running = Machine(server, folder, environment)
        try:
            await server.start()
            await server.sql("CREATE DATABASE quorumlog")
            yield running
        finally:
            for each in (*running.others, server):
                await each.stop()


def test_each_command_of_the_page_is_in_a_test() -> None:
    assert list(commands()) == [*DUMPS, *LOG, *STANDBY]


async def change(service: Service, ledger_id: int) -> None:
    """A change that the backup lacks."""
    row = await service.client.get(ledger_id)
    assert (await service.client.cas(row.in_recovery()))[0] is CasStatus.OK


@needs("curl")
async def test_a_dump_is_restored_and_its_gaps_are_told(stores: Stores, machine: Machine) -> None:
    async with serving(machine.stores(stores)) as service:
        row = await service.client.create(DRAFT)
        await machine.run("A dump")
        ledgers, newest = (await machine.run("Restore drill")).splitlines()[-3:-1]
        assert ledgers == "1"
        assert newest.startswith("20")
        await change(service, row.ledger_id)
        witnesses = service.client.witnesses

    await machine.run("Restore a dump")

    secret = machine.folder / "cluster-secret"
    secret.write_text(f"{'0123456789abcdef' * 4}\n")
    async with serving(
        machine.stores(stores), cluster_secret=SecretStr(secret.read_text())
    ) as service:
        assert await service.client.get(row.ledger_id) == row
        # As each bookie and gateway does once a second.
        await service.send(
            "POST", "/v1/witnesses", headers={header.WITNESSES: witnesses_to_header(witnesses)}
        )
        await until(lambda: is_reported(service), "what the dump lacks is told")
        reported = await machine.run(
            "Restore a dump", METADATA_URL=service.url, CLUSTER_SECRET_FILE=str(secret)
        )
        assert {missing["witness"] for missing in json.loads(reported)["missing"]} == set(witnesses)
    machine.has_run(*DUMPS)


async def test_a_database_is_restored_from_its_wal_whole(stores: Stores, machine: Machine) -> None:
    heading = "Point in time"
    await machine.run(heading)
    await machine.server.stop()
    await machine.server.start()
    async with serving(machine.stores(stores)) as service:
        await machine.run(heading)
        row = await service.client.create(DRAFT)
        await change(service, row.ledger_id)
        row = await service.client.get(row.ledger_id)
        witnesses = service.client.witnesses
    await machine.run(heading)
    await until(lambda: is_archived(machine), "the log is archived")
    await machine.server.kill()

    await machine.run(heading)
    restored = await machine.another(Path(machine.environment["NEW_DATA"]))

    dsn = restored.postgres.dsn("quorumlog")
    await until(lambda: is_primary(restored), "the server has replayed its log")
    async with serving(machine.stores(stores, dsn)) as service:
        service.client.witnesses = witnesses
        assert await service.client.get(row.ledger_id, proof=True) == row
        await service.client.create(DRAFT)
        assert await is_ready(service)
    machine.has_run(*LOG)


async def is_archived(machine: Machine) -> bool:
    # The segment that the backup ended in, and the one with the changes.
    last = await machine.server.sql(
        "SELECT last_archived_wal >= pg_walfile_name(pg_current_wal_lsn() - 1) FROM pg_stat_archiver"
    )
    return last == "t"


async def is_primary(server: Server) -> bool:
    return await server.sql("SELECT pg_is_in_recovery()") == "f"


async def test_a_standby_takes_over_as_the_page_says(stores: Stores, machine: Machine) -> None:
    await machine.run("A standby")
    standby = await machine.another(Path(machine.environment["STANDBY_DATA"]))
    await machine.server.until_followed()
    reported = await machine.run("A standby")
    await until(lambda: is_synchronous(machine.server), "the standby is synchronous")
    assert "streaming|" in reported
    both = dsn_of(machine.dsn, machine.server.address, standby.address)
    async with serving(machine.stores(stores, both)) as service:
        row = await service.client.create(DRAFT)

        await machine.server.kill()
        for _ in range(len(machine.left["Failover"])):
            await machine.run("Failover", STANDBY_DSN=standby.postgres.dsn("quorumlog"))

        await until(lambda: is_ready(service), "the service has the new primary")
        assert await service.client.get(row.ledger_id, proof=True) == row
        await service.client.create(DRAFT)
    machine.has_run(*STANDBY)


async def is_synchronous(server: Server) -> bool:
    shown = "SELECT state, sync_state FROM pg_stat_replication"
    return await server.sql(shown) == "streaming|sync"
