"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.stores import Stores, StoreServers, store_servers

_ROOT = Path(__file__).resolve().parent.parent

# For the processes that tests start: they import what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT), str(_ROOT / "shared")))


@pytest.fixture(scope="session")
def servers() -> Iterator[StoreServers]:
    """A Postgres and a Redis, for each worker of pytest-xdist that asks."""
    with store_servers() as running:
        yield running


@pytest.fixture
def stores(servers: StoreServers) -> Stores:
    """A fresh database in Postgres and in Redis."""
    return servers.fresh()
