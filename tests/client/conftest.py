"""One cluster for everything that is told here; nobody kills its processes."""

from collections.abc import AsyncIterator

import pytest_asyncio

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    async with running(servers.fresh(), bookies=3, gateways=2) as started:
        yield started
