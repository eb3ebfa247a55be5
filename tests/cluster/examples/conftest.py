"""One cluster and one browser for all tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser

from loadtest import npm
from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from tests.support.browser import chromium
from tests.support.waiting import UNHURRIED


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(servers: StoreServers) -> AsyncIterator[Cluster]:
    """Three bookies and two gateways, which pages of all origins may ask."""
    environment = {**UNHURRIED, "CORS_ORIGINS": "*"}
    async with running(servers.fresh(), bookies=3, gateways=2, environment=environment) as started:
        yield started


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """For requests to the programs; the connection of one that was killed is not used again."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as opened:
        yield opened


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    """A browser. Without one the test is skipped."""
    async with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def packages() -> Path:
    """A folder with the packages of npm that the guide names. Without Node, or a way to npm, the test is skipped."""
    try:
        return npm.installed(Path(__file__).parent)
    except npm.Absent as missing:
        pytest.skip(f"{missing}: the guide's programs were not run")
