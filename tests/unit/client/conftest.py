"""One cluster for everything that is told here; nobody kills its processes."""

from collections.abc import AsyncIterator
from typing import Final

import pytest_asyncio

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from tests.support.waiting import UNHURRIED

_ENVIRONMENT: Final = {**UNHURRIED, "COMPRESSED_ANSWER_BYTES_MIN": "1024"}


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    async with running(servers.fresh(), bookies=3, gateways=2, environment=_ENVIRONMENT) as started:
        yield started
