"""What all tests share: the stores, and their event loops."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import asyncpg
import pytest
import uvloop
from hypothesis import HealthCheck, settings

from loadtest import cluster, forked
from loadtest.stores import Stores, StoreServers, store_servers
from services.local.process import die_with
from services.metadata.database import Connection
from services.metadata.migrate import migrate

_ROOT: Final = Path(__file__).resolve().parent.parent
_ON_UVLOOP: Final = ("gateway", "net")
"""Folders whose tests run servers in their own process: on the event loop on which services run, whose
transports are none of asyncio's classes."""

# The same examples in every run, however slow the machine: what fails fails for everyone.
settings.register_profile(
    "quorumlog",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("quorumlog")

pytest_plugins = ["tests.support.retry", "tests.support.scheduling"]

if "PYTEST_XDIST_WORKER" in os.environ:
    # A run that is killed takes its workers with it, and they take all that they have started.
    die_with(os.getppid())

# A cluster has eight processes, which import what the others import.
cluster.started = forked.start
# For the processes that tests start: they import what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT), str(_ROOT / "shared")))
# A CI may have a proxy; what listens here is not asked through it.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
# A look for pydantic's plugins reads the metadata of all that is installed, at the start of each process.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
# For the command line, on a machine that is slow.
os.environ["QUORUMLOG_TIMEOUT"] = "60"


@pytest.fixture(scope="session")
def servers() -> Iterator[StoreServers]:
    """A Postgres and a Redis, for each worker of pytest-xdist that asks."""
    with store_servers() as running:
        yield running


@pytest.fixture(scope="session")
def template(servers: StoreServers) -> str:
    """The DSN of a database with tables: a copy of it is made in a third of the time that the migrations take."""
    dsn = servers.fresh().postgres_dsn

    async def fill() -> None:
        connection = await asyncpg.connect(dsn, connection_class=Connection)
        try:
            await migrate(connection)
        finally:
            await connection.close()

    # In a thread of its own: a test's event loop may run in this one.
    thread = threading.Thread(target=asyncio.run, args=(fill(),))
    thread.start()
    thread.join()
    return dsn


@pytest.fixture
def stores(servers: StoreServers, request: pytest.FixtureRequest) -> Stores:
    """A new database in Postgres and in Redis, in Postgres with nothing but tables. The mark `without_tables` of a test or
    module: without those too.
    """
    if request.node.get_closest_marker("without_tables"):
        return servers.fresh()
    return servers.fresh(like=request.getfixturevalue("template"))


def _folder(item: pytest.Item) -> str:
    """The folder below `unit`, `model` and the like; that of a test beside these itself."""
    parts = item.path.relative_to(_ROOT / "tests").parts
    return parts[1] if len(parts) > 2 else parts[0]


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which event loop a test runs on."""
    on_uvloop = _folder(item) in _ON_UVLOOP
    return {"loop": uvloop.new_event_loop if on_uvloop else asyncio.new_event_loop}
