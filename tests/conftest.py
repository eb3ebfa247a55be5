"""What all tests share: the stores, and which tests start processes."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from loadtest.stores import Stores, StoreServers, store_servers
from services.local.process import die_with

_ROOT: Final = Path(__file__).resolve().parent.parent
_PURE: Final = (
    "explore", "fuzz", "mutants", "protocol", "regressions", "scenarios", "sim", "wire",
)  # fmt: skip
"""Folders whose tests run in one process, without servers; all others count as `processes`."""

_ON_UVLOOP: Final = ("gateway", "net")
"""Folders whose tests run servers in their own process: on the event loop on which services run, whose
transports are none of asyncio's classes."""

_FIRST: Final = ("spark", "transactions")
"""Folders with tests of a minute, which would be the last by name: one worker alone would end the run."""

_SHARED: Final = {"cluster", "session", "wheel"}
"""Fixtures that take seconds to make, and that the tests of a folder share."""

# The same examples in every run, however slow the machine: what fails fails for everyone.
settings.register_profile(
    "quorumlog",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("quorumlog")

pytest_plugins = ["tests.support.retry"]

if "PYTEST_XDIST_WORKER" in os.environ:
    # A run that is killed takes its workers with it, and they take all that they have started.
    die_with(os.getppid())

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


@pytest.fixture
def stores(servers: StoreServers) -> Stores:
    """A fresh database in Postgres and in Redis."""
    return servers.fresh()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which event loop a test runs on."""
    is_on_uvloop = _folder(item) in _ON_UVLOOP
    return {"loop": uvloop.new_event_loop if is_on_uvloop else asyncio.new_event_loop}


def _folder(item: pytest.Item) -> str:
    """The folder in `tests` that a test belongs to, or the file right there."""
    return item.path.relative_to(_ROOT / "tests").parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes. Any worker may run any test: ports are leased (ADR 2), and
    each worker has servers and clusters of its own. Those of a folder that share a cluster, or Spark's
    session, go to one worker, one after another, so that there is one cluster for them, and one JVM. (A test
    on an event loop of its own between two on the package's would end the cluster of those.)
    """
    items.sort(key=lambda item: _folder(item) not in _FIRST)
    for item in items:
        folder = _folder(item)
        if folder not in _PURE and not folder.endswith(".py"):
            item.add_marker(pytest.mark.processes)
        if _SHARED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(folder))
