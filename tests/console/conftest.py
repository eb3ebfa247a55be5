"""One cluster and one browser for all tests of this folder; each test gets empty pages."""

import sys
from collections.abc import AsyncIterator
from typing import Final

import pytest_asyncio
from playwright.async_api import Browser, Page

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.client import Client
from tests.console.support import Pages, Tabs
from tests.support.browser import chromium
from tests.support.revival import revive
from tests.support.waiting import UNHURRIED

# A bookie that one test kills is not quarantined in the next test.
SETTINGS: Final = {**UNHURRIED, "QUARANTINE_FAILURES": "0"}


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    """A browser. Without one the test is skipped."""
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def pages(browser: Browser) -> Pages:
    """The pages of the browser."""
    return Pages(browser)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared(browser: Browser, servers: StoreServers) -> AsyncIterator[Cluster]:  # noqa: ARG001
    """Four bookies in two zones, autorecovery, and two gateways, of which the second requires tokens.

    Needs `browser` only to start no cluster if the tests are skipped.
    """
    async with running(
        servers.fresh(), bookies=4, zones=("north", "south"), environment=SETTINGS
    ) as started:
        started.notify("gateway-2", REQUIRE_TOKENS="1")
        await started.stop("gateway-2")
        await started.restart("gateway-2")
        yield started


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def admin(shared: Cluster) -> str:
    """A token that may do everything."""
    async with Client(shared.gateways[0]) as client:
        return str((await client.create_token("admin", ["admin:*"]))["token"])


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(shared: Cluster, admin: str) -> AsyncIterator[Cluster]:
    """The shared cluster, in which every process runs and every gateway knows every bookie."""
    yield shared
    sys.stderr.write(shared.log_ends())  # pytest shows it for failed tests only
    await revive(shared, admin)


@pytest_asyncio.fixture(loop_scope="package")
async def tabs(pages: Pages, cluster: Cluster) -> AsyncIterator[Tabs]:
    """Opens pages for a test, and fails the test if a page logs an error that the test does not expect."""
    opened = Tabs(pages, cluster.gateways[0])
    yield opened
    await opened.close()
    assert not opened.unexpected


@pytest_asyncio.fixture(loop_scope="package")
async def page(tabs: Tabs) -> Page:
    """An empty page whose relative URLs are those of the gateway without tokens."""
    return await tabs.open()
