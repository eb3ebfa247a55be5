"""One cluster for tests that kill its processes: whatever a test ends runs again before the next test."""

import sys
from collections.abc import AsyncIterator
from typing import Final

import pytest_asyncio

from loadtest.cluster import Cluster, running
from tests.support.revival import revive
from tests.support.waiting import UNHURRIED

BOOKIES: Final = 6

# A bookie that one test kills is no suspect of the next test.
SETTINGS: Final = {**UNHURRIED, "QUARANTINE_FAILURES": "0"}


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared() -> AsyncIterator[Cluster]:
    """Six bookies and two gateways with certificates; with stores of their own, which are killed too."""
    async with running(
        None, bookies=BOOKIES, gateways=2, environment=SETTINGS, tls=True
    ) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(shared: Cluster) -> AsyncIterator[Cluster]:
    """The shared cluster, in which every process runs and every gateway knows every bookie."""
    yield shared
    # What pytest captures, it shows of failed tests only.
    sys.stderr.write(shared.log_ends())
    await revive(shared)
