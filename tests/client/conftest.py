"""One cluster for everything that is told here; nobody kills its processes."""

from collections.abc import AsyncIterator

import pytest_asyncio

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from tests.support.waiting import UNHURRIED


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    async with running(servers.fresh(), bookies=3, gateways=2, environment=UNHURRIED) as started:
        yield started
