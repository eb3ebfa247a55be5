"""What all tests share."""

from collections.abc import Iterator

import pytest

from loadtest.stores import Stores, StoreServers, store_servers


@pytest.fixture(scope="session")
def servers() -> Iterator[StoreServers]:
    """A Postgres and a Redis, for each worker of pytest-xdist that asks."""
    with store_servers() as running:
        yield running


@pytest.fixture
def stores(servers: StoreServers) -> Stores:
    """A fresh database in Postgres and in Redis."""
    return servers.fresh()
